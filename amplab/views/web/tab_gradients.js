// The tab of gradients: the histogram of their exponents with a table of the layers, or a heat map of the layers over the run.

import { drawSoon, palette } from "./canvas.js";
import { choices, h, write } from "./elements.js";
import { heatText, HeatMap, shade } from "./heat_map.js";
import { binAt, GradientHistogram, lostAt, nextBin, readingText } from "./histogram.js";
import { percent, power } from "./numbers.js";
import { onTheme } from "./page.js";
import { drawnAsSvg, svgPage, TAKE_CHARTS } from "./svg_pen.js";
import { table } from "./tables.js";

const SLIDE_MS = 250; // ms in which the ranges move to a new scale
const LOWEST_TRIED = -8;
const HIGHEST_TRIED = 40;

/** The histogram below its legend. A slider tries another scale; without it the ranges follow that of the run. */
function histogramBox() {
  const legend = h("output", { class: "amp-now", "data-reading": "lost", "aria-live": "off" });
  const key = (name, text) => h("span", { class: "amp-key" }, h("i", { class: `amp-swatch amp-swatch-${name}` }), text);
  const head = h("div", { class: "amp-chart-head" }, key("kept", "normal"), key("subnormal", "subnormal: fewer bits"), key("lost", "lost"));
  const canvas = h("canvas", { class: "amp-canvas amp-histogram", role: "img", tabindex: "0" });
  const spoken = h("span", { class: "amp-sr", role: "status" });
  const slider = h("input", { type: "range", min: LOWEST_TRIED, max: HIGHEST_TRIED, step: 1, "aria-label": "Try a loss scale" });
  const shownScale = h("output", { class: "amp-try-scale" });
  const follow = h("button", { type: "button", class: "amp-mini", title: "Use the loss scale of the run again" }, "as in the run");
  const box = h("div", { class: "amp-chart" }, head, canvas, legend, h("div", { class: "amp-try" }, "Try a scale", slider, shownScale, follow), spoken);
  const chart = new GradientHistogram(canvas);
  let curves = null;
  let reading = null;
  let tried = null; // log2 of the scale of the slider
  let slide = null; // { from, to, began }
  const target = () => tried ?? curves.scale;
  const isStill = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
  const position = (now) => {
    if (slide === null || slide.to !== target()) slide = { from: slide === null || isStill ? target() : place(now), to: target(), began: now };
    return place(now);
  };
  const place = (now) => {
    const share = Math.min((now - slide.began) / SLIDE_MS, 1);
    return slide.from + (slide.to - slide.from) * share * (2 - share);
  };
  const { soon, cancel } = drawSoon(canvas, () => {
    if (curves === null) return;
    const at = position(performance.now());
    chart.draw(curves, palette(box), reading, at);
    const lost = lostAt(curves, target());
    write(legend, reading === null ? `scaled by ${power(2 ** target())}: ${percent(lost.zero)} become zero, ${percent(lost.inf)} infinite` : readingText(curves, reading, target()));
    write(shownScale, power(2 ** target()));
    if (tried === null) slider.value = Math.round(curves.scale);
    slider.setAttribute("aria-valuetext", `${power(2 ** target())}: ${percent(lost.zero)} become zero, ${percent(lost.inf)} infinite`);
    follow.disabled = tried === null;
    if (at !== slide.to) soon();
  });
  const read = (bin) => { reading = bin; soon(); };
  slider.addEventListener("input", () => { tried = Number(slider.value); soon(); });
  follow.addEventListener("click", () => { tried = null; soon(); });
  canvas.addEventListener("pointermove", (event) => curves && read(binAt(curves, event.offsetX, chart.width)));
  canvas.addEventListener("pointerleave", () => read(null));
  canvas.addEventListener("blur", () => read(null));
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") read(null);
    if (!move || curves === null) return;
    event.preventDefault();
    read(nextBin(curves, reading, move));
    write(spoken, readingText(curves, reading, target()));
  });
  const sized = new ResizeObserver(soon);
  sized.observe(canvas);
  const cleanups = [onTheme(soon), cancel, () => sized.disconnect()];
  const show = (payload) => {
    ({ curves } = payload);
    canvas.setAttribute("aria-label", payload.description);
    soon();
  };
  const draw = (colors) => curves && chart.draw(curves, colors, null, target());
  return { box, show, soon, chart, draw, end: () => { for (const cleanup of cleanups) cleanup(); } };
}

