// The live view: figures, training loss, log2 of the loss scale. A frame holds the whole run, thinned for the screen, as
// one binary buffer. A page that shows a part of the run asks for its rows and gets them as a second message, "range".
// Nothing is polled, and no frame depends on an earlier one.

import { drawSoon, palette } from "./canvas.js";
import { KEYS_HELP, listenToChart, OwnSelections } from "./chart_input.js";
import { lossSummary, scaleSummary, stepLines } from "./chart_words.js";
import { LossChart, nearest, rowsWithin, ScaleChart, unpack } from "./charts.js";
import { h, write } from "./elements.js";
import { visibleChanges } from "./marks.js";
import { bytes, decimal, integer, power } from "./numbers.js";
import { overlaidSteps, stepsBehind, unpackOverlays } from "./overlays.js";
import { attend, endWithKernel, onTheme, ownKeys } from "./page.js";
import { drawnAsSvg, svgPage, TAKE_CHARTS } from "./svg_pen.js";
import { beyond, showing, stepsToShow, windowOf, zoomed } from "./ranges.js";

const LAST = 500;
const WORDS_EVERY = 2000; // ms between two summaries of a running chart

const FIGURES = [
  ["step", "Step", (s) => integer(s.step)],
  ["skipped", "Skipped", (s) => integer(s.skipped)],
  ["scale", "Loss scale", (s) => power(s.scale)],
  ["score", "Score", (s) => scoreText(s)],
  ["rate", "Steps/s", (s) => (s.rate === null ? "–" : integer(s.rate))],
  ["memory", "Model memory", (s) => (s.memory === null ? "–" : bytes(s.memory))],
];

/** The score on held-out data: a share in percent, anything else as a number. */
export function scoreText({ score, score_is_share: isShare }) {
  if (score === null) return "–";
  if (!Number.isFinite(score)) return { inf: "inf", "-inf": "-inf" }[score] ?? "NaN"; // JSON has none, so it is a name
  return isShare ? `${(100 * score).toFixed(1)} %` : decimal(score);
}

function figures() {
  const values = FIGURES.map(([name]) => h("dd", { "data-figure": name }, "–"));
  const cells = FIGURES.map(([, label], index) => h("div", {}, h("dt", {}, label), values[index]));
  const show = (summary) => FIGURES.forEach(([name, , format], index) => {
    write(values[index], format(summary));
    cells[index].hidden = Boolean(summary.unknown?.includes(name)); // a watched run has no score
    if (name === "score" && summary.score_label) write(cells[index].firstChild, summary.score_label);
    if (name === "memory") cells[index].title = summary.memory_parts;
  });
  return { list: h("dl", { class: "amp-figures" }, cells), show };
}

function chartBox(title, label, ...extras) {
  const now = h("output", { class: "amp-now", "aria-live": "off" });
  const id = `amp-words-${Math.random().toString(36).slice(2)}`;
  const words = h("p", { class: "amp-sr", id });
  const canvas = h("canvas", {
    class: "amp-canvas", role: "img", tabindex: "0", "aria-label": `${label}. ${KEYS_HELP}`, "aria-describedby": id,
  });
  const box = h("div", { class: "amp-chart" }, h("div", { class: "amp-chart-head" }, h("strong", { class: "amp-chart-title" }, title), now, extras), canvas, words);
  return { now, canvas, words, box };
}

/** The buttons that choose the range, and how the axes are divided. */
function rangeButtons(view, { setRange, zoomOut, changed }) {
  const button = (text, title, act, pressed = null) => h("button", {
    type: "button", class: "amp-mini", title, "aria-label": title, "aria-pressed": pressed, onclick: () => { act(); changed(); },
  }, text);
  const middle = () => {
    const { low, high } = windowOf(view.range, view.count);
    return view.selected !== null && view.selected >= low && view.selected <= high ? view.selected : (low + high) / 2;
  };
  const follow = () => {
    const { low, high } = windowOf(view.range, view.count);
    setRange(view.range?.last === undefined ? { last: high - low + 1 } : { low, high });
  };
  const made = {
    all: button("All", "Show the whole run", () => setRange(null), "true"),
    last: button(`Last ${LAST}`, `Show the last ${LAST} steps and follow the run`, () => setRange({ last: LAST }), "false"),
    follow: button("Follow", "Keep the newest step in view", follow, "false"),
    out: button("−", "Zoom out", () => zoomOut(middle())),
    in: button("+", "Zoom in", () => setRange(zoomed(view.range, 0.5, middle(), view.count))),
    loss: button("log", "Draw the loss on a logarithmic axis", () => { view.logarithmic = !view.logarithmic; }, "false"),
    steps: button("log steps", "Draw the steps on a logarithmic axis", () => {
      view.logarithmicSteps = !view.logarithmicSteps;
      setRange(view.range); // with rows for this axis
    }, "false"),
  };
  const show = () => {
    const pressed = {
      all: view.range === null, last: view.range?.last === LAST, follow: view.range?.last !== undefined,
      loss: view.logarithmic, steps: view.logarithmicSteps,
    };
    for (const [name, on] of Object.entries(pressed)) made[name].setAttribute("aria-pressed", on);
    made.follow.disabled = view.range === null;
    made.out.disabled = view.range === null && beyond(view.count, overlaidSteps(view.overlays)) === null;
  };
  return { group: h("span", { class: "amp-range", role: "group", "aria-label": "Range and axes" }, Object.values(made)), show };
}

