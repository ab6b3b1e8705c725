"""The dashboard over made-up frames: pools and crowds of a size, and turns of events, that a test's server has not."""

from __future__ import annotations

from typing import Any

import numpy as np

from .conftest import Look, Watch
from .frames import STATES, body, cells, frame, request

COUNTS = "window.pageframeState().blocks"


def play(watch: Watch, *bodies: str) -> None:
    """Have the page open anew on these answers of /inspect/live, one for each connection; the next hears nothing."""
    left = list(bodies)

    def answer(route: Any) -> None:
        if left:
            route.fulfill(status=200, content_type="text/event-stream", body=left.pop(0))

    watch.page.route("**/inspect/live", answer)
    watch.page.reload()
    watch.page.wait_for_selector("#page[data-ready=yes]")


def counts(pool: Any) -> dict[str, int]:
    return {name: int((pool["state"] == state).sum()) for state, name in enumerate(STATES)}


def test_twenty_thousand_blocks_and_a_crowd_are_drawn_without_a_node_for_each(look: Look) -> None:
    watch = look()
    pool = cells(np.random.default_rng(5).integers(0, 4, size=20_000).tolist(), owner=1)
    crowd = [request(number, list(range(number, number + 40))) for number in range(256)]
    later = pool.copy()
    later["state"][:500] = 2
    first = frame(0, 100, pool, requests=crowd)
    second = frame(1, 101, later, changed=range(500), requests=[{"id": member["id"]} for member in crowd])
    play(watch, body(first, second))
    watch.wait("window.pageframeState().step === 101")
    assert watch.page.evaluate(COUNTS) == counts(later)
    assert watch.page.locator("#requests .row").count() < 40
    assert watch.page.evaluate("document.querySelectorAll('*').length") < 2000
    assert watch.page.get_attribute("#requests .rows", "aria-rowcount") == "257"
    # The last of the crowd is a key away, or a scroll.
    watch.page.evaluate("document.querySelector('.rows-body').scrollTop = 1e6")
    watch.wait("(id) => document.querySelector(`.row[data-id='${id}']`) !== null", crowd[-1]["id"])
    assert watch.page.locator("#requests .row").count() < 40
    watch.page.evaluate("document.querySelector('.rows-body').scrollTop = 0")
    watch.wait("(id) => document.querySelector('#requests .row')?.dataset.id === id", crowd[0]["id"])
    watch.page.locator("#requests .row").first.focus()
    for _ in range(30):
        watch.page.keyboard.press("ArrowDown")
    assert watch.page.evaluate("document.activeElement.dataset.id") == crowd[30]["id"]
    assert watch.page.evaluate("window.pageframeStats.frames") == 2


def test_ids_and_tenants_are_text_and_never_markup(look: Look) -> None:
    watch = look()
    bad = "<img src=x onerror=\"document.title='taken over'\"><i>"
    pool = cells([2, 2, 0, 0], owner=1)
    members = [request(0, [0, 1], id=bad, tenant=bad, wait=bad)]
    play(watch, body(frame(0, 9, pool, requests=members)))
    watch.wait("document.querySelectorAll('#requests .row').length === 1")
    watch.page.locator("#requests .row").click()
    watch.part("map-area").focus()
    watch.page.keyboard.press("ArrowRight")
    watch.page.keyboard.press("Enter")
    watch.wait("!document.querySelector('#followed').hidden")
    for name in ("summary", "requests", "story", "followed", "tip"):
        assert bad in watch.part(name).text_content(), name
    assert watch.page.locator("main img, main i:not([class])").count() == 0
    assert watch.page.title() == "Pageframe dashboard"
    # The browser notes that no such request has a story.
    assert all("404" in complaint for complaint in watch.complaints)
    watch.complaints.clear()


def test_a_new_server_begins_anew(look: Look) -> None:
    watch = look()
    old, new = cells([2] * 30, owner=1), cells([0] * 50)
    before = body(frame(0, 1000, old), frame(1, 1001, old, changed=[]))
    play(watch, before, body(frame(0, 3, new)))
    watch.wait("window.pageframeState().step === 3")
    assert watch.page.evaluate(COUNTS) == {"free": 50, "cached": 0, "used": 0, "pinned": 0}
    scrubber = watch.part("scrubber")
    assert int(scrubber.get_attribute("max")) - int(scrubber.get_attribute("min")) < 20
    watch.page.evaluate("document.activeElement.blur()")
    for _ in range(40):
        watch.page.keyboard.press("ArrowLeft")
    watch.next_picture()
    assert watch.page.evaluate("window.pageframeState()")["step"] == 3, "the old server's moments are still there"


def test_a_missing_frame_is_noticed(look: Look) -> None:
    watch = look()
    pool, wrong, right = cells([0] * 10), cells([2] * 10), cells([1] * 10)
    gap = body(frame(0, 5, pool), frame(2, 7, wrong, changed=range(10)))
    play(watch, gap, body(frame(0, 6, right)))
    watch.wait("window.pageframeState().step === 6")
    assert watch.page.evaluate(COUNTS)["cached"] == 10
    # Had the frame after the gap been taken, step 6 would have looked like a new server, and step 5 would be forgotten.
    watch.page.evaluate("document.activeElement.blur()")
    for _ in range(20):
        watch.page.keyboard.press("ArrowLeft")
    watch.next_picture()
    assert watch.page.evaluate("window.pageframeState()") == {"step": 5, "blocks": counts(pool)}


def test_moments_are_kept_over_many_frames_and_the_oldest_go(look: Look) -> None:
    watch = look()
    pool = cells([0] * 700)
    frames = [frame(0, 1, pool)]
    for number in range(1, 700):
        pool = pool.copy()
        pool["state"][number] = 2
        frames.append(frame(number, number + 1, pool, changed=[number]))
    play(watch, body(*frames))
    watch.wait("window.pageframeState().step === 700")
    scrubber = watch.part("scrubber")
    first, last = (int(scrubber.get_attribute(name)) for name in ("min", "max"))
    assert last == 699
    assert 600 <= last - first + 1 <= 660
    for wanted in (first, first + 1, 333, 360, 359, 698):
        scrubber.evaluate(
            "(range, wanted) => { range.value = wanted; range.dispatchEvent(new Event('input')); }", wanted
        )
        watch.next_picture()
        state = watch.page.evaluate("window.pageframeState()")
        assert state["step"] == wanted + 1
        assert state["blocks"]["used"] == wanted
