// The gradients' histogram on canvas. It shows the unscaled gradients, the share of the elements in each power of two; above
// it lie the ranges of float16 for unscaled and for scaled gradients. The latter slide as the loss scale moves.
//
// Curves are { low, unscaled, scale, edges }: shares in percent for the magnitudes from 2^low up, log2 of the loss scale, and
// log2 of where float16's subnormals, its normal numbers and its overflow begin.

import { Surface } from "./canvas.js";
import { percent, raised, tickText, ticks } from "./numbers.js";

const MARGIN = { left: 56, right: 6, top: 34, bottom: 32 };
const TICK = 8; // powers of two between two ticks
const LEAST_TICK = 30; // px between two ticks
export const ZONES = ["→ 0", "subnormal", "normal", "→ inf"];
const WASH = { "→ 0": 0.14, subnormal: 0.06, normal: 0, "→ inf": 0.14 }; // float16 keeps fewer bits of a subnormal

// -- from shares to what is drawn --

/** The ranges of float16 as [from, to, name] for unscaled magnitudes, if they are multiplied by 2^scale. */
export function zonesAt({ low, unscaled, edges }, scale) {
  const [start, end] = [low, low + unscaled.length];
  const bounds = [-Infinity, ...edges.map((edge) => edge - scale), Infinity].map((edge) => Math.min(Math.max(edge, start), end));
  return ZONES.map((name, index) => [bounds[index], bounds[index + 1], name]);
}

/** The name of the range that a bin lies in, multiplied by 2^scale. */
export function zoneOf(curves, bin, scale) {
  const middle = curves.low + bin + 0.5 + Math.round(scale);
  return ZONES[curves.edges.filter((edge) => edge <= middle).length];
}

/** The shares in percent that become zero and infinite at a scale of 2^scale. */
export function lostAt(curves, scale) {
  const sums = { "→ 0": 0, subnormal: 0, normal: 0, "→ inf": 0 };
  curves.unscaled.forEach((share, bin) => { sums[zoneOf(curves, bin, scale)] += share; });
  return { zero: sums["→ 0"], inf: sums["→ inf"] };
}

/** The bin under a horizontal position in px, or null outside the plot. */
export function binAt(curves, x, width) {
  const share = (x - MARGIN.left) / (width - MARGIN.left - MARGIN.right);
  const bin = Math.floor(share * curves.unscaled.length);
  return bin >= 0 && bin < curves.unscaled.length ? bin : null;
}

/** The bin that an arrow key moves to; without a bin, the fullest one. */
export function nextBin(curves, bin, move) {
  if (bin === null) return curves.unscaled.indexOf(Math.max(...curves.unscaled));
  return Math.min(Math.max(bin + move, 0), curves.unscaled.length - 1);
}

/** What is read at a bin: its magnitude and share, and its ranges unscaled and scaled. */
export function readingText(curves, bin, scale) {
  if (bin === null) return "";
  const magnitude = `2${raised(curves.low + bin)}: ${percent(curves.unscaled[bin])}`;
  return `${magnitude}; unscaled ${zoneOf(curves, bin, 0)}, scaled ${zoneOf(curves, bin, scale)}`;
}

/** The powers of two that are labeled, with `room` px for a power of two. */
export function exponentTicks(low, high, room = LEAST_TICK) {
  const gap = TICK * Math.max(1, Math.ceil(LEAST_TICK / (TICK * room)));
  const list = [];
  for (let at = Math.ceil(low / gap) * gap; at <= high; at += gap) list.push(at || 0);
  return list;
}

// -- drawing --

export class GradientHistogram extends Surface {
  /** Draw at the scale 2^scale, which slides to that of the curves; `reading` is a bin or null. */
  draw(curves, palette, reading, scale = curves.scale) {
    this.clear();
    this.font = `10.5px ${palette.font}`;
    const { low, unscaled } = curves;
    const bottom = this.height - MARGIN.bottom;
    const top = Math.max(...unscaled, 1) * 1.05;
    this.x = (exponent) => MARGIN.left + ((exponent - low) / unscaled.length) * (this.width - MARGIN.left - MARGIN.right);
    this.y = (share) => bottom - (share / top) * (bottom - MARGIN.top);
    this.bands("unscaled", zonesAt(curves, 0), 1, palette, reading === null ? null : zoneOf(curves, reading, 0));
    this.bands("scaled", zonesAt(curves, scale), 16, palette, reading === null ? null : zoneOf(curves, reading, scale));
    this.wash(zonesAt(curves, scale), palette);
    this.axes(low, low + unscaled.length, top, palette);
    this.bars(curves, scale, palette);
    if (reading !== null) this.column(low + reading, palette);
  }

