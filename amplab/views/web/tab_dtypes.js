// The tab of op dtypes: each op of one training step with its dtypes and the reason.

import { choices, h, write } from "./elements.js";
import { chip, emptyRow, table } from "./tables.js";

/** The dtypes of a row as chips, repeated ones counted: float32 ×2 float16 → float16. */
function signature(row) {
  const side = (dtypes) => dtypes.flatMap(([dtype, times], index) => [
    index ? " " : null, chip(dtype), times > 1 ? h("small", {}, `×${times}`) : null]);
  return [...side(row.inputs), h("span", { class: "amp-arrow" }, " → "), ...side(row.outputs)];
}

function opRow(row) {
  const times = row.times > 1 ? h("small", { class: "amp-times" }, ` ×${row.times}`) : null;
  const note = row.changed ? h("span", { class: "amp-changed", title: "Differs from the previous opt_level" }, "changed") : null;
  return h("tr", { class: [row.cast ? "amp-cast" : "", row.changed ? "amp-row-changed" : ""].join(" ").trim(), "data-phase": row.phase },
    h("td", { class: "amp-num" }, row.index),
    h("td", {}, h("code", { title: `${row.aten}  ${row.shapes}` }, row.op), times, note),
    h("td", { class: "amp-module" }, row.module),
    h("td", { class: "amp-signature" }, signature(row)),
    h("td", { class: "amp-reason" }, h("span", { class: "amp-clamped", title: row.reason }, row.reason)));
}

export function dtypesPanel() {
  const made = table("Ops of one training step with their dtypes", [["#", "amp-num"], ["Op"], ["Module"], ["In → out"], ["Why"]]);
  const summary = h("span", { class: "amp-summary", role: "status" });
  let rows = [];
  let phase = "all";
  const filter = choices("Rows", ["all", "forward", "backward", "casts", "changed"], (value) => { phase = value; fill(); });
  const kept = (row) => phase === "all" || row.phase === phase || (phase === "casts" && row.cast) || (phase === "changed" && row.changed);
  const fill = () => {
    filter.show(phase);
    const shown = rows.filter(kept);
    made.body.replaceChildren(...(shown.length ? shown.map(opRow) : [emptyRow(5, rows.length ? "No such row." : "Tracing one step …")]));
  };
  const show = (payload) => {
    rows = payload.rows ?? [];
    write(summary, payload.summary ?? "");
    fill();
  };
  return { box: h("div", { class: "amp-panel", "data-panel": "dtypes" }, h("div", { class: "amp-bar" }, filter.group, summary), made.box), show };
}
