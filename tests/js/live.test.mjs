// The figures above the charts, as text.

import assert from "node:assert/strict";
import test from "node:test";

import { scoreText, readRow } from "../../amplab/views/web/live.js";

test("a score is a share in percent or a number, and one that is not finite has its name", () => {
  assert.equal(scoreText({ score: 0.9361, score_is_share: true }), "93.6 %");
  assert.equal(scoreText({ score: 8.25, score_is_share: false }), "8.250");
  assert.equal(scoreText({ score: null }), "–");
  assert.equal(scoreText({ score: "NaN" }), "NaN");
  assert.equal(scoreText({ score: "-inf" }), "-inf");
});

test("rows of a range that come after a reset are not read", () => {
  const [one, two] = [[3, 0.5, 1024, 0], [4, 0.4, 1024, 0]];
  assert.equal(readRow({ shown: [one], rows: [], reading: null }), undefined);
  assert.equal(readRow({ shown: [], rows: [two], reading: null }), undefined);
  assert.equal(readRow({ shown: [one, two], rows: [two], reading: null }), two);
  assert.equal(readRow({ shown: [one, two], rows: [two], reading: 3 }), one);
});