  /** One row of ranges above the plot, with its name on the left; the range that is read is written in the color of the text. */
  bands(name, zones, top, palette, read) {
    const { pen } = this;
    this.text(name, 2, top + 7, palette.ink, "left", `600 10px ${palette.font}`);
    for (const [from, to, zone] of zones) {
      const [left, width] = [this.x(from), this.x(to) - this.x(from)];
      if (width <= 0) continue;
      pen.fillStyle = WASH[zone] ? palette.warning : palette.accent;
      pen.globalAlpha = WASH[zone] ? 2 * WASH[zone] : 0.16;
      pen.fillRect(left, top, Math.max(width - 1, 1), 14);
      pen.globalAlpha = 1;
      const [color, weight] = zone === read ? [palette.ink, 700] : [palette.soft, 400];
      pen.font = `${weight} 10px ${palette.font}`;
      if (pen.measureText(zone).width + 4 <= width) this.text(zone, left + width / 2, top + 7, color, "center", `${weight} 10px ${palette.font}`);
    }
  }

  /** Wash what float16 loses at the scale. */
  wash(zones, palette) {
    const { pen } = this;
    for (const [from, to, name] of zones) {
      pen.fillStyle = palette.warning;
      pen.globalAlpha = WASH[name];
      pen.fillRect(this.x(from), MARGIN.top, this.x(to) - this.x(from), this.height - MARGIN.bottom - MARGIN.top);
      pen.globalAlpha = 1;
    }
  }

  axes(low, high, top, palette) {
    for (const tick of ticks(0, top, 3)) {
      const at = Math.round(this.y(tick)) + 0.5;
      this.line(MARGIN.left, at, this.width - MARGIN.right, at, palette.grid);
      this.text(`${tickText(tick)} %`, MARGIN.left - 4, at, palette.soft, "right");
    }
    const under = this.height - MARGIN.bottom + 9;
    const room = this.x(low + 1) - this.x(low);
    for (const exponent of exponentTicks(low, high, room)) this.powerOfTwo(exponent, this.x(exponent), under, palette, "center");
    this.text("gradient magnitude, unscaled", (this.x(low) + this.x(high)) / 2, this.height - 6, palette.soft, "center");
  }

  /** A bar for each power of two: filled where float16 holds it, hatched by an outline where it is lost. */
  bars(curves, scale, palette) {
    const { pen } = this;
    curves.unscaled.forEach((share, bin) => {
      if (share <= 0) return;
      const zone = zoneOf(curves, bin, scale);
      const isLost = zone === "→ 0" || zone === "→ inf";
      const [left, top] = [this.x(curves.low + bin), this.y(share)];
      const [width, height] = [this.x(curves.low + bin + 1) - left - 1, Math.max(this.y(0) - top, 1)];
      pen.fillStyle = isLost ? palette.paper : palette.accent;
      pen.globalAlpha = zone === "subnormal" ? 0.5 : 1;
      pen.fillRect(left, top, width, height);
      pen.globalAlpha = 1;
      if (isLost) this.paths([[[left + 0.5, top + height], [left + 0.5, top], [left + width - 0.5, top], [left + width - 0.5, top + height]]], palette.warning, 1.4);
    });
  }

  /** The column that is read, framed over the whole height. */
  column(exponent, palette) {
    const [left, right] = [Math.round(this.x(exponent)) + 0.5, Math.round(this.x(exponent + 1)) + 0.5];
    const bottom = this.height - MARGIN.bottom;
    this.paths([[[left, MARGIN.top], [left, bottom]], [[right, MARGIN.top], [right, bottom]]], palette.ink, 1);
  }
}
