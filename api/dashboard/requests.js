// The requests as rows, of which only those in sight are in the page: logical table, state, tokens, waits, speed.

import { count, duration, element, idElement, percent, plural, rate, setText } from "./format.js";
import { ownerIndex, themeColors } from "./map_paint.js";
import { waitOf } from "./summary.js";

/** Rows above and below those in sight, so that scrolling meets no gap. */
const EXTRA_ROWS = 3;
const FINISH_WORDS = {
  stop: "done",
  length: "done: length",
  abort: "cancelled",
  error: "failed",
  timeout: "timed out",
  refused: "refused",
};

/** Seconds from arrival to the first token; null before it. */
export function timeToFirstToken({ timings }) {
  return timings.first_token === null ? null : timings.first_token - timings.arrived;
}

/** Tokens a second since the first one; null before there are two. */
export function tokensPerSecond(request, now) {
  const { first_token: first, finished } = request.timings;
  if (first === null || request.num_output_tokens < 2) return null;
  const seconds = (finished ?? now) - first;
  return seconds > 0 ? (request.num_output_tokens - 1) / seconds : null;
}

export function stateText(request) {
  if (request.status === "finished") return FINISH_WORDS[request.finish_reason] ?? request.finish_reason;
  if (request.status === "waiting") return request.num_preemptions ? "preempted" : "waits";
  // All but the newest token is computed while it decodes. What is computed is of the context, which may have slid.
  if (request.num_computed_tokens >= request.num_tokens - request.context_start - 1) return "decode";
  return request.num_output_tokens > 0 ? "recompute" : "prefill";
}

