// Numbers, times and small DOM pieces as text. Knows nothing of what they mean.
// Everything that comes from outside goes through textContent: ids and tenants are chosen by clients.

const whole = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 0 });

/** 12345 -> "12,345"; null -> "–". */
export function count(value) {
  return value === null || value === undefined ? "–" : whole.format(value);
}

/** "1 block", "2 blocks". */
export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** A part of a whole: "41%"; "–" of nothing. */
export function percent(part, total) {
  return total > 0 ? `${Math.round((100 * part) / total)}%` : "–";
}

/** Seconds: "34 ms", "1.24 s", "3 min 5 s"; null -> "–". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds < 0.0995) return `${(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.995) return `${seconds.toFixed(2)} s`;
  if (seconds < 99.95) return `${seconds.toFixed(1)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
}

/** A rate per second: "0.42", "31.4", "312". */
export function rate(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : count(value);
}

export function bytes(number) {
  let unit = 0;
  while (number >= 1024 && unit < 4) {
    number /= 1024;
    unit += 1;
  }
  return `${number < 10 && unit ? number.toFixed(1) : Math.round(number)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

/** [3, 4, 5, 9] -> "3–5, 9". */
export function ranges(ids) {
  const parts = [];
  for (let start = 0; start < ids.length;) {
    let end = start;
    while (end + 1 < ids.length && ids[end + 1] === ids[end] + 1) end += 1;
    parts.push(end > start ? `${ids[start]}–${ids[end]}` : `${ids[start]}`);
    start = end + 1;
  }
  return parts.join(", ");
}

/** An element with attributes and children (nodes or strings). `text`, `onclick` and the like are properties. */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) continue;
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** Sets an element's text only where it differs, so that screen readers and selections are left alone. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A request's id: whole in the text; where there is little room the style sheet cuts it, but not a choice's number. */
export function idElement(id) {
  const [, head, tail] = /^(.*?)((?:-\d{1,4})*)$/s.exec(id);
  const parts = [element("span", { class: "id-head", text: head }), element("span", { text: tail })];
  return element("code", { class: "id", title: id }, ...parts);
}

const SERVER_IDS = /((?:chat)?cmpl-[0-9a-f]{32}(?:-\d+)*)/;

/** A text of the server's with the ids in it as pieces of their own: strings and {id}. */
export function pieces(text) {
  return text.split(SERVER_IDS).map((piece, index) => (index % 2 ? { id: piece } : piece));
}

/** Pieces as nodes: see `pieces`. */
export function nodes(list) {
  return list.map((piece) => (typeof piece === "string" ? piece : idElement(piece.id)));
}
