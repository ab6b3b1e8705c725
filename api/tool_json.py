"""Follows the JSON of a tool call while a model writes it, each character once.

Knows nothing of how models mark their calls, nor of what a call's arguments should be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container

WHITESPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
#: Models write line ends into strings as they are, which JSON forbids and every reader understands.
_ESCAPES = {chr(code): json.dumps(chr(code))[1:-1] for code in range(0x20)}

_DIGITS = "0123456789"
_SPACES = " \t\n\r"


def _moves(*targets: tuple[str, str]) -> dict[str, str]:
    return {char: state for chars, state in targets for char in chars}


_VALUE = (
    (_SPACES, "value"),
    ("{", "open object"),
    ("[", "open array"),
    ('"', "string"),
    ("-", "minus"),
    ("0", "zero"),
    ("123456789", "whole"),
    ("t", "t"),
    ("f", "f"),
    ("n", "n"),
)
#: RFC 8259 as a table: state and character to the next state. `_STEPS` lists the targets that are steps, not states.
_MOVES: dict[str, dict[str, str]] = {
    "value": _moves(*_VALUE),
    "first value": _moves(*_VALUE, (_SPACES, "first value"), ("]", "close")),
    "first key": _moves((_SPACES, "first key"), ('"', "key"), ("}", "close")),
    "next key": _moves((_SPACES, "next key"), ('"', "key")),
    "colon": _moves((_SPACES, "colon"), (":", "value")),
    "after": _moves((_SPACES, "after"), (",", "comma"), ("}]", "close")),
    "string": _moves(("\\", "escape"), ('"', "end of string")),
    "escape": _moves(('"\\/bfnrt', "string"), ("u", "hex 1")),
    "hex 1": _moves((_DIGITS + "abcdefABCDEF", "hex 2")),
    "hex 2": _moves((_DIGITS + "abcdefABCDEF", "hex 3")),
    "hex 3": _moves((_DIGITS + "abcdefABCDEF", "hex 4")),
    "hex 4": _moves((_DIGITS + "abcdefABCDEF", "string")),
    "minus": _moves(("0", "zero"), ("123456789", "whole")),
    "zero": _moves((".", "point"), ("eE", "exponent")),
    "whole": _moves((_DIGITS, "whole"), (".", "point"), ("eE", "exponent")),
    "point": _moves((_DIGITS, "fraction")),
    "fraction": _moves((_DIGITS, "fraction"), ("eE", "exponent")),
    "exponent": _moves(("+-", "sign"), (_DIGITS, "power")),
    "sign": _moves((_DIGITS, "power")),
    "power": _moves((_DIGITS, "power")),
}
_MOVES |= {
    word[:length]: {word[length]: word[: length + 1] if length + 1 < len(word) else "end"}
    for word in ("true", "false", "null")
    for length in range(1, len(word))
}
_STEPS = frozenset({"open object", "open array", "close", "comma", "key", "end of string", "end"})
#: A number is over where something else begins.
_NUMBER_ENDS = frozenset({"zero", "whole", "fraction", "power"})


class JsonScanner:
    """Follows one JSON value through pieces of text.

    It stops where the value is complete, or in front of the first character that JSON does not allow there. Control
    characters inside strings are the one liberty: they come out as escapes.
    """

    def __init__(self) -> None:
        self._state = "value"
        #: The closing bracket of each object and array that is open.
        self._open: list[str] = []
        self._string_is_key = False
        self.done = False

    def feed(self, text: str, start: int, out: list[str]) -> int:
        """Reads on from `start`; what it read, escaped where needed, is appended to `out`.

        Returns:
            The end of what it read: the end of the text, or else the value is done or cannot go on.
        """
        position = copied = start
        while position < len(text) and not self.done:
            if self._state == "string":
                position = _PLAIN.match(text, position).end()  # type: ignore[union-attr]  # it matches ""
                if position == len(text):
                    break
                if text[position] in _ESCAPES:
                    out += text[copied:position], _ESCAPES[text[position]]
                    position = copied = position + 1
                    continue
            if not self._accept(text[position]):
                break
            position += 1
        out.append(text[copied:position])
        return position

    def _accept(self, char: str) -> bool:
        """Goes on by one character, or says that it is no part of the value."""
        if self._state in _NUMBER_ENDS and char not in _MOVES[self._state]:
            self._end_value()
            if self.done:
                return False
        target = _MOVES[self._state].get(char)
        if target is None or (target == "close" and char != self._open[-1]):
            return False
        if target in _STEPS:
            self._step(target)
        else:
            self._state = target
        return True

    def _step(self, step: str) -> None:
        if step == "open object":
            self._open.append("}")
            self._state = "first key"
        elif step == "open array":
            self._open.append("]")
            self._state = "first value"
        elif step == "comma":
            self._state = "next key" if self._open[-1] == "}" else "value"
        elif step == "key":
            self._string_is_key = True
            self._state = "string"
        elif step == "end of string" and self._string_is_key:
            self._string_is_key = False
            self._state = "colon"
        else:
            if step == "close":
                self._open.pop()
            self._end_value()

    def _end_value(self) -> None:
        self.done = not self._open
        self._state = "after"


class CallReader:
    """Follows one call, `{"name": …, "arguments": {…}}`, through pieces of text.

    Keys may come in any order, and `parameters` means `arguments`; a call without either has no arguments, `{}`. Keys
    of another kind are a call's only behind these two. Arguments come out as they are written, from the moment the name
    is known.

    Args:
        names: the names that a call may have.
        name: the call's name, where what follows is its arguments alone.
    """

    def __init__(self, names: Container[str], name: str | None = None) -> None:
        self._names = names
        self._only_arguments = name is not None
        self._expected = "open" if name is None else "value"
        self._key = "" if name is None else "arguments"
        self._scanner: JsonScanner | None = None
        #: What the scanner has read of a key or of a value other than the arguments.
        self._read: list[str] = []
        self._arguments: list[str] = []
        self._has_arguments = False
        self.name = name
        #: The arguments are complete.
        self.complete = False
        #: The whole object is.
        self.done = False
        #: What follows cannot belong to a call.
        self.failed = False

    @property
    def begun(self) -> bool:
        """It is sure to be a call: the name is known and the arguments have begun."""
        return self.name is not None and (self._has_arguments or self.done)

    def take_arguments(self) -> str:
        """What is new of the arguments."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def feed(self, text: str, start: int) -> int:
        """Reads on from `start`: to the end of the text, or to where the call becomes complete, done or failed.

        Returns:
            The end of what it read.
        """
        position, was_complete = start, self.complete
        while position < len(text) and not (self.done or self.failed) and self.complete == was_complete:
            if self._scanner is not None:
                position = self._scan(self._scanner, text, position)
                continue
            position = WHITESPACE.match(text, position).end()  # type: ignore[union-attr]  # it matches ""
            if position < len(text):
                self.failed = not self._accept(text[position])
                position += not self.failed and self._scanner is None
        return position

    def _scan(self, scanner: JsonScanner, text: str, start: int) -> int:
        is_arguments = self._expected == "value" and self._key == "arguments"
        end = scanner.feed(text, start, self._arguments if is_arguments else self._read)
        if scanner.done:
            self._scanner = None
            self.failed = not self._end_item()
        elif end < len(text):
            self.failed = True
        return end

    def _accept(self, char: str) -> bool:
        """Goes on by one character between keys and values; where one of these begins, only up to it."""
        if self._expected == "value":
            wanted = {"arguments": "{", "name": '"'}.get(self._key)
            if wanted not in (None, char):
                return False
            self._has_arguments |= self._key == "arguments"
            self._scanner = JsonScanner()
        elif self._expected in ("first key", "next key") and char == '"':
            self._expected = "key"
            self._scanner = JsonScanner()
        elif (self._expected, char) in (("first key", "}"), ("after", "}")):
            return self._end()
        else:
            following = {("open", "{"): "first key", ("colon", ":"): "value", ("after", ","): "next key"}
            expected = following.get((self._expected, char))
            if expected is None:
                return False
            self._expected = expected
        return True

    def _end_item(self) -> bool:
        """A key or a value is complete; False where it makes this no call."""
        text = "".join(self._read)
        self._read.clear()
        if self._expected == "key":
            key = json.loads(text)
            self._key = "arguments" if key == "parameters" else key
            self._expected = "colon"
            known = {"name": self.name is None, "arguments": not self._has_arguments, "id": True, "type": True}
            return known.get(self._key, self.complete)
        self._expected = "after"
        if self._key == "name":
            name = json.loads(text)
            if name not in self._names:
                return False
            self.name = name
        self.complete = self.name is not None and self._has_arguments
        self.done = self._only_arguments
        return True

    def _end(self) -> bool:
        """The closing brace; False where there was no name."""
        if self.name is None:
            return False
        if not self._has_arguments:
            self._arguments.append("{}")
        self.complete = self.done = True
        return True
