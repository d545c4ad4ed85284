// The heat map of the gradients: cells, names, words.

import assert from "node:assert/strict";
import test from "node:test";

import { heatText, HeatMap, shade, shortened } from "../../amplab/views/web/heat_map.js";
import { recordingCanvas } from "./recording_canvas.mjs";

const PALETTE = { ink: "ink", soft: "soft", grid: "grid", accent: "accent", faint: "faint", warning: "warning", paper: "paper", font: "sans" };
const MAP = {
  steps: [0, 20, 40], layers: ["hidden.weight", "output.bias"],
  underflow: [[0, 5, 100], [0, 0, 0]], overflow: [[0, 0, 0], [0, 0, 12]], nonfinite: [[0, 0, 0], [0, 3, 0]],
};

test("a small share can be told from none, and a larger one is darker", () => {
  const shades = [0, 0.01, 1, 10, 100].map(shade);
  assert.equal(shades[0], 0);
  assert.ok(shades[1] >= 0.15 && shades[4] === 1);
  assert.deepEqual(shades, [...shades].sort((a, b) => a - b));
});

test("a cell in words", () => {
  assert.equal(heatText(MAP, { kind: "underflow", layer: 0, column: 1 }), "step 20, hidden.weight: 5.0 % becomes zero");
  assert.equal(heatText(MAP, { kind: "overflow", layer: 1, column: 1 }), "step 20, output.bias: 0 % becomes infinite; 3.0 % NaN or inf");
});

test("a long name keeps its end", () => {
  const measure = (text) => 6 * text.length;
  assert.equal(shortened("a.b", measure, 60), "a.b");
  assert.equal(shortened("transformer.layer.weight", measure, 60), "…er.weight");
});

test("every cell is found under its own rectangle, and each loss is drawn once", () => {
  const canvas = recordingCanvas({ width: 700, height: 200 });
  const chart = new HeatMap(canvas);
  chart.draw(MAP, PALETTE, { reading: null, selected: null });
  const { panel, width, height } = chart.cells;
  for (const side of [0, 1]) {
    for (let layer = 0; layer < 2; layer += 1) {
      for (let column = 0; column < 3; column += 1) {
        const cell = chart.cellAt(MAP, 128 + side * (panel + 22) + (column + 0.5) * width, 18 + (layer + 0.5) * height);
        assert.deepEqual([cell.side, cell.layer, cell.column], [side, layer, column]);
      }
    }
  }
  assert.equal(chart.cellAt(MAP, 5, 100), null);
  assert.equal(canvas.rectangles().length, 2 + 4, "two grounds, two underflows, an overflow, a NaN");
});

test("a selected step frames its column in both maps, and an empty map can be drawn", () => {
  const canvas = recordingCanvas({ width: 700, height: 200 });
  new HeatMap(canvas).draw(MAP, PALETTE, { reading: null, selected: 22 });
  assert.equal(canvas.strokes("ink").length, 2);
  const empty = recordingCanvas();
  new HeatMap(empty).draw({ steps: [], layers: [], underflow: [], overflow: [], nonfinite: [] }, PALETTE, { reading: null, selected: 3 });
  assert.ok(empty.numbers().every(Number.isFinite));
});
