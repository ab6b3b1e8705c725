"""`pageframe generate` over a fake engine: lines in and out, many at once, stopped and gone on with."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pageframe.api import batch_command, batch_lines
from pageframe.api.batch_command import Batch, progress_bar
from pageframe.api.batch_lines import BadLine, BatchRequest, Scan, read_requests, scan_requests
from pageframe.api.batch_results import ResultFile, ResultFileError
from pageframe.api.batch_run import BatchCounts
from pageframe.api.cli import main
from pageframe.api.config import MAX_MAX_QUEUE, ServerConfig
from pageframe.runtime.errors import ConfigError, EngineDeadError

from .batch_runs import CHAT, COMPLETION, Run, line, to_bytes
from .conftest import RunningServer
from .fakes import FakeEngine, reply

# ---- lines in and out -----------------------------------------------------------------------------------------------


def test_results_have_openais_shape_and_the_routes_own_bodies(tmp_path: Path, server: RunningServer) -> None:
    bodies = [
        (CHAT, {"n": 2, "logprobs": True, "top_logprobs": 1}),
        (COMPLETION, {"max_tokens": 9, "user": "somebody"}),
        (CHAT, {"model": "tiny", "request_id": "mine"}),
        (COMPLETION, {"temperature": 99}),
        (CHAT, {"model": "gpt-9"}),
        (COMPLETION, {"unheard_of": 1}),
        (CHAT, {"messages": []}),
    ]
    batch = Run(tmp_path, [line(str(number), url, **body) for number, (url, body) in enumerate(bodies)])
    counts = batch.run()
    assert (counts.answered, counts.failed, counts.output_tokens) == (3, 4, 6 * 2 + 6 + 6)
    results = {result["custom_id"]: result for result in batch.results()}
    assert len({result["id"] for result in results.values()}) == len(bodies)
    for number, (url, body) in enumerate(bodies):
        result = results[str(number)]
        assert result.keys() == {"id", "custom_id", "response", "error"}
        assert result["id"].startswith("batch_req_")
        assert result["error"] is None
        response = result["response"]
        assert response.keys() == {"status_code", "request_id", "body"}
        over_http = server.client.post(url, json=line("", url, **body)["body"])
        assert response["status_code"] == over_http.status_code
        changing = {"id": "", "created": 0}
        assert {**response["body"], **changing} == {**over_http.json(), **changing}
        if over_http.status_code == 200:
            assert response["request_id"] == ("mine" if number == 2 else response["body"]["id"])
    assert {added.tenant for added in batch.engine.added} == {""}


#: A line, the custom_id of its result, and what the error must say.
BAD_LINES: list[tuple[Any, str | None, str]] = [
    (b"no json", None, "it is no request of a batch: JSON is malformed"),
    (b"[" * 100_000, None, "it is no request of a batch"),
    (["a"], None, "Expected `object`, got `array`"),
    ({"method": "POST", "url": CHAT, "body": {}}, None, "missing required field `custom_id`"),
    ({**line("a"), "custom_id": 5}, None, "Expected `str`, got `int` - at `$.custom_id`"),
    ({**line("")}, None, "custom_id has 0 characters; it must have 1 to 512"),
    ({**line("x" * 513)}, None, "custom_id has 513 characters"),
    ({"custom_id": "a", "url": CHAT, "body": {}}, "a", "missing required field `method`"),
    ({**line("a"), "priority": 1}, "a", "unknown field `priority`"),
    ({**line("a"), "method": "GET"}, "a", "method is 'GET'; it must be 'POST'"),
    (line("a", "/v1/embeddings"), "a", "url is '/v1/embeddings'; it must be one of /v1/chat/completions, "),
    ({**line("a"), "body": "{}"}, "a", "body must be a JSON object"),
    ({**line("a"), "body": [1]}, "a", "body must be a JSON object"),
    (line("a", stream=True), "a", "stream is true; a batch has whole answers alone"),
]


@pytest.mark.parametrize(("bad", "custom_id", "said"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_line_that_is_no_request_gets_an_error_and_no_second_one(
    tmp_path: Path, bad: Any, custom_id: str | None, said: str
) -> None:
    batch = Run(tmp_path, [line("before"), bad, line("after")])
    for _ in range(2):
        batch.run(concurrency=1)
        before, result, after = batch.results()
        assert (before["custom_id"], after["custom_id"]) == ("before", "after")
        assert (result["custom_id"], result["response"]) == (custom_id, None)
        assert (result["error"]["code"], result["error"]["line"]) == ("invalid_line", 2)
        assert result["error"]["message"].startswith("line 2: ")
        assert said in result["error"]["message"]
    assert len(batch.engine.added) == 2


def test_a_line_that_is_put_right_is_answered(tmp_path: Path) -> None:
    batch = Run(tmp_path, [line("a"), b"bad"])
    batch.run()
    batch.input.write_bytes(to_bytes([line("a"), line("b")]))
    assert batch.run().answered == 1
    assert batch.batch is not None
    assert batch.batch.num_open == 1
    assert [result["custom_id"] for result in batch.results()].count("b") == 1


def test_what_is_wrong_with_a_body_its_route_says(tmp_path: Path) -> None:
    raw = b'{"custom_id": "%d", "method": "POST", "url": "/v1/completions", "body": %s}'
    texts = [b'{"prompt": "a", "stream": 1}', b'{"prompt": 1}', b'  {"prompt" : "a"}  ', b'{"stream": false}']
    batch = Run(tmp_path, [raw % (number, text) for number, text in enumerate(texts)])
    batch.run(concurrency=1)
    statuses = [result["response"]["status_code"] for result in batch.results()]
    assert statuses == [400, 400, 200, 400]


def test_empty_lines_are_passed_over_and_the_last_needs_no_end(tmp_path: Path) -> None:
    batch = Run(tmp_path, [b"", line("a"), b"  \r"])
    with batch.input.open("ab") as file:
        file.write(json.dumps(line("b")).encode())
    assert batch.run().answered == 2
    assert scan_requests(batch.input) == Scan({"a", "b"}, set())


def test_a_line_beyond_all_bounds_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lines, "MAX_LINE_BYTES", 200)
    lines = list(read_requests(io.BytesIO(to_bytes([line("a"), line("b", prompt="x" * 950), line("c")]))))
    assert [type(item) for item in lines] == [BatchRequest, BadLine, BatchRequest]
    assert [item.number for item in lines] == [1, 2, 3]
    assert isinstance(lines[1], BadLine)
    assert lines[1].reason == "it has 200 bytes or more"


def test_a_custom_id_that_is_there_twice_is_refused_before_any_work(tmp_path: Path) -> None:
    batch = Run(tmp_path, [line("a"), line("b"), b"bad", {"custom_id": "a"}])
    with pytest.raises(ConfigError, match="lines 1 and 4 both have the custom_id 'a'"):
        batch.run()
    assert not batch.output.exists()


# ---- many at once ---------------------------------------------------------------------------------------------------


def test_no_more_are_under_way_than_may_be_and_results_come_as_they_end(tmp_path: Path) -> None:
    outstanding: list[int] = []
    engine = FakeEngine()
    engine.held_from = 0

    def script(prompt: list[int], params: Any) -> list[Any]:
        outstanding.append(engine.num_outstanding)
        return reply("hello")

    engine.script = script
    batch = Run(tmp_path, [line(str(number)) for number in range(7)], engine)
    batch.start(concurrency=3)
    engine.wait_for(lambda: len(engine.added) == 3)
    order = [2, 0, 1, 3, 6, 5, 4]
    for num_added, number in zip((3, 4, 5, 6, 7, 7, 7), order, strict=True):
        engine.wait_for(lambda expected=num_added: len(engine.added) == expected)  # type: ignore[misc]
        engine.release(engine.added[number])
    batch.join()
    assert batch.failure is None
    assert max(outstanding) == 3
    first = [result["custom_id"] for result in batch.results()][:1]
    assert first == ["2"]
    assert sorted(result["custom_id"] for result in batch.results()) == list("0123456")


def test_as_many_at_once_as_the_engine_runs_unless_said(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.held_from = 0
    batch = Run(tmp_path, [line(str(number)) for number in range(20)], engine)
    batch.start()
    engine.wait_for(lambda: len(engine.added) == engine.resolved.max_num_requests)
    assert engine.num_outstanding == engine.resolved.max_num_requests
    batch.stop()


def test_nobody_is_turned_away_by_a_full_queue(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.stats.num_waiting = 5000
    batch = Run(tmp_path, [line(str(number), n=8) for number in range(50)], engine)
    assert batch.run(concurrency=50).answered == 50


# ---- stopped and gone on with ---------------------------------------------------------------------------------------


def test_stopped_it_keeps_what_is_done_and_goes_on_with_the_rest(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.held_from = 0
    batch = Run(tmp_path, [line(str(number)) for number in range(5)], engine)
    batch.start(concurrency=3)
    engine.wait_for(lambda: len(engine.added) == 3)
    engine.release(engine.added[1])
    engine.wait_for(lambda: len(engine.added) == 4)
    batch.stop()
    assert isinstance(batch.failure, asyncio.CancelledError)
    assert [result["custom_id"] for result in batch.results()] == ["1"]
    assert len(engine.aborted) == 3
    assert engine.num_outstanding == 0

    engine.held_from = None
    engine.added.clear()
    counts = batch.run(concurrency=3)
    assert (counts.answered, counts.failed, len(engine.added)) == (4, 0, 4)
    assert batch.batch is not None
    assert (
        "4 requests answered and 0 failed of 5 (1 had their results before); 24 output tokens" in batch.batch.summary()
    )
    assert sorted(result["custom_id"] for result in batch.results()) == list("01234")
    before = batch.output.read_bytes()
    assert batch.run().answered == 0
    assert batch.output.read_bytes() == before


def test_a_dead_engine_ends_it_and_is_nobodys_result(tmp_path: Path) -> None:
    engine = FakeEngine()
    batch = Run(tmp_path, [line(str(number)) for number in range(6)], engine)
    scripts: Iterator[Callable[[], None]] = iter([lambda: None] * 2)

    def script(prompt: list[int], params: Any) -> list[Any]:
        if next(scripts, None) is None:
            engine.held_from = 0
        return reply("hello")

    engine.script = script
    batch.start(concurrency=2)
    engine.wait_for(lambda: len(engine.added) == 4)
    engine.die("killed by nobody")
    batch.join()
    assert isinstance(batch.failure, EngineDeadError)
    assert "the engine has ended: killed by nobody" in str(batch.failure)
    assert {result["response"]["status_code"] for result in batch.results()} == {200}
    assert len(batch.results()) == 2


def test_a_disk_that_is_full_ends_it_whoever_is_under_way(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.held_from = 0
    batch = Run(tmp_path, [line(str(number)) for number in range(6)], engine)
    with open("/dev/full", "wb", buffering=0) as full:
        batch.results_file = lambda *_: nullcontext(ResultFile(batch.output, full, set(), set()))  # type: ignore[arg-type]
        batch.start(concurrency=3)
        engine.wait_for(lambda: len(engine.added) == 3)
        engine.release(engine.added[1])
        batch.join()
    assert isinstance(batch.failure, ResultFileError)
    assert str(batch.failure) == f"{batch.output} cannot be written: No space left on device"
    assert len(engine.aborted) == 2


def test_a_result_that_was_not_written_whole_is_made_again(tmp_path: Path) -> None:
    batch = Run(tmp_path, [line(str(number)) for number in range(3)])
    batch.run(concurrency=1)
    whole = batch.output.read_bytes()
    starts = [0, *(place + 1 for place, byte in enumerate(whole) if byte == ord("\n"))]
    for size in (starts[1] - 1, starts[1] + 1, starts[1] + 9, starts[2] - 1, len(whole) - 1, 5, 0):
        batch.output.write_bytes(whole[:size])
        batch.engine.added.clear()
        batch.run(concurrency=1)
        num_kept = whole[:size].count(b"\n")
        assert batch.output.read_bytes()[: starts[num_kept]] == whole[: starts[num_kept]]
        assert [result["custom_id"] for result in batch.results()] == ["0", "1", "2"]
        assert len(batch.engine.added) == 3 - num_kept


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"my notes, without an end", "line 1, is no result of a batch"),
        (b'{"a": 1}\n', "line 1, is no result"),
        (b'\n{"id"', "line 1, is no result"),
        (to_bytes([line("a")]), "line 1, is no result"),
        (to_bytes([{"id": "x", "custom_id": "z", "response": {}, "error": None}]), "a result for 'z', which is not"),
    ],
)
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: bytes, said: str) -> None:
    batch = Run(tmp_path, [line("a")])
    batch.output.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        batch.run()
    assert batch.output.read_bytes() == content
    assert not batch.engine.added


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    batch = Run(tmp_path, [line("a")])
    with batch.output.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="is being written by another run"):
            batch.run()
    assert batch.run().answered == 1


# ---- the command ----------------------------------------------------------------------------------------------------


class NoEngine:
    """Stands in for the way through an engine process: answers with a fake one, or ends as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
        self.ends_with: BaseException | None = None
        self.configs: list[Any] = []
        self._run = run
        monkeypatch.setattr(batch_command, "_with_engine", self)

    async def __call__(self, batch: Batch, engine_config: Any, server_config: ServerConfig) -> None:
        self.configs = [engine_config, server_config]
        if self.ends_with is not None:
            raise self.ends_with
        await batch.answer(self._run.service(), server_config)


