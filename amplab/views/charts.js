// The two live charts on canvas. A row is four float64: step, loss, loss scale used, marks (1 skipped, 2 injected).

const SKIPPED = 1;
const INJECTED = 2;
const GUTTER = { left: 38, right: 10, top: 14, bottom: 17 };

/** Steps 1, 2 or 5 times a power of ten apart, about `count` of them. */
function ticks(low, high, count) {
  const raw = (high - low) / count;
  const size = 10 ** Math.floor(Math.log10(raw));
  const gap = size * [1, 2, 5, 10].find((factor) => size * factor >= raw);
  const list = [];
  for (let at = Math.ceil(low / gap) * gap; at <= high + gap * 1e-9; at += gap) list.push(at);
  return list;
}

/** A canvas sized to its box and to the screen's pixels. */
class Surface {
  constructor(canvas) {
    this.canvas = canvas;
    this.pen = canvas.getContext("2d");
  }

  clear() {
    const ratio = window.devicePixelRatio || 1;
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
    }
    this.pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.pen.clearRect(0, 0, width, height);
    Object.assign(this, { width, height });
  }

  line(x0, y0, x1, y1, colour, dash = []) {
    const { pen } = this;
    pen.strokeStyle = colour;
    pen.lineWidth = 1;
    pen.setLineDash(dash);
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
    pen.setLineDash([]);
  }

  text(text, x, y, colour, align = "left", font = this.font) {
    const { pen } = this;
    pen.font = font;
    pen.fillStyle = colour;
    pen.textAlign = align;
    pen.textBaseline = "middle";
    pen.fillText(text, x, y);
  }

  /** A triangle that points down: filled for a skip of its own, hollow for an injected one. */
  triangle(x, y, colour, hollow, paper) {
    const { pen } = this;
    pen.beginPath();
    pen.moveTo(x - 4.5, y - 7.5);
    pen.lineTo(x + 4.5, y - 7.5);
    pen.lineTo(x, y);
    pen.closePath();
    pen.fillStyle = hollow ? paper : colour;
    pen.fill();
    pen.lineWidth = 1.4;
    pen.strokeStyle = colour;
    pen.stroke();
  }
}

/** What both charts share: the horizontal axis in steps, marks of level changes, the reading line. */
class Chart extends Surface {
  frame(live, yTicks, y, label) {
    const { palette, levels, low, high } = live;
    this.font = `10.5px ${palette.font}`;
    const right = this.width - GUTTER.right;
    const bottom = this.height - GUTTER.bottom;
    this.x = (step) => GUTTER.left + ((step - low) / (high - low)) * (right - GUTTER.left);
    for (const tick of yTicks) {
      const at = Math.round(y(tick)) + 0.5;
      this.line(GUTTER.left, at, right, at, palette.grid);
      label(tick, at);
    }
    for (const tick of ticks(low, high, 6)) {
      this.step(tick, tick === low ? "left" : "center", palette.soft);
    }
    levels.forEach(([step, name], index) => {
      if (step < low && index + 1 < levels.length && levels[index + 1][0] <= low) return;
      const at = Math.round(this.x(Math.max(step, low))) + 0.5;
      if (step > low) this.line(at, 4, at, bottom, palette.soft, [2, 3]);
      this.text(name, at + 4, 7, palette.soft, "left", `600 10px ${palette.font}`);
    });
  }

  /** The number of a step under the axis, moved in where the edge would cut it. */
  step(tick, align, colour) {
    const text = integer(tick);
    this.pen.font = this.font;
    const most = this.width - 1 - this.pen.measureText(text).width / 2;
    this.text(text, align === "center" ? Math.min(this.x(tick), most) : this.x(tick), this.height - 7, colour, align);
  }

  reading(live, step) {
    if (step === null) return;
    const at = Math.round(this.x(step)) + 0.5;
    this.line(at, 2, at, this.height - GUTTER.bottom, live.palette.ink);
  }
}

