// "What is happening": the moment in plain sentences, for readers of text alone. Sentences are lists of pieces:
// strings, and {id} for a request.

import { bytes, count, duration, percent, pieces, plural, ranges } from "./format.js";
import { LATELY_STEPS } from "./state.js";

const MARKS_SHOWN = 3;
const LATELY = `in the last ${count(LATELY_STEPS)} steps`;

const WAITED_FOR = {
  queue: "in the queue",
  blocks: "for blocks",
  rows: "for a place",
  budget: "for the token budget",
  group: "for its first choice",
};
/** Seconds. Shorter waits, such as that for the next step to begin, are nobody's question. */
const SHORTEST_WAIT = 0.001;

/** What a request waits for, or else how long it waited for what, in words: {present, text}; null where it never did. */
export function waitOf({ wait, wait_since: since, waited }, now) {
  if (wait) return { present: true, text: `waits ${wait}, for ${duration(now - since)} so far` };
  const spans = Object.entries(waited).filter(([, seconds]) => seconds >= SHORTEST_WAIT);
  if (spans.length === 0) return null;
  spans.sort(([, one], [, other]) => other - one);
  const told = spans.map(([reason, seconds]) => `${duration(seconds)} ${WAITED_FOR[reason] ?? `for ${reason}`}`);
  return { present: false, text: `waited ${told.join(", ")}` };
}

function secondsWaited({ waited }) {
  return Object.values(waited).reduce((sum, seconds) => sum + seconds, 0);
}

/** The sentences of a moment. */
export function summarise(moment) {
  return [
    load(moment),
    memory(moment),
    biggest(moment),
    saved(moment),
    ...waits(moment),
    evicted(moment),
    preempted(moment),
  ];
}

function load({ kv, requests }) {
  const { blocks } = kv;
  const { running, waiting } = kv.requests;
  const sentence = `${plural(running, "request")} ${running === 1 ? "runs" : "run"}, ${count(waiting)} ${waiting === 1 ? "waits" : "wait"}. `;
  const used = `${count(blocks.used)} of ${plural(kv.num_blocks, "block")} are in use (${percent(blocks.used, kv.num_blocks)}), `;
  const rest = `${count(blocks.cached)} cached, ${count(blocks.free)} free, ${count(blocks.pinned)} pinned.`;
  return [(requests.length ? sentence : "No request runs or waits. ") + used + rest];
}

function memory({ kv }) {
  const inUse = bytes(kv.blocks.used * kv.bytes.per_block);
  const wasted = plural(kv.slots.wasted, "slot");
  const text = `That is ${inUse} of the pool's ${bytes(kv.bytes.pool)}, with ${wasted} wasted in tails.`;
  if (kv.requests.running === 0) return [text];
  const reserved = `${plural(kv.contiguous_blocks, "block")} (${bytes(kv.contiguous_blocks * kv.bytes.per_block)})`;
  return [`${text} Contiguous memory for all that runs would take ${reserved}.`];
}

function biggest(moment) {
  let best = null;
  for (const request of moment.requests) {
    const held = request.blocks.filter((block) => block >= 0).length;
    if (held > 0 && (best === null || held > best.held)) best = { request, held };
  }
  if (best === null) return ["No request holds blocks."];
  const shared = moment.numShared(best.request.blocks);
  return [{ id: best.request.id }, ` holds most blocks: ${count(best.held)}, ${count(shared)} of them shared.`];
}

function saved({ kv }) {
  const { lookup_tokens: looked, hit_tokens: hit } = kv.prefix_cache;
  const tokens = `The cache saved ${count(hit)} of ${count(looked)} prompt tokens (${percent(hit, looked)})`;
  return [
    `${tokens}, which is ${plural(Math.floor(hit / kv.block_size), "block")} not computed again; sharing saves ${plural(kv.blocks_saved_by_sharing, "block")} right now.`,
  ];
}

function waits(moment) {
  const waiting = moment.requests.filter((request) => request.status === "waiting");
  if (waiting.length > 0) {
    const [first, ...others] = waiting;
    const text = waitOf(first, moment.now)?.text ?? "waits for the next step to begin";
    const more = others.length ? ` ${count(others.length)} more behind it.` : "";
    return [[{ id: first.id }, ...pieces(` ${text}.${more}`)]];
  }
  const [held] = moment.requests.filter((request) => request.wait);
  if (held !== undefined) {
    return [["No request is queued. ", { id: held.id }, ...pieces(` ${waitOf(held, moment.now).text}.`)]];
  }
  const [longest] = [...moment.requests, ...moment.ended]
    .filter((request) => waitOf(request, moment.now) !== null)
    .sort((one, other) => secondsWaited(other) - secondsWaited(one));
  if (longest === undefined) return [["No request waits."]];
  const text = ` ${waitOf(longest, moment.now).text}.`;
  return [["No request waits. Of those in view one waited longest: ", { id: longest.id }, ...pieces(text)]];
}

function evicted(moment) {
  const { evictions: lately } = moment;
  if (lately.length === 0) return [`Nothing was evicted ${LATELY}.`];
  const blocks = lately.reduce((sum, mark) => sum + mark.number, 0);
  const told = lately.slice(0, MARKS_SHOWN).map((mark) => `${which(mark)} at step ${count(mark.step)}`);
  const rest = lately.length > MARKS_SHOWN ? "; …" : ".";
  return [`Evicted ${LATELY}: ${plural(blocks, "block")}, ${told.join("; ")}${rest}`];
}

function which({ ids, number }) {
  return ids.length ? shortRanges(ids) : plural(number, "block");
}

function shortRanges(ids) {
  const sorted = [...ids].sort((one, other) => one - other);
  return ranges(sorted.slice(0, 12)) + (sorted.length > 12 ? ` and ${sorted.length - 12} more` : "");
}

function preempted(moment) {
  const [mark] = moment.preemptions;
  if (mark === undefined) return [`No request was preempted ${LATELY} (${count(moment.kv.preemptions)} in all).`];
  const begin = [{ id: mark.id }, ` was preempted at step ${count(mark.step)}`];
  if (mark.forId === null) return [...begin, "."];
  const whom = mark.forId === mark.id ? "itself, the last in the order" : { id: mark.forId };
  return [...begin, " for ", whom, "."];
}
