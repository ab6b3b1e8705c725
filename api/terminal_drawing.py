"""The pool and the block tables as pictures of characters, each state a character of its own, colours on top.

Knows the answers of /inspect, as JSON, and the width of a terminal; it asks no server and prints nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pageframe.api.terminal_http import Json
from pageframe.runtime.memory_plan import format_bytes

MAX_MAP_LINES = 16
#: Request ids are shown in full from this many columns on, else only as far as they differ.
WIDE = 120
SHORT_ID = 17
#: How full a used block is, in eighths. The first: nothing is written yet.
FILL = "░▁▂▃▄▅▆▇█"
SHARED, PINNED, CACHED, FREE = "▓", "◆", "∘", "·"
PALETTE = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green", "bright_magenta")
NO_OWNER = "white"
#: Of no request: what a cached block holds was computed for one that has gone.
CACHED_STYLE = "bright_blue"
MAX_WAITS = 8
#: Why a prefix lookup went no further, by the reason that /inspect gives.
LOOKUP_ENDS = {
    "partial block": "as much as there can be",
    "differs": "no computed prefix goes on as it does",
    "evicted": "the next block was evicted",
    "salt": "only requests that it shares nothing with have it",
    "logprobs": "it wants logprobs of its prompt",
    "recompute": "computing again is faster than copying from host memory",
    "off": "there is no prefix cache",
}
#: In a block table: given back.
NO_BLOCK = -1
_SEPARATOR = " | "


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The three answers that make a picture.

    Args:
        steps: the step that each is of: totals, blocks, requests.
    """

    kv: Json
    blocks: list[Json]
    requests: list[Json]
    steps: tuple[int, int, int]

    @property
    def of_one_step(self) -> bool:
        return len(set(self.steps)) == 1


