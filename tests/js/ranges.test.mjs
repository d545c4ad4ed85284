// The range of steps that the charts show: what a zoom, a drag, a move and a selection make of it.

import assert from "node:assert/strict";
import test from "node:test";

import { beyond, draggedRange, panned, showing, stepAxis, stepsToShow, windowOf, zoomed } from "../../amplab/views/web/ranges.js";

const RUN = 100_000;

test("the whole run begins at step 0, and a run that begins does not fill the axis", () => {
  assert.deepEqual(windowOf(null, RUN), { low: 0, high: RUN - 1 });
  assert.deepEqual(windowOf(null, 3), { low: 0, high: 100 });
});

test("the axis follows the present run, however long the runs behind it are", () => {
  const OLD = 11_600;
  assert.equal(stepsToShow(0, OLD), OLD, "a run that has not begun shows the others whole");
  assert.equal(stepsToShow(100, OLD), 300);
  assert.equal(stepsToShow(1000, OLD), 2000);
  assert.equal(stepsToShow(10_000, OLD), OLD);
  assert.equal(stepsToShow(20_000, OLD), 20_000);
  assert.equal(stepsToShow(100, 150), 150);
  assert.equal(stepsToShow(100, 0), 100);
  assert.deepEqual(beyond(100, OLD), { low: 0, high: OLD - 1 });
  assert.equal(beyond(10_000, OLD), null);
});

test("a step that is taken moves no chart that shows the end of the run", () => {
  for (const range of [null, { last: 500 }]) {
    assert.equal(showing(range, 11_600, 11_600), range, "before its frame has come");
    assert.equal(showing(range, 11_600, 11_601), range);
  }
});

test("the last 500 steps move with the run", () => {
  assert.deepEqual(windowOf({ last: 500 }, 1000), { low: 500, high: 999 });
  assert.deepEqual(windowOf({ last: 500 }, 1300), { low: 800, high: 1299 });
  assert.deepEqual(windowOf({ last: 500 }, 20), { low: 0, high: 499 });
});

test("a drag in either direction zooms to its steps, to single steps at the least", () => {
  assert.deepEqual(draggedRange(1000, 2000, RUN), { low: 1000, high: 2000 });
  assert.deepEqual(draggedRange(2000, 1000, RUN), { low: 1000, high: 2000 });
  const { low, high } = draggedRange(50_000.2, 50_000.4, RUN);
  assert.ok(low <= 50_000 && high >= 50_001 && high - low <= 4);
  assert.equal(draggedRange(-50, 2 * RUN, RUN), null);
});

test("zooming in keeps what it zooms around in place, and zooming out ends at the whole run", () => {
  let range = null;
  for (let times = 0; times < 30; times += 1) {
    range = zoomed(range, 0.5, 43_210, RUN);
    assert.ok(range.low <= 43_210 && 43_210 <= range.high);
  }
  assert.equal(range.high - range.low, 4);
  for (let times = 0; times < 30; times += 1) range = zoomed(range, 2, 43_210, RUN);
  assert.equal(range, null);
});

test("a range that follows the run still follows after a zoom", () => {
  assert.deepEqual(zoomed({ last: 500 }, 0.5, 0, RUN), { last: 251 });
  assert.equal(zoomed({ last: 80_000 }, 2, 0, RUN), null);
});

test("a moved range stays within the run", () => {
  const range = { low: 100, high: 300 };
  assert.deepEqual(panned(range, 0.5, RUN), { low: 200, high: 400 });
  assert.deepEqual(panned(range, -5, RUN), { low: 0, high: 200 });
  assert.deepEqual(panned(range, 1e6, RUN), { low: RUN - 201, high: RUN - 1 });
  assert.equal(panned(null, 0.5, RUN), null);
});

test("a selected row moves the chart to its step, so near that single steps are seen", () => {
  for (const range of [null, { low: 0, high: 500 }, { last: 500 }]) {
    const { low, high } = showing(range, 43_210, RUN);
    assert.ok(low <= 43_210 && 43_210 <= high && high - low <= 500);
  }
  const near = { low: 43_000, high: 43_400 };
  assert.equal(showing(near, 43_210, RUN), near, "a step that is seen moves nothing");
  assert.equal(showing(null, 12, 300), null);
});

test("both axes map to [0, 1] and back, and their ticks lie on them", () => {
  for (const [low, high] of [[0, 100], [0, 99_999], [500, 1000], [7, 11]]) {
    for (const logarithmic of [false, true]) {
      const { share, step, marks } = stepAxis(low, high, logarithmic);
      assert.ok(Math.abs(share(low)) < 1e-12 && Math.abs(share(high) - 1) < 1e-12);
      assert.ok(Math.abs(step(share((low + high) / 2)) - (low + high) / 2) < 1e-6 * high);
      for (const mark of marks) assert.ok(share(mark) >= -1e-9 && share(mark) <= 1 + 1e-9, `${mark} of ${low}…${high}`);
    }
  }
});
