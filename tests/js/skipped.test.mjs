// The tab of skipped steps.

import assert from "node:assert/strict";
import { test } from "node:test";
import { holdsStep, skipWords } from "../../amplab/views/web/tab_skipped.js";

test("a selected step marks the row that holds it", () => {
  const row = { step: 3, last: 9 };
  assert.deepEqual([2, 3, 9, 10, null].map((step) => holdsStep(row, step)), [false, true, true, false, false]);
});

test("a row is named by its steps", () => {
  assert.equal(skipWords({ step: 1, last: 2999, is_first: true }), "First skip. Steps 1 to 2,999: show in the charts");
  assert.equal(skipWords({ step: 7, last: 7, is_first: false }), "Step 7: show in the charts");
});
