"""The recorder beside an engine: what a slow or failing disk costs, and what it does not."""

from __future__ import annotations

import queue
import re
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import zmq
from fakes.chain_hash import ChainHashModel
from fakes.engines import tiny_config
from fakes.recording import LARGE, record, serve, shape
from fakes.simulation import Simulation

from pageframe.runtime import engine_process, journal_digests, journal_recorder, messages
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.journal_digests import TokenDigests
from pageframe.runtime.journal_file import JournalFileError, read_journal
from pageframe.runtime.journal_recorder import JournalRecorder, state_now
from pageframe.runtime.request import SamplingParams


def test_a_disk_that_fails_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder goes away; the next file cannot be begun."""
    folder = tmp_path / "gone"
    folder.mkdir()
    simulation = Simulation(tiny_config(num_blocks=16))
    recorder = JournalRecorder(simulation.engine, folder / "j", max_bytes=100)
    serve(simulation, recorder.record, [1] * 5)
    shutil.rmtree(folder)
    for number in range(50):
        serve(simulation, recorder.record, [2 + number] * 5)
    recorder.close()
    recorder.record()
    assert "the journal is recorded no further" in caplog.text
    assert "No such file or directory" in caplog.text


class SlowFile:
    """A file whose every write, but for the first line, waits for `allow`."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._allowed = threading.Semaphore(0)
        self._is_open = False
        self.waits = threading.Semaphore(0)
        self.writes: list[bytes] = []

    def allow(self, count: int | None = 1) -> None:
        """So many more writes; all of them for None."""
        self._is_open |= count is None
        self._allowed.release(count or 1)

    def write(self, data: bytes) -> int:
        self.waits.release()
        if self.writes and not self._is_open:
            self._allowed.acquire()
        self.writes.append(data)
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.fixture
def slow_files(monkeypatch: pytest.MonkeyPatch) -> list[SlowFile]:
    """The recorder's files from now on."""
    files: list[SlowFile] = []

    def slow_open(*settings: Any, **more: Any) -> Any:
        files.append(SlowFile(open(*settings, **more)))  # noqa: SIM115
        return files[-1]

    monkeypatch.setattr(journal_recorder, "open", slow_open, raising=False)
    return files


def events_in(data: bytes) -> int:
    return data.count(b'{"id":')


