// The filters of the op dtypes and the lines of the picture.

import assert from "node:assert/strict";
import { test } from "node:test";

import { ANY, cellText, keptRows, occurring, sameOp, strips } from "../../amplab/views/web/dtype_rows.js";

const row = (index, module, given = {}) => ({
  index, module, op: "linear", times: 1, phase: "forward", dtype: "float16", list: "none", cast: false, changed: false,
  inputs: [["float16", 1]], outputs: [["float16", 1]], ...given });
const ROWS = [
  row("1", "block.a"), row("2", "block.b", { cast: true, inputs: [["float32", 1]], list: "fp32" }),
  row("3", "head", { dtype: "float32", outputs: [["float32", 1]], changed: true }), row("4", "block.a", { phase: "backward" }), row("5", "")];
const MODULES = [
  { path: "Net", parent: "", depth: 0, label: "Net" }, { path: "block", parent: "Net", depth: 1, label: "block" },
  { path: "block.a", parent: "block", depth: 2, label: "a" }, { path: "block.b", parent: "block", depth: 2, label: "b" },
  { path: "head", parent: "Net", depth: 1, label: "head" }, { path: "", parent: "", depth: 0, label: "outside" }];
const ALL = { dtype: ANY, list: ANY, module: ANY, which: ANY };
const kept = (filters) => keptRows(ROWS, { ...ALL, ...filters }, MODULES).map((each) => each.index);

test("each filter keeps the rows that it names, and several keep what all of them keep", () => {
  assert.deepEqual(kept({}), ["1", "2", "3", "4", "5"]);
  assert.deepEqual(kept({ dtype: "float32" }), ["2", "3"]);
  assert.deepEqual(kept({ list: "fp32" }), ["2"]);
  assert.deepEqual(kept({ module: "block" }), ["1", "2", "4"]);
  assert.deepEqual(kept({ module: "Net" }), ["1", "2", "3", "4"]); // not those outside of the model
  assert.deepEqual(kept({ which: "casts" }), ["2"]);
  assert.deepEqual(kept({ which: "changed" }), ["3"]);
  assert.deepEqual(kept({ module: "block", which: "backward" }), ["4"]);
});

test("a line for each module, nested; a closed one shows the ops of all modules in it", () => {
  const open = strips(MODULES, ROWS, new Set());
  assert.deepEqual(open.map((each) => each.path), ["Net", "block", "block.a", "block.b", "head", ""]);
  assert.deepEqual(open.map((each) => each.hasChildren), [true, true, false, false, false, false]);
  const closed = strips(MODULES, ROWS, new Set(["block"]));
  assert.deepEqual(closed.map((each) => each.path), ["Net", "block", "head", ""]);
  assert.deepEqual(closed[1].forward.map((each) => each.index), ["1", "2"]);
  assert.deepEqual(closed[1].backward.map((each) => each.index), ["4"]);
  const model = strips(MODULES, ROWS, new Set(["Net"]));
  assert.deepEqual(model.map((each) => each.path), ["Net", ""]);
  assert.deepEqual(model[0].forward.map((each) => each.index), ["1", "2", "3"]);
});

test("a line without ops after filtering is left out", () => {
  assert.deepEqual(strips(MODULES, [ROWS[2]], new Set()).map((each) => each.path), ["Net", "block", "head"]);
});

test("what is said of a cell", () => {
  assert.equal(cellText(ROWS[0]), "linear in float16, forward");
  assert.equal(cellText({ ...ROWS[1], changed: true }), "cast to float16, forward, changed");
  assert.deepEqual(occurring(ROWS, "list"), ["none", "fp32"]);
});

test("the chosen op stays chosen in another trace, where its number differs", () => {
  const again = [row("7", "block.a"), row("8", "block.a"), row("9", "head")];
  assert.equal(sameOp(ROWS, again, "3"), "9");
  assert.equal(sameOp([row("1", "block.a"), row("2", "block.a")], again, "2"), "8");
  assert.equal(sameOp(ROWS, again, "5"), null);
  assert.equal(sameOp(ROWS, again, null), null);
});
