// Elements of every view: a maker, icons, dtype chips, one choice of several. assets.py joins this file in front of a module.

/** Make an element; attributes that start with "on" are listeners, null and false ones are left out. */
function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Write text only where it changed, so that a screen reader and the layout stay calm. */
function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A dtype as a coloured chip; the colour repeats the text, it never stands alone. */
function chip(dtype) {
  return h("span", { class: "amp-chip", "data-dtype": dtype }, dtype);
}

/** One choice of several: a radio group with one tab stop, moved by the arrow keys. */
function choices(label, names, choose, texts = {}) {
  const buttons = names.map((name) =>
    h("button", { type: "button", role: "radio", "data-value": name, onclick: () => choose(name) }, texts[name] ?? name));
  const group = h("div", { class: "amp-choices", role: "radiogroup", "aria-label": label }, buttons);
  const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  group.addEventListener("keydown", (event) => {
    const at = buttons.indexOf(event.target);
    if (at < 0 || !(event.key in moves)) return;
    event.preventDefault();
    const next = buttons[(at + moves[event.key] + buttons.length) % buttons.length];
    next.focus();
    next.click();
  });
  const show = (chosen) => buttons.forEach((button) => {
    const on = button.dataset.value === String(chosen);
    button.setAttribute("aria-checked", on);
    button.tabIndex = on || (chosen === null && button === buttons[0]) ? 0 : -1;
  });
  return { group, buttons, show };
}
