"""The dashboard in a real browser over a real server: what it shows is what the server answers, at every moment."""

from __future__ import annotations

import itertools
import json
import re
import urllib.request
from typing import Any

import pytest

from .conftest import Look, Watch

COUNTS = "window.pageframeState().blocks"
#: Rows of live requests, with what they show.
ROWS = """() => [...document.querySelectorAll('#requests .row')].map((row) => ({
  id: row.dataset.id, status: row.dataset.status, shared: Number(row.dataset.shared), text: row.innerText}))"""


def summary(watch: Watch) -> str:
    text: str = watch.part("summary").inner_text()
    return text


def numbers(text: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", text)]


def live_ids(watch: Watch) -> list[str]:
    return [row["id"] for row in watch.page.evaluate(ROWS) if row["status"] != "finished"]


def test_the_map_counts_what_the_server_counts_at_the_same_step(look: Look) -> None:
    watch = look()
    watch.send_many(6, "mixed", 64)
    watch.wait("document.querySelector('#chats-running').textContent !== 'none under way'")
    told: dict[str, Any] = {}
    # Between two answers the page's own loop runs, so that it draws the steps that are asked for.
    for _ in range(500):
        kv = watch.get("/inspect/kv")
        told[str(kv["step"])] = kv["blocks"]
        if watch.page.inner_text("#chats-running") == "none under way":
            break
    drawn = watch.page.evaluate("window.drawn")
    both = drawn.keys() & told.keys()
    assert {step: drawn[step] for step in both} == {step: told[step] for step in both}
    # Whatever else the page drew is what the server noted of that step.
    noted = {str(record["step"]): record["blocks"] for record in watch.get("/inspect/steps")["steps"]}
    busy = [step for step in drawn.keys() & noted.keys() if noted[step]["used"] > 0]
    assert len(busy) >= 3, "the page drew no step at which something ran"
    assert {step: drawn[step] for step in busy} == {step: noted[step] for step in busy}
    watch.wait_idle()
    assert watch.page.evaluate(COUNTS) == watch.get("/inspect/kv")["blocks"]
    legend = {name: int(watch.page.inner_text(f"[data-count={name}]")) for name in kv["blocks"]}
    assert legend == watch.page.evaluate(COUNTS)


def test_a_cancelled_request_lets_its_blocks_go_and_its_neighbour_goes_on(look: Look) -> None:
    watch = look()
    watch.make_endless()
    watch.send_many(2, "alone", 800)
    watch.wait("document.querySelectorAll('.chat-card[data-id]').length === 2")
    # The newest card stands first.
    other, card = watch.page.query_selector_all(".chat-card")
    cancelled, kept = card.get_attribute("data-id"), other.get_attribute("data-id")
    held = {request["id"]: request["block_table"] for request in watch.get("/inspect/requests")["requests"]}
    assert held.keys() == {cancelled, kept}
    # Playwright clicks on nothing that moves: the card above keeps its height while its answer comes.
    card.query_selector("button:has-text('Cancel')").click()
    watch.wait("(id) => document.querySelector(`.row[data-id='${id}']`)?.innerText.includes('cancelled')", cancelled)
    blocks = watch.get("/inspect/blocks")["blocks"]
    assert all(cancelled not in block["owners"] for block in blocks)
    assert any(kept in block["owners"] for block in blocks)
    watch.wait("(card) => card.innerText.includes('cancelled')", card)
    length = len(other.inner_text())
    watch.wait("([card, length]) => card.innerText.length > length", [other, length])
    watch.part("cancel-all").click()
    watch.wait_idle()
    assert watch.page.evaluate(COUNTS)["used"] == 0
    assert watch.get("/inspect/kv")["blocks"]["used"] == 0


def test_a_shared_prefix_shows_as_shared_and_can_be_followed(look: Look) -> None:
    watch = look()
    watch.make_endless()
    watch.send_many(4, "shared", 400)
    watch.wait("() => [...document.querySelectorAll('.row')].filter((row) => row.dataset.shared > 5).length === 4")
    rows = [row for row in watch.page.evaluate(ROWS) if row["status"] != "finished"]
    assert all(f"{row['shared']} shared" in row["text"] for row in rows)
    answers = watch.get("/inspect/requests")["requests"]
    tables = {request["id"]: request["block_table"] for request in answers}
    common = len(list(itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*tables.values(), strict=False))))
    assert {row["shared"] for row in rows} == {common}
    assert watch.get("/inspect/kv")["blocks_saved_by_sharing"] == 3 * common
    assert watch.page.inner_text("[data-figure=saved]") == str(3 * common)

    # From the keyboard: walk to the first shared block, hear who holds it, follow its prefix.
    first = next(iter(tables.values()))[0]
    watch.part("map-area").focus()
    watch.page.keyboard.press("Home")
    for _ in range(first):
        watch.page.keyboard.press("ArrowRight")
    told = watch.part("map-readout").text_content()
    assert told.startswith(f"Block {first}: used")
    assert "4 references" in told
    assert sum(request_id in told for request_id in tables) == 3, "three are named, the rest counted"
    watch.page.keyboard.press("Enter")
    watch.wait("document.querySelector('#followed-text').textContent.includes('4 requests on it')")
    assert f"a prefix of {common} blocks" in watch.part("followed").inner_text()

    watch.part("prefixes").scroll_into_view_if_needed()
    watch.wait("document.querySelector(\".tree li[data-requests='4']\") !== null")
    chains = watch.page.locator(".tree li[data-requests='4']").all_inner_texts()
    assert sum(numbers(chain)[0] for chain in chains) == common
    watch.part("cancel-all").click()
    watch.wait_idle()


