// Totals over time: blocks by kind, hit rate, queue, latencies. A sample at most every half second, plots by uPlot.

import { count, duration, element, percent, rate, setText } from "./format.js";
import { themeColors } from "./map_paint.js";
import uPlot from "./vendor/uPlot.esm.js";

const SAMPLE_SECONDS = 0.5;
const KEEP_SAMPLES = 1800;
const PLOT_HEIGHT = 120;
const DRAW_EVERY_MS = 250;

const part = (number, total) => (total ? (100 * number) / total : 0);
const milliseconds = (seconds) => (seconds === null || seconds === undefined ? null : 1000 * seconds);

/** Each plot: its lines, each with its value of a moment, and how values are told. */
const PLOTS = [
  {
    title: "Blocks in use",
    unit: "%",
    lines: [
      { name: "used", color: "used", of: ({ kv }) => part(kv.blocks.used, kv.num_blocks), fill: true },
      { name: "cached", color: "cached", of: ({ kv }) => part(kv.blocks.cached, kv.num_blocks), dash: [6, 3] },
      { name: "pinned", color: "pinned", of: ({ kv }) => part(kv.blocks.pinned, kv.num_blocks), dash: [2, 2] },
    ],
    top: 100,
  },
  {
    title: "Prompt tokens from the cache",
    unit: "%",
    lines: [
      {
        name: "hit rate",
        color: "decode",
        of: ({ kv }) =>
          kv.prefix_cache.lookup_tokens ? part(kv.prefix_cache.hit_tokens, kv.prefix_cache.lookup_tokens) : null,
        fill: true,
      },
    ],
    top: 100,
  },
  {
    title: "Requests",
    unit: "",
    lines: [
      { name: "running", color: "used", of: ({ kv }) => kv.requests.running, fill: true },
      { name: "waiting", color: "preempt", of: ({ kv }) => kv.requests.waiting, dash: [6, 3] },
    ],
  },
  {
    title: "Tokens per second",
    unit: "",
    lines: [{ name: "output", color: "decode", of: ({ tokensPerSecond }) => tokensPerSecond, fill: true }],
  },
  latencyPlot("Time to first token", "ttft"),
  latencyPlot("Time between tokens", "itl"),
];

function latencyPlot(title, name) {
  const line = (which, color, dash) => ({
    name: which,
    color,
    dash,
    of: ({ latency }) => milliseconds(latency[name][which]),
  });
  return {
    title,
    unit: "ms",
    lines: [line("p50", "used"), line("p95", "prefill", [6, 3]), line("p99", "pinned", [2, 2])],
  };
}

export class Totals {
  constructor(root, figures) {
    this.figures = figures;
    this.box = root.querySelector(".plots");
    this.window = root.querySelector("#totals-window");
    this.samples = [];
    this.plots = [];
    this.drawnAt = -Infinity;
    this.window.addEventListener("change", () => {
      this.drawnAt = -Infinity;
      if (this.view) this.render(this.view);
    });
    new ResizeObserver(() => this.resize()).observe(this.box);
  }

  reset() {
    this.samples = [];
  }

  /** Takes a sample of the newest moment, where it is time for one. */
  sample(moment) {
    const last = this.samples[this.samples.length - 1];
    if (last && moment.now - last.now < SAMPLE_SECONDS) return;
    this.samples.push({ now: moment.now, values: PLOTS.map((plot) => plot.lines.map((line) => line.of(moment))) });
    if (this.samples.length > KEEP_SAMPLES) this.samples.shift();
  }

  setTheme() {
    this.colors = themeColors();
    for (const { plot } of this.plots) plot.destroy();
    this.box.replaceChildren();
    this.plots = PLOTS.map((description) => this.makePlot(description));
    this.drawnAt = -Infinity;
    if (this.view) this.render(this.view);
  }