def command(batch: Run, *flags: str) -> list[str]:
    return ["generate", "--input", str(batch.input), "--output", str(batch.output), *flags]


def test_the_command_says_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = Run(tmp_path, [line("a"), b"bad"])
    engine = NoEngine(monkeypatch, batch)
    flags = ("--model", "m.gguf", "--served-model-name", "gpt-9", "--concurrency", "2")
    assert main(command(batch, *flags)) == 0
    assert engine.configs[0].model == "m.gguf"
    assert (engine.configs[1].served_model_name, engine.configs[1].max_queue) == ("gpt-9", MAX_MAX_QUEUE)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("1 requests answered and 1 failed of 2; 6 output tokens in ")
    engine.configs = []
    assert main(command(batch)) == 0
    assert capsys.readouterr().err == f"All 2 requests have their results in {batch.output} already\n"
    assert not engine.configs, "an engine was started for nothing"


@pytest.mark.parametrize(
    ("error", "status", "beginning"),
    [
        (KeyboardInterrupt(), 130, "Stopped: "),
        (asyncio.CancelledError(), 143, "Stopped: "),
        (EngineDeadError("the engine has ended: x"), 1, "pageframe: the engine has ended: x; "),
        (ResultFileError("x cannot be written: full"), 1, "pageframe: x cannot be written: full; "),
    ],
)
def test_the_command_stopped_says_how_to_go_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    beginning: str,
) -> None:
    batch = Run(tmp_path, [line("a")])
    NoEngine(monkeypatch, batch).ends_with = error
    assert main(command(batch)) == status
    err = capsys.readouterr().err
    assert err.startswith(f"{beginning}0 requests answered and 0 failed of 1; ")
    assert err.endswith("; the same command goes on from there\n")


