// The charts of the tab of the loss scale: steps/s as a line, memory by kind as stacked areas, and other rules as lines.

import { Surface } from "./canvas.js";
import { scaleAxis } from "./charts.js";
import { mergedMarks } from "./marks.js";
import { bytes, integer, tickText, ticks } from "./numbers.js";

const EDGE = { left: 44, right: 8, top: 8, bottom: 17 };
const LABEL = 74; // px on the right of the lines, for their names

/** The corners of a line as right angles: each value holds until the next corner. */
export const rightAngles = (corners) => corners.flatMap(([step, value], index) => (index ? [[step, corners[index - 1][1]], [step, value]] : [[step, value]]));

/** The value of a line of corners at a step. */
export function valueAt(corners, step) {
  let found = null;
  for (const [at, value] of corners) if (at <= step) found = value;
  return found;
}

/** Areas on top of each other: of each kind [name, [[step, lower, upper], …]], the last row repeated at the end. */
export function stacked({ steps, kinds, end }) {
  const at = [...steps, Math.max(end, (steps.at(-1) ?? 0) + 1)];
  const below = at.map(() => 0);
  return kinds.map(({ name, values }) => [name, at.map((step, index) => {
    const lower = below[index];
    below[index] += values[Math.min(index, values.length - 1)] ?? 0;
    return [step, lower, below[index]];
  })]);
}

/** Moves apart the heights of labels, sorted from the top, that are less than `gap` apart. */
export function apart(heights, gap, low, high) {
  const order = heights.map((height, index) => [height, index]).sort(([a], [b]) => a - b);
  const placed = [];
  let next = low;
  for (const [height, index] of order) {
    placed[index] = Math.max(height, next);
    next = placed[index] + gap;
  }
  const over = Math.max(0, next - gap - high);
  let limit = Infinity;
  for (const [, index] of order.reverse()) {
    if (over) placed[index] = Math.min(placed[index], limit === Infinity ? high : limit - gap);
    limit = placed[index];
  }
  return placed;
}

class SeriesChart extends Surface {
  axes(end, top, palette, label) {
    this.clear();
    this.font = `10px ${palette.font}`;
    const [right, bottom] = [this.width - EDGE.right, this.height - EDGE.bottom];
    this.x = (step) => EDGE.left + (step / Math.max(end, 1)) * (right - EDGE.left);
    this.y = (value) => bottom - (value / top) * (bottom - EDGE.top);
    for (const tick of ticks(0, top, 3)) {
      const at = Math.round(this.y(tick)) + 0.5;
      this.line(EDGE.left, at, right, at, palette.grid);
      this.text(label(tick), EDGE.left - 5, at, palette.soft, "right");
    }
    for (const tick of ticks(0, Math.max(end, 1), 3)) {
      const half = 3.2 * integer(tick).length;
      this.text(integer(tick), Math.min(Math.max(this.x(tick), EDGE.left + (tick ? 0 : half)), this.width - half), this.height - 7, palette.soft, "center");
    }
  }
}

export class RateChart extends SeriesChart {
  draw({ steps, values }, end, palette) {
    this.axes(end, Math.max(...values, 1) * 1.1, palette, tickText);
    this.paths([values.map((value, index) => [this.x(steps[index]), this.y(value)])], palette.accent, 1.6);
  }
}

export class MemoryChart extends SeriesChart {
  /** Draw the areas in `colors`, those of the legend, which names each kind and gives its bytes. */
  draw(memory, colors, palette) {
    const areas = stacked(memory);
    const top = Math.max(...areas.flatMap(([, rows]) => rows.map(([, , upper]) => upper)), 1) * 1.1;
    this.axes(Math.max(memory.end, 1), top, palette, (tick) => bytes(Math.round(tick)));
    areas.forEach(([, rows], index) => {
      const upper = rightAngles(rows.map(([step, , value]) => [step, value]));
      const lower = rightAngles(rows.map(([step, value]) => [step, value])).reverse();
      const points = [...upper, ...lower].map(([step, value]) => [this.x(step), this.y(value)]);
      this.pen.fillStyle = colors[index];
      this.pen.beginPath();
      points.forEach(([x, y], at) => { at === 0 ? this.pen.moveTo(x, y) : this.pen.lineTo(x, y); });
      this.pen.closePath();
      this.pen.fill();
      this.paths([upper.map(([step, value]) => [this.x(step), this.y(value)])], palette.paper, 1);
    });
  }
}

export class WhatIfChart extends Surface {
  /** Draw the line of every rule, those in `named` thicker, with their names and the steps that they would skip. */
  draw({ runs, steps }, named, palette) {
    this.clear();
    this.font = `10.5px ${palette.font}`;
    const [right, bottom] = [this.width - LABEL, this.height - EDGE.bottom];
    const { low, high, marks } = scaleAxis(runs.flatMap((run) => run.corners.map(([, value]) => value)));
    const end = Math.max(steps - 1, 1);
    this.x = (step) => EDGE.left + (step / end) * (right - EDGE.left);
    this.y = (value) => bottom - ((value - low) / (high - low)) * (bottom - EDGE.top);
    for (const tick of marks) {
      const at = Math.round(this.y(tick)) + 0.5;
      this.line(EDGE.left, at, right, at, palette.grid);
      this.powerOfTwo(tick, EDGE.left - 4, at, palette, "right");
    }
    for (const tick of ticks(0, end, 5)) this.text(integer(tick), Math.min(this.x(tick), right), this.height - 7, palette.soft, tick ? "center" : "left");
    const strong = runs.filter(({ name }) => named.includes(name));
    for (const run of runs) if (!strong.includes(run)) this.rule(run, palette.soft, 0.8, [3, 3]);
    for (const run of strong) this.rule(run, this.color(run, palette), 2);
    this.names(strong, palette);
  }

  color({ name }, palette) {
    return name === "recorded" ? palette.ink : palette.accent;
  }

  rule({ corners }, color, width, dash = []) {
    this.pen.lineJoin = "miter";
    this.paths([rightAngles(corners).map(([step, value]) => [this.x(step), this.y(value)])], color, width, dash);
  }

  names(runs, palette) {
    const shown = runs.filter(({ corners }) => corners.length);
    const heights = apart(shown.map(({ corners }) => this.y(corners.at(-1)[1])), 12, EDGE.top, this.height - EDGE.bottom);
    shown.forEach((run, index) => {
      const color = this.color(run, palette);
      this.text(run.name, this.width - LABEL + 6, heights[index], color, "left", `600 10.5px ${palette.font}`);
      this.skips(run, palette.warning, palette);
    });
  }

  skips({ corners, skips }, color, palette) {
    const marks = skips.map((step) => ({ at: this.x(step), foot: this.y(valueAt(corners, step) ?? 0) }));
    const options = { label: () => "", measure: () => 0, left: EDGE.left, right: this.width - LABEL, offset: 0, reach: 3 };
    for (const { at, marks: [{ foot }] } of mergedMarks(marks, options)) {
      const { pen } = this;
      pen.beginPath();
      pen.moveTo(at - 3.5, foot - 7);
      pen.lineTo(at + 3.5, foot - 7);
      pen.lineTo(at, foot - 1);
      pen.closePath();
      pen.fillStyle = color;
      pen.fill();
      pen.strokeStyle = palette.paper;
      pen.lineWidth = 0.8;
      pen.stroke();
    }
  }
}
