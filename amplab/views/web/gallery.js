// The strip of scenarios: one line when closed, a grid of titles when open, and a card for the one that is played. What
// is chosen and how far it is are the kernel's `chosen`; only whether the grid is open is the page's own.

import { arrowTarget, h, write } from "./elements.js";
import { endWithKernel, ownKeys } from "./page.js";

/** Curves that hint at what a scenario shows, each as the points of a line in a box of 36 by 16. */
const GLYPHS = {
  healthy: "1,2 7,9 14,12 22,13.5 35,14",
  "first-overflow": "1,14 9,14 9,10 17,10 17,6 25,6 25,2 29,2 29,6 35,6",
  underflow: "1,5 35,5",
  "static-scale": "1,9 12,9 12,1 14,15 16,1 18,15",
  "overflow-spiral": "1,1 7,1 7,4 13,4 13,7 19,7 19,10 25,10 25,13 35,13",
  "lost-updates": "1,3 10,4 22,4.5 35,5",
  softmax: "1,3 8,8 16,10 19,10 20,1 35,1",
  bce: "1,3 9,3 M13,1 L23,15 M23,1 L13,15",
  batchnorm: "1,2 9,9 19,12 35,13 M1,14 L35,14",
  gan: "1,4 12,4 12,2 35,2 M1,9 L20,9 L20,12 L35,12 M1,15 L35,15",
  accumulation: "1,14 8,14 8,11 15,11 15,8 22,8 22,5 29,5 29,14 35,14",
  bfloat16: "1,2 9,8 20,12 35,14",
};

/** The path of a scenario's curve; a scenario without one gets a plain line. */
export function glyphPath(name) {
  const points = Object.hasOwn(GLYPHS, name) ? GLYPHS[name] : "1,8 35,8";
  return points.split("M").map((line) => `M${line.trim().replace(/^M/, "").replace(/ L?/g, "L")}`).join("");
}

/** Where an arrow, Home or End moves in a grid of so many columns; null for another key, and at the edge. */
export function gridTarget(key, index, length, columns) {
  const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
  if (key === "Home" || key === "End") return key === "Home" ? 0 : length - 1;
  if (arrowTarget(key, index, length) === null) return null;
  const target = index + moves[key];
  return target >= 0 && target < length ? target : null;
}

function glyph(name) {
  const [svg, path] = ["svg", "path"].map((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));
  svg.setAttribute("viewBox", "0 0 36 16");
  path.setAttribute("d", glyphPath(name));
  svg.append(path);
  return h("span", { class: "amp-glyph", "aria-hidden": "true" }, svg);
}

/** The titles of all scenarios. One of them is in the tab order; the arrow keys move among them, Escape closes. */
function scenarioGrid(scenarios, choose, close) {
  const cards = scenarios.map(({ name, title }) => h("button",
    { type: "button", class: "amp-scenario", "data-scenario": name, onclick: () => choose(name) }, glyph(name), h("span", {}, title)));
  const enter = (index) => {
    for (const card of cards) card.tabIndex = -1;
    cards[index].tabIndex = 0;
  };
  const columns = () => cards.filter((card) => card.offsetTop === cards[0].offsetTop).length;
  const id = `amp-scenarios-${Math.random().toString(36).slice(2)}`; // a page may show two dashboards
  const box = h("div", { class: "amp-scenarios", id, role: "group", "aria-label": "All scenarios" }, cards);
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    const target = gridTarget(event.key, cards.indexOf(event.target), cards.length, columns());
    if (target === null) return;
    event.preventDefault();
    enter(target);
    cards[target].focus();
  });
  const show = (chosen) => {
    for (const card of cards) {
      if (card.dataset.scenario === chosen) card.setAttribute("aria-current", "true");
      else card.removeAttribute("aria-current");
    }
    enter(Math.max(0, cards.findIndex((card) => card.dataset.scenario === chosen)));
  };
  return { box, show, focus: () => cards.find((card) => card.tabIndex === 0).focus() };
}

function column(heading, ...content) {
  return h("div", { class: "amp-scenario-part", role: "group", "aria-label": heading }, h("div", { class: "amp-heading", "aria-hidden": "true" }, heading), content);
}

