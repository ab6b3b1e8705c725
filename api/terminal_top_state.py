"""What `pageframe top` knows: samples of a server, and what is looked at in them. Draws nothing, reads no keys."""

from __future__ import annotations

import itertools
import urllib.parse
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pageframe.api.terminal_drawing import NO_BLOCK
from pageframe.api.terminal_explain import fetch_exact_story
from pageframe.api.terminal_http import Json, ServerError, fetch_json

#: Rates are of so many seconds.
WINDOW_SECONDS = 5.0
FIRST_STEPS = 1000
#: A server that takes longer than that is as good as gone, for who watches.
TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Of the last WINDOW_SECONDS.

    Args:
        prefill, decode: tokens a second.
        step_ms: a step's mean time; None where there was none.
        hit_rate: part of the tokens looked up that was found; None where none was.
    """

    prefill: float = 0.0
    decode: float = 0.0
    steps: float = 0.0
    step_ms: float | None = None
    hit_rate: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One live request.

    Args:
        place: in the order of service.
        shared: blocks of its table that others hold too.
        age, first_token: seconds since and from its arrival.
        tokens_per_second: of its answer, from the first token on.
        wait: in words.
    """

    place: int
    request_id: str
    status: str
    num_computed: int
    num_known: int
    num_blocks: int
    shared: int
    age: float
    first_token: float | None
    tokens_per_second: float | None
    wait: str
    reason: str


@dataclass(frozen=True, slots=True)
class Sample:
    """A server at one moment."""

    kv: Json
    rates: Rates
    rows: list[Row]


class Feed:
    """Asks a server again and again, and remembers the steps that rates are made of."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._steps: deque[Json] = deque()

    def sample(self) -> Sample:
        """How things stand now.

        Raises:
            ServerError: no answer, or another than Pageframe's.
        """
        kv = self._ask("kv")
        answer = self._ask("requests")
        if self._steps and kv["step"] < self._steps[-1]["step"]:
            self._steps.clear()  # it is another run of the server
        since = self._steps[-1]["step"] + 1 if self._steps else max(0, kv["step"] - FIRST_STEPS)
        self._steps += self._ask(f"steps?since={since}", "steps")["steps"]
        return Sample(kv, self._rates(answer["now"]), make_rows(answer["requests"], answer["now"]))

    def page(self, request_id: str) -> Json:
        """{"request", "story"}: one request in full; None for what the server knows no more.

        Raises:
            ServerError: no answer, or another than Pageframe's.
        """
        path = f"requests/{urllib.parse.quote(request_id, safe='')}"
        return {
            "request": _if_known(lambda: self._ask(path)),
            "story": _if_known(lambda: fetch_exact_story(self.url, request_id)),
        }

    def _ask(self, path: str, key: str = "step") -> Json:
        answer = fetch_json(self.url, f"/inspect/{path}", TIMEOUT_SECONDS)
        if key not in answer:
            raise ServerError(f'{self.url} does not answer /inspect/{path} as Pageframe does: no "{key}"')
        return answer

    def _rates(self, now: float) -> Rates:
        """Forgets the steps before the window, all but the last: totals are counted from there."""
        steps = self._steps
        begin = now - WINDOW_SECONDS
        while len(steps) > 1 and steps[1]["started"] < begin:
            steps.popleft()
        recent = [step for step in steps if step["started"] >= begin]
        if not recent:
            return Rates()
        looked_up = steps[-1]["lookup_tokens"] - steps[0]["lookup_tokens"]
        found = steps[-1]["hit_tokens"] - steps[0]["hit_tokens"]
        return Rates(
            prefill=sum(step["prefill_tokens"] for step in recent) / WINDOW_SECONDS,
            decode=sum(step["decode_tokens"] for step in recent) / WINDOW_SECONDS,
            steps=len(recent) / WINDOW_SECONDS,
            step_ms=sum(step["time_ms"] for step in recent) / len(recent),
            hit_rate=found / looked_up if looked_up else None,
        )


def _if_known(ask: Callable[[], Json]) -> Json | None:
    try:
        return ask()
    except ServerError as error:
        if error.status != 404:
            raise
        return None


def make_rows(requests: list[Json], now: float) -> list[Row]:
    """The requests of /inspect/requests at the engine's time `now`, in seconds."""
    holders = Counter(itertools.chain.from_iterable(request["block_table"] for request in requests))
    return [_row(place, request, now, holders) for place, request in enumerate(requests)]


