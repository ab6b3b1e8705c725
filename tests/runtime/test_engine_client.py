"""The client: its start where the engine cannot, and several choices of a request over a real socket."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from fakes.chain_hash import ChainHashModel
from fakes.engines import tiny_config

from pageframe.runtime import engine_client, engine_launch, engine_process, messages
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.engine_client import EngineClient, OutputQueue
from pageframe.runtime.engine_launch import launch_engine
from pageframe.runtime.engine_process import EngineLoop
from pageframe.runtime.errors import EngineDeadError, InvalidRequestError, StartupError
from pageframe.runtime.grammar import CompiledGrammar, GrammarSpec
from pageframe.runtime.grammar_service import GrammarService
from pageframe.runtime.request import SamplingParams, choice_ids

PATIENCE_SECONDS = 30.0
PROMPT = list(range(1, 12))


def test_an_engine_that_ends_before_it_connects_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_launch.sys, "executable", "/bin/false")

    async def start() -> None:
        await EngineClient.start(await launch_engine(), EngineConfig())

    with pytest.raises(StartupError, match="ended with code 1 before it was ready"):
        asyncio.run(asyncio.wait_for(start(), timeout=60))


class PausedEngine(Engine):
    """Makes a step only where it is let; reads its inbox meanwhile."""

    may_step = False

    def step(self) -> list[object]:  # type: ignore[override]
        return list(super().step()) if self.may_step else []


@asynccontextmanager
async def connected(folder: Path, engine: Engine) -> AsyncIterator[tuple[EngineClient, asyncio.subprocess.Process]]:
    """A client whose engine runs in a thread here; the process it watches does nothing but live."""
    address = f"ipc://{folder}/engine"
    context = zmq.Context()
    ours, theirs = zmq.asyncio.Context(context).socket(zmq.PAIR), context.socket(zmq.PAIR)
    ours.bind(address)
    theirs.connect(address)
    thread = threading.Thread(target=EngineLoop(engine, theirs).run)
    thread.start()
    process = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
    client = EngineClient(process, ours, str(folder), engine.resolved)
    try:
        yield client, process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        client._send(b"shutdown", None)
        await asyncio.to_thread(thread.join, PATIENCE_SECONDS)
        await client.shutdown()
        theirs.close(linger=0)
        context.term()


def make_engine(engine_type: type[Engine] = Engine) -> Engine:
    resolved = tiny_config(num_blocks=16)
    model = ChainHashModel(
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        max_num_requests=resolved.max_num_requests,
        max_blocks=resolved.max_blocks,
    )
    return engine_type(resolved, model, model, seed=0)


def with_client(
    folder: Path,
    work: Callable[[EngineClient, asyncio.subprocess.Process], Awaitable[None]],
    engine: Engine | None = None,
) -> None:
    async def run() -> None:
        async with connected(folder, engine or make_engine()) as (client, process):
            await asyncio.wait_for(work(client, process), PATIENCE_SECONDS)

    asyncio.run(run())


def params(n: int, max_tokens: int = 6) -> SamplingParams:
    return SamplingParams(n=n, seed=3, max_tokens=max_tokens, ignore_eos=True)


async def read_all(queue: OutputQueue, choices: list[str], gone: frozenset[str] = frozenset()) -> dict[str, list[int]]:
    """The tokens of each choice, read until all have ended; of those that are gone, some may be on their way still."""
    tokens: dict[str, list[int]] = {choice: [] for choice in choices}
    left = set(choices)
    while left:
        output = await queue.get()
        if output.request_id in gone:
            continue
        assert output.request_id in left, "an output of nobody, or behind an end"
        tokens[output.request_id] += output.token_ids
        if output.finish_reason:
            left.remove(output.request_id)
    return tokens


def test_all_choices_come_in_one_queue_each_under_its_own_id(tmp_path: Path) -> None:
    async def work(client: EngineClient, process: asyncio.subprocess.Process) -> None:
        queues = {name: client.add(name, PROMPT, params(n)) for name, n in (("a", 3), ("b", 1))}
        assert client.num_outstanding == 4
        a, b = await asyncio.gather(read_all(queues["a"], ["a-0", "a-1", "a-2"]), read_all(queues["b"], ["b"]))
        assert [len(tokens) for tokens in (*a.values(), *b.values())] == [6] * 4
        assert a["a-0"] == b["b"], "the first choice draws what a request of one draws"
        assert len({tuple(tokens) for tokens in a.values()}) == 3
        assert client.num_outstanding == 0

    with_client(tmp_path, work)


def test_choices_are_ended_one_by_one(tmp_path: Path) -> None:
    async def work(client: EngineClient, process: asyncio.subprocess.Process) -> None:
        queue = client.add("a", PROMPT, params(4, max_tokens=40))
        first = [await queue.get() for _ in range(4)]
        assert sorted(output.request_id for output in first) == choice_ids("a", 4)
        client.abort("a-0")
        client.finish("a-2", 1)
        client.abort("a-2")  # has ended: nothing happens
        assert client.num_outstanding == 2
        tokens = await read_all(queue, ["a-1", "a-3"], gone=frozenset({"a-0", "a-2"}))
        assert {name: len(ids) for name, ids in tokens.items()} == {"a-1": 39, "a-3": 39}
        for name, reason in (("a-0", b'"abort"'), ("a-2", b'"stop"'), ("a-1", b'"length"')):
            assert b'"finish_reason":' + reason in await client.inspect("request", name)
        assert b'"used":0' in await client.inspect("kv")

    with_client(tmp_path, work)


def test_a_client_that_leaves_before_the_prompt_is_computed_leaves_nothing(tmp_path: Path) -> None:
    """In every order: each time another choice may have to take the prompt over."""
    engine = make_engine(PausedEngine)

    async def work(client: EngineClient, process: asyncio.subprocess.Process) -> None:
        for number, order in enumerate([(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0), (0, 2, 1), (2, 0, 1)]):
            client.add(f"r{number}", PROMPT, params(3))
            for index in order:
                client.abort(f"r{number}-{index}")
        assert client.num_outstanding == 0
        kv = await client.inspect("kv")
        assert b'"requests":{"running":0,"waiting":0,"following":0}' in kv
        assert b'"used":0' in kv
        # Who is left is served, whoever was to compute the prompt for it.
        queue = client.add("last", PROMPT, params(3))
        client.abort("last-0")
        client.abort("last-1")
        engine.may_step = True  # type: ignore[attr-defined]
        tokens = await read_all(queue, ["last-2"])
        assert len(tokens["last-2"]) == 6

    with_client(tmp_path, work, engine)


def test_death_is_told_to_all_who_wait(tmp_path: Path) -> None:
    engine = make_engine(PausedEngine)

    async def work(client: EngineClient, process: asyncio.subprocess.Process) -> None:
        engine.may_step = True
        before = client.add("before", PROMPT, params(1))
        while not (await before.get()).finish_reason:
            pass
        engine.may_step = False
        queue, other = client.add("a", PROMPT, params(3)), client.add("b", PROMPT, params(1))
        process.kill()
        for waiter in (queue, other):
            with pytest.raises(EngineDeadError, match="ended with code"):
                await waiter.get()
        for call in (client.inspect("kv"), client.reset_prefix_cache()):
            with pytest.raises(EngineDeadError):
                await call
        with pytest.raises(EngineDeadError):
            client.add("c", PROMPT, params(1))
        # Totals never fall, and nothing else is left.
        assert client.stats.lookup_tokens == len(PROMPT)
        assert (client.stats.num_waiting, client.stats.blocks_used, client.stats.blocks_cached) == (0, 0, 0)

    with_client(tmp_path, work, engine)


def test_salts_part_and_a_reset_forgets(tmp_path: Path) -> None:
    async def work(client: EngineClient, process: asyncio.subprocess.Process) -> None:
        async def cached(name: str, salt: str) -> int:
            return (await client.add(name, PROMPT, params(1, max_tokens=1), cache_salt=salt).get()).num_cached_tokens

        assert [await cached("a", ""), await cached("b", ""), await cached("c", "x"), await cached("d", "x")] == [
            0,
            8,
            0,
            8,
        ]
        assert await client.reset_prefix_cache() == 4
        assert await cached("e", "") == 0

    with_client(tmp_path, work)


def test_a_lower_priority_is_served_first(tmp_path: Path) -> None:
    engine = make_engine(PausedEngine)

    async def work(client: EngineClient, process: asyncio.subprocess.Process) -> None:
        ended: list[str] = []

        async def follow(name: str, queue: OutputQueue) -> None:
            await read_all(queue, [name])
            ended.append(name)

        # The pool holds one of them at a time.
        priorities = {"late": 2**31 - 1, "middle": 0, "early": -(2**31)}
        prompts = {name: [number] * 40 for number, name in enumerate(priorities)}
        following = [
            follow(name, client.add(name, prompts[name], params(1), priority=priority))
            for name, priority in priorities.items()
        ]
        await client.inspect("kv")  # all have arrived
        engine.may_step = True  # type: ignore[attr-defined]
        await asyncio.gather(*following)
        assert ended == ["early", "middle", "late"]

    with_client(tmp_path, work, engine)


class ClockAhead:
    """`time` for the client alone; the test moves it on."""

    ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


def test_an_engine_that_waits_for_a_grammar_is_not_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so itself, so one that says nothing still is."""
    clock, release = ClockAhead(), threading.Event()
    monkeypatch.setattr(engine_client, "time", clock)
    monkeypatch.setattr(engine_process, "NEWS_SECONDS", 0.001)
    engine = make_engine()

    class Compiler:
        def knows(self, spec: GrammarSpec) -> bool:
            return False

        def compile(self, spec: GrammarSpec, *, param: str) -> CompiledGrammar:
            assert release.wait(PATIENCE_SECONDS)
            raise InvalidRequestError("grammar is no use", param=param)

    engine.grammars = GrammarService(Compiler)

    async def work(client: EngineClient, process: asyncio.subprocess.Process) -> None:
        queue = client.add("waits", PROMPT, SamplingParams(grammar=GrammarSpec("json_object")))
        for _ in range(3):
            clock.ahead += 1000
            while client.seconds_since_progress() > 500:
                await asyncio.sleep(0)
        monkeypatch.setattr(engine, "step", list)
        client.add("stuck", PROMPT, params(1))
        while client.stats.num_waiting == 0:
            await asyncio.sleep(0)
        clock.ahead += 1000
        await client.inspect("kv")
        assert client.seconds_since_progress() > 500
        release.set()
        assert (await queue.get()).finish_reason == "refused"

    try:
        with_client(tmp_path, work, engine)
    finally:
        release.set()


def test_prompts_of_one_request_tell_its_parameters_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, others = params(2), params(1)
    told: list[SamplingParams | None] = []
    encode = messages.encode

    def recording(kind: bytes, body: Any) -> list[bytes]:
        if kind == b"add":
            told.append(body.params)
        return encode(kind, body)

    monkeypatch.setattr(messages, "encode", recording)

    async def work(client: EngineClient, process: asyncio.subprocess.Process) -> None:
        requests = {"a": shared, "b": shared, "c": others, "d": shared}
        queues = {name: client.add(name, PROMPT, one) for name, one in requests.items()}
        for name, queue in queues.items():
            tokens = await read_all(queue, choice_ids(name, requests[name].n))
            assert {len(ids) for ids in tokens.values()} == {6}

    with_client(tmp_path, work)
    assert told == [shared, None, others, shared]


def test_the_door_refuses_more_choices_than_can_run(tmp_path: Path) -> None:
    async def work(client: EngineClient, process: asyncio.subprocess.Process) -> None:
        client.check(PROMPT, params(4))
        with pytest.raises(InvalidRequestError, match=r"n is 5; it must be at most 4") as caught:
            client.check(PROMPT, params(5))
        assert caught.value.param == "n"

    with_client(tmp_path, work)
