// Chats from the page itself: one conversation to type in, or many at once from a set of prompts.
//
// A browser opens six connections to a server and no more, and would keep the seventh chat back. So many chats go as
// one request: the prompts' token ids, with the chat template on them, as a list to /v1/completions.

import { ChatCard } from "./chat_card.js";
import { count, duration, plural, setText } from "./format.js";
import { PROMPT_SETS } from "./prompts.js";
import { errorText, readEvents } from "./sse.js";

/** Older answers leave the page first; those that still stream stay. */
const KEEP_CARDS = 140;
const MOST_AT_ONCE = 128;

export class Chats {
  /** `onFollow(id)` follows a chat's request through the map. */
  constructor(root, onFollow) {
    this.root = root;
    this.onFollow = onFollow;
    this.list = root.querySelector("#chat-cards");
    this.text = root.querySelector("#chat-text");
    this.maxTokens = root.querySelector("#chat-max-tokens");
    this.open = new Set();
    this.requests = new Set();
    this.conversation = [];
    this.tokens = new Map();
    this.sent = 0;
    root.querySelector("#chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.sendTyped();
    });
    this.text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.sendTyped();
    });
    root.querySelector("#chat-new").addEventListener("click", () => {
      this.conversation = [];
      this.showTurns();
      this.text.focus();
    });
    root.querySelector("#many-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.sendMany();
    });
    root.querySelector("#cancel-all").addEventListener("click", () => {
      for (const request of [...this.requests]) request.abort();
    });
  }

  async sendTyped() {
    const prompt = this.text.value.trim();
    if (!prompt) return;
    this.text.value = "";
    const { conversation } = this;
    const question = { role: "user", content: prompt };
    conversation.push(question);
    this.showTurns();
    const card = this.addCard(prompt);
    const isWhole = await this.guard([card], (signal) => this.streamChat(card, [...conversation], signal));
    // An answer that was cut off is no turn of the conversation, nor is its question.
    if (isWhole && !card.wasCancelled) conversation.push({ role: "assistant", content: card.text });
    else conversation.splice(conversation.indexOf(question), 1);
    this.showTurns();
  }

  sendMany() {
    const wanted = Number(this.root.querySelector("#many-number").value) || 1;
    const set = PROMPT_SETS[this.root.querySelector("#many-set").value];
    const number = Math.min(Math.max(Math.round(wanted), 1), MOST_AT_ONCE);
    const prompts = Array.from({ length: number }, (_, index) => set[index % set.length]);
    const cards = prompts.map((prompt) => this.addCard(prompt));
    this.guard(cards, (signal) => this.streamMany(cards, prompts, signal));
  }

  /** Runs what fills `cards`, and ends them with the reason where it fails or is cancelled; true where it did not. */
  async guard(cards, work) {
    const request = new AbortController();
    this.requests.add(request);
    try {
      await work(request.signal);
      for (const card of cards) this.end(card, "the answer broke off", true);
      return true;
    } catch (error) {
      const isOurs = request.signal.aborted;
      const reason = isOurs ? "cancelled" : error instanceof TypeError ? "the connection was lost" : error.message;
      for (const card of cards) this.end(card, reason, !isOurs);
      return false;
    } finally {
      this.requests.delete(request);
    }
  }

  async streamChat(card, messages, signal) {
    for await (const chunk of this.chunks("/v1/chat/completions", { messages }, signal)) {
      card.named(chunk.id);
      this.cancelIfAsked(card);
      const choice = chunk.choices[0];
      if (choice?.delta?.content) card.write(choice.delta.content);
      if (choice?.finish_reason) this.endAs(card, choice.finish_reason);
    }
  }

  async streamMany(cards, prompts, signal) {
    const ids = [];
    for (const prompt of prompts) ids.push(await this.tokenIds(prompt, signal));
    for await (const chunk of this.chunks("/v1/completions", { prompt: ids }, signal)) {
      cards.forEach((card, index) => {
        card.named(cards.length > 1 ? `${chunk.id}-${index}` : chunk.id);
        this.cancelIfAsked(card);
      });
      for (const choice of chunk.choices) {
        const card = cards[choice.index];
        if (choice.text) card.write(choice.text);
        if (choice.finish_reason) this.endAs(card, choice.finish_reason);
      }
    }
  }

  /** A streamed answer's chunks, to a body with what every request of this page has. */
  async *chunks(url, body, signal) {
    const response = await this.post(url, { ...body, ...this.settings() }, signal);
    for await (const { data } of readEvents(response)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }

  /** A small model wanders off where it draws as freely as it may. */
  settings() {
    return { stream: true, max_tokens: Number(this.maxTokens.value) || 64, temperature: 0.6, top_p: 0.9 };
  }

  async post(url, body, signal) {
    const headers = { "content-type": "application/json" };
    const response = await fetch(url, { method: "POST", headers, body: JSON.stringify(body), signal });
    if (!response.ok) throw new Error(await errorText(response));
    return response;
  }

  async tokenIds(prompt, signal) {
    if (!this.tokens.has(prompt)) {
      const body = { messages: [{ role: "user", content: prompt }] };
      const response = await this.post("/tokenize", body, signal);
      this.tokens.set(prompt, (await response.json()).tokens);
    }
    return this.tokens.get(prompt);
  }

  addCard(prompt) {
    this.sent += 1;
    const card = new ChatCard(this.sent, prompt, this.onFollow, (asked) => {
      asked.wasCancelled = true;
      setText(asked.status, "is being cancelled");
      this.cancelIfAsked(asked);
    });
    this.open.add(card);
    this.list.prepend(card.node);
    for (const node of [...this.list.children].slice(KEEP_CARDS)) if (node.classList.contains("over")) node.remove();
    this.showOpen();
    return card;
  }

  /** Has the server end a chat whose name there is known by now; its stream says when that is done. */
  cancelIfAsked(card) {
    if (!card.wasCancelled || card.id === null || card.isAsked) return;
    card.isAsked = true;
    // Where it has just ended by itself, or the server is gone, its stream says that too.
    fetch(`/inspect/requests/${encodeURIComponent(card.id)}`, { method: "DELETE" }).catch(() => {});
  }

  endAs(card, reason) {
    if (reason === "cancelled") this.end(card, "cancelled");
    else this.end(card, `done in ${duration(card.seconds)}${reason === "length" ? ", cut at its length" : ""}`);
  }

  end(card, text, failed = false) {
    card.end(text, failed);
    this.open.delete(card);
    this.showOpen();
  }

  showTurns() {
    const turns = this.conversation.length;
    setText(this.root.querySelector("#chat-turns"), turns ? plural(turns, "turn") : "");
  }

  showOpen() {
    const number = this.open.size;
    setText(this.root.querySelector("#chats-running"), number ? `${count(number)} under way` : "none under way");
    this.root.querySelector("#cancel-all").disabled = number === 0;
  }
}