def stream(watch: Watch, prompt: str, max_tokens: int) -> Any:
    """A chat whose answer nobody reads: it lives until the connection is closed."""
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "stream": True}
    fields = {"temperature": 0, "min_tokens": max_tokens}
    return urllib.request.urlopen(
        urllib.request.Request(
            f"{watch.url}/v1/chat/completions",
            json.dumps(body | fields).encode(),
            {"content-type": "application/json"},
        ),
        timeout=30,
    )


def id_of(response: Any) -> str:
    return str(json.loads(response.readline().removeprefix(b"data: "))["id"])


def test_the_text_alone_answers_what_people_ask(look: Look) -> None:
    watch = look()
    small = stream(watch, "Count from one to a thousand.", 400)
    big = stream(watch, "The harbour was quiet and the boats came home. " * 110, 400)
    small_id, big_id = id_of(small), id_of(big)
    watch.wait("(id) => document.querySelector('#summary').innerText.includes(`${id} holds most blocks`)", big_id)
    assert small_id in live_ids(watch), "there was nothing to compare it with"
    holds = int(re.search(rf"{big_id} holds most blocks: (\d+)", summary(watch))[1])  # type: ignore[index]
    table = next(r["block_table"] for r in watch.get("/inspect/requests")["requests"] if r["id"] == big_id)
    assert 60 < holds <= len(table)

    # What comes now does not fit beside the other two.
    watch.page.fill("#chat-max-tokens", "1")
    late = "The lighthouse keeper counted the ships that went by. " * 100
    watch.page.fill("[data-testid=chat-text]", late)
    watch.part("chat-send").click()
    watch.wait("/waits for blocks: it needs \\d+, \\d+ can be had/.test(document.querySelector('#summary').innerText)")
    waiting = [row for row in watch.page.evaluate(ROWS) if row["status"] == "waiting"]
    assert len(waiting) == 1
    assert waiting[0]["id"] in summary(watch)
    assert waiting[0]["id"] not in (small_id, big_id)
    assert "waits for blocks" in waiting[0]["text"]
    big.close()
    waited = "(id) => document.querySelector(`.row[data-id='${id}']`)?.innerText.includes('waited')"
    watch.wait(waited, waiting[0]["id"])
    small.close()
    watch.wait_idle()
    watch.wait("document.querySelector('#summary').innerText.includes('Evicted in the last 500 steps')")
    kv = watch.get("/inspect/kv")
    cache = kv["prefix_cache"]
    said = f"saved {cache['hit_tokens']:,} of"
    watch.wait("(said) => document.querySelector('#summary').innerText.includes(said)", said)
    saved = numbers(re.search(r"The cache saved.*", summary(watch))[0])  # type: ignore[index]
    assert saved[:2] == [cache["hit_tokens"], cache["lookup_tokens"]]
    assert cache["hit_tokens"] // kv["block_size"] in saved
    evicted = sum(step["evicted"] for step in watch.get("/inspect/steps")["steps"])
    assert 0 < numbers(re.search(r"Evicted in the last 500 steps: ([\d,]+)", summary(watch))[1])[0] <= evicted  # type: ignore[index]


