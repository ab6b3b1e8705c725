// The pool's cells as pixels: one canvas, written cell by cell where something changed. Knows no events and no text.

import { CACHED, FREE, PINNED, STATE_NAMES, USED } from "./state.js";

const LARGEST_CELL = 22;
const SMALLEST_CELL = 3;
/** Of the map, in CSS pixels, as long as cells needn't be smaller than they may be for it. */
const WANTED_HEIGHT = 230;
/** Below this many device pixels a cell has no room for hatching or a gap. */
const PLAIN_CELL = 7;
/** A free cell too small to be hollow is pale instead. */
const FREE_WITHOUT_FRAME = 0.35;
/** An empty slot's block still shows its colour this far. */
const PALEST = 0.38;

/** "#rrggbb" -> [r, g, b]. */
function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

function mixed(color, ground, part) {
  return color.map((value, index) => Math.round(value * part + ground[index] * (1 - part)));
}

/** A pixel as the canvas stores it on a little-endian machine. */
function pixel([red, green, blue]) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

/** Colours by name, of the theme in force: see the top of style.css. */
export function themeColors() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  const owners = Array.from({ length: 12 }, (_, index) => read(`--owner-${index}`));
  const names = ["free", "cached", "used", "pinned", "panel", "text", "muted", "line", "prefill", "decode", "preempt"];
  return { owners, ...Object.fromEntries(names.map((name) => [name, read(`--${name}`)])), evict: read("--evict") };
}

/** The colour of a row's cells, the same in the map and beside the request. `owner` is 1 + the row. */
export function ownerIndex(owner) {
  return (owner - 1) % 12;
}

