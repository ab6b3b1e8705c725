"""Recordings: what is read back is what happened, at every step; damage costs what is damaged and no more."""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.engines import tiny_config
from fakes.recording import LARGE, record, serve, shape
from fakes.simulation import Simulation
from fakes.workload import Workload, random_config

from pageframe.api.perfetto import make_trace
from pageframe.runtime.errors import StartupError
from pageframe.runtime.journal_file import JournalFileError, Recording, read_journal
from pageframe.runtime.journal_json import event_json
from pageframe.runtime.journal_recorder import JournalRecorder, state_now
from pageframe.runtime.journal_state import JournalState
from pageframe.runtime.request import SamplingParams
from pageframe.runtime.story import tell


def test_all_events_come_back_as_they_were(tmp_path: Path) -> None:
    recording, simulation = record(tmp_path / "j", lambda sim, done: serve(sim, done, [1] * 9, [1] * 9))
    assert recording.events == list(simulation.engine.journal)
    assert recording.notices == []
    assert recording.header["version"] == 1
    assert recording.header["num_blocks"] == 16
    assert tell(recording.events, "r1") == tell(simulation.engine.journal, "r1")


@pytest.mark.parametrize("seed", range(5))
def test_at_every_step_the_state_rebuilt_is_the_one_that_was(tmp_path: Path, seed: int) -> None:
    """In files so small that most begin in the middle of things."""
    rng = random.Random(seed)
    simulation = Simulation(random_config(rng))
    lived: dict[int, dict[str, Any]] = {}

    def run(simulation: Simulation, recorded: Callable[[], None]) -> None:
        def look(num_steps: int) -> None:
            recorded()
            lived[simulation.engine.scheduler.step] = shape(state_now(simulation.engine))

        Workload(simulation, rng, on_step=look).run(300)
        look(0)

    recording, _ = record(tmp_path / "j", run, simulation=simulation, max_bytes=24_000)
    assert (tmp_path / "j.1").exists()
    oldest = recording.events[0].step
    begins_in_the_middle = [state for _, state in recording.states if state is not None and state.running]
    assert len(begins_in_the_middle) >= 1
    # The journal of a step goes on until the next begins: clients come and go between two.
    checked = 0
    for step, expected in lived.items():
        if step > oldest:
            checked += 1
            assert shape(recording.state_at(step)) == expected or step_goes_on(recording, step, expected)
    assert checked > 20


def step_goes_on(recording: Recording, step: int, expected: dict[str, Any]) -> bool:
    """Whether the state was so after some event of the step, of which more followed."""
    begin, known = max(
        (entry for entry in recording.states if entry[0] <= first_of(recording, step)), key=lambda entry: entry[0]
    )
    assert known is not None
    state = JournalState.load(known.snapshot())
    for index, event in enumerate(recording.events[begin:], begin):
        if event.step > step:
            break
        state.apply((event,))
        if index >= first_of(recording, step) and shape(state) == expected:
            return True
    return False


def first_of(recording: Recording, step: int) -> int:
    return next((index for index, event in enumerate(recording.events) if event.step >= step), len(recording.events))


# ---- tokens ---------------------------------------------------------------------------------------------------------


def digests(recording: Recording, request_id: str) -> list[Any]:
    return [digest for _, part in recording.tokens[request_id] for digest in part]


def common(first: list[Any], second: list[Any]) -> int:
    return next(
        (index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]),
        min(len(first), len(second)),
    )


def test_digests_are_equal_exactly_as_far_as_prompts_are(tmp_path: Path) -> None:
    def run(simulation: Simulation, recorded: Callable[[], None]) -> None:
        serve(simulation, recorded, [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 5, 8, 9])
        serve(simulation, recorded, [1, 2, 3, 4, 5, 6, 7, 8, 9], tenant="other")

    recording, _ = record(tmp_path / "j", run)
    first, second, other = (digests(recording, f"r{number}") for number in range(3))
    assert len(first) == 9 + 3
    assert common(first, second) == 6
    assert common(first, other) == 0, "tenants share nothing"
    assert [start for start, _ in recording.tokens["r0"]] == [0, 9]
    written = (tmp_path / "j").read_text()
    assert "token_ids" not in written


def test_two_recordings_have_different_keys(tmp_path: Path) -> None:
    one, other = (record(tmp_path / name, lambda sim, done: serve(sim, done, [1] * 5))[0] for name in ("a", "b"))
    assert common(digests(one, "r0"), digests(other, "r0")) == 0


def test_token_ids_are_written_where_asked_for(tmp_path: Path) -> None:
    recording, simulation = record(
        tmp_path / "j", lambda sim, done: serve(sim, done, [1, 2, 3, 4, 5]), with_token_ids=True
    )
    assert digests(recording, "r0") == [1, 2, 3, 4, 5, *simulation.ended["r0"].token_ids]


# ---- files ----------------------------------------------------------------------------------------------------------


