// The tabs below the charts: op dtypes and overflows as tables, gradients as a histogram with a table next to it.

import { drawSoon, palette } from "./canvas.js";
import { choices, h, moveByArrows, write } from "./elements.js";
import { binAt, GradientHistogram, nextBin, readingTexts, zoneOf } from "./histogram.js";
import { integer, power } from "./numbers.js";
import { endWithKernel, onTheme, ownKeys } from "./page.js";

const TABS = [["dtypes", "Op dtypes"], ["gradients", "Gradients"], ["overflows", "Overflows"]];

function tabStrip(model) {
  const counts = {};
  const buttons = TABS.map(([name, text]) => {
    counts[name] = h("span", { class: "amp-count" });
    return h("button", { type: "button", role: "tab", "data-tab": name, id: `amp-tab-${name}-${model.get("_view_key")}`, onclick: () => open(name) }, text, counts[name]);
  });
  const open = (name) => { model.set("tab", name); model.save_changes(); };
  const strip = h("div", { class: "amp-tabs", role: "tablist", "aria-label": "Details" }, buttons);
  moveByArrows(strip, buttons);
  const show = (chosen) => {
    for (const button of buttons) {
      const on = button.dataset.tab === chosen;
      button.setAttribute("aria-selected", on);
      button.tabIndex = on ? 0 : -1;
    }
  };
  return { strip, show, counts };
}

function table(caption, heads) {
  const body = h("tbody");
  const head = h("tr", {}, heads.map(([text, kind]) => h("th", { scope: "col", class: kind ?? "" }, text)));
  return { body, box: h("div", { class: "amp-scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", { class: "amp-sr" }, caption), h("thead", {}, head), body)) };
}

/** A dtype as a colored chip; the color only repeats the text. */
function chip(dtype) {
  return h("span", { class: "amp-chip", "data-dtype": dtype }, dtype);
}

/** The dtypes of a row as chips, repeated ones counted: float32 ×2 float16 → float16. */
function signature(row) {
  const side = (dtypes) => dtypes.flatMap(([dtype, times], index) => [
    index ? " " : null, chip(dtype), times > 1 ? h("small", {}, `×${times}`) : null]);
  return [...side(row.inputs), h("span", { class: "amp-arrow" }, " → "), ...side(row.outputs)];
}

function opRow(row) {
  const times = row.times > 1 ? h("small", { class: "amp-times" }, ` ×${row.times}`) : null;
  const note = row.changed ? h("span", { class: "amp-changed", title: "Differs from the previous opt_level" }, "changed") : null;
  return h("tr", { class: [row.cast ? "amp-cast" : "", row.changed ? "amp-row-changed" : ""].join(" ").trim(), "data-phase": row.phase },
    h("td", { class: "amp-num" }, row.index),
    h("td", {}, h("code", { title: `${row.aten}  ${row.shapes}` }, row.op), times, note),
    h("td", { class: "amp-module" }, row.module),
    h("td", { class: "amp-signature" }, signature(row)),
    h("td", { class: "amp-reason" }, h("span", { class: "amp-clamped", title: row.reason }, row.reason)));
}

function dtypePanel() {
  const made = table("Ops of one training step with their dtypes", [["#", "amp-num"], ["Op"], ["Module"], ["In → out"], ["Why"]]);
  const summary = h("span", { class: "amp-summary", role: "status" });
  let rows = [];
  let phase = "all";
  const filter = choices("Rows", ["all", "forward", "backward", "casts", "changed"], (value) => { phase = value; fill(); });
  const kept = (row) => phase === "all" || row.phase === phase || (phase === "casts" && row.cast) || (phase === "changed" && row.changed);
  const fill = () => {
    filter.show(phase);
    const shown = rows.filter(kept);
    made.body.replaceChildren(...(shown.length ? shown.map(opRow) : [emptyRow(5, rows.length ? "No such row." : "Tracing one step …")]));
  };
  const show = (payload) => {
    rows = payload.rows ?? [];
    write(summary, payload.summary ?? "");
    fill();
  };
  return { box: h("div", { class: "amp-panel", "data-panel": "dtypes" }, h("div", { class: "amp-bar" }, filter.group, summary), made.box), show };
}

const emptyRow = (columns, text) => h("tr", { class: "amp-empty" }, h("td", { colspan: columns }, text));

function overflowPanel() {
  const made = table("Skipped steps, newest first", [["Step", "amp-num"], ["Scale before → after"], ["First non-finite gradient"], ["Level"], ["Cause"]]);
  const summary = h("span", { class: "amp-summary", role: "status" });
  const row = (each) => h("tr", {},
    h("td", { class: "amp-num" }, integer(each.step)),
    h("td", { class: "amp-signature" }, power(each.before), h("span", { class: "amp-arrow" }, " → "), power(each.after)),
    h("td", {}, h("code", {}, each.tensor)),
    h("td", {}, each.level),
    h("td", { class: "amp-reason" }, each.cause));
  const show = (payload) => {
    const rows = payload.rows ?? [];
    write(summary, payload.summary ?? "");
    made.body.replaceChildren(...(rows.length ? rows.map(row) : [emptyRow(5, "No step has been skipped.")]));
  };
  return { box: h("div", { class: "amp-panel", "data-panel": "overflows" }, h("div", { class: "amp-bar" }, summary), made.box), show };
}

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

function gradientPanel() {
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
  return { box, show, draw: histogram.soon, end: histogram.end };
}

function render({ model, el }) {
  const tabs = tabStrip(model);
  const panels = { dtypes: dtypePanel(), gradients: gradientPanel(), overflows: overflowPanel() };
  const root = h("section", { class: "amplab amp-panels", "aria-label": "Details" }, tabs.strip, Object.values(panels).map((panel) => panel.box));
  el.append(root);

  const showTab = () => {
    const chosen = model.get("tab");
    tabs.show(chosen);
    for (const [name, panel] of Object.entries(panels)) panel.box.hidden = name !== chosen;
    if (chosen === "gradients") panels.gradients.draw();
  };
  const showers = Object.entries(panels).map(([name, panel]) => {
    const show = () => {
      panel.show(model.get(name));
      write(tabs.counts[name], model.get(name).count ?? "");
    };
    model.on(`change:${name}`, show);
    show();
    return () => model.off(`change:${name}`, show);
  });
  model.on("change:tab", showTab);
  showTab();
  const cleanups = [ownKeys(root), endWithKernel(model, root), panels.gradients.end, () => model.off("change:tab", showTab), ...showers];
  return () => { for (const cleanup of cleanups) cleanup(); };
}

export default { render };
