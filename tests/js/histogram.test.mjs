// The gradients' histogram: columns, readings and ranges, and one drawing on a canvas that only records.

import assert from "node:assert/strict";
import test from "node:test";

import {
  binAt, exponentTicks, GradientHistogram, lostAt, nextBin, readingText, zoneOf, ZONES, zonesAt,
} from "../../amplab/views/web/histogram.js";
import { recordingCanvas } from "./recording_canvas.mjs";

// Magnitudes from 2^-4 to 2^4; "float16" becomes subnormal at 2^-2, normal at 2^0, infinite at 2^3.
const CURVES = { low: -4, unscaled: [10, 40, 50, 0, 0, 0, 0, 0], scale: 2, edges: [-2, 0, 3] };
const PALETTE = { ink: "ink", soft: "soft", grid: "grid", accent: "accent", faint: "faint", warning: "warning", paper: "paper", font: "sans" };

test("every position over the plot belongs to one bin, in order, and none beside it", () => {
  const bins = Array.from({ length: 401 }, (_, x) => binAt(CURVES, x, 400));
  assert.equal(bins[0], null);
  assert.equal(bins[400], null);
  const inside = bins.filter((bin) => bin !== null);
  assert.deepEqual([...new Set(inside)], [0, 1, 2, 3, 4, 5, 6, 7]);
  assert.deepEqual(inside, [...inside].sort((a, b) => a - b));
});

test("the arrow keys begin at the fullest bin and stop at the ends", () => {
  assert.equal(nextBin(CURVES, null, 1), 2);
  assert.equal(nextBin(CURVES, 5, 1), 6);
  assert.equal(nextBin(CURVES, 7, 1), 7);
  assert.equal(nextBin(CURVES, 0, -1), 0);
});

test("a reading names the magnitude, its share and its ranges unscaled and scaled", () => {
  assert.equal(readingText(CURVES, 1, 2), "2⁻³: 40.0 %; unscaled → 0, scaled subnormal");
  assert.equal(readingText(CURVES, null, 2), "");
});

test("the ranges slide by the scale, cover the axis without gaps, and agree with the range of each bin", () => {
  for (let scale = -6; scale <= 20; scale += 1) {
    const zones = zonesAt(CURVES, scale);
    assert.deepEqual([zones[0][0], zones.at(-1)[1]], [-4, 4]);
    for (let at = 1; at < zones.length; at += 1) assert.equal(zones[at][0], zones[at - 1][1]);
    CURVES.unscaled.forEach((_, bin) => {
      const [, , name] = zones.find(([from, to]) => from <= bin - 4 && bin - 4 < to);
      assert.equal(zoneOf(CURVES, bin, scale), name, `bin ${bin}, scale 2^${scale}`);
    });
  }
  assert.deepEqual(zonesAt(CURVES, 0).map(([from]) => from), [-4, -2, 0, 3]);
  assert.deepEqual(zonesAt(CURVES, 1).map(([from]) => from), [-4, -3, -1, 2]);
});

test("a scale that is tried says what it loses", () => {
  assert.deepEqual(lostAt(CURVES, 0), { zero: 50, inf: 0 });
  assert.deepEqual(lostAt(CURVES, 2), { zero: 0, inf: 0 });
  assert.deepEqual(lostAt(CURVES, 6), { zero: 0, inf: 90 });
});

test("the labels are multiples of eight", () => {
  assert.deepEqual(exponentTicks(-44, 25), [-40, -32, -24, -16, -8, 0, 8, 16, 24]);
  assert.ok(!Object.is(exponentTicks(-3, 9)[0], -0));
});

test("unscaled and scaled are named, with the ranges of each, and lost bars look different from kept ones", () => {
  const canvas = recordingCanvas({ width: 600, height: 200 });
  new GradientHistogram(canvas).draw({ ...CURVES, scale: 1 }, PALETTE, null);
  const texts = canvas.texts();
  for (const name of ["unscaled", "scaled", "gradient magnitude, unscaled"]) assert.ok(texts.includes(name), name);
  assert.equal(texts.filter((text) => ZONES.includes(text)).length, 8, "four ranges in each row");
  assert.equal(canvas.strokes("warning").length, 1, "the bar of 2^-4 becomes zero");
  assert.ok(canvas.numbers().every(Number.isFinite));
});

test("a reading frames its column", () => {
  const canvas = recordingCanvas();
  new GradientHistogram(canvas).draw(CURVES, PALETTE, 2);
  assert.equal(canvas.strokes("ink").length, 1);
});

test("gradients that are all zero can be drawn", () => {
  const canvas = recordingCanvas();
  const nothing = { ...CURVES, unscaled: new Array(8).fill(0) };
  new GradientHistogram(canvas).draw(nothing, PALETTE, nextBin(nothing, null, 1));
  assert.ok(canvas.numbers().every(Number.isFinite));
});
