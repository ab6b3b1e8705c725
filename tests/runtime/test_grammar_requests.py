"""Requests with a grammar: compiled beside the steps, refused without harm, followed by the default model."""

from __future__ import annotations

import json
import threading
from typing import Any

import jsonschema
import msgspec
import pytest
from fakes.ruled_model import FakeGrammar, make_engine

from pageframe.runtime import LLM, SamplingParams, engine_process, messages
from pageframe.runtime.engine import Engine
from pageframe.runtime.errors import InvalidRequestError
from pageframe.runtime.grammar import GrammarSpec
from pageframe.runtime.grammar_service import NUM_THREADS, GrammarService
from pageframe.runtime.request import RequestOutput

from .test_engine_loop import Peer, running_loop

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PERSON_SPEC = GrammarSpec("json_schema", json.dumps(PERSON))


# ---- compiling beside the steps -----------------------------------------------------------------------------------


class HeldCompiler:
    """Compiles when the test says so, and then what the test says."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.error: Exception | None = None
        #: Sources of the grammars that it was given, and one release for each.
        self.sources: list[str] = []
        self.begun = threading.Semaphore(0)

    def knows(self, spec: GrammarSpec) -> bool:
        return spec.source == "known"

    def compile(self, spec: GrammarSpec, *, param: str) -> Any:
        self.sources.append(spec.source)
        self.begun.release()
        assert self.knows(spec) or self.release.wait(30)
        if self.error is not None:
            raise self.error
        return FakeGrammar(5)


def held_engine(max_compiling: int = 8) -> tuple[Engine, HeldCompiler]:
    engine, _ = make_engine(num_blocks=8)
    compiler = HeldCompiler()
    engine.grammars = GrammarService(lambda: compiler, max_compiling)
    return engine, compiler


def add(peer: Peer, request_id: str, *, n: int = 1, seconds: float | None = None, grammar: str = "the test's") -> None:
    """A request; an empty `grammar` is none."""
    spec = GrammarSpec("lark", grammar) if grammar else None
    params = SamplingParams(n=n, temperature=0, max_tokens=12, ignore_eos=True, grammar=spec, timeout_seconds=seconds)
    peer.send(b"add", messages.Add(request_id, [1, 2, 3], params, "", "", 0))


def outputs_until(peer: Peer, request_id: str) -> list[RequestOutput]:
    """All outputs up to the request's last."""
    outputs: list[RequestOutput] = []
    while not any(output.request_id == request_id and output.finish_reason for output in outputs):
        kind, body = peer.receive()
        if kind == b"step":
            outputs += body.outputs
    return outputs


def wait_until_read(peer: Peer) -> None:
    """The engine has read all that was sent."""
    peer.send(b"question", messages.Question(1, "kv", ""))
    while peer.receive()[0] != b"answer":
        pass


def ends(outputs: list[RequestOutput]) -> dict[str, str]:
    return {output.request_id: output.finish_reason for output in outputs if output.finish_reason}


def test_others_are_served_while_a_grammar_compiles() -> None:
    engine, compiler = held_engine()
    with running_loop(engine) as peer:
        add(peer, "held", n=2)
        add(peer, "other", grammar="")
        outputs = outputs_until(peer, "other")
        assert {output.request_id for output in outputs} == {"other"}
        compiler.release.set()
        outputs = outputs_until(peer, "held-1")
        assert {output.request_id for output in outputs} == {"held-0", "held-1"}
        assert set(ends(outputs).values()) == {"stop"}


def test_a_refused_grammar_is_an_answer_to_every_choice_and_nobody_else_notices() -> None:
    engine, compiler = held_engine()
    compiler.error = InvalidRequestError("grammar has a flaw", param="grammar")
    with running_loop(engine) as peer:
        add(peer, "flawed", n=2)
        compiler.release.set()
        refused = [output for output in outputs_until(peer, "flawed-1") if output.finish_reason]
        assert [(output.finish_reason, output.error) for output in refused] == [("refused", "grammar has a flaw")] * 2
        add(peer, "next", grammar="")
        outputs_until(peer, "next")


def test_a_compiler_that_breaks_is_our_error() -> None:
    engine, compiler = held_engine()
    compiler.error = RuntimeError("it broke")
    with running_loop(engine) as peer:
        add(peer, "unlucky")
        compiler.release.set()
        (output,) = outputs_until(peer, "unlucky")
        assert output.finish_reason == "error"
        assert "it broke" in output.error