  makePlot(description) {
    const values = element("div", { class: "plot-values" });
    const holder = element("div", { class: "plot-canvas", role: "img" });
    const figure = element("figure", {}, element("figcaption", { text: description.title }), values, holder);
    this.box.append(figure);
    const keys = description.lines.map((line) => {
      const text = element("span");
      const key = element("span", { class: "key", "aria-hidden": "true" });
      key.style.borderTopColor = this.colors[line.color];
      key.style.borderTopStyle = !line.dash ? "solid" : line.dash[0] > 2 ? "dashed" : "dotted";
      values.append(element("span", { class: "plot-value" }, key, text));
      return text;
    });
    const plot = new uPlot(this.options(description), [[], ...description.lines.map(() => [])], holder);
    return { description, holder, keys, plot };
  }

  options(description) {
    const { colors } = this;
    const axis = {
      stroke: colors.muted,
      grid: { stroke: colors.line, width: 1 },
      ticks: { show: false },
      font: "11px system-ui",
    };
    return {
      width: Math.max(120, this.plotWidth()),
      height: PLOT_HEIGHT,
      legend: { show: false },
      cursor: { show: false },
      scales: {
        x: { time: false },
        y: { range: (_, low, high) => [0, description.top ?? Math.max(1, (high ?? 1) * 1.15)] },
      },
      axes: [
        { ...axis, size: 22, space: 70, values: (_, ticks) => ticks.map((tick) => (tick === 0 ? "now" : `${tick} s`)) },
        {
          ...axis,
          size: 46,
          values: (_, ticks) =>
            ticks.map((tick) => `${tick.toLocaleString("en-GB")}${description.unit === "%" ? "%" : ""}`),
        },
      ],
      series: [
        {},
        ...description.lines.map((line) => ({
          stroke: colors[line.color],
          width: 1.5,
          dash: line.dash,
          fill: line.fill ? `${colors[line.color]}26` : undefined,
          points: { show: false },
        })),
      ],
    };
  }

  plotWidth() {
    const style = getComputedStyle(this.box);
    const columns = style.gridTemplateColumns.split(" ").length;
    const inner = this.box.clientWidth - (columns - 1) * parseFloat(style.columnGap || "0");
    return Math.floor(inner / columns);
  }

  resize() {
    const width = this.plotWidth();
    if (width <= 0) return;
    for (const { plot } of this.plots) if (plot.width !== width) plot.setSize({ width, height: PLOT_HEIGHT });
  }

  render(view) {
    this.view = view;
    const { moment } = view;
    this.renderFigures(moment);
    const time = performance.now();
    if (view.isLive && time - this.drawnAt < DRAW_EVERY_MS) return;
    this.drawnAt = time;
    const from = moment.now - Number(this.window.value);
    // Up to the moment in view: what came later belongs to another picture.
    const shown = this.samples.filter((sample) => sample.now >= from && sample.now <= moment.now);
    const times = shown.map((sample) => sample.now - moment.now);
    this.plots.forEach(({ description, holder, keys, plot }, index) => {
      const lines = description.lines.map((_, line) => shown.map((sample) => sample.values[index][line]));
      plot.setData([times, ...lines], false);
      plot.setScale("x", { min: from - moment.now, max: 0 });
      const told = description.lines.map((line) => `${line.name} ${tell(line.of(moment), description.unit)}`);
      told.forEach((text, line) => setText(keys[line], text));
      holder.setAttribute(
        "aria-label",
        `${description.title} over the last ${this.window.value} seconds; now: ${told.join(", ")}`,
      );
    });
  }

  renderFigures({ kv, latency, tokensPerSecond }) {
    const { lookup_tokens: looked, hit_tokens: hit } = kv.prefix_cache;
    const texts = {
      used: percent(kv.blocks.used, kv.num_blocks),
      hits: percent(hit, looked),
      running: count(kv.requests.running),
      waiting: count(kv.requests.waiting),
      ttft: duration(latency.ttft.p50),
      itl: duration(latency.itl.p50),
      speed: rate(tokensPerSecond),
      saved: count(kv.blocks_saved_by_sharing),
    };
    for (const [name, text] of Object.entries(texts))
      setText(this.figures.querySelector(`[data-figure=${name}]`), text);
  }
}

function tell(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "ms") return duration(value / 1000);
  if (unit === "%") return `${Math.round(value)}%`;
  return Number.isInteger(value) ? count(value) : rate(value);
}
