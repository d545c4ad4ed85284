// The tab of gradients: the histogram of their exponents, with a table of the layers next to it.

import { drawSoon, palette } from "./canvas.js";
import { h, write } from "./elements.js";
import { binAt, GradientHistogram, nextBin, readingTexts, zoneOf } from "./histogram.js";
import { onTheme } from "./page.js";
import { table } from "./tables.js";

/** The histogram below its legend, which shows the values of the column under the pointer or the arrow keys. */
function histogramBox() {
  const values = ["unscaled", "scaled", "magnitude"].map((name) => h("output", { class: "amp-now", "data-reading": name, "aria-live": "off" }));
  const key = (name, value) => h("span", { class: "amp-key" }, h("i", { class: `amp-swatch amp-swatch-${name}` }), name, value);
  const head = h("div", { class: "amp-chart-head" }, key("unscaled", values[0]), key("scaled", values[1]), values[2]);
  const canvas = h("canvas", { class: "amp-canvas amp-histogram", role: "img", tabindex: "0" });
  const spoken = h("span", { class: "amp-sr", role: "status" });
  const box = h("div", { class: "amp-chart" }, head, canvas, spoken);
  const chart = new GradientHistogram(canvas);
  let curves = null;
  let reading = null;
  const { soon, cancel } = drawSoon(canvas, () => {
    if (curves === null) return;
    chart.draw(curves, palette(box), reading);
    const texts = readingTexts(curves, reading);
    values.forEach((value, index) => { write(value, texts[index]); });
  });
  const read = (bin) => { reading = bin; soon(); };
  canvas.addEventListener("pointermove", (event) => curves && read(binAt(curves, event.offsetX, chart.width)));
  canvas.addEventListener("pointerleave", () => read(null));
  canvas.addEventListener("blur", () => read(null));
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") read(null);
    if (!move || curves === null) return;
    event.preventDefault();
    read(nextBin(curves, reading, move));
    const [unscaled, scaled, magnitude] = readingTexts(curves, reading);
    write(spoken, `${magnitude} (${zoneOf(curves, reading)}): unscaled ${unscaled}, scaled ${scaled}`);
  });
  const sized = new ResizeObserver(soon);
  sized.observe(canvas);
  const cleanups = [onTheme(soon), cancel, () => sized.disconnect()];
  const show = (payload) => {
    ({ curves } = payload);
    canvas.setAttribute("aria-label", payload.description);
    soon();
  };
  return { box, show, soon, end: () => { for (const cleanup of cleanups) cleanup(); } };
}

export function gradientsPanel() {
  const summary = h("span", { class: "amp-summary" });
  const waiting = h("p", { class: "amp-note amp-waiting" }, "Waiting for the gradients …");
  const histogram = histogramBox();
  const layers = table("Gradients by layer: the share that float16 loses",
    [["Layer"], ["Flushed: unscaled → scaled", "amp-num amp-pair"], ["Overflow", "amp-num"], ["Zeros", "amp-num"]]);
  layers.box.classList.add("amp-narrow");
  const content = h("div", { class: "amp-gradients" }, histogram.box, layers.box);
  const box = h("div", { class: "amp-panel", "data-panel": "gradients" }, h("div", { class: "amp-bar" }, summary), waiting, content);
  const row = (each) => h("tr", {}, h("td", {}, h("code", {}, each.name)),
    [each.flushed, each.overflowed, each.zeros].map((text) => h("td", { class: "amp-num" }, text)));
  const show = (payload) => {
    waiting.hidden = Boolean(payload.curves);
    content.hidden = !payload.curves;
    if (!payload.curves) return;
    write(summary, payload.summary);
    layers.body.replaceChildren(...payload.layers.map(row));
    histogram.show(payload);
  };
  return { box, show, open: histogram.soon, end: histogram.end };
}
