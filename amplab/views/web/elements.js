// The elements that every view is built from.

// As in amplab/display/text.py: control characters but tab and newline, what turns the direction of text, other ends of
// lines, and half of a pair.
const UNSEEN = /(?![\t\n])[\p{Cc}\p{Cs}\p{Zl}\p{Zp}\p{Bidi_Control}]/gu;
const READ_ALOUD = new Set(["title", "aria-label"]);

/** Text that a page can only show: the control characters in a name of a log as escapes. */
export function visible(text) {
  return text.replace(UNSEEN, (found) => {
    const code = found.charCodeAt(0).toString(16);
    return found === "\r" ? "\\r" : code.length > 2 ? `\\u${code.padStart(4, "0")}` : `\\x${code.padStart(2, "0")}`;
  });
}

const handled = new Set(); // the names of all listeners so far, such as onclick

/** Make an element. Attributes that start with "on" are listeners; null, undefined and false attributes are left out. */
export function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) {
      handled.add(name);
      node[name] = (event) => { value(event); }; // a property, which `renew` can copy; a false would cancel the event
    } else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) {
      node.setAttribute(name, READ_ALOUD.has(name) ? visible(String(value)) : value);
    }
  }
  const shown = children.flat().filter((child) => child !== null && child !== undefined && child !== false);
  node.append(...shown.map((child) => (typeof child === "string" ? visible(child) : child)));
  return node;
}

/** Make an element like a fresh one of the same kind: what has not changed stays, and so does what a person has opened or types. */
export function renew(node, fresh) {
  for (const name of node.getAttributeNames()) if (name !== "open" && !fresh.hasAttribute(name)) node.removeAttribute(name);
  for (const name of fresh.getAttributeNames()) {
    const value = fresh.getAttribute(name);
    if (node.getAttribute(name) !== value) node.setAttribute(name, value);
  }
  for (const name of handled) node[name] = fresh[name];
  if (node.nodeName === "INPUT") {
    node.checked = fresh.checked;
    if (node !== document.activeElement && node.value !== fresh.value) node.value = fresh.value;
  }
  renewChildren(node, [...fresh.childNodes]);
}

function renewChildren(node, fresh) {
  const present = [...node.childNodes];
  for (const [place, child] of fresh.entries()) {
    const old = present[place];
    if (!old) node.append(child);
    else if (old.nodeName !== child.nodeName) old.replaceWith(child);
    else if (child.nodeType === Node.ELEMENT_NODE) renew(old, child);
    else if (old.data !== child.data) old.data = child.data;
  }
  for (const extra of present.slice(fresh.length)) extra.remove();
}

/** Write text only where it changed: a screen reader announces every write, and every write costs a layout. */
export function write(node, text) {
  const shown = visible(String(text ?? ""));
  if (node.textContent !== shown) node.textContent = shown;
}

const SVG = "http://www.w3.org/2000/svg";
const ICONS = {
  play: "M4 2.5v11l9.5-5.5z",
  pause: "M3.5 2.5h3.2v11H3.5zM9.3 2.5h3.2v11H9.3z",
  step: "M3 2.5v11l7.5-5.5zM11 2.5h2.2v11H11z",
  previous: "M13 2.5v11L5.5 8zM2.8 2.5H5v11H2.8z",
  reset: "M8 3V.8L4.4 4 8 7.2V5a3.9 3.9 0 1 1-3.9 3.9H2.2A5.8 5.8 0 1 0 8 3z",
  cross: "M3.4 2.2 8 6.8l4.6-4.6 1.2 1.2L9.2 8l4.6 4.6-1.2 1.2L8 9.2l-4.6 4.6-1.2-1.2L6.8 8 2.2 3.4z",
  sliders: "M1.5 4h6.2a2 2 0 0 1 3.8 0h3v1.4h-3a2 2 0 0 1-3.8 0H1.5zM1.5 10.6h2.7a2 2 0 0 1 3.8 0h6.5V12H8a2 2 0 0 1-3.8 0H1.5z",
  copy: "M5 1.5h8.5v10H11V14H2.5V4.5H5zM6.3 2.8v7.4h5.9V2.8zM3.8 5.8v6.9h5.9v-1.2H5V5.8z",
};

/** An icon of a button, drawn as a path so that no font is needed. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

const ARROWS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

/** The index that an arrow key moves to in a list that wraps around; null for any other key. */
export function arrowTarget(key, index, length) {
  return index >= 0 && Object.hasOwn(ARROWS, key) ? (index + ARROWS[key] + length) % length : null;
}

/** Let the arrow keys move focus among buttons, of which only one is in the tab order, and press the one they reach. */
export function moveByArrows(group, buttons) {
  group.addEventListener("keydown", (event) => {
    const target = arrowTarget(event.key, buttons.indexOf(event.target), buttons.length);
    if (target === null) return;
    event.preventDefault();
    buttons[target].focus();
    buttons[target].click();
  });
}

/** One choice of several, as a row of buttons with the role of a radio group. */
export function choices(label, names, choose, texts = {}) {
  const buttons = names.map((name) =>
    h("button", { type: "button", role: "radio", "data-value": name, onclick: () => choose(name) }, texts[name] ?? name));
  const group = h("div", { class: "amp-choices", role: "radiogroup", "aria-label": label }, buttons);
  moveByArrows(group, buttons);
  const show = (chosen) => {
    for (const button of buttons) {
      const on = button.dataset.value === String(chosen);
      button.setAttribute("aria-checked", on);
      button.tabIndex = on || (chosen === null && button === buttons[0]) ? 0 : -1;
    }
  };
  return { group, buttons, show };
}

/** What was typed into a number field: null for nothing, and text for what is no number, which the kernel refuses. */
export const typed = ({ value, validity }) => (validity.badInput ? "not a number" : value === "" ? null : Number(value));
