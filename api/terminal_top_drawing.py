"""The screens of `pageframe top`: the list of requests, one request, and help. Knows a View and a terminal's size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from pageframe.api.terminal_drawing import (
    CACHED,
    CACHED_STYLE,
    FILL,
    FREE,
    PINNED,
    SHORT_ID,
    draw_request,
    pack,
    printable,
)
from pageframe.api.terminal_explain import draw_story
from pageframe.api.terminal_http import Json
from pageframe.api.terminal_top_state import WINDOW_SECONDS, Row, View

#: Below so many lines each part of the summary is one line.
TALL = 24
#: From so many columns on ids are shown in full, and below so many only their beginning.
WIDE, NARROW = 180, 60
NARROW_ID = 13
GAP = "  "
MIN_WAIT_WIDTH = 16
STATES = (("used", FILL[8], "green"), ("pinned", PINNED, "bold red"), ("cached", CACHED, CACHED_STYLE))
STATUS_STYLES = {"running": "green", "waiting": "yellow"}
WAITS = {
    "queue": "in the queue",
    "blocks": "for blocks",
    "rows": "for a place in the batch",
    "budget": "for the token budget",
    "group": "for their first choice",
}
LIST_KEYS = (
    ("q", "quit"),
    ("↑↓", "select"),
    ("Enter", "open"),
    ("s", "sort"),
    ("r", "reverse"),
    ("space", "pause"),
    ("h", "help"),
)
PAGE_KEYS = (("Esc", "back"), ("↑↓", "scroll"), ("space", "pause"), ("h", "help"), ("q", "quit"))
HELP = (
    ("q, Ctrl-C", "quit"),
    ("↑ ↓ PgUp PgDn", "select a request, or scroll; Home and End go to the first and the last"),
    ("Enter", "open the selected request: its facts, its blocks, its story"),
    ("Esc", "back to the list"),
    ("s", "sort by the next column; ▾ marks it"),
    ("r", "the other way round"),
    ("space", "pause, and go on"),
    ("h", "this"),
    ("", ""),
    ("pool", f"{FILL[8]} used, {CACHED} cached: free, but what they hold can be found, {PINNED} pinned, {FREE} free"),
    ("slots wasted", "token slots of used blocks that hold nothing"),
    ("saved by sharing", "how many more blocks it would take if no request shared any"),
    ("rates", f"of the last {WINDOW_SECONDS:g} seconds; prefill: tokens of prompts, decode: of answers"),
    ("hits", "part of the looked-up prompt tokens that the prefix cache had: in all, and lately"),
    ("tokens", "of the context: computed/known"),
    ("shared", "blocks of a request that others hold too"),
    ("first", "time from the arrival to the first token"),
    ("tok/s", "of the answer, from its first token on; while a request waits it sinks"),
)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the list. `rank`: the lower, the narrower a terminal may be to show it."""

    name: str
    width: int
    rank: int
    text: Callable[[Row], str]


COLUMNS = (
    Column("tokens", 11, 0, lambda row: f"{row.num_computed:,}/{row.num_known:,}"),
    Column("blocks", 6, 3, lambda row: f"{row.num_blocks:,}"),
    Column("shared", 6, 5, lambda row: f"{row.shared:,}"),
    Column("age", 6, 2, lambda row: _duration(row.age)),
    Column("first", 6, 4, lambda row: "" if row.first_token is None else _duration(row.first_token)),
    Column("tok/s", 6, 1, lambda row: "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.1f}"),
)


