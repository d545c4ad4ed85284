// The charts in words, for hover and for screen readers.

import assert from "node:assert/strict";
import test from "node:test";

import { lossSummary, scaleSummary, stepLines } from "../../amplab/views/web/chart_words.js";
import { INJECTED, SKIPPED } from "../../amplab/views/web/charts.js";

const ROWS = [
  [0, 2.5, 2 ** 16, 0], [1, NaN, 2 ** 17, SKIPPED | INJECTED], [2, 0.5, 2 ** 16, 0], [3, 0.75, 2 ** 18, SKIPPED], [4, 1, 2 ** 17, 0],
];
const CHANGE = { step: 2, field: "lr", label: "lr 0.01", text: "Learning rate 0.1 → 0.01" };

test("the values of a step are its loss, its scale, whether it was skipped, and what was changed", () => {
  assert.deepEqual(stepLines(ROWS[1], []), ["step 1", "loss NaN", "scale 2¹⁷", "skipped, injected"]);
  assert.deepEqual(stepLines(ROWS[2], [CHANGE]), ["step 2", "loss 0.5000", "scale 2¹⁶", "Learning rate 0.1 → 0.01"]);
  assert.equal(stepLines(ROWS[2], Array(9).fill(CHANGE)).at(-1), "and 4 more changes");
});

test("the loss in words", () => {
  assert.equal(lossSummary(ROWS, 0), "Training loss, steps 0 to 4: from 2.50 to 1.00; smallest 0.500 at step 2, largest 2.50 at step 0; "
    + "1 of the drawn steps have a loss that is NaN or infinite.");
  assert.equal(lossSummary([], 0), "No step yet.");
  assert.match(lossSummary([[0, NaN, 1, 0]], 0), /no finite value/);
});

test("the loss scale in words, with skipped steps and changes", () => {
  const text = scaleSummary(ROWS, 0, [{ ...CHANGE, step: 0, field: "start", text: "start" }, CHANGE]);
  assert.equal(text, "Loss scale, steps 0 to 4: from 2¹⁶ to 2¹⁷, lowest 2¹⁶, highest 2¹⁸. Skipped steps: 1 (injected), 3. "
    + "Changes: step 2: Learning rate 0.1 → 0.01.");
  assert.match(scaleSummary(ROWS.slice(0, 1), 0, []), /No step was skipped\.$/);
});
