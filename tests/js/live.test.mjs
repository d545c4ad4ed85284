// The figures above the charts, as text.

import assert from "node:assert/strict";
import test from "node:test";

import { scoreText } from "../../amplab/views/web/live.js";

test("a score is a share in percent or a number, and one that is not finite has its name", () => {
  assert.equal(scoreText({ score: 0.9361, score_is_share: true }), "93.6 %");
  assert.equal(scoreText({ score: 8.25, score_is_share: false }), "8.250");
  assert.equal(scoreText({ score: null }), "–");
  assert.equal(scoreText({ score: "NaN" }), "NaN");
  assert.equal(scoreText({ score: "-inf" }), "-inf");
});
