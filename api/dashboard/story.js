// One request opened: its facts, its logical table block by block, and its story as the server tells it.

import { count, duration, element, idElement, nodes, percent, pieces, plural, rate, setText } from "./format.js";
import { stateText, timeToFirstToken, tokensPerSecond } from "./requests.js";
import { errorText } from "./sse.js";
import { waitOf } from "./summary.js";

const POLL_MS = 1000;

function computedText({ num_computed_tokens: computed, context_start: start }) {
  const context = start > 0 ? ` of a context that begins at token ${count(start)}` : "";
  return `${count(computed)} tokens${context}`;
}

export class Story {
  /** `onFollow(id)` and `onClose(id)` are called by its buttons. */
  constructor(root, onFollow, onClose) {
    this.root = root;
    this.title = root.querySelector("h3");
    this.facts = root.querySelector("dl");
    this.blocks = root.querySelector("#story-blocks");
    this.sentences = root.querySelector("ol");
    this.note = root.querySelector("#story-note");
    this.id = null;
    this.onClose = onClose;
    root.querySelector("#story-follow").addEventListener("click", () => onFollow(this.id));
    root.querySelector("#story-close").addEventListener("click", () => this.close());
    root.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.close();
    });
  }

  open(id) {
    this.id = id;
    this.told = null;
    this.isOver = false;
    this.asked = -Infinity;
    this.root.hidden = false;
    this.title.replaceChildren("Request ", idElement(id));
    this.sentences.replaceChildren();
    setText(this.note, "");
    this.title.focus({ preventScroll: true });
    this.root.scrollIntoView({ block: "nearest" });
  }

  close() {
    const { id } = this;
    this.id = null;
    this.root.hidden = true;
    this.onClose(id);
  }

  render(moment, isLive) {
    if (this.id === null) return;
    const request = moment.find(this.id);
    if (request !== undefined) this.renderFacts(request, moment);
    if (this.told) this.renderSentences(moment, isLive);
    const now = performance.now();
    if (!this.isOver && now - this.asked > POLL_MS) {
      this.asked = now;
      this.ask(this.id, moment, isLive);
    }
  }

  async ask(id, moment, isLive) {
    let told;
    try {
      const response = await fetch(`/inspect/requests/${encodeURIComponent(id)}/story`);
      const isGone = response.status === 404;
      told = response.ok ? await response.json() : { failed: await errorText(response), isGone };
    } catch {
      return; // the connection's banner tells that the server is away
    }
    if (this.id !== id) return;
    if (told.failed) {
      this.isOver = told.isGone;
      setText(this.note, `Its story cannot be told: ${told.failed}`);
      return;
    }
    this.told = told;
    this.isOver = told.sentences.some((sentence) => sentence.kind === "finish");
    this.renderSentences(moment, isLive);
  }

  renderFacts(request, moment) {
    const wait = waitOf(request, moment.now);
    const facts = [
      ["State", stateText(request)],
      [
        "Prompt",
        `${count(request.num_prompt_tokens)} tokens, ${count(request.num_cached_tokens)} from the cache (${percent(request.num_cached_tokens, request.num_prompt_tokens)})`,
      ],
      [
        "Answer",
        `${count(request.num_output_tokens)} tokens so far, at most ${count(request.max_total_tokens - request.num_prompt_tokens)}`,
      ],
      ...(request.status === "finished" ? [] : [["Computed", computedText(request)]]),
      ["First token", `${duration(timeToFirstToken(request))} after arrival`],
      ["Speed", `${rate(tokensPerSecond(request, moment.now))} tokens/s`],
      ["Preempted", plural(request.num_preemptions, "time")],
      ["Waits", wait?.text ?? "none seen"],
      ...(request.tenant ? [["Tenant", request.tenant]] : []),
    ];
    this.facts.replaceChildren(
      ...facts.map(([term, text]) =>
        element("div", {}, element("dt", { text: term }), element("dd", {}, ...nodes(pieces(text)))),
      ),
    );
    this.renderBlocks(request, moment);
  }

  renderBlocks(request, moment) {
    const { pool } = moment;
    const isOver = request.status === "finished";
    const key = `${request.blocks.length}:${moment.numShared(request.blocks)}:${isOver}`;
    if (this.blocks.dataset.drawn === `${this.id}${key}`) return;
    this.blocks.dataset.drawn = `${this.id}${key}`;
    const chips = request.blocks.map((block, index) => {
      const shared = !isOver && block >= 0 && pool.references[block] > 1 ? pool.references[block] : 0;
      const text = block < 0 ? `${index} given back` : `${index} → ${block}${shared ? ` shared by ${shared}` : ""}`;
      return element("li", { class: shared ? "shared" : null, text });
    });
    this.blocks.replaceChildren(...chips);
    const none = isOver ? "It has ended and holds no block." : "It holds no block.";
    setText(
      this.root.querySelector("#story-no-blocks"),
      isOver && chips.length ? "As it was when it ended:" : chips.length ? "" : none,
    );
  }

  renderSentences(moment, isLive) {
    const shown = this.told.sentences.filter((sentence) => isLive || sentence.step <= moment.step);
    while (this.sentences.children.length > shown.length) this.sentences.lastChild.remove();
    shown.forEach((sentence, index) => {
      const text = sentence.text;
      let item = this.sentences.children[index];
      if (item === undefined) {
        item = element("li", {}, element("span", { class: "when" }), " ", element("span", { class: "what" }));
        this.sentences.append(item);
      }
      setText(item.children[0], `step ${count(sentence.step)}, ${duration(sentence.time)}`);
      if (item.children[1].textContent !== text) item.children[1].replaceChildren(...nodes(pieces(text)));
      item.dataset.kind = sentence.kind;
    });
    const lost = "Its beginning is no longer in the journal; times are since the oldest event that is.";
    const notes = [this.told.complete ? "" : lost, isLive ? "" : "As far as the moment in view."];
    setText(this.note, notes.filter(Boolean).join(" "));
  }
}
