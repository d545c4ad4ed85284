// The share that float16 loses of each layer's gradient over the run: a row for each layer, a column for each stored step.
// A map is { steps, layers, underflow, overflow, nonfinite }, shares in percent by layer and column.

import { Surface } from "./canvas.js";
import { visible } from "./elements.js";
import { integer, percent } from "./numbers.js";

const HEAT_EDGE = { top: 18, bottom: 18, gap: 22, right: 8 };
const HEAT_NAMES = 128; // px
export const HEAT_KINDS = [["underflow", "→ 0 (underflow)"], ["overflow", "→ inf (overflow)"]];

/** How dark a share is drawn: small ones can be told from none. */
export const shade = (share) => (share <= 0 ? 0 : 0.15 + 0.85 * Math.sqrt(Math.min(share, 100) / 100));

/** The end of a name that fits: the last parts of a path say more than its first. */
export function shortened(name, measure, width) {
  if (measure(name) <= width) return name;
  for (let at = 1; at < name.length; at += 1) if (measure(`…${name.slice(at)}`) <= width) return `…${name.slice(at)}`;
  return "…";
}

/** A cell in words. */
export function heatText(map, { kind, layer, column }) {
  const share = map[kind][layer][column];
  const nonfinite = map.nonfinite[layer][column];
  const word = kind === "underflow" ? "becomes zero" : "becomes infinite";
  return `step ${integer(map.steps[column])}, ${map.layers[layer]}: ${percent(share)} ${word}${nonfinite ? `; ${percent(nonfinite)} NaN or inf` : ""}`;
}

export class HeatMap extends Surface {
  draw(map, palette, { reading, selected }) {
    this.clear();
    this.font = `10px ${palette.font}`;
    const panel = (this.width - HEAT_NAMES - HEAT_EDGE.gap - HEAT_EDGE.right) / 2;
    const height = (this.height - HEAT_EDGE.top - HEAT_EDGE.bottom) / Math.max(map.layers.length, 1);
    const width = panel / Math.max(map.steps.length, 1);
    this.cells = { panel, width, height };
    const measure = (text) => { this.pen.font = this.font; return this.pen.measureText(text).width; };
    const every = Math.ceil(11 / height); // a name needs 11 px
    map.layers.forEach((name, layer) => {
      if (layer % every) return;
      this.text(shortened(visible(name), measure, HEAT_NAMES - 8), HEAT_NAMES - 6, HEAT_EDGE.top + (layer + 0.5) * height, palette.soft, "right");
    });
    for (const [side, [kind, title]] of HEAT_KINDS.entries()) {
      this.side(map, kind, title, HEAT_NAMES + side * (panel + HEAT_EDGE.gap), palette);
    }
    if (selected !== null) this.mark(map, selected, palette);
    if (reading) this.frame(reading, palette);
  }

  side(map, kind, title, left, palette) {
    const { pen, cells: { panel, width, height } } = this;
    this.text(title, left, 8, palette.ink, "left", `600 10.5px ${palette.font}`);
    pen.fillStyle = palette.grid;
    pen.fillRect(left, HEAT_EDGE.top, panel, height * map.layers.length);
    pen.fillStyle = palette.warning;
    for (const [layer, row] of map[kind].entries()) {
      for (const [column, share] of row.entries()) {
        const isBroken = kind === "overflow" && map.nonfinite[layer][column] > 0;
        const alpha = isBroken ? 1 : shade(share);
        if (!alpha) continue;
        pen.globalAlpha = alpha;
        pen.fillRect(left + column * width, HEAT_EDGE.top + layer * height, Math.max(width, 1), height - 1);
      }
    }
    pen.globalAlpha = 1;
    const { steps } = map;
    if (!steps.length) return;
    const under = HEAT_EDGE.top + height * map.layers.length + 9;
    this.text(integer(steps[0]), left, under, palette.soft, "left");
    if (steps.length > 1) this.text(integer(steps.at(-1)), left + panel, under, palette.soft, "right");
  }

  /** The column whose step is the nearest to the selected one. */
  mark(map, step, palette) {
    if (!map.steps.length) return;
    const distances = map.steps.map((each) => Math.abs(each - step));
    const column = distances.indexOf(Math.min(...distances));
    for (const side of [0, 1]) this.frame({ side, column, layer: 0, layers: map.layers.length }, palette);
  }

  frame({ side, layer, column, layers = 1 }, palette) {
    const { panel, width, height } = this.cells;
    const [left, top] = [HEAT_NAMES + side * (panel + HEAT_EDGE.gap) + column * width, HEAT_EDGE.top + layer * height];
    const [right, bottom] = [left + Math.max(width, 2), top + layers * height - 1];
    this.paths([[[left, top], [right, top], [right, bottom], [left, bottom], [left, top]]], palette.ink, 1.5);
  }

  /** The cell at a position in px, null outside. */
  cellAt(map, x, y) {
    if (!this.cells) return null;
    const { panel, width, height } = this.cells;
    const side = x >= HEAT_NAMES + panel + HEAT_EDGE.gap / 2 ? 1 : 0;
    const column = Math.floor((x - HEAT_NAMES - side * (panel + HEAT_EDGE.gap)) / width);
    const layer = Math.floor((y - HEAT_EDGE.top) / height);
    const isInside = column >= 0 && column < map.steps.length && layer >= 0 && layer < map.layers.length;
    return isInside ? { side, kind: HEAT_KINDS[side][0], layer, column } : null;
  }
}
