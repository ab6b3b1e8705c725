// The one connection to /inspect/live: kept up for as long as the page lives. Knows nothing of what frames mean.

import { errorText, readEvents } from "./sse.js";

/** The server says something at least every 5 s. */
const SILENCE_MS = 15_000;
const FIRST_RETRY_MS = 500;
const LONGEST_RETRY_MS = 15_000;

/**
 * Reads frames for ever.
 * `onFrame(frame)` gets each; a frame that does not follow the one before ends the connection, and a new one begins
 * with a full frame. `onStatus({state, detail})`: state is "connecting", "live", "denied" or "lost".
 */
export async function follow(url, onFrame, onStatus) {
  let wait = FIRST_RETRY_MS;
  for (;;) {
    onStatus({ state: "connecting", detail: "" });
    let failure;
    try {
      await readOnce(url, onFrame, () => {
        wait = FIRST_RETRY_MS;
        onStatus({ state: "live", detail: "" });
      });
      failure = { state: "lost", detail: "the server closed the connection" };
    } catch (error) {
      failure = { state: error instanceof Denied ? "denied" : "lost", detail: reason(error) };
    }
    onStatus({ ...failure, retry: wait });
    await new Promise((done) => setTimeout(done, wait));
    wait = Math.min(2 * wait, LONGEST_RETRY_MS);
  }
}

class Denied extends Error {}

class Gap extends Error {}

/** Until the connection ends. `onOpen` is called with the first frame. */
async function readOnce(url, onFrame, onOpen) {
  const abort = new AbortController();
  let watch = 0;
  const heard = () => {
    clearTimeout(watch);
    watch = setTimeout(() => abort.abort(new Error(`nothing was heard for ${SILENCE_MS / 1000} s`)), SILENCE_MS);
  };
  heard();
  try {
    const response = await fetch(url, { signal: abort.signal, headers: { accept: "text/event-stream" } });
    if (response.status === 401 || response.status === 403) throw new Denied(await errorText(response));
    if (!response.ok) throw new Error(await errorText(response));
    let last = null;
    for await (const { event, data } of readEvents(response, heard)) {
      // The server drops frames for those who do not keep up, and says so.
      if (event === "gap") throw new Gap("the page could not keep up");
      if (event !== "frame") continue;
      const frame = JSON.parse(data);
      if (!frame.full && frame.frame !== last + 1) throw new Gap("frames are missing");
      if (last === null) onOpen();
      last = frame.frame;
      onFrame(frame);
    }
  } finally {
    clearTimeout(watch);
    abort.abort();
  }
}

function reason(error) {
  // fetch says nothing but "Failed to fetch" where nobody listens.
  return error instanceof TypeError ? "the server cannot be reached" : error.message;
}
