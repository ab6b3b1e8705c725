"""A scripted engine, a byte tokenizer and a plain template: the HTTP side's neighbours, without a model.

The engine gives each request the outputs its script says, at once or when the test lets them go.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any

from pageframe.runtime.admission import max_total_tokens
from pageframe.runtime.config import ModelConfig, ResolvedConfig
from pageframe.runtime.errors import EngineDeadError, InvalidRequestError, RequestNotFoundError
from pageframe.runtime.inspection import EngineStats
from pageframe.runtime.request import RequestOutput, SamplingParams, TokenLogprobs, choice_ids

EOS = 256
BOS = 257
VOCAB_SIZE = 260
MAX_MODEL_LEN = 64
SPECIAL = {EOS: "<eos>", BOS: "<bos>"}
WAIT_SECONDS = 10.0

RESOLVED = ResolvedConfig(
    model_name="bytes-1",
    model=ModelConfig(
        family="llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position=MAX_MODEL_LEN,
        norm_eps=1e-5,
        rope_theta=1e4,
        eos_token_ids=(EOS,),
    ),
    dtype="float32",
    compute_dtype="float32",
    device="cpu",
    backend="reference",
    block_size=4,
    num_blocks=32,
    max_model_len=MAX_MODEL_LEN,
    max_num_requests=8,
    max_num_batched_tokens=64,
    threads=1,
    kv_bytes_per_token=64,
    pool_bytes=64 * 4 * 32,
)


class ByteTokenizer:
    """A token per byte, and two special ones; ids beyond them have no text."""

    vocab_size = 258
    bos_token = SPECIAL[BOS]
    eos_token = SPECIAL[EOS]
    add_bos = True
    longest_token = 5

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def encode_end(self, text: str, num_tokens: int, *, add_special_tokens: bool, max_bytes: int) -> list[int] | None:
        return self.encode(text, add_special_tokens=add_special_tokens)[-num_tokens:]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and self.is_special(i))]
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else SPECIAL.get(token_id, "").encode()

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in SPECIAL


class PlainTemplate:
    """`role:content|` for each message, then `bot:`. Refuses two users in a row, as real templates do."""

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        roles = [message["role"] for message in messages]
        if ("user", "user") in pairwise(roles):
            raise InvalidRequestError("roles must alternate", param="messages")
        text = "".join(f"{message['role']}:{message['content']}|" for message in messages)
        options = "".join(f"[{key}={value}]" for key, value in kwargs.items())
        return options + text + "bot:" * add_generation_prompt


def outputs_of(chunks: Sequence[Sequence[int]], *, reason: str = "length", stop_id: int = -1) -> list[RequestOutput]:
    """An engine's outputs, one per chunk of tokens, the last with the reason."""
    outputs = [RequestOutput("", list(chunk)) for chunk in chunks]
    outputs[-1].finish_reason = reason
    outputs[-1].stop_token_id = stop_id
    return outputs


def reply(text: str, *, reason: str = "stop") -> list[RequestOutput]:
    """A byte per output; with reason "stop" an end token follows."""
    ends = [[EOS]] if reason == "stop" else []
    return outputs_of([[byte] for byte in text.encode()] + ends, reason=reason)


def with_logprobs(outputs: list[RequestOutput], top: int) -> list[RequestOutput]:
    """The same, each token with a logprob of -id/100 and the `top` ids after it."""
    for output in outputs:
        output.logprobs = [
            TokenLogprobs(-i / 100, [i + n for n in range(top)], [-(i + n) / 100 for n in range(top)])
            for i in output.token_ids
        ]
    return outputs


def merged(*choices: list[RequestOutput]) -> list[RequestOutput]:
    """The outputs of several choices as an engine gives them: a step's outputs of all, then the next step's."""
    for index, outputs in enumerate(choices):
        for output in outputs:
            output.request_id = str(index)
    steps = zip_longest(*choices)
    return [output for step in steps for output in step if output is not None]


class FakeQueue:
    def __init__(self) -> None:
        self._items: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()

    async def get(self) -> RequestOutput:
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item

    def put(self, item: RequestOutput | Exception) -> None:
        self._items.put_nowait(item)


