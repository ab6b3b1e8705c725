"""`pageframe inspect` against a scripted server: what it draws, character for character."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from pageframe.api.terminal_drawing import (
    CACHED,
    CACHED_STYLE,
    FREE,
    NO_OWNER,
    PALETTE,
    OwnerColors,
    draw_pool,
    draw_snapshot,
)
from pageframe.api.terminal_inspect import add_arguments, run, watch

from .pool_scenes import (
    FIRST,
    SECOND,
    THIRD,
    make_answers,
    make_request,
    one_request,
    render,
    scene,
    script,
    to_snapshot,
)
from .scripted_server import ScriptedServer


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
        "saved by sharing: 0 | slots: 109 written, 19 wasted (14.8%)",
        "prefix cache: 0 of 0 tokens found | 35.2 MiB, 360.0 KiB a block",
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
        "step 1,234 | 100 blocks: 92 free, 0 cached, 8 used, 0 pinned | saved by sharing: 0 | "
        "slots: 109 written, 19 wasted (14.8%) | prefix cache: 0 of 0 tokens found | 35.2 MiB, 360.0 KiB a block"
    )
    assert lines[1] == "requests: 2 running, 1 waiting | preemptions: 3"
    assert lines[3] == "  0 █▂··········████························█▄" + "·" * 58
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


def test_shared_and_cached_blocks_and_what_they_save() -> None:
    first, second = make_request(FIRST, [3, 4, 5], 40, 41), make_request(SECOND, [3, 4, 6], 36, 37)
    answers = make_answers(
        16,
        [first, second],
        cached=[8, 9, 12],
        prefix_cache={"lookup_tokens": 1500, "hit_tokens": 1056, "blocks": 5},
        host_cache={"slots": 20, "used": 2},
    )
    lines = render(draw_snapshot(to_snapshot(answers), OwnerColors(), 80), 80)
    assert " 0 ···▓▓▄▂·∘∘··∘···" in lines
    totals = " | ".join(lines[: lines.index("")]).split(" | ")
    assert totals[1:6] == [
        "16 blocks: 9 free, 3 cached, 4 used, 0 pinned",
        "saved by sharing: 2",
        "slots: 44 written, 20 wasted (31.2%)",
        "prefix cache: 1,056 of 1,500 tokens found",
        "host memory: 2 of 20 blocks",
    ]
    assert "∘ cached" in "\n".join(lines)
    assert "▓ shared" in "\n".join(lines)


def test_a_cached_block_has_no_requests_colour() -> None:
    assert CACHED_STYLE not in (*PALETTE, NO_OWNER)
    pool = draw_pool(make_answers(16, [], cached=[4])["blocks"]["blocks"], 16, OwnerColors(), 80)
    assert next(span.style for span in pool.spans if pool.plain[span.start] == CACHED) == CACHED_STYLE


def test_an_idle_server() -> None:
    lines = render(draw_snapshot(to_snapshot(make_answers(20, [])), OwnerColors(), 80), 80)
    assert " 0 " + FREE * 20 in lines
    assert lines[-1] == "no requests"
    assert "0 wasted (0.0%)" in "\n".join(lines)


def test_request_is_found_by_its_id_or_a_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    second = scene()["requests"]["requests"][1]
    answers = script(scene()) | {
        f"/inspect/requests/{FIRST}": [{"step": 1, **one_request()}],
        f"/inspect/requests/{SECOND}": [{"step": 1, **second}],
    }
    with ScriptedServer(answers) as server:
        assert inspect("--url", server.url, "--request", FIRST) == 0
        assert "140 ░  0/16" in capsys.readouterr().out
        assert inspect("--url", server.url, "--request", "chatcmpl-99") == 0
        assert capsys.readouterr().out.startswith(SECOND)
        assert inspect("--url", server.url, "--request", "chatcmpl-") == 1
        assert "the ids of 3 requests begin with 'chatcmpl-'" in capsys.readouterr().err
        assert inspect("--url", server.url, "--request", "a/b?c") == 1
        assert capsys.readouterr().err == "pageframe: there is no /inspect/requests/a%2Fb%3Fc\n"


def test_a_tenants_name_is_not_read_as_markup(capsys: pytest.CaptureFixture[str]) -> None:
    request = {"step": 1, **one_request(), "tenant": "[red]ann[/red]:smile:"}
    with ScriptedServer(script(scene()) | {"/inspect/requests/x": [request]}) as server:
        assert inspect("--url", server.url, "--request", "x") == 0
    assert 'tenant "[red]ann[/red]:smile:"' in capsys.readouterr().out


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
