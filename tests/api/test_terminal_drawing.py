"""What `pageframe inspect` draws: the map of the pool, block tables, waits, one request."""

from __future__ import annotations

import pytest
from rich.text import Text

from pageframe.api.terminal_drawing import (
    CACHED,
    FILL,
    FREE,
    MAX_MAP_LINES,
    PINNED,
    SHARED,
    OwnerColors,
    block_runs,
    draw_pool,
    draw_request,
    draw_snapshot,
    wait_words,
)

from .pool_scenes import (
    BLOCK_SIZE,
    FIRST,
    SECOND,
    THIRD,
    make_answers,
    make_block,
    make_request,
    make_wait,
    one_request,
    render,
    to_snapshot,
)
from .scripted_server import Json

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


def test_one_request_in_full() -> None:
    assert render(draw_request(one_request(), BLOCK_SIZE), 80) == [
        f"{FIRST}  running",
        "tokens       20 of 40 computed: 30 of the prompt, 10 of the answer; at most 90",
        "cached       16 tokens of the prompt were in the prefix cache",
        "lookup       16 tokens found when it last entered: the next block was evicted in",
        "             step 1,200",
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


def test_a_choice_that_waits_for_the_first_one() -> None:
    request = make_request(SECOND, [], 0, 40, leader=FIRST, waits=[make_wait("group")])
    lines = render(draw_request(request, BLOCK_SIZE), 80)
    assert f"choice       {FIRST} computes the prompt" in lines
    assert any(line.endswith("now for the first choice, which computes the prompt") for line in lines)


@pytest.mark.parametrize("reason", ["partial block", "differs", "evicted", "salt", "logprobs", "recompute", "off"])
def test_every_end_of_a_lookup_has_words(reason: str) -> None:
    prefix = {"hit_tokens": 32, "reason": reason, "evicted_step": None}
    lines = render(draw_request(make_request(FIRST, [1, 2, 3], 40, 42, prefix=prefix), BLOCK_SIZE), 200)
    [line] = [line for line in lines if line.startswith("lookup")]
    assert line.startswith("lookup       32 tokens found when it last entered: ")
    assert not line.endswith(f": {reason}")


def test_blocks_behind_a_window_and_a_context_that_slid() -> None:
    request = make_request(FIRST, [-1, -1, 5, 6], 60, 102, context_start=40)
    lines = render(draw_request(request, BLOCK_SIZE), 80)
    assert "tokens       60 of 62 computed: 92 of the prompt, 10 of the answer; at most 152" in lines
    assert "context      begins at token 40" in lines
    assert "blocks       2 of 16 slots each" in lines
    assert lines[-1].split() == ["0", "→", "-", "1", "→", "-", "2", "→", "5", "█", "16/16", "3", "→", "6", "▆", "12/16"]
    picture = render(draw_snapshot(to_snapshot(make_answers(8, [request])), OwnerColors(), 200), 200)
    assert picture[-1].split("  ")[-1] == "5 6 | behind the window: 2"
    assert "60/62" in picture[-1]


def test_many_waits_and_a_finish(capsys: pytest.CaptureFixture[str]) -> None:
    waits = [make_wait("budget", until=50.5) for _ in range(20)]
    lines = render(draw_request(make_request(FIRST, [], 0, 40, finish_reason="stop", waits=waits), BLOCK_SIZE), 80)
    assert lines[0].endswith("(stop)")
    assert "waits        12 before these" in lines
    assert sum("500 ms for the token budget" in line for line in lines) == 8
    assert "timings      not scheduled yet" in lines


def test_a_watched_picture_stays_within_the_terminal() -> None:
    requests = [make_request(f"chatcmpl-{index:032x}", [2 * index, 2 * index + 1], 17, 18) for index in range(60)]
    waiting = make_request(THIRD, [], 0, 9, waits=[make_wait("blocks", needed=7, free=3)], num_preemptions=12345678)
    snapshot = to_snapshot(make_answers(400, [waiting, *requests]))
    lines = render(draw_snapshot(snapshot, OwnerColors(), 80, 24), 80)
    assert len(lines) == 24
    shown = sum(line.startswith("█ chatcmpl") for line in lines)
    assert lines[-1] == f"and {60 - shown} more"
    assert len(render(draw_snapshot(snapshot, OwnerColors(), 80), 80)) > 70
