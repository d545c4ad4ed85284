// Changes of an explorable drawing go to the kernel one at a time.

import assert from "node:assert/strict";
import test from "node:test";

import { OneAtATime, sliderText } from "../../amplab/views/web/explorable.js";

test("while a change is under way, the later ones are merged into one", () => {
  const sent = [];
  const queue = new OneAtATime((message) => sent.push(message), { name: "a" });
  queue.change({ scale: 1 });
  queue.change({ scale: 2 });
  queue.change({ level: "O1" });
  queue.change({ scale: 3 });
  assert.deepEqual(sent, [{ set: { scale: 1 }, turn: "a-1" }]);
  assert.equal(queue.answered("a-1"), false); // the next one goes out
  assert.deepEqual(sent[1], { set: { level: "O1", scale: 3 }, turn: "a-2" });
  assert.equal(queue.answered("a-2"), true);
  assert.equal(sent.length, 2);
  queue.destroy();
});

test("the answer to another view does not count", () => {
  const sent = [];
  const queue = new OneAtATime((message) => sent.push(message), { name: "a" });
  assert.equal(queue.answered("b-1"), true);
  queue.change({ scale: 1 });
  queue.change({ scale: 2 });
  assert.equal(queue.answered("b-2"), false);
  assert.equal(sent.length, 1);
  queue.destroy();
});

test("a change that is never answered is reported and does not hold up the next", async () => {
  const sent = [];
  let late = 0;
  const queue = new OneAtATime((message) => sent.push(message), { patience: 5, late: () => { late += 1; } });
  queue.change({ scale: 1 });
  await new Promise((resolve) => { setTimeout(resolve, 20); });
  assert.equal(late, 1);
  queue.change({ scale: 2 });
  assert.equal(sent.length, 2);
  queue.destroy();
});

test("what was changed during a change that is answered late goes out once, and the late answer is not the latest", async () => {
  const sent = [];
  const queue = new OneAtATime((message) => sent.push(message), { patience: 5, name: "a" });
  queue.change({ scale: 3 });
  queue.change({ scale: 5 });
  queue.change({ scale: 8 });
  await new Promise((resolve) => { setTimeout(resolve, 20); });
  assert.deepEqual(sent.slice(1), [{ set: { scale: 8 }, turn: "a-2" }]);
  assert.equal(queue.answered("a-1"), false); // late: the controls stay where the person has put them
  assert.equal(queue.answered("a-2"), true);
  queue.change({ level: "O1" });
  assert.deepEqual(sent[2], { set: { level: "O1" }, turn: "a-3" });
  queue.destroy();
});

test("a change that is answered late without a later one is the latest", async () => {
  const queue = new OneAtATime(() => {}, { patience: 5, name: "a" });
  queue.change({ scale: 3 });
  await new Promise((resolve) => { setTimeout(resolve, 20); });
  assert.equal(queue.answered("a-1"), true);
});

test("a slider shows its number, or the power that it is the exponent of", () => {
  assert.equal(sliderText({ power: true }, "-8"), "2⁻⁸");
  assert.equal(sliderText({ power: false }, "0.3"), "0.3");
});