export class RequestRows {
  /** `onOpen(id)` is called for the row that is chosen, `onFollow(id)` for its follow button. */
  constructor(root, onOpen, onFollow) {
    this.root = root;
    this.onOpen = onOpen;
    this.onFollow = onFollow;
    this.body = root.querySelector(".rows-body");
    this.table = root.querySelector(".rows");
    this.space = root.querySelector(".rows-space");
    this.filter = root.querySelector("#request-filter");
    this.rows = new Map();
    this.opened = null;
    this.body.addEventListener("scroll", () => this.redraw(), { passive: true });
    this.filter.addEventListener("input", () => this.redraw());
    this.body.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => this.redraw()).observe(this.body);
  }

  setTheme() {
    this.colors = themeColors();
    for (const row of this.rows.values()) row.strip.dataset.drawn = "";
    this.redraw();
  }

  redraw() {
    if (this.moment) this.render(this.moment);
  }

  render(moment) {
    this.moment = moment;
    const wanted = this.filter.value.trim();
    const matches = (request) => !wanted || request.id.includes(wanted) || request.tenant.includes(wanted);
    const shown = [...moment.requests, ...moment.ended].filter(matches);
    this.order = shown.map((request) => request.id);
    const height = parseFloat(getComputedStyle(this.body).getPropertyValue("--row-height"));
    this.space.style.height = `${shown.length * height}px`;
    this.table.setAttribute("aria-rowcount", shown.length + 1);
    setText(
      this.root.querySelector("#requests-count"),
      `${count(moment.kv.requests.running)} running, ${count(moment.kv.requests.waiting)} waiting`,
    );
    const none = this.root.querySelector("#no-requests");
    none.hidden = shown.length > 0;
    setText(none, wanted ? `No request matches “${wanted}”.` : "No requests. Send some chats and watch the blocks move.");
    const first = Math.max(0, Math.floor(this.body.scrollTop / height) - EXTRA_ROWS);
    const last = Math.min(
      shown.length,
      Math.ceil((this.body.scrollTop + this.body.clientHeight) / height) + EXTRA_ROWS,
    );
    this.showOnly(shown.slice(first, last), first, height);
  }

  showOnly(requests, first, height) {
    const kept = new Set(requests.map((request) => request.id));
    for (const [id, row] of this.rows) {
      // A focused row stays although it is out of sight: taking it away would throw the keyboard's place away.
      if (kept.has(id) || (row.node === document.activeElement && this.order.includes(id))) continue;
      row.node.remove();
      this.rows.delete(id);
    }
    const focused = document.activeElement;
    requests.forEach((request, index) => {
      const row = this.rows.get(request.id) ?? this.makeRow(request.id);
      this.rows.set(request.id, row);
      // Rows stand in the page as they are seen, for who has it read out.
      const there = this.space.children[index] ?? null;
      if (there !== row.node) this.space.insertBefore(row.node, there);
      row.node.style.transform = `translateY(${(first + index) * height}px)`;
      row.node.setAttribute("aria-rowindex", first + index + 2);
      this.fill(row, request);
    });
    // A row that was moved has lost the focus.
    if (this.space.contains(focused) && focused !== document.activeElement) focused.focus({ preventScroll: true });
  }

  makeRow(id) {
    const cell = (name, ...children) => element("div", { role: "cell", class: `c-${name}` }, ...children);
    const swatch = element("span", { class: "swatch", "aria-hidden": "true" });
    const strip = element("canvas", { class: "strip", role: "img" });
    const parts = { strip, swatch };
    for (const name of ["state", "tokens", "held", "wait", "ttft", "speed"]) parts[name] = element("span");
    const follow = element("button", {
      type: "button",
      class: "small",
      text: "Follow",
      "aria-label": `Follow ${id} through the map`,
      onclick: (event) => {
        event.stopPropagation();
        this.onFollow(id);
      },
    });
    const node = element(
      "div",
      { role: "row", class: "row", tabindex: "0", "data-id": id, onclick: () => this.onOpen(id) },
      cell("id", swatch, idElement(id)),
      cell("state", parts.state),
      cell("tokens", parts.tokens),
      cell("table", strip, parts.held),
      cell("wait", parts.wait),
      cell("ttft", parts.ttft),
      cell("speed", parts.speed),
      cell("follow", follow),
    );
    return { node, ...parts };
  }

  fill(row, request) {
    const { moment } = this;
    const held = request.blocks.filter((block) => block >= 0).length;
    const isOver = request.status === "finished";
    const shared = isOver ? 0 : moment.numShared(request.blocks);
    row.node.classList.toggle("over", isOver);
    row.node.classList.toggle("opened", request.id === this.opened);
    row.node.dataset.status = request.status;
    row.node.dataset.shared = shared;
    const owner = request.row === null || isOver ? null : request.row + 1;
    row.swatch.style.background = owner === null ? "transparent" : this.colors.owners[ownerIndex(owner)];
    setText(row.state, stateText(request));
    setText(row.tokens, `${count(request.num_tokens)} of ${count(request.max_total_tokens)}`);
    const cached = `${percent(request.num_cached_tokens, request.num_prompt_tokens)} of ${count(request.num_prompt_tokens)} prompt tokens came from the cache`;
    row.tokens.title = `${count(request.num_computed_tokens)} computed; ${cached}`;
    setText(row.held, isOver ? "" : shared ? `${count(held)}, ${count(shared)} shared` : count(held));
    const wait = waitOf(request, moment.now);
    setText(row.wait, wait?.text ?? "");
    row.wait.title = wait?.text ?? "";
    row.wait.classList.toggle("present", wait?.present ?? false);
    setText(row.ttft, duration(timeToFirstToken(request)));
    setText(row.speed, rate(tokensPerSecond(request, moment.now)));
    this.drawStrip(row.strip, request, owner, shared);
  }

  /** A row's blocks in logical order: shared ones with a bar beneath, the room it may grow into as an outline. */
  drawStrip(canvas, request, owner, shared) {
    const scale = window.devicePixelRatio || 1;
    const { clientWidth: width, clientHeight: height } = canvas;
    const { blocks } = request;
    const room = Math.max(blocks.length, Math.ceil(request.max_total_tokens / this.moment.pool.blockSize));
    const key = [blocks.length, blocks[0], blocks[blocks.length - 1], owner, shared, width, scale, room].join();
    if (canvas.dataset.drawn === key || width === 0) return;
    canvas.dataset.drawn = key;
    canvas.setAttribute("aria-label", `${plural(blocks.length, "block")} of at most ${room}, ${shared} shared`);
    canvas.width = width * scale;
    canvas.height = height * scale;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const step = Math.min(8, width / room);
    const gap = step >= 4 ? 1 : 0;
    context.fillStyle = this.colors.line;
    context.fillRect(0, height - 1, step * room, 1);
    blocks.forEach((block, index) => {
      if (block < 0) return;
      const isShared = owner !== null && this.moment.pool.references[block] > 1;
      context.fillStyle = owner === null ? this.colors.muted : this.colors.owners[ownerIndex(owner)];
      const left = Math.round(index * step * scale) / scale;
      const right = Math.round((index + 1) * step * scale) / scale;
      context.fillRect(left, 0, Math.max(right - left - gap, 0.5), height - 5);
      context.fillStyle = this.colors.text;
      if (isShared) context.fillRect(left, height - 4, right - left, 3);
    });
  }

  press(event) {
    const row = event.target.closest(".row");
    if (row === null || event.target !== row) return;
    if (event.key === "Enter") this.onOpen(row.dataset.id);
    else if (event.key === "ArrowDown") this.focusRow(row.dataset.id, 1);
    else if (event.key === "ArrowUp") this.focusRow(row.dataset.id, -1);
    else return;
    event.preventDefault();
  }

  focusRow(id, by) {
    const index = this.order.indexOf(id) + by;
    if (index < 0 || index >= this.order.length) return;
    const height = parseFloat(getComputedStyle(this.body).getPropertyValue("--row-height"));
    const { scrollTop, clientHeight } = this.body;
    if (index * height < scrollTop) this.body.scrollTop = index * height;
    if ((index + 1) * height > scrollTop + clientHeight) this.body.scrollTop = (index + 1) * height - clientHeight;
    this.redraw();
    this.rows.get(this.order[index])?.node.focus({ preventScroll: true });
  }

  /** Which row is shown as opened; null for none. */
  setOpened(id) {
    const before = this.opened;
    this.opened = id;
    this.redraw();
    return before;
  }

  focus(id) {
    this.rows.get(id)?.node.focus({ preventScroll: true });
  }
}
