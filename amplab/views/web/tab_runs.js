// The tab of runs: the present run and the kept ones as a table of results or of memory, and the twin.

import { choices, h, icon, typed, write } from "./elements.js";
import { emptyRow, table } from "./tables.js";

const RESULTS = [["Run"], ["Loss", "amp-num"], ["Held-out", "amp-num"], ["Skipped", "amp-num"], ["Steps", "amp-num"], ["Steps/s", "amp-num"], ["Actions"]];
const MEMORY = [["Run"], ["Parameters", "amp-num"], ["Masters", "amp-num"], ["Gradients", "amp-num"], ["Optimizer", "amp-num"], ["Activations", "amp-num"]];
const TWIN = [["Layer"], ["Output", "amp-num"], ["Gradient of the output", "amp-num"], ["Gradient of the weights", "amp-num"]];

/** A sample of a run's line, as in the charts. */
function lineSample({ color, dash }) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  for (const [name, value] of Object.entries({ viewBox: "0 0 26 8", class: "amp-run-line", "aria-hidden": "true" })) svg.setAttribute(name, value);
  const drawn = { x1: 1, x2: 25, y1: 4, y2: 4, "stroke-dasharray": dash.join(" "), style: `stroke: var(--amp-${color})` };
  for (const [name, value] of Object.entries(drawn)) line.setAttribute(name, value);
  svg.append(line);
  return svg;
}

/** The words below a run's name: how its setting differs, and why it failed. */
export function runNote({ number, name, differs, outcome, is_training: isTraining }) {
  const what = number === null ? "the present run" : differs === name ? "only the level differs" : differs || "same setting";
  const end = isTraining ? "training …" : outcome && `✕ ${outcome}`;
  return end ? `${what} · ${end}` : what;
}

function runCell(row, send, redraw) {
  const { number } = row;
  const show = number === null ? h("span", { class: "amp-run-tick" }) : h("input", {
    type: "checkbox", class: "amp-run-tick", checked: row.is_shown, "aria-label": `Draw the line of ${row.name}`,
    onchange: (event) => send({ type: "show", number, shown: event.target.checked }),
  });
  const name = number === null ? h("b", {}, row.name) : h("input", {
    class: "amp-run-name", value: row.name, maxlength: "24", "aria-label": `Name of ${row.name}`,
    onchange: (event) => send({ type: "rename", number, name: event.target.value }), onblur: redraw,
    onkeydown: (event) => { // JupyterLab keeps Enter from being a change
      if (event.key === "Escape") event.target.value = event.target.defaultValue;
      if (event.key === "Enter" || event.key === "Escape") event.target.blur();
    },
  });
  const note = h("small", { class: row.outcome ? "amp-run-failed" : "", title: row.setting }, runNote(row));
  return h("td", { class: "amp-run-cell" }, h("div", {}, show, lineSample(row), name), note);
}

function runActions(row, send) {
  const { number, name } = row;
  if (number === null) return h("td");
  const button = (type, image, label, disabled = false) => h("button", {
    type: "button", class: "amp-mini", title: `${label} ${name}`, "aria-label": `${label} ${name}`, "data-does": type, disabled,
    onclick: () => send({ type, number }),
  }, icon(image));
  return h("td", { class: "amp-run-actions" },
    button("continue", "play", "Continue from the end of", !row.can_continue),
    button("restore", "sliders", "Use the setting of"),
    button("remove", "cross", "Remove", row.is_training));
}

export function runsPanel({ send }) {
  let payload = { rows: [] };
  let view = "results";
  const pick = (name) => { view = name; fill(); };
  const views = choices("View", ["results", "memory", "twin"], pick, { results: "Results", memory: "Memory", twin: "Twin" });
  const steps = h("input", { type: "number", min: "1", max: "100000", step: "1", value: "300", class: "amp-run-steps", "aria-label": "Steps of each run" });
  const compare = h("button", {
    type: "button", class: "amp-button amp-run-all", onclick: () => send(payload.progress ? { type: "stop" } : { type: "compare", steps: typed(steps) }),
  });
  const length = h("label", { class: "amp-run-length" }, steps, "steps each");
  const twin = h("button", {
    type: "button", class: "amp-button", title: "Train a copy at the present level and one in float32 from the present weights, and compare each layer",
    onclick: () => { send({ type: "twin" }); pick("twin"); },
  }, "Twin with O0");
  const summary = h("p", { class: "amp-summary amp-run-summary", role: "status" });
  const bar = h("progress", { class: "amp-run-progress", max: "1", "aria-label": "Progress of the comparison" });
  const tables = {
    results: table("Runs and their results", RESULTS), memory: table("Bytes of each run", MEMORY),
    twin: table("Largest relative difference from float32 by layer", TWIN),
  };
  for (const each of Object.values(tables)) each.box.classList.add("amp-runs");
  const cells = (row, names) => names.map((name) => h("td", { class: "amp-num" }, row[name]));
  const runRow = (row, ...columns) => h("tr", { "data-run": row.name, "data-key": row.number ?? "present" }, runCell(row, send, () => fill()), ...columns);
  const fillers = {
    results: () => payload.rows.map((row) => runRow(row, cells(row, ["loss", "held_out", "skipped", "steps", "rate"]), runActions(row, send))),
    memory: () => payload.rows.map((row) => runRow(row, cells(row, ["parameters", "masters", "gradients", "optimizer", "activations"]))),
    twin: () => (payload.twin?.rows ?? []).map((row) => h("tr", { "data-key": row.layer, class: row.is_parted ? "amp-run-parted" : "" },
      h("td", {}, h("code", {}, row.layer), row.is_parted ? h("span", { class: "amp-changed" }, "parts here") : null), row.errors.map((error) => h("td", { class: "amp-num" }, error)))),
  };
  const fill = () => {
    views.show(view);
    for (const [name, made] of Object.entries(tables)) made.box.hidden = name !== view;
    const rows = fillers[view]();
    tables[view].draw(rows.length ? rows : [emptyRow(4, "Press Twin with O0.")]);
    const { progress } = payload;
    write(compare, progress ? "Stop" : "Run all levels");
    compare.title = progress ? "End the comparison; what was trained stays" : "Train each opt_level from the same seed, one after the other; the present run waits";
    bar.hidden = !progress;
    if (progress) bar.value = progress.share;
    const about = view === "twin" ? payload.twin?.sentence ?? "The twin trains two copies from the present weights." : payload.summary ?? "";
    write(summary, progress && view !== "twin" ? progress.text : about);
    summary.classList.toggle("amp-run-failed", Boolean(payload.is_refusal) && !progress);
    summary.title = summary.textContent;
  };
  const box = h("div", { class: "amp-panel", "data-panel": "runs" },
    h("div", { class: "amp-bar" }, views.group, compare, length, twin),
    h("div", { class: "amp-run-line-two" }, bar, summary),
    Object.values(tables).map((each) => each.box));
  const show = (shown) => {
    payload = shown.rows ? shown : { rows: [] };
    fill();
  };
  return { box, show };
}