/** The heat map, with the cell under the pointer or the arrow keys in words; a click selects its step. */
function heatBox(select) {
  const now = h("output", { class: "amp-now", "aria-live": "off" });
  const canvas = h("canvas", { class: "amp-canvas amp-heat", role: "img", tabindex: "0", "aria-label": "Share of each layer's gradient that float16 loses, over the run" });
  const spoken = h("span", { class: "amp-sr", role: "status" });
  const steps = [0, 1, 10, 100].flatMap((share) => [h("i", { class: "amp-heat-key", style: `opacity: ${shade(share)}` }), `${share} %`]);
  const note = h("span", { class: "amp-note" });
  const box = h("div", { class: "amp-chart" }, h("div", { class: "amp-chart-head" }, h("span", { class: "amp-key" }, "lost", steps), note, now), canvas, spoken);
  const chart = new HeatMap(canvas);
  let map = null;
  let reading = null;
  let selected = null;
  const { soon, cancel } = drawSoon(canvas, () => {
    if (map === null) return;
    if (reading && (reading.layer >= map.layers.length || reading.column >= map.steps.length)) reading = null;
    chart.draw(map, palette(box), { reading, selected });
    write(now, reading ? heatText(map, reading) : "");
  });
  const read = (cell) => { reading = cell; soon(); };
  canvas.addEventListener("pointermove", (event) => map && read(chart.cellAt(map, event.offsetX, event.offsetY)));
  canvas.addEventListener("pointerleave", () => read(null));
  canvas.addEventListener("blur", () => read(null));
  canvas.addEventListener("click", () => reading && select(map.steps[reading.column]));
  canvas.addEventListener("keydown", (event) => {
    const [across, down] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [0, 0];
    if (event.key === "Escape") read(null);
    if (event.key === "Enter" && reading) select(map.steps[reading.column]);
    if (!(across || down) || !map?.steps.length) return;
    event.preventDefault();
    read(movedCell(map, reading, across, down));
    write(spoken, heatText(map, reading));
  });
  const sized = new ResizeObserver(soon);
  sized.observe(canvas);
  const ends = [onTheme(soon), cancel, () => sized.disconnect()];
  const show = (heat) => {
    map = heat;
    write(note, heat.left_out ? `the ${heat.layers.length} layers that lose most` : "");
    soon();
  };
  const draw = (colors) => map && chart.draw(map, colors, { reading: null, selected: null });
  return { box, show, soon, chart, draw, select: (step) => { selected = step; soon(); }, ends };
}

/** The cell that an arrow key moves to; from the last column of the left map to the right one and back. */
function movedCell(map, cell, across, down) {
  if (cell === null) return { side: 0, kind: "underflow", layer: 0, column: map.steps.length - 1 };
  const total = 2 * map.steps.length;
  const at = Math.min(Math.max(cell.side * map.steps.length + cell.column + across, 0), total - 1);
  const side = at >= map.steps.length ? 1 : 0;
  const layer = Math.min(Math.max(cell.layer + down, 0), map.layers.length - 1);
  return { side, kind: side ? "overflow" : "underflow", layer, column: at - side * map.steps.length };
}

export function gradientsPanel({ select }) {
  const summary = h("span", { class: "amp-summary" });
  const fits = h("p", { class: "amp-note amp-fits" });
  const waiting = h("p", { class: "amp-note amp-waiting" }, "Waiting for the gradients …");
  const histogram = histogramBox();
  const heat = heatBox(select);
  const layers = table("Gradients by layer: the share that float16 loses",
    [["Layer"], ["Flushed: unscaled → scaled", "amp-num amp-pair"], ["Overflow", "amp-num"], ["Zeros", "amp-num"]]);
  layers.box.classList.add("amp-narrow");
  const content = h("div", { class: "amp-gradients" }, histogram.box, h("div", { class: "amp-layers" }, layers.box, fits));
  const views = { now: content, run: heat.box };
  let view = "now";
  let isReady = false;
  const arrange = () => {
    choice.show(view);
    for (const [name, each] of Object.entries(views)) each.hidden = !isReady || name !== view;
    histogram.soon();
    heat.soon();
  };
  const choice = choices("View", ["now", "run"], (chosen) => { view = chosen; arrange(); }, { now: "One step", run: "Over the run" });
  const box = h("div", { class: "amp-panel", "data-panel": "gradients" }, h("div", { class: "amp-bar" }, choice.group, summary), waiting, content, heat.box);
  const row = (each) => h("tr", {}, h("td", {}, h("code", {}, each.name)),
    [each.flushed, each.overflowed, each.zeros].map((text) => h("td", { class: "amp-num" }, text)));
  const show = (payload) => {
    isReady = Boolean(payload.curves);
    waiting.hidden = isReady;
    arrange();
    if (!isReady) return;
    write(summary, payload.summary);
    write(fits, payload.fits);
    layers.body.replaceChildren(...payload.layers.map(row));
    histogram.show(payload);
    heat.show(payload.heat);
  };
  const pictures = { histogram: [histogram, () => `Gradients, ${summary.textContent.split(":")[0].toLowerCase()}`], heat: [heat, () => "The share of each gradient that float16 loses, over the run"] };
  const give = ({ detail }) => {
    const [drawn, title] = pictures[detail.which] ?? [];
    if (!drawn || !detail.within.contains(box) || !isReady || !drawn.chart.canvas.clientWidth) return;
    const colors = palette(box);
    const elements = drawnAsSvg(drawn.chart, () => drawn.draw(colors), detail.which);
    const { width, height } = drawn.chart;
    detail.give(svgPage([{ title: title(), width, height, elements }], colors, detail.within.querySelector(".amp-config")?.textContent ?? ""));
  };
  document.addEventListener(TAKE_CHARTS, give);
  const end = () => {
    document.removeEventListener(TAKE_CHARTS, give);
    histogram.end();
    for (const each of heat.ends) each();
  };
  return { box, show, open: arrange, select: heat.select, end };
}
