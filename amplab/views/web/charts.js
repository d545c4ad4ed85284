// The two live charts on canvas. A row is four float64: step, loss, loss scale used, marks (1 skipped, 2 injected).

import { Surface } from "./canvas.js";
import { changesLabel, mergedMarks, visibleChanges } from "./marks.js";
import { decades, decimal, integer, tickText, ticks } from "./numbers.js";
import { drawOverlays, lossesToShow, movingScales } from "./overlays.js";
import { stepAxis } from "./ranges.js";

export const SKIPPED = 1;
export const INJECTED = 2;
export const GUTTER = { left: 38, right: 10, top: 14, bottom: 17 };

// -- from rows to what is drawn; nothing from here to the classes touches the page --

/** The rows of a frame, from a DataView that may start at any byte. */
export function unpack(view) {
  const values = new Float64Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
  const rows = [];
  for (let at = 0; at < values.length; at += 4) rows.push(values.subarray(at, at + 4));
  return rows;
}

/** The row nearest to a step, by bisection. */
export function nearest(rows, step) {
  let low = 0;
  let high = rows.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows[middle][0] < step) low = middle + 1;
    else high = middle;
  }
  if (low > 0 && step - rows[low - 1][0] < rows[low][0] - step) low -= 1;
  return rows[low];
}

/** The vertical axis of the loss: `share` maps a value to [0, 1], and `marks` are its ticks. */
export function lossAxis(losses, logarithmic) {
  const most = losses.reduce((a, b) => Math.max(a, b), 0);
  const least = losses.reduce((a, b) => Math.min(a, b), 0);
  if (logarithmic && most > 0) {
    const top = most * 1.04;
    const smallest = losses.reduce((a, b) => (b > 0 ? Math.min(a, b) : a), most);
    const bottom = Math.max(top / 1e6, smallest);
    const span = Math.log(top / bottom);
    return { share: (value) => Math.log(Math.max(value, bottom) / bottom) / span, marks: decades(bottom, top) };
  }
  const top = most * 1.04 || (least < 0 ? 0 : 1);
  const bottom = least * 1.04;
  return { share: (value) => (value - bottom) / (top - bottom), marks: ticks(bottom, top, 3) };
}

/** The vertical axis of log2 of the scale: its ends and its ticks. */
export function scaleAxis(exponents) {
  const [least, most] = exponents.length
    ? [exponents.reduce((a, b) => Math.min(a, b)), exponents.reduce((a, b) => Math.max(a, b))]
    : [13, 17];
  const low = Math.floor(least - 1);
  const high = Math.max(Math.ceil(most + 1), low + 4);
  const gap = 2 ** Math.max(0, Math.ceil(Math.log2((high - low) / 6)));
  const marks = [];
  for (let at = Math.ceil(low / gap) * gap; at <= high; at += gap) marks.push(at);
  return { low, high, marks };
}

/** log2 of a scale, null for one that has no logarithm. */
export const log2 = (scale) => (scale > 0 && Number.isFinite(scale) ? Math.log2(scale) : null);

/** The least and the greatest value of each pixel column, as [column, least, most]. */
export function columns(finite, x) {
  const list = [];
  for (const [step, loss] of finite) {
    const at = Math.round(x(step));
    const last = list[list.length - 1];
    if (last?.[0] === at) list[list.length - 1] = [at, Math.min(last[1], loss), Math.max(last[2], loss)];
    else list.push([at, loss, loss]);
  }
  return list;
}

/** An exponential average over `span` steps as [step, mean], however many steps lie between two rows. */
export function smoothed(finite, span) {
  const list = [];
  for (const [step, loss] of finite) {
    if (list.length === 0) {
      list.push([step, loss]);
      continue;
    }
    const [last, mean] = list[list.length - 1];
    list.push([step, mean + (loss - mean) * (1 - Math.exp(-(step - last) / Math.max(span, 1)))]);
  }
  return list;
}