def test_a_bounded_number_of_files_of_bounded_size(tmp_path: Path) -> None:
    def run(simulation: Simulation, recorded: Callable[[], None]) -> None:
        serve(simulation, recorded, *([number + 1] * 9 for number in range(120)))

    recording, simulation = record(tmp_path / "j", run, max_bytes=8_000)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["j", "j.1", "j.2", "j.3", "j.4"]
    assert max(path.stat().st_size for path in tmp_path.iterdir()) < 8_000 + 24_000
    held = len(recording.events)
    assert recording.events == list(simulation.engine.journal)[-held:]
    assert recording.notices == []


def test_an_older_recording_is_kept_and_not_mixed_in(tmp_path: Path) -> None:
    record(tmp_path / "j", lambda sim, done: serve(sim, done, [1] * 5))
    second, simulation = record(tmp_path / "j", lambda sim, done: serve(sim, done, [2] * 5))
    assert second.events == list(simulation.engine.journal)
    assert (tmp_path / "j.1").exists()


def test_where_nothing_can_be_written_the_engine_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"journal: .*no-folder/j cannot be written: No such file"):
        JournalRecorder(Simulation().engine, tmp_path / "no-folder" / "j", max_bytes=LARGE)


@pytest.mark.parametrize("path", ["/dev/null", "."])
def test_what_is_no_file_is_not_moved_aside(path: str) -> None:
    with pytest.raises(StartupError, match=f"journal: {path} cannot be written: it is no regular file"):
        JournalRecorder(Simulation().engine, Path(path), max_bytes=LARGE)
    assert Path(path).exists()


# ---- damage ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    record(tmp_path / "j", lambda sim, done: serve(sim, done, [1] * 9, [2] * 9))
    return tmp_path / "j"


def test_a_file_cut_anywhere_gives_what_comes_before(recorded: Path) -> None:
    whole = read_journal(recorded)
    data = recorded.read_bytes()
    first_line = data.index(b"\n") + 1
    for cut in range(first_line, len(data), 97):
        recorded.write_bytes(data[:cut])
        part = read_journal(recorded)
        assert part.events == whole.events[: len(part.events)]
        assert len(part.events) >= data[:cut].count(b'"id":') - 1
        assert bool(part.notices) == (not data[:cut].endswith(b"\n"))
        assert all("is cut off in line" in notice for notice in part.notices)


def test_another_version_opens_as_far_as_it_goes(recorded: Path) -> None:
    whole = read_journal(recorded)
    lines = recorded.read_text().splitlines()
    lines[0] = json.dumps(json.loads(lines[0]) | {"version": 2})
    lines[3] = json.dumps(json.loads(lines[3]) | {"kind": "teleport"})
    event = json.loads(lines[5])
    lines[5] = json.dumps(event | {"color": "red"})
    recorded.write_text("\n".join(lines) + "\n")
    part = read_journal(recorded)
    assert len(part.events) == len(whole.events) - 1
    assert part.events == whole.events[:2] + whole.events[3:]
    assert any("version 2 of the format" in notice for notice in part.notices)
    assert "events 2 to 2 are missing" in part.notices
    assert any("1 of " in notice and "unknown form" in notice for notice in part.notices)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", "are no JSON"),
        ("[1, 2]", "are no JSON"),
        ('{"kind": "free"}', "unknown form"),
        ("\x00\x01", "no JSON"),
    ],
)
def test_lines_that_mean_nothing_are_left_out(recorded: Path, line: str, words: str) -> None:
    whole = read_journal(recorded)
    lines = recorded.read_text().splitlines()
    recorded.write_text("\n".join([*lines[:4], line, *lines[4:]]) + "\n")
    part = read_journal(recorded)
    assert part.events == whole.events
    assert len(part.notices) == 1
    assert words in part.notices[0]


@pytest.mark.parametrize("content", [b"", b"\n", b"{}\n", b"\xff\xfe\n", b'{"kind": "admit"}\n'])
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(JournalFileError, match="is no recording of a journal"):
        read_journal(tmp_path / "x")
    with pytest.raises(JournalFileError, match="cannot be read: No such file"):
        read_journal(tmp_path / "y")


@pytest.mark.parametrize(
    "changed",
    [
        {"step": "3"},
        {"time": None},
        {"time": 1e300},
        {"row": 1.5},
        {"row": True},
        {"row": 10**30},
        {"request_id": 7},
        {"request_id": "\ud800"},
        {"block_ids": "123"},
        {"block_ids": [[1]]},
        {"block_ids": ["1"]},
        {"id": None},
    ],
)
def test_a_field_of_another_type_makes_a_line_of_an_unknown_form(recorded: Path, changed: dict[str, Any]) -> None:
    whole = read_journal(recorded)
    lines = recorded.read_text().splitlines()
    place = next(place for place, line in enumerate(lines) if '"kind":"allocate"' in line)
    event = json.loads(lines[place])
    lines[place] = json.dumps(event | changed)
    recorded.write_text("\n".join(lines) + "\n")
    part = read_journal(recorded)
    assert part.events == [other for number, other in enumerate(whole.events) if number != event["id"]]
    assert any("1 of " in notice and "unknown form" in notice for notice in part.notices)
    assert f"events {event['id']} to {event['id']} are missing" in part.notices


