// What the server told, moment by moment: frames in, pictures of the pool and the requests out. Draws nothing.

export const FREE = 0;
export const CACHED = 1;
export const USED = 2;
export const PINNED = 3;
export const STATE_NAMES = ["free", "cached", "used", "pinned"];

const CELL_BYTES = 8;
/** Requests that ended are remembered in each moment, the newest so many. */
const KEEP_ENDED = 40;
/** Evictions and preemptions of the last so many steps are "lately": no more than a full frame tells steps of. */
export const LATELY_STEPS = 500;
/** The rate of tokens is that of the last so many seconds. */
const SPEED_SECONDS = 5;
/** Frames kept for scrubbing back; a whole picture now and then, so that none is rebuilt from more than so many. */
export const KEEP_FRAMES = 600;
const KEYFRAME_EVERY = 60;

function decode(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let index = 0; index < binary.length; index += 1) bytes[index] = binary.charCodeAt(index);
  return new DataView(bytes.buffer);
}

/** The pool's cells: parallel arrays by block id. `owner` is 1 + a row, 0 for none; `since` a step, 0 where it is unknown. */
export class Pool {
  constructor(numBlocks, blockSize) {
    this.numBlocks = numBlocks;
    this.blockSize = blockSize;
    this.state = new Uint8Array(numBlocks);
    this.filled = new Uint16Array(numBlocks);
    this.references = new Uint16Array(numBlocks);
    this.owner = new Uint16Array(numBlocks);
    this.since = new Int32Array(numBlocks);
  }

  clone() {
    const copy = new Pool(this.numBlocks, this.blockSize);
    for (const name of ["state", "filled", "references", "owner", "since"]) copy[name].set(this[name]);
    return copy;
  }

  /** Takes cells as the server packs them; `ids` null means all, in order. */
  set(ids, cells, since) {
    const number = cells.byteLength / CELL_BYTES;
    for (let index = 0; index < number; index += 1) {
      const block = ids === null ? index : ids.getUint32(4 * index, true);
      const at = CELL_BYTES * index;
      this.state[block] = cells.getUint8(at);
      this.filled[block] = cells.getUint16(at + 2, true);
      this.references[block] = cells.getUint16(at + 4, true);
      this.owner[block] = cells.getUint16(at + 6, true);
      this.since[block] = since.getInt32(4 * index, true);
    }
  }
}

/** All that is known of one moment. Only `apply` changes it; the arrays and objects it hands out are never changed. */
export class Moment {
  /** Of a full frame. */
  constructor(frame) {
    this.pool = new Pool(frame.cells.num_blocks, frame.cells.block_size);
    this.known = new Map();
    this.decoded = [];
    this.ended = [];
    this.evictions = [];
    this.preemptions = [];
    this.apply(frame);
  }

  clone() {
    const copy = Object.assign(Object.create(Moment.prototype), this);
    copy.pool = this.pool.clone();
    copy.known = new Map(this.known);
    return copy;
  }

  apply(frame) {
    const { cells } = frame;
    // A frame in which no cell changed may leave them out.
    if (cells)
      this.pool.set(cells.ids === undefined ? null : decode(cells.ids), decode(cells.data), decode(frame.since));
    for (const name of ["step", "now", "unix_time", "kv", "latency"]) this[name] = frame[name];
    const before = this.known;
    this.known = new Map();
    this.requests = frame.requests.map((changes) => {
      const request = merged(before.get(changes.id), changes);
      this.known.set(request.id, request);
      return request;
    });
    const ended = frame.ended.map((changes) => ({
      ...merged(before.get(changes.id), changes),
      ended_step: frame.step,
    }));
    // An end may be told twice: the second one corrects the first.
    const again = new Set(ended.map((request) => request.id));
    const others = this.ended.filter((request) => !again.has(request.id));
    if (ended.length) this.ended = [...ended.reverse(), ...others].slice(0, KEEP_ENDED);
    this.takeSteps(frame.steps);
    this.takeMarks(frame);
  }

  takeSteps(records) {
    const news = records.map((record) => ({ started: record.started, tokens: record.decode_tokens }));
    this.decoded = [...this.decoded, ...news].filter((entry) => this.now - entry.started < SPEED_SECONDS);
  }

  /** Tokens that all requests together got a second, lately. */
  get tokensPerSecond() {
    const lately = this.decoded.filter((entry) => this.now - entry.started < SPEED_SECONDS);
    return lately.reduce((sum, entry) => sum + entry.tokens, 0) / SPEED_SECONDS;
  }

  /** What was evicted and preempted: steps tell how much, events the rest, as far as they are told. */
  takeMarks({ steps, events }) {
    const evicted = steps
      .filter((record) => record.evicted > 0)
      .map((record) => ({
        step: record.step,
        time: record.started,
        number: record.evicted,
        ids: events
          .filter((event) => event.kind === "evict" && event.step === record.step)
          .map((event) => event.block_id),
      }));
    const preempted = steps.flatMap((record) =>
      record.preempted.map((id) => {
        const isIt = (event) => event.kind === "preempt" && event.step === record.step && event.request_id === id;
        return { id, step: record.step, time: record.started, forId: events.find(isIt)?.for_request ?? null };
      }),
    );
    this.evictions = this.lately([...evicted.reverse(), ...this.evictions]);
    this.preemptions = this.lately([...preempted.reverse(), ...this.preemptions]);
  }