export class CellPainter {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.colors = null;
    this.drawn = null;
    this.columns = 1;
  }

  /** Chooses the size of a cell for `width` CSS pixels; true where that changed the picture's shape. */
  fit(width, numBlocks) {
    const scale = window.devicePixelRatio || 1;
    const wanted = Math.floor(Math.sqrt((width * WANTED_HEIGHT) / numBlocks));
    const cell = Math.max(1, Math.round(Math.min(Math.max(wanted, SMALLEST_CELL), LARGEST_CELL) * scale));
    const columns = Math.max(1, Math.min(numBlocks, Math.floor((width * scale) / cell)));
    const same = this.cell === cell && this.columns === columns && this.numBlocks === numBlocks && this.scale === scale;
    if (same) return false;
    Object.assign(this, { cell, columns, numBlocks, scale, rows: Math.ceil(numBlocks / columns), drawn: null });
    this.canvas.width = columns * cell;
    this.canvas.height = this.rows * cell;
    this.canvas.style.width = `${this.canvas.width / scale}px`;
    this.canvas.style.height = `${this.canvas.height / scale}px`;
    this.image = this.context.createImageData(this.canvas.width, this.canvas.height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    return true;
  }

  setTheme(colors) {
    this.colors = {
      ground: channels(colors.panel),
      mark: channels(colors.text),
      states: STATE_NAMES.map((name) => channels(colors[name])),
      owners: colors.owners.map(channels),
      unowned: mixed(channels(colors.muted), channels(colors.panel), 0.6),
    };
    this.drawn = null;
  }

  /**
   * Paints the cells of `pool` that differ from what is drawn; how many that were.
   * `byOwner`: colours by row instead of by state. `followed`: a flag per block, or null where nothing is followed.
   */
  paint(pool, byOwner, followed) {
    if (this.drawn === null) this.forget(pool);
    const { drawn } = this;
    let changed = 0;
    let top = this.rows;
    let bottom = -1;
    for (let block = 0; block < pool.numBlocks; block += 1) {
      const look =
        (pool.state[block] << 30) |
        ((byOwner ? (pool.owner[block] % 2047) + 1 : 0) << 16) |
        (Math.min(pool.filled[block], 511) << 4) |
        ((pool.references[block] > 1 ? 1 : 0) << 2) |
        (followed === null ? 0 : followed[block] ? 1 : 2);
      if (drawn.looks[block] === look) continue;
      drawn.looks[block] = look;
      drawn.states[block] = pool.state[block];
      this.paintCell(block, pool, byOwner, followed);
      const row = Math.floor(block / this.columns);
      top = Math.min(top, row);
      bottom = Math.max(bottom, row);
      changed += 1;
    }
    if (changed) {
      const height = (bottom - top + 1) * this.cell;
      this.context.putImageData(this.image, 0, 0, 0, top * this.cell, this.canvas.width, height);
    }
    return changed;
  }

  forget(pool) {
    this.drawn = { looks: new Int32Array(pool.numBlocks).fill(-1), states: new Uint8Array(pool.numBlocks) };
    this.pixels.fill(pixel(this.colors.ground));
    this.context.putImageData(this.image, 0, 0);
  }

  /** Blocks by state, counted from the cells as they are drawn; null before the first drawing. */
  counts() {
    if (this.drawn === null) return null;
    const numbers = [0, 0, 0, 0];
    for (const state of this.drawn.states) numbers[state] += 1;
    return Object.fromEntries(STATE_NAMES.map((name, index) => [name, numbers[index]]));
  }

  paintCell(block, pool, byOwner, followed) {
    const { colors, cell } = this;
    const state = pool.state[block];
    const isOwned = byOwner && pool.owner[block] > 0;
    // Beside the owners' colours that of cached blocks would look like one more owner.
    const unowned = byOwner && state === CACHED ? colors.unowned : colors.states[state];
    const full = isOwned ? colors.owners[ownerIndex(pool.owner[block])] : unowned;
    const fill = pool.blockSize ? pool.filled[block] / pool.blockSize : 1;
    let color = full;
    if (state === USED) color = mixed(full, colors.ground, PALEST + (1 - PALEST) * fill);
    if (state === FREE && cell < PLAIN_CELL) color = mixed(full, colors.ground, FREE_WITHOUT_FRAME);
    let mark = colors.mark;
    if (followed !== null && !followed[block]) {
      color = mixed(color, colors.ground, 0.16);
      mark = mixed(mark, colors.ground, 0.16);
    }
    const gap = cell >= PLAIN_CELL ? Math.max(1, Math.round(cell / 12)) : 0;
    const left = (block % this.columns) * cell;
    const top = Math.floor(block / this.columns) * cell;
    const size = cell - gap;
    this.fill(left, top, size, pixel(color));
    if (size >= PLAIN_CELL - 1) this.drawPattern(state, left, top, size, color);
    if (pool.references[block] > 1) {
      const dot = Math.max(1, Math.round(size / 3));
      this.fill(left + ((size - dot) >> 1), top + ((size - dot) >> 1), dot, pixel(mark));
    }
    if (followed !== null && followed[block] && gap) this.outline(left, top, size, pixel(mark), 1);
  }

  /** States differ by more than colour: free is hollow, cached hatched, used plain, pinned framed twice. */
  drawPattern(state, left, top, size, color) {
    const ground = pixel(this.colors.ground);
    if (state === FREE) {
      const edge = Math.max(1, Math.round(this.scale));
      this.fill(left + edge, top + edge, size - 2 * edge, ground);
    } else if (state === CACHED) {
      const period = Math.max(4, Math.round(5 * this.scale));
      const pale = pixel(mixed(color, this.colors.ground, 0.4));
      for (let y = 0; y < size; y += 1) {
        const line = (top + y) * this.canvas.width + left;
        for (let x = 0; x < size; x += 1) if ((x + y) % period < period / 2) this.pixels[line + x] = pale;
      }
    } else if (state === PINNED) {
      this.outline(left + 2, top + 2, size - 4, ground, Math.max(1, Math.round(this.scale)));
    }
  }

  fill(left, top, size, value) {
    const { pixels } = this;
    const { width } = this.canvas;
    for (let y = top; y < top + size; y += 1) pixels.fill(value, y * width + left, y * width + left + size);
  }

  outline(left, top, size, value, edge) {
    const { pixels } = this;
    const { width } = this.canvas;
    for (let y = 0; y < size; y += 1) {
      const line = (top + y) * width + left;
      if (y < edge || y >= size - edge) pixels.fill(value, line, line + size);
      else {
        pixels.fill(value, line, line + edge);
        pixels.fill(value, line + size - edge, line + size);
      }
    }
  }

  /** The block at a place in CSS pixels from the canvas's corner, or -1. */
  blockAt(x, y) {
    const column = Math.floor((x * this.scale) / this.cell);
    const row = Math.floor((y * this.scale) / this.cell);
    const block = row * this.columns + column;
    return column >= 0 && column < this.columns && row >= 0 && block < this.numBlocks ? block : -1;
  }

  /** Where a block's cell is, in CSS pixels: {left, top, size}. */
  placeOf(block) {
    const size = this.cell / this.scale;
    return { left: (block % this.columns) * size, top: Math.floor(block / this.columns) * size, size };
  }
}