class Picture:
    """The whole screen.

    Args:
        url: the server's address.
        view: what is looked at; it learns how many rows fit.
        height: lines to draw where the console does not say.
    """

    def __init__(self, url: str, view: View, height: int | None = None) -> None:
        self._url = url
        self._view = view
        self._height = height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.height or self._height or console.height
        above = self._head(width, height)
        if self._view.screen == "list":
            above += _summary(self._view, width, height)
        keys = [_keys(LIST_KEYS if self._view.screen == "list" else PAGE_KEYS, width)] if self._height is None else []
        room = height - len(above) - len(keys)
        yield from (_cropped(line, width) for line in above)
        if self._view.screen == "list":
            body = [_cropped(line, width) for line in _list(self._view, width, room)]
            yield from body
            yield from [Text()] * (room - len(body) if keys else 0)
        else:
            content = _help() if self._view.screen == "help" else _page(self._view)
            lines = console.render_lines(content, options.update(width=width, height=None), pad=False)
            window = self._view.window(len(lines), room)
            for index in window:
                yield from (Segment(printable(segment.text), segment.style) for segment in lines[index])
                yield Segment.line()
            yield from [Text()] * (room - len(window))
        yield from keys

    def _head(self, width: int, height: int) -> list[Text]:
        """Where, when, how many; and what is wrong."""
        view, kv = self._view, self._view.sample.kv if self._view.sample else None
        title = Text.assemble(("pageframe top", "bold"), GAP, self._url)
        if kv is not None:
            running = sum(row.status == "running" for row in view.rows)
            counts = f"{running:,} running, {len(view.rows) - running:,} waiting"
            facts = [counts, f"step {kv['step']:,}", f"preemptions {kv['preemptions']:,}"]
            # On a narrow terminal what the server does counts more than where it is.
            whole = Text(GAP).join([title, *map(Text, facts)])
            title = whole if whole.cell_len <= width else Text(GAP).join([Text("top", "bold"), *map(Text, facts)])
        if view.is_paused:
            title.append(f"{GAP}PAUSED", "bold yellow")
        return [title, *([Text(view.problem, "bold red")] if view.problem else [])]


def _cropped(line: Text, width: int) -> Text:
    line.plain = printable(line.plain)
    line.truncate(width, overflow="ellipsis")
    line.no_wrap = True
    return line


def _keys(keys: Iterable[tuple[str, str]], width: int) -> Text:
    """As many of the keys as fit; the last line of the screen, so it has no line's end."""
    line = Text(no_wrap=True, end="")
    for key, meaning in keys:
        if line.cell_len + len(key) + len(meaning) + 3 <= width:
            line.append(f" {key} ", "reverse").append(f"{meaning} ", "dim")
    return line


# ---- the summary ----------------------------------------------------------------------------------------------------


def _summary(view: View, width: int, height: int) -> list[Text]:
    """The pool, the rates and the waits."""
    if view.sample is None:
        return []
    parts = [_pool_facts(view.sample.kv, short=height < TALL), _rate_facts(view), _wait_facts(view)]
    lines = [_bar(view.sample.kv, width)]
    for facts in parts:
        if facts:
            text = pack(facts, width, separator=GAP)
            lines += text.split("\n") if height >= TALL else [text.split("\n")[0]]
    return [*lines, Text()] if height >= TALL else lines


def _bar(kv: Json, width: int) -> Text:
    """The pool's blocks by state; a state that has any is seen."""
    total = kv["num_blocks"]
    in_use = (kv["blocks"]["used"] + kv["blocks"]["pinned"]) / total
    share = f" {in_use:4.0%}"
    cells = max(4, width - len("pool ") - len(share))
    bar, left = Text("pool "), cells - (kv["blocks"]["free"] > 0)
    for state, glyph, style in STATES:
        count = min(left, max(round(kv["blocks"][state] / total * cells), kv["blocks"][state] > 0))
        bar.append(glyph * count, style)
        left -= count
    return bar.append(FREE * (cells + len("pool ") - len(bar)), "dim").append(share, "bold")


def _pool_facts(kv: Json, *, short: bool) -> list[Text]:
    blocks, slots = kv["blocks"], kv["slots"]
    in_used = blocks["used"] * kv["block_size"]
    wasted = slots["wasted"] / in_used if in_used else 0.0
    states = [f"{blocks[state]:,} {state}" for state in ("used", "cached", "free", "pinned")]
    if short:
        return [Text(fact) for fact in (*states[:3], f"{wasted:.1%} wasted")]
    host = kv["host_cache"]
    facts = [
        f"{kv['num_blocks']:,} blocks: {', '.join(states)}",
        f"slots wasted: {slots['wasted']:,} ({wasted:.1%})",
        f"saved by sharing: {kv['blocks_saved_by_sharing']:,}",
        *([f"host memory: {host['used']:,} of {host['slots']:,}"] if host["slots"] else []),
    ]
    return list(map(Text, facts))


def _rate_facts(view: View) -> list[Text]:
    assert view.sample is not None
    rates, prefix = view.sample.rates, view.sample.kv["prefix_cache"]
    facts = [f"tokens/s: prefill {rates.prefill:,.0f}, decode {rates.decode:,.0f}"]
    if prefix["lookup_tokens"]:
        hits = f"hits {prefix['hit_tokens'] / prefix['lookup_tokens']:.1%}"
        facts.append(hits if rates.hit_rate is None else f"{hits}, lately {rates.hit_rate:.1%}")
    facts.append(f"steps/s {rates.steps:,.1f}")
    facts += [] if rates.step_ms is None else [f"step {rates.step_ms:,.1f} ms"]
    return list(map(Text, facts))


