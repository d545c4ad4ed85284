// The controls: all settings of an experiment. They show the kernel's `shown`; a click sends one message, and the page
// changes when the kernel answers.

import { choices, h, icon, write } from "./elements.js";
import { endWithKernel, ownKeys } from "./page.js";

/** A labeled block; `note` is the line below that explains or refuses. */
function block(label, body, note = null, extra = {}) {
  return h("div", { class: "amp-block", ...extra }, h("div", { class: "amp-label" }, label), body, note);
}

/** One of a few values, which may be null or boolean: an option holds the value's text. */
function dropdown(name, label, change) {
  let options = [];
  const select = h("select", { "aria-label": label, onchange: () => change(name, optionOf(options, select.value)) });
  const show = (field) => {
    if (JSON.stringify(field.options) !== JSON.stringify(options)) {
      ({ options } = field);
      select.replaceChildren(...options.map(([value, text]) => h("option", { value: String(value) }, text)));
    }
    select.value = String(field.value);
    select.title = field.title;
  };
  return { input: select, show };
}

/** The value among [value, label] pairs that has this text. */
export const optionOf = (options, text) => options.find(([value]) => String(value) === text)[0];

/**
 * A number that is sent when it is complete (Enter, or focus leaves the field), not while it is typed. The field keeps
 * the typed text; after it was sent, the kernel's next answer replaces it: the new value, or the old one if refused.
 */
function number(label, change, attributes = {}) {
  const input = h("input", { type: "number", "aria-label": label, ...attributes });
  const commit = () => {
    if (input.value === input.dataset.shown || input.value === input.dataset.sent) return;
    input.dataset.sent = input.value;
    change(input.value === "" ? null : Number(input.value));
  };
  input.addEventListener("change", commit);
  input.addEventListener("keydown", (event) => event.key === "Enter" && commit());
  const show = (value) => {
    const text = value === null ? "" : String(value);
    if (document.activeElement !== input || input.dataset.shown !== text || "sent" in input.dataset) input.value = text;
    input.dataset.shown = text;
    delete input.dataset.sent;
  };
  return { input, show };
}

/** 2^exponent, or text where float64 has no such number: JSON has no Infinity, and a refusal quotes what was typed. */
export function powerOfTwo(exponent) {
  const value = 2 ** exponent;
  return value > 0 && Number.isFinite(value) ? value : `2**${exponent}`;
}

/** The exponent of two of a value, to two decimals; null for null. */
export const exponentOf = (value) => (value === null ? null : Math.round(Math.log2(value) * 100) / 100);

/** A number of the scale in a narrow labeled box, with the field's help as its tooltip. */
function narrow(field, input) {
  return h("label", { class: "amp-field", title: field.title }, h("span", {}, field.label), input);
}

/** A number entered as an exponent of two: 16 stands for 65536. */
function exponent(field, change) {
  const made = number(`${field.label}, exponent of two`, (value) => change(value === null ? null : powerOfTwo(value)), { step: "1", placeholder: "none" });
  const box = narrow(field, h("span", { class: "amp-power" }, h("b", { "aria-hidden": "true" }, "2"), made.input));
  return { box, show: (value) => made.show(exponentOf(value)) };
}

function whole(field, change) {
  const made = number(`${field.label}: ${field.title}`, change, { min: "1", step: "1" });
  return { box: narrow(field, made.input), show: made.show };
}

function runButtons(send) {
  const start = h("button", { type: "button", class: "amp-button amp-primary", onclick: () => send(start.dataset.does) });
  const step = h("button", { type: "button", class: "amp-button", title: "Train one step", onclick: () => send("step") }, icon("step"), "Step");
  const reset = h("button", { type: "button", class: "amp-button", title: "Start over with new weights and an empty history", onclick: () => send("reset") }, icon("reset"), "Reset");
  const show = (state) => {
    const does = state === "running" ? "pause" : "start";
    if (start.dataset.does !== does) {
      start.dataset.does = does;
      start.replaceChildren(icon(does === "pause" ? "pause" : "play"), does === "pause" ? "Pause" : "Start");
      start.title = does === "pause" ? "Pause after the current step" : "Train until paused";
    }
    start.disabled = state === "failed";
    step.disabled = state === "running" || state === "failed";
  };
  return { row: h("div", { class: "amp-run" }, start, step, reset), show };
}

const SPEEDS = [1, 2, 5, 10, 20, 50, 100, 200, null];

