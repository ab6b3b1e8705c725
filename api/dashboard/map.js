// The pool as a map that can be pointed at, walked with the arrow keys, followed, and read as a table.

import { count, element, idElement, plural, ranges, setText } from "./format.js";
import { CellPainter, themeColors } from "./map_paint.js";
import { STATE_NAMES } from "./state.js";

/** Runs of equal blocks that the table shows. */
const MAX_RUNS = 200;
const TABLE_EVERY_MS = 1000;

export class PoolMap {
  /** `root` is the map's section; `follow` what is followed; `onFollow` is called when that changed. */
  constructor(root, follow, onFollow) {
    this.root = root;
    this.follow = follow;
    this.onFollow = onFollow;
    this.canvas = root.querySelector("canvas");
    this.area = root.querySelector(".map-area");
    this.tip = root.querySelector(".tip");
    this.cursor = root.querySelector(".map-cursor");
    this.readout = root.querySelector("#map-readout");
    this.table = root.querySelector("#map-table");
    this.painter = new CellPainter(this.canvas);
    this.byOwner = false;
    this.pointed = -1;
    this.walked = 0;
    this.tableDrawn = -Infinity;
    this.listen();
  }

  listen() {
    this.canvas.addEventListener("pointermove", (event) =>
      this.point(this.painter.blockAt(event.offsetX, event.offsetY)),
    );
    this.canvas.addEventListener("pointerleave", () => this.point(-1));
    this.canvas.addEventListener("click", (event) => this.choose(this.painter.blockAt(event.offsetX, event.offsetY)));
    this.area.addEventListener("keydown", (event) => this.press(event));
    this.area.addEventListener("focus", () => this.area.matches(":focus-visible") && this.walk(this.walked));
    this.area.addEventListener("blur", () => this.point(-1));
    for (const input of this.root.querySelectorAll("input[name=map-color]")) {
      input.addEventListener("change", () => {
        this.byOwner = input.value === "owner";
        this.root.querySelector("#state-legend").hidden = this.byOwner;
        this.root.querySelector("#owner-legend").hidden = !this.byOwner;
        this.redraw();
      });
    }
    this.root.querySelector("details").addEventListener("toggle", () => {
      this.tableDrawn = -Infinity;
      this.redraw();
    });
    new ResizeObserver(() => this.redraw()).observe(this.area);
  }

  setTheme() {
    this.painter.setTheme(themeColors());
    this.redraw();
  }

  redraw() {
    if (this.moment) this.render(this.moment);
  }

  render(moment) {
    this.moment = moment;
    const { pool } = moment;
    const { clientWidth } = this.area;
    if (clientWidth > 0) this.painter.fit(clientWidth, pool.numBlocks);
    this.painter.paint(pool, this.byOwner, this.followedFlags());
    this.area.setAttribute(
      "aria-label",
      `Map of the pool: ${plural(pool.numBlocks, "block")} of ${plural(pool.blockSize, "token")}. ` +
        "Arrow keys move from block to block, Enter follows what a block belongs to, Escape stops following.",
    );
    for (const name of STATE_NAMES) {
      setText(this.root.querySelector(`[data-count=${name}]`), count(moment.kv.blocks[name]));
    }
    if (this.pointed >= pool.numBlocks) this.pointed = -1;
    if (this.pointed >= 0) this.showTip(false);
    this.renderTable();
  }

  followedFlags() {
    if (!this.follow.isActive) return null;
    const flags = new Uint8Array(this.moment.pool.numBlocks);
    for (const block of this.follow.blocksAt(this.moment)) flags[block] = 1;
    return flags;
  }

  point(block) {
    this.pointed = block;
    if (block < 0) {
      this.tip.hidden = true;
      this.cursor.hidden = true;
    } else if (this.moment) this.showTip(false);
  }

  walk(block) {
    if (!this.moment) return;
    this.walked = Math.min(Math.max(block, 0), this.moment.pool.numBlocks - 1);
    this.pointed = this.walked;
    this.showTip(true);
    this.cursor.scrollIntoView({ block: "nearest" });
  }