def test_a_request_opened_tells_its_whole_story(look: Look) -> None:
    watch = look()
    watch.send_many(1, "alone", 24)
    watch.wait("document.querySelector('.chat-card.over')?.dataset.id !== undefined")
    request_id = watch.page.get_attribute(".chat-card", "data-id")
    row = watch.page.locator(f".row[data-id='{request_id}']")
    row.focus()
    watch.page.keyboard.press("Enter")
    watch.wait("document.querySelectorAll('#story ol li').length > 3")
    told = watch.get(f"/inspect/requests/{request_id}/story")
    shown = watch.part("story").inner_text()
    assert all(sentence["text"] in shown for sentence in told["sentences"])
    assert request_id in shown
    assert "0 → " in shown
    watch.page.keyboard.press("Escape")
    assert watch.part("story").is_hidden()
    assert watch.page.evaluate("document.activeElement.dataset.id") == request_id


def test_a_story_goes_on_until_its_request_has_ended(look: Look) -> None:
    watch = look()
    watch.page.clock.install()
    watch.page.reload()
    watch.page.wait_for_selector("#page[data-ready=yes]")
    watch.make_endless()
    watch.send_many(1, "alone", 800)
    watch.wait("document.querySelector('#requests .row[data-status=running]') !== null")
    watch.page.locator("#requests .row[data-status=running]").focus()
    watch.page.keyboard.press("Enter")
    watch.wait("document.querySelectorAll('#story ol li').length > 0")
    assert "It ended" not in watch.part("story").inner_text()
    watch.part("cancel-all").click()
    watch.wait("document.querySelector('#story ol').innerText.includes('It ended')")
    told = [url for url in watch.asked if url.endswith("/story")]
    watch.page.clock.run_for(10_000)
    watch.next_picture()
    assert [url for url in watch.asked if url.endswith("/story")] == told, "the whole story was asked for again"


def test_scrubbed_back_the_whole_page_shows_that_moment(look: Look) -> None:
    watch = look()
    # What the step before left may have been cancelled since.
    before = watch.page.evaluate("window.pageframeState().step")
    watch.send_many(5, "mixed", 48)
    watch.wait("document.querySelectorAll('.chat-card.over').length === 5")
    watch.wait_idle()
    records = watch.get("/inspect/steps")["steps"]
    noted = {record["step"]: record["blocks"] for record in records if record["step"] > before}
    watch.page.evaluate("document.activeElement.blur()")
    watch.page.keyboard.press(" ")
    watch.next_picture()
    assert watch.part("pause").inner_text() == "Go live"
    seen = {}
    for _ in range(40):
        watch.page.keyboard.press("ArrowLeft")
        watch.next_picture()
        state = watch.page.evaluate("window.pageframeState()")
        seen[state["step"]] = state["blocks"]
    busy = [step for step in seen.keys() & noted.keys() if noted[step]["used"] > 0]
    assert len(busy) >= 5
    assert {step: seen[step] for step in busy} == {step: noted[step] for step in busy}
    # Rows, totals and the summary are of the same moment as the map.
    for _ in range(60):
        if watch.page.evaluate(f"{COUNTS}.used") > 0:
            break
        watch.page.keyboard.press("ArrowRight")
        watch.next_picture()
    state = watch.page.evaluate("window.pageframeState()")
    assert watch.part("step").inner_text() == f"{state['step']:,}"
    assert f"{state['blocks']['used']} of" in summary(watch)
    figures = [int(watch.page.inner_text(f"[data-figure={name}]")) for name in ("running", "waiting")]
    assert sum(figures) == len(live_ids(watch)) > 0
    watch.page.keyboard.press(" ")
    watch.wait(f"{COUNTS}.used === 0")
    assert watch.part("pause").inner_text() == "Pause"