def test_files_that_cannot_be_used_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = Run(tmp_path, [line("a")])
    engine = NoEngine(monkeypatch, batch)
    (tmp_path / "empty").write_text("\n")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    paths = {
        (tmp_path / "none", batch.output): "none is no file",
        (tmp_path, batch.output): "is no regular file",
        (Path("/dev/null"), batch.output): "/dev/null is no regular file",
        (fifo, batch.output): "fifo is no regular file",
        (batch.input, Path("/dev/null")): "/dev/null is no regular file",
        (batch.input, fifo): "fifo is no regular file",
        (batch.input, tmp_path): "is no regular file",
        (tmp_path / "empty", batch.output): "empty has no line",
        (batch.input, batch.input): "--input and --output are both",
        (batch.input, tmp_path / "no" / "folder"): "folder cannot be opened: No such file or directory",
    }
    for (source, target), said in paths.items():
        assert main(["generate", "--input", str(source), "--output", str(target)]) == 1
        err = capsys.readouterr().err
        assert err.startswith("pageframe: ")
        assert said in err
    assert not engine.configs
    assert batch.input.read_bytes() == to_bytes([line("a")])
    for text in ("0", "-1", "x", "65537", "9" * 5000):
        with pytest.raises(SystemExit):
            main(command(batch, f"--concurrency={text}"))


def test_the_bar_counts() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    with progress_bar(console, 3) as progress:
        progress(BatchCounts(answered=1, failed=1, output_tokens=1234))
        console.print("")  # draws it
    assert "2/3" in screen.getvalue()
    assert "1,234 tokens, 1 failed" in screen.getvalue()
    plain = io.StringIO()
    with progress_bar(Console(file=plain), 3) as progress:
        progress(BatchCounts(answered=3))
    assert plain.getvalue() == ""
