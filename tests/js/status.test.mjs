// The status line and the cards of findings.

import assert from "node:assert/strict";
import { test } from "node:test";
import { announced } from "../../amplab/views/web/status.js";
import { evidenceLine } from "../../amplab/views/web/tab_findings.js";

test("a screen reader hears the line only when another kind of status begins", () => {
  const healthy = announced({ key: "", text: "" }, { kind: "healthy", state: "", text: "Healthy: 3 skips in 500 steps." });
  assert.equal(healthy.text, "Healthy: 3 skips in 500 steps.");
  const later = announced(healthy, { kind: "healthy", state: "", text: "Healthy: 3 skips in 501 steps." });
  assert.equal(later, healthy);
  const paused = announced(later, { kind: "healthy", state: "Paused", text: "Healthy: 3 skips in 501 steps." });
  assert.equal(paused.text, "Paused. Healthy: 3 skips in 501 steps.");
});

test("evidence is one line", () => {
  assert.equal(evidenceLine({ evidence: [["skips", "3"], ["loss scale", "2^16"]] }), "skips 3 · loss scale 2¹⁶");
});
