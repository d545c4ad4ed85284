// The pointer and the keys of the charts: read a step, select one, zoom, pan, reset.

import { GUTTER, nearest, rowAt, SKIPPED } from "./charts.js";
import { draggedRange, panned, windowOf, zoomed } from "./ranges.js";

const DRAG = 4; // px from which a press is a drag

export const KEYS_HELP = "Left and Right read a step, Page Up and Page Down move the range, + and − zoom, 0 shows the whole run, "
  + "N and P go to the next and the previous skipped step, Enter selects the step, Escape ends.";

/** The steps that a view selected and the kernel has not answered; while it is busy, a double click has three on the way. */
export class OwnSelections {
  #asked = [];

  /** Note a selection; false where the kernel, which has `current` selected, would answer nothing. */
  asks(step, current) {
    if (step === (this.#asked.length ? this.#asked.at(-1) : current)) return false;
    this.#asked.push(step);
    return true;
  }

  /** Whether the kernel selects what the view had asked for. */
  answers(step) {
    const place = this.#asked.indexOf(step);
    this.#asked.splice(0, place + 1);
    return place >= 0;
  }
}

/** Listen on the canvas of a chart; `actions` are setRange, zoomOut, select, changed and speak, and `view` is the state that is drawn. */
export function listenToChart(chart, view, actions) {
  listenToPointer(chart, view, actions);
  listenToKeys(chart.canvas, view, actions);
}

function listenToPointer(chart, view, { setRange, select, changed }) {
  const { canvas } = chart;
  const inside = (event) => Math.min(Math.max(event.offsetX, GUTTER.left), chart.width - GUTTER.right);
  let pressed = null;
  let before = null; // the selection before a double click, whose two clicks select too
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !view.rows.length) return;
    pressed = inside(event);
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!view.rows.length || !chart.x) return;
    const at = inside(event);
    if (pressed !== null && Math.abs(at - pressed) > DRAG) view.drag = [chart.stepAt(pressed), chart.stepAt(at)];
    view.reading = rowAt(view.shown, chart.x, at)?.[0] ?? null; // a zoomed range has no row until its rows have come
    view.pointer = { canvas, at };
    changed();
  });
  canvas.addEventListener("pointerup", (event) => {
    if (pressed === null) return;
    pressed = null;
    if (view.drag) {
      setRange(draggedRange(...view.drag, view.count));
      Object.assign(view, { reading: null, pointer: null }); // another step lies under the pointer now
    } else {
      before = event.detail > 1 ? before : view.selected;
      const row = rowAt(view.shown, chart.x, inside(event));
      if (row) select(row[0]);
    }
    view.drag = null;
    changed();
  });
  canvas.addEventListener("dblclick", () => {
    select(before);
    setRange(null);
  });
  const leave = () => { Object.assign(view, { reading: null, drag: null, pointer: null }); pressed = null; changed(); };
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("pointercancel", leave);
  canvas.addEventListener("blur", leave);
}

function listenToKeys(canvas, view, { setRange, zoomOut, select, changed, speak }) {
  const span = () => {
    const { low, high } = windowOf(view.range, view.count);
    return high - low;
  };
  const from = () => view.reading ?? view.selected ?? view.shown.at(-1)[0];
  const read = (step) => { view.reading = step; };
  const move = (sign) => read(nearest(view.shown, from() + sign * Math.max(1, Math.round(span() / 200)))[0]);
  const skip = (sign) => {
    const rows = view.shown.filter((row) => row[3] & SKIPPED && sign * (row[0] - from()) > 0);
    if (rows.length) read(rows.at(sign > 0 ? 0 : -1)[0]);
  };
  const zoomIn = () => setRange(zoomed(view.range, 0.5, from(), view.count));
  const keys = {
    ArrowLeft: () => move(-1),
    ArrowRight: () => move(1),
    Home: () => read(view.shown[0][0]),
    End: () => read(view.shown.at(-1)[0]),
    n: () => skip(1),
    p: () => skip(-1),
    PageUp: () => setRange(panned(view.range, -0.5, view.count)),
    PageDown: () => setRange(panned(view.range, 0.5, view.count)),
    "+": zoomIn,
    "=": zoomIn,
    "-": () => zoomOut(from()),
    0: () => setRange(null),
    Enter: () => select(from()),
    Escape: () => { read(null); select(null); },
  };
  canvas.addEventListener("keydown", (event) => {
    const act = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act || !view.shown.length || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    view.pointer = null;
    act();
    changed();
    speak();
  });
}
