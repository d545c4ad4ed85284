// The logic of the strip of scenarios that needs no page.

import assert from "node:assert/strict";
import test from "node:test";

import { glyphPath, gridTarget } from "../../amplab/views/web/gallery.js";

test("the arrow keys move in the grid and stop at its edges", () => {
  assert.equal(gridTarget("ArrowRight", 3, 12, 4), 4);
  assert.equal(gridTarget("ArrowDown", 3, 12, 4), 7);
  assert.equal(gridTarget("ArrowUp", 3, 12, 4), null);
  assert.equal(gridTarget("ArrowDown", 9, 12, 4), null);
  assert.equal(gridTarget("ArrowLeft", 0, 12, 4), null);
  assert.equal(gridTarget("Home", 9, 12, 4), 0);
  assert.equal(gridTarget("End", 0, 12, 4), 11);
  assert.equal(gridTarget("Tab", 3, 12, 4), null);
  assert.equal(gridTarget("Enter", 3, 12, 4), null);
});

test("every glyph is a path of lines within its box", () => {
  for (const name of ["healthy", "bce", "gan", "batchnorm", "no-such-scenario", "toString"]) {
    const path = glyphPath(name);
    assert.match(path, /^(M[\d.]+,[\d.]+((L| )[\d.]+,[\d.]+)+)+$/, name);
    for (const [, x, y] of path.matchAll(/([\d.]+),([\d.]+)/g)) {
      assert.ok(Number(x) <= 36 && Number(y) <= 16, name);
    }
  }
});
