// The page: frames from the one connection go into the store, and what they changed is drawn with the next picture.

import { Chats } from "./chat.js";
import { follow as followServer } from "./connection.js";
import { Follow } from "./follow.js";
import { count, element, idElement, nodes, setText } from "./format.js";
import { PoolMap } from "./map.js";
import { PrefixTree } from "./prefixes.js";
import { RequestRows } from "./requests.js";
import { Store } from "./state.js";
import { Story } from "./story.js";
import { summarise } from "./summary.js";
import { startTheme } from "./theme.js";
import { Timeline } from "./timeline.js";
import { Totals } from "./totals.js";

const SUMMARY_EVERY_MS = 1000;
/** The rate of drawing is that of the last so many seconds. */
const RATE_SECONDS = 2;

const byId = (id) => document.getElementById(id);
const store = new Store();
const followed = new Follow();
const map = new PoolMap(byId("map"), followed, draw);
const rows = new RequestRows(byId("requests"), openStory, followRequest);
const story = new Story(byId("story"), followRequest, closeStory);
const timeline = new Timeline(
  byId("timeline"),
  (step) => then(() => store.seekStep(step)),
  (number) => then(() => store.seek(number)),
);
const prefixes = new PrefixTree(byId("prefixes"), followPrefix);
const totals = new Totals(byId("totals"), byId("figures"));
new Chats(byId("chat"), followRequest);

const drawTimes = [];
let framesTaken = 0;
let restartsSeen = 0;
let summaryDrawn = -Infinity;
let summaryPlanned = 0;
let isPlanned = false;
let isConnected = false;
let heardAt = 0;

/** Frames taken from the server, and how often the page was drawn anew a second. */
window.pageframeStats = {
  get frames() {
    return framesTaken;
  },
  get updatesPerSecond() {
    const since = performance.now() - 1000 * RATE_SECONDS;
    return drawTimes.filter((time) => time >= since).length / RATE_SECONDS;
  },
};
/** The step in view, and blocks by state counted from the cells as drawn; null before the first picture. */
window.pageframeState = () => (drawnStep === null ? null : { step: drawnStep, blocks: map.painter.counts() });
let drawnStep = null;

function draw() {
  if (isPlanned) return;
  isPlanned = true;
  requestAnimationFrame(() => {
    isPlanned = false;
    if (store.view !== null) drawNow(store.view);
  });
}

function drawNow(moment) {
  const view = { moment, isLive: store.isLive };
  map.render(moment);
  drawnStep = moment.step;
  rows.render(moment);
  story.render(moment, store.isLive);
  timeline.render(store);
  totals.render(view);
  prefixes.render(view);
  drawHeader(moment);
  drawFollowed(moment);
  drawSummary(moment);
  byId("page").dataset.ready = "yes";
  drawTimes.push(performance.now());
  if (drawTimes.length > 200) drawTimes.splice(0, 100);
}

function drawHeader(moment) {
  setText(byId("step"), count(moment.step));
  const behind = store.live.now - moment.now;
  setText(byId("when"), store.isLive ? "now" : `${behind.toFixed(1)} s ago`);
  const pause = byId("pause");
  setText(pause, store.isLive ? "Pause" : "Go live");
  pause.setAttribute("aria-pressed", String(!store.isLive));
  document.body.classList.toggle("paused", !store.isLive);
  byId("step-back").disabled = !store.isLive && store.position <= store.history.first;
  byId("step-on").disabled = store.isLive;
}

function drawFollowed(moment) {
  byId("followed").hidden = !followed.isActive;
  if (!followed.isActive) return;
  const { id, text } = followed.describe(moment);
  const line = byId("followed-text");
  if (line.dataset.text === `${id}${text}`) return;
  line.dataset.text = `${id}${text}`;
  line.replaceChildren("Following ", ...(id === null ? [] : [idElement(id), ": "]), text);
}

