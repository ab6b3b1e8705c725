"""A recording replayed: with the same settings it is what was recorded, with more memory it is no worse."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from fakes.engines import tiny_config
from fakes.simulation import Simulation

from pageframe.benchmarks.experiments import replay_journal
from pageframe.runtime.journal_file import Recording, read_journal
from pageframe.runtime.journal_recorder import JournalRecorder
from pageframe.runtime.request import SamplingParams


@pytest.fixture(scope="module", params=[False, True], ids=["digests", "token ids"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of some turns: each prompt is an earlier one and more."""
    file = tmp_path_factory.mktemp("recording") / "j"
    simulation = Simulation(tiny_config(num_blocks=24, block_size=4, max_num_requests=3, max_num_batched_tokens=16))
    recorder = JournalRecorder(simulation.engine, file, max_bytes=2**30, with_token_ids=request.param)
    rng, chats = random.Random(3), [[token + 1] * 5 for token in range(4)]
    for turn in range(24):
        chat = chats[turn % 4]
        chat += [rng.randrange(1, 9) for _ in range(4)]
        if len(chat) > 40:
            del chat[5:]
        simulation.add(list(chat), SamplingParams(max_tokens=1 + turn % 9, ignore_eos=True), priority=turn % 2)
        for _ in range(rng.randrange(1, 6)):
            simulation.step()
            recorder.record()
    simulation.drain()
    recorder.record()
    recorder.close()
    assert simulation.counts["preemptions"] > 0
    return file


@pytest.fixture
def recording(path: Path) -> Recording:
    return read_journal(path)


def replayed(recording: Recording, num_blocks: int, host_slots: int = 0) -> replay_journal.Outcome:
    requests = replay_journal.arrivals(recording)
    assert len(requests) == 24
    return replay_journal.replay(recording, requests, "", num_blocks=num_blocks, host_slots=host_slots)


def test_the_same_settings_find_what_was_found(recording: Recording) -> None:
    """Arrivals are told apart from steps by the clock alone, so a request may enter a step later than it did."""
    was = replay_journal.recorded(recording, replay_journal.arrivals(recording))
    again = replayed(recording, 24)
    assert was.hit_tokens > 100
    assert was.evicted > 10
    assert again.lookup_tokens == was.lookup_tokens
    assert again.hit_tokens == pytest.approx(was.hit_tokens, rel=0.15)
    assert again.evicted == pytest.approx(was.evicted, rel=0.3)


def test_more_memory_finds_no_less(recording: Recording) -> None:
    sizes = [replayed(recording, num_blocks) for num_blocks in (12, 24, 200)]
    assert [size.hit_tokens for size in sizes] == sorted(size.hit_tokens for size in sizes)
    assert (sizes[-1].evicted, sizes[-1].preemptions) == (0, 0)
    assert replayed(recording, 12, host_slots=200).hit_tokens > sizes[0].hit_tokens


def recorded_run(path: Path, prompts: Iterable[list[int]], max_tokens: int, **settings: Any) -> Recording:
    """One request after the other."""
    simulation = Simulation(tiny_config(block_size=4, **settings))
    recorder = JournalRecorder(simulation.engine, path, max_bytes=2**30)
    for prompt in prompts:
        simulation.add(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        while simulation.live:
            simulation.step()
            recorder.record()
    recorder.close()
    return read_journal(path)


def test_without_a_prefix_cache_nothing_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = recorded_run(tmp_path / "j", [[1] * 12, [1] * 12], 3, num_blocks=24, prefix_cache=False)
    again = replay_journal.replay(recording, replay_journal.arrivals(recording), "", num_blocks=24, host_slots=0)
    assert again.hit_tokens == 0
    assert again.lookup_tokens == replay_journal.recorded(recording, replay_journal.arrivals(recording)).hit_tokens == 0
    assert replay_journal.main([str(tmp_path / "j"), "--blocks", "48", "--host-slots", "9"]) == 1
    assert "cannot be replayed: the prefix cache was off" in capsys.readouterr().err


def test_contexts_slide_as_they_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = recorded_run(tmp_path / "j", [[1] * 12, [2] * 12], 60, num_blocks=24, max_model_len=32, slide_by=16)
    requests = replay_journal.arrivals(recording)
    assert [len(request.output) for request in requests] == [60, 60]
    again = replay_journal.replay(recording, requests, "", num_blocks=24, host_slots=0)
    assert again.seconds > 0
    assert replay_journal.main([str(tmp_path / "j"), "--blocks", "48"]) == 0
    told = capsys.readouterr().out
    assert "48 blocks" in told
    assert "do not fit" not in told
    assert replay_journal.main([str(tmp_path / "j"), "--blocks", "3"]) == 1
    assert "cannot be replayed: contexts slid by 16 tokens: 3 blocks of 4 hold fewer" in capsys.readouterr().err


def test_what_a_window_has_passed_is_given_back(tmp_path: Path) -> None:
    """Two long requests that fit side by side only so."""
    simulation = Simulation(tiny_config(num_blocks=12, window=8))
    recorder = JournalRecorder(simulation.engine, tmp_path / "j", max_bytes=2**30)
    for token in (1, 2):
        simulation.add([token] * 5, SamplingParams(max_tokens=40, ignore_eos=True))
    while simulation.live:
        simulation.step()
        recorder.record()
    recorder.close()
    recording = read_journal(tmp_path / "j")
    assert recording.header["window"] == 8
    assert simulation.counts["preemptions"] == 0
    again = replay_journal.replay(recording, replay_journal.arrivals(recording), "", num_blocks=12, host_slots=0)
    assert again.preemptions == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("block_size", "4"), ("num_blocks", None), ("prefix_cache", None), ("slide_by", "no"), ("window", 0)],
)
def test_settings_that_are_not_known_are_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: Any
) -> None:
    recorded_run(tmp_path / "j", [[1] * 12], 3, num_blocks=24)
    first, *lines = (tmp_path / "j").read_text().splitlines()
    (tmp_path / "j").write_text("\n".join([json.dumps(json.loads(first) | {name: value}), *lines]) + "\n")
    assert replay_journal.main([str(tmp_path / "j")]) == 1
    told = capsys.readouterr().err
    assert f"its first line says {name} is {value!r}" in told
    assert told.count("\n") == 1


def test_the_command(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert replay_journal.main([str(path), "--blocks", "48", "6"]) == 0
    told = capsys.readouterr().out
    assert "24 requests" in told
    assert "as recorded" in told
    assert "do not fit" in told


def test_what_cannot_be_replayed_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_text("nothing\n")
    assert replay_journal.main([str(tmp_path / "x")]) == 1
    assert "is no recording of a journal" in capsys.readouterr().err
    engine = Simulation().engine
    JournalRecorder(engine, tmp_path / "empty", max_bytes=2**30).close()
    assert replay_journal.main([str(tmp_path / "empty")]) == 1
    assert "holds no request from its arrival to its end" in capsys.readouterr().err