@dataclass
class Added:
    """A request the engine was given."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    queue: FakeQueue
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    outputs: list[RequestOutput] = field(default_factory=list)


#: A request's outputs, each choice's under its index as request_id; without one they are every choice's.
Script = Callable[[list[int], SamplingParams], list[RequestOutput]]


class FakeEngine:
    """EngineClient's interface over a script. Outputs beyond `held_from` wait until the test releases them.

    Tests call it from another thread than the server's loop: `wait_for`, `release`, `die`.
    """

    def __init__(self, script: Script | None = None) -> None:
        self.resolved = RESOLVED
        self.stats = EngineStats(num_blocks=32, blocks_free=20, blocks_used=12, slots_written=40, slots_wasted=8)
        self.stats.num_running, self.stats.num_waiting, self.stats.num_preemptions = 2, 1, 5
        self.script: Script = script or (lambda prompt, params: reply("hello"))
        self.held_from: int | None = None
        self.death_note = ""
        self.since_progress = 0.0
        self.added: list[Added] = []
        #: Ids of choices.
        self.aborted: list[str] = []
        self.finished: list[tuple[str, int]] = []
        self.questions: list[tuple[str, str]] = []
        self.blocks_cached = 7
        self._live: set[str] = set()
        self.was_shut_down = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = threading.Condition()

    # ---- EngineClient ---------------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        return not self.death_note

    def seconds_since_progress(self) -> float:
        return self.since_progress

    @property
    def num_outstanding(self) -> int:
        return len(self._live)

    def check(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        if not self.is_alive:
            raise EngineDeadError(self.death_note)
        max_total_tokens(prompt_token_ids, params, self.resolved)

    def add(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, **fields: Any) -> FakeQueue:
        self.check(prompt_token_ids, params)
        self._loop = asyncio.get_running_loop()
        added = Added(request_id, list(prompt_token_ids), params, FakeQueue(), **fields)
        choices = choice_ids(request_id, params.n)
        self._live.update(choices)
        outputs = self.script(added.prompt_token_ids, params)
        if params.n > 1 and not any(output.request_id for output in outputs):
            outputs = merged(*(deepcopy(outputs) for _ in choices))
        for output in filter(None, outputs):
            output.request_id = choices[int(output.request_id or 0)]
        if params.logprobs is not None:
            with_logprobs(outputs, params.logprobs)
        held_from = len(outputs) if self.held_from is None else self.held_from
        self._give(added, outputs[:held_from])
        added.outputs = outputs[held_from:]
        with self._changed:
            self.added.append(added)
            self._changed.notify_all()
        return added.queue

    def _give(self, added: Added, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            added.queue.put(output)
            if output is not None and output.finish_reason:
                self._live.discard(output.request_id)

    def abort(self, choice_id: str) -> None:
        with self._changed:
            self._live.discard(choice_id)
            self.aborted.append(choice_id)
            self._changed.notify_all()

    def choices_of(self, request_id: str) -> list[str]:
        return [other for other in self._live if other == request_id or other.startswith(f"{request_id}-")]

    def cancel(self, choice_id: str) -> bool:
        if choice_id not in self._live:
            return False
        added = next(added for added in self.added if choice_id in choice_ids(added.request_id, added.params.n))
        self.abort(choice_id)
        added.queue.put(RequestOutput(request_id=choice_id, token_ids=[], finish_reason="cancelled"))
        return True

    def finish(self, choice_id: str, num_output_tokens: int) -> None:
        with self._changed:
            self._live.discard(choice_id)
            self.finished.append((choice_id, num_output_tokens))
            self._changed.notify_all()

    async def reset_prefix_cache(self) -> int:
        if not self.is_alive:
            raise EngineDeadError(self.death_note)
        num_blocks, self.blocks_cached = self.blocks_cached, 0
        return num_blocks

    async def inspect(self, what: str, argument: str = "") -> bytes:
        if not self.is_alive:
            raise EngineDeadError(self.death_note)
        self.questions.append((what, argument))
        if what == "request" and argument not in [added.request_id for added in self.added]:
            raise RequestNotFoundError(argument)
        if what == "frame":
            return json.dumps([{"full": False}, {"full": True} if argument else None]).encode()
        return json.dumps({"what": what, "argument": argument}).encode()

    async def shutdown(self) -> None:
        self.was_shut_down = True

    # ---- for the test's thread ------------------------------------------------------------------------------------

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until something the server did makes `condition` true."""
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_SECONDS), "the server did not get there"

    def release(self, added: Added) -> None:
        """Let a request's held outputs go."""
        self._in_loop(lambda: self._give(added, added.outputs))

    def die(self, note: str = "killed") -> None:
        """As if the process had ended: everyone who waits gets an error."""

        def end() -> None:
            self.death_note = note
            self.stats = self.stats.at_the_end()
            self._live.clear()
            for added in self.added:
                added.queue.put(EngineDeadError(note))

        self._in_loop(end)

    def _in_loop(self, work: Callable[[], Any]) -> None:
        done = threading.Event()

        def run() -> None:
            work()
            done.set()

        assert self._loop is not None, "no request has come yet"
        self._loop.call_soon_threadsafe(run)
        assert done.wait(WAIT_SECONDS)
