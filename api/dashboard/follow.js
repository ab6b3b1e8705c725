// What is followed through the map: a request, or the blocks of a shared prefix. Draws nothing.

import { CACHED, FREE } from "./state.js";

/** Followed blocks at one moment: those that still hold what they held when the following began. */
export class Follow {
  constructor() {
    this.stop();
  }

  stop() {
    this.requestId = null;
    this.prefix = null;
  }

  get isActive() {
    return this.requestId !== null || this.prefix !== null;
  }

  request(id) {
    this.stop();
    this.requestId = id;
  }

  /** `blocks` as they are at `step`. */
  prefixOf(blocks, step) {
    this.stop();
    this.prefix = { blocks: blocks.filter((block) => block >= 0), step };
  }

  /** From a click on a block: its owner, or the prefix that its owners share; nothing where nobody holds it. */
  block(block, moment) {
    const holders = moment.holders(block);
    if (holders.length === 0) return false;
    if (moment.pool.references[block] > 1) this.prefixOf(sharedBeginning(holders, moment), moment.step);
    else this.request(holders[0].id);
    return true;
  }

  /** The followed blocks at `moment`, in logical order. */
  blocksAt(moment) {
    if (this.requestId !== null) {
      const request = moment.find(this.requestId);
      if (request === undefined) return [];
      const blocks = request.blocks.filter((block) => block >= 0);
      return request.status === "finished" ? leftAsTheyWere(blocks, request.ended_step, moment) : blocks;
    }
    return this.prefix === null ? [] : notEvicted(this.prefix.blocks, this.prefix.step, moment);
  }

  /** What the page says about it. */
  describe(moment) {
    const blocks = this.blocksAt(moment);
    const shared = moment.numShared(blocks);
    const held = `${blocks.length} block${blocks.length === 1 ? "" : "s"}`;
    if (this.requestId === null) {
      const holders = moment.requests.filter((request) => request.blocks.includes(blocks[0])).length;
      return { id: null, text: `a prefix of ${held}; ${holders} request${holders === 1 ? "" : "s"} on it` };
    }
    const request = moment.find(this.requestId);
    if (request === undefined) return { id: this.requestId, text: "gone" };
    if (request.status === "finished") return { id: this.requestId, text: `ended; ${held} still as it left them` };
    return { id: this.requestId, text: `${request.status}; ${held}, ${shared} shared` };
  }
}

/** The blocks that all of `holders` have at the beginning of their tables. */
function sharedBeginning(holders, moment) {
  const [first, ...others] = holders;
  const end = first.blocks.findIndex((block, index) => others.some((other) => other.blocks[index] !== block));
  const common = end < 0 ? first.blocks : first.blocks.slice(0, end);
  return common.filter((block) => block >= 0 && moment.pool.references[block] > 1);
}

/** Blocks that a request which ended by `step` left in the cache, or to others who held them already. */
function leftAsTheyWere(blocks, step, { pool }) {
  return blocks.filter((block) => {
    const since = pool.since[block];
    return pool.state[block] === CACHED ? since <= step : pool.state[block] !== FREE && since < step;
  });
}

/** Blocks whose contents can still be found, however often they were taken and let go since `step`. */
function notEvicted(blocks, step, moment) {
  const gone = new Set();
  for (const mark of moment.evictions) if (mark.step > step) for (const block of mark.ids) gone.add(block);
  return blocks.filter((block) => moment.pool.state[block] !== FREE && !gone.has(block));
}