/** The position on the slider of a speed in steps per second; the last one is full speed. */
export function speedPosition(speed) {
  if (speed === null) return SPEEDS.length - 1;
  const faster = SPEEDS.findIndex((each) => each === null || each >= speed);
  return Math.min(faster, SPEEDS.length - 2);
}

/** A speed in words. */
export const speedText = (speed) => (speed === null ? "full speed" : `${speed} step${speed === 1 ? "" : "s"}/s`);

/** How far and how fast: "Run N steps", and the speed of every run. */
function paceRow(send) {
  const steps = h("input", { type: "number", "aria-label": "Number of steps to run", min: "1", step: "1", value: "100" });
  const start = () => send("run", { steps: steps.value === "" ? null : Number(steps.value) });
  const run = h("button", { type: "button", class: "amp-button", title: "Train so many steps, then pause", onclick: start }, "Run");
  steps.addEventListener("keydown", (event) => event.key === "Enter" && start());
  const slider = h("input", { type: "range", class: "amp-speed", "aria-label": "Speed", min: "0", max: String(SPEEDS.length - 1), step: "1" });
  const text = h("b");
  const say = () => {
    const words = speedText(SPEEDS[slider.value]);
    write(text, words);
    slider.setAttribute("aria-valuetext", words);
  };
  let sent = null; // while the kernel has not answered, the slider stays where it was put
  slider.addEventListener("input", () => {
    sent = Number(slider.value);
    send("speed", { value: SPEEDS[sent] });
    say();
  });
  const show = (speed, state) => {
    const position = speedPosition(speed);
    if (sent === position) sent = null;
    if (sent === null) slider.value = position;
    say();
    run.disabled = state === "failed" || state === "stopped";
  };
  const row = h("div", { class: "amp-fields amp-pace" },
    h("div", { class: "amp-field" }, h("span", {}, "Run N steps"), h("div", { class: "amp-run" }, steps, run)),
    h("label", { class: "amp-field", title: "How many steps a run takes per second" }, h("span", {}, "Speed: ", text), slider));
  return { row, show };
}

function levelBlock(label, levels, change) {
  const note = h("p", { class: "amp-note", "aria-live": "polite" });
  const labels = Object.fromEntries(levels.map((level) => [level.name, level.label]));
  const made = choices(label, levels.map((level) => level.name), (value) => change("opt_level", value), labels);
  const show = (chosen) => {
    made.show(chosen);
    const level = levels.find((each) => each.name === chosen);
    write(note, level.line);
    note.title = level.brief;
  };
  return { box: block(label, made.group, note, { class: "amp-block amp-level" }), show };
}

/** An override of the opt_level: disabled, with the reason below, where it has no meaning. */
function overrideRow(name, label, change) {
  const list = dropdown(name, label, change);
  const reason = h("p", { class: "amp-note amp-refused" });
  const row = h("div", { class: "amp-override" }, h("label", {}, h("code", {}, label), list.input), reason);
  const show = (field) => {
    list.show(field);
    list.input.disabled = field.reason !== null;
    row.classList.toggle("amp-off", field.reason !== null);
    write(reason, field.reason ?? "");
    reason.hidden = field.reason === null;
  };
  return { row, show };
}

function scaleBlock(fields, change) {
  const modes = { level: null, dynamic: "dynamic", static: null };
  const mode = choices(fields.loss_scale.label, Object.keys(modes), (value) => change("loss_scale", modes[value]), { level: "by level" });
  const parts = {
    init_scale: exponent(fields.init_scale, (value) => change("init_scale", value)),
    growth_interval: whole(fields.growth_interval, (value) => change("growth_interval", value)),
    min_loss_scale: exponent(fields.min_loss_scale, (value) => change("min_loss_scale", value)),
    max_loss_scale: exponent(fields.max_loss_scale, (value) => change("max_loss_scale", value)),
  };
  const fixed = exponent({ label: "scale", title: "Loss scale of every step" }, (value) => change("loss_scale", value));
  const dynamicRow = h("div", { class: "amp-fields amp-four" }, Object.values(parts).map((part) => part.box));
  const fixedRow = h("div", { class: "amp-fields amp-four" }, fixed.box);
  const show = (scale, now) => {
    modes.static = scale.fixed ?? scale.first_fixed;
    mode.show(scale.mode);
    mode.buttons[0].title = `The opt_level sets ${scale.prescribed}`;
    dynamicRow.hidden = scale.fixed !== null;
    fixedRow.hidden = scale.fixed === null;
    for (const [name, part] of Object.entries(parts)) part.show(now[name].value);
    fixed.show(scale.fixed);
  };
  return { box: block(fields.loss_scale.label, [mode.group, dynamicRow, fixedRow]), show };
}

