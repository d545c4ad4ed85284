// The tab of the loss scale. "Now" has the steps until the scale grows, steps/s and memory; "What if" draws the scale under
// other rules over the same run, with the steps that each would have lost, and a rule to describe.

import { drawSoon, palette } from "./canvas.js";
import { choices, h, write } from "./elements.js";
import { bytes } from "./numbers.js";
import { onTheme } from "./page.js";
import { MemoryChart, RateChart, WhatIfChart } from "./scale_charts.js";
import { table } from "./tables.js";

const CONTROLS = [
  ["init", "init 2^", "log2 of the first scale", { min: -24, max: 40, step: 1 }],
  ["window", "window", "Steps without an overflow until the scale doubles", { min: 1, step: 1 }],
  ["backoff", "backoff", "What an overflow multiplies the scale with", { min: 0.01, max: 0.99, step: 0.05 }],
];

/** A canvas with its text for screen readers; `draw` is called soon after every `soon`. */
function canvasBox(className, label, draw) {
  const canvas = h("canvas", { class: `amp-canvas ${className}`, role: "img", tabindex: "0", "aria-label": label });
  const { soon, cancel } = drawSoon(canvas, draw);
  const sized = new ResizeObserver(soon);
  sized.observe(canvas);
  return { canvas, soon, ends: [cancel, () => sized.disconnect(), onTheme(soon)] };
}

function nowView() {
  const growth = h("p", { class: "amp-growth", role: "status" });
  const meter = h("progress", { max: "1", value: "0", "aria-label": "Steps without an overflow since the last change of the scale" });
  const counted = h("span", { class: "amp-note" });
  const skips = h("p", { class: "amp-note" });
  const legend = h("div", { class: "amp-rules-legend" });
  let payload = null;
  const end = () => payload.memory.end;
  const kindColors = () => [...legend.querySelectorAll("i")].map((mark) => getComputedStyle(mark).backgroundColor);
  const rate = canvasBox("amp-series", "Steps per second over the run", () => payload && rateChart.draw(payload.rate, end(), palette(box)));
  const memory = canvasBox("amp-series", "Memory by kind over the run", () => payload && memoryChart.draw(payload.memory, kindColors(), palette(box)));
  const words = h("p", { class: "amp-sr" });
  const chart = (title, canvas) => h("div", { class: "amp-chart" }, h("div", { class: "amp-chart-head" }, h("strong", { class: "amp-chart-title" }, title)), canvas);
  const box = h("div", { class: "amp-scale-now" },
    h("div", {}, h("div", { class: "amp-label" }, "Growth counter"), growth, meter, counted, skips, h("div", { class: "amp-label" }, "Memory"), legend),
    chart("Steps/s", rate.canvas), chart("Memory by kind", memory.canvas), words);
  const [rateChart, memoryChart] = [new RateChart(rate.canvas), new MemoryChart(memory.canvas)];
  const show = (shown) => {
    payload = shown;
    const { growth: { counted: done, interval, text } } = shown;
    write(growth, text);
    meter.hidden = counted.hidden = interval === null;
    meter.max = interval ?? 1;
    meter.value = done ?? 0;
    write(counted, interval === null ? "" : `${done} of ${interval} steps without an overflow`);
    write(skips, shown.skips);
    write(words, shown.words);
    memory.canvas.parentElement.hidden = Boolean(shown.memory.note);
    legend.replaceChildren(shown.memory.note ?? "", ...shown.memory.kinds.map(({ name, values }) =>
      h("span", { class: "amp-key" }, h("i", { class: "amp-block-key", "data-kind": name.replaceAll(" ", "_") }), `${name} ${bytes(values.at(-1) ?? 0)}`)));
    rate.soon();
    memory.soon();
  };
  return { box, show, soon: () => { rate.soon(); memory.soon(); }, ends: [...rate.ends, ...memory.ends] };
}

function whatIfView(send) {
  let payload = null;
  let chosen = null; // the rule under the pointer or the focus, else the person's own
  const chart = canvasBox("amp-whatif", "The loss scale under other rules", () => {
    if (payload) drawn.draw(payload, ["recorded", chosen ?? "your rule"], palette(box));
  });
  const drawn = new WhatIfChart(chart.canvas);
  const fields = Object.fromEntries(CONTROLS.map(([name, , title, limits]) => [name, h("input", {
    type: "number", "data-rule": name, title, "aria-label": title, ...limits, oninput: () => tell(),
  })]));
  const tell = () => send({ type: "rule", ...Object.fromEntries(CONTROLS.map(([name]) => [name, fields[name].value === "" ? null : Number(fields[name].value)])) });
  const refusal = h("span", { class: "amp-error", role: "alert" });
  const controls = h("div", { class: "amp-rule", role: "group", "aria-label": "Your rule" },
    CONTROLS.map(([name, label]) => h("label", {}, label, fields[name])), refusal);
  const rules = table("Steps lost under each rule", [["Rule"], ["Skipped", "amp-num"], ["Steps lost", "amp-num"], ["Gradients → 0", "amp-num"], ["Last scale", "amp-num"]]);
  rules.box.classList.add("amp-narrow");
  const words = h("p", { class: "amp-sr", role: "status" });
  const box = h("div", { class: "amp-scale-whatif" }, h("div", {}, controls, chart.canvas), rules.box, words);
  const pick = (name) => { chosen = name; chart.soon(); };
  const row = (run) => {
    const name = run.ended === null ? run.name : `${run.name} (ends at ${run.ended})`;
    const button = h("button", { type: "button", class: "amp-plain", "data-run": run.name, onfocus: () => pick(run.name), onblur: () => pick(null) }, name);
    return h("tr", { "data-run": run.name, "data-key": run.name, onpointerenter: () => pick(run.name), onpointerleave: () => pick(null) },
      h("td", {}, run.name === "recorded" ? name : button), [run.skipped, run.lost, run.gradients, run.last].map((text) =>
        h("td", { class: "amp-num", title: run.doubt ?? "" }, run.doubt ? `≈ ${text}` : text)));
  };
  const show = (shown) => {
    payload = shown;
    for (const [name, field] of Object.entries(fields)) if (document.activeElement !== field) field.value = shown.rule[name] ?? "";
    write(refusal, shown.refusal ?? "");
    write(words, shown.words);
    chart.canvas.setAttribute("aria-label", `The loss scale under other rules. ${shown.words}`);
    rules.draw(shown.runs.map(row));
    chart.soon();
  };
  return { box, show, soon: chart.soon, ends: chart.ends };
}

export function scalePanel({ send }) {
  const views = { now: nowView(), whatif: whatIfView(send) };
  const choice = choices("View", ["now", "whatif"], (view) => send({ type: "view", view }), { now: "Now", whatif: "What if" });
  const summary = h("span", { class: "amp-summary" });
  const box = h("div", { class: "amp-panel", "data-panel": "scale" }, h("div", { class: "amp-bar" }, choice.group, summary), Object.values(views).map((view) => view.box));
  const show = (payload) => {
    if (!payload.view) return;
    choice.show(payload.view);
    for (const [name, view] of Object.entries(views)) view.box.hidden = name !== payload.view;
    views[payload.view].show(payload);
    write(summary, payload.view === "now" ? "" : `${payload.words} An overflow is judged by the largest gradient of a parameter.`);
  };
  const open = () => { for (const view of Object.values(views)) view.soon(); };
  return { box, show, open, end: () => { for (const end of Object.values(views).flatMap((view) => view.ends)) end(); } };
}
