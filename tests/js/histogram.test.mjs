// The gradients' histogram: columns, readings and ranges, and one drawing on a canvas that only records.

import assert from "node:assert/strict";
import test from "node:test";

import { binAt, exponentTicks, GradientHistogram, nextBin, outline, readingTexts, zoneOf } from "../../amplab/views/web/histogram.js";
import { recordingCanvas } from "./recording_canvas.mjs";

const ZONES = [[-4, -2, "→ 0"], [-2, 0, "subnormal"], [0, 3, "normal"], [3, 4, "→ inf"]];
const CURVES = { low: -4, unscaled: [10, 40, 50, 0, 0, 0, 0, 0], scaled: [0, 0, 0, 10, 40, 50, 0, 0], zones: ZONES };
const PALETTE = { ink: "ink", soft: "soft", grid: "grid", accent: "accent", faint: "faint", warning: "warning", paper: "paper", font: "sans" };

test("a column spans from its power of two to the next", () => {
  assert.deepEqual(outline(-1, [3, 5]), [[-1, 0], [-1, 3], [0, 3], [0, 5], [1, 5], [1, 0]]);
});

test("every position over the plot belongs to one bin, in order, and none beside it", () => {
  const bins = Array.from({ length: 401 }, (_, x) => binAt(CURVES, x, 400));
  assert.equal(bins[0], null);
  assert.equal(bins[400], null);
  const inside = bins.filter((bin) => bin !== null);
  assert.deepEqual([...new Set(inside)], [0, 1, 2, 3, 4, 5, 6, 7]);
  assert.deepEqual(inside, [...inside].sort((a, b) => a - b));
});

test("the arrow keys begin at the fullest scaled bin and stop at the ends", () => {
  assert.equal(nextBin(CURVES, null, 1), 5);
  assert.equal(nextBin(CURVES, 5, 1), 6);
  assert.equal(nextBin(CURVES, 7, 1), 7);
  assert.equal(nextBin(CURVES, 0, -1), 0);
});

test("a reading names the power of two, its range and both shares", () => {
  assert.deepEqual(readingTexts(CURVES, 1), ["40.0 %", "0 %", "2⁻³"]);
  assert.deepEqual(readingTexts(CURVES, null), ["", "", ""]);
});

test("every bin lies in a range, and the first of a range belongs to it", () => {
  const names = CURVES.unscaled.map((_, bin) => zoneOf(CURVES, bin));
  assert.deepEqual(names, ["→ 0", "→ 0", "subnormal", "subnormal", "normal", "normal", "normal", "→ inf"]);
});

test("the labels are multiples of eight", () => {
  assert.deepEqual(exponentTicks(-44, 25), [-40, -32, -24, -16, -8, 0, 8, 16, 24]);
  assert.ok(!Object.is(exponentTicks(-3, 9)[0], -0));
});

test("both curves, the ranges and their names are drawn, and what float16 keeps is not washed", () => {
  const canvas = recordingCanvas();
  new GradientHistogram(canvas).draw(CURVES, PALETTE, null);
  assert.equal(canvas.strokes("ink").length, 1, "unscaled");
  assert.equal(canvas.strokes("accent").length, 1, "scaled");
  assert.deepEqual(canvas.fills(), ["grid", "faint"]);
  assert.equal(canvas.rectangles().length, 4);
  for (const [, , name] of ZONES) assert.ok(canvas.texts().includes(name), name);
  assert.ok(canvas.numbers().every(Number.isFinite));
});

test("a reading frames its column", () => {
  const canvas = recordingCanvas();
  new GradientHistogram(canvas).draw(CURVES, PALETTE, 2);
  assert.equal(canvas.strokes("ink").length, 2);
});

test("gradients that are all zero can be drawn", () => {
  const canvas = recordingCanvas();
  const nothing = new Array(8).fill(0);
  new GradientHistogram(canvas).draw({ ...CURVES, unscaled: nothing, scaled: nothing }, PALETTE, nextBin({ ...CURVES, scaled: nothing }, null, 1));
  assert.ok(canvas.numbers().every(Number.isFinite));
});
