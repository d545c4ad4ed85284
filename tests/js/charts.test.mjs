// The live charts: from rows to lines, marks and axes, and one drawing on a canvas that only records.

import assert from "node:assert/strict";
import test from "node:test";

import {
  columns, faultStretches, GUTTER, INJECTED, LossChart, log2, lossAxis, nearest, nonfiniteMarks, rowAt, rowsWithin, scaleAxis,
  ScaleChart, scaleCorners, SKIPPED, smoothed, unpack,
} from "../../amplab/views/web/charts.js";
import { recordingCanvas } from "./recording_canvas.mjs";

const row = (step, loss = 1, scale = 2 ** 16, marks = 0) => [step, loss, scale, marks];
const identity = (value) => value;

test("rows are read out of a buffer from any byte on", () => {
  const bytes = new Uint8Array(3 + 64);
  bytes.set(new Uint8Array(new Float64Array([0, 0.5, 1024, 1, 1, NaN, 512, 2]).buffer), 3);
  const rows = unpack(new DataView(bytes.buffer, 3, 64)).map((each) => [...each]);
  assert.deepEqual(rows, [[0, 0.5, 1024, 1], [1, NaN, 512, 2]]);
  assert.deepEqual(unpack(new DataView(new ArrayBuffer(0))), []);
});

test("nearest finds what a search of every row finds", () => {
  const rows = [0, 1, 5, 6, 20, 21].map((step) => row(step));
  for (let at = -3; at < 25; at += 0.25) {
    const best = Math.min(...rows.map(([step]) => Math.abs(step - at)));
    assert.equal(Math.abs(nearest(rows, at)[0] - at), best, `at ${at}`);
  }
});

test("a smoothed line has one point for each row and starts at the first, whatever its step", () => {
  for (const start of [0, 1, 7]) {
    const line = smoothed([row(start, 4), row(start + 1, 2), row(start + 2, 2)], 1);
    assert.deepEqual(line.map(([step]) => step), [start, start + 1, start + 2]);
    assert.equal(line[0][1], 4);
    assert.ok(line[1][1] < 4 && line[1][1] > line[2][1] && line[2][1] > 2);
  }
});

test("smoothing over a gap of steps equals smoothing over each of them", () => {
  const each = Array.from({ length: 11 }, (_, step) => row(step, step === 0 ? 1 : 3));
  const dense = smoothed(each, 20).at(-1)[1];
  const sparse = smoothed([each[0], each[10]], 20).at(-1)[1];
  assert.ok(Math.abs(dense - sparse) < 1e-12);
});

test("a pixel column keeps its least and its greatest loss", () => {
  const finite = [row(0, 5), row(0.2, 1), row(0.4, 9), row(1, 2), row(2.1, 3), row(1.9, 4)];
  assert.deepEqual(columns(finite, identity), [[0, 1, 9], [1, 2, 2], [2, 3, 4]]);
});

test("the loss axis reaches from zero beyond the greatest loss", () => {
  const { share, marks } = lossAxis([0.5, 2], false);
  assert.equal(share(0), 0);
  assert.ok(share(2) > 0.9 && share(2) < 1);
  assert.deepEqual(marks, [0, 1, 2]);
});

test("a negative loss stays within the axis", () => {
  const { share } = lossAxis([-3, 1], false);
  for (const loss of [-3, 0, 1]) assert.ok(share(loss) >= 0 && share(loss) <= 1, `share(${loss}) = ${share(loss)}`);
  assert.ok(lossAxis([-3, -1], false).share(-3) >= 0);
});

test("an axis of no loss, of zeros and of one loss has finite shares", () => {
  for (const losses of [[], [0], [1e-30], [7]]) {
    for (const logarithmic of [false, true]) {
      const { share, marks } = lossAxis(losses, logarithmic);
      for (const value of [...losses, ...marks]) assert.ok(Number.isFinite(share(value)), `${losses} ${logarithmic}`);
    }
  }
});

test("a logarithmic axis spans at most six decades, and values below lie on its edge", () => {
  const { share, marks } = lossAxis([1e-12, 1], true);
  assert.equal(share(1e-12), 0);
  assert.equal(share(0), 0);
  assert.ok(Math.abs(share(1e-3) - 0.5) < 0.01);
  assert.equal(marks.length, 6);
});

test("log2 is null where a scale has none", () => {
  assert.deepEqual([65536, 0.25, 0, -1, NaN, Infinity].map(log2), [16, -2, null, null, null, null]);
});