def test_events_that_come_again_are_passed_over(recorded: Path) -> None:
    whole, lines = read_journal(recorded), recorded.read_text().splitlines()
    recorded.write_text("\n".join([*lines[:9], *lines[4:9], *lines[9:], lines[1]]) + "\n")
    part = read_journal(recorded)
    assert part.events == whole.events
    assert part.notices == []


def test_behind_missing_events_the_state_is_not_known(recorded: Path) -> None:
    whole, lines = read_journal(recorded), recorded.read_text().splitlines()
    last = whole.events[-1].step
    place = next(place for place, line in enumerate(lines) if f'"step":{last - 1},' in line)
    missing = json.loads(lines[place])["id"]
    recorded.write_text("\n".join([*lines[:place], *lines[place + 1 :]]) + "\n")
    part = read_journal(recorded)
    assert part.notices == [f"events {missing} to {missing} are missing"]
    assert shape(part.state_at(last - 3)) == shape(whole.state_at(last - 3))
    with pytest.raises(JournalFileError, match=f"after step {last} is not known: events before it are missing"):
        part.state_at(last)


def test_events_that_do_not_fit_together_are_no_state(recorded: Path) -> None:
    text = recorded.read_text()
    recorded.write_text(re.sub(r'("kind":"admit".*?"row":)\d+', r"\g<1>7", text))
    with pytest.raises(JournalFileError, match="the events before it do not fit together"):
        read_journal(recorded).state_at(10**9)
    recorded.write_text(re.sub(r'("kind":"allocate".*?"first_index":)\d+', r"\g<1>9999999999", text))
    with pytest.raises(JournalFileError, match="the events before it do not fit together"):
        read_journal(recorded).state_at(10**9)


def test_files_that_move_on_while_they_are_read_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recording goes on whenever a file is opened."""
    prompts = ([number + 1] * 9 for number in range(60))
    record(tmp_path / "all", lambda sim, done: serve(sim, done, *prompts), max_bytes=8_000)
    files = [(tmp_path / f"all.{number}").read_bytes() for number in (4, 3, 2, 1)] + [(tmp_path / "all").read_bytes()]
    path, opening = tmp_path / "j", Path.open
    written, opened = 0, 0

    def write_next() -> None:
        nonlocal written
        for number in (3, 2, 1, 0):
            older = tmp_path / ("j" if not number else f"j.{number}")
            if older.exists():
                older.replace(tmp_path / f"j.{number + 1}")
        with open(path, "wb") as file:
            file.write(files[written])
        written += 1

    for moment in range(1, 6):
        written, opened = 0, 0
        for file in tmp_path.glob("j*"):
            file.unlink()
        for _ in range(3):
            write_next()

        def moving(file: Path, *settings: Any, moment: int = moment) -> Any:
            nonlocal opened
            try:
                return opening(file, *settings)
            finally:
                opened += 1
                if opened == moment:
                    write_next()

        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", moving)
            part = read_journal(path)
        assert written == 4
        assert part.notices == []
        numbers = [line["id"] for file in files[:3] for line in map(json.loads, file.splitlines()) if "id" in line]
        assert len(part.events) == len(numbers)


WEIRD = (None, True, -1, 0, 2**63, -(2**70), 1e308, "", "nobody", [], [-1], [10**9], {}, "\ud800")


def look_at_everything(path: Path, rng: random.Random) -> None:
    """Nothing but a JournalFileError may come of it."""
    with contextlib.suppress(JournalFileError):
        recording = read_journal(path)
        for request_id in {event.request_id for event in recording.events}:
            tell(recording.events, request_id)
        make_trace(event_json(number, event) for number, event in enumerate(recording.events))
        recording.state_at(rng.randrange(20))


def test_random_damage_never_raises_anything_else(recorded: Path) -> None:
    rng, data = random.Random(7), recorded.read_bytes()
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 20)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        recorded.write_bytes(bytes(damaged))
        look_at_everything(recorded, rng)


def test_no_value_of_any_field_raises_anything_else(tmp_path: Path) -> None:
    """In lines of all kinds: it begins in the middle of things, with a state."""
    simulation = Simulation(tiny_config(num_blocks=12, max_num_requests=2, host_slots=4))
    for token in (1, 2, 3):
        simulation.add([token] * 9, SamplingParams(max_tokens=9, ignore_eos=True))
    simulation.step()
    path = tmp_path / "j"
    record(path, lambda sim, done: serve(sim, done, [1] * 9), simulation=simulation)
    rng, lines = random.Random(8), path.read_text().splitlines()
    lines += ['{"kind": "gap", "from": 7000, "to": 7001}', '{"kind": "notice", "text": "more"}']
    for place, line in enumerate(lines):
        content = json.loads(line)
        for name, of_engine in content.items():
            values = [rng.choice(WEIRD)]
            if isinstance(of_engine, str):
                values.append("nobody")
            elif content["kind"] == "state":
                values += [*WEIRD, *([weird, "r1"] for weird in WEIRD), *({"r1": weird} for weird in WEIRD)]
            for value in values:
                damaged = json.dumps(content | {name: value})
                path.write_text("\n".join([*lines[:place], damaged, *lines[place + 1 :]]) + "\n")
                look_at_everything(path, rng)
