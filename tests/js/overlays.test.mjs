// The lines of other runs in the charts, and the words of the table of runs.

import assert from "node:assert/strict";
import test from "node:test";

import { labelHeights, lossesToShow, movingScales, overlaidSteps, stepsBehind } from "../../amplab/views/web/overlays.js";
import { runNote } from "../../amplab/views/web/tab_runs.js";

const line = (...losses) => ({ rows: losses.map((loss, step) => [step, loss, 2 ** 16, 0]) });

test("labels that would cover each other move apart, stay in their order and inside of the chart", () => {
  const heights = labelHeights([90, 90, 20, 90, 91], 10, 95);
  assert.equal(heights[2], 20);
  const sorted = [...heights].sort((a, b) => a - b);
  for (let at = 1; at < sorted.length; at += 1) assert.ok(sorted[at] - sorted[at - 1] >= 11);
  assert.ok(Math.min(...heights) >= 10 && Math.max(...heights) <= 95);
  assert.ok(heights[0] < heights[1] && heights[1] < heights[3] && heights[3] < heights[4]);
});

test("a run that diverges does not flatten the present one, and NaN has no height", () => {
  assert.deepEqual(lossesToShow([2, 1], [line(2.3, 1e6, NaN, 0.5)]), [2, 1, 2.3, 0.5]);
  assert.deepEqual(lossesToShow([], [line(2, 1)]), [2, 1]);
});

test("the axis of steps reaches as far as the longest run", () => {
  assert.equal(overlaidSteps([]), 0);
  assert.equal(overlaidSteps([line(1, 2, 3), { rows: [] }]), 3);
});

test("a scale that never moves is not drawn beside one that does", () => {
  const fixed = { rows: [[0, 1, 1, 0], [9, 1, 1, 0]] };
  const moving = { rows: [[0, 1, 65536, 0], [9, 1, 131072, 0]] };
  assert.deepEqual(movingScales([fixed, moving], [[0, 1, 65536, 0]]), [moving]);
  assert.deepEqual(movingScales([fixed], [[0, 1, 1, 0]]), [fixed], "unless the present one is there too");
});

test("a row says how its run differs and why it failed", () => {
  assert.equal(runNote({ number: null, differs: "", outcome: "" }), "the present run");
  assert.equal(runNote({ number: 1, differs: "", outcome: "" }), "same setting");
  assert.equal(runNote({ number: 1, name: "O3", differs: "O3", outcome: "" }), "only the level differs");
  assert.equal(runNote({ number: 1, differs: "O3", outcome: "did not learn" }), "O3 · ✕ did not learn");
  assert.equal(runNote({ number: 1, differs: "O3", outcome: "", is_training: true }), "O3 · training …");
});

test("a page asks for more steps of the runs behind than it shows, and for none if it has all", () => {
  const whole = line(...Array(100).fill(1));
  const thinned = { rows: whole.rows.map(([step, ...rest]) => [7 * step, ...rest]) };
  assert.equal(stepsBehind([whole], 0, 99), null);
  assert.equal(stepsBehind([], 0, 99), null);
  assert.deepEqual(stepsBehind([whole, thinned], 0, 600), { low: 0, high: 2048 });
  for (const [low, high] of [[0, 3], [300, 400], [511, 513], [1000, 5000]]) {
    const asked = stepsBehind([thinned], low, high);
    assert.ok(asked.low <= low && asked.high >= high && asked.high - asked.low <= 4 * (high - low));
  }
});

test("the scale of a run that moves is drawn also where only steps without a move are visible", () => {
  const [still, moving] = [[[0, 1, 1, 0], [1, 1, 1, 0]], [[0, 1, 2, 0], [1, 1, 4, 0]]];
  const visible = [[1, 1, 4, 0]];
  assert.deepEqual(movingScales([{ whole: moving, rows: visible }, { whole: still, rows: still }], [[0, 1, 8, 0]]).map(({ rows }) => rows), [visible]);
});