/** The corners of the scale's line as [step, log2]: the scale holds until it changes, so the line has only right angles. */
export function scaleCorners(rows) {
  const corners = [];
  let last = null;
  for (const [step, , scale] of rows) {
    const value = log2(scale);
    if (value === null || value === last) continue;
    if (last !== null) corners.push([step, last]);
    corners.push([step, value]);
    last = value;
  }
  if (last !== null) corners.push([rows[rows.length - 1][0], last]);
  return corners;
}

/** The ranges of steps with a fault that were not skipped (an active underflow), as [first, last]. */
export function faultStretches(rows) {
  const stretches = [];
  let first = null;
  rows.forEach(([step, , , marks], index) => {
    if (marks & INJECTED && !(marks & SKIPPED)) first ??= step;
    const goesOn = index + 1 < rows.length && rows[index + 1][3] & INJECTED;
    if (first === null || goesOn) return;
    stretches.push([first, step]);
    first = null;
  });
  return stretches;
}

/** The skipped row within `reach` px of a position, nearest first; else the row nearest to it; undefined without rows. */
export function rowAt(rows, x, at, reach = 6) {
  const distance = (row) => Math.abs(x(row[0]) - at);
  const skips = rows.filter((row) => row[3] & SKIPPED && distance(row) <= reach);
  const candidates = skips.length ? skips : rows;
  return candidates.reduce((best, row) => (distance(row) < distance(best) ? row : best), candidates[0]);
}

/** The rows of a frame that lie in a range of steps. */
export const rowsWithin = (rows, low, high) => rows.filter(([step]) => step >= low && step <= high);

/**
 * The losses that are NaN or infinite, as {at, word}: a word at the start of equal ones, if they span 30 px, or where the word
 * stands on their left, since it does not fit on their right, 60 px.
 */
export function nonfiniteMarks(rows, x, fits = () => true) {
  const marks = [];
  let named = -Infinity;
  let word = "";
  for (const [step, loss] of rows) {
    if (Number.isFinite(loss)) {
      word = "";
      continue;
    }
    const at = Math.round(x(step)) + 0.5;
    const name = decimal(loss);
    const isNamed = name !== word && at - named > (fits(at) ? 30 : 60);
    if (isNamed) [named, word] = [at, name];
    marks.push({ at, word: isNamed ? name : "" });
  }
  return marks;
}

// -- drawing --

/** What both charts share: the horizontal axis in steps, the marks of changes, the reading line, the selected step. */
class Chart extends Surface {
  frame(live, marks, y, label) {
    const { palette, low, high } = live;
    this.font = `10.5px ${palette.font}`;
    const right = this.width - GUTTER.right;
    this.axis = stepAxis(low, high, live.logarithmicSteps);
    this.x = (step) => GUTTER.left + this.axis.share(step) * (right - GUTTER.left);
    for (const tick of marks) {
      const at = Math.round(y(tick)) + 0.5;
      this.line(GUTTER.left, at, right, at, palette.grid);
      label(tick, at);
    }
    this.steps(this.axis.marks, low, palette.soft);
    this.changes(live);
    this.dragged(live);
  }

  /** The step at a horizontal position in px, not rounded. */
  stepAt(x) {
    return this.axis.step((x - GUTTER.left) / (this.width - GUTTER.left - GUTTER.right));
  }

  /** Clear the canvas; return whether there is something to draw, and say so if there is nothing. */
  begin({ rows, overlays, palette }) {
    this.clear();
    if (rows.length || overlays.length) return true;
    this.text("No step yet", this.width / 2, this.height / 2, palette.soft, "center", `12px ${palette.font}`);
    return false;
  }

  /** A dashed line at each change, with its text on top; changes too near to each other share a line and a count. */
  changes({ changes, low, high, palette }) {
    const bottom = this.height - GUTTER.bottom;
    const font = `600 10px ${palette.font}`;
    const marks = visibleChanges(changes, low, high).map((each) => ({ ...each, at: Math.round(this.x(each.step)) + 0.5 }));
    this.pen.font = font;
    const options = {
      label: changesLabel, measure: (text) => this.pen.measureText(text).width, left: GUTTER.left, right: this.width - 1, offset: 4, reach: 1,
    };
    for (const { at, last, marks: [first], text, flipped } of mergedMarks(marks, options)) {
      if (!first.isBefore && first.step > low) this.line(at, 4, at, bottom, palette.soft, [2, 3]);
      if (last - at > 2) this.line(at, 1.5, last, 1.5, palette.soft);
      this.text(text, flipped ? at - 4 : at + 4, 7, palette.soft, flipped ? "right" : "left", font);
    }
  }