/** What to expect, what was seen, and the fix, side by side. */
function scenarioCard(send) {
  const expect = h("p");
  const seen = h("p", { "aria-live": "polite", "data-part": "seen" });
  const bar = h("div", { class: "amp-progress", "aria-hidden": "true" }, h("i"));
  const button = h("button", { type: "button", class: "amp-button amp-fix", onclick: () => send("fix") });
  const text = h("p", { "aria-live": "polite", "data-part": "fix" });
  const fix = column("The fix", button, text);
  const box = h("div", { class: "amp-card" },
    column("What to expect", expect), column("What you saw", bar, seen), fix);
  const show = (chosen) => {
    write(expect, chosen.expect);
    write(seen, chosen.seen || "…");
    bar.hidden = chosen.progress === null;
    bar.firstChild.style.width = `${100 * (chosen.progress ?? 0)}%`;
    button.hidden = chosen.fix === null;
    write(text, chosen.fix?.text ?? "Nothing is wrong here, so there is nothing to fix.");
    if (chosen.fix === null) return;
    write(button, `Apply the fix: ${chosen.fix.label}`);
    button.disabled = !chosen.fix.is_ready;
    button.classList.toggle("amp-primary", chosen.fix.is_ready);
    text.classList.toggle("amp-error", chosen.fix.is_refused);
  };
  return { box, show };
}

function render({ model, el }) {
  const scenarios = model.get("scenarios");
  const send = (type, content = {}) => model.send({ type, ...content });
  const choose = (name) => {
    send("choose", { name });
    open(false);
    toggle.focus();
  };
  const toggle = h("button", { type: "button", class: "amp-button amp-gallery-toggle", "aria-expanded": "false", title: `${scenarios.length} effects, each in under 30 seconds`, onclick: () => open(grid.box.hidden) }, "Scenarios");
  const grid = scenarioGrid(scenarios, choose, () => { open(false); toggle.focus(); });
  toggle.setAttribute("aria-controls", grid.box.id);
  const open = (is) => {
    grid.box.hidden = !is;
    toggle.setAttribute("aria-expanded", is);
    if (is) grid.focus();
  };
  const lead = h("span", { class: "amp-lead" }, `${scenarios.length} effects, 30 s each. Try`);
  const suggested = ["underflow", "first-overflow"].flatMap((name) => scenarios.filter((each) => each.name === name))
    .map(({ name, title }) => h("button", { type: "button", class: "amp-suggested", onclick: () => choose(name) }, title));
  const title = h("strong");
  const status = h("span", { class: "amp-stage", role: "status" });
  const again = h("button", { type: "button", class: "amp-mini", onclick: () => send("again") }, "Run again");
  const next = h("button", { type: "button", class: "amp-mini", onclick: () => choose(model.get("chosen").next.name) });
  const shut = h("button", { type: "button", class: "amp-mini", onclick: () => { send("close"); toggle.focus(); } }, "Close");
  const idle = h("span", { class: "amp-gallery-idle" }, lead, suggested);
  const busy = h("span", { class: "amp-gallery-busy" }, title, status, again, next, shut);
  const card = scenarioCard(send);
  const root = h("section", { class: "amplab amp-gallery", "aria-label": "Scenarios" },
    h("div", { class: "amp-gallery-line" }, toggle, idle, busy), grid.box, card.box);
  el.append(root);
  open(false);

  const show = () => {
    const chosen = model.get("chosen");
    const isChosen = "name" in chosen;
    idle.hidden = isChosen;
    busy.hidden = card.box.hidden = !isChosen;
    grid.show(chosen.name);
    if (!isChosen) return;
    write(title, chosen.title);
    write(status, chosen.status);
    status.dataset.stage = chosen.stage;
    write(next, `Next: ${chosen.next.title}`);
    card.show(chosen);
  };
  model.on("change:chosen", show);
  show();
  const cleanups = [ownKeys(root), endWithKernel(model, root)];
  return () => {
    model.off("change:chosen", show);
    for (const cleanup of cleanups) cleanup();
  };
}

export default { render };
