// The bit explorer's page: draws `payload` and sends clicks and typed text to the kernel. It has no other state.

import { arrowTarget, h } from "./elements.js";

/** Write text only where it changed, with digits such as ⁻¹² as superscript elements. */
function writeRich(node, text) {
  if (node.dataset.text === text) return;
  node.dataset.text = text;
  node.replaceChildren(...rich(text));
}

const RAISED = "⁻⁰¹²³⁴⁵⁶⁷⁸⁹";

/** "2⁻¹²" as [["2", false], ["−12", true], ["", false]]: pieces of text, and whether each is raised. */
export function pieces(text) {
  return text.split(/([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)/).map((part, index) =>
    index % 2 ? [[...part].map((digit) => "−0123456789"[RAISED.indexOf(digit)]).join(""), true] : [part, false]);
}

const rich = (text) => pieces(text).map(([part, isRaised]) => (isRaised ? h("sup", {}, part) : part));

/** Move the focus among buttons, of which only one is in the tab order. */
function focusOn(buttons, index) {
  const target = buttons[Math.min(Math.max(index, 0), buttons.length - 1)];
  for (const button of buttons) button.tabIndex = button === target ? 0 : -1;
  target.focus();
}

// -- one function for each part of the page: it builds the part once, and update(payload) fills it --

function formatPicker(act, payload) {
  const buttons = payload.formats.map(({ name, label }) =>
    h("button", { type: "button", role: "radio", "data-name": name, onclick: () => act({ pick: name }) }, label));
  const group = h("div", { class: "formats", role: "radiogroup", "aria-label": "Number format" }, ...buttons);
  group.addEventListener("keydown", (event) => {
    const next = arrowTarget(event.key, buttons.indexOf(event.target), buttons.length);
    if (next === null) return;
    event.preventDefault();
    focusOn(buttons, next);
    act({ pick: buttons[next].dataset.name });
  });
  const layout = h("span", { class: "layout" });
  return {
    node: h("div", { class: "top" }, group, layout),
    update({ format, layout: text }) {
      for (const button of buttons) {
        const chosen = button.dataset.name === format;
        button.setAttribute("aria-checked", chosen);
        button.tabIndex = chosen ? 0 : -1;
      }
      writeRich(layout, text);
    },
  };
}

function bitRow(act) {
  const row = h("div", { class: "bits", role: "group" });
  const hint = h("span", { class: "hint" }, "click or space flips a bit · ← → moves · ↑ ↓ next number");
  const pattern = h("code", { class: "pattern" });
  let buttons = [];
  row.addEventListener("keydown", (event) => {
    const index = buttons.indexOf(event.target);
    const target = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: buttons.length - 1 }[event.key];
    const steps = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (index < 0 || (target === undefined && !steps)) return;
    event.preventDefault();
    if (steps) act({ step: steps });
    else focusOn(buttons, target);
  });

  function build(bits) {
    buttons = bits.map(({ position, name }) =>
      h("button", { type: "button", role: "switch", "aria-label": name, onclick: () => act({ flip: position }) }));
    buttons.forEach((button, index) => { button.tabIndex = index ? -1 : 0; });
    row.replaceChildren(...["sign", "exponent", "fraction"].map((field) => {
      const cells = bits.map((bit, index) => ({ ...bit, index })).filter((bit) => bit.field === field);
      return h("div", { class: `field ${field}`, style: `--cells: ${cells.length}` },
        h("span", { class: "caption" }, field),
        ...cells.map((bit) => h("span", { class: "cell" }, buttons[bit.index], h("small", {}, ...rich(bit.weight)))));
    }));
    row.classList.toggle("wide", bits.length > 16);
  }

  return {
    node: h("div", { class: "pane" }, row, h("div", { class: "below-bits" }, hint, pattern)),
    update({ bits, format, hex, multiple }) {
      if (bits.length !== buttons.length || row.dataset.format !== format) build(bits);
      row.dataset.format = format;
      row.setAttribute("aria-label", `Bits of ${format}, ${hex}`);
      bits.forEach((bit, index) => {
        buttons[index].setAttribute("aria-checked", bit.on);
        writeRich(buttons[index], bit.on ? "1" : "0");
      });
      writeRich(pattern, multiple ? `${hex} · ${multiple}` : hex);
    },
  };
}

function valuePane() {
  const value = h("output", { class: "value", "aria-live": "polite" });
  const kind = h("span", { class: "kind" });
  const formula = h("div", { class: "formula" });
  const note = h("p", { class: "note" });
  return {
    node: h("div", { class: "pane" }, h("div", { class: "headline" }, value, kind), formula, note),
    update(payload) {
      writeRich(value, payload.value);
      writeRich(kind, payload.kind);
      writeRich(note, payload.note);
      value.classList.toggle("long", payload.value.length > 20);
      value.classList.toggle("special", !payload.formula);
      formula.replaceChildren(...(payload.formula ? formulaParts(payload.formula) : []));
    },
  };
}

function formulaParts({ sign, exponent, power, significand, decimal }) {
  const part = (field, text) => h("span", { class: field }, text);
  return [
    h("span", {}, "(−1)", h("sup", {}, part("sign", sign)), " × 2", h("sup", {}, part("exponent", exponent)),
      " × ", part("fraction", significand), h("sub", {}, "2")),
    h("span", {}, `= ${sign === "1" ? "−" : ""}2`, h("sup", {}, part("exponent", power)), " × ", part("fraction", decimal)),
  ];
}