  /** The height that is left for the curves. */
  get room() {
    return this.height - GUTTER.top - GUTTER.bottom;
  }

  /** The numbers of steps under the axis, moved left where the edge would cut one, and left out where two would touch. */
  steps(marks, low, color) {
    this.pen.font = this.font;
    let end = -Infinity;
    for (const tick of marks) {
      const text = integer(tick);
      const half = this.pen.measureText(text).width / 2;
      const at = tick === low ? this.x(tick) + half : Math.min(this.x(tick), this.width - 1 - half);
      if (at - half < end + 8) continue;
      end = at + half;
      this.text(text, at, this.height - 7, color, "center");
    }
  }

  /** Draw a line, and a dot instead of a line of a single point. */
  curve(points, color, width) {
    if (points.length === 1) this.dot(...points[0], color);
    else this.paths([points], color, width);
  }

  dot(x, y, color) {
    const { pen } = this;
    pen.beginPath();
    pen.arc(x, y, 2.4, 0, 2 * Math.PI);
    pen.fillStyle = color;
    pen.fill();
  }

  /** Keep what follows inside of the axes, as a zoomed line goes on beyond them. */
  clipped(draw) {
    const { pen } = this;
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER.left - 3, 0, this.width - GUTTER.left - GUTTER.right + 6, this.height - GUTTER.bottom + 1);
    pen.clip();
    draw();
    pen.restore();
  }

  /** Draw the lines of other runs; returns what draws their labels, which lie above the present line. */
  overlaid(live, points) {
    return drawOverlays(this, live, points, { top: GUTTER.top, right: this.width - GUTTER.right, bottom: this.height - GUTTER.bottom });
  }

  /** Wash the steps between the two ends of a drag. */
  dragged({ drag, palette }) {
    if (!drag) return;
    const [from, to] = [this.x(drag[0]), this.x(drag[1])];
    this.pen.fillStyle = palette.faint;
    this.pen.fillRect(Math.min(from, to), GUTTER.top, Math.abs(to - from), this.room);
  }

  /** The line that is read, and the selected step: a thicker line with a handle at each end, so that shape tells them apart. */
  reading({ reading, selected, low, high, palette }) {
    const bottom = this.height - GUTTER.bottom;
    if (reading !== null) {
      const at = Math.round(this.x(reading)) + 0.5;
      this.line(at, 2, at, bottom, palette.ink);
    }
    if (selected === null || selected < low || selected > high) return;
    const at = Math.round(this.x(selected));
    this.paths([[[at, GUTTER.top], [at, bottom]]], palette.ink, 2);
    this.pen.fillStyle = palette.ink;
    this.pen.fillRect(at - 4, GUTTER.top - 1, 8, 3);
    this.pen.fillRect(at - 4, bottom - 2, 8, 3);
  }
}

export class LossChart extends Chart {
  draw(live) {
    if (!this.begin(live)) return;
    const { rows, palette } = live;
    const finite = rows.filter((row) => Number.isFinite(row[1]));
    const axis = lossAxis(lossesToShow(finite.map((row) => row[1]), live.overlays), live.logarithmic);
    const y = (value) => GUTTER.top + this.room * (1 - axis.share(value));
    this.frame(live, axis.marks, y, (tick, at) => this.text(tickText(tick), GUTTER.left - 5, at, palette.soft, "right"));
    const strokes = columns(finite, this.x).map(([column, least, most]) => [[column + 0.5, y(most) - 0.5], [column + 0.5, y(least) + 0.5]]);
    const line = smoothed(finite, (live.high - live.low) / 200).map(([step, mean]) => [this.x(step), y(mean)]);
    this.pen.lineJoin = "round";
    const average = (some) => smoothed(some.filter((row) => Number.isFinite(row[1])), (live.high - live.low) / 200);
    const label = this.overlaid(live, (some) => average(some).map(([step, mean]) => [this.x(step), y(mean)]));
    this.clipped(() => {
      this.paths(strokes, palette.faint, 1);
      this.curve(line, palette.accent, 1.8);
    });
    this.edge(rows, palette);
    label();
    this.reading(live);
  }

