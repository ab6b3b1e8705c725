"""DELETE /inspect/requests/{id}: one choice of a stream ends, the others go on."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

from .conftest import RunningServer


def test_one_prompt_of_a_stream_is_cancelled_and_the_other_goes_on(server: RunningServer) -> None:
    engine = server.engine
    engine.held_from = 1
    with ThreadPoolExecutor() as pool:
        streaming = pool.submit(server.complete, prompt=["first", "second"], stream=True)
        engine.wait_for(lambda: len(engine.added) == 2)
        first, second = engine.added
        answer = server.client.delete(f"/inspect/requests/{first.request_id}")
        assert answer.json() == {"id": first.request_id, "cancelled": True}
        assert engine.aborted == [first.request_id]
        assert server.client.delete(f"/inspect/requests/{first.request_id}").status_code == 404
        engine.release(second)
        lines = streaming.result().text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert not any("error" in chunk for chunk in chunks)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    texts = ["".join(choice["text"] for choice in choices if choice["index"] == index) for index in (0, 1)]
    reasons = {choice["index"]: choice["finish_reason"] for choice in choices if choice["finish_reason"]}
    assert reasons == {0: "cancelled", 1: "stop"}
    assert texts[1] == "hello"
    assert len(texts[0]) < len(texts[1])


def test_all_choices_of_a_request_are_cancelled_by_its_own_id(server: RunningServer) -> None:
    engine = server.engine
    engine.held_from = 1
    with ThreadPoolExecutor() as pool:
        streaming = pool.submit(server.complete, prompt="abc", n=3, stream=True)
        engine.wait_for(lambda: len(engine.added) == 1)
        request_id = engine.added[0].request_id
        assert server.client.delete(f"/inspect/requests/{request_id}-1").status_code == 200
        assert server.client.delete(f"/inspect/requests/{request_id}").status_code == 200
        lines = streaming.result().text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert reasons == ["cancelled"] * 3
    assert sorted(engine.aborted) == [f"{request_id}-{index}" for index in range(3)]


def test_what_is_cancelled_before_its_prompt_is_told_is_an_error(server: RunningServer) -> None:
    engine = server.engine
    engine.held_from = 0
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(server.complete, prompt="abc", prompt_logprobs=0)
        engine.wait_for(lambda: len(engine.added) == 1)
        assert server.client.delete(f"/inspect/requests/{engine.added[0].request_id}").status_code == 200
        answer = waiting.result()
    assert answer.status_code == 409
    assert "cancelled" in answer.json()["error"]["message"]
    server.wait_idle()


def test_what_nobody_asked_for_cannot_be_cancelled(server: RunningServer) -> None:
    answer = server.client.delete("/inspect/requests/nothing")
    assert answer.status_code == 404
    assert "nothing" in answer.json()["error"]["message"]
