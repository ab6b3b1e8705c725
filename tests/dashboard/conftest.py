"""A real server with a small pool, and Chromium, headless, looking at its dashboard."""

from __future__ import annotations

import json
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from pageframe.benchmarks.experiments.server_process import RunningServer, running_server

#: The names under which systems install it.
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
#: It talks to nobody but the page's server.
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
#: 136 blocks of 16 tokens: a few long prompts fill it.
POOL = "48MiB"
#: Milliseconds. What is waited for takes a fraction of it.
PATIENCE = 60_000

#: Keeps what the page drew: the counts of each step that it showed, as it showed them live.
RECORDER = """() => {
  window.drawn = {};
  const look = () => {
    const state = window.pageframeState();
    if (state !== null) window.drawn[state.step] = state.blocks;
    requestAnimationFrame(look);
  };
  look();
}"""


@dataclass
class Watch:
    """A page with all that it asked for and complained about."""

    page: Any
    url: str
    asked: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def part(self, name: str) -> Any:
        """A main region of the page, by its data-testid."""
        return self.page.get_by_test_id(name)

    def get(self, path: str) -> Any:
        """What the server answers, asked beside the page."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as response:
            return json.load(response)

    def wait(self, expression: str, argument: Any = None) -> None:
        """Until a JavaScript expression, or a function of `argument`, is true on the page."""
        deadline = time.monotonic() + PATIENCE / 1000
        # Not with wait_for_function, which the page's content security policy forbids.
        while not self.page.evaluate(expression, argument):
            assert time.monotonic() < deadline, f"never came true: {expression}\n{self.page.inner_text('body')}"
            self.next_picture()

    def next_picture(self) -> None:
        """Until the page has drawn what it was told to."""
        self.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def send_many(self, number: int, prompts: str, max_tokens: int) -> None:
        """Chats from the page's own form. Args: prompts: "mixed", "shared" or "alone"."""
        self.page.fill("#chat-max-tokens", str(max_tokens))
        self.page.fill("#many-number", str(number))
        self.page.select_option("#many-set", prompts)
        self.part("many-send").click()

    def make_endless(self) -> None:
        """Chats that the page sends from now on go on to their last token, whatever the model says."""

        def send_on(route: Any) -> None:
            route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True}))

        self.page.route("**/v1/*completions", send_on)

    def wait_idle(self) -> None:
        """Until nothing runs and the page shows that."""
        self.wait("document.querySelector('#chats-running').textContent === 'none under way'")
        self.wait("window.pageframeState()?.blocks.used === 0")


Look = Callable[..., Watch]


# Of a module, not of the session: while it drives a browser, playwright keeps an event loop running in this thread, and
# other tests begin loops of their own.
@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed, so nothing can look at the dashboard")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed to drive Chromium")
    with playwright.sync_playwright() as driver:
        yield driver


@pytest.fixture(scope="module")
def server(driver: Any) -> Iterator[RunningServer]:
    with running_server("--kv-memory", POOL) as running:
        yield running


@pytest.fixture(scope="module")
def browser(driver: Any) -> Iterator[Any]:
    browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
    yield browser
    browser.close()


@pytest.fixture
def look(server: RunningServer, browser: Any) -> Iterator[Look]:
    """Opens the dashboard as often as a test likes. In the end: no page asked anybody but the server, or complained."""
    contexts, watches = [], []

    def open_page(path: str = "/dashboard", *, width: int = 1440, theme: str = "light") -> Watch:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme, reduced_motion="reduce"
        )
        contexts.append(context)
        watch = Watch(context.new_page(), server.url)
        watches.append(watch)
        watch.page.on("request", lambda request: watch.asked.append(request.url))
        watch.page.on("pageerror", lambda error: watch.complaints.append(str(error)))
        watch.page.on("console", lambda message: watch.complaints.append(message.text))
        watch.page.goto(f"{server.url}{path}")
        watch.page.wait_for_selector("#page[data-ready=yes]", timeout=PATIENCE)
        watch.page.evaluate(RECORDER)
        return watch

    yield open_page
    for context in contexts:
        context.close()
    for watch in watches:
        assert not watch.complaints
        assert watch.asked
        assert all(url.startswith((f"{server.url}/", "data:")) for url in watch.asked), watch.asked