class LossChart extends Chart {
  draw(live) {
    this.clear();
    const { rows, palette } = live;
    const finite = rows.filter((row) => Number.isFinite(row[1]));
    const log = live.logarithmic && finite.some((row) => row[1] > 0);
    const top = finite.reduce((most, row) => Math.max(most, row[1]), 0) * 1.04 || 1;
    const bottom = log ? Math.max(top / 1e6, finite.reduce((least, row) => (row[1] > 0 ? Math.min(least, row[1]) : least), top)) : 0;
    const height = this.height - GUTTER.top - GUTTER.bottom;
    const share = log
      ? (value) => Math.log(Math.max(value, bottom) / bottom) / Math.log(top / bottom || 1)
      : (value) => value / top;
    const y = (value) => GUTTER.top + height * (1 - share(value));
    const marks = log ? decades(bottom, top) : ticks(0, top, 3);
    this.frame(live, marks, y, (tick, at) => this.text(tickText(tick), GUTTER.left - 5, at, palette.soft, "right"));
    this.envelope(finite, y, palette);
    this.smooth(finite, y, palette, (live.high - live.low) / 200);
    this.edge(rows, palette);
    this.reading(live, live.reading);
  }

  /** Every value, as one vertical stroke per pixel column from its least to its greatest. */
  envelope(finite, y, palette) {
    const { pen } = this;
    pen.strokeStyle = palette.faint;
    pen.lineWidth = 1;
    pen.beginPath();
    let column = null, least = 0, most = 0;
    const flush = () => {
      if (column === null) return;
      pen.moveTo(column + 0.5, y(most) - 0.5);
      pen.lineTo(column + 0.5, y(least) + 0.5);
    };
    for (const [step, loss] of finite) {
      const at = Math.round(this.x(step));
      if (at === column) {
        least = Math.min(least, loss);
        most = Math.max(most, loss);
      } else {
        flush();
        [column, least, most] = [at, loss, loss];
      }
    }
    flush();
    pen.stroke();
  }

  /** Exponential average over `span` steps, whatever the thinning left between two rows. */
  smooth(finite, y, palette, span) {
    const { pen } = this;
    pen.strokeStyle = palette.accent;
    pen.lineWidth = 1.8;
    pen.lineJoin = "round";
    pen.beginPath();
    let mean = null, last = 0;
    for (const [step, loss] of finite) {
      mean = mean === null ? loss : mean + (loss - mean) * (1 - Math.exp(-(step - last) / Math.max(span, 1)));
      if (last === 0) pen.moveTo(this.x(step), y(mean));
      else pen.lineTo(this.x(step), y(mean));
      last = step;
    }
    pen.stroke();
  }

  /** NaN and inf have no height: each is a tick on the upper edge, never dropped, and each run of them is named once. */
  edge(rows, palette) {
    let named = -Infinity, word = "";
    for (const [step, loss] of rows) {
      if (Number.isFinite(loss)) {
        word = "";
        continue;
      }
      const at = Math.round(this.x(step)) + 0.5;
      this.line(at, GUTTER.top - 2, at, GUTTER.top + 6, palette.skip);
      const name = decimal(loss);
      if (name !== word && at - named > 30) {
        const fits = at < this.width - 36;
        this.text(name, fits ? at + 3 : at - 3, GUTTER.top + 11, palette.skip, fits ? "left" : "right", `700 10px ${palette.font}`);
        [named, word] = [at, name];
      }
    }
  }
}

/** A tick of the loss in few letters: 0.01, 10⁻⁴, 2e-3. */
function tickText(tick) {
  if (tick === 0 || (tick >= 0.00999 && tick < 1e5)) return String(+tick.toPrecision(3));
  const power10 = Math.round(Math.log10(tick));
  return Math.abs(tick / 10 ** power10 - 1) < 1e-6 ? `10${raised(power10)}` : tick.toExponential(0).replace("+", "");
}

