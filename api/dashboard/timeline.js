// The scheduler's timeline: a bar for each step, and the way back to any moment that is still kept.

import { count, element, idElement, plural, setText } from "./format.js";
import { themeColors } from "./map_paint.js";

/** Pixels for a step, from far away to near. */
const ZOOMS = [2, 3, 5, 8, 12, 20];
const LEFT = 52;
const MARKS = 16;
const TIME_HEIGHT = 30;
const FOOT = 15;
const GAP = 8;
const TABLE_STEPS = 20;
const TABLE_EVERY_MS = 1000;

export class Timeline {
  /** `onSeekStep(step)` and `onSeek(frame number)` show a moment; both pause. */
  constructor(root, onSeekStep, onSeek) {
    this.root = root;
    this.canvas = root.querySelector("canvas");
    this.range = root.querySelector("#scrubber");
    this.readout = root.querySelector("#step-readout");
    this.zoom = 2;
    this.end = null;
    this.hovered = null;
    this.tableDrawn = -Infinity;
    this.onSeekStep = onSeekStep;
    this.range.addEventListener("input", () => onSeek(Number(this.range.value)));
    root.querySelector("#zoom-in").addEventListener("click", () => this.setZoom(this.zoom + 1));
    root.querySelector("#zoom-out").addEventListener("click", () => this.setZoom(this.zoom - 1));
    root.querySelector("details").addEventListener("toggle", () => {
      this.tableDrawn = -Infinity;
      this.redraw();
    });
    this.listen();
    new ResizeObserver(() => this.redraw()).observe(this.canvas);
  }

