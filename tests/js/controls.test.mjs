// The logic of the controls and of the bit explorer that needs no page.

import assert from "node:assert/strict";
import test from "node:test";

import { pieces } from "../../amplab/views/web/bit_explorer.js";
import { changeNote, exponentOf, faultNote, optionOf, powerOfTwo, speedPosition, speedText } from "../../amplab/views/web/controls.js";
import { arrowTarget, typed, visible } from "../../amplab/views/web/elements.js";

test("an exponent becomes a number where float64 has it, else text that a refusal can quote", () => {
  assert.equal(powerOfTwo(16), 65536);
  assert.equal(powerOfTwo(-1074), 5e-324);
  assert.equal(powerOfTwo(2000), "2**2000");
  assert.equal(powerOfTwo(-2000), "2**-2000");
  assert.equal(powerOfTwo("not a number"), "not a number");
});

test("an empty field is no number, and what a browser refuses to read is not taken for an empty one", () => {
  assert.equal(typed({ value: "0.5", validity: { badInput: false } }), 0.5);
  assert.equal(typed({ value: "", validity: { badInput: false } }), null);
  assert.equal(typed({ value: "", validity: { badInput: true } }), "not a number"); // such as 1e400
});

test("a value that is shown as an exponent comes back as the same value", () => {
  for (const value of [1, 128, 65536, 2 ** -14]) assert.equal(powerOfTwo(exponentOf(value)), value);
  assert.equal(exponentOf(1000), 9.97);
  assert.equal(exponentOf(null), null);
});

test("the note below the faults says what will happen next", () => {
  assert.match(faultNote(["overflow", "nan"], false, false), /^Overflow and NaN/);
  assert.match(faultNote([], true, true), /Underflow/);
  assert.equal(faultNote(["nan"], false, true), faultNote([], false, true));
});

test("control characters, and what turns the direction of text, are shown as the kernel shows them", () => {
  const hostile = "a\x1b[2J\x9b\r\u202eb\u2066\u200f\u061c\u2028\ud800";
  assert.equal(visible(hostile), "a\\x1b[2J\\x9b\\r\\u202eb\\u2066\\u200f\\u061c\\u2028\\ud800");
  for (const text of ["fc.weight", "2⁻¹⁴ → ×3, ≠", "two\n\tlines", "שלום", "🙂"]) assert.equal(visible(text), text);
});

test("arrow keys wrap around, and other keys or other elements move nothing", () => {
  assert.equal(arrowTarget("ArrowRight", 2, 3), 0);
  assert.equal(arrowTarget("ArrowUp", 0, 3), 2);
  assert.equal(arrowTarget("Tab", 0, 3), null);
  assert.equal(arrowTarget("toString", 0, 3), null);
  assert.equal(arrowTarget("ArrowRight", -1, 3), null);
});

test("raised digits become superscripts, and no letter is lost", () => {
  assert.deepEqual(pieces("2⁻¹² = 2.4e-4"), [["2", false], ["−12", true], [" = 2.4e-4", false]]);
  assert.deepEqual(pieces("NaN"), [["NaN", false]]);
});

test("an option is found by its text, whatever its type", () => {
  const options = [[null, "O2: True"], [true, "True"], [false, "False"], ["cnn", "CNN"]];
  for (const [value] of options) assert.equal(optionOf(options, String(value)), value);
});

test("the speed slider has full speed at its end, and shows a speed of the kernel at the nearest position above", () => {
  assert.equal(speedText(null), "full speed");
  assert.equal(speedText(1), "1 step/s");
  assert.equal(speedText(20), "20 steps/s");
  assert.ok(speedPosition(1) < speedPosition(2) && speedPosition(200) < speedPosition(null));
  assert.equal(speedPosition(3), speedPosition(5));
  assert.equal(speedPosition(1e6), speedPosition(200));
});

test("the line beside Undo says what it took back, else what it would", () => {
  assert.equal(changeNote("Learning rate 0.1 → 1e9", null), "Learning rate 0.1 → 1e9");
  assert.equal(changeNote("opt_level O1 → O2", "Learning rate 0.1 → 1e9"), "Undone: Learning rate 0.1 → 1e9");
  assert.match(changeNote(null, null), /can be undone/);
});