def printable(text: str) -> str:
    """Text of which no character moves the cursor or means anything else to a terminal."""
    return (
        text
        if text.isprintable()
        else "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    )


class OwnerColors:
    """A colour for each request, the same from one drawing to the next as long as it holds blocks."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def keep_only(self, owners: Sequence[str]) -> None:
        """Forget all but these; each new one gets the first number that is free."""
        kept = {owner: self._numbers[owner] for owner in owners if owner in self._numbers}
        taken = set(kept.values())
        free = (number for number in range(2 * len(owners)) if number not in taken)
        self._numbers = {owner: kept[owner] if owner in kept else next(free) for owner in owners}

    def __getitem__(self, owner: str) -> str:
        return PALETTE[self._numbers[owner] % len(PALETTE)] if owner in self._numbers else NO_OWNER


def draw_snapshot(snapshot: Snapshot, colors: OwnerColors, width: int, height: int | None = None) -> RenderableType:
    """Totals, the pool as a map, and the requests with their block tables.

    Args:
        width: columns to draw in.
        height: lines to stay within by leaving requests out; None shows all of them.
    """
    colors.keep_only([request["id"] for request in snapshot.requests if request["block_table"]])
    above = [
        _draw_totals(snapshot.kv, width),
        Text(),
        draw_pool(snapshot.blocks, snapshot.kv["block_size"], colors, width),
        Text(),
    ]
    if not snapshot.of_one_step:
        _, blocks_step, requests_step = snapshot.steps
        facts = [
            "The server moved on between answers",
            f"blocks at step {blocks_step:,}, requests at {requests_step:,}",
        ]
        above.append(pack([Text(fact, "yellow") for fact in facts], width))
    if not snapshot.requests:
        return Group(*above, Text("no requests", "dim"))
    room = None if height is None else height - sum(text.plain.count("\n") + 1 for text in above)
    return Group(*above, _draw_requests(snapshot.requests, colors, width, room))


def pack(pieces: Sequence[Text], width: int, separator: str = _SEPARATOR) -> Text:
    """Pieces in a row, with line ends only between them."""
    row, column = Text(), 0
    for piece in pieces:
        if column and column + len(separator) + len(piece) > width:
            row.append("\n")
            column = 0
        if column:
            row.append(separator, "dim")
            column += len(separator)
        row.append_text(piece)
        column += len(piece)
    return row


def _draw_totals(kv: Json, width: int) -> Text:
    blocks, slots = kv["blocks"], kv["slots"]
    in_used = blocks["used"] * kv["block_size"]
    wasted = slots["wasted"] / in_used if in_used else 0.0
    states = ", ".join(f"{blocks[state]:,} {state}" for state in ("free", "cached", "used", "pinned"))
    prefix, host = kv["prefix_cache"], kv["host_cache"]
    facts = [
        f"step {kv['step']:,}",
        f"{kv['num_blocks']:,} blocks: {states}",
        f"saved by sharing: {kv['blocks_saved_by_sharing']:,}",
        f"slots: {slots['written']:,} written, {slots['wasted']:,} wasted ({wasted:.1%})",
        f"prefix cache: {prefix['hit_tokens']:,} of {prefix['lookup_tokens']:,} tokens found",
        *([f"host memory: {host['used']:,} of {host['slots']:,} blocks"] if host["slots"] else []),
        f"{format_bytes(kv['bytes']['pool'])}, {format_bytes(kv['bytes']['per_block'])} a block",
        f"requests: {kv['requests']['running']:,} running, {kv['requests']['waiting']:,} waiting",
        f"preemptions: {kv['preemptions']:,}",
    ]
    return pack([Text(fact) for fact in facts], width)


def draw_pool(blocks: Sequence[Json], block_size: int, colors: OwnerColors, width: int) -> Text:
    """The pool as a map in the order of block ids: a cell for each block, or for 2, 4, 8, ... in large pools."""
    label_width = len(f"{len(blocks):,}")
    cells_per_line = max(16, (width - label_width - 1) // 16 * 16)
    per_cell = 1
    while len(blocks) > MAX_MAP_LINES * cells_per_line * per_cell:
        per_cell *= 2
    per_line = cells_per_line * per_cell
    pool = Text()
    for start in range(0, len(blocks), per_line):
        pool.append(f"{start:>{label_width},} ", "dim")
        for first in range(start, min(start + per_line, len(blocks)), per_cell):
            pool.append(*_cell(blocks[first : first + per_cell], block_size, colors))
        pool.append("\n")
    return pool.append_text(_draw_legend(per_cell, width))


def _cell(blocks: Sequence[Json], block_size: int, colors: OwnerColors) -> tuple[str, str]:
    """A cell's character and style: its used blocks decide, if it has any, and the request that owns most of them."""
    used = [block for block in blocks if block["state"] == "used"]
    if used:
        if all(block["ref_count"] > 1 for block in used):
            return SHARED, "bold white"
        owners = Counter(block["owners"][0] for block in used if block["owners"])
        style = colors[owners.most_common(1)[0][0]] if owners else NO_OWNER
        filled = sum(block["filled"] for block in used)
        return _fill(filled, len(blocks) * block_size), style
    states = {block["state"] for block in blocks}
    if "pinned" in states:
        return PINNED, "bold red"
    return (CACHED, CACHED_STYLE) if "cached" in states else (FREE, "dim")


def _fill(filled: int, slots: int) -> str:
    """Only a full block looks full, only an unwritten one unwritten."""
    return FILL[max(1, filled * 8 // slots)] if filled else FILL[0]


def _draw_legend(per_cell: int, width: int) -> Text:
    scale = "a cell: 1 block" if per_cell == 1 else f"a cell: {per_cell:,} blocks"
    meanings = [
        (FILL[8], "full"),
        (FILL[0], "unwritten"),
        (SHARED, "shared"),
        (CACHED, "cached"),
        (PINNED, "pinned"),
        (FREE, "free"),
    ]
    pieces = [scale, *(f"{glyph} {meaning}" for glyph, meaning in meanings)]
    return pack([Text(piece, "dim") for piece in pieces], width, separator="  ")


def _draw_requests(requests: Sequence[Json], colors: OwnerColors, width: int, room: int | None) -> RenderableType:
    """A table of requests in the order of service.

    Args:
        room: lines to stay within, one for each request; None shows all, with up to two lines each.
    """
    shown = requests
    if room is not None and len(requests) + 1 > room:
        shown = requests[: max(1, room - 2)]
    ids = _short_ids([request["id"] for request in shown], width)
    tokens = [f"{request['num_computed_tokens']:,}/{_context_length(request):,}" for request in shown]
    name_width = 2 + max(map(len, ids))
    tokens_width = max(map(len, [*tokens, "computed"]))
    place_width = max(20, width - name_width - tokens_width - len("running") - 3 * 2)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("request", no_wrap=True, min_width=name_width)
    table.add_column("state", no_wrap=True, min_width=len("running"))
    table.add_column("computed", justify="right", no_wrap=True, min_width=tokens_width)
    table.add_column("physical blocks in logical order", no_wrap=room is not None, overflow="ellipsis")
    for request, name, count in zip(shown, ids, tokens, strict=True):
        swatch = (FILL[8] + " ", colors[request["id"]]) if request["block_table"] else "  "
        where = _draw_place(request, place_width * (2 if room is None else 1))
        table.add_row(Text.assemble(swatch, name), _status(request), count, where)
    if len(shown) == len(requests):
        return table
    return Group(table, Text(f"and {len(requests) - len(shown):,} more", "dim"))


def _context_length(request: Json) -> int:
    """Known tokens that have not slid out of the context."""
    length: int = request["num_tokens"] - request["context_start"]
    return length


def _short_ids(ids: Sequence[str], width: int) -> list[str]:
    """Ids in full where there is room, else as much of each as tells them apart."""
    length = SHORT_ID
    while len({request_id[:length] for request_id in ids}) < len(ids):
        length += 1
    return [
        request_id if width >= WIDE or len(request_id) <= length + 1 else request_id[:length] + "…"
        for request_id in ids
    ]


def _status(request: Json) -> Text:
    styles = {"running": "green", "waiting": "yellow"}
    return Text(request["status"], styles.get(request["status"], ""))


def _draw_place(request: Json, limit: int) -> Text:
    """A request's block table, and what it waits for."""
    waits = [wait for wait in request["waits"] if wait["until"] is None]
    facts = [Text("waits " + wait_words(wait), "yellow") for wait in waits]
    if request["num_preemptions"]:
        facts.append(Text(f"preemptions: {request['num_preemptions']:,}", "dim"))
    held = [block_id for block_id in request["block_table"] if block_id != NO_BLOCK]
    if len(held) < len(request["block_table"]):
        facts.append(Text(f"behind the window: {len(request['block_table']) - len(held):,}", "dim"))
    facts_length = sum(len(fact) + len(_SEPARATOR) for fact in facts)
    if held:
        facts.insert(0, Text(_shorten(held, limit - facts_length)))
    return Text().join([part for fact in facts for part in (Text(_SEPARATOR, "dim"), fact)][1:])


def wait_words(wait: Json) -> str:
    """What one wait is for, to be read after "waits"."""
    if wait["reason"] == "blocks":
        return f"for blocks: needs {wait['needed']:,}, {wait['free']:,} free"
    words = {
        "queue": "in the queue, behind others",
        "rows": "for a row: max_num_requests are running",
        "budget": "for the token budget",
        "group": "for the first choice, which computes the prompt",
    }
    return words.get(wait["reason"], f"for {wait['reason']}")


def block_runs(block_ids: Sequence[int]) -> list[range]:
    """Block ids as runs of three or more neighbours, and singles: 12 13 14 15 40 41 -> 12-15, 40, 41."""
    runs: list[range] = []
    for block_id in block_ids:
        if runs and block_id == runs[-1].stop:
            runs[-1] = range(runs[-1].start, block_id + 1)
        else:
            runs.append(range(block_id, block_id + 1))
    return [part for run in runs for part in ([run] if len(run) > 2 else [range(block, block + 1) for block in run])]


def _run_words(runs: Sequence[range]) -> str:
    return " ".join(str(run.start) if len(run) == 1 else f"{run.start}-{run.stop - 1}" for run in runs)


def _shorten(block_ids: Sequence[int], limit: int) -> str:
    """The block table as runs, its end left out and counted where it is longer than `limit` characters."""
    runs = block_runs(block_ids)
    words, shown = _run_words(runs), len(runs)
    while len(words) > limit and shown > 1:
        shown -= 1
        words = f"{_run_words(runs[:shown])} … {sum(map(len, runs[shown:])):,} more"
    return words


def draw_request(request: Json, block_size: int) -> RenderableType:
    """One request in full."""
    output, prompt = request["num_output_tokens"], request["num_prompt_tokens"]
    computed = request["num_computed_tokens"]
    block_ids = request["block_table"]
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="cyan", no_wrap=True)
    facts.add_column()
    facts.add_row(
        "tokens",
        f"{computed:,} of {_context_length(request):,} computed: {prompt:,} of the prompt, {output:,} of the answer; "
        f"at most {request['max_total_tokens']:,}",
    )
    if request["context_start"]:
        facts.add_row("context", f"begins at token {request['context_start']:,}")
    if request["leader"]:
        facts.add_row("choice", f"{request['leader']} computes the prompt")
    facts.add_row("cached", f"{request['num_cached_tokens']:,} tokens of the prompt were in the prefix cache")
    if request["prefix"]:
        facts.add_row("lookup", _draw_lookup(request["prefix"]))
    facts.add_row("sampling", f"seed {request['seed']}")
    facts.add_row("order", f"priority {request['priority']}, tenant {json.dumps(request['tenant'])}")
    facts.add_row("preemptions", f"{request['num_preemptions']:,}")
    facts.add_row("timings", _draw_timings(request["timings"]))
    facts.add_row("waits", _draw_waits(request["waits"]))
    held = len(block_ids) - block_ids.count(NO_BLOCK)
    facts.add_row("blocks", f"{held:,} of {block_size} slots each")
    head = Text.assemble((request["id"], "bold"), "  ", _status(request))
    if request["finish_reason"]:
        head.append(f" ({request['finish_reason']})", "dim")
    return Group(head, facts, *_draw_block_table(block_ids, computed, block_size))


def _draw_block_table(block_ids: Sequence[int], computed: int, block_size: int) -> list[RenderableType]:
    """Logical index, physical id and filled slots of each block, as many beside each other as fit."""
    if not block_ids:
        return []
    index_width, id_width = len(str(len(block_ids))), len(str(max(block_ids)))
    cells = []
    for index, block_id in enumerate(block_ids):
        if block_id == NO_BLOCK:
            cells.append(Text(f"{index:>{index_width}} → {'-':>{id_width}}", "dim"))
            continue
        filled = min(block_size, max(0, computed - index * block_size))
        fill = f"{_fill(filled, block_size)} {filled:>{len(str(block_size))}}/{block_size}"
        cells.append(Text.assemble((f"{index:>{index_width}} → ", "dim"), f"{block_id:>{id_width}} ", (fill, "green")))
    return [Text(), Text("logical → physical, slots filled", "dim"), Columns(cells, padding=(0, 4), column_first=True)]


def _draw_lookup(prefix: Json) -> str:
    """The newest prefix lookup, and what ended it."""
    reason, step = prefix["reason"], prefix["evicted_step"]
    when = "" if step is None else f" in step {step:,}"
    return f"{prefix['hit_tokens']:,} tokens found when it last entered: {LOOKUP_ENDS.get(reason, reason)}{when}"


def _draw_timings(timings: Json) -> str:
    """Each moment as seconds after the arrival; the engine's clock starts anywhere."""
    names = {"first_scheduled": "scheduled", "first_token": "first token", "finished": "finished"}
    moments = [
        f"{name} after {_seconds(timings[key] - timings['arrived'])}"
        for key, name in names.items()
        if timings[key] is not None
    ]
    return ", ".join(moments) or "not scheduled yet"


def _draw_waits(waits: Sequence[Json]) -> str:
    """The latest waits, newest last."""
    lines = [f"{len(waits) - MAX_WAITS:,} before these"] if len(waits) > MAX_WAITS else []
    for wait in waits[-MAX_WAITS:]:
        length = "now" if wait["until"] is None else _seconds(wait["until"] - wait["since"])
        lines.append(f"{length} {wait_words(wait)}")
    return "\n".join(lines) or "none"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
