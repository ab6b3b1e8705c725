"""`pageframe top`: what it makes of a server's answers, its screens at any size, and the command in a real terminal."""

from __future__ import annotations

import argparse
import dataclasses
import io
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console
from rich.screen import Screen
from rich.text import Text

from pageframe.api.terminal_keys import key_names
from pageframe.api.terminal_top import add_arguments, run
from pageframe.api.terminal_top_drawing import HELP, Picture
from pageframe.api.terminal_top_state import SORTS, WINDOW_SECONDS, Feed, Rates, Row, Sample, View, make_rows

from .pool_scenes import FIRST, SECOND, THIRD, make_answers, make_request, make_wait, one_request, script
from .scripted_server import Json, ScriptedServer

NOW = 60.0


def make_timings(first_token: float | None) -> Json:
    return {"arrived": 50.0, "first_scheduled": 50.0, "first_token": first_token, "finished": None}


def served_requests() -> list[Json]:
    blocks = {
        "waits": [make_wait("blocks", needed=7, free=3)],
        "wait": f"for blocks: it needs 7, 3 are free, behind {FIRST}",
    }
    return [
        make_request(FIRST, [12, 13, 14, 15, 40, -1, 41], 89, 90, wait=None, timings=make_timings(51.0)),
        make_request(SECOND, [12, 13], 20, 32, wait=None, timings=make_timings(None)),
        make_request(THIRD, [], 0, 100, **blocks),
    ]


def make_step(step: int, started: float, **numbers: Any) -> Json:
    return {
        "step": step,
        "started": started,
        "time_ms": 20.0,
        "prefill_tokens": 100,
        "decode_tokens": 10,
        "lookup_tokens": 0,
        "hit_tokens": 0,
        **numbers,
    }


def answers(requests: list[Json] | None = None, **totals: Any) -> dict[str, list[Any]]:
    found = script(make_answers(100, served_requests() if requests is None else requests, **totals))
    found["/inspect/requests"][0]["now"] = NOW
    steps = [
        make_step(1199, NOW - 70),
        make_step(1200, NOW - 60, lookup_tokens=900, hit_tokens=10),
        make_step(1233, NOW - 4, lookup_tokens=1000, hit_tokens=10),
        make_step(1234, NOW - 1, time_ms=40.0, lookup_tokens=1200, hit_tokens=160),
    ]
    return found | {"/inspect/steps?since=234": [{"steps": steps}], "/inspect/steps?since=1235": [{"steps": []}]}


@pytest.fixture
def sample() -> Sample:
    with ScriptedServer(answers()) as server:
        return Feed(server.url).sample()


def screen(view: View, width: int, height: int, url: str = "http://h") -> list[str]:
    """What stands on a terminal of this size, all lines in full."""
    file = io.StringIO()
    console = Console(
        width=width, height=height, file=file, highlight=False, markup=False, emoji=False, color_system=None
    )
    console.print(Screen(Picture(url, view)), end="")
    lines = file.getvalue().split("\n")
    assert len(lines) == height
    assert all(Text(line).cell_len == width for line in lines)
    return [line.rstrip() for line in lines]


def viewing(sample: Sample, *keys: str) -> View:
    view = View()
    view.take(sample)
    for key in keys:
        assert view.press(key)
    return view


# ---- what the server says -------------------------------------------------------------------------------------------


def test_rates_are_of_the_last_seconds(sample: Sample) -> None:
    assert sample.rates.prefill == 200 / WINDOW_SECONDS
    assert sample.rates.decode == 20 / WINDOW_SECONDS
    assert sample.rates.steps == 2 / WINDOW_SECONDS
    assert sample.rates.step_ms == 30.0
    assert sample.rates.hit_rate == 150 / 300  # from the last step before them on


def test_rows_say_what_each_request_has_and_waits_for(sample: Sample) -> None:
    first, second, third = sample.rows
    assert (first.num_computed, first.num_known, first.num_blocks, first.shared) == (89, 90, 6, 2)
    assert (first.age, first.first_token) == (10.0, 1.0)
    assert first.tokens_per_second == 1.0  # 9 more tokens in 9 seconds
    assert (second.num_blocks, second.shared, second.first_token, second.tokens_per_second) == (2, 2, None, None)
    assert (third.status, third.reason, third.wait[:22]) == ("waiting", "blocks", "for blocks: it needs 7")