function drawSummary(moment) {
  const now = performance.now();
  const rest = summaryDrawn + SUMMARY_EVERY_MS - now;
  clearTimeout(summaryPlanned);
  if (store.isLive && rest > 0) {
    // Should nothing come any more, the last word is still told.
    summaryPlanned = setTimeout(draw, rest);
    return;
  }
  summaryDrawn = now;
  const list = byId("summary-list");
  const sentences = summarise(moment);
  while (list.children.length > sentences.length) list.lastChild.remove();
  sentences.forEach((pieces, index) => {
    const item = element("li", {}, ...nodes(pieces));
    const before = list.children[index];
    // Only what changed is put in, so that only that is read out.
    if (before === undefined) list.append(item);
    else if (before.textContent !== item.textContent) before.replaceWith(item);
  });
}

function then(change) {
  change();
  summaryDrawn = -Infinity;
  draw();
}

function openStory(id) {
  story.open(id);
  rows.setOpened(id);
  draw();
}

function closeStory(id) {
  rows.setOpened(null);
  rows.focus(id);
}

function followRequest(id) {
  followed.request(id);
  draw();
}

function followPrefix(blocks, step) {
  followed.prefixOf(blocks, step);
  draw();
}

function togglePause() {
  then(() => (store.isLive ? store.pause() : store.resume()));
}

/** Keys of the whole page; what takes keys itself is left alone. */
function press(event) {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  const takesKeys = "input, textarea, select, button, summary, a, [role=row], [role=application]";
  if (event.target instanceof Element && event.target.closest(takesKeys)) return;
  if (event.key === " ") togglePause();
  else if (event.key === "ArrowLeft") then(() => store.move(event.shiftKey ? -10 : -1));
  else if (event.key === "ArrowRight") then(() => store.move(event.shiftKey ? 10 : 1));
  else if (event.key === "Escape") then(() => followed.stop());
  else return;
  event.preventDefault();
}

function showStatus({ state, detail, retry }) {
  const words = { connecting: "Connecting", live: "Connected", denied: "No access", lost: "Connection lost" };
  const pill = byId("status");
  pill.dataset.state = state;
  setText(pill, words[state]);
  const banner = byId("banner");
  if (state === "live") banner.hidden = true;
  if (state !== "denied" && state !== "lost") return;
  banner.hidden = false;
  const seconds = Math.max(1, Math.round(retry / 1000));
  const again = `Next try in ${seconds} second${seconds === 1 ? "" : "s"}.`;
  setText(
    banner,
    state === "denied"
      ? `The admin key is needed to look inside: ${detail}. ${again}`
      : `The connection is lost: ${detail}. What you see is the last that was heard. ${again}`,
  );
}

function accept(frame) {
  store.accept(frame);
  heardAt = performance.now();
  framesTaken += 1;
  if (store.restarts !== restartsSeen) {
    restartsSeen = store.restarts;
    followed.stop();
    totals.reset();
    prefixes.reset();
  }
  totals.sample(store.live);
  draw();
}

/** While nothing changes no frame comes, but time goes on: rates fall, and plots move. */
function idle() {
  const seconds = (performance.now() - heardAt) / 1000;
  if (!isConnected || store.live === null || seconds < 1) return;
  store.idle(seconds);
  totals.sample(store.live);
  if (store.isLive) draw();
}

async function showModel() {
  try {
    const response = await fetch("/v1/models");
    const models = response.ok ? (await response.json()).data : [];
    setText(byId("model"), models[0]?.id ?? "");
  } catch {
    // the banner tells that the server is away
  }
}

startTheme(byId("theme"), () => {
  map.setTheme();
  rows.setTheme();
  timeline.setTheme();
  totals.setTheme();
  draw();
});
byId("pause").addEventListener("click", togglePause);
byId("step-back").addEventListener("click", () => then(() => store.move(-1)));
byId("step-on").addEventListener("click", () => then(() => store.move(1)));
byId("stop-following").addEventListener("click", () => then(() => followed.stop()));
document.addEventListener("keydown", press);
setInterval(() => prefixes.poll(draw), 250);
setInterval(idle, 1000);
followServer("/inspect/live", accept, (status) => {
  isConnected = status.state === "live";
  if (isConnected) showModel();
  showStatus(status);
});
