"""What the API process and the engine process say to each other: slotted dataclasses, msgspec's msgpack, no pickle.

A message is two frames: its kind, and its body encoded as the type that MESSAGE_TYPES gives for the kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from pageframe.runtime.config import EngineConfig, ResolvedConfig
from pageframe.runtime.inspection import EngineStats
from pageframe.runtime.request import RequestOutput, SamplingParams


@dataclass(slots=True)
class RecordingConfig:
    """Where the journal is recorded: see journal_recorder.py. `path` is absolute."""

    path: str
    max_bytes: int
    with_token_ids: bool


@dataclass(slots=True)
class Start:
    """What the engine is to be."""

    config: EngineConfig
    recording: RecordingConfig | None = None


@dataclass(slots=True)
class Add:
    """A request with all its choices, each of which has an id of its own from here on: see request.choice_ids.

    `params`: None where they are those of the Add before, since they may be long and many prompts may share them.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams | None
    tenant: str
    cache_salt: str
    priority: int


@dataclass(slots=True)
class Finish:
    """A stop string ended the text `num_output_tokens` tokens into the output."""

    request_id: str
    num_output_tokens: int


@dataclass(slots=True)
class Question:
    """An inspection, answered between two steps under the same `call`. It changes nothing."""

    call: int
    what: str
    argument: str


@dataclass(slots=True)
class ResetPrefixCache:
    """Forget all computed prefixes, between two steps. The answer under the same `call`: how many blocks that were."""

    call: int


@dataclass(slots=True)
class Answer:
    """`body` is JSON. Where there is none, `error` says why; with `not_found` it is the id that is unknown, and with
    `failed` the engine's log has the reason."""

    call: int
    body: bytes = b""
    error: str = ""
    not_found: bool = False
    failed: bool = False


@dataclass(slots=True)
class Step:
    """What a step gave; with no outputs, just news of the gauges.

    `waits_for_grammars`: there is nothing to do until one of the requests' grammars is compiled. Said now and then for
    as long as it is so.
    """

    outputs: list[RequestOutput]
    stats: EngineStats
    waits_for_grammars: bool = False


@dataclass(slots=True)
class Loading:
    done: int
    total: int


# To the engine: start, add, abort, finish, question, reset, shutdown. From it: loading, ready, failed, step, answer.
MESSAGE_TYPES: dict[bytes, Any] = {
    b"start": Start,
    b"add": Add,
    b"abort": str,
    b"finish": Finish,
    b"question": Question,
    b"reset": ResetPrefixCache,
    b"shutdown": None,
    b"loading": Loading,
    b"ready": ResolvedConfig,
    b"failed": str,
    b"step": Step,
    b"answer": Answer,
}

_encoder = msgspec.msgpack.Encoder()
_decoders = {kind: msgspec.msgpack.Decoder(body) for kind, body in MESSAGE_TYPES.items()}


def encode(kind: bytes, body: Any) -> list[bytes]:
    """The frames of a message."""
    assert kind in MESSAGE_TYPES, f"{kind!r} is no kind of message"
    return [kind, _encoder.encode(body)]


def decode(frames: list[bytes]) -> tuple[bytes, Any]:
    """Kind and body of a message's frames.

    Raises:
        msgspec.DecodeError: the body is not of the kind's type.
    """
    kind, body = frames
    return kind, _decoders[kind].decode(body)