def test_only_new_steps_are_asked_for_until_the_server_is_another() -> None:
    again = answers()
    again["/inspect/kv"].append(again["/inspect/kv"][0] | {"step": 5})
    again["/inspect/steps?since=0"] = [{"steps": [make_step(5, NOW - 2, prefill_tokens=5)]}]
    again["/inspect/kv"].insert(1, again["/inspect/kv"][0])
    with ScriptedServer(again) as server:
        feed = Feed(server.url)
        first, second, third = feed.sample(), feed.sample(), feed.sample()
        assert [path for path in server.asked if "steps" in path] == [
            "/inspect/steps?since=234",
            "/inspect/steps?since=1235",
            "/inspect/steps?since=0",
        ]
    assert first.rates == second.rates
    assert third.rates.prefill == 5 / WINDOW_SECONDS


# ---- the screens ----------------------------------------------------------------------------------------------------


def test_the_list_at_120_columns(sample: Sample) -> None:
    lines = screen(viewing(sample), 120, 30)
    assert lines[0] == "pageframe top  http://h  2 running, 1 waiting  step 1,234  preemptions 3"
    assert lines[1].startswith("pool ███████···")
    assert lines[1].endswith("·   6%")
    assert lines[2] == (
        "100 blocks: 6 used, 0 cached, 94 free, 0 pinned  slots wasted: 28 (29.2%)  saved by sharing: 2"
    )
    assert lines[3] == "tokens/s: prefill 40, decode 4  steps/s 0.4  step 30.0 ms"
    assert (
        lines[4] == "waits: 1 for blocks  the first waits for blocks: it needs 7, 3 are free, behind chatcmpl-0a1b2c3d…"
    )
    assert lines[6:10] == [
        "request▾            state         tokens  blocks  shared     age   first   tok/s  waits",
        "chatcmpl-0a1b2c3d…  running        89/90       6       2   10.0s    1.0s     1.0",
        "chatcmpl-99887766…  running        20/32       2       2   10.0s",
        "chatcmpl-12345678…  waiting        0/100       0       0   10.0s"
        + " " * 18
        + "for blocks: it needs 7, 3 are free, b…",
    ]
    assert lines[-1].startswith(" q quit  ↑↓ select  Enter open")


def test_a_tiny_terminal_shows_what_matters_most(sample: Sample) -> None:
    lines = screen(viewing(sample), 40, 10)
    assert lines[0].startswith("top  2 running, 1 waiting")
    assert lines[3] == "tokens/s: prefill 40, decode 4"
    assert lines[5:9] == [
        "request▾        state         tokens  w…",
        "chatcmpl-0a1b…  running        89/90",
        "chatcmpl-9988…  running        20/32",
        "chatcmpl-1234…  waiting        0/100  f…",
    ]
    assert lines[-1].startswith(" q quit")


@pytest.mark.parametrize("key", ["", "h", "enter"])
def test_every_screen_fits_every_terminal(sample: Sample, key: str) -> None:
    view = viewing(sample, *[key] if key else [])
    view.page = {"request": {"step": 1, **one_request()}, "story": None} if key == "enter" else None
    for problem in ("", "no answer; trying again"):
        view.problem = problem
        for width in (20, 40, 61, 80, 119, 200):
            for height in (3, 6, 10, 17, 24, 40):
                lines = screen(view, width, height)
                assert not problem or lines[1].startswith(problem[:10])
                assert height < 10 or lines[-1].startswith((" q quit", " Esc back"))


def test_thousands_of_requests_are_drawn_as_far_as_they_are_seen() -> None:
    requests = [make_request(f"r-{number:05}", [number], 5, 6, wait=None) for number in range(5000)]
    view = viewing(Sample(make_answers(5000, requests)["kv"], Rates(), make_rows(requests, NOW)))
    looked_at: set[int] = set()

    class Watched(list[Row]):
        def __getitem__(self, index: Any) -> Any:
            looked_at.add(index)
            return super().__getitem__(index)

    view.rows = Watched(view.rows)
    lines = screen(view, 100, 30)
    assert "5,000 running" in lines[0]
    assert len(looked_at) == sum(line.startswith("r-") for line in lines) < 30
    view.press("end")
    assert any(line.startswith("r-04999") for line in screen(view, 100, 30))


def test_nothing_is_read_as_markup_or_moves_the_cursor() -> None:
    evil = "[red]x[/]\x1b[2J:smile:"
    request = make_request(evil, [1], 5, 6, wait=f"for {evil}", tenant=evil, waits=[make_wait(evil)])
    shown = "[red]x[/]�[2J:smile:"
    view = viewing(Sample(make_answers(10, [request])["kv"], Rates(), make_rows([request], NOW)))
    view.problem = evil
    text = "\n".join(screen(view, 200, 30, url=f"http://{evil}"))
    assert text.count(shown) == 4
    assert "\x1b" not in text
    view.press("enter")
    assert shown in "\n".join(screen(view, 200, 30))
    story = {"id": evil, "complete": True, "sentences": [{"step": 1, "time": 0, "kind": "arrive", "text": evil}]}
    view.page = {"request": {"step": 1, **request}, "story": story}
    text = "\n".join(screen(view, 200, 30))
    assert text.count("[red]x[/]") >= 4
    assert "\x1b" not in text