def _wait_facts(view: View) -> list[Text]:
    """How many wait for what, and what the first of them needs."""
    assert view.sample is not None
    waiting = [row for row in view.sample.rows if row.wait]
    if not waiting:
        return [Text("nobody waits", "dim")]
    counts = Counter(row.reason for row in waiting)
    words = [f"{count:,} {WAITS.get(reason, f'for {reason}')}" for reason, count in counts.most_common()]
    return [
        Text(f"waits: {', '.join(words)}", "yellow"),
        Text(f"the first waits {_short_words(waiting[0].wait)}", "yellow"),
    ]


# ---- the list -------------------------------------------------------------------------------------------------------


def _list(view: View, width: int, room: int) -> Iterator[Text]:
    """The heading and the rows that are to be seen."""
    if room < 1:
        return
    if not view.rows:
        yield Text("no requests" if view.sample else "", "dim")
        return
    rows = [view.rows[index] for index in view.window(len(view.rows), room - 1)]
    names = [_short_id(row.request_id, width) for row in rows]
    name_width = max([len("request") + 1, *map(len, names)])
    columns = _columns(width - name_width - len(GAP + "running"), rows)
    widths = {column.name: max([column.width, *(len(column.text(row)) for row in rows)]) for column in columns}
    yield _heading(view, name_width, columns, widths)
    for row, name in zip(rows, names, strict=True):
        line = Text(f"{name:<{name_width}}{GAP}").append(f"{row.status:<7}", STATUS_STYLES.get(row.status, ""))
        for column in columns:
            line.append(f"{GAP}{column.text(row):>{widths[column.name]}}")
        line.append(GAP).append(_short_words(row.wait), "yellow")
        if row.request_id == view.selected:
            line.truncate(width, overflow="ellipsis", pad=True)
            line.stylize("reverse")
        yield line


def _columns(room: int, rows: Sequence[Row]) -> list[Column]:
    """As many columns as fit, the more important ones first, with some room for what a request waits for."""
    shown: set[str] = set()
    for column in sorted(COLUMNS, key=lambda column: column.rank):
        needed = len(GAP) + max([column.width, *(len(column.text(row)) for row in rows)])
        if room - needed < (MIN_WAIT_WIDTH if column.rank > 1 else 0):
            break
        room -= needed
        shown.add(column.name)
    return [column for column in COLUMNS if column.name in shown]


def _heading(view: View, name_width: int, columns: Sequence[Column], widths: dict[str, int]) -> Text:
    mark = "▴" if view.is_reversed else "▾"

    def named(name: str) -> str:
        return name + mark if name == view.sort else name

    cells = [f"{named('request'):<{name_width}}", f"{'state':<7}"]
    cells += [f"{named(column.name):>{widths[column.name]}}" for column in columns]
    line = Text(GAP.join([*cells, "waits"]), "bold")
    if view.sort not in ("request", *(column.name for column in columns)):
        line.append(f" (sorted by {named(view.sort)})")
    return line


def _short_id(request_id: str, width: int) -> str:
    """Enough of an id to find it by. The number of a choice stays."""
    length = SHORT_ID if width >= NARROW else NARROW_ID
    if width >= WIDE or len(request_id) <= length + 1:
        return request_id
    _, dash, number = request_id.rpartition("-")
    choice = dash + number if number.isdigit() and len(number) <= 3 else ""
    return request_id[:length] + "…" + choice


def _short_words(words: str) -> str:
    """A wait with the ids in it shortened."""
    return " ".join(_short_id(word, NARROW) for word in words.split(" "))


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest:02}s" if minutes < 60 else f"{minutes // 60:,}h{minutes % 60:02}m"


# ---- the other screens ----------------------------------------------------------------------------------------------


def _page(view: View) -> RenderableType:
    """The request that is open: facts, story, block table."""
    page, sample = view.page, view.sample
    if page is None or sample is None:
        return Text(f"{view.opened}: asking the server", "dim")
    parts: list[RenderableType] = []
    if page["request"] is None:
        parts.append(Text(f"{view.opened}: it has ended, and the server knows no more than this", "yellow"))
    else:
        parts.append(draw_request(page["request"], sample.kv["block_size"]))
    if page["story"] is not None:
        parts += [Text(), draw_story(page["story"])]
    return Group(*parts)


def _help() -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, meaning in HELP:
        table.add_row(name, meaning)
    return table