test("the scale axis leaves room above and below and has few ticks", () => {
  assert.deepEqual(scaleAxis([16]), { low: 15, high: 19, marks: [15, 16, 17, 18, 19] });
  assert.deepEqual(scaleAxis([]), { low: 12, high: 18, marks: [12, 13, 14, 15, 16, 17, 18] });
  assert.ok(scaleAxis([-40, 24]).marks.length <= 8);
});

test("the scale's line has right angles only and ends at the last row", () => {
  const rows = [row(0), row(1), row(2, 1, 2 ** 15), row(3, 1, 0), row(4, 1, 2 ** 15)];
  assert.deepEqual(scaleCorners(rows), [[0, 16], [2, 16], [2, 15], [4, 15]]);
  assert.deepEqual(scaleCorners([]), []);
  assert.deepEqual(scaleCorners([row(0, 1, NaN)]), []);
});

test("a fault that is on is one stretch, and a skipped step of its own is none", () => {
  const rows = [row(0), row(1, 1, 1, INJECTED), row(2, 1, 1, INJECTED), row(3), row(4, 1, 1, INJECTED | SKIPPED), row(5, 1, 1, INJECTED)];
  assert.deepEqual(faultStretches(rows), [[1, 2], [5, 5]]);
});

test("the pointer finds a skipped step before a nearer row", () => {
  const rows = [row(0), row(10, 1, 1, SKIPPED), row(13), row(40)];
  assert.equal(rowAt(rows, identity, 13)[0], 10);
  assert.equal(rowAt(rows, identity, 30)[0], 40);
  assert.equal(rowAt([], identity, 30), undefined);
  assert.deepEqual(rowsWithin(rows, 10, 13).map(([step]) => step), [10, 13]);
});

test("every loss that is not finite is marked, and named once in a run of equal ones", () => {
  const rows = [row(0, NaN), row(1, NaN), row(2, 1), row(50, Infinity), row(51, -Infinity), row(100, -Infinity)];
  const marks = nonfiniteMarks(rows, identity);
  assert.equal(marks.length, 5);
  assert.deepEqual(marks.map(({ word }) => word), ["NaN", "", "inf", "", "-inf"]);
  const named = (fits) => nonfiniteMarks([row(0, NaN), row(20, 1), row(40, NaN), row(60, 1), row(80, NaN)], identity, fits).map(({ word }) => word);
  assert.deepEqual(named(() => true), ["NaN", "NaN", "NaN"]);
  assert.deepEqual(named((at) => at < 30), ["NaN", "", "NaN"], "a word on the left of its mark needs the room of two");
});

const change = (step, label, field = "opt_level") => ({ step, field, label, text: `${field} ${label}` });
const LIVE = {
  changes: [change(0, "O1", "start")], overlays: [], low: 0, high: 100, logarithmic: false, logarithmicSteps: false, reading: null, selected: null, drag: null,
  palette: { ink: "ink", soft: "soft", grid: "grid", accent: "accent", faint: "faint", warning: "warning", paper: "paper", font: "sans" },
};

test("a run that starts at step 0 keeps the first segment of its loss", () => {
  const canvas = recordingCanvas();
  new LossChart(canvas).draw({ ...LIVE, rows: [row(0, 3), row(40, 2), row(100, 1)] });
  const [line] = canvas.strokes("accent");
  assert.deepEqual(line.map(([kind]) => kind), ["moveTo", "lineTo", "lineTo"]);
});

test("a chart without a step says so, and has no axes, unless other runs lie behind it", () => {
  for (const Chart of [LossChart, ScaleChart]) {
    const texts = (overlays) => {
      const canvas = recordingCanvas();
      new Chart(canvas).draw({ ...LIVE, rows: [], overlays });
      return canvas.texts();
    };
    assert.deepEqual(texts([]), ["No step yet"]);
    assert.ok(texts([{ name: "Run 1", color: "ink", dash: [], rows: [row(0), row(1, 1, 4)] }]).includes("Run 1"));
  }
});

test("an empty run, and one without a single finite number, can be drawn", () => {
  for (const rows of [[], [row(0, NaN, NaN), row(1, Infinity, 0, SKIPPED)]]) {
    for (const Chart of [LossChart, ScaleChart]) {
      const canvas = recordingCanvas();
      new Chart(canvas).draw({ ...LIVE, rows, reading: rows.length ? 1 : null });
      assert.ok(canvas.numbers().every(Number.isFinite));
    }
  }
});