def test_choices_aborted_meanwhile_do_not_run() -> None:
    engine, compiler = held_engine()
    with running_loop(engine) as peer:
        add(peer, "some", n=3)
        add(peer, "none", n=2)
        for choice_id in ("some-1", "none-0", "none-1"):
            peer.send(b"abort", choice_id)
        wait_until_read(peer)
        compiler.release.set()
        assert {output.request_id for output in outputs_until(peer, "some-2")} <= {"some-0", "some-2"}
        add(peer, "last")
        outputs_until(peer, "last")
    assert engine.scheduler.find("none-0") is None
    assert not engine.has_work


def test_a_deadline_comes_while_a_grammar_compiles() -> None:
    """Whatever the compiler does, and for those alone that have one and still want an answer."""
    engine, compiler = held_engine()
    clock: Any = engine._clock
    with running_loop(engine) as peer:
        try:
            add(peer, "late", n=3, seconds=5)
            add(peer, "patient")
            peer.send(b"abort", "late-1")
            wait_until_read(peer)
            clock.advance(5)
            outputs = outputs_until(peer, "late-2")
            assert not compiler.release.is_set()
            assert ends(outputs) == {"late-0": "timeout", "late-2": "timeout"}
            assert all(output.token_ids == [] for output in outputs)
        finally:
            compiler.release.set()
        assert ends(outputs_until(peer, "patient")) == {"patient": "stop"}
    assert engine.scheduler.find("late-0") is None


def test_those_who_bring_the_same_grammar_wait_for_one_compilation() -> None:
    """One of them that leaves takes it from nobody."""
    engine, compiler = held_engine()
    with running_loop(engine) as peer:
        for index in range(20):
            add(peer, f"r{index}", n=2)
        peer.send(b"abort", "r0-0")
        peer.send(b"abort", "r0-1")
        wait_until_read(peer)
        compiler.release.set()
        outputs = outputs_until(peer, "r19-1")
    assert set(ends(outputs).values()) == {"stop"}
    assert not any(output.request_id.startswith("r0-") for output in outputs)
    assert compiler.sources == ["the test's"]


def test_a_grammar_that_nobody_waits_for_any_more_is_not_compiled() -> None:
    """Aborted or late before its turn."""
    engine, compiler = held_engine()
    clock: Any = engine._clock
    with running_loop(engine) as peer:
        for number in range(NUM_THREADS):
            add(peer, f"busy{number}", grammar=f"busy{number}")
            assert compiler.begun.acquire(timeout=30)
        add(peer, "gone", grammar="gone")
        add(peer, "late", grammar="late", seconds=5)
        add(peer, "kept", grammar="kept")
        add(peer, "leaves", grammar="kept")
        for choice_id in ("gone", "leaves"):
            peer.send(b"abort", choice_id)
        wait_until_read(peer)
        clock.advance(5)
        assert ends(outputs_until(peer, "late")) == {"late": "timeout"}
        compiler.release.set()
        outputs_until(peer, "kept")
    assert compiler.sources == [*(f"busy{number}" for number in range(NUM_THREADS)), "kept"]


def test_more_grammars_than_may_wait_are_turned_away() -> None:
    """Different ones alone count, and only as long as they are not compiled."""
    engine, compiler = held_engine(max_compiling=3)
    with running_loop(engine) as peer:
        for name in ("a", "b", "c"):
            add(peer, name, grammar=name)
        add(peer, "same", grammar="b")
        add(peer, "too much", grammar="d", n=2)
        outputs = outputs_until(peer, "too much-1")
        assert ends(outputs) == {"too much-0": "busy", "too much-1": "busy"}
        assert "3 other grammars wait to be compiled" in outputs[-1].error
        compiler.release.set()
        outputs = outputs_until(peer, "same")
        add(peer, "later", grammar="d")
        outputs_until(peer, "later")
    assert sorted(compiler.sources) == ["a", "b", "c", "d"]


def test_a_known_grammar_waits_for_no_other() -> None:
    """Were all of the others to take the most they may, it would be minutes."""
    engine, compiler = held_engine(max_compiling=2)
    with running_loop(engine) as peer:
        for name in ("a", "b"):
            add(peer, name, grammar=name)
            assert compiler.begun.acquire(timeout=30)
        for name in ("first", "second"):
            add(peer, name, grammar="known")
            assert ends(outputs_until(peer, name)) == {name: "stop"}
        assert not compiler.release.is_set()
        compiler.release.set()
        outputs_until(peer, "b")


