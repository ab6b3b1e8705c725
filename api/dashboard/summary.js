// "What is happening": the moment in plain sentences, for readers of text alone. Sentences are lists of pieces:
// strings, and {id} for a request.

import { count, duration, percent, pieces, plural, ranges } from "./format.js";

const MARKS_SHOWN = 3;
const KNOWN_SECONDS = 0.5;
/** Evictions and preemptions of the last so many seconds are "lately". */
const LATELY_SECONDS = 60;

/** A request's newest wait in words: {present, text}; null where it was never seen to wait. */
export function waitOf(request, now) {
  const { lastWait: wait } = request;
  if (wait === null) return null;
  const present = wait.until === null && request.status !== "finished";
  const seconds = (wait.until ?? request.timings.finished ?? now) - wait.since;
  // Seen from frame to frame, so what is short is not known to the millisecond; the request's story tells it.
  if (seconds < KNOWN_SECONDS) return { present, text: present ? `waits ${wait.text}` : `waited briefly ${wait.text}` };
  const length = duration(seconds);
  return { present, text: present ? `waits ${wait.text}, for ${length} so far` : `waited ${length} ${wait.text}` };
}

/** The sentences of a moment. */
export function summarise(moment) {
  return [load(moment), biggest(moment), saved(moment), ...waits(moment), evicted(moment), preempted(moment)];
}

function load({ kv, requests }) {
  const { blocks } = kv;
  const sentence = `${plural(kv.requests.running, "request")} run, ${count(kv.requests.waiting)} wait. `;
  const used = `${count(blocks.used)} of ${plural(kv.num_blocks, "block")} are in use (${percent(blocks.used, kv.num_blocks)}), `;
  const rest = `${count(blocks.cached)} cached, ${count(blocks.free)} free, ${count(blocks.pinned)} pinned.`;
  const reserved = kv.contiguous_blocks
    ? ` Reserving each running request's full length would hold ${count(kv.contiguous_blocks)}.`
    : "";
  return [requests.length ? sentence + used + rest + reserved : `No request runs or waits. ${used}${rest}`];
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
  const last = [...moment.requests, ...moment.ended]
    .filter((request) => request.lastWait !== null)
    .sort((one, other) => other.lastWait.since - one.lastWait.since)[0];
  if (last === undefined) return [["No request waits."]];
  return [
    ["No request waits. The last one that did: ", { id: last.id }, ...pieces(` ${waitOf(last, moment.now).text}.`)],
  ];
}

function evicted(moment) {
  const lately = moment.evictions.filter((mark) => moment.now - mark.time <= LATELY_SECONDS);
  if (lately.length === 0) return ["Nothing was evicted lately."];
  const blocks = lately.reduce((sum, mark) => sum + mark.number, 0);
  const told = lately.slice(0, MARKS_SHOWN).map((mark) => `${which(mark)} at step ${count(mark.step)}`);
  const rest = lately.length > MARKS_SHOWN ? "; …" : ".";
  return [`Evicted lately: ${plural(blocks, "block")}, ${told.join("; ")}${rest}`];
}

function which({ ids, number }) {
  return ids.length ? shortRanges(ids) : plural(number, "block");
}

function shortRanges(ids) {
  const sorted = [...ids].sort((one, other) => one - other);
  return ranges(sorted.slice(0, 12)) + (sorted.length > 12 ? ` and ${sorted.length - 12} more` : "");
}

function preempted(moment) {
  const mark = moment.preemptions.find(({ time }) => moment.now - time <= LATELY_SECONDS);
  if (mark === undefined) return [`No request was preempted lately (${count(moment.kv.preemptions)} in all).`];
  const begin = [{ id: mark.id }, ` was preempted at step ${count(mark.step)}`];
  if (mark.forId === null) return [...begin, "."];
  const whom = mark.forId === mark.id ? "itself, the last in the order" : { id: mark.forId };
  return [...begin, " for ", whom, "."];
}
