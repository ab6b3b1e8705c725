"""Finds the tool calls in what a model writes, while it writes: text in, content and tool-call deltas out.

A parser's deltas, joined, are the message, and they do not depend on how the text was cut. Text that only looks like a
call is content, whole. From the moment a call has a known name and arguments have begun, its arguments go out as they
come, so a call that breaks off later, at a length or at text that is no JSON, stays unfinished: closing it would have
clients run half a call. What follows the break is content. White space next to calls only separates them.

Knows nothing of tokens, templates or grammars.
"""

from __future__ import annotations

import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pageframe.api.tool_json import WHITESPACE, CallReader

_SPACE = " \t\n\r"
#: What may stand between calls, or between a call and its closing marker: models miscount braces.
_GAP = re.compile(r"[ \t\n\r;,}]*")
#: A name, Mistral's call id and its mark of arguments, in front of the brace.
_HEAD = re.compile(r"([a-zA-Z0-9_-]{1,64})[ \t\n\r]*(?:\[CALL_ID\][^\[\]{}]*)?(?:\[ARGS\])?[ \t\n\r]*")
_ID_LETTERS = string.ascii_letters + string.digits
#: The longest name, call id and markers between Mistral's [TOOL_CALLS] and the arguments, with room for spaces.
_MAX_HEAD = 256


@dataclass(slots=True)
class ToolDelta:
    """What one push adds to a message.

    Args:
        content: new text.
        tool_calls: OpenAI's deltas: a call's first has `index`, `id`, `type` and `function` with `name` and the first
            part of `arguments`; its others have `index` and `function` with more of `arguments`.
    """

    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