def test_an_engine_that_waits_for_grammars_alone_says_so_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while it has other work, whether that goes on or not."""
    monkeypatch.setattr(engine_process, "NEWS_SECONDS", 0.001)
    engine, compiler = held_engine()
    monkeypatch.setattr(engine, "step", list)  # a scheduler that is stuck
    with running_loop(engine) as peer:
        add(peer, "held")
        assert [peer.receive()[1].waits_for_grammars for _ in range(5)] == [True] * 5
        add(peer, "stuck", grammar="")
        wait_until_read(peer)
        assert [peer.receive()[1].waits_for_grammars for _ in range(5)] == [False] * 5
        compiler.release.set()


def test_prompts_that_share_their_parameters_are_told_them_once() -> None:
    engine, compiler = held_engine()
    compiler.release.set()
    spec = GrammarSpec("lark", "the test's")
    params = SamplingParams(temperature=0, max_tokens=12, grammar=spec, n=2)
    with running_loop(engine) as peer:
        for request_id, told in (("a", params), ("b", None), ("c", SamplingParams(max_tokens=1)), ("d", None)):
            peer.send(b"add", messages.Add(request_id, [1, 2, 3], told, "", "", 0))
        outputs = []
        waited_for = {"a-0", "a-1", "b-0", "b-1", "c", "d"}
        while waited_for:
            outputs += peer.receive()[1].outputs
            waited_for -= ends(outputs).keys()
    tokens = [[token for o in outputs if o.request_id == name for token in o.token_ids] for name in ("a-0", "b-0")]
    assert tokens[0] == tokens[1]
    assert ends(outputs)["d"] == "length"


def test_all_that_a_request_may_ask_for_travels_between_the_processes() -> None:
    params = SamplingParams(
        logit_bias={7: -1.5},
        bad_words_ids=[[1, 2], [3]],
        allowed_token_ids=[1, 2, 7],
        presence_penalty=0.5,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        prompt_logprobs=3,
        grammar=PERSON_SPEC,
        timeout_seconds=2.5,
    )
    _, message = messages.decode(messages.encode(b"add", messages.Add("r", [1], params, "", "", 0)))
    assert message.params == params
    with pytest.raises(msgspec.ValidationError):
        messages.decode([b"add", msgspec.msgpack.encode({"request_id": "r", "params": {"grammar": 3}})])


# ---- the default model --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(threads=1, num_blocks=12, block_size=8, max_model_len=96, max_num_requests=6, show_progress=False)


def test_the_default_model_follows_a_schema_forked_preempted_and_beside_others(llm: LLM) -> None:
    """Every answer parses and validates, and preemption changes none."""
    prompt = "A person as JSON, with name, age and tags:\n"
    drawn = SamplingParams(n=2, temperature=1.0, seed=5, max_tokens=80, grammar=PERSON_SPEC)
    greedy = SamplingParams(temperature=0, max_tokens=80, grammar=PERSON_SPEC, logprobs=1)
    (alone,) = llm.generate(prompt, drawn)
    before = llm.engine.scheduler.num_preemptions
    free = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    first, second, _ = llm.generate([prompt, prompt, "Once upon a time"], [drawn, greedy, free])
    assert llm.engine.scheduler.num_preemptions > before, "the pool was meant to be too small"
    assert first.outputs == alone.outputs
    choices = [*first.outputs, *second.outputs]
    for choice in choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.text), PERSON)
    assert len({choice.text for choice in choices}) > 1
    (whole,) = second.outputs
    assert whole.logprobs is not None
    assert len(whole.logprobs) == len(whole.token_ids)
    assert llm.tokenizer.decode(whole.token_ids) == whole.text


def test_a_choice_is_one_of_its_texts(llm: LLM) -> None:
    spec = GrammarSpec("choice", json.dumps(["positive", "negative"]))
    params = SamplingParams(temperature=1, n=6, seed=1, max_tokens=10, grammar=spec)
    (result,) = llm.generate("The review is", params)
    assert {choice.text for choice in result.outputs} <= {"positive", "negative"}
    assert {choice.finish_reason for choice in result.outputs} == {"stop"}


def test_a_grammar_that_is_none_is_refused_and_leaves_nothing(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"^grammar has a JSON schema") as raised:
        llm.generate("x", SamplingParams(grammar=GrammarSpec("json_schema", '{"type": 7}')))
    assert raised.value.param == "grammar"
    assert not llm.engine.has_work