def test_a_request_that_has_ended_keeps_its_story(sample: Sample) -> None:
    view = viewing(sample, "down", "enter")
    assert view.opened == SECOND
    assert "asking the server" in "\n".join(screen(view, 100, 30))
    view.page = {"request": None, "story": {"id": SECOND, "complete": False, "sentences": []}}
    text = "\n".join(screen(view, 100, 30))
    assert "it has ended" in text
    assert "It began earlier" in text
    view.page = {"request": {"step": 1, **one_request()}, "story": None}
    assert "logical → physical, slots filled" in "\n".join(screen(view, 100, 30))


def test_help_tells_of_every_key(sample: Sample) -> None:
    text = "\n".join(screen(viewing(sample, "h"), 120, 40))
    assert all(name in text for name, _ in HELP)


# ---- keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"q", ["q"]),
        (b"\r", ["enter"]),
        (b"\x1b", ["escape"]),
        (b"\x1b[A\x1b[B\x1bOA", ["up", "down", "up"]),
        (b"\x1b[5~\x1b[6~\x1b[H\x1b[4~", ["page up", "page down", "home", "end"]),
        (b"\x1b[1;5Cs", ["s"]),
        (b"\x1b[200~", []),
        (b"\xc3\xa4r", ["Ã", "¤", "r"]),
        (b"\x00\x04s r", ["s", " ", "r"]),
        (b"\x1b[", []),
    ],
)
def test_bytes_become_keys(data: bytes, keys: list[str]) -> None:
    assert key_names(data) == keys


def test_the_selection_stays_on_its_request(sample: Sample) -> None:
    view = viewing(sample, "down")
    assert view.selected == SECOND
    first, second, third = sample.rows
    behind = dataclasses.replace(second, place=9)
    view.take(Sample(sample.kv, sample.rates, [first, third, behind]))
    assert (view.selected, view.place) == (SECOND, 2)
    view.take(Sample(sample.kv, sample.rates, [first, third]))
    assert view.selected == THIRD
    view.take(Sample(sample.kv, sample.rates, []))
    assert view.selected == ""
    assert view.press("enter")
    assert view.screen == "list"


def test_sorting_goes_through_all_columns_and_both_ways(sample: Sample) -> None:
    view = viewing(sample)
    orders = {}
    for name in SORTS:
        assert view.sort == name
        orders[name] = [row.request_id for row in view.rows]
        assert f"{name}▾" in "\n".join(screen(view, 120, 30))
        view.press("s")
    assert view.sort == "request"
    assert orders["request"] == [FIRST, SECOND, THIRD]
    assert orders["tokens"] == [THIRD, FIRST, SECOND]
    assert orders["blocks"] == orders["tok/s"] == [FIRST, SECOND, THIRD]
    view.press("r")
    assert [row.request_id for row in view.rows] == [THIRD, SECOND, FIRST]
    assert "request▴" in "\n".join(screen(view, 120, 30))


def test_pages_scroll_no_further_than_their_end(sample: Sample) -> None:
    view = viewing(sample, "h")
    top = screen(view, 80, 10)
    view.press("down")
    assert screen(view, 80, 10)[1] == top[2]
    view.press("end")
    assert screen(view, 80, 10)[-2].split()[-1] == HELP[-1][1].split()[-1]
    view.press("page up")
    view.press("home")
    assert screen(view, 80, 10) == top
    view.press("escape")
    assert view.screen == "list"
    assert not view.press("q")


# ---- without a terminal ---------------------------------------------------------------------------------------------


@pytest.fixture
def served() -> Iterator[ScriptedServer]:
    with ScriptedServer(answers()) as server:
        yield server


def top(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(argv))


def test_elsewhere_it_is_one_picture(
    served: ScriptedServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert top("--url", served.url) == 0
    captured = capsys.readouterr()
    assert "tokens/s: prefill 40, decode 4" in captured.out
    assert "chatcmpl-12345678…  waiting" in captured.out
    assert "quit" not in captured.out
    assert "\x1b" not in captured.out
    assert captured.err.count("\n") == 1
    assert "one picture" in captured.err


def test_no_server_and_no_terminal_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer() as server:
        url = server.url
    assert top("--url", url) == 1
    assert capsys.readouterr().err == f"pageframe: no answer from {url}: Connection refused\n"
