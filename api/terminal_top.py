"""`pageframe top`: a running server's pool, rates, waits and requests, drawn again and again, with keys.

One thread asks the server, so that keys are answered at once whatever it does; the other one draws.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Self

from rich.console import Console
from rich.live import Live

from pageframe.api.terminal_http import DEFAULT_URL, Json, ServerError, print_error, server_url
from pageframe.api.terminal_inspect import watch_seconds
from pageframe.api.terminal_top_drawing import Picture
from pageframe.api.terminal_top_state import Feed, Sample, View

EVERY_SECONDS = 1.0
NO_TERMINAL = "pageframe: this is one picture, since it does not go to a terminal; in one it is drawn again and again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", type=server_url, default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})")
    parser.add_argument(
        "--every",
        type=watch_seconds,
        default=EVERY_SECONDS,
        metavar="SECONDS",
        help=f"how often the server is asked (default: {EVERY_SECONDS:g}); h in the picture tells of keys",
    )


def run(args: argparse.Namespace) -> int:
    """Draw until q or Ctrl-C; once where there is no terminal. 1 where the server cannot be asked even once."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not (console.is_terminal and not console.is_dumb_terminal and sys.stdin.isatty() and os.name == "posix"):
        return _print_once(console, args.url)
    with contextlib.suppress(KeyboardInterrupt):
        _watch(console, args.url, args.every)
    return 0


def _print_once(console: Console, url: str) -> int:
    view = View()
    try:
        view.take(Feed(url).sample())
    except ServerError as error:
        print_error(str(error))
        return 1
    view.selected = ""
    console.print(Picture(url, view, console.height))
    print(NO_TERMINAL, file=sys.stderr)  # noqa: T201
    return 0


def _watch(console: Console, url: str, every: float) -> None:
    """The loop: keys, samples and the terminal's new size each draw anew."""
    from pageframe.api.terminal_keys import Keyboard  # there is none where there are no POSIX terminals

    view = View()
    with (
        _wake_up() as (woken, wake),
        Poller(Feed(url), every, wake) as poller,
        Keyboard(sys.stdin.fileno()) as keyboard,
        Live(Picture(url, view), console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            live.refresh()
            ready, _, _ = select.select([keyboard.descriptor, woken], [], [])
            if woken in ready:
                os.read(woken, 1024)
                poller.hand_over(view)
            if keyboard.descriptor in ready:
                if not all(view.press(key) for key in keyboard.read()):
                    return
                poller.look_at(view)


@contextlib.contextmanager
def _wake_up() -> Iterator[tuple[int, Callable[[], None]]]:
    """A descriptor that can be read once the function beside it was called, from any thread; or the terminal's size has
    changed. SIGTERM ends the program as an exception does, so that the terminal is restored."""
    woken, waker = os.pipe()
    os.set_blocking(waker, False)

    def wake() -> None:
        with contextlib.suppress(BlockingIOError):  # then there is enough to wake up for
            os.write(waker, b"\0")

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {
        signal.SIGWINCH: signal.signal(signal.SIGWINCH, lambda number, frame: wake()),
        signal.SIGTERM: signal.signal(signal.SIGTERM, end),
    }
    try:
        yield woken, wake
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(woken)
        os.close(waker)


class Poller:
    """Asks a server every so many seconds, in a thread of its own, from `with` to its end.

    Args:
        wake: called when there is something new.
    """

    def __init__(self, feed: Feed, every: float, wake: Callable[[], None]) -> None:
        self._feed = feed
        self._every = every
        self._wake = wake
        self._lock = threading.Lock()
        self._kick = threading.Event()
        self._sample: Sample | None = None
        self._problem = ""
        self._seen_at: float | None = None
        self._opened = ""
        self._page: tuple[str, Json] | None = None
        self._is_paused = False
        self._has_ended = False

    def __enter__(self) -> Self:
        # A daemon: whoever quits does not wait for an answer that is under way.
        threading.Thread(target=self._run, name="poller", daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._has_ended = True
            self._kick.set()

    def look_at(self, view: View) -> None:
        """Ask for what the view needs from now on: at once, where that is something else."""
        with self._lock:
            if view.opened != self._opened or (self._is_paused and not view.is_paused):
                self._kick.set()
            self._opened, self._is_paused = view.opened, view.is_paused

    def hand_over(self, view: View) -> None:
        """Give the view what has come."""
        with self._lock:
            if self._sample is not None and not view.is_paused:
                view.take(self._sample)
            if self._page is not None and self._page[0] == view.opened:
                view.page = self._page[1]
            view.problem = self._problem

    def _run(self) -> None:
        while not self._has_ended:
            self._kick.clear()
            self._ask()
            self._kick.wait(self._every)

    def _ask(self) -> None:
        with self._lock:
            opened, is_paused = self._opened, self._is_paused
            # A page that was opened in a picture that stands still is asked for too, once.
            wants_page = bool(opened) and not (is_paused and self._page is not None and self._page[0] == opened)
        if is_paused and not wants_page:
            return
        sample, page, problem = None, None, ""
        try:
            if wants_page:
                page = (opened, self._feed.page(opened))
            if not is_paused:
                sample = self._feed.sample()
        except ServerError as error:
            problem = self._since(str(error))
        except (KeyError, TypeError, ValueError) as error:
            problem = self._since(f"{self._feed.url} answers otherwise than Pageframe does: {error!r}")
        with self._lock:
            if self._has_ended:
                return  # the descriptor that wake() writes to may be another's by now
            self._sample = sample or self._sample
            self._page = page or self._page
            self._problem = problem
            if sample is not None:
                self._seen_at = time.monotonic()
            self._wake()

    def _since(self, problem: str) -> str:
        if self._seen_at is None:
            return f"{problem}; trying again"
        return f"{problem}; the picture is {time.monotonic() - self._seen_at:,.0f} s old; trying again"