/** The values of the step under the pointer, beside it. */
function tip() {
  const box = h("div", { class: "amp-tip", "aria-hidden": "true" });
  box.hidden = true;
  const show = (root, view, chart, lines) => {
    box.hidden = !lines.length;
    if (box.hidden) return;
    box.replaceChildren(...lines.map((line) => h("div", {}, line)));
    const [outer, inner] = [root.getBoundingClientRect(), chart.canvas.getBoundingClientRect()];
    const isRight = view.pointer.at > inner.width / 2;
    box.style.top = `${inner.top - outer.top + 14}px`;
    box.style.left = isRight ? "auto" : `${inner.left - outer.left + view.pointer.at + 12}px`;
    box.style.right = isRight ? `${outer.right - inner.left - view.pointer.at + 12}px` : "auto";
  };
  return { box, show };
}

/**
 * What the charts draw now: the steps of the range, from the detailed rows if they have come, else from the frame; the
 * other runs up to its end, at which their names stand.
 */
function prepare(view) {
  const count = view.range === null ? stepsToShow(view.count, overlaidSteps(view.overlays)) : view.count;
  Object.assign(view, windowOf(view.range, count));
  const { near, logarithmicSteps } = view;
  const hasNear = near?.logarithmic === logarithmicSteps && near.low <= view.low && near.high >= view.high && near.overlays.length === view.overlays.length;
  view.behind = view.overlays.map((overlay, index) => ({
    ...overlay, whole: overlay.rows, rows: rowsWithin((hasNear ? near.overlays[index] : overlay).rows, view.low, view.high),
  }));
  const isNear = ({ low, high, logarithmic }) => logarithmic === logarithmicSteps && low < view.high && high > view.low && high - low <= 2 * (view.high - view.low);
  const rows = (view.range !== null || logarithmicSteps) && view.detail !== null && isNear(view.detail) ? view.detail.rows : view.rows;
  view.shown = rowsWithin(rows, view.low, view.high);
}

