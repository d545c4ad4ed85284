// The gradients' histogram on canvas: the share of the elements in each power of two, before and after the loss scale.
// Curves are {low, unscaled, scaled, zones}: shares in percent for the magnitudes from 2^low up, and the ranges of
// float16 as [from, to, name] in powers of two.

import { Surface } from "./canvas.js";
import { percent, raised, tickText, ticks } from "./numbers.js";

const MARGIN = { left: 36, right: 6, top: 18, bottom: 32 };
const TICK = 8; // powers of two between two ticks
const WASH = { subnormal: 0.06, normal: 0 }; // float16 keeps fewer bits of a subnormal, and loses the rest of its range
const LOST = 0.14;

// -- from shares to what is drawn --

/** The outline of a histogram as [power of two, share]: each column spans [2^e, 2^(e+1)). */
export function outline(low, shares) {
  const corners = shares.flatMap((share, index) => [[low + index, share], [low + index + 1, share]]);
  return [[low, 0], ...corners, [low + shares.length, 0]];
}

/** The bin under a horizontal position in px, or null outside the plot. */
export function binAt(curves, x, width) {
  const share = (x - MARGIN.left) / (width - MARGIN.left - MARGIN.right);
  const bin = Math.floor(share * curves.unscaled.length);
  return bin >= 0 && bin < curves.unscaled.length ? bin : null;
}

/** The bin that an arrow key moves to; without a bin, the fullest one of the scaled gradients. */
export function nextBin(curves, bin, move) {
  if (bin === null) return curves.scaled.indexOf(Math.max(...curves.scaled));
  return Math.min(Math.max(bin + move, 0), curves.unscaled.length - 1);
}

/** The name of the range of float16 that a bin lies in. */
export function zoneOf(curves, bin) {
  const middle = curves.low + bin + 0.5;
  return curves.zones.find(([from, to]) => from <= middle && middle < to)[2];
}

/** What is read at a bin: the unscaled share, the scaled share, and the magnitude as "2⁻²⁴". */
export function readingTexts(curves, bin) {
  if (bin === null) return ["", "", ""];
  return [percent(curves.unscaled[bin]), percent(curves.scaled[bin]), `2${raised(curves.low + bin)}`];
}

/** The powers of two that are labeled. */
export function exponentTicks(low, high) {
  const list = [];
  for (let at = Math.ceil(low / TICK) * TICK; at <= high; at += TICK) list.push(at || 0);
  return list;
}

// -- drawing --

export class GradientHistogram extends Surface {
  draw(curves, palette, reading) {
    this.clear();
    this.font = `10.5px ${palette.font}`;
    const { low, unscaled, scaled } = curves;
    const bottom = this.height - MARGIN.bottom;
    const top = Math.max(...unscaled, ...scaled, 1) * 1.05;
    this.x = (exponent) => MARGIN.left + ((exponent - low) / unscaled.length) * (this.width - MARGIN.left - MARGIN.right);
    this.y = (share) => bottom - (share / top) * (bottom - MARGIN.top);
    this.zones(curves.zones, palette, reading === null ? null : zoneOf(curves, reading));
    this.axes(low, low + unscaled.length, top, palette);
    this.curve(outline(low, unscaled), palette.grid, palette.ink, [2, 2]);
    this.curve(outline(low, scaled), palette.faint, palette.accent);
    if (reading !== null) this.column(low + reading, palette);
  }

  /** Wash what float16 loses; name every range above the plot, the one that is read in the color of the text. */
  zones(zones, palette, read) {
    const { pen } = this;
    const bottom = this.height - MARGIN.bottom;
    for (const [from, to, name] of zones) {
      pen.fillStyle = palette.warning;
      pen.globalAlpha = WASH[name] ?? LOST;
      pen.fillRect(this.x(from), MARGIN.top, this.x(to) - this.x(from), bottom - MARGIN.top);
      pen.globalAlpha = 1;
      const [color, weight] = name === read ? [palette.ink, 600] : [palette.soft, 400];
      this.text(name, this.x((from + to) / 2), 9, color, "center", `${weight} 10px ${palette.font}`);
    }
  }

  axes(low, high, top, palette) {
    for (const tick of ticks(0, top, 4)) {
      const at = Math.round(this.y(tick)) + 0.5;
      this.line(MARGIN.left, at, this.width - MARGIN.right, at, palette.grid);
      this.text(`${tickText(tick)} %`, MARGIN.left - 4, at, palette.soft, "right");
    }
    const under = this.height - MARGIN.bottom + 9;
    for (const exponent of exponentTicks(low, high)) this.powerOfTwo(exponent, this.x(exponent), under, palette, "center");
    this.text("gradient magnitude", (this.x(low) + this.x(high)) / 2, this.height - 6, palette.soft, "center");
  }

  curve(corners, fill, color, dash = []) {
    const points = corners.map(([exponent, share]) => [this.x(exponent), this.y(share)]);
    this.paths([points], color, 1.4, dash);
    this.pen.fillStyle = fill;
    this.pen.fill();
  }

  /** The column that is read, framed over the whole height. */
  column(exponent, palette) {
    const [left, right] = [Math.round(this.x(exponent)) + 0.5, Math.round(this.x(exponent + 1)) + 0.5];
    const bottom = this.height - MARGIN.bottom;
    this.paths([[[left, MARGIN.top], [left, bottom]], [[right, MARGIN.top], [right, bottom]]], palette.ink, 1);
  }
}
