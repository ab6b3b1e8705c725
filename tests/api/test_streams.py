"""Streaming against not streaming: however tokens are spread over steps, the client gets the same answer."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .conftest import RunningServer
from .fakes import outputs_of
from .test_answers import events

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


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=BYTES, cuts=st.lists(st.integers(0, 100), max_size=12))
def test_without_stop_strings_the_text_is_the_decoded_bytes(
    server: RunningServer, data: bytes, cuts: list[int]
) -> None:
    server.engine.script = lambda prompt, params: outputs_of(_split(data, cuts))
    chunks = events(server.chat(stream=True).text)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == data.decode(errors="replace")
