"""`pageframe generate` sends a request again where its answer tells of the server's state and not of the request."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pageframe.api.batch_lines import BatchRequest
from pageframe.api.batch_run import post_until_answered

from .batch_runs import COMPLETION, Run, line
from .fakes import FakeEngine, outputs_of, reply


def test_a_request_that_fails_is_sent_again_before_it_has_its_result(tmp_path: Path) -> None:
    engine = FakeEngine(lambda prompt, params: outputs_of([[]], reason="error"))
    batch = Run(tmp_path, [line("a")], engine)
    assert batch.run().failed == 1
    assert [result["response"]["status_code"] for result in batch.results()] == [500]
    assert (len(engine.added), batch.pauses) == (4, [0.5, 1.0, 2.0])


def test_a_request_that_succeeds_when_it_is_sent_again_has_one_result(tmp_path: Path) -> None:
    batch = Run(tmp_path, [line("a"), line("b", temperature=11)])
    scripts = iter([outputs_of([[]], reason="error") for _ in range(2)])
    batch.engine.script = lambda prompt, params: next(scripts, reply("hello"))
    counts = batch.run(concurrency=1)
    assert (counts.answered, counts.failed, counts.output_tokens) == (1, 1, 6)
    codes = {result["custom_id"]: result["response"]["status_code"] for result in batch.results()}
    assert codes == {"a": 200, "b": 400}  # a request at fault is not sent again
    assert (len(batch.engine.added), batch.pauses) == (3, [0.5, 1.0])


def test_a_full_server_is_asked_again_when_it_said(tmp_path: Path) -> None:
    batch = Run(tmp_path, [line("a")])
    batch.max_queue = 0
    batch.engine.stats.num_waiting = 1

    def on_pause() -> None:
        batch.engine.stats.num_waiting = 2 - len(batch.pauses)

    batch.on_pause = on_pause
    assert batch.run().answered == 1
    assert batch.pauses == [1, 1]


def test_an_answer_that_breaks_off_is_asked_for_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    faults = iter([RuntimeError("cut"), None, OSError("cut")])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        fault = next(faults, "none")
        if isinstance(fault, RuntimeError):
            raise fault
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"r")]})
        await send({"type": "http.response.body", "body": b'{"usage": {}}', "more_body": fault != "none"})
        if isinstance(fault, OSError):
            raise fault

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    pauses: list[float] = []
    request = BatchRequest(1, "a", COMPLETION, b"{}")
    answer = asyncio.run(post_until_answered(app, request, lambda: None, pause))
    assert (answer.status, answer.request_id, answer.body) == (200, "r", b'{"usage": {}}')
    assert pauses == [0.5, 1.0, 2.0]
    assert caplog.text.count("broke off") == 2

    faults = iter([OSError("cut")] * 4)
    answer = asyncio.run(post_until_answered(app, request, lambda: None, pause))
    assert (answer.status, answer.request_id) == (500, "")
    assert json.loads(answer.body)["error"]["message"] == "the answer broke off"