  press(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.painter.columns, ArrowDown: this.painter.columns };
    if (event.key in by) this.walk(this.walked + by[event.key]);
    else if (event.key === "Home") this.walk(0);
    else if (event.key === "End") this.walk(Infinity);
    else if (event.key === "Enter") this.choose(this.walked);
    else if (event.key === "Escape") this.choose(-1);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** Follows what a block belongs to; a block of nobody's stops the following. */
  choose(block) {
    if (!this.moment) return;
    if (block < 0 || !this.follow.block(block, this.moment)) this.follow.stop();
    this.onFollow();
  }

  /** `spoken`: the text also goes where screen readers hear it, which pointing with a mouse should not do. */
  showTip(spoken) {
    const { left, top, size } = this.painter.placeOf(this.pointed);
    Object.assign(this.cursor.style, { left: `${left}px`, top: `${top}px`, width: `${size}px`, height: `${size}px` });
    const lines = describeBlock(this.pointed, this.moment);
    this.tip.replaceChildren(...lines.map((line) => element("div", { text: line })));
    this.tip.hidden = this.cursor.hidden = false;
    const room = this.area.clientWidth - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(left, room))}px`;
    this.tip.style.top = `${top + size + 6}px`;
    if (spoken) setText(this.readout, lines.join(". "));
  }

  renderTable() {
    const now = performance.now();
    if (!this.root.querySelector("details").open || now - this.tableDrawn < TABLE_EVERY_MS) return;
    this.tableDrawn = now;
    const runs = runsOf(this.moment);
    const rows = runs.slice(0, MAX_RUNS).map((run) => {
      const cells = [run.blocks, run.state, run.filled, count(run.references)];
      const owners = element("td", {}, run.owner ? idElement(run.owner) : "–");
      return element("tr", {}, ...cells.map((text) => element("td", { text })), owners);
    });
    this.table.querySelector("tbody").replaceChildren(...rows);
    const left = runs.length - rows.length;
    setText(
      this.root.querySelector("#map-table-rest"),
      left > 0 ? `and ${plural(left, "more run")} of equal blocks` : "",
    );
  }
}

/** What there is to know of a block, in lines of text. */
export function describeBlock(block, moment) {
  const { pool } = moment;
  const holders = moment.holders(block);
  const lines = [
    `Block ${block}: ${STATE_NAMES[pool.state[block]]}`,
    `${pool.filled[block]} of ${pool.blockSize} slots filled`,
  ];
  if (pool.references[block] > 0) lines.push(plural(pool.references[block], "reference"));
  for (const holder of holders.slice(0, 3)) {
    lines.push(`held by ${holder.id} as its block ${holder.blocks.indexOf(block)}`);
  }
  if (holders.length > 3) lines.push(`and by ${plural(holders.length - 3, "more request")}`);
  const since = pool.since[block];
  const age = plural(Math.max(0, moment.step - since), "step");
  lines.push(since ? `taken or let go ${age} ago, in step ${count(since)}` : "as it was when this page began to look");
  return lines;
}

/** Neighbouring blocks that have the same to tell, as one entry each. */
function runsOf(moment) {
  const { pool, requests } = moment;
  const idOfRow = new Map(requests.filter(({ row }) => row !== null).map(({ row, id }) => [row, id]));
  const runs = [];
  for (let start = 0; start < pool.numBlocks;) {
    let end = start + 1;
    const same = (name) => pool[name][end] === pool[name][start];
    while (end < pool.numBlocks && ["state", "owner", "filled", "references"].every(same)) end += 1;
    runs.push({
      blocks: ranges(Array.from({ length: end - start }, (_, index) => start + index)),
      state: STATE_NAMES[pool.state[start]],
      filled: `${pool.filled[start]} of ${pool.blockSize}`,
      references: pool.references[start],
      owner: pool.owner[start] ? idOfRow.get(pool.owner[start] - 1) : undefined,
    });
    start = end;
  }
  return runs;
}
