// One chat as it is shown: its question, its answer as it grows, its state, and the buttons to follow and cancel it.

import { element, idElement, setText } from "./format.js";

export class ChatCard {
  /** `onFollow(id)` and `onCancel(card)` are called by its buttons. */
  constructor(number, prompt, onFollow, onCancel) {
    this.id = null;
    this.isOver = false;
    this.wasCancelled = false;
    this.began = performance.now();
    this.text = "";
    this.status = element("span", { class: "chat-status", text: "sent" });
    this.name = element("span", { class: "chat-id", text: `Chat ${number}` });
    this.answer = element("p", { class: "chat-answer" });
    const button = (text, label) => element("button", { type: "button", class: "small", text, "aria-label": label });
    this.cancel = button("Cancel", `Cancel chat ${number}`);
    this.cancel.addEventListener("click", () => onCancel(this));
    this.follow = button("Follow", `Follow chat ${number} through the map`);
    this.follow.addEventListener("click", () => onFollow(this.id));
    this.follow.disabled = true;
    const question = element("p", { class: "chat-question", title: prompt.slice(0, 600), text: shorten(prompt) });
    const head = element("div", { class: "chat-head" }, this.name, this.status, this.follow, this.cancel);
    this.node = element("li", { class: "chat-card" }, head, question, this.answer);
  }

  /** What the server calls it. */
  named(id) {
    if (this.id !== null) return;
    this.id = id;
    this.name.replaceChildren(idElement(id));
    this.node.dataset.id = id;
    this.follow.disabled = false;
    setText(this.status, "waits");
  }

  write(text) {
    if (this.text === "") setText(this.status, "streams");
    this.text += text;
    this.answer.textContent = this.text;
    this.answer.scrollTop = this.answer.scrollHeight;
  }

  end(text, failed = false) {
    if (this.isOver) return;
    this.isOver = true;
    setText(this.status, text);
    this.status.title = text;
    this.node.classList.add("over");
    this.node.classList.toggle("failed", failed);
    this.cancel.disabled = true;
  }

  get seconds() {
    return (performance.now() - this.began) / 1000;
  }
}

/** A long prompt by its end: the beginning is what many share. */
function shorten(prompt) {
  return prompt.length > 160 ? `… ${prompt.slice(-110).replace(/^\S*\s/, "")}` : prompt;
}
