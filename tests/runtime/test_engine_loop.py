"""The engine's loop behind its socket: fair to those who wait for steps, whatever else comes in."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import msgspec
import pytest
import zmq
from fakes.chain_hash import ChainHashModel
from fakes.engines import tiny_config

from pageframe.runtime import engine_process, messages
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.engine import Engine
from pageframe.runtime.engine_process import MAX_ANSWERS_PER_STEP, EngineLoop
from pageframe.runtime.request import SamplingParams

PATIENCE_MS = 30_000


def make_engine() -> Engine:
    resolved = tiny_config(num_blocks=8)
    model = ChainHashModel(
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        max_num_requests=resolved.max_num_requests,
        max_blocks=resolved.max_blocks,
    )
    return Engine(resolved, model, model, seed=0)


class Peer:
    """The other end of the socket."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def send(self, kind: bytes, body: Any = None) -> None:
        self._socket.send_multipart(messages.encode(kind, body))

    def receive(self) -> tuple[bytes, Any]:
        assert self._socket.poll(PATIENCE_MS, zmq.POLLIN), "the engine said nothing"
        return messages.decode(self._socket.recv_multipart())

    def add(self, request_id: str, max_tokens: int = 8, n: int = 1, num_prompt_tokens: int = 3, salt: str = "") -> None:
        params = SamplingParams(n=n, temperature=0, max_tokens=max_tokens, ignore_eos=True)
        prompt = list(range(1, 1 + num_prompt_tokens))
        self.send(b"add", messages.Add(request_id, prompt, params, "", salt, 0))

    def until_finished(self, request_id: str) -> list[bytes]:
        """The kinds of all messages up to the request's last output."""
        kinds = []
        while True:
            kind, body = self.receive()
            kinds.append(kind)
            if kind == b"step" and any(o.request_id == request_id and o.finish_reason for o in body.outputs):
                return kinds


@contextmanager
def running_loop(engine: Engine) -> Iterator[Peer]:
    context = zmq.Context()
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    for socket in (ours, theirs):
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
    ours.bind("inproc://engine")
    theirs.connect("inproc://engine")
    thread = threading.Thread(target=EngineLoop(engine, theirs).run)
    thread.start()
    peer = Peer(ours)
    try:
        yield peer
    finally:
        peer.send(b"shutdown")
        thread.join()
        ours.close(linger=0)
        theirs.close(linger=0)
        context.term()


def test_questions_do_not_keep_a_request_from_its_steps() -> None:
    with running_loop(make_engine()) as peer:
        peer.add("served", max_tokens=8)
        for call in range(3000):
            peer.send(b"question", messages.Question(call, "blocks", ""))
        kinds = peer.until_finished("served")
        steps = kinds.count(b"step")
        assert kinds.count(b"answer") <= MAX_ANSWERS_PER_STEP * (steps + 1), "answers kept the engine from a step"
        answered = kinds.count(b"answer")
        while answered < 3000:
            answered += peer.receive()[0] == b"answer"


def test_a_question_that_fails_ends_no_request() -> None:
    engine = make_engine()
    with running_loop(engine) as peer:
        steps, engine.steps = engine.steps, None  # type: ignore[assignment]
        peer.send(b"question", messages.Question(1, "steps", ""))
        kind, answer = peer.receive()
        engine.steps = steps
        assert kind == b"answer"
        assert answer.failed
        peer.add("next")
        peer.until_finished("next")


def test_answers_are_json_and_errors_say_what_was_wrong() -> None:
    with running_loop(make_engine()) as peer:
        for call, (what, argument) in enumerate([("kv", ""), ("request", "nobody"), ("nothing", "")]):
            peer.send(b"question", messages.Question(call, what, argument))
        answers = [peer.receive()[1] for _ in range(3)]
        assert msgspec.json.decode(answers[0].body)["blocks"]["used"] == 0
        assert (answers[1].not_found, answers[1].error) == (True, "nobody")
        assert "nothing" in answers[2].error


def test_a_request_that_can_never_fit_is_answered_with_an_error() -> None:
    with running_loop(make_engine()) as peer:
        peer.add("huge", max_tokens=10**6)
        kind, step = peer.receive()
        assert kind == b"step"
        (output,) = step.outputs
        assert (output.request_id, output.finish_reason) == ("huge", "error")
        assert "max_tokens" in output.error


def test_every_choice_of_a_refused_request_gets_the_error() -> None:
    with running_loop(make_engine()) as peer:
        peer.add("huge", max_tokens=10**6, n=2)
        _, step = peer.receive()
        assert [(output.request_id, output.finish_reason) for output in step.outputs] == [
            ("huge-0", "error"),
            ("huge-1", "error"),
        ]


def test_a_reset_forgets_what_was_computed_and_says_how_much() -> None:
    with running_loop(make_engine()) as peer:
        peer.add("first", num_prompt_tokens=9, max_tokens=1)
        peer.until_finished("first")
        assert cached_tokens(peer, "second", salt="") == 8
        assert cached_tokens(peer, "salted", salt="other") == 0
        for call, forgotten in ((7, 4), (8, 0)):  # two blocks under each salt
            peer.send(b"reset", messages.ResetPrefixCache(call))
            kind, answer = peer.receive()
            assert (kind, answer.call, msgspec.json.decode(answer.body)) == (b"answer", call, forgotten)
            kind, step = peer.receive()
            assert (kind, step.stats.blocks_cached, step.stats.blocks_free) == (b"step", 0, 8)
        assert cached_tokens(peer, "third", salt="") == 0


def cached_tokens(peer: Peer, request_id: str, salt: str) -> int:
    """What a prompt of nine tokens finds computed."""
    peer.add(request_id, num_prompt_tokens=9, max_tokens=1, salt=salt)
    while True:
        _, step = peer.receive()
        for output in step.outputs:
            assert output.finish_reason
            return int(output.num_cached_tokens)


def test_an_abort_is_told_by_the_gauges_even_when_idle() -> None:
    with running_loop(make_engine()) as peer:
        peer.add("gone", max_tokens=12)
        peer.receive()
        peer.send(b"abort", "gone")
        while True:
            kind, step = peer.receive()
            assert kind == b"step"
            if step.stats.num_running == 0:
                break
        assert step.stats.blocks_used == 0


def test_a_process_whose_device_is_lost_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it runs here, but for the device: nothing is left to those who wait than that it has ended."""
    engine = make_engine()
    assert isinstance(engine.runner, ChainHashModel)
    engine.runner.device_is_lost, engine.runner.fail_next = True, "before"
    context = zmq.Context()
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    ours.bind("inproc://process")
    theirs.connect("inproc://process")
    addresses: queue.SimpleQueue[str] = queue.SimpleQueue()
    addresses.put("")
    monkeypatch.setattr(engine_process, "_follow_parent", lambda: addresses)
    monkeypatch.setattr(engine_process, "_connect", lambda address: theirs)
    monkeypatch.setattr(engine_process, "_start", lambda config, socket: engine)
    monkeypatch.setattr(engine_process.signal, "signal", lambda *settings: None)
    monkeypatch.setattr(engine_process, "without_collections", nullcontext)
    peer = Peer(ours)
    peer.send(b"start", messages.Start(EngineConfig()))
    peer.add("a")
    assert engine_process.main("INFO") == 1
    kinds = []
    while ours.poll(0, zmq.POLLIN):
        kinds.append(peer.receive()[0])
    assert kinds == [b"ready"]
    assert theirs.closed
    ours.close(linger=0)
    context.term()
