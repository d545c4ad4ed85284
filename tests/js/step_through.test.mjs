// The logic of the tab that walks through a step: histograms as paths, bits as cells, the next stage.

import assert from "node:assert/strict";
import test from "node:test";

import { bitCells, bitsInWords, commonTop, nextStage, shortName, stairs } from "../../amplab/views/web/tab_step_through.js";

test("a histogram is a path of steps, from the bottom left to the bottom right", () => {
  assert.equal(stairs([0, 50, 100], 100), "M0 1V1H1V0.5H2V0H3V1Z");
});

test("two histograms share the axis of the higher one, and an empty one has an axis too", () => {
  assert.equal(commonTop({ shares: [1, 20] }, { shares: [40, 3] }), 40);
  assert.equal(commonTop({ shares: [0] }, null), 1);
});

test("the bits of a pattern keep their order, and those that changed or were cut are marked", () => {
  const cells = bitCells({ sign: "1", exponent: "01", fraction: "110", changed: [0, 3], cut: 2 });
  assert.equal(cells.map((cell) => cell.bit).join(""), "101110");
  assert.deepEqual(cells.map((cell) => cell.field), ["sign", "exponent", "exponent", "fraction", "fraction", "fraction"]);
  assert.deepEqual(cells.flatMap((cell, index) => (cell.isChanged ? [index] : [])), [0, 3]);
  assert.deepEqual(cells.flatMap((cell, index) => (cell.isCut ? [index] : [])), [4, 5]);
});

test("bits are read out by field, with the kind of the number", () => {
  assert.equal(bitsInWords({ sign: "0", exponent: "00000", fraction: "0000000001", kind: "subnormal" }),
    "sign 0, exponent 00000, fraction 0000000001: subnormal");
});

test("the walk ends at the last stage", () => {
  assert.equal(nextStage(0, 8), 1);
  assert.equal(nextStage(7, 8), null);
  assert.equal(nextStage(0, 0), null);
});

test("a gradient is written as a derivative", () => {
  assert.equal(shortName("gradient of the output of hidden1"), "∂ output of hidden1");
  assert.equal(shortName("gradient of hidden1.weight, unscaled"), "∂ hidden1.weight, unscaled");
  assert.equal(shortName("loss × scale"), "loss × scale");
});
