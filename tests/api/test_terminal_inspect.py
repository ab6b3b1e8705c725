"""`pageframe inspect` against a scripted server: what it draws, character for character."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.console import Console, RenderableType
from rich.text import Text

from pageframe.api.terminal_drawing import (
    CACHED,
    FILL,
    FREE,
    MAX_MAP_LINES,
    PINNED,
    SHARED,
    OwnerColors,
    Snapshot,
    block_runs,
    draw_pool,
    draw_request,
    draw_snapshot,
    wait_words,
)
from pageframe.api.terminal_inspect import add_arguments, run, watch

from .scripted_server import Json, ScriptedServer

BLOCK_SIZE = 16
FIRST = "chatcmpl-0a1b2c3d4e5f60718293a4b5c6d7e8f9"
SECOND = "chatcmpl-99887766554433221100ffeeddccbbaa"
THIRD = "chatcmpl-123456789abcdef0123456789abcdef0"


def make_request(request_id: str, block_table: list[int], computed: int, known: int, **fields: Any) -> Json:
    return {
        "id": request_id,
        "status": "running" if block_table else "waiting",
        "finish_reason": None,
        "tenant": "",
        "priority": 0,
        "seed": 7,
        "row": 0,
        "num_tokens": known,
        "num_prompt_tokens": known - 10,
        "num_output_tokens": 10,
        "max_total_tokens": known + 50,
        "num_computed_tokens": computed,
        "num_cached_tokens": 0,
        "num_preemptions": 0,
        "block_table": block_table,
        "timings": {"arrived": 50.0, "first_scheduled": None, "first_token": None, "finished": None},
        "waits": [],
        **fields,
    }


def make_wait(reason: str, **fields: Any) -> Json:
    return {"reason": reason, "since": 50.0, "needed": 0, "free": 0, "until": None, **fields}


def make_block(block_id: int, state: str = "free", filled: int = 0, owners: tuple[str, ...] = ()) -> Json:
    return {
        "id": block_id,
        "state": state,
        "ref_count": len(owners),
        "owners": list(owners),
        "filled": filled,
        "digest": None,
    }


def make_answers(num_blocks: int, requests: list[Json], step: int = 1234) -> dict[str, Json]:
    """What the three routes answer about a pool in which these requests hold their block tables."""
    blocks = [make_block(block_id) for block_id in range(num_blocks)]
    for request in requests:
        for index, block_id in enumerate(request["block_table"]):
            filled = min(BLOCK_SIZE, max(0, request["num_computed_tokens"] - index * BLOCK_SIZE))
            blocks[block_id] = make_block(block_id, "used", filled, (request["id"],))
    used = sum(block["state"] == "used" for block in blocks)
    written = sum(request["num_computed_tokens"] for request in requests)
    running = sum(request["status"] == "running" for request in requests)
    return {
        "kv": {
            "step": step,
            "block_size": BLOCK_SIZE,
            "num_blocks": num_blocks,
            "blocks": {"free": num_blocks - used, "cached": 0, "used": used, "pinned": 0},
            "slots": {"written": written, "wasted": used * BLOCK_SIZE - written},
            "blocks_saved_by_sharing": 0,
            "bytes": {"pool": num_blocks * 368_640, "per_block": 368_640, "per_token": 23_040},
            "requests": {"running": running, "waiting": len(requests) - running},
            "preemptions": 3,
        },
        "blocks": {"step": step, "blocks": blocks},
        "requests": {"step": step, "requests": requests},
    }


def scene() -> dict[str, Json]:
    """Two running requests and one that waits, in a pool of 100 blocks."""
    return make_answers(
        100,
        [
            make_request(FIRST, [12, 13, 14, 15, 40, 41], 89, 90),
            make_request(SECOND, [0, 1], 20, 32, waits=[make_wait("queue", until=50.2), make_wait("budget")]),
            make_request(THIRD, [], 0, 100, num_preemptions=2, waits=[make_wait("blocks", needed=7, free=3)]),
        ],
    )


def script(*scenes: dict[str, Json]) -> dict[str, list[Any]]:
    return {f"/inspect/{name}": [answers[name] for answers in scenes] for name in ("kv", "blocks", "requests")}


def to_snapshot(answers: dict[str, Json]) -> Snapshot:
    return Snapshot(answers["kv"], answers["blocks"]["blocks"], answers["requests"]["requests"], (1, 1, 1))


def render(picture: RenderableType, width: int, **colour: Any) -> list[str]:
    console = Console(width=width, highlight=False, **({"color_system": None} | colour))
    with console.capture() as capture:
        console.print(picture)
    return [line.rstrip() for line in capture.get().splitlines()]


def inspect(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(argv))


@pytest.fixture
def served() -> Iterator[ScriptedServer]:
    with ScriptedServer(script(scene())) as server:
        yield server


# ---- the whole picture ----------------------------------------------------------------------------------------------


def test_picture_at_80_columns(
    served: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert inspect("--url", served.url) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "step 1,234 | 100 blocks: 92 free, 0 cached, 8 used, 0 pinned",
        "slots: 109 written, 19 wasted (14.8%) | 35.2 MiB, 360.0 KiB a block",
        "requests: 2 running, 1 waiting | preemptions: 3",
        "",
        "  0 █▂··········████························█▄······················",
        " 64 ····································",
        "a cell: 1 block  █ full  ░ unwritten  ▓ shared  ∘ cached  ◆ pinned  · free",
        "",
        "request               state    computed  physical blocks in logical order",
        "█ chatcmpl-0a1b2c3d…  running     89/90  12-15 40 41",
        "█ chatcmpl-99887766…  running     20/32  0 1 | waits for the token budget",
        "  chatcmpl-12345678…  waiting     0/100  waits for blocks: needs 7, 3 free |",
        "                                         preemptions: 2",
    ]


def test_picture_at_200_columns(
    served: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert inspect("--url", served.url + "/v1/") == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == (
        "step 1,234 | 100 blocks: 92 free, 0 cached, 8 used, 0 pinned | slots: 109 written, 19 wasted (14.8%) | "
        "35.2 MiB, 360.0 KiB a block | requests: 2 running, 1 waiting | preemptions: 3"
    )
    assert lines[2] == "  0 █▂··········████························█▄" + "·" * 58
    assert lines[-3:] == [
        f"█ {FIRST}  running     89/90  12-15 40 41",
        f"█ {SECOND}  running     20/32  0 1 | waits for the token budget",
        f"  {THIRD}  waiting     0/100  waits for blocks: needs 7, 3 free | preemptions: 2",
    ]


@pytest.mark.parametrize("width", [80, 200])
def test_colour_changes_no_character(width: int) -> None:
    picture = draw_snapshot(to_snapshot(scene()), OwnerColors(), width)
    coloured = render(picture, width, color_system="standard", force_terminal=True)
    plain = render(picture, width)
    assert any("\x1b[36m" in line for line in coloured)
    assert [Text.from_ansi(line).plain.rstrip() for line in coloured] == plain


def test_no_color_leaves_no_escape_codes_of_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    picture = draw_snapshot(to_snapshot(scene()), OwnerColors(), 80)
    lines = render(picture, 80, color_system="standard", force_terminal=True)
    assert not any(f"\x1b[{code}m" in line for code in range(30, 38) for line in lines)


def test_an_idle_server() -> None:
    lines = render(draw_snapshot(to_snapshot(make_answers(20, [])), OwnerColors(), 80), 80)
    assert " 0 " + FREE * 20 in lines
    assert lines[-1] == "no requests"
    assert "0 wasted (0.0%)" in "\n".join(lines)


# ---- the map --------------------------------------------------------------------------------------------------------


def draw_map(blocks: list[Json], width: int = 80, colors: OwnerColors | None = None) -> Text:
    return draw_pool(blocks, BLOCK_SIZE, colors or OwnerColors(), width)


def test_characters_alone_tell_states_and_fill_apart() -> None:
    blocks = [
        make_block(0),
        make_block(1, "cached", 16),
        make_block(2, "pinned", 16),
        make_block(3, "used", 16, (FIRST, SECOND)),
        *(make_block(4 + filled, "used", filled, (FIRST,)) for filled in range(17)),
    ]
    line = draw_map(blocks).plain.split("\n")[0]
    assert line == " 0 " + FREE + CACHED + PINNED + SHARED + "░▁▁▁▂▂▃▃▄▄▅▅▆▆▇▇█"
    assert len({FREE, CACHED, PINNED, SHARED, *FILL}) == 4 + 9


def test_blocks_have_their_owners_colour_and_keep_it() -> None:
    colors = OwnerColors()

    def styles(requests: list[Json]) -> list[str]:
        answers = make_answers(16, requests)
        colors.keep_only([request["id"] for request in requests])
        pool = draw_map(answers["blocks"]["blocks"], 80, colors)
        return [str(span.style) for span in pool.spans if span.start in (3, 4)]

    first, second = make_request(FIRST, [0], 16, 17), make_request(SECOND, [1], 16, 17)
    both = styles([first, second])
    assert len(set(both)) == 2
    assert styles([second])[1] == both[1]
    third = make_request(THIRD, [0], 16, 17)
    assert styles([second, third]) == both, "a new request takes the colour that became free"


@pytest.mark.parametrize("width", [20, 80, 200])
@pytest.mark.parametrize("num_blocks", [1, 1000, 1025, 11_650, 33_333])
def test_any_pool_fits_in_sixteen_lines(num_blocks: int, width: int) -> None:
    blocks = [make_block(block_id) for block_id in range(num_blocks)]
    blocks[-1] = make_block(num_blocks - 1, "used", 16, (FIRST,))
    lines = draw_map(blocks, width).plain.split("\n")
    rows = [
        line for line in lines if set(line) & set(FREE + "".join(FILL)) and "free" not in line and "full" not in line
    ]
    assert 1 <= len(rows) <= MAX_MAP_LINES
    assert all(len(line) <= max(width, 27) for line in lines)
    legend = next(line for line in lines if line.startswith("a cell: "))
    per_cell = int(legend.split()[2].replace(",", ""))
    label_width = len(f"{num_blocks:,}") + 1
    num_cells = sum(len(row) - label_width for row in rows)
    assert num_cells == -(-num_blocks // per_cell)
    assert per_cell == 1 or num_blocks > MAX_MAP_LINES * (len(rows[0]) - label_width) * (per_cell // 2)
    if len(rows) > 1:
        assert int(rows[1].split()[0].replace(",", "")) == (len(rows[0]) - label_width) * per_cell
    assert rows[-1][-1] in FILL


def test_a_cell_of_many_blocks_shows_its_largest_owner_and_how_full_it_is() -> None:
    blocks = [make_block(block_id) for block_id in range(4096)]
    for block_id, owner in enumerate([SECOND, FIRST, FIRST]):
        blocks[block_id] = make_block(block_id, "used", 16, (owner,))
    colors = OwnerColors()
    colors.keep_only([FIRST, SECOND])
    pool = draw_map(blocks, 80, colors)
    assert "a cell: 4 blocks" in pool.plain
    assert pool.plain.startswith("    0 ▆··")
    assert str(pool.spans[1].style) == colors[FIRST] != colors[SECOND]


# ---- one fact at a time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block_ids", "words"),
    [
        ([], []),
        ([5], ["5"]),
        ([40, 41], ["40", "41"]),
        ([12, 13, 14, 15, 40, 41], ["12-15", "40", "41"]),
        ([9, 8, 7], ["9", "8", "7"]),
        ([1, 2, 3, 2, 3, 4], ["1-3", "2-4"]),
    ],
)
def test_block_tables_as_runs(block_ids: list[int], words: list[str]) -> None:
    runs = block_runs(block_ids)
    assert [block_id for run in runs for block_id in run] == block_ids
    assert [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs] == words


def test_waits_in_words() -> None:
    assert wait_words(make_wait("blocks", needed=1200, free=3)) == "for blocks: needs 1,200, 3 free"
    assert wait_words(make_wait("rows")) == "for a row: max_num_requests are running"
    assert wait_words(make_wait("queue")) == "in the queue, behind others"
    assert wait_words(make_wait("grammar")) == "for grammar"


def test_a_long_block_table_is_cut_at_a_run_and_counted() -> None:
    scattered = list(range(0, 400, 2))
    request = make_request(FIRST, scattered, 3190, 3200)
    lines = render(draw_snapshot(to_snapshot(make_answers(400, [request])), OwnerColors(), 80), 80)
    header = next(index for index, line in enumerate(lines) if line.startswith("request  "))
    column = lines[header].index("physical")
    shown, left_out = " ".join(line[column:] for line in lines[header + 1 :]).split(" … ")
    ids = [int(word) for word in shown.split()]
    assert ids == scattered[: len(ids)]
    assert left_out == f"{200 - len(ids)} more"


def test_shortened_ids_differ() -> None:
    ids = [FIRST, FIRST[:-1] + "0", SECOND]
    requests = [make_request(request_id, [index], 1, 12) for index, request_id in enumerate(ids)]
    lines = render(draw_snapshot(to_snapshot(make_answers(4, requests)), OwnerColors(), 80), 80)
    names = [line.split()[1] for line in lines if line.startswith("█")]
    assert len(set(names)) == 3
    assert all(request_id.startswith(name.rstrip("…")) for request_id, name in zip(ids, names, strict=True))


# ---- one request ----------------------------------------------------------------------------------------------------


def one_request() -> Json:
    timings = {"arrived": 50.0, "first_scheduled": 50.012, "first_token": 51.5, "finished": None}
    waits = [make_wait("blocks", needed=7, free=3, until=50.012), make_wait("budget", since=52.0)]
    return make_request(FIRST, [12, 13, 140], 20, 40, timings=timings, waits=waits, num_preemptions=1)


def test_one_request_in_full() -> None:
    assert render(draw_request(one_request(), BLOCK_SIZE), 80) == [
        f"{FIRST}  running",
        "tokens       20 of 40 computed: 30 of the prompt, 10 of the answer; at most 90",
        "cached       0 tokens of the prompt were in the prefix cache",
        "sampling     seed 7",
        'order        priority 0, tenant ""',
        "preemptions  1",
        "timings      scheduled after 12 ms, first token after 1.50 s",
        "waits        12 ms for blocks: needs 7, 3 free",
        "             now for the token budget",
        "blocks       3 of 16 slots each",
        "",
        "logical → physical, slots filled",
        "0 →  12 █ 16/16    1 →  13 ▂  4/16    2 → 140 ░  0/16",
    ]


def test_many_waits_and_a_finish(capsys: pytest.CaptureFixture[str]) -> None:
    waits = [make_wait("budget", until=50.5) for _ in range(20)]
    lines = render(draw_request(make_request(FIRST, [], 0, 40, finish_reason="stop", waits=waits), BLOCK_SIZE), 80)
    assert lines[0].endswith("(stop)")
    assert "waits        12 before these" in lines
    assert sum("500 ms for the token budget" in line for line in lines) == 8
    assert "timings      not scheduled yet" in lines


def test_request_is_found_by_its_id_or_a_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    answers = script(scene()) | {f"/inspect/requests/{FIRST}": [{"step": 1, **one_request()}]}
    with ScriptedServer(answers) as server:
        assert inspect("--url", server.url, "--request", FIRST) == 0
        assert "140 ░  0/16" in capsys.readouterr().out
        assert inspect("--url", server.url, "--request", "chatcmpl-99") == 0
        assert capsys.readouterr().out.startswith(SECOND)
        assert inspect("--url", server.url, "--request", "chatcmpl-") == 1
        assert "the ids of 3 requests begin with 'chatcmpl-'" in capsys.readouterr().err
        assert inspect("--url", server.url, "--request", "a/b?c") == 1
        assert capsys.readouterr().err == "pageframe: there is no /inspect/requests/a%2Fb%3Fc\n"


# ---- one step -------------------------------------------------------------------------------------------------------


def test_answers_of_different_steps_are_asked_for_once_more(capsys: pytest.CaptureFixture[str]) -> None:
    answers = script(scene(), make_answers(100, [], step=1300))
    answers["/inspect/kv"][0] = answers["/inspect/kv"][0] | {"step": 1233}
    with ScriptedServer(answers) as server:
        assert inspect("--url", server.url) == 0
        out = capsys.readouterr().out
        assert len(server.asked) == 6
    assert "step 1,300" in out
    assert "moved on" not in out


def test_answers_that_stay_of_different_steps_are_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    answers = script(scene())
    answers["/inspect/requests"] = [{"step": 1235, "requests": []}]
    with ScriptedServer(answers) as server:
        assert inspect("--url", server.url) == 0
        assert len(server.asked) == 6
    out = " ".join(capsys.readouterr().out.split())
    assert "The server moved on between answers | blocks at step 1,234, requests at 1,235" in out


# ---- JSON, errors, watching -----------------------------------------------------------------------------------------


def test_json_is_what_the_server_says(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(script(scene()) | {"/inspect/requests/x": [{"step": 1, **one_request()}]}) as server:
        assert inspect("--url", server.url, "--json") == 0
        assert json.loads(capsys.readouterr().out) == scene()
        assert inspect("--url", server.url, "--json", "--request", "x") == 0
        assert json.loads(capsys.readouterr().out) == {"step": 1, **one_request()}


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer() as server:
        url = server.url
    assert inspect("--url", url) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"pageframe: no answer from {url}: Connection refused\n"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((503, {"error": {"message": "the model is still loading", "code": None}}), "the model is still loading"),
        ((500, "[b]oops"), "the server answers 500 Internal Server Error"),
        ((200, ["a list"]), "answers with something that is no JSON object"),
        ((200, {"hello": "world"}), 'as Pageframe does: no "step"'),
    ],
)
def test_what_the_server_refuses_is_one_line(
    answer: tuple[int, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer(script(scene()) | {"/inspect/kv": [answer]}) as server:
        assert inspect("--url", server.url) == 1
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "flags", [["--url", "localhost:80"], ["--url", "http://h:99999"], ["--watch", "0"], ["--watch", "nan"]]
)
def test_bad_flags_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        inspect(*flags)
    assert flags[1] in capsys.readouterr().err


def stop_after(frames: int) -> Callable[[float], None]:
    """A sleep that ends as Ctrl-C does, the so-manieth time."""
    left = iter(range(frames))

    def sleep(seconds: float) -> None:
        if next(left) == frames - 1:
            raise KeyboardInterrupt

    return sleep


@pytest.mark.parametrize("is_terminal", [True, False])
def test_watching_draws_each_time_anew_until_ctrl_c(is_terminal: bool) -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=is_terminal, color_system=None)
    pictures = iter(["first", "second", "third", "fourth"])
    watch(console, lambda: next(pictures), 1.0, stop_after(3))
    out = console.file.getvalue()  # type: ignore[attr-defined]
    assert [word for word in ("first", "second", "third", "fourth") if word in out] == ["first", "second", "third"]


def test_watching_ends_where_the_server_does(capsys: pytest.CaptureFixture[str]) -> None:
    gone = (503, {"error": {"message": "the server is shutting down", "code": None}})
    answers = script(scene())
    answers["/inspect/blocks"].append(gone)
    with ScriptedServer(answers) as server:
        assert inspect("--url", server.url, "--watch", "0.001") == 1
    captured = capsys.readouterr()
    assert captured.out.count("step 1,234") == 1
    assert captured.err == "pageframe: the server is shutting down\n"


def test_a_watched_picture_stays_within_the_terminal() -> None:
    requests = [make_request(f"chatcmpl-{index:032x}", [2 * index, 2 * index + 1], 17, 18) for index in range(60)]
    waiting = make_request(THIRD, [], 0, 9, waits=[make_wait("blocks", needed=7, free=3)], num_preemptions=12345678)
    snapshot = to_snapshot(make_answers(400, [waiting, *requests]))
    lines = render(draw_snapshot(snapshot, OwnerColors(), 80, 24), 80)
    assert len(lines) == 24
    shown = sum(line.startswith("█ chatcmpl") for line in lines)
    assert lines[-1] == f"and {60 - shown} more"
    assert len(render(draw_snapshot(snapshot, OwnerColors(), 80), 80)) > 70
