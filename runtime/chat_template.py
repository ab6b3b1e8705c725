"""Renders a conversation as the text the model was trained on, by the model's own Jinja template.

The template is code from a model's file: it runs sandboxed, its time and its output are bounded, and whatever it raises
is the request's error. Knows no tokens and no HTTP. No torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pageframe.runtime.errors import InvalidRequestError, ModelError
from pageframe.runtime.models.config import read_json
from pageframe.runtime.models.source import ModelSource, one_line
from pageframe.runtime.template_sandbox import (
    MAX_OUTPUT_CHARS,
    Budget,
    TemplateLimitError,
    budget,
    compile_template,
)
from pageframe.runtime.tokenizer import Tokenizer

MAX_REASON_CHARS = 500
#: Hugging Face's name of the template that is used where tools are given.
_TOOL_TEMPLATE = "tool_use"


class ChatTemplate:
    """A compiled template, and perhaps a second one for conversations with tools.

    Args:
        source_text: the Jinja source.
        bos_token, eos_token: handed to the template under these names.
        tool_source_text: the source that is used where tools are given; None: the same.

    Raises:
        ModelError: a source is no valid template.
    """

    tool_source_text: str
    """The source that is used where tools are given. It shows how the model writes its calls."""
    reads_tools: bool
    """Whether that template shows tools to the model at all."""

    def __init__(
        self, source_text: str, bos_token: str = "", eos_token: str = "", *, tool_source_text: str | None = None
    ) -> None:
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self.tool_source_text = source_text if tool_source_text is None else tool_source_text
        try:
            self._template, self.reads_tools = compile_template(source_text)
            self._tool_template = self._template
            if tool_source_text is not None:
                self._tool_template, self.reads_tools = compile_template(tool_source_text)
        except Exception as error:  # beside Jinja's syntax errors, those of the Python that it makes of a template
            raise ModelError(f"the model's chat template is not valid: {one_line(error)}") from error

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The conversation as text.

        Args:
            messages: OpenAI's messages as plain dictionaries; the arguments of tool calls are objects.
            add_generation_prompt: end with the start of the assistant's turn.
            kwargs: further names the template may use, such as `tools`, a list of OpenAI's definitions.

        Raises:
            InvalidRequestError: the template refuses the messages or fails on them, takes too long, or its output is
                too long.
        """
        names = self._tokens | {"tools": None, "documents": None} | kwargs
        template = self._tool_template if names["tools"] else self._template
        pieces: list[str] = []
        length = 0
        token = budget.set(Budget())
        try:
            for piece in template.generate(messages=messages, add_generation_prompt=add_generation_prompt, **names):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_OUTPUT_CHARS:
                    raise TemplateLimitError(f"made more than {MAX_OUTPUT_CHARS} characters of messages")
        except TemplateLimitError as error:
            raise InvalidRequestError(f"the model's chat template {error}", param="messages") from None
        except Exception as error:  # a template can raise anything on messages it was not written for
            reason = (str(error) or type(error).__name__)[:MAX_REASON_CHARS]
            raise InvalidRequestError(f"the model's chat template failed: {reason}", param="messages") from error
        finally:
            budget.reset(token)
        return "".join(pieces)


def load_chat_template(source: ModelSource, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The model's own template, or None where it has none.

    Raises:
        ModelError: it is not valid.
    """
    default, for_tools = _gguf_templates(source) if source.kind == "gguf" else _folder_templates(source)
    if default is None:
        return None
    try:
        return ChatTemplate(default, tokenizer.bos_token, tokenizer.eos_token, tool_source_text=for_tools)
    except ModelError as error:
        raise ModelError(f"{source.path}: {error}") from error


def _gguf_templates(source: ModelSource) -> tuple[str | None, str | None]:
    """The default template and the one for tools."""
    texts = []
    for key in ("tokenizer.chat_template", f"tokenizer.chat_template.{_TOOL_TEMPLATE}"):
        text = source.gguf.metadata.get(key)
        if text is not None and not isinstance(text, str):
            raise ModelError(f"{source.path}: {key} is no text")
        texts.append(text)
    return texts[0], texts[1]


def _folder_templates(source: ModelSource) -> tuple[str | None, str | None]:
    """The default template and the one for tools: from files of their own, else from tokenizer_config.json, whose
    chat_template is a text or a list of named ones."""
    path = source.path / "chat_template.jinja"
    if path.is_file():
        tool_path = source.path / "additional_chat_templates" / f"{_TOOL_TEMPLATE}.jinja"
        return _read_text(path), _read_text(tool_path) if tool_path.is_file() else None
    path = source.path / "tokenizer_config.json"
    value = read_json(path).get("chat_template") if path.is_file() else None
    if not isinstance(value, list):
        named = {"default": value}
    else:
        entries = [entry for entry in value if isinstance(entry, dict) and isinstance(entry.get("name"), str)]
        named = {entry["name"]: entry.get("template") for entry in entries}
        if named.get("default") is None:
            raise ModelError(f"{path}: chat_template has no template named 'default'")
    texts = [named.get("default"), named.get(_TOOL_TEMPLATE)]
    if not all(text is None or isinstance(text, str) for text in texts):
        raise ModelError(f"{path}: chat_template is neither a text nor a list of named texts")
    return texts[0], texts[1]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {one_line(error)}") from error