test("a skipped step is a full triangle, an injected one a hollow one", () => {
  const canvas = recordingCanvas();
  new ScaleChart(canvas).draw({ ...LIVE, rows: [row(0), row(30, 1, 2 ** 16, SKIPPED), row(60, 1, 2 ** 15, SKIPPED | INJECTED)] });
  assert.deepEqual(canvas.fills(), ["warning", "paper"]);
});

/** The labels of the changes as [left, right, text]. */
function changeLabels(canvas) {
  return canvas.calls.filter(([name, , , y]) => name === "fillText" && y === 7).map(([, text, x, , { align }]) =>
    (align === "right" ? [x - 6 * text.length, x, text] : [x, x + 6 * text.length, text]));
}

test("ten changes in a row are legible: no label overlaps another and none is cut", () => {
  for (const gap of [0, 1, 2, 5, 9]) {
    const changes = [change(0, "O1", "start"), ...Array.from({ length: 10 }, (_, index) => change(5 + index * gap, `O${index % 4}`))];
    for (const Chart of [LossChart, ScaleChart]) {
      const canvas = recordingCanvas();
      new Chart(canvas).draw({ ...LIVE, changes, rows: [row(0), row(100)] });
      const labels = changeLabels(canvas);
      assert.ok(labels.length >= 1);
      labels.forEach(([left, right, text], index) => {
        assert.ok(left >= GUTTER.left && right <= 400, `${text} is cut`);
        if (index) assert.ok(left > labels[index - 1][1], `${text} overlaps ${labels[index - 1][2]}`);
      });
      const counted = labels.reduce((sum, [, , text]) => sum + Number(/^(\d+) changes|×(\d+)$/.exec(text)?.slice(1).find(Boolean) ?? 1), 0);
      assert.equal(counted, 11, "every change is counted in a label");
    }
  }
});

test("a change at the last step has its label on the left of its line, uncut", () => {
  const canvas = recordingCanvas();
  new LossChart(canvas).draw({ ...LIVE, changes: [change(0, "O1", "start"), change(100, "learning rate")], rows: [row(0), row(100)] });
  const [, [left, right, text]] = changeLabels(canvas);
  assert.equal(text, "learning rate");
  assert.ok(left > GUTTER.left && right <= 400 - GUTTER.right);
});

test("a single step is a dot on both charts", () => {
  for (const Chart of [LossChart, ScaleChart]) {
    const canvas = recordingCanvas();
    new Chart(canvas).draw({ ...LIVE, rows: [row(0, 2)] });
    const dots = canvas.calls.filter(([name]) => name === "arc");
    assert.equal(dots.length, 1);
    assert.ok(dots[0].slice(1, 3).every(Number.isFinite));
    assert.ok(canvas.fills().includes("accent"));
  }
});

test("skipped steps that would overlap share a triangle with their number", () => {
  const skips = Array.from({ length: 60 }, (_, index) => row(20 + index / 4, 1, 2 ** 16, SKIPPED));
  const canvas = recordingCanvas();
  new ScaleChart(canvas).draw({ ...LIVE, rows: [row(0), ...skips, row(90, 1, 2 ** 15, SKIPPED | INJECTED)] });
  const counts = canvas.texts().filter((text) => text.startsWith("×")).map((text) => Number(text.slice(1)));
  assert.equal(counts.reduce((a, b) => a + b), 60);
  assert.ok(counts.length > 1, "a dense row of skips keeps its place on the axis");
  assert.equal(canvas.fills().at(-1), "paper", "the injected one stays apart and hollow");
});

test("a selected step is drawn with handles, on a zoomed range only where it lies", () => {
  const drawn = (low, high) => {
    const canvas = recordingCanvas();
    new ScaleChart(canvas).draw({ ...LIVE, low, high, selected: 50, rows: [row(low), row(high)] });
    return canvas.rectangles().filter(([, , width, height]) => width === 8 && height === 3).length;
  };
  assert.deepEqual([drawn(0, 100), drawn(60, 100)], [2, 0]);
});

test("axes of steps: linear and logarithmic map back and forth", () => {
  for (const logarithmicSteps of [false, true]) {
    const chart = new LossChart(recordingCanvas());
    chart.draw({ ...LIVE, low: 0, high: 100_000, logarithmicSteps, rows: [row(0), row(100_000)] });
    for (const step of [0, 10, 999, 100_000]) assert.ok(Math.abs(chart.stepAt(chart.x(step)) - step) < 1e-6 * (step + 1));
  }
});
