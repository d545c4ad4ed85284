// Every file of the front end is a module that runs outside a browser until it is asked to draw.

import assert from "node:assert/strict";
import { readdirSync } from "node:fs";
import test from "node:test";

const WEB = new URL("../../amplab/views/web/", import.meta.url);
const WIDGETS = ["bit_explorer.js", "controls.js", "explorable.js", "gallery.js", "live.js", "notices.js", "panels.js", "status.js", "take_away.js"];

for (const name of readdirSync(WEB).filter((each) => each.endsWith(".js"))) {
  test(`${name} can be imported`, async () => {
    const module = await import(new URL(name, WEB));
    assert.equal(typeof module.default?.render, WIDGETS.includes(name) ? "function" : "undefined");
  });
}
