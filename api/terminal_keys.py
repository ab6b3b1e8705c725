"""A terminal's keys, one by one and unechoed, by their names. POSIX only."""

from __future__ import annotations

import os
import select
import termios
from typing import Any, Self

#: How long the rest of a key's bytes may take; Escape alone is known by its missing.
REST_SECONDS = 0.03
ESCAPE = b"\x1b"
#: What follows Escape, by key; terminals differ.
_SEQUENCES = {
    "up": (b"[A", b"OA"),
    "down": (b"[B", b"OB"),
    "page up": (b"[5~",),
    "page down": (b"[6~",),
    "home": (b"[H", b"OH", b"[1~", b"[7~"),
    "end": (b"[F", b"OF", b"[4~", b"[8~"),
}
_NAMES = {sequence: name for name, sequences in _SEQUENCES.items() for sequence in sequences}
_PLAIN = {"\r": "enter", "\n": "enter", "\x1b": "escape"}


class Keyboard:
    """A terminal that hands on every key at once, from `with` to its end, however that comes.

    Ctrl-C stays what it is; Ctrl-Z does nothing, since it would leave the terminal as it is now.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __enter__(self) -> Self:
        self._before = termios.tcgetattr(self.descriptor)
        now: list[Any] = termios.tcgetattr(self.descriptor)
        now[3] &= ~(termios.ECHO | termios.ICANON)
        now[6][termios.VMIN], now[6][termios.VTIME] = 1, 0
        now[6][termios.VSUSP] = b"\x00"
        termios.tcsetattr(self.descriptor, termios.TCSADRAIN, now)
        return self

    def __exit__(self, *exc_info: object) -> None:
        termios.tcsetattr(self.descriptor, termios.TCSAFLUSH, self._before)

    def read(self) -> list[str]:
        """The keys pressed since the last call; waits for one. `["q"]` where the terminal has gone."""
        data = os.read(self.descriptor, 1024)
        if data.endswith(ESCAPE) and select.select([self.descriptor], [], [], REST_SECONDS)[0]:
            data += os.read(self.descriptor, 1024)
        return key_names(data) if data else ["q"]


def key_names(data: bytes) -> list[str]:
    """The keys that these bytes stand for: characters, or names as "page up". Keys without a name here are left out."""
    keys = []
    while data:
        if data[:1] == ESCAPE and data[1:2] in (b"[", b"O"):
            end = 2
            while end < len(data) and not 0x40 <= data[end] <= 0x7E:
                end += 1
            sequence, data = data[1 : end + 1], data[end + 1 :]
            keys += [_NAMES[sequence]] if sequence in _NAMES else []
            continue
        char, data = data[:1].decode("latin-1"), data[1:]
        if char in _PLAIN or char.isprintable():
            keys.append(_PLAIN.get(char, char))
    return keys
