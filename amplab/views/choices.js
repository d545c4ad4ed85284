// One choice of several, as a row of buttons.

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
