// A drawing with controls: sends each change to the kernel, one at a time, and shows what the kernel drew.

import { h, write } from "./elements.js";
import { raised } from "./numbers.js";

const PATIENCE = 5000; // ms until a missing answer is reported

// JupyterLab has shortcuts for arrows and digits in every element that has the focus and holds no text. The attribute
// must be on the element itself: a shortcut that matches it is found before a parent with the attribute.
const KEYS = { "data-lm-suppress-shortcuts": "true" };

/** The number of a slider as text; 2⁸ for the exponent 8 of a power. */
export const sliderText = ({ power }, value) => (power ? `2${raised(value)}` : String(value));

/**
 * Send changes one at a time: while one is under way, later ones are merged, and go out as one when it is answered.
 * A change that is not answered holds up the others for `patience` ms only.
 */
export class OneAtATime {
  constructor(send, { patience = PATIENCE, late = () => {}, name = Math.random().toString(36).slice(2) } = {}) {
    Object.assign(this, { send, patience, late, name, number: 0, waiting: null, next: null, timer: null });
  }

  change(values) {
    this.next = { ...this.next, ...values };
    if (this.waiting === null) this.go();
  }

  go() {
    this.waiting = `${this.name}-${++this.number}`;
    this.send({ set: this.next, turn: this.waiting });
    this.next = null;
    this.timer = setTimeout(() => {
      this.waiting = null;
      this.late();
      if (this.next) this.go();
    }, this.patience);
  }

  /** Note an answer, which may be late or for another view; true if no change of this view is later. */
  answered(turn) {
    const isOlder = turn.startsWith(`${this.name}-`) && turn !== `${this.name}-${this.number}`;
    if (turn === this.waiting) {
      clearTimeout(this.timer);
      this.waiting = null;
      if (this.next) this.go();
    }
    return this.waiting === null && !isOlder;
  }

  destroy() {
    clearTimeout(this.timer);
  }
}

function sliderRow(control, change) {
  const output = h("output", { "aria-hidden": "true" });
  const show = (value) => {
    write(output, sliderText(control, value));
    input.setAttribute("aria-valuetext", output.textContent);
  };
  const { low, high, step, name, label } = control;
  const input = h("input", {
    ...KEYS, type: "range", min: low, max: high, step, "data-name": name,
    oninput: () => { show(input.value); change({ [name]: Number(input.value) }); },
  });
  const widest = Math.max(...[low, high, low + step].map((value) => sliderText(control, Number(value.toFixed(6))).length));
  output.style.minWidth = `${widest + 1}ch`;
  return {
    node: h("label", { class: "slider" }, h("span", {}, label), input, output),
    update: ({ value }) => { if (input.value !== String(value)) input.value = value; show(input.value); },
  };
}

function choiceRow(control, change) {
  const { name, label, options } = control;
  const group = `amplab-${Math.random().toString(36).slice(2)}`;
  const buttons = options.map((option) =>
    h("input", { ...KEYS, type: "radio", name: group, value: option, "data-name": name, onchange: () => change({ [name]: option }) }));
  const node = h("fieldset", { class: "choice" }, h("legend", {}, label),
    buttons.map((button, place) => h("label", {}, button, h("span", {}, options[place]))));
  return { node, update: ({ value }) => { for (const button of buttons) button.checked = button.value === value; } };
}

function selectRow(control, change) {
  const { name, label, options } = control;
  const select = h("select", { ...KEYS, "data-name": name, onchange: () => change({ [name]: select.value }) },
    options.map((option) => h("option", { value: option }, option)));
  return {
    node: h("label", { class: "pick" }, h("span", {}, label), select),
    update: ({ value }) => { select.value = value; },
  };
}

const MOST_BUTTONS = 6;
const rowOf = (control, change) => {
  if (control.kind === "slider") return sliderRow(control, change);
  return control.options.length > MOST_BUTTONS ? selectRow(control, change) : choiceRow(control, change);
};

function render({ model, el }) {
  const payload = () => model.get("payload");
  const picture = h("div", { class: "picture" });
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const spoken = h("p", { class: "unseen", role: "status", "aria-live": "polite" });
  const complain = (text) => {
    write(problem, text);
    problem.hidden = !text;
    picture.classList.toggle("old", Boolean(text)); // it does not show what the controls say
  };
  const queue = new OneAtATime((message) => model.send(message), {
    late: () => complain("The kernel has not answered yet. If it is not busy, run this cell again."),
  });
  const rows = payload().controls.map((control) => rowOf(control, (values) => queue.change(values)));
  const root = h("section", { class: "amplab amplab-explorable", "aria-label": "Explorable drawing" },
    h("div", { class: "controls" }, rows.map((row) => row.node)), problem, picture, spoken);
  let drawn = null;
  const draw = () => {
    const { html } = payload();
    if (html !== drawn) picture.innerHTML = drawn = html;
  };
  const update = () => {
    const { controls, problem: text, turn, said, text: words } = payload();
    const latest = queue.answered(turn);
    draw();
    complain(text);
    if (!latest) return;
    // A value that draw refused stays where the person has put it, with the reason below.
    if (!text) rows.forEach((row, place) => { row.update(controls[place]); });
    if (turn) write(spoken, `${said.join(", ")}: ${text || words}`);
  };
  draw();
  rows.forEach((row, place) => { row.update(payload().controls[place]); });
  model.on("change:payload", update);
  el.append(root);
  return () => {
    model.off("change:payload", update);
    queue.destroy();
  };
}

export default { render };
