"""Conversations of several turns in a model's own chat template."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from pageframe.runtime.chat_template import ChatTemplate
from pageframe.runtime.tokenizer import Tokenizer

#: Yields each turn's prompt and is sent the answer's token ids.
Conversation = Generator[list[int], list[int], None]


class Chat:
    """A model's own way to write a conversation as token ids."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template

    def prompt(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        return self._tokenizer.encode(self._template.render(list(messages)), add_special_tokens=False)

    def text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids)


def asked_in_turn(chat: Chat, questions: Sequence[str]) -> Conversation:
    """Each turn holds all earlier questions and the answers they got."""
    messages: list[dict[str, Any]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        answer = yield chat.prompt(messages)
        messages.append({"role": "assistant", "content": chat.text(answer)})


def recorded(chat: Chat, inputs: Sequence[str]) -> Conversation:
    """Each turn is an input as it was recorded, whatever the answers are now."""
    for text in inputs:
        yield chat.prompt([{"role": "user", "content": text}])