/** Powers of ten within the range; both ends where there is none. */
function decades(low, high) {
  const list = [];
  for (let power10 = Math.ceil(Math.log10(low)); 10 ** power10 <= high; power10 += 1) list.push(10 ** power10);
  return list.length ? list : [low, high];
}

class ScaleChart extends Chart {
  draw(live) {
    this.clear();
    const { rows, palette } = live;
    const log2 = (scale) => (scale > 0 && Number.isFinite(scale) ? Math.log2(scale) : null);
    const heights = rows.map((row) => log2(row[2])).filter((value) => value !== null);
    const low = Math.floor(Math.min(...minmax(heights)) - 1);
    const high = Math.max(Math.ceil(Math.max(...minmax(heights)) + 1), low + 4);
    const y = (value) => GUTTER.top + (this.height - GUTTER.top - GUTTER.bottom) * (1 - (value - low) / (high - low));
    const gap = 2 ** Math.max(0, Math.ceil(Math.log2((high - low) / 6)));
    const marks = [];
    for (let at = Math.ceil(low / gap) * gap; at <= high; at += gap) marks.push(at);
    this.frame(live, marks, y, (tick, at) => this.exponent(tick, at, palette));
    this.injected(rows, palette);
    this.steps(rows, log2, y, palette);
    this.skips(rows, log2, y, palette);
    this.reading(live, live.reading);
  }

  exponent(tick, at, palette) {
    const small = `8.5px ${palette.font}`;
    this.text(String(tick), GUTTER.left - 4, at - 3, palette.soft, "right", small);
    this.text("2", GUTTER.left - 5 - this.pen.measureText(String(tick)).width, at + 1, palette.soft, "right");
  }

  /** The scale holds between two changes, so the line goes level, then upright. */
  steps(rows, log2, y, palette) {
    const { pen } = this;
    pen.strokeStyle = palette.accent;
    pen.lineWidth = 1.8;
    pen.lineJoin = "miter";
    pen.beginPath();
    let last = null;
    for (const [step, , scale] of rows) {
      const value = log2(scale);
      if (value === null) continue;
      if (last === null) pen.moveTo(this.x(step), y(value));
      else if (value !== last) {
        pen.lineTo(this.x(step), y(last));
        pen.lineTo(this.x(step), y(value));
      }
      last = value;
    }
    if (last !== null) pen.lineTo(this.x(rows[rows.length - 1][0]), y(last));
    pen.stroke();
  }

  /** Steps with a fault that were not skipped (an underflow that is on): a bar along the bottom. */
  injected(rows, palette) {
    this.pen.fillStyle = palette.skip;
    let since = null;
    rows.forEach(([step, , , marks], index) => {
      if (marks & INJECTED && !(marks & SKIPPED)) since ??= this.x(step);
      const on = since !== null && index + 1 < rows.length && rows[index + 1][3] & INJECTED;
      if (since === null || on) return;
      this.pen.fillRect(since, this.height - GUTTER.bottom - 3, Math.max(2, this.x(step) - since), 3);
      since = null;
    });
  }

  /** A triangle stands on the line at each skip; where they crowd, ticks stand beside one, an injected one if there is any. */
  skips(rows, log2, y, palette) {
    const triangles = [];
    for (const [step, , scale, marks] of rows) {
      if (!(marks & SKIPPED)) continue;
      const value = log2(scale);
      const mark = { at: this.x(step), foot: value === null ? this.height - GUTTER.bottom : y(value) - 2, hollow: Boolean(marks & INJECTED) };
      const last = triangles[triangles.length - 1];
      this.line(mark.at, mark.foot - 4, mark.at, mark.foot, palette.skip);
      if (!last || mark.at - last.at >= 7) triangles.push(mark);
      else if (mark.hollow && !last.hollow) triangles[triangles.length - 1] = mark;
    }
    for (const { at, foot, hollow } of triangles) this.triangle(at, foot, palette.skip, hollow, palette.paper);
  }
}

function minmax(values) {
  if (!values.length) return [13, 17];
  return [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
}
