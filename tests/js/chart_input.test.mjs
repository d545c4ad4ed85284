// A view knows its own selections, however late the kernel answers.

import assert from "node:assert/strict";
import test from "node:test";

import { OwnSelections } from "../../amplab/views/web/chart_input.js";

test("the late answers to a double click are its own, a row clicked after it is not", () => {
  const own = new OwnSelections();
  assert.ok(own.asks(40, null)); // the first click
  assert.ok(!own.asks(40, null), "the second click asks for nothing new");
  assert.ok(own.asks(null, null), "the double click takes it back");
  assert.ok(own.answers(40));
  assert.ok(own.answers(null));
  assert.ok(!own.answers(40));
});

test("what the kernel has selected is not asked for", () => {
  const own = new OwnSelections();
  assert.ok(!own.asks(7, 7));
  assert.ok(!own.answers(7), "nothing is on the way");
});