const FAULTS = [
  ["overflow", "Overflow", "Make the next backward pass overflow. The step is skipped, and a dynamic loss scale halves."],
  ["underflow", "Underflow", "Multiply the loss by 2⁻¹⁶ until switched off. Small gradients flush to zero in float16."],
  ["nan", "NaN", "Put a NaN into the next batch. No loss scale can fix it."],
];

/** The sentence below the faults. */
export function faultNote(armed, shrinking, running) {
  const names = armed.map((kind) => FAULTS.find((fault) => fault[0] === kind)[1]).join(" and ");
  if (names && !running) return `${names} will go into the next step.`;
  return shrinking ? "The loss is multiplied by 2⁻¹⁶. Press Underflow again to stop." : "A fault goes into the next step.";
}

function injectBlock(send) {
  const buttons = FAULTS.map(([kind, text, title]) => h("button",
    { type: "button", class: "amp-button amp-fault", "data-kind": kind, title, "aria-label": `Inject ${text}. ${title}`, onclick: () => send("inject", { kind }) }, text));
  const note = h("p", { class: "amp-note", "aria-live": "polite" });
  const show = (armed, shrinking, running) => {
    buttons[1].setAttribute("aria-pressed", shrinking);
    for (const button of buttons) button.classList.toggle("amp-armed", armed.includes(button.dataset.kind));
    write(note, faultNote(armed, shrinking, running));
  };
  return { box: block("Inject a fault", h("div", { class: "amp-run" }, buttons), note), show };
}

function configLine() {
  const text = h("code", { class: "amp-config", tabindex: "0" });
  const copy = h("button", { type: "button", class: "amp-mini", title: "Copy this line; amplab.lab.open(…) accepts it", "aria-label": "Copy the configuration" }, icon("copy"));
  const copied = () => {
    copy.classList.add("amp-done");
    setTimeout(() => copy.classList.remove("amp-done"), 900);
  };
  copy.addEventListener("click", () => {
    // A page served over plain HTTP from another host has no clipboard, so select the line instead.
    if (navigator.clipboard) navigator.clipboard.writeText(text.textContent).then(copied);
    else getSelection().selectAllChildren(text);
  });
  return { box: block("Configuration", h("div", { class: "amp-config-row" }, text, copy)), show: (value) => { write(text, value); text.title = value; } };
}

function render({ model, el }) {
  const send = (type, content = {}) => model.send({ type, ...content });
  const change = (field, value) => send("change", { field, value });
  const { fields, levels } = model.get("shown");
  const run = runButtons(send);
  const pace = paceRow(send);
  const lists = ["task", "model", "optimizer"].map((name) => [name, dropdown(name, fields[name].label, change)]);
  const level = levelBlock(fields.opt_level.label, levels, change);
  const overrides = ["keep_batchnorm_fp32", "master_weights"].map((name) => [name, overrideRow(name, fields[name].label, change)]);
  const scale = scaleBlock(fields, change);
  const rate = number(fields.lr.label, (value) => change("lr", value), { step: "any", min: "0" });
  const inject = injectBlock(send);
  const config = configLine();
  const error = h("p", { class: "amp-error", role: "alert", hidden: true });
  const [task, network, optimizer] = lists.map(([name, list]) => narrow(fields[name], list.input));
  const root = h("section", { class: "amplab amp-controls", "aria-label": "Controls" },
    run.row, pace.row, error,
    h("div", { class: "amp-fields" }, task, network),
    level.box,
    h("div", { class: "amp-overrides" }, overrides.map(([, each]) => each.row)),
    scale.box,
    h("div", { class: "amp-fields" }, optimizer, narrow(fields.lr, rate.input)),
    inject.box,
    config.box);
  el.append(root);

  const show = () => {
    const shown = model.get("shown");
    run.show(shown.state);
    pace.show(shown.speed, shown.state);
    for (const [name, each] of [...lists, ...overrides]) each.show(shown.fields[name]);
    level.show(shown.fields.opt_level.value);
    scale.show(shown.scale, shown.fields);
    rate.show(shown.fields.lr.value);
    inject.show(shown.armed, shown.shrinking, shown.state === "running");
    config.show(shown.text);
    write(error, shown.refusal ?? "");
    error.hidden = !shown.refusal;
  };
  model.on("change:shown", show);
  show();
  const cleanups = [ownKeys(root), endWithKernel(model, root)];
  return () => {
    model.off("change:shown", show);
    for (const cleanup of cleanups) cleanup();
  };
}

export default { render };