  lately(marks) {
    return marks.filter((mark) => mark.step > this.step - LATELY_STEPS);
  }

  /** What went before a new connection is still known, and better: full frames tell of no events. */
  remember(before) {
    this.ended = before.ended;
    for (const name of ["evictions", "preemptions"]) {
      const missed = this[name].filter((mark) => mark.step > before.step);
      this[name] = this.lately([...missed, ...before[name]]);
    }
  }

  /** A live request, or one that ended lately. */
  find(id) {
    return this.requests.find((request) => request.id === id) ?? this.ended.find((request) => request.id === id);
  }

  /** The live requests whose tables hold a block. */
  holders(block) {
    return this.requests.filter((request) => request.blocks.includes(block));
  }

  /** How many of these blocks others hold too. */
  numShared(blocks) {
    let number = 0;
    for (const block of blocks) if (block >= 0 && this.pool.references[block] > 1) number += 1;
    return number;
  }
}

/** A request as it is after a frame, which tells what changed. `blocks` is its table. */
function merged(before, { table, ...changes }) {
  const request = { blocks: [], ...before, ...changes };
  if (table) request.blocks = request.blocks.slice(0, table.first).concat(table.ids);
  if (request.status === "finished" && before) request.blocks = before.blocks;
  return request;
}

/** The last frames, numbered by the order in which they came, from which any of their moments can be rebuilt. */
class History {
  constructor() {
    this.clear();
  }

  clear() {
    this.entries = [];
    this.first = 0;
    this.rebuilt = null;
  }

  get last() {
    return this.first + this.entries.length - 1;
  }

  push(frame, moment) {
    const number = this.first + this.entries.length;
    const isKey = frame.full || number % KEYFRAME_EVERY === 0;
    this.entries.push({ frame, key: isKey ? moment.clone() : null, step: frame.step });
    // The oldest must stay a whole picture.
    while (this.entries.length > KEEP_FRAMES) {
      const next = this.entries.findIndex((entry, index) => index > 0 && entry.key !== null);
      if (next < 0 || this.entries.length - next < KEEP_FRAMES) break;
      this.entries.splice(0, next);
      this.first += next;
    }
  }

  /** The picture of frame `number`. It is changed by the next call. */
  at(number) {
    let from = number;
    while (this.entries[from - this.first].key === null) from -= 1;
    const { rebuilt } = this;
    if (rebuilt === null || rebuilt.number > number || rebuilt.number < from) {
      this.rebuilt = { number: from, moment: this.entries[from - this.first].key.clone() };
    }
    while (this.rebuilt.number < number) {
      this.rebuilt.number += 1;
      this.rebuilt.moment.apply(this.entries[this.rebuilt.number - this.first].frame);
    }
    return this.rebuilt.moment;
  }

  /** The number of the first frame that shows `step` or a later one; the last frame where none does. */
  ofStep(step) {
    const index = this.entries.findIndex((entry) => entry.step >= step);
    return index < 0 ? this.last : this.first + index;
  }
}

/** The page's one state: the newest moment, the moment in view, and the way between them. */
export class Store {
  constructor() {
    this.history = new History();
    this.live = null;
    this.run = null;
    this.steps = [];
    this.position = null;
    this.restarts = 0;
    this.heardAt = 0;
  }

  get isLive() {
    return this.position === null;
  }

  /** The moment that the whole page shows; null before the first frame. */
  get view() {
    return this.isLive || this.live === null ? this.live : this.history.at(this.position);
  }

  accept(frame) {
    if (this.live !== null && (frame.run !== this.run || frame.step < this.live.step)) this.reset();
    this.run = frame.run;
    if (frame.full) {
      const before = this.live;
      this.live = new Moment(frame);
      if (before !== null) this.live.remember(before);
    } else {
      this.live.apply(frame);
    }
    this.heardAt = frame.now;
    this.history.push(frame, this.live);
    const known = this.steps.length ? this.steps[this.steps.length - 1].step : -1;
    this.steps.push(...frame.steps.filter((record) => record.step > known));
    const oldest = this.history.entries[0].frame.steps[0]?.step ?? 0;
    const gone = this.steps.findIndex((record) => record.step >= oldest);
    if (gone > 0) this.steps.splice(0, gone);
    if (!this.isLive) this.position = Math.max(this.position, this.history.first);
  }

  /** Nothing has changed for `seconds`, which is why no frame came; the time goes on. */
  idle(seconds) {
    if (this.live !== null) this.live.now = this.heardAt + seconds;
  }

  /** The server is a new one: nothing of before holds. */
  reset() {
    this.history.clear();
    this.live = null;
    this.steps = [];
    this.position = null;
    this.restarts += 1;
  }

  pause() {
    if (this.live !== null && this.isLive) this.position = this.history.last;
  }

  resume() {
    this.position = null;
  }

  /** Show frame `number`, or the nearest that is kept. */
  seek(number) {
    if (this.live === null) return;
    this.position = Math.min(Math.max(number, this.history.first), this.history.last);
  }

  move(by) {
    this.pause();
    if (this.position !== null) this.seek(this.position + by);
  }

  seekStep(step) {
    if (this.live !== null) this.seek(this.history.ofStep(step));
  }
}