def test_the_tables_say_in_text_what_the_pictures_show(look: Look) -> None:
    watch = look()
    watch.send_many(2, "alone", 16)
    watch.wait("document.querySelectorAll('.chat-card.over').length === 2")
    watch.wait_idle()
    for summary_text in ("Blocks as a table", "Steps as a table"):
        watch.page.locator("summary", has_text=summary_text).press("Enter")
    watch.wait("document.querySelectorAll('tbody').values().every((body) => body.children.length > 0)")
    blocks = watch.part("map-table").locator("tbody tr").all_inner_texts()
    states = watch.page.evaluate(COUNTS)
    told = dict.fromkeys(states, 0)
    for row in blocks:
        ids, state, *_ = row.split("\t")
        for part in ids.split(", "):
            first, _, last = part.partition("\N{EN DASH}")
            told[state] += int(last or first) - int(first) + 1
    assert told == states
    steps = watch.part("steps-table").locator("tbody tr").all_inner_texts()
    records = watch.get("/inspect/steps")["steps"]
    assert numbers(steps[0])[:4] == [
        records[-1][name] for name in ("step", "num_requests", "prefill_tokens", "decode_tokens")
    ]


@pytest.mark.parametrize(("theme", "width"), [("light", 1440), ("dark", 1000), ("light", 390), ("dark", 390)])
def test_both_themes_at_every_width_without_scrolling_sideways(look: Look, theme: str, width: int) -> None:
    watch = look(width=width, theme=theme)
    page = watch.page
    ground = "getComputedStyle(document.body).backgroundColor"
    red = int(re.findall(r"\d+", page.evaluate(ground))[0])
    assert (red > 128) == (theme == "light")
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    for name in ("summary", "map", "timeline", "requests", "prefixes", "totals", "chat"):
        box = watch.part(name).bounding_box()
        assert box["width"] > 250
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    watch.part("theme").click()
    assert (int(re.findall(r"\d+", page.evaluate(ground))[0]) > 128) == (theme == "dark")
    page.reload()
    page.wait_for_selector("#page[data-ready=yes]")
    assert (int(re.findall(r"\d+", page.evaluate(ground))[0]) > 128) == (theme == "dark"), "the choice is forgotten"


def test_every_control_has_a_name_and_takes_the_keyboard(look: Look) -> None:
    watch = look()
    nameless = watch.page.evaluate(
        """() => [...document.querySelectorAll('button, input, select, textarea, canvas[role]')]
          .filter((node) => !(node.getAttribute('aria-label') || node.textContent.trim() || node.labels?.length))
          .map((node) => node.outerHTML)"""
    )
    assert nameless == []
    assert watch.page.evaluate("document.querySelector('#summary-list').getAttribute('aria-live')") == "polite"
    reached = set()
    for _ in range(40):
        watch.page.keyboard.press("Tab")
        reached.add(watch.page.evaluate("document.activeElement.dataset.testid || document.activeElement.id"))
    assert reached >= {"pause", "theme", "map-area", "scrubber", "chat-text", "many-send", "totals-window"}


def test_what_people_write_stays_text(look: Look) -> None:
    watch = look()
    watch.page.fill("#chat-max-tokens", "4")
    watch.page.fill("[data-testid=chat-text]", "<img src=x onerror=\"document.title='taken over'\"><b>bold</b>")
    watch.part("chat-send").click()
    watch.wait("document.querySelector('.chat-card.over') !== null")
    assert "<b>bold</b>" in watch.part("chat-cards").inner_text()
    assert watch.page.locator(".chat-card b, .chat-card img").count() == 0
    assert watch.page.title() == "Pageframe dashboard"


@pytest.mark.parametrize(("status", "said"), [(401, "The admin key is needed"), (503, "The connection is lost")])
def test_a_lost_connection_is_told_and_made_anew(look: Look, status: int, said: str) -> None:
    watch = look()
    page = watch.page
    refusals = []

    def refuse(route: Any) -> None:
        refusals.append(route.request.url)
        route.fulfill(status=status, json={"error": {"message": "not now"}})

    page.route("**/inspect/live", refuse)
    page.reload()
    page.wait_for_selector("[data-testid=banner]:not([hidden])")
    banner = watch.part("banner").inner_text()
    assert said in banner
    assert "not now" in banner
    page.unroute("**/inspect/live")
    page.wait_for_selector("#page[data-ready=yes]")
    assert watch.part("banner").is_hidden()
    assert watch.part("status").inner_text() == "Connected"
    assert refusals
    # The browser itself notes each refused request; nothing of the page's own comes beside.
    assert all("Failed to load resource" in complaint for complaint in watch.complaints)
    watch.complaints.clear()
