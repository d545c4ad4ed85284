// What fits on a card, for any batch size.

import assert from "node:assert/strict";
import { test } from "node:test";

import { activationsOf, batchAt, GB, largestBatch, partsOf, sliderOf, totalOf, typedBatch, typedCard } from "../../amplab/views/web/memory_sums.js";

const LEVEL = { fixed: { parameters: 400, masters: 0 }, activations: 6404, perExample: 100, batch: 64 };
const KINDS = [["parameters", "parameters"], ["masters", "masters"], ["activations", "activations"]];

test("activations grow with the batch, everything else does not", () => {
  assert.equal(activationsOf(LEVEL, 64), 6404);
  assert.equal(activationsOf(LEVEL, 128), 12804);
  assert.equal(totalOf(LEVEL, 128), 13204);
  assert.deepEqual(partsOf(LEVEL, KINDS, 1), [["parameters", 400], ["masters", 0], ["activations", 104]]);
});

test("the largest batch is the last one that fits", () => {
  const batch = largestBatch(LEVEL, 1e-5 * GB);
  assert.ok(totalOf(LEVEL, batch) <= 1e-5 * GB && totalOf(LEVEL, batch + 1) > 1e-5 * GB);
  assert.equal(largestBatch(LEVEL, 100), 0);
  assert.equal(largestBatch({ ...LEVEL, perExample: 0 }, GB), null);
});

test("the slider goes by powers of two", () => {
  assert.equal(sliderOf(64), 6);
  assert.equal(batchAt(6), 64);
  assert.equal(batchAt(0), 1);
});

test("a batch or a card that cannot be is refused", () => {
  assert.deepEqual(typedBatch("64"), { value: 64 });
  assert.deepEqual(typedCard("0.5"), { value: 0.5 });
  for (const text of ["0", "-4", "2.5", "", "x"]) assert.match(typedBatch(text).refused, /is not allowed; enter a whole number above 0/);
  for (const text of ["0", "-1", "", "x"]) assert.match(typedCard(text).refused, /is not allowed; enter a number above 0/);
});
