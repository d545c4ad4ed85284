// A chart drawn as SVG: the calls of a canvas become elements, in order.

import assert from "node:assert/strict";
import { test } from "node:test";

import { drawnAsSvg, SvgPen, svgPage } from "../../amplab/views/web/svg_pen.js";

const measure = { measureText: (text) => ({ width: 6 * text.length }) };

test("lines, circles, rectangles and texts", () => {
  const pen = new SvgPen(measure);
  pen.strokeStyle = "#123456";
  pen.setLineDash([2, 3]);
  pen.beginPath();
  pen.moveTo(1, 2);
  pen.lineTo(3.456, 4);
  pen.stroke();
  pen.fillStyle = "red";
  pen.fillRect(0, 1, 2, 3);
  pen.textAlign = "right";
  pen.fillText("a < b", 5, 6);
  assert.match(pen.text, /<path d="M1 2L3.46 4" fill="none" stroke="#123456"[^>]* stroke-dasharray="2 3"\/>/);
  assert.match(pen.text, /<rect x="0" y="1" width="2" height="3" fill="red"\/>/);
  assert.match(pen.text, /<text [^>]*text-anchor="end"[^>]*>a &lt; b<\/text>/);
});

test("what is drawn inside a clip names it, until it is restored", () => {
  const pen = new SvgPen(measure, "left");
  pen.save();
  pen.beginPath();
  pen.rect(0, 0, 10, 10);
  pen.clip();
  pen.fillRect(0, 0, 1, 1);
  pen.restore();
  pen.fillRect(2, 2, 1, 1);
  assert.match(pen.text, /<clipPath id="left-0"><path d="M0 0h10v10h-10Z"\/>/);
  const [first, second] = pen.text.match(/<rect [^>]*>/g);
  assert.match(first, /clip-path="url\(#left-0\)"/);
  assert.doesNotMatch(second, /clip-path/);
});

test("a surface has its own pen again, even after an error, and the page is one SVG", () => {
  const surface = { pen: measure };
  const elements = drawnAsSvg(surface, () => surface.pen.fillRect(0, 0, 5, 5));
  assert.equal(surface.pen, measure);
  assert.throws(() => drawnAsSvg(surface, () => { throw new Error("no"); }));
  assert.equal(surface.pen, measure);
  const page = svgPage([{ title: "Loss", width: 100, height: 40, elements }], { ink: "#111", paper: "#fff", font: 'a, "b"' }, "amplab/1 task=digits");
  assert.match(page, /^<svg xmlns="http:\/\/www.w3.org\/2000\/svg" width="100"/);
  assert.ok(page.includes(">Loss</text>") && page.includes("amplab/1 task=digits") && page.includes("&quot;b&quot;"));
});