function render({ model, el }) {
  const key = Math.random().toString(36).slice(2);
  const view = {
    rows: [], detail: null, shown: [], changes: [], overlays: [], near: null, behind: [], count: 0, range: null, low: 0, high: 100, scale: 0,
    logarithmic: false, logarithmicSteps: false, reading: null, selected: model.get("selected"), drag: null, pointer: null, palette: null,
  };
  const numbers = figures();
  const setRange = (range) => {
    view.range = range;
    model.send({ type: "range", view: key, logarithmic: view.logarithmicSteps, ...(range ?? { low: null }) });
    soon();
  };
  let asked = ""; // the steps of the overlays that were asked for last
  const askBehind = () => {
    const steps = view.count && stepsBehind(view.overlays, view.low, view.high);
    const wanted = steps ? JSON.stringify({ ...steps, logarithmic: view.logarithmicSteps }) : asked;
    if (wanted === asked) return;
    asked = wanted;
    model.send({ type: "behind", view: key, ...JSON.parse(wanted) });
  };
  // From a part to the whole present run, and from there to the longest of the runs behind it.
  const zoomOut = (around) => setRange(view.range === null
    ? beyond(view.count, overlaidSteps(view.overlays)) : zoomed(view.range, 2, around, view.count));
  const own = new OwnSelections(); // those of this view leave its range as it is
  const select = (step) => own.asks(step, model.get("selected")) && model.send({ type: "select", step });
  const buttons = rangeButtons(view, { setRange, zoomOut, changed: () => soon() });
  const loss = chartBox("Training loss", "Training loss over steps", buttons.group);
  const scale = chartBox("Loss scale, log₂", "Loss scale over steps, as a power of two",
    h("span", { class: "amp-key" }, h("i", { class: "amp-tri" }), "skipped step"),
    h("span", { class: "amp-key" }, h("i", { class: "amp-tri amp-tri-hollow" }), "injected"));
  const modes = h("p", { class: "amp-modes" });
  const spoken = h("span", { class: "amp-sr", role: "status" });
  const hover = tip();
  const root = h("section", { class: "amplab amp-live", "aria-label": "Live run" }, numbers.list, loss.box, scale.box, modes, spoken, hover.box);
  el.append(root);

  const charts = [new LossChart(loss.canvas), new ScaleChart(scale.canvas)];
  const readLines = () => {
    if (view.reading === null || !view.shown.length) return [];
    const row = nearest(view.shown, view.reading);
    const reach = Math.max(1, (view.high - view.low) / 150);
    return stepLines(row, view.changes.filter(({ step }) => Math.abs(step - row[0]) < reach));
  };
  const { soon, cancel } = drawSoon(loss.canvas, () => {
    prepare(view);
    askBehind();
    view.palette = palette(root); // the style sheet arrives after the first render
    for (const chart of charts) chart.draw({ ...view, rows: view.shown, overlays: view.behind });
    buttons.show();
    readout(view, loss.now, scale.now);
    hover.show(root, view, charts.find(({ canvas }) => canvas === view.pointer?.canvas), view.pointer && !view.drag ? readLines() : []);
  });
  const speak = () => {
    prepare(view);
    const { low, high } = view;
    write(spoken, view.reading === null ? `steps ${integer(low)} to ${integer(high)}` : readLines().join(", "));
  };
  const describe = () => {
    prepare(view);
    write(loss.words, lossSummary(view.shown, view.low));
    write(scale.words, scaleSummary(view.shown, view.low, visibleChanges(view.changes, view.low, view.high).filter((each) => !each.isBefore)));
  };
  const describing = setInterval(describe, WORDS_EVERY);

  const receive = (message, buffers) => {
    if (message.kind === "range") {
      if (message.view !== key) return;
      view.detail = { low: message.low, high: message.high, logarithmic: message.logarithmic, rows: unpack(buffers[0]) };
    } else if (message.kind === "behind") {
      if (message.view !== key) return;
      view.near = { ...message, overlays: unpackOverlays(message, buffers, unpack) };
    } else if (message.kind === "overlays") {
      view.overlays = unpackOverlays(message, buffers, unpack);
      asked = ""; // those that are near have changed, too
    } else {
      if (message.asks) model.send({ type: "seen", view: key });
      view.rows = unpack(buffers[0]);
      view.count = message.summary.step;
      // A change that the next step will use is marked at the newest one.
      view.changes = message.changes.map(([step, field, label, text]) => ({ step: Math.min(step, Math.max(view.count - 1, 0)), field, label, text }));
      view.scale = message.summary.scale;
      if (view.count === 0) view.detail = null;
      if (view.range !== null && view.range.low >= Math.max(view.count, 100)) setRange(null); // a run that began again
      numbers.show(message.summary);
      write(modes, message.summary.modes);
    }
    soon();
  };
  model.on("msg:custom", receive);
  const follow = () => {
    view.selected = model.get("selected");
    if (!own.answers(view.selected) && view.selected !== null) {
      const range = showing(view.range, view.selected, view.count);
      if (range !== view.range) setRange(range);
    }
    soon();
  };
  model.on("change:selected", follow);
  for (const chart of charts) listenToChart(chart, view, { setRange, zoomOut, select, changed: soon, speak });
  const give = ({ detail }) => {
    if (detail.which !== "charts" || !detail.within.contains(root)) return;
    prepare(view);
    const still = { ...view, rows: view.shown, overlays: view.behind, palette: palette(root), reading: null, drag: null };
    const drawn = charts.map((chart, index) => {
      const elements = drawnAsSvg(chart, () => chart.draw(still), `chart-${index}`);
      return { title: index ? "Loss scale" : "Training loss", width: chart.width, height: chart.height, elements };
    });
    detail.give(svgPage(drawn, still.palette, root.closest(".amp-dashboard")?.querySelector(".amp-config")?.textContent ?? ""));
  };
  document.addEventListener(TAKE_CHARTS, give);
  const sized = new ResizeObserver(soon);
  for (const { canvas } of charts) sized.observe(canvas);
  const cleanups = [onTheme(soon), ownKeys(root), attend(model, key), endWithKernel(model, root)];
  return () => {
    model.off("msg:custom", receive);
    model.off("change:selected", follow);
    document.removeEventListener(TAKE_CHARTS, give);
    sized.disconnect();
    clearInterval(describing);
    cancel();
    for (const cleanup of cleanups) cleanup();
  };
}

/** The row whose values stand above the charts: the one that is read, else the newest; undefined for none. */
export function readRow({ shown, rows, reading }) {
  if (!shown.length || !rows.length) return undefined; // the rows of a range may come after a reset
  return reading === null ? rows.at(-1) : nearest(shown, reading);
}

function readout(view, lossNow, scaleNow) {
  const row = readRow(view);
  if (row === undefined) {
    write(lossNow, "");
    write(scaleNow, "");
    return;
  }
  const isRead = view.reading !== null;
  const at = isRead ? `step ${integer(row[0])}: ` : "";
  const [, , , skipped] = isRead ? [...stepLines(row, []), ""] : [];
  write(lossNow, at + decimal(row[1], 3));
  // Without a reading line it is the scale of the next step, which the figure above shows too.
  write(scaleNow, isRead ? at + power(row[2]) + (skipped ? ` (${skipped})` : "") : power(view.scale));
}

export default { render };
