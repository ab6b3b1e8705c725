"""The dashboard over made-up frames: pools and crowds of a size, and turns of events, that a test's server has not."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from .conftest import Look, Watch
from .frames import STATES, body, cells, frame, request, step_record

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


@pytest.mark.parametrize(("run", "step"), [("first", 3), ("second", 5000)])
def test_a_new_server_begins_anew(look: Look, run: str, step: int) -> None:
    watch = look()
    old, new = cells([2] * 30, owner=1), cells([0] * 50)
    before = body(frame(0, 1000, old), frame(1, 1001, old, changed=[]))
    play(watch, before, body(frame(0, step, new, run=run)))
    watch.wait("(step) => window.pageframeState().step === step", step)
    assert watch.page.evaluate(COUNTS) == {"free": 50, "cached": 0, "used": 0, "pinned": 0}
    scrubber = watch.part("scrubber")
    assert int(scrubber.get_attribute("max")) - int(scrubber.get_attribute("min")) < 20
    watch.page.evaluate("document.activeElement.blur()")
    for _ in range(40):
        watch.page.keyboard.press("ArrowLeft")
    watch.next_picture()
    assert watch.page.evaluate("window.pageframeState()")["step"] == step, "the old server's moments are still there"


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


ROW = "(id) => document.querySelector(`.row[data-id='${id}']`)?.innerText"
SUMMARY = "document.querySelector('#summary').innerText"


def test_waits_have_the_lengths_that_the_server_tells_and_no_others(look: Look) -> None:
    watch = look()
    pool = cells([0] * 10)
    words = "for blocks: it needs 4, 1 can be had"
    waiting = {"status": "waiting", "row": None, "wait": words, "wait_since": 0.5}
    lasts, ended, held = (request(number, [], **waiting) for number in range(3))
    goes_on = {"status": "running", "wait": None, "wait_since": None, "waited": {"blocks": 1.25, "queue": 8.0}}
    budget = {**goes_on, "wait": "for the step's token budget", "wait_since": 12.0}
    later = [{"id": lasts["id"]}, {"id": ended["id"], **goes_on}, {"id": held["id"], **budget}]
    first = frame(0, 100, pool, requests=[lasts, ended, held])
    play(watch, body(first, frame(1, 130, pool, changed=[], requests=later)))
    watch.wait("window.pageframeState().step === 130")
    assert f"waits {words}, for 12.5 s so far" in watch.page.evaluate(ROW, lasts["id"])
    assert "waited 8.00 s in the queue, 1.25 s for blocks" in watch.page.evaluate(ROW, ended["id"])
    assert "waits for the step's token budget, for 1.00 s so far" in watch.page.evaluate(ROW, held["id"])
    assert f"waits {words}, for 12.5 s so far" in watch.page.evaluate(SUMMARY)


def test_a_state_is_of_the_context_as_it_is_now(look: Look) -> None:
    watch = look()
    numbers = {
        "prefill": {"num_tokens": 40, "num_output_tokens": 0, "num_computed_tokens": 16},
        "decode": {"num_tokens": 50, "num_output_tokens": 10, "num_computed_tokens": 49},
        "recompute": {"num_tokens": 60, "num_output_tokens": 20, "num_computed_tokens": 48, "num_preemptions": 1},
    }
    slid = {"num_prompt_tokens": 250, "num_tokens": 500, "num_output_tokens": 250, "context_start": 300}
    members = [
        *(request(number, [], **fields) for number, fields in enumerate(numbers.values())),
        request(3, [], **slid, num_computed_tokens=199),
        request(4, [], **slid, num_computed_tokens=150),
    ]
    play(watch, body(frame(0, 9, cells([0] * 10), requests=members)))
    states = "[...document.querySelectorAll('#requests .row .c-state')].map((cell) => cell.innerText)"
    watch.wait(f"{states}.length === 5")
    assert watch.page.evaluate(states) == [*numbers, "decode", "recompute"]


def test_lately_is_what_the_page_says_it_is(look: Look) -> None:
    watch = look()
    pool = cells([1] * 10)
    id_before, id_lately = (request(number, [])["id"] for number in range(2))
    steps = [
        step_record(500, evicted=7, preempted=[id_before]),
        *(step_record(step, evicted=1) for step in range(501, 900)),
        step_record(900, preempted=[id_lately]),
    ]
    missed = [*steps, *(step_record(step, evicted=1) for step in range(901, 1001))]
    play(watch, body(frame(0, 900, pool, steps=steps)), body(frame(0, 1000, pool, steps=missed)))
    watch.wait("window.pageframeState().step === 1000")
    # Of steps 501 to 1000 all but step 900.
    watch.wait(f"{SUMMARY}.includes('Evicted in the last 500 steps: 499 blocks')")
    said = watch.part("summary").inner_text()
    assert f"{id_lately} was preempted at step 900" in said
    assert id_before not in said
    play(watch, body(frame(0, 1400, pool, steps=[*missed, step_record(1400)])))
    watch.wait(f"{SUMMARY}.includes('Evicted in the last 500 steps: 100 blocks')")
    assert "No request was preempted in the last 500 steps" in watch.part("summary").inner_text()


def test_the_text_tells_of_wasted_slots_and_of_contiguous_memory(look: Look) -> None:
    watch = look()
    made = frame(0, 9, cells([2] * 4 + [0] * 12, owner=1), requests=[request(0, [0, 1, 2, 3])])
    made["kv"] |= {"slots": {"written": 50, "wasted": 14}, "contiguous_blocks": 10}
    made["kv"]["bytes"] = {"pool": 16 * 2**20, "per_block": 2**20, "per_token": 2**16}
    play(watch, body(made))
    watch.wait(f"{SUMMARY}.includes('That is 4.0 MiB of the pool')")
    said = watch.part("summary").inner_text()
    assert "4.0 MiB of the pool's 16 MiB, with 14 slots wasted in tails" in said
    assert "Contiguous memory for all that runs would take 10 blocks (10 MiB)" in said


def test_a_story_whose_beginning_is_lost_says_so(look: Look) -> None:
    watch = look()
    member = request(0, [0])
    sentences = [{"step": 8, "time": 0.0, "kind": "finish", "text": "It ended."}]
    watch.page.route(
        "**/story", lambda route: route.fulfill(json={"id": member["id"], "sentences": sentences, "complete": False})
    )
    play(watch, body(frame(0, 9, cells([2] * 4, owner=1), requests=[member])))
    watch.page.locator("#requests .row").click()
    watch.wait("document.querySelector('#story ol').innerText.includes('It ended.')")
    assert "Its beginning is no longer in the journal" in watch.part("story").inner_text()


def test_the_prefix_tree_asks_every_two_seconds_and_only_where_it_is_seen(look: Look) -> None:
    watch = look()
    page = watch.page
    page.clock.install()
    play(watch, body(frame(0, 9, cells([1] * 400))))
    asked = []
    page.on("request", lambda request: asked.append(request.url) if "/inspect/prefixes" in request.url else None)
    page.set_viewport_size({"width": 1440, "height": 500})
    page.evaluate("scrollTo(0, 0)")
    assert watch.part("prefixes").bounding_box()["y"] > 500
    watch.next_picture()
    # From here on only this test moves the page's time.
    page.clock.pause_at(page.evaluate("Date.now() + 1000"))

    def asked_in(seconds: int) -> int:
        before = len(asked)
        for _ in range(seconds):
            page.clock.run_for(1000)
        page.evaluate("fetch('/health').then(() => 0)")
        return len(asked) - before

    asked.clear()
    assert asked_in(10) == 0
    watch.part("prefixes").scroll_into_view_if_needed()
    assert any(asked_in(2) for _ in range(100))
    assert asked_in(10) == 5
    page.evaluate("Object.defineProperty(document, 'hidden', { value: true })")
    assert asked_in(10) == 0
    page.clock.resume()


def test_what_grows_pushes_no_button_away(look: Look) -> None:
    watch = look()
    page = watch.page
    held: list[Any] = []
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    pool = cells([1] * 10)
    wordy = request(0, [], status="waiting", row=None, wait="for blocks, " * 40, wait_since=0.5)
    steps = [step_record(step, evicted=1) for step in range(900, 1000)]
    places = """[...document.querySelectorAll('#chat button')].map((button) => {
      const { x, y } = button.getBoundingClientRect();
      return [button.innerText, x, y];
    })"""
    play(watch, body(frame(0, 9, pool)))
    for text in ("first", "second"):
        page.fill("[data-testid=chat-text]", text)
        watch.part("chat-send").click()
    watch.wait("document.querySelectorAll('.chat-card').length === 2")
    before = page.evaluate(places)
    assert len(before) == 8
    while len(held) < 2:
        watch.next_picture()
    busy = body(frame(0, 1000, pool, requests=[wordy], steps=steps))
    page.unroute("**/inspect/live")
    page.route("**/inspect/live", lambda route: route.fulfill(content_type="text/event-stream", body=busy))
    watch.wait(f"{SUMMARY}.includes('for blocks, for blocks')")
    for number, route in enumerate(held):
        choice = {"index": 0, "delta": {"content": "A long answer.\n" * 30}, "finish_reason": "stop"}
        told = f"data: {json.dumps({'id': f'chatcmpl-{number:032x}', 'choices': [choice]})}\n\ndata: [DONE]\n\n"
        route.fulfill(content_type="text/event-stream", body=told)
    watch.wait("document.querySelectorAll('.chat-card.over').length === 2")
    assert page.evaluate(places) == before
