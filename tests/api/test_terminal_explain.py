"""`pageframe explain` against a scripted server and a recording."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from fakes.engines import tiny_config
from fakes.simulation import Simulation

from pageframe.api.terminal_explain import add_arguments, run
from pageframe.runtime.inspection import inspect
from pageframe.runtime.journal_json import event_json
from pageframe.runtime.journal_recorder import JournalRecorder
from pageframe.runtime.request import SamplingParams

from .scripted_server import Json, ScriptedServer

ID = "chatcmpl-0a1b2c3d4e5f60718293a4b5c6d7e8f9"
OTHER = "chatcmpl-99887766554433221100ffeeddccbbaa"
STORY = {
    "id": ID,
    "sentences": [
        {"step": 7, "time": 0.0, "kind": "arrive", "text": "It arrived, for tenant [red]\x1b[31mann[/]."},
        {"step": 1234, "time": 1.5, "kind": "finish", "text": "It ended."},
    ],
    "complete": True,
}


def explain(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(argv))


def event(request_id: str, kind: str = "arrive") -> Json:
    return {"id": 0, "kind": kind, "step": 1, "time": 0.5, "request_id": request_id}


def test_a_story_with_its_steps_and_times(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with ScriptedServer({f"/inspect/requests/{ID}/story": [STORY, STORY | {"complete": False}]}) as server:
        assert explain(ID, "--url", server.url) == 0
        assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
            f" step    after  {ID}",
            "    7  0.000 s  It arrived, for tenant [red]�[31mann[/].",
            "1,234  1.500 s  It ended.",
        ]
        assert explain(ID, "--url", server.url) == 0
        assert "It began earlier" in capsys.readouterr().out


def test_json_is_what_the_server_says(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer({f"/inspect/requests/{ID}/story": [STORY]}) as server:
        assert explain(ID, "--json", "--url", server.url) == 0
    assert json.loads(capsys.readouterr().out) == STORY


def test_the_beginning_of_an_id_will_do(capsys: pytest.CaptureFixture[str]) -> None:
    evicted_long_ago = event("chatcmpl-0a-gone", "evict")
    for known, status, out in [
        ([event(ID)], 0, "It ended."),
        ([evicted_long_ago], 1, "nothing is known of a request 'chatcmpl-0a'"),
    ]:
        answers = {f"/inspect/requests/{ID}/story": [STORY], "/inspect/events?follow=0": known}
        with ScriptedServer(answers) as server:
            assert explain("chatcmpl-0a", "--url", server.url) == status
        captured = capsys.readouterr()
        assert out in captured.out + captured.err
        assert captured.err.count("\n") == status


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer({f"/inspect/requests/{ID}/story": [{"hello": "world"}]}) as server:
        assert explain(ID, "--url", server.url) == 1
        assert 'as Pageframe does: no "sentences"' in capsys.readouterr().err
    assert explain(ID, "--url", server.url) == 1
    assert capsys.readouterr().err == f"pageframe: no answer from {server.url}: Connection refused\n"


@pytest.fixture
def recording(tmp_path: Path) -> tuple[Path, Simulation]:
    """Two requests of one name, and a third."""
    simulation = Simulation(tiny_config(num_blocks=16))
    for request_id in ("ask-1", "ask-2", "other"):
        simulation.add([1] * 9, SamplingParams(max_tokens=3, ignore_eos=True), request_id=request_id)
    simulation.drain()
    lines = [{"kind": "journal", "version": 1, "run": "a"}]
    lines += [event_json(number, event) for number, event in enumerate(simulation.engine.journal)]
    path = tmp_path / "journal"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "no json\n")
    return path, simulation


def test_a_recording_tells_what_the_server_told(
    recording: tuple[Path, Simulation], capsys: pytest.CaptureFixture[str]
) -> None:
    path, simulation = recording
    for name, request_id in (("ask-2", "ask-2"), ("oth", "other")):
        assert explain(name, "--journal", str(path), "--json") == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out) == inspect(simulation.engine, "story", request_id)
        assert "1 of" in captured.err
        assert "no JSON" in captured.err


def test_ids_that_are_none_or_several_are_one_line(
    recording: tuple[Path, Simulation], capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = recording
    for name, message in [
        ("ask", "the ids of 2 requests begin with 'ask': ask-1, ask-2"),
        ("nobody", "nothing is known of a request 'nobody'"),
        ("", "nothing is known of a request ''"),
    ]:
        assert explain(name, "--journal", str(path)) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.splitlines()[-1] == f"pageframe: {message}"
    path.write_text("nothing of a recording\n")
    assert explain("ask-1", "--journal", str(path)) == 1
    assert "is no recording of a journal" in capsys.readouterr().err


def test_a_server_and_a_recording_together_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        explain("x", "--url", "http://h", "--journal", "file")
    assert "not allowed with" in capsys.readouterr().err


def test_a_recording_of_a_server_before_is_pointed_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        JournalRecorder(Simulation().engine, tmp_path / "j", max_bytes=2**30).close()
    assert explain("nobody", "--journal", str(tmp_path / "j")) == 1
    told = capsys.readouterr().err
    assert "nothing is known of a request 'nobody'" in told
    assert f"an older recording may be in {tmp_path / 'j.1'}" in told