function numberPane(act) {
  let timer;
  const send = () => {
    clearTimeout(timer);
    if (input.value.trim()) act({ enter: input.value });
  };
  const input = h("input", {
    type: "text", spellcheck: "false", autocomplete: "off", placeholder: "a number, e.g. 2^-24", "aria-label": "Type a number",
    oninput: () => { clearTimeout(timer); timer = setTimeout(send, 200); },
    onkeydown: (event) => { if (event.key === "Enter") send(); },
  });
  const arrow = h("span", { class: "arrow", "aria-hidden": "true" }, "→");
  const becomes = h("code", { class: "becomes" });
  const story = h("p", { class: "story", role: "status" });
  const chips = h("div", { class: "chips", role: "group", "aria-label": "Numbers to try" });
  return {
    node: h("div", { class: "pane" }, h("div", { class: "typed" }, input, arrow, becomes), story, chips),
    destroy: () => clearTimeout(timer),
    update({ typed, rounding, landmarks, value, format }) {
      if (document.activeElement !== input) input.value = typed;
      writeRich(becomes, rounding && rounding.verdict !== "unread" ? value : "");
      arrow.hidden = !becomes.textContent;
      writeRich(story, rounding ? rounding.text : "Type a number to see how the format represents it, or try one of these.");
      story.className = `story ${rounding ? rounding.verdict : ""}`;
      if (chips.dataset.format === format) return;
      chips.dataset.format = format;
      chips.replaceChildren(...landmarks.map(({ label, text }) =>
        h("button", { type: "button", title: text, onclick: () => { input.value = text; act({ enter: text }); } }, label)));
    },
  };
}

function neighborLine(act) {
  const at = (position) => `left: ${position}%`;
  const line = h("div", { class: "line" });
  const nothing = h("p", { class: "note" });
  const caption = h("p", { class: "note" }, "Every number in the shaded range rounds to the number in the middle.");
  return {
    node: h("div", { class: "pane neighbors" }, h("strong", { class: "heading" }, "Neighbors and spacing"), line, nothing, caption),
    update({ neighbors, kind, typed }) {
      line.hidden = caption.hidden = !neighbors;
      nothing.hidden = Boolean(neighbors);
      writeRich(nothing, kind === "nan" ? "NaN has no neighbors." : "Infinity has no spacing: every number beyond the range rounds to it.");
      if (!neighbors) return;
      const { below, value, above, zone, gap_below, gap_above } = neighbors;
      const gap = (from, to, text) => h("span", { class: "gap", style: `${at(from)}; width: ${to - from}%` }, ...rich(text));
      const tick = (end, name, steps) => h("button",
        { type: "button", class: `tick ${name}`, style: at(end.position), "aria-label": `${name}: ${end.text}`, onclick: () => act({ step: steps }) },
        end.text);
      const parts = [
        h("span", { class: "axis" }),
        h("span", { class: "zone", style: `${at(zone[0])}; width: ${zone[1] - zone[0]}%` }),
        gap(below.position, value.position, gap_below), gap(value.position, above.position, gap_above),
        tick(below, "below", -1), tick(above, "above", 1), h("span", { class: "tick here", style: at(value.position) }, value.text),
      ];
      if (neighbors.typed !== null) parts.push(h("span", { class: "typed-mark", style: at(neighbors.typed), title: typed }));
      const focused = line.contains(document.activeElement) ? document.activeElement.className : null;
      line.replaceChildren(...parts);
      if (focused) line.querySelector(`button.${focused.split(" ").at(-1)}`)?.focus();
    },
  };
}

function ruler() {
  const title = h("strong", { class: "heading" });
  const legend = h("span", { class: "note" }, "hatched: subnormal, with fewer significant bits");
  const rows = h("div", { class: "ruler", role: "table", "aria-label": "What the number becomes in each format" });
  return {
    node: h("div", { class: "pane" }, h("div", { class: "title" }, title, legend), rows),
    update({ ruler: { title: number, ticks, marker, rows: formats }, format }) {
      writeRich(title, `${number} in the range of each format`);
      const mark = () => (marker === null ? [] : [h("span", { class: "marker", style: `left: ${marker}%` })]);
      const axis = h("div", { class: "track ticks", "aria-hidden": "true" },
        ...ticks.map(({ label, position }) => h("span", { style: `left: ${position}%` }, ...rich(label))));
      const row = (item) => h("div", { class: item.name === format ? "row chosen" : "row", role: "row" },
        h("span", { class: "name", role: "rowheader" }, item.label),
        h("span", { class: "track", role: "cell", "aria-label": `range ${item.range}`, title: item.range },
          h("span", { class: "subnormal", style: `left: ${item.start}%; width: ${item.normal - item.start}%` }),
          h("span", { class: "normal", style: `left: ${item.normal}%; width: ${item.end - item.normal}%` }), ...mark()),
        h("code", { class: "result", role: "cell" }, item.result),
        h("span", { class: `verdict ${item.verdict}`, role: "cell" }, item.words));
      rows.replaceChildren(h("div", { class: "row", role: "presentation" }, h("span"), axis), ...formats.map(row));
    },
  };
}

function render({ model, el }) {
  const act = (message) => model.send(message);
  const payload = () => model.get("payload");
  const picker = formatPicker(act, payload()), bits = bitRow(act), value = valuePane(), number = numberPane(act);
  const parts = [picker, bits, value, number, neighborLine(act), ruler()];
  const [top, bitPane, valueNode, numberNode, ...below] = parts.map((part) => part.node);
  // Otherwise JupyterLab's shortcuts would take the arrows and the digits.
  const root = h("section", { class: "amplab-bits", "aria-label": "Bit explorer", "data-lm-suppress-shortcuts": "true" },
    top, bitPane, h("div", { class: "pair" }, valueNode, numberNode), ...below);
  const update = () => { for (const part of parts) part.update(payload()); };
  update();
  model.on("change:payload", update);
  el.append(root);
  return () => {
    model.off("change:payload", update);
    number.destroy();
  };
}

export default { render };