def _row(place: int, request: Json, now: float, holders: Counter[int]) -> Row:
    timings, waits = request["timings"], request["waits"]
    arrived, first = timings["arrived"], timings["first_token"]
    held = [block_id for block_id in request["block_table"] if block_id != NO_BLOCK]
    behind_first = request["num_output_tokens"] - 1
    return Row(
        place=place,
        request_id=request["id"],
        status=request["status"],
        num_computed=request["num_computed_tokens"],
        num_known=request["num_tokens"] - request["context_start"],
        num_blocks=len(held),
        shared=sum(holders[block_id] > 1 for block_id in held),
        age=now - arrived,
        first_token=None if first is None else first - arrived,
        tokens_per_second=None if first is None or now <= first else behind_first / (now - first),
        wait=request["wait"] or "",
        reason=waits[-1]["reason"] if request["wait"] and waits else "",
    )


def _or_zero(value: float | None) -> float:
    return 0.0 if value is None else value


#: What the requests can be ordered by; the first is the order of service. Other orders begin with the most.
SORTS: dict[str, Callable[[Row], float]] = {
    "request": lambda row: row.place,
    "tokens": lambda row: -row.num_known,
    "blocks": lambda row: -row.num_blocks,
    "shared": lambda row: -row.shared,
    "age": lambda row: -row.age,
    "first": lambda row: -_or_zero(row.first_token),
    "tok/s": lambda row: -_or_zero(row.tokens_per_second),
}


@dataclass(slots=True)
class View:
    """What is looked at.

    Args:
        sample: the latest, or the one that was paused at; None before the first.
        screen: "list", "request" or "help".
        sort: of SORTS.
        selected: a request's id; "" while there is none.
        offset: rows or lines above what is seen.
        room: rows or lines that are seen, as the latest drawing had it.
        problem: why there is no newer sample; "" where there is.
        page: what Feed.page says of the request that is open; None until it does.
    """

    sample: Sample | None = None
    rows: list[Row] = field(default_factory=list)
    screen: str = "list"
    sort: str = "request"
    is_reversed: bool = False
    is_paused: bool = False
    selected: str = ""
    place: int = 0
    offset: int = 0
    room: int = 1
    problem: str = ""
    opened: str = ""
    page: Json | None = None

    def take(self, sample: Sample) -> None:
        """A newer sample; the selection stays on its request, or where that was."""
        self.sample = sample
        self._order()

    def _order(self) -> None:
        rows = self.sample.rows if self.sample else []
        self.rows = sorted(rows, key=SORTS[self.sort])
        if self.is_reversed:
            self.rows.reverse()
        places = {row.request_id: place for place, row in enumerate(self.rows)}
        self.select(places.get(self.selected, self.place))

    def select(self, place: int) -> None:
        """Select the row at this place, or the nearest there is."""
        self.place = max(0, min(place, len(self.rows) - 1))
        self.selected = self.rows[self.place].request_id if self.rows else ""

    def press(self, key: str) -> bool:
        """What a key does; False where it is to end."""
        if key == "q":
            return False
        if key == " ":
            self.is_paused = not self.is_paused
        elif key in ("h", "?"):
            self._go("list" if self.screen == "help" else "help")
        elif key == "escape":
            self._go("list")
        elif key == "enter" and self.screen == "list" and self.selected:
            self.opened, self.page = self.selected, None
            self._go("request")
        elif key == "s" and self.screen == "list":
            names = list(SORTS)
            self.sort = names[(names.index(self.sort) + 1) % len(names)]
            self._order()
        elif key == "r" and self.screen == "list":
            self.is_reversed = not self.is_reversed
            self._order()
        else:
            self._move(key)
        return True

    def _go(self, screen: str) -> None:
        if screen != "request":
            self.opened, self.page = "", None
        self.screen, self.offset = screen, 0

    def _move(self, key: str) -> None:
        steps = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -self.room, "page down": self.room}
        ends = {"home": -(10**9), "end": 10**9}
        distance = steps.get(key, ends.get(key, 0))
        if self.screen == "list":
            self.select(self.place + distance)
        else:
            self.offset = max(0, self.offset + distance)

    def window(self, num_lines: int, room: int) -> range:
        """Which of so many rows or lines are to be seen where `room` fit; keeps to the selection, and to the end."""
        self.room = max(1, room)
        if self.screen == "list":
            self.offset = max(self.place - self.room + 1, min(self.offset, self.place))
        self.offset = max(0, min(self.offset, num_lines - self.room))
        return range(self.offset, min(num_lines, self.offset + room))
