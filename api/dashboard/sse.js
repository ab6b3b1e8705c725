// Server-sent events of a fetch response. EventSource would not do: it hides the status of a refusal and cannot POST.

/**
 * The events of a response's body, one by one: {event, data}. Ends where the body ends.
 * `onBytes` is called whenever anything came, comments included: a silent connection is a lost one.
 */
export async function* readEvents(response, onBytes = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = { event: "message", data: [] };
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      onBytes();
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line === "") {
          if (event.data.length) yield { event: event.event, data: event.data.join("\n") };
          event = { event: "message", data: [] };
        } else {
          takeField(event, line);
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function takeField(event, line) {
  const colon = line.indexOf(":");
  const name = colon < 0 ? line : line.slice(0, colon);
  const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
  if (name === "data") event.data.push(value);
  else if (name === "event") event.event = value;
}

/** What an error response says, in one line. */
export async function errorText(response) {
  try {
    const body = await response.json();
    return body.error?.message ?? `the server answered ${response.status}`;
  } catch {
    return `the server answered ${response.status}`;
  }
}
