// The live view: figures, training loss, log2 of the loss scale. A frame holds the whole run, thinned for the screen, as
// one binary buffer. Nothing is polled, and no frame depends on an earlier one.

import { drawSoon, palette } from "./canvas.js";
import { GUTTER, INJECTED, LossChart, nearest, ScaleChart, SKIPPED, unpack } from "./charts.js";
import { h, write } from "./elements.js";
import { bytes, decimal, integer, power } from "./numbers.js";
import { attend, endWithKernel, onTheme, ownKeys } from "./page.js";

const FIGURES = [
  ["step", "Step", (s) => integer(s.step)],
  ["skipped", "Skipped", (s) => integer(s.skipped)],
  ["scale", "Loss scale", (s) => power(s.scale)],
  ["score", "Score", (s) => scoreText(s)],
  ["rate", "Steps/s", (s) => (s.rate === null ? "–" : integer(s.rate))],
  ["memory", "Memory", (s) => (s.memory === null ? "–" : bytes(s.memory))],
];

/** The score on held-out data: a share in percent, anything else as a number. */
export function scoreText({ score, score_is_share: isShare }) {
  if (score === null) return "–";
  return isShare ? `${(100 * score).toFixed(1)} %` : decimal(score);
}

function figures() {
  const values = FIGURES.map(([name]) => h("dd", { "data-figure": name }, "–"));
  const cells = FIGURES.map(([, label], index) => h("div", {}, h("dt", {}, label), values[index]));
  const show = (summary) => FIGURES.forEach(([name, , format], index) => {
    write(values[index], format(summary));
    cells[index].hidden = Boolean(summary.unknown?.includes(name)); // a watched run has no score
    if (name === "score" && summary.score_label) write(cells[index].firstChild, summary.score_label);
    if (name === "memory") cells[index].title = summary.memory_parts;
  });
  return { list: h("dl", { class: "amp-figures" }, cells), show };
}

function chartBox(title, label, ...extras) {
  const now = h("output", { class: "amp-now", "aria-live": "off" });
  const canvas = h("canvas", { class: "amp-canvas", role: "img", tabindex: "0", "aria-label": label });
  return { now, canvas, box: h("div", { class: "amp-chart" }, h("div", { class: "amp-chart-head" }, h("h3", {}, title), now, extras), canvas) };
}

function render({ model, el }) {
  const numbers = figures();
  const logButton = h("button", { type: "button", class: "amp-mini", "aria-pressed": "false", title: "Draw the loss on a logarithmic axis" }, "log");
  const loss = chartBox("Training loss", "Training loss over steps", logButton);
  const scale = chartBox("Loss scale, log₂", "Loss scale over steps, as a power of two",
    h("span", { class: "amp-key" }, h("i", { class: "amp-tri" }), "skipped step"),
    h("span", { class: "amp-key" }, h("i", { class: "amp-tri amp-tri-hollow" }), "injected"));
  const modes = h("p", { class: "amp-modes" });
  const root = h("section", { class: "amplab amp-live", "aria-label": "Live run" }, numbers.list, loss.box, scale.box, modes);
  el.append(root);

  const live = { rows: [], levels: [], low: 0, high: 100, logarithmic: false, reading: null, scale: 0, palette: null };
  const charts = [new LossChart(loss.canvas), new ScaleChart(scale.canvas)];
  const { soon, cancel } = drawSoon(loss.canvas, () => {
    live.high = Math.max(100, live.rows.at(-1)?.[0] ?? 0);
    live.palette = palette(root); // the style sheet arrives after the first render
    for (const chart of charts) chart.draw(live);
    readout(live, loss.now, scale.now);
  });

  const receive = (message, buffers) => {
    if (message.kind !== "frame") return;
    live.rows = unpack(buffers[0]);
    live.levels = message.levels;
    live.scale = message.summary.scale;
    numbers.show(message.summary);
    write(modes, message.summary.modes);
    soon();
  };
  model.on("msg:custom", receive);
  logButton.addEventListener("click", () => {
    live.logarithmic = !live.logarithmic;
    logButton.setAttribute("aria-pressed", live.logarithmic);
    soon();
  });
  for (const chart of charts) listenForReading(chart, live, soon);
  const sized = new ResizeObserver(soon);
  for (const { canvas } of charts) sized.observe(canvas);
  const cleanups = [onTheme(soon), ownKeys(root), attend(model), endWithKernel(model, root)];
  return () => {
    model.off("msg:custom", receive);
    sized.disconnect();
    cancel();
    for (const cleanup of cleanups) cleanup();
  };
}

/** The pointer and the arrow keys move a reading line on both charts. */
function listenForReading(chart, live, soon) {
  const { canvas } = chart;
  canvas.addEventListener("pointermove", (event) => {
    if (!live.rows.length || !chart.x) return;
    const share = (event.offsetX - GUTTER.left) / (chart.width - GUTTER.left - GUTTER.right);
    live.reading = nearest(live.rows, live.low + share * (live.high - live.low))[0];
    soon();
  });
  const leave = () => { live.reading = null; soon(); };
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("blur", leave);
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") leave();
    if (!move || !live.rows.length) return;
    event.preventDefault();
    const from = live.reading ?? live.rows.at(-1)[0];
    const jump = Math.max(1, Math.round((live.high - live.low) / 200));
    live.reading = nearest(live.rows, from + move * jump)[0];
    soon();
  });
}

function readout(live, lossNow, scaleNow) {
  if (!live.rows.length) {
    write(lossNow, "");
    write(scaleNow, "");
    return;
  }
  const row = live.reading === null ? live.rows.at(-1) : nearest(live.rows, live.reading);
  const at = live.reading === null ? "" : `step ${integer(row[0])}: `;
  const end = row[3] & SKIPPED ? (row[3] & INJECTED ? " (skipped, injected)" : " (skipped)") : "";
  write(lossNow, at + decimal(row[1], 3));
  // Without a reading line it is the scale of the next step, which the figure above shows too.
  write(scaleNow, live.reading === null ? power(live.scale) : at + power(row[2]) + end);
}

export default { render };
