// The charts of the tab of the loss scale: right angles, areas on top of each other, labels apart, and what is drawn.

import assert from "node:assert/strict";
import test from "node:test";

import { apart, MemoryChart, RateChart, stacked, rightAngles, valueAt, WhatIfChart } from "../../amplab/views/web/scale_charts.js";
import { recordingCanvas } from "./recording_canvas.mjs";

const PALETTE = { ink: "ink", soft: "soft", grid: "grid", accent: "accent", faint: "faint", warning: "warning", paper: "paper", font: "sans" };

test("a value holds until the next corner", () => {
  assert.deepEqual(rightAngles([[0, 16], [5, 17], [9, 17]]), [[0, 16], [5, 16], [5, 17], [9, 17], [9, 17]]);
  assert.deepEqual([0, 4, 5, 100].map((step) => valueAt([[0, 16], [5, 17]], step)), [16, 16, 17, 17]);
});

test("areas lie on top of each other and reach to the end", () => {
  const kinds = [{ name: "a", values: [1, 3] }, { name: "b", values: [2, 2] }];
  assert.deepEqual(stacked({ steps: [0, 5], kinds, end: 9 }), [
    ["a", [[0, 0, 1], [5, 0, 3], [9, 0, 3]]], ["b", [[0, 1, 3], [5, 3, 5], [9, 3, 5]]],
  ]);
});

test("labels of lines that end at the same height move apart and stay inside", () => {
  for (const heights of [[50, 50, 50], [98, 99, 100], [3, 90, 4]]) {
    const placed = apart(heights, 12, 8, 100).sort((a, b) => a - b);
    assert.ok(placed[0] >= 8 && placed.at(-1) <= 100, String(placed));
    for (let at = 1; at < placed.length; at += 1) assert.ok(placed[at] - placed[at - 1] >= 12);
  }
});

test("each rule is a line, the chosen one is named and has a triangle where it would skip", () => {
  const run = (name, corners, skips = []) => ({ name, corners, skips });
  const runs = [run("recorded", [[0, 16], [99, 16]], [10]), run("your rule", [[0, 18], [40, 17], [99, 17]], [40, 80]), run("jmp", [[0, 15], [99, 15]], [3])];
  const canvas = recordingCanvas();
  new WhatIfChart(canvas).draw({ runs, steps: 100 }, ["recorded", "your rule"], PALETTE);
  assert.ok(canvas.texts().includes("recorded") && canvas.texts().includes("your rule") && !canvas.texts().includes("jmp"));
  assert.equal(canvas.fills().filter((color) => color === "warning").length, 3);
  assert.ok(canvas.strokes("accent").length === 1 && canvas.strokes("ink").length === 1);
});

test("empty series can be drawn", () => {
  for (const draw of [
    (canvas) => new RateChart(canvas).draw({ steps: [], values: [] }, 0, PALETTE),
    (canvas) => new MemoryChart(canvas).draw({ steps: [], kinds: [{ name: "a", values: [] }], end: 0 }, ["blue"], PALETTE),
    (canvas) => new WhatIfChart(canvas).draw({ runs: [{ name: "recorded", corners: [], skips: [] }], steps: 0 }, ["recorded"], PALETTE),
  ]) {
    const canvas = recordingCanvas();
    draw(canvas);
    assert.ok(canvas.numbers().every(Number.isFinite), JSON.stringify(canvas.numbers()));
  }
});

test("each kind of memory has the color of its legend", () => {
  const canvas = recordingCanvas();
  const kinds = [{ name: "parameters", values: [4] }, { name: "gradients", values: [2] }];
  new MemoryChart(canvas).draw({ steps: [0], kinds, end: 9 }, ["blue", "green"], PALETTE);
  assert.deepEqual(canvas.fills(), ["blue", "green"]);
});
