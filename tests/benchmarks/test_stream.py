"""What counts as a token, as a failure and as an end in a streamed answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pageframe.benchmarks.client.measures import chunk_tokens
from pageframe.benchmarks.client.record import CountedBy, RequestRecord
from pageframe.benchmarks.client.sse import SseEvent
from pageframe.benchmarks.client.stream import AnswerStream


def take_all(*events: dict[str, Any] | str) -> tuple[RequestRecord, AnswerStream]:
    """Each event read one second after the one before, the first at 1.0."""
    record = RequestRecord(0, 0.0, sent_s=0.0)
    stream = AnswerStream(record)
    for now_s, event in enumerate(events, start=1):
        data = event if isinstance(event, str) else json.dumps(event)
        stream.take(SseEvent("message", data), float(now_s))
    return record, stream


def chat(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": content, "finish_reason": None, **more}]}


def test_a_role_chunk_and_an_empty_chunk_are_no_tokens() -> None:
    record, stream = take_all(
        chat(role="assistant", content=""), chat(role="assistant"), chat(content=None), chat(content="a"), "[DONE]"
    )
    assert [chunk.time_s for chunk in record.chunks] == [4.0]
    assert stream.complete


def test_thoughts_are_tokens() -> None:
    record, _ = take_all(chat(role="assistant"), chat(reasoning_content="hm"), chat(reasoning="hm"), chat(content="a"))
    assert [chunk.time_s for chunk in record.chunks] == [2.0, 3.0, 4.0]


def test_usage_and_finish_reason_are_kept() -> None:
    details = {"cached_tokens": 16}
    record, stream = take_all(
        text("a"),
        {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}], "usage": None},
        {
            "choices": [],
            "usage": {"prompt_tokens": 20, "completion_tokens": 2, "prompt_tokens_details": details},
        },
        "[DONE]",
    )
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (20, 2, 16)
    assert record.finish_reason == "stop"
    assert stream.done


def test_a_running_usage_counts_held_back_tokens_with_the_text_that_shows_them() -> None:
    record, stream = take_all(
        text("a") | {"usage": {"completion_tokens": 1}},
        text("") | {"usage": {"completion_tokens": 2}},
        text("é") | {"usage": {"completion_tokens": 3}},
    )
    assert chunk_tokens(record.chunks, record.output_tokens) == ([1, 2], CountedBy.USAGE)
    assert stream.tokens_seen == 3


def test_logprobs_count_tokens_of_both_endpoints() -> None:
    record, stream = take_all(
        text("ab", logprobs={"tokens": ["a", "b"]}),
        text("", logprobs={"tokens": ["\\xc3"]}),
        text("é", logprobs={"tokens": ["\\xa9"]}),
    )
    assert chunk_tokens(record.chunks, None) == ([2, 2], CountedBy.LOGPROBS)
    assert stream.tokens_seen == 4
    one = {"choices": [{"index": 0, "delta": {"content": "ab"}, "logprobs": {"content": [{}, {}]}}]}
    record, _ = take_all(one)
    assert chunk_tokens(record.chunks, None) == ([2], CountedBy.LOGPROBS)


@pytest.mark.parametrize(
    ("event", "kind", "message"),
    [
        ({"error": {"message": "engine died", "code": 500}}, "error event", "engine died"),
        ({"error": "out of memory"}, "error event", "out of memory"),
        ("{not json", "bad event", "{not json"),
        ("[1]", "bad event", "[1]"),
    ],
)
def test_an_error_or_an_unreadable_event_is_a_failure(event: dict[str, Any] | str, kind: str, message: str) -> None:
    _, stream = take_all(text("a"), event, "[DONE]")
    assert stream.failure is not None
    assert stream.failure.kind == kind
    assert message in stream.failure.message
    assert not stream.complete


def test_an_event_named_error_is_a_failure() -> None:
    stream = AnswerStream(RequestRecord(0, 0.0))
    stream.take(SseEvent("error", '{"message": "no"}'), 1.0)
    assert stream.failure is not None
    assert stream.failure.message == "no"


def test_an_answer_ends_with_done_or_with_a_finish_reason() -> None:
    assert not take_all(text("a"))[1].complete
    assert take_all(text("a"), "[DONE]")[1].complete
    assert take_all(text("a", finish_reason="stop"))[1].complete
