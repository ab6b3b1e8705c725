"""Renders a conversation as the text the model was trained on, by the model's own Jinja template.

The template is code from a model's file: it runs sandboxed, its output is bounded, and whatever it raises is the
request's error. Knows no tokens and no HTTP. No torch.
"""

from __future__ import annotations

import datetime
import json
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pageframe.runtime.errors import InvalidRequestError, ModelError
from pageframe.runtime.models.config import read_json
from pageframe.runtime.models.source import ModelSource, one_line
from pageframe.runtime.tokenizer import Tokenizer

MAX_OUTPUT_CHARS = 4 * 2**20


class ChatTemplate:
    """A compiled template.

    Args:
        source_text: the Jinja source.
        bos_token, eos_token: handed to the template under these names.

    Raises:
        ModelError: the source is no valid template.
    """

    def __init__(self, source_text: str, bos_token: str = "", eos_token: str = "") -> None:
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = _environment().from_string(source_text)
        except Exception as error:  # beside Jinja's syntax errors, those of the Python that it makes of a template
            raise ModelError(f"the model's chat template is not valid: {one_line(error)}") from error

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The conversation as text.

        Args:
            messages: OpenAI's messages as plain dictionaries.
            add_generation_prompt: end with the start of the assistant's turn.
            kwargs: further names the template may use, such as `tools`.

        Raises:
            InvalidRequestError: the template refuses the messages or fails on them, or its output is too long.
        """
        names = self._tokens | {"tools": None, "documents": None} | kwargs
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(
                messages=messages, add_generation_prompt=add_generation_prompt, **names
            ):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_OUTPUT_CHARS:
                    raise InvalidRequestError(
                        f"the chat template made more than {MAX_OUTPUT_CHARS} characters of messages", param="messages"
                    )
        except InvalidRequestError:
            raise
        except Exception as error:  # a template can raise anything on messages it was not written for
            reason = str(error) or type(error).__name__
            raise InvalidRequestError(f"the model's chat template failed: {reason}", param="messages") from error
        return "".join(pieces)


def load_chat_template(source: ModelSource, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The model's own template, or None where it has none.

    Raises:
        ModelError: it is not valid.
    """
    text = _gguf_template(source) if source.kind == "gguf" else _folder_template(source)
    if text is None:
        return None
    try:
        return ChatTemplate(text, tokenizer.bos_token, tokenizer.eos_token)
    except ModelError as error:
        raise ModelError(f"{source.path}: {error}") from error


def _gguf_template(source: ModelSource) -> str | None:
    text = source.gguf.metadata.get("tokenizer.chat_template")
    if text is not None and not isinstance(text, str):
        raise ModelError(f"{source.path}: tokenizer.chat_template is no text")
    return text


def _folder_template(source: ModelSource) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's chat_template: a text, or a list of named ones."""
    path = source.path / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: cannot be read: {one_line(error)}") from error
    path = source.path / "tokenizer_config.json"
    value = read_json(path).get("chat_template") if path.is_file() else None
    if isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
        value = named[0].get("template") if named else None
        if value is None:
            raise ModelError(f"{path}: chat_template has no template named 'default'")
    if value is not None and not isinstance(value, str):
        raise ModelError(f"{path}: chat_template is neither a text nor a list of named texts")
    return value


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that Hugging Face renders templates in, as models' templates expect it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """json.dumps; Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)
