"""Streaming against not streaming: however tokens are spread over steps, the client gets the same answer."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pageframe.runtime.request import RequestOutput, SamplingParams

from .conftest import RunningServer
from .fakes import BOS, outputs_of
from .test_answers import events
from .test_prompt_lists import told

# Two letters and characters of 2 and 4 bytes: stop strings and split characters are then common.
TEXTS = st.text(alphabet="abé🙂", max_size=24)
STOPS = st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=3), max_size=3)
BYTES = st.binary(max_size=24)


def _split(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(places)] or [data]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=TEXTS.map(str.encode) | BYTES,
    cuts=st.lists(st.integers(0, 100), max_size=12),
    stops=STOPS,
    include_stop=st.booleans(),
    logprobs=st.booleans(),
)
def test_the_pieces_of_a_stream_are_the_whole_answer(
    server: RunningServer, data: bytes, cuts: list[int], stops: list[str], include_stop: bool, logprobs: bool
) -> None:
    fields: dict[str, Any] = {
        "stop": stops,
        "include_stop_str_in_output": include_stop,
        "logprobs": 2 * logprobs or None,
    }
    server.engine.script = lambda prompt, params: outputs_of([data])
    whole = server.complete(**fields).json()
    server.engine.script = lambda prompt, params: outputs_of(_split(data, cuts))
    *chunks, last = events(server.complete(**fields, stream=True, stream_options={"include_usage": True}).text)

    [choice] = whole["choices"]
    pieces = [chunk["choices"][0] for chunk in chunks]
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    assert (pieces[-1]["finish_reason"], pieces[-1]["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
    assert last["usage"] == whole["usage"]
    if logprobs:
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"][name]]
            assert joined == choice["logprobs"][name]
        assert len(choice["logprobs"]["tokens"]) == whole["usage"]["completion_tokens"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    datas=st.lists(BYTES, min_size=2, max_size=4),
    cuts=st.lists(st.integers(0, 100), max_size=12),
    stops=STOPS,
    order=st.randoms(use_true_random=False),
)
def test_each_of_several_choices_is_what_it_would_be_alone(
    server: RunningServer, datas: list[bytes], cuts: list[int], stops: list[str], order: random.Random
) -> None:
    alone = []
    for data in datas:
        server.engine.script = lambda prompt, params, data=data: outputs_of(_split(data, cuts))  # type: ignore[misc]
        alone.append(server.complete(stop=stops).json())

    def script(prompt: list[int], params: SamplingParams) -> list[RequestOutput]:
        """Each choice's outputs in their order, the choices mixed at random."""
        choices = [of_choice(index, outputs_of(_split(data, cuts))) for index, data in enumerate(datas)]
        turns = [index for index, outputs in enumerate(choices) for _ in outputs]
        order.shuffle(turns)
        return [choices[index].pop(0) for index in turns]

    server.engine.script = script
    fields: dict[str, Any] = {"n": len(datas), "stop": stops}
    *chunks, last = events(server.complete(**fields, stream=True, stream_options={"include_usage": True}).text)
    whole = server.complete(**fields).json()
    for index, solo in enumerate(alone):
        [expected] = solo["choices"]
        assert whole["choices"][index] == {**expected, "index": index}
        pieces = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(piece["text"] for piece in pieces) == expected["text"]
        assert (pieces[-1]["finish_reason"], pieces[-1]["stop_reason"]) == (
            expected["finish_reason"],
            expected["stop_reason"],
        )
    counts = [solo["usage"]["completion_tokens"] for solo in alone]
    assert whole["usage"]["completion_tokens"] == last["usage"]["completion_tokens"] == sum(counts)
    assert whole["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]


def of_choice(index: int, outputs: list[RequestOutput]) -> list[RequestOutput]:
    for output in outputs:
        output.request_id = str(index)
    return outputs


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=BYTES, cuts=st.lists(st.integers(0, 100), max_size=12))
def test_without_stop_strings_the_text_is_the_decoded_bytes(
    server: RunningServer, data: bytes, cuts: list[int]
) -> None:
    server.engine.script = lambda prompt, params: outputs_of(_split(data, cuts))
    chunks = events(server.chat(stream=True).text)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == data.decode(errors="replace")


def expected_offsets(data: list[int]) -> list[int]:
    """A byte that adds no character goes on with the one begun before it; any other begins behind all before it."""
    lengths = [len(bytes(data[:end]).decode(errors="replace")) for end in range(len(data) + 1)]
    return [before - (after == before) for before, after in pairwise(lengths)]


SPLIT_BYTES = [0x61, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xC0, 0xFF]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.lists(st.sampled_from(SPLIT_BYTES), min_size=1, max_size=16))
@example(data=[0xA9, 0x61, 0xA9, 0xA9, 0x61])
@example(data=[0xE2, 0x61, 0xE2, 0x82, 0xE2, 0x82, 0xAC, 0x61])
def test_offsets_are_those_in_the_text_as_it_is_sent(server: RunningServer, data: list[int]) -> None:
    expected = expected_offsets(data)
    server.engine.script = lambda prompt, params: outputs_of([[token] for token in data])
    offsets, num_sent = [], 0
    for chunk in events(server.complete(stream=True, logprobs=0).text):
        [piece] = chunk["choices"]
        for offset in (piece["logprobs"] or {"text_offset": []})["text_offset"]:
            # What broke off before a token is sent with it, and is not its own.
            assert num_sent <= offset <= num_sent + 1
            offsets.append(offset)
        num_sent += len(piece["text"])
    assert offsets == expected
    server.engine.script = told
    [choice] = server.complete(prompt=data, logprobs=0, echo=True).json()["choices"]
    end = len(choice["text"]) - len("yz")
    assert choice["logprobs"]["text_offset"] == [*expected, end, end + 1]


def test_a_special_token_without_text_breaks_no_character_off(server: RunningServer) -> None:
    server.engine.script = lambda prompt, params: outputs_of([[0x61], [0xE2], [BOS], [0x82], [0xAC], [BOS], [0x61]])
    [choice] = server.complete(logprobs=0).json()["choices"]
    assert choice["text"] == "a€a"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 1, 2, 2]
