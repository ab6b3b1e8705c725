"""Digests of token sequences, made by a process of its own: a long prompt's tokens take a microsecond each, in which
the interpreter lock would keep the engine from its next step.

A token's digest is BLAKE2b (RFC 7693), keyed, of the digest before it and the token as four bytes, little-endian. The
process starts with the first tokens and ends with its standard input, that is with its parent at the latest.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import struct
import subprocess
import sys
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DIGEST_BYTES = 8
KEY_BYTES = 32
#: Before tokens: the digest that theirs go on from, and how many they are.
_FRAME = struct.Struct(f"<{DIGEST_BYTES}sI")
CLOSE_SECONDS = 5.0


class TokenDigests:
    """Digests under a key that nobody else ever sees. For one thread."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(KEY_BYTES)
        self._process: subprocess.Popen[bytes] | None = None

    def of_salt(self, salt: bytes) -> bytes:
        """The digest that a sequence's first token goes on from."""
        return _digest(self._key, salt)

    def of_tokens(self, before: bytes, token_ids: npt.NDArray[np.int32]) -> bytes:
        """DIGEST_BYTES for each token, of all tokens up to it.

        Args:
            before: the digest of what stands before them.

        Raises:
            OSError: the process could not be started, or has ended.
        """
        if not len(token_ids):
            return b""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(_FRAME.pack(before, len(token_ids)) + token_ids.astype("<i4").tobytes())
        process.stdin.flush()
        digests = process.stdout.read(DIGEST_BYTES * len(token_ids))
        if len(digests) < DIGEST_BYTES * len(token_ids):
            raise BrokenPipeError("the process has ended")
        return digests

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is None:
            return
        with self._process as process:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        # Isolated, and by its path: it needs the standard library alone, and so is there in a few milliseconds.
        command = [sys.executable, "-I", "-S", __file__]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(self._key)
        return process


def _digest(key: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, key=key, digest_size=DIGEST_BYTES).digest()


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the requests end: the process' whole work."""
    key = requests.read(KEY_BYTES)
    while len(frame := requests.read(_FRAME.size)) == _FRAME.size:
        digest, num_tokens = _FRAME.unpack(frame)
        data = requests.read(4 * num_tokens)
        digests = []
        for start in range(0, len(data), 4):
            digest = _digest(key, digest + data[start : start + 4])
            digests.append(digest)
        answers.write(b"".join(digests))
        answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
