"""The load client's one exception. It is the client's own, since the client imports nothing of the server's."""

from __future__ import annotations


class InputError(Exception):
    """What the person asked for cannot be done: a bad flag, an unreadable file, a server that is not there.

    Its message is one line, written for that person.
    """