  /** Draw each NaN and infinity, which have no height, as a tick on the upper edge. */
  edge(rows, palette) {
    const fits = (at) => at < this.width - 36;
    for (const { at, word } of nonfiniteMarks(rows, this.x, fits)) {
      this.line(at, GUTTER.top - 2, at, GUTTER.top + 6, palette.warning);
      if (!word) continue;
      this.text(word, fits(at) ? at + 3 : at - 3, GUTTER.top + 11, palette.warning, fits(at) ? "left" : "right", `700 10px ${palette.font}`);
    }
  }
}

export class ScaleChart extends Chart {
  draw(live) {
    if (!this.begin(live)) return;
    const { rows, palette } = live;
    const overlays = movingScales(live.overlays, rows);
    const every = [rows, ...overlays.map((overlay) => overlay.rows)].flat();
    const { low, high, marks } = scaleAxis(every.map((row) => log2(row[2])).filter((value) => value !== null));
    const y = (value) => GUTTER.top + this.room * (1 - (value - low) / (high - low));
    this.frame(live, marks, y, (tick, at) => this.powerOfTwo(tick, GUTTER.left - 4, at, palette, "right"));
    this.faults(rows, palette);
    this.pen.lineJoin = "miter";
    const label = this.overlaid({ ...live, overlays }, (some) => this.corners(some, y));
    this.clipped(() => this.curve(this.corners(rows, y), palette.accent, 1.8));
    this.skips(rows, y, palette);
    label();
    this.reading(live);
  }

  /** The points of the scale's line; of a single step, one point. */
  corners(rows, y) {
    const points = scaleCorners(rows).map(([step, value]) => [this.x(step), y(value)]);
    return rows.length === 1 ? points.slice(0, 1) : points;
  }

  /** Draw a bar along the bottom for each range of steps with a fault. */
  faults(rows, palette) {
    this.pen.fillStyle = palette.warning;
    for (const [first, last] of faultStretches(rows)) {
      const from = this.x(first);
      this.pen.fillRect(from, this.height - GUTTER.bottom - 3, Math.max(2, this.x(last) - from), 3);
    }
  }

  /** A tick at each skipped step, and a triangle; steps too near to each other share a triangle and a count. */
  skips(rows, y, palette) {
    const marks = rows.filter((row) => row[3] & SKIPPED).map(([step, , scale, bits]) => {
      const value = log2(scale);
      const foot = value === null ? this.height - GUTTER.bottom : y(value) - 2;
      return { at: this.x(step), foot, injected: Boolean(bits & INJECTED) };
    });
    for (const { at, foot } of marks) this.line(at, foot - 4, at, foot, palette.warning);
    const font = `600 9.5px ${palette.font}`;
    this.pen.font = font;
    const options = {
      label: (some) => (some.length > 1 ? `×${some.length}` : ""), measure: (text) => this.pen.measureText(text).width,
      left: GUTTER.left, right: this.width - 1, offset: 7, reach: 4.5,
    };
    for (const { at, marks: some, text, flipped } of mergedMarks(marks, options)) {
      const foot = Math.max(Math.min(...some.map((each) => each.foot)), 10);
      this.triangle(at, foot, palette.warning, some.every((each) => each.injected) ? palette.paper : palette.warning);
      this.text(text, flipped ? at - 7 : at + 7, foot - 5, palette.warning, flipped ? "right" : "left", font);
    }
  }

  /** A triangle that points down: filled for a skip that was not injected, hollow for an injected one. */
  triangle(x, y, color, fill) {
    const { pen } = this;
    pen.beginPath();
    pen.moveTo(x - 4.5, y - 7.5);
    pen.lineTo(x + 4.5, y - 7.5);
    pen.lineTo(x, y);
    pen.closePath();
    pen.fillStyle = fill;
    pen.fill();
    pen.lineWidth = 1.4;
    pen.strokeStyle = color;
    pen.stroke();
  }
}