def join_tool_calls(deltas: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The `tool_calls` of the whole message, of one choice's deltas in order."""
    calls: list[dict[str, Any]] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        if delta["index"] == len(calls):
            arguments.append([])
            calls.append({"id": delta["id"], "type": delta["type"], "function": {"name": delta["function"]["name"]}})
        arguments[delta["index"]].append(delta["function"]["arguments"])
    for call, pieces in zip(calls, arguments, strict=True):
        call["function"]["arguments"] = "".join(pieces)
    return calls


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def new_short_call_id() -> str:
    """Nine letters and digits: Mistral's templates take no other id."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))


class ToolParser(ABC):
    """The calls of one choice. A subclass says how its models mark them.

    Args:
        names: the tools that may be called; a call of another is content.
        parallel: whether a message may have several calls; if not, what follows the first is content.
        make_id: makes a call's id.
    """

    #: Tokens that a tokenizer may call special and that must be seen in the text all the same.
    markers: ClassVar[tuple[str, ...]]
    #: What may stand beside a call, beside white space, and is no content.
    _syntax: ClassVar[str] = "}"
    #: Whether a call may follow content; if not, all behind content is content.
    _calls_follow_content: ClassVar[bool] = True
    _default_id: ClassVar[Callable[[], str]] = new_call_id

    def __init__(
        self, names: Collection[str], *, parallel: bool = True, make_id: Callable[[], str] | None = None
    ) -> None:
        self._names = frozenset(names)
        self._parallel = parallel
        self._make_id = make_id or type(self)._default_id
        self._read: Callable[[str, int], int] = self._read_start
        #: Read, but not decided: white space that content may follow, and what may become a call.
        self._held: list[str] = []
        #: Not read yet: the beginning of a marker, perhaps.
        self._rest = ""
        self._call = CallReader(())
        self._is_announced = False
        self._num_begun = 0
        self._num_complete = 0
        #: Only white space and syntax have followed the last call.
        self._is_after_call = False
        self._has_content = False
        self._final = False
        self._content: list[str] = []
        self._deltas: list[dict[str, Any]] = []

    def push(self, text: str, *, final: bool = False) -> ToolDelta:
        """Adds text.

        Args:
            final: there is no more; what is held back comes out.
        """
        assert not self._final, "push after the end"
        self._final = final
        text = self._rest + text
        self._rest = ""
        position = 0
        while position < len(text):
            position = self._read(text, position)
        if final:
            self._flush()
        delta = ToolDelta("".join(self._content), self._deltas)
        self._content, self._deltas = [], []
        return delta

    def finish_reason(self, reason: str) -> str:
        """The choice's finish reason, where the engine's is `reason`. To be asked after the last push."""
        is_call = self._num_complete > 0 and self._num_complete == self._num_begun
        return "tool_calls" if reason == "stop" and is_call else reason

    # Each of these reads from `start`, at least a character or up to where another takes over, and returns the end.

    @abstractmethod
    def _read_start(self, text: str, start: int) -> int:
        """What stands in front of a call, or is content."""

    @abstractmethod
    def _read_between(self, text: str, start: int) -> int:
        """What follows a call's object."""

    def _read_plain(self, text: str, start: int) -> int:
        self._say(text[start:])
        return len(text)

    def _read_call(self, text: str, start: int) -> int:
        call = self._call
        end = call.feed(text, start)
        if call.begun:
            self._held.clear()
            self._emit(call)
        else:
            self._held.append(text[start:end])
        if call.complete:
            self._num_complete += 1
            self._is_after_call = True
            self._read = self._read_object_end
        elif call.failed:
            self._resume()
        return end

    def _read_object_end(self, text: str, start: int) -> int:
        """The keys after the arguments, which count for nothing, and the closing brace, which may be missing."""
        end = start if self._call.done else self._call.feed(text, start)
        self._held.append(text[start:end])
        if self._call.done:
            self._held.clear()
            self._read = self._read_between
        elif self._call.failed and self._held_is_syntax():
            self._read = self._read_between
        elif self._call.failed:
            self._resume()
        return end

    def _find_marker(self, text: str, start: int, marker: str) -> int | None:
        """Reads content up to and with `marker`, which is held, and returns the end of it.

        None where the text has no marker: all of it is content, but what may be a marker's beginning, which waits.
        """
        found = text.find(marker, start)
        if found >= 0:
            self._say(text[start:found])
            self._held.append(marker)
            return found + len(marker)
        end = len(text) - (0 if self._final else _num_open(text, start, marker))
        self._say(text[start:end])
        self._rest = text[end:]
        return None

    def _begin_call(self, call: CallReader) -> None:
        self._call = call
        self._is_announced = False
        self._read = self._read_call

    def _resume(self) -> None:
        """What is held was no part of a call; what follows is content until the next one begins, if one may."""
        held = "".join(self._held)
        self._held.clear()
        self._say(held)
        may_call = self._calls_follow_content and (self._parallel or self._num_begun == 0)
        self._read = self._read_start if may_call else self._read_plain

    def _say(self, text: str) -> None:
        """Content; the white space at its end waits for what follows."""
        kept = text.rstrip(_SPACE)
        space = text[len(kept) :]
        if kept:
            if self._is_after_call and not self._has_content:
                self._held.clear()
                kept = kept.lstrip(_SPACE)
            self._content += (*self._held, kept)
            self._held.clear()
            self._is_after_call = False
            self._has_content = True
        self._held.append(space)

    def _held_is_syntax(self) -> bool:
        return self._is_after_call and not "".join(self._held).strip(_SPACE + self._syntax)

    def _emit(self, call: CallReader) -> None:
        arguments = call.take_arguments()
        if not self._is_announced:
            self._is_announced = True
            function = {"name": call.name, "arguments": arguments}
            self._deltas.append(
                {"index": self._num_begun, "id": self._make_id(), "type": "function", "function": function}
            )
            self._num_begun += 1
        elif arguments:
            self._deltas.append({"index": self._num_begun - 1, "function": {"arguments": arguments}})

    def _flush(self) -> None:
        if not self._held_is_syntax():
            self._content += self._held
        self._held.clear()


class HermesParser(ToolParser):
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`, anywhere: Hermes, Qwen 2.5 and 3, and many after them."""

    markers = ("<tool_call>", "</tool_call>")

    def _read_start(self, text: str, start: int) -> int:
        end = self._find_marker(text, start, self.markers[0])
        if end is None:
            return len(text)
        self._begin_call(CallReader(self._names))
        return end

    def _read_between(self, text: str, start: int) -> int:
        closing = self.markers[1]
        end = _GAP.match(text, start).end()  # type: ignore[union-attr]  # it matches ""
        self._held.append(text[start:end])
        if text.startswith(closing, end):
            self._held.clear()
            self._resume()
            return end + len(closing)
        if closing.startswith(text[end : end + len(closing)]):
            self._rest = "" if self._final else text[end:]
            return len(text)
        self._resume()
        return end


class Llama3Parser(ToolParser):
    """`{"name": …, "parameters": …}`, perhaps several with semicolons between, as the whole message: Llama 3.

    A brace anywhere else is text: an example in an explanation is no call.
    """

    markers = ("<|python_tag|>",)
    _syntax = "};,"
    _calls_follow_content = False

    def _read_start(self, text: str, start: int) -> int:
        tag = self.markers[0]
        gap = _GAP if self._is_after_call else WHITESPACE
        end = gap.match(text, start).end()  # type: ignore[union-attr]  # it matches ""
        self._held.append(text[start:end])
        if text.startswith(tag, end):
            self._held.append(tag)
            return end + len(tag)
        if not self._final and tag.startswith(text[end:]):
            self._rest = text[end:]
            return len(text)
        if text.startswith("{", end) and (self._parallel or self._num_begun == 0):
            self._begin_call(CallReader(self._names))
        elif end < len(text):
            self._resume()
        return end

    def _read_between(self, text: str, start: int) -> int:
        self._read = self._read_start
        return start


class MistralParser(ToolParser):
    """`[TOOL_CALLS]`, then `[{"name": …, "arguments": …}, …]` or, in newer models, a name, perhaps `[CALL_ID]` and an
    id, perhaps `[ARGS]`, and the arguments. An id that the model writes is its own; calls get ours."""

    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    _syntax = "},]"
    _default_id = new_short_call_id
    _is_list = False

    def _read_start(self, text: str, start: int) -> int:
        end = self._find_marker(text, start, self.markers[0])
        if end is None:
            return len(text)
        self._read = self._read_form
        return end

    def _read_form(self, text: str, start: int) -> int:
        end = WHITESPACE.match(text, start).end()  # type: ignore[union-attr]  # it matches ""
        self._held.append(text[start:end])
        if end == len(text):
            return end
        self._is_list = text[end] == "["
        self._held.append("[" * self._is_list)
        self._read = self._read_list if self._is_list else self._read_name
        return end + self._is_list

    def _read_name(self, text: str, start: int) -> int:
        brace = text.find("{", start, start + _MAX_HEAD)
        if brace < 0 and len(text) - start < _MAX_HEAD and not self._final:
            self._rest = text[start:]
            return len(text)
        head = _HEAD.fullmatch(text, start, brace) if brace >= 0 else None
        if head is None or head[1] not in self._names:
            self._resume()
            return start
        self._held.append(text[start:brace])
        self._begin_call(CallReader(self._names, head[1]))
        return brace

    def _read_list(self, text: str, start: int) -> int:
        end = _GAP.match(text, start).end()  # type: ignore[union-attr]  # it matches ""
        self._held.append(text[start:end])
        if text.startswith("]", end) and self._held_is_syntax():
            self._held.clear()
            self._resume()
            return end + 1
        if text.startswith("{", end) and (self._parallel or self._num_begun == 0):
            self._begin_call(CallReader(self._names))
        elif end < len(text):
            self._resume()
        return end

    def _read_between(self, text: str, start: int) -> int:
        if self._is_list:
            self._read = self._read_list
        else:
            self._resume()
        return start


def _num_open(text: str, start: int, marker: str) -> int:
    """How many of the last characters may be the beginning of `marker`."""
    longest = min(len(marker) - 1, len(text) - start)
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)
