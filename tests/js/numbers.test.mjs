// Numbers as text, and the ticks of an axis.

import assert from "node:assert/strict";
import test from "node:test";

import { bytes, decades, decimal, integer, percent, power, raised, raisedPowers, tickText, ticks } from "../../amplab/views/web/numbers.js";

/** Check a function against rows of [argument, expected]. */
function table(name, call, rows) {
  for (const [given, expected] of rows) {
    test(`${name}(${String(given)}) is ${expected}`, () => assert.deepEqual(call(given), expected));
  }
}

table("integer", integer, [[0, "0"], [999.6, "1,000"], [1234567, "1,234,567"]]);
table("bytes", bytes, [
  [0, "0 B"], [999, "999 B"], [1000, "1.00 kB"], [1536, "1.54 kB"], [9_994, "9.99 kB"], [9_996, "10.0 kB"],
  [99_960, "100 kB"], [365_900, "366 kB"], [999_499, "999 kB"], [999_500, "1.00 MB"], [999_500_000, "1.00 GB"], [2.5e12, "2500 GB"],
]);
table("decimal", decimal, [
  [0, "0.000"], [0.123456, "0.1235"], [-0.5, "-0.5000"], [0.00001, "1.00e-5"], [123456, "1.23e5"],
  [9999, "9999"], [9999.6, "10000"], [12345.6, "12346"], [NaN, "NaN"], [Infinity, "inf"], [-Infinity, "-inf"],
]);
test("decimal writes as many digits as it is given", () => {
  assert.equal(decimal(0.006129, 3), "0.00613");
  assert.equal(decimal(1234, 3), "1234");
});
table("raised", raised, [[0, "⁰"], [-12, "⁻¹²"], [3456789, "³⁴⁵⁶⁷⁸⁹"]]);
table("power", power, [[65536, "2¹⁶"], [1, "1"], [2 ** -14, "2⁻¹⁴"], [1000, "1000"], [12345.678, "12346"], [0.0883883476, "0.08839"], [2 ** 0.5, "1.414"], [0, "0"], [NaN, "NaN"], [Infinity, "inf"]]);
table("raisedPowers", raisedPowers, [["init 2^6, then 2^-12.", "init 2⁶, then 2⁻¹²."], ["2^0.5 and x2^3", "2^0.5 and x2^3"], ["none", "none"]]);
table("percent", percent, [[0, "0 %"], [0.04, "<0.1 %"], [0.1, "0.1 %"], [12.34, "12.3 %"], [100, "100 %"]]);
table("tickText", tickText, [
  [0, "0"], [0.01, "0.01"], [1e-4, "10⁻⁴"], [1e-9, "10⁻⁹"], [2e-3, "2e-3"], [0.3, "0.3"], [2.5, "2.5"], [1e5, "10⁵"], [2e6, "2e6"],
  [-2, "−2"], [0.1 + 0.2, "0.3"],
]);

test("ticks are round numbers within the range", () => {
  assert.deepEqual(ticks(0, 100, 6), [0, 20, 40, 60, 80, 100]);
  assert.deepEqual(ticks(0, 2.4, 3), [0, 1, 2]);
  assert.deepEqual(ticks(-1, 1, 4).map((tick) => +tick.toPrecision(6)), [-1, -0.5, 0, 0.5, 1]);
  assert.deepEqual(ticks(0, 0.0007, 3), [0, 0.0005]);
});
test("no tick is written -0", () => {
  for (const tick of [...ticks(0, 50, 5), ...ticks(-3, 50, 5)]) assert.ok(!Object.is(tick, -0));
});
test("the last tick does not fall off by rounding", () => {
  for (const high of [0.3, 0.7, 1.1, 2.3, 1e-3, 123456]) {
    const list = ticks(0, high, 4);
    const gap = list[1] - list[0];
    assert.ok(list.at(-1) > high - gap - gap * 1e-6, `${high}: ${list}`);
  }
});
test("decades are powers of ten within the range, with numbers between them if there are few, else its two ends", () => {
  assert.deepEqual(decades(0.005, 20), [0.01, 0.1, 1, 10]);
  assert.deepEqual(decades(100, 600), [100, 200, 500]);
  assert.deepEqual(decades(0.0015, 0.03), [0.002, 0.005, 0.01, 0.02]);
  assert.deepEqual(decades(2, 3), [2, 3]);
});
