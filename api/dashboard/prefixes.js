// The prefix cache as a tree: chains of blocks, who hangs on them, what goes next. Asks only while it can be seen.

import { count, element, plural, setText } from "./format.js";
import { errorText } from "./sse.js";

const POLL_MS = 2000;
/** Answers kept for looking back. */
const KEEP_ANSWERS = 120;
const ROWS_AT_FIRST = 40;

export class PrefixTree {
  /** `onFollow(blocks, step)` is called to follow a chain's blocks through the map. */
  constructor(root, onFollow) {
    this.root = root;
    this.onFollow = onFollow;
    this.list = root.querySelector(".tree");
    this.more = root.querySelector("#prefixes-more");
    this.answers = [];
    this.rows = new Map();
    this.isSeen = false;
    this.showAll = false;
    this.asked = -Infinity;
    root.querySelector("#empty-cache").addEventListener("click", () => this.empty());
    this.more.addEventListener("click", () => {
      this.showAll = !this.showAll;
      this.drawn = null;
      if (this.view) this.render(this.view);
    });
    new IntersectionObserver((entries) => {
      this.isSeen = entries[entries.length - 1].isIntersecting;
    }).observe(root);
  }

  reset() {
    this.answers = [];
    this.drawn = null;
  }

  /** Has the server forget all prefixes: the next chats begin as on its first day. */
  async empty() {
    try {
      const response = await fetch("/reset_prefix_cache", { method: "POST" });
      if (!response.ok) setText(this.root.querySelector("#prefixes-note"), await errorText(response));
    } catch {
      return; // the connection's banner tells that the server is away
    }
    this.asked = -Infinity;
  }

  /** Asks again where it is time to; `change` is called when there is something new to draw. */
  poll(change) {
    const now = performance.now();
    if (!this.isSeen || document.hidden || now - this.asked < POLL_MS) return;
    this.asked = now;
    fetch("/inspect/prefixes?limit=500")
      .then((response) => (response.ok ? response.json() : null))
      .then((answer) => {
        if (answer === null) return;
        this.answers.push(answer);
        if (this.answers.length > KEEP_ANSWERS) this.answers.shift();
        change();
      })
      .catch(() => {}); // the connection's banner tells that the server is away
  }

  render(view) {
    this.view = view;
    const { moment, isLive } = view;
    const known = isLive ? this.answers : this.answers.filter((answer) => answer.step <= moment.step);
    const answer = known[known.length - 1];
    if (answer === undefined) {
      this.drawn = null;
      this.list.replaceChildren();
      this.rows.clear();
      this.more.hidden = true;
      setText(
        this.root.querySelector("#prefixes-note"),
        isLive ? "" : "What the cache held at that moment was not asked for.",
      );
      return;
    }
    if (this.drawn !== answer) this.draw(answer);
  }

  draw(answer) {
    this.drawn = answer;
    const all = inOrder(answer.nodes);
    const shown = this.showAll ? all : all.slice(0, ROWS_AT_FIRST);
    const held = answer.nodes.reduce((sum, node) => sum + node.held, 0);
    const rest = answer.left_out ? `, ${plural(answer.left_out, "more chain")} not told` : "";
    const note = all.length
      ? `${plural(all.length, "chain")}, ${plural(held, "block")} on the device${rest}`
      : "The cache is empty";
    setText(this.root.querySelector("#prefixes-note"), `${note}. As of step ${count(answer.step)}.`);
    const longest = Math.max(1, ...all.map(({ node, start }) => start + node.num_blocks));
    const kept = new Set(shown.map(({ node }) => String(node.id)));
    for (const [id, row] of this.rows) {
      if (kept.has(id)) continue;
      row.item.remove();
      this.rows.delete(id);
    }
    shown.forEach((place, index) => {
      const id = String(place.node.id);
      const row = this.rows.get(id) ?? this.makeRow(id);
      this.fill(row, place, longest, answer.step);
      if (this.list.children[index] !== row.item) this.list.insertBefore(row.item, this.list.children[index] ?? null);
    });
    this.more.hidden = all.length <= ROWS_AT_FIRST;
    setText(this.more, this.showAll ? "Show fewer" : `Show all ${count(all.length)} chains`);
  }

  makeRow(id) {
    const bar = element("span", { class: "chain-bar" }, element("span", { class: "chain-held" }));
    const text = element("span", { class: "chain-text" });
    const button = element("button", { type: "button", class: "small", text: "Follow" });
    const item = element("li", {}, element("span", { class: "chain-lane", "aria-hidden": "true" }, bar), text, button);
    const row = { item, bar, text, button };
    this.rows.set(id, row);
    return row;
  }

  fill(row, { node, start, depth }, longest, step) {
    row.bar.style.left = `${(100 * start) / longest}%`;
    row.bar.style.width = `${(100 * node.num_blocks) / longest}%`;
    row.bar.firstChild.style.width = `${(100 * node.held) / Math.max(1, node.num_blocks)}%`;
    row.bar.classList.toggle("on", node.requests.length > 0);
    row.item.classList.toggle("next", node.evicts_at !== null && node.evicts_at < 8);
    setText(row.text, describeNode(node, depth));
    row.item.dataset.requests = node.requests.length;
    row.button.disabled = node.held === 0;
    row.button.setAttribute("aria-label", `Follow this chain of ${plural(node.num_blocks, "block")} through the map`);
    row.button.onclick = () => this.onFollow(node.blocks, step);
  }
}

function describeNode(node, depth) {
  const parts = [plural(node.num_blocks, "block")];
  if (depth > 0) parts.push(`after level ${depth}`);
  if (node.held === 0 && node.in_host === 0) parts.push("evicted");
  else if (node.held < node.num_blocks) parts.push(`${count(node.held)} on the device`);
  if (node.in_host) parts.push(`${count(node.in_host)} in host memory`);
  parts.push(node.requests.length ? `${plural(node.requests.length, "request")} on it` : "nobody on it");
  parts.push(plural(node.hits, "hit"));
  if (node.evicts_at === 0) parts.push("evicted next");
  else if (node.evicts_at !== null) parts.push(`eviction place ${count(node.evicts_at + 1)}`);
  return parts.join(", ");
}

/** Chains that hold something, and those that they go on from. */
function worthTelling(nodes) {
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const told = new Set();
  for (let node of nodes) {
    if (node.held + node.in_host === 0) continue;
    for (; node !== undefined && !told.has(node); node = byId.get(node.parent)) told.add(node);
  }
  return nodes.filter((node) => told.has(node));
}

/** The chains, each after its parent: {node, depth, start: blocks before it}; those that most requests use first. */
function inOrder(nodes) {
  const children = new Map();
  const known = new Set(nodes.map((node) => node.id));
  for (const node of worthTelling(nodes)) {
    // A chain whose parent was left out of the answer stands at the root.
    const parent = known.has(node.parent) ? node.parent : null;
    children.set(parent, [...(children.get(parent) ?? []), node]);
  }
  const order = (one, other) =>
    other.requests.length - one.requests.length || other.hits - one.hits || other.used_step - one.used_step;
  const places = [];
  const pending = (children.get(null) ?? [])
    .sort(order)
    .reverse()
    .map((node) => ({ node, depth: 0, start: 0 }));
  while (pending.length) {
    const place = pending.pop();
    const { node } = place;
    const isRoot = node.num_blocks === 0;
    if (!isRoot) places.push(place);
    const below = (children.get(node.id) ?? []).sort(order).reverse();
    const depth = isRoot ? place.depth : place.depth + 1;
    for (const child of below) pending.push({ node: child, depth, start: place.start + node.num_blocks });
  }
  return places;
}
