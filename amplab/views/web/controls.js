// The controls: all settings of an experiment. They show the kernel's `shown`; a click sends one message, and the page
// changes when the kernel answers.

import { choices, h, icon, typed, write } from "./elements.js";
import { endWithKernel, ownKeys } from "./page.js";

/** A labeled block; `note` is the line below that explains, `back` the button beside the label. */
function block(label, body, note = null, back = null) {
  return h("div", { class: "amp-block" }, h("div", { class: "amp-head" }, h("span", { class: "amp-label" }, label), back), body, note);
}

/** A button beside a label that is there while the field differs from its default, and puts it back. */
function backButton(send, name, label) {
  const button = h("button", { type: "button", class: "amp-back", "data-back": name, onclick: () => send("default", { field: name }) }, icon("reset"));
  const show = ({ back }) => {
    button.classList.toggle("amp-unseen", back === null); // it keeps its place, so that nothing moves
    button.title = back === null ? "" : `Changed; back to the default, ${back}`;
    button.setAttribute("aria-label", back === null ? "" : `${label}: back to the default, ${back}`);
  };
  return { button, show };
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
 * Escape takes back what was typed.
 */
function number(label, change, attributes = {}) {
  const input = h("input", { type: "number", "aria-label": label, ...attributes });
  const commit = () => {
    const isKnown = input.value === input.dataset.shown || input.value === input.dataset.sent;
    if (isKnown && !input.validity.badInput) return;
    input.dataset.sent = input.value;
    change(typed(input));
  };
  input.addEventListener("change", commit);
  input.addEventListener("keydown", ({ key }) => {
    if (key === "Enter") commit();
    if (key === "Escape") input.value = input.dataset.shown;
  });
  const show = (value) => {
    const text = value === null ? "" : String(value);
    if (document.activeElement !== input || input.dataset.shown !== text || "sent" in input.dataset) input.value = text;
    input.dataset.shown = text;
    delete input.dataset.sent;
  };
  return { input, show };
}

/** 2^exponent, or text where float64 has no such number: JSON has no Infinity, and a refusal quotes what was typed. Text stays. */
export function powerOfTwo(exponent) {
  if (typeof exponent === "string") return exponent;
  const value = 2 ** exponent;
  return value > 0 && Number.isFinite(value) ? value : `2**${exponent}`;
}

/** The exponent of two of a value, to two decimals; null for null. */
export const exponentOf = (value) => (value === null ? null : Math.round(Math.log2(value) * 100) / 100);

/** An input in a narrow labeled box, with the field's help as its tooltip, and the button to its default. */
function narrow(field, input, back = null) {
  const label = h("label", {}, field.label);
  const named = input.matches("input, select") ? input : input.querySelector("input");
  named.id = label.htmlFor = `amp-${Math.random().toString(36).slice(2)}`;
  return h("div", { class: "amp-field", title: field.title }, h("div", { class: "amp-head" }, label, back), input);
}

/** A number entered as an exponent of two: 16 stands for 65536. */
function exponent(field, change, back = null) {
  const made = number(`${field.label}, exponent of two`, (value) => change(value === null ? null : powerOfTwo(value)), { step: "1", placeholder: "none" });
  const box = narrow(field, h("span", { class: "amp-power" }, h("b", { "aria-hidden": "true" }, "2"), made.input), back);
  return { box, show: (value) => made.show(exponentOf(value)) };
}

function whole(field, change, back = null) {
  const made = number(`${field.label}: ${field.title}`, change, { min: "1", step: "1" });
  return { box: narrow(field, made.input, back), show: made.show };
}

function runButtons(send) {
  const start = h("button", { type: "button", class: "amp-button amp-primary", onclick: () => send(start.dataset.does) });
  const step = h("button", { type: "button", class: "amp-button", title: "Train one step", onclick: () => send("step") }, icon("step"), "Step");
  const reset = h("button", { type: "button", class: "amp-button", title: "Start over with new weights and the values shown; the present run stays as a gray line and a row under Runs", onclick: () => send("reset") }, icon("reset"), "Reset");
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
  const start = () => send("run", { steps: typed(steps) });
  const run = h("button", { type: "button", class: "amp-button", title: "Train so many steps, then pause; a run that starts over meanwhile makes them from its beginning", onclick: start }, "Run");
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

/** What was changed last or refused, in a place of fixed height; Undo, and the way back to every default. */
function changeRow(send) {
  const last = h("p", { class: "amp-last", role: "status" });
  const error = h("p", { class: "amp-error", role: "alert", hidden: true });
  const undo = h("button", { type: "button", class: "amp-button", onclick: () => send("undo") }, "Undo");
  const defaults = h("button", {
    type: "button", class: "amp-button", title: "Put every setting back to its default; task, model and weights stay", onclick: () => send("defaults"),
  }, "Defaults");
  const show = ({ refusal, last_change: change, undone, differs }) => {
    write(error, refusal ?? "");
    error.hidden = !refusal;
    last.hidden = Boolean(refusal);
    error.title = refusal ?? "";
    write(last, changeNote(change, undone));
    last.title = last.textContent;
    undo.disabled = change === null;
    undo.title = change === null ? "Nothing to undo" : `Undo: ${change}`;
    defaults.disabled = !differs;
  };
  const said = h("div", { class: "amp-said", tabindex: "0", role: "group", "aria-label": "Last change" }, last, error);
  return { row: h("div", { class: "amp-change" }, undo, defaults, said), show };
}

/** The sentence beside Undo. */
export function changeNote(change, undone) {
  if (undone !== null) return `Undone: ${undone}`;
  return change === null ? "Each change can be undone." : change;
}

function levelBlock(label, levels, change, back) {
  const note = h("p", { class: "amp-note", "aria-live": "polite" });
  const labels = Object.fromEntries(levels.map((level) => [level.name, level.label]));
  const made = choices(label, levels.map((level) => level.name), (value) => change("opt_level", value), labels);
  const show = (chosen, now) => {
    made.show(chosen);
    const level = now.find((each) => each.name === chosen); // its line depends on the overrides
    write(note, level.line);
    note.title = level.brief;
  };
  const box = block(label, made.group, note, back);
  box.classList.add("amp-level");
  return { box, show };
}

/** The overrides of the opt_level: disabled where they have no meaning, with the reasons in one place of fixed height. */
function overridesBlock(names, fields, change, backs) {
  const reasons = h("p", { class: "amp-note amp-reasons" });
  const rows = names.map((name) => {
    const list = dropdown(name, fields[name].label, change);
    const row = h("div", { class: "amp-override", "data-field": name },
      h("label", {}, h("code", {}, fields[name].label)), backs[name].button, list.input);
    const label = row.querySelector("label");
    label.htmlFor = list.input.id = `amp-${Math.random().toString(36).slice(2)}`;
    return { name, list, row };
  });
  const show = (now) => {
    for (const { name, list, row } of rows) {
      list.show(now[name]);
      list.input.disabled = now[name].reason !== null;
      row.classList.toggle("amp-off", now[name].reason !== null);
    }
    const why = names.map((name) => now[name].reason).filter((reason) => reason !== null);
    write(reasons, why.length ? why.join(" ") : "Each can override what the opt_level sets.");
  };
  return { box: h("div", { class: "amp-overrides" }, rows.map(({ row }) => row), reasons), show };
}

function scaleBlock(fields, change, backs) {
  const modes = { level: null, dynamic: "dynamic", static: null };
  const mode = choices(fields.loss_scale.label, Object.keys(modes), (value) => change("loss_scale", modes[value]), { level: "by level" });
  const parts = {
    init_scale: exponent(fields.init_scale, (value) => change("init_scale", value), backs.init_scale.button),
    growth_interval: whole(fields.growth_interval, (value) => change("growth_interval", value), backs.growth_interval.button),
    min_loss_scale: exponent(fields.min_loss_scale, (value) => change("min_loss_scale", value), backs.min_loss_scale.button),
    max_loss_scale: exponent(fields.max_loss_scale, (value) => change("max_loss_scale", value), backs.max_loss_scale.button),
  };
  // null would be "by level": an emptied field is "none", which is refused as no value
  const fixed = exponent({ label: "scale", title: "Loss scale of every step" }, (value) => change("loss_scale", value ?? "none"));
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
  return { box: block(fields.loss_scale.label, [mode.group, dynamicRow, fixedRow], null, backs.loss_scale.button), show };
}

const FAULTS = [
  ["overflow", "Overflow", "Make the next backward pass overflow. The step is skipped, and a dynamic loss scale halves."],
  ["underflow", "Underflow", "Multiply the loss by 2⁻¹⁶ until switched off. Small gradients flush to zero in float16."],
  ["nan", "NaN", "Put a NaN into the next batch. No loss scale can fix it."],
];

/** The line above the faults. */
export function faultNote(armed, shrinking, running) {
  const names = armed.map((kind) => FAULTS.find((fault) => fault[0] === kind)[1]).join(" and ");
  if (names && !running) return `${names} will go into the next step`;
  return shrinking ? "Loss × 2⁻¹⁶; press Underflow to stop" : "Inject a fault into the next step";
}

function injectBlock(send) {
  const buttons = FAULTS.map(([kind, text, title]) => h("button",
    { type: "button", class: "amp-button amp-fault", "data-kind": kind, title, "aria-label": `Inject ${text}. ${title}`, onclick: () => send("inject", { kind }) }, text));
  const note = h("span", { "aria-live": "polite" });
  const show = (armed, shrinking, running) => {
    buttons[1].setAttribute("aria-pressed", shrinking);
    for (const button of buttons) button.classList.toggle("amp-armed", armed.includes(button.dataset.kind));
    write(note, faultNote(armed, shrinking, running));
  };
  return { box: block(note, h("div", { class: "amp-run", role: "group", "aria-label": "Inject a fault" }, buttons)), show };
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
  return { box: block("Configuration", text, null, copy), show: (value) => { write(text, value); text.title = text.textContent; } };
}

function render({ model, el }) {
  const send = (type, content = {}) => model.send({ type, ...content });
  const change = (field, value) => send("change", { field, value });
  const { fields, levels } = model.get("shown");
  const run = runButtons(send);
  const pace = paceRow(send);
  const lists = ["task", "model", "optimizer"].map((name) => [name, dropdown(name, fields[name].label, change)]);
  const backs = Object.fromEntries(Object.entries(fields).map(([name, field]) => [name, backButton(send, name, field.label)]));
  const level = levelBlock(fields.opt_level.label, levels, change, backs.opt_level.button);
  const overrides = overridesBlock(["keep_batchnorm_fp32", "master_weights"], fields, change, backs);
  const scale = scaleBlock(fields, change, backs);
  const rate = number(fields.lr.label, (value) => change("lr", value), { step: "any", min: "0" });
  const inject = injectBlock(send);
  const config = configLine();
  const changes = changeRow(send);
  const [task, network, optimizer] = lists.map(([name, list]) => narrow(fields[name], list.input, backs[name].button));
  const root = h("section", { class: "amplab amp-controls", "aria-label": "Controls" },
    h("div", { class: "amp-go" }, run.row, pace.row),
    h("div", { class: "amp-settings" },
      changes.row,
      h("div", { class: "amp-fields" }, task, network),
      level.box,
      overrides.box,
      scale.box,
      h("div", { class: "amp-fields" }, optimizer, narrow(fields.lr, rate.input, backs.lr.button)),
      inject.box,
      config.box));
  el.append(root);

  const show = () => {
    const shown = model.get("shown");
    run.show(shown.state);
    pace.show(shown.speed, shown.state);
    changes.show(shown);
    for (const [name, each] of lists) each.show(shown.fields[name]);
    for (const [name, each] of Object.entries(backs)) each.show(shown.fields[name]);
    overrides.show(shown.fields);
    level.show(shown.fields.opt_level.value, shown.levels);
    scale.show(shown.scale, shown.fields);
    rate.show(shown.fields.lr.value);
    inject.show(shown.armed, shown.shrinking, shown.state === "running");
    config.show(shown.text);
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