def test_events_wait_in_the_journal_until_half_is_written(
    tmp_path: Path, slow_files: list[SlowFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not one batch a step is kept for a disk that hangs."""
    monkeypatch.setattr(journal_recorder, "MAX_WAITING_BYTES", 20_000)
    simulation = Simulation(tiny_config(num_blocks=16))
    recorder = JournalRecorder(simulation.engine, tmp_path / "j", max_bytes=LARGE)
    (file,) = slow_files
    file.waits.acquire()  # the header
    for number in range(30):
        serve(simulation, recorder.record, [number + 1] * 9)
    total = simulation.engine.journal.written
    assert 400 < total < 1024
    file.waits.acquire()
    # One is written, and the next has begun: the rest is still more than half.
    file.allow()
    file.waits.acquire()
    serve(simulation, recorder.record, [9] * 9)
    file.allow(None)
    recorder.close()
    handed_over = [events_in(data) for data in file.writes[1:-1]]
    assert sum(handed_over) * journal_recorder.BYTES_PER_EVENT < 25_000
    assert events_in(file.writes[-1]) == simulation.engine.journal.written - sum(handed_over)
    recording = read_journal(tmp_path / "j")
    assert recording.events == list(simulation.engine.journal)
    assert recording.notices == []


def test_a_disk_that_is_too_slow_costs_events_and_not_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal forgets what waits too long. Lines say which, and how things stand behind it, in the same file."""

    def run(simulation: Simulation, recorded: Callable[[], None]) -> None:
        journal = simulation.engine.journal
        for round_ in range(6):
            serve(simulation, recorded, [round_ + 1] * 9, [round_ + 2] * 9)
            first = journal.written
            with monkeypatch.context() as patch:
                patch.setattr(journal_recorder, "MAX_WAITING_BYTES", -1)
                while journal.first <= first:
                    serve(simulation, recorded, [1, 2] * 4)
            serve(simulation, recorded, [1, 2] * 4)
        simulation.add([1] * 9, SamplingParams(max_tokens=8, ignore_eos=True))
        simulation.step()
        recorded()

    recording, simulation = record(tmp_path / "j", run, max_bytes=4_000_000)
    assert [path.name for path in tmp_path.iterdir()] == ["j"]
    lost = [re.fullmatch(r"events ([\d,]+) to ([\d,]+) were not recorded", notice) for notice in recording.notices]
    ranges = [[int(number.replace(",", "")) for number in match.groups()] for match in lost if match]
    assert len(ranges) == len(recording.notices) == 6
    num_lost = sum(last + 1 - first for first, last in ranges)
    assert len(recording.events) == simulation.engine.journal.written - num_lost
    assert shape(recording.state_at(10**9)) == shape(state_now(simulation.engine))
    unknown = next(index for index, state in recording.states if state is None)
    recording.state_at(recording.events[unknown - 1].step - 1)
    with pytest.raises(JournalFileError, match="events before it are missing"):
        recording.state_at(recording.events[unknown].step)
    assert any(len(digests) == 3 for start, digests in recording.tokens["r0"] if start == 9)


def test_a_recorder_that_comes_later_begins_with_how_things_stand(tmp_path: Path) -> None:
    simulation = Simulation(tiny_config(num_blocks=16))
    simulation.add([1] * 9, SamplingParams(max_tokens=8, ignore_eos=True))
    simulation.step()
    recording, _ = record(tmp_path / "j", lambda sim, done: serve(sim, done, [2] * 9), simulation=simulation)
    assert recording.notices == []
    assert shape(recording.state_at(10**9)) == shape(state_now(simulation.engine))
    assert [start for start, _ in recording.tokens["r0"]] == [9]


def test_any_failure_in_the_thread_ends_the_recording_and_is_told(
    tmp_path: Path, slow_files: list[SlowFile], caplog: pytest.LogCaptureFixture
) -> None:
    simulation = Simulation(tiny_config(num_blocks=16))
    recorder = JournalRecorder(simulation.engine, tmp_path / "j", max_bytes=LARGE)
    slow_files[0].writes = None  # type: ignore[assignment]
    slow_files[0].allow(None)
    serve(simulation, recorder.record, [1] * 5)
    recorder.close()
    recorder.record()
    assert "the journal is recorded no further" in caplog.text
    assert "AttributeError" in caplog.text


def test_nobody_else_may_read_a_recording(tmp_path: Path) -> None:
    record(
        tmp_path / "j", lambda sim, done: serve(sim, done, *([number + 1] * 9 for number in range(20))), max_bytes=9_000
    )
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(list(tmp_path.iterdir())) > 1
    assert modes == {0o600}


# ---- digests --------------------------------------------------------------------------------------------------------


def test_an_output_goes_on_from_its_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of choices too, which share it. No token is hashed twice."""
    prompt, hashed = [1, 2, 3, 4, 5], []
    of_tokens = TokenDigests.of_tokens

    def counted(digests: TokenDigests, before: bytes, token_ids: Any) -> bytes:
        hashed.append(len(token_ids))
        return of_tokens(digests, before, token_ids)

    monkeypatch.setattr(TokenDigests, "of_tokens", counted)

    def run(simulation: Simulation, recorded: Callable[[], None]) -> None:
        serve(simulation, recorded, prompt)
        simulation.add(prompt, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, n=2), request_id="pair")
        while simulation.live:
            simulation.step()
            recorded()
        for request_id in ("r0", "pair-0"):
            serve(simulation, recorded, prompt + simulation.ended[request_id].token_ids)

    recording, _ = record(tmp_path / "j", run)
    of_prompt = recording.tokens["r0"][0][1]
    drawn = {name: part for name, parts in recording.tokens.items() for start, part in parts if start == 5}
    assert drawn["pair-0"] == drawn["pair-1"]
    *_, after_first, after_pair = (parts[0][1] for parts in recording.tokens.values())
    assert after_first == [*of_prompt, *drawn["r0"]]
    assert after_pair == [*of_prompt, *drawn["pair-0"]]
    assert sum(hashed) == (5 + 3) + (5 + 3 + 3) + 2 * (8 + 3)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Those that were started to make digests."""
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def noted(*settings: Any, **more: Any) -> subprocess.Popen[bytes]:
        started.append(start(*settings, **more))
        return started[-1]

    monkeypatch.setattr(journal_digests.subprocess, "Popen", noted)
    return started


def test_a_process_makes_the_digests_and_ends_with_its_input(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    record(tmp_path / "none", lambda sim, done: None)
    record(tmp_path / "ids", lambda sim, done: serve(sim, done, [1] * 5), with_token_ids=True)
    assert processes == []
    record(tmp_path / "j", lambda sim, done: serve(sim, done, [1] * 5, [2] * 5))
    assert [process.returncode for process in processes] == [0]


def test_without_that_process_the_recording_goes_on_and_says_so(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], slow_files: list[SlowFile]
) -> None:
    def run(simulation: Simulation, recorded: Callable[[], None]) -> None:
        (file,) = slow_files
        file.allow(None)
        serve(simulation, recorded, [1] * 5)
        while sum(b'"start":5' in data for data in file.writes) < 1:
            file.waits.acquire()
        processes[0].kill()
        serve(simulation, recorded, [2] * 5, [3] * 5)

    recording, simulation = record(tmp_path / "j", run)
    assert recording.notices == ["what makes digests of tokens has ended: there are no more"]
    assert recording.events == list(simulation.engine.journal)
    assert list(recording.tokens) == ["r0"]
    assert len(processes) == 1


# ---- the engine's process -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_lost", [True, False], ids=["the device is lost", "anything else"])
def test_the_last_step_of_a_process_that_ends_badly_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    engine = Simulation(tiny_config(num_blocks=16)).engine
    assert isinstance(engine.runner, ChainHashModel)
    engine.runner.device_is_lost, engine.runner.fail_next = is_lost, "before"
    ours, theirs = zmq.Context.instance().socket(zmq.PAIR), zmq.Context.instance().socket(zmq.PAIR)
    ours.bind("inproc://ends-badly")
    theirs.connect("inproc://ends-badly")
    addresses: queue.SimpleQueue[str] = queue.SimpleQueue()
    addresses.put("")
    monkeypatch.setattr(engine_process, "_follow_parent", lambda: addresses)
    monkeypatch.setattr(engine_process, "_connect", lambda address: theirs)
    monkeypatch.setattr(engine_process, "_start", lambda config, socket: engine)
    monkeypatch.setattr(engine_process.signal, "signal", lambda *settings: None)
    monkeypatch.setattr(engine_process, "without_collections", nullcontext)
    config = messages.RecordingConfig(str(tmp_path / "j"), LARGE, with_token_ids=False)
    ours.send_multipart(messages.encode(b"start", messages.Start(EngineConfig(), config)))
    add = messages.Add("a", [1] * 9, SamplingParams(max_tokens=3), "", "", 0)
    ours.send_multipart(messages.encode(b"add", add))
    if is_lost:
        assert engine_process.main("INFO") == 1
    else:
        monkeypatch.setattr(engine.scheduler, "fail", broken)
        with pytest.raises(ZeroDivisionError):
            engine_process.main("INFO")
    recording = read_journal(tmp_path / "j")
    assert recording.events == list(engine.journal)
    assert {"arrive", "admit"} < {event.kind for event in recording.events}
    for socket in (ours, theirs):
        socket.close(linger=0)


def broken(*settings: Any) -> Any:
    raise ZeroDivisionError