  listen() {
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      this.seekAt(event.offsetX);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      this.hovered = this.recordAt(event.offsetX);
      if (event.buttons & 1) this.seekAt(event.offsetX);
      else this.redraw();
    });
    this.canvas.addEventListener("pointerleave", () => {
      this.hovered = null;
      this.redraw();
    });
  }

  setZoom(zoom) {
    this.zoom = Math.min(Math.max(zoom, 0), ZOOMS.length - 1);
    this.root.querySelector("#zoom-in").disabled = this.zoom === ZOOMS.length - 1;
    this.root.querySelector("#zoom-out").disabled = this.zoom === 0;
    this.redraw();
  }

  setTheme() {
    this.colors = themeColors();
    this.redraw();
  }

  redraw() {
    if (this.store?.view) this.render(this.store);
  }

  seekAt(x) {
    const record = this.recordAt(x);
    if (record) this.onSeekStep(record.step);
  }

  recordAt(x) {
    const index = Math.floor((x - LEFT) / ZOOMS[this.zoom]) + (this.shownFrom ?? 0);
    return x < LEFT ? null : (this.store?.steps[index] ?? null);
  }

  render(store) {
    this.store = store;
    const { view, steps } = store;
    const at = lastAtOrBefore(steps, view.step);
    const fit = Math.max(1, Math.floor((this.canvas.clientWidth - LEFT) / ZOOMS[this.zoom]));
    if (store.isLive) this.end = null;
    else this.holdStill(steps, at, fit);
    const end = this.end === null ? steps.length : lastAtOrBefore(steps, this.end) + 1;
    this.shownFrom = Math.max(0, end - fit);
    this.draw(steps.slice(this.shownFrom, end), at - this.shownFrom);
    this.renderRange(store);
    this.renderReadout(this.hovered ?? steps[at] ?? null);
    this.renderTable(steps, at);
  }

  /** While paused the picture keeps its place, unless the moment in view would leave it. `end` is a step's number. */
  holdStill(steps, at, fit) {
    if (steps.length === 0) return;
    const end = this.end === null ? steps.length - 1 : lastAtOrBefore(steps, this.end);
    const inSight = Math.min(Math.max(end, at, Math.min(fit, steps.length) - 1), Math.max(at, 0) + fit - 1);
    this.end = steps[Math.min(Math.max(inSight, 0), steps.length - 1)].step;
  }

  draw(records, cursor) {
    const scale = window.devicePixelRatio || 1;
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (width === 0 || !this.colors) return;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    context.font = "11px system-ui, sans-serif";
    const floor = height - FOOT - TIME_HEIGHT - GAP;
    const most = Math.max(16, ...records.map((r) => Math.max(r.token_budget, r.prefill_tokens + r.decode_tokens)));
    // Decoding steps hold a few tokens, prefills hundreds: by square root both can be seen under the budget.
    const tall = (tokens) => Math.sqrt(tokens / most) * (floor - MARKS - 6);
    this.drawAxis(context, most, floor, tall, width);
    const step = ZOOMS[this.zoom];
    const slowest = Math.max(1, ...records.map((record) => record.time_ms));
    records.forEach((record, index) => {
      const left = LEFT + index * step;
      this.drawBar(context, record, left, step, floor, tall);
      context.fillStyle = this.colors.muted;
      const time = (record.time_ms / slowest) * (TIME_HEIGHT - 4);
      context.fillRect(left, height - FOOT - time, Math.max(1, step - (step > 3 ? 1 : 0)), time);
    });
    this.drawFoot(context, records, slowest, height, width);
    if (!this.store.isLive) this.drawCursor(context, LEFT + (cursor + 1) * step, height, width);
  }

  drawAxis(context, most, floor, tall, width) {
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const part of [1 / 16, 1 / 4, 1]) {
      const tokens = Math.round(most * part);
      const y = Math.round(floor - tall(tokens)) + 0.5;
      context.fillStyle = this.colors.muted;
      context.fillText(count(tokens), LEFT - 6, y);
      context.strokeStyle = this.colors.line;
      context.beginPath();
      context.moveTo(LEFT, y);
      context.lineTo(width, y);
      context.stroke();
    }
  }

  drawBar(context, record, left, step, floor, tall) {
    const wide = Math.max(1, step - (step > 3 ? 1 : 0));
    const decode = tall(record.decode_tokens);
    const whole = tall(record.prefill_tokens + record.decode_tokens);
    context.fillStyle = this.colors.prefill;
    context.fillRect(left, floor - whole, wide, whole - decode);
    context.fillStyle = this.colors.decode;
    context.fillRect(left, floor - decode, wide, decode);
    context.fillStyle = this.colors.text;
    context.fillRect(left, Math.round(floor - tall(record.token_budget)) - 1, step, 1);
    const middle = left + wide / 2;
    if (record.preempted.length) {
      context.fillStyle = this.colors.preempt;
      context.beginPath();
      context.moveTo(middle - 4, 1);
      context.lineTo(middle + 4, 1);
      context.lineTo(middle, 8);
      context.fill();
    }
    if (record.evicted) {
      context.fillStyle = this.colors.evict;
      const size = Math.min(3.5, 1.5 + record.evicted / 4);
      context.beginPath();
      context.arc(middle, 12, size, 0, 2 * Math.PI);
      context.fill();
    }
  }

  drawFoot(context, records, slowest, height, width) {
    context.fillStyle = this.colors.muted;
    context.textBaseline = "middle";
    context.textAlign = "right";
    context.fillText(`${Math.round(slowest)} ms`, LEFT - 6, height - FOOT - TIME_HEIGHT + 8);
    if (records.length === 0) return;
    context.textAlign = "left";
    context.fillText(`step ${count(records[0].step)}`, LEFT, height - 6);
    context.textAlign = "right";
    const right = Math.min(width, LEFT + records.length * ZOOMS[this.zoom]);
    if (right - LEFT > 150) context.fillText(`step ${count(records[records.length - 1].step)}`, right, height - 6);
  }

  /** What came after the moment in view is dimmed. */
  drawCursor(context, x, height, width) {
    context.globalAlpha = 0.65;
    context.fillStyle = this.colors.panel;
    context.fillRect(x, 0, width - x, height);
    context.globalAlpha = 1;
    context.fillStyle = this.colors.text;
    context.fillRect(x - 1, 0, 2, height - FOOT);
  }

  renderRange({ history, isLive, position, view, live }) {
    this.range.min = history.first;
    this.range.max = history.last;
    this.range.value = isLive ? history.last : position;
    const behind = live.now - view.now;
    const text = isLive ? `live, step ${view.step}` : `step ${view.step}, ${behind.toFixed(1)} seconds before now`;
    this.range.setAttribute("aria-valuetext", text);
  }

  renderReadout(record) {
    if (record === null) {
      setText(this.readout, "No step yet.");
      return;
    }
    const parts = [
      `Step ${count(record.step)}: ${plural(record.num_requests, "request")}`,
      `${count(record.prefill_tokens)} prefill + ${count(record.decode_tokens)} decode of ${count(record.token_budget)} tokens`,
      `${record.time_ms.toFixed(1)} ms`,
    ];
    if (record.evicted) parts.push(`${plural(record.evicted, "block")} evicted`);
    if (record.preempted.length) parts.push(`preempted ${record.preempted.join(", ")}`);
    setText(this.readout, parts.join(" · "));
  }

  renderTable(steps, at) {
    const now = performance.now();
    if (!this.root.querySelector("details").open || (this.store.isLive && now - this.tableDrawn < TABLE_EVERY_MS))
      return;
    this.tableDrawn = now;
    const rows = steps.slice(Math.max(0, at + 1 - TABLE_STEPS), at + 1).reverse();
    this.root.querySelector("tbody").replaceChildren(
      ...rows.map((record) => {
        const numbers = [
          record.step,
          record.num_requests,
          record.prefill_tokens,
          record.decode_tokens,
          record.token_budget,
        ];
        const cells = [...numbers.map(count), record.time_ms.toFixed(1), count(record.evicted)];
        const preempted = element("td", {}, ...record.preempted.map(idElement));
        return element("tr", {}, ...cells.map((text) => element("td", { text })), preempted);
      }),
    );
  }
}

/** The index of the last record of `step` or before; -1 for none. */
function lastAtOrBefore(steps, step) {
  let low = 0;
  let high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle].step <= step) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}
