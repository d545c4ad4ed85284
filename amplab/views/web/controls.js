// The controls: every choice of an experiment. They show the kernel's `shown`; a press sends one message and changes
// nothing here until the kernel answers.

import { choices, h, icon, write } from "./elements.js";
import { endWithKernel, ownKeys } from "./page.js";

/** A labeled block; `note` is the line below that explains or refuses. */
function block(label, body, note = null, extra = {}) {
  return h("div", { class: "amp-block", ...extra }, h("div", { class: "amp-label" }, label), body, note);
}

function dropdown(label, change) {
  const select = h("select", { "aria-label": label, onchange: () => change(select.value) });
  const show = (options, chosen) => {
    const wanted = JSON.stringify(options);
    if (select.dataset.options !== wanted) {
      select.dataset.options = wanted;
      select.replaceChildren(...options.map(([value, text]) => h("option", { value }, text)));
    }
    select.value = chosen;
  };
  return { select, show };
}

/**
 * A number that is sent when it is complete (Enter or leaving the field), never while it is typed. The field keeps what
 * is being typed; once that was sent, the kernel's next answer replaces it: the new value, or the old one if refused.
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

/** A number entered as an exponent of two: 16 stands for 65536. */
function exponent(label, title, change) {
  const field = number(`${label}, exponent of two`, (value) => change(value === null ? null : powerOfTwo(value)), { step: "1", placeholder: "none" });
  const power = h("span", { class: "amp-power" }, h("b", { "aria-hidden": "true" }, "2"), field.input);
  const box = h("label", { class: "amp-field", title }, h("span", {}, label), power);
  return { box, show: (value) => field.show(exponentOf(value)) };
}

function counted(label, title, change) {
  const field = number(`${label}: ${title}`, change, { min: "1", step: "1" });
  return { box: h("label", { class: "amp-field", title }, h("span", {}, label), field.input), show: field.show };
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

function levelBlock(change) {
  const note = h("p", { class: "amp-note", "aria-live": "polite" });
  let made = null;
  const holder = h("div");
  const show = (levels, chosen) => {
    if (made === null) {
      made = choices("opt_level", levels.map((level) => level.name), (value) => change("opt_level", value));
      holder.append(made.group);
    }
    made.show(chosen);
    const level = levels.find((each) => each.name === chosen);
    write(note, level.line);
    note.title = level.brief;
  };
  return { box: block("opt_level", holder, note, { class: "amp-block amp-level" }), show };
}

function overrideRow(name, change) {
  const list = dropdown(name, (value) => change(name, { default: null, true: true, false: false }[value]));
  const reason = h("p", { class: "amp-note amp-refused" });
  const row = h("div", { class: "amp-override" }, h("label", {}, h("code", {}, name), list.select), reason);
  const show = (override) => {
    list.show(override.options, override.value);
    list.select.disabled = override.reason !== null;
    row.classList.toggle("amp-off", override.reason !== null);
    write(reason, override.reason ?? "");
    reason.hidden = override.reason === null;
  };
  return { row, show };
}

function scaleBlock(change) {
  const modes = { level: null, dynamic: "dynamic", static: 128 };
  const mode = choices("Loss scale", Object.keys(modes), (value) => change("loss_scale", modes[value]), { level: "by level" });
  const init = exponent("init", "Initial loss scale", (value) => change("init_scale", value));
  const window_ = counted("window", "Steps without an overflow before the scale doubles", (value) => change("growth_interval", value));
  const floor = exponent("floor", "Smallest loss scale", (value) => change("min_loss_scale", value));
  const ceiling = exponent("ceiling", "Largest loss scale", (value) => change("max_loss_scale", value));
  const fixed = exponent("scale", "Loss scale of every step", (value) => change("loss_scale", value));
  const dynamic = h("div", { class: "amp-fields amp-four" }, init.box, window_.box, floor.box, ceiling.box);
  const fixedRow = h("div", { class: "amp-fields amp-four" }, fixed.box);
  const by = mode.buttons[0];
  const show = (scale) => {
    modes.static = scale.fixed ?? scale.first_fixed;
    mode.show(scale.mode);
    by.title = `The opt_level prescribes ${scale.prescribed}`;
    dynamic.hidden = !scale.dynamic;
    fixedRow.hidden = scale.dynamic;
    init.show(scale.init);
    window_.show(scale.window);
    floor.show(scale.floor);
    ceiling.show(scale.ceiling);
    fixed.show(scale.fixed);
  };
  return { box: block("Loss scale", [mode.group, dynamic, fixedRow]), show };
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
  const run = runButtons(send);
  const task = dropdown("Task", (value) => change("task", value));
  const network = dropdown("Model", (value) => change("model", value));
  const level = levelBlock(change);
  const overrides = ["keep_batchnorm_fp32", "master_weights"].map((name) => overrideRow(name, change));
  const scale = scaleBlock(change);
  const optimizer = dropdown("Optimizer", (value) => change("optimizer", value));
  const rate = number("Learning rate", (value) => change("lr", value), { step: "any", min: "0" });
  const inject = injectBlock(send);
  const config = configLine();
  const error = h("p", { class: "amp-error", role: "alert", hidden: true });
  const pair = (...fields) => h("div", { class: "amp-fields" }, fields.map(([label, input]) => h("label", { class: "amp-field" }, h("span", {}, label), input)));
  const root = h("section", { class: "amplab amp-controls", "aria-label": "Controls" },
    run.row, error,
    pair(["Task", task.select], ["Model", network.select]),
    level.box,
    h("div", { class: "amp-overrides" }, overrides.map((each) => each.row)),
    scale.box,
    pair(["Optimizer", optimizer.select], ["Learning rate", rate.input]),
    inject.box,
    config.box);
  el.append(root);

  const show = () => {
    const shown = model.get("shown");
    if (!shown.config) return;
    run.show(shown.state);
    task.show(shown.options.task, shown.config.task);
    network.show(shown.options.model, shown.config.model);
    level.show(shown.levels, shown.config.opt_level);
    shown.overrides.forEach((override, index) => { overrides[index].show(override); });
    scale.show(shown.scale);
    optimizer.show(shown.options.optimizer, shown.config.optimizer);
    rate.show(shown.lr);
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
