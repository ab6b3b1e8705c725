"""A recording replayed: with the same settings it is what was recorded, with more memory it is no worse."""

from __future__ import annotations

import random
from pathlib import Path

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
