// The tab of skipped steps.

import { h, write } from "./elements.js";
import { integer, power } from "./numbers.js";
import { emptyRow, table } from "./tables.js";

export function skippedPanel() {
  const made = table("Skipped steps, newest first", [["Step", "amp-num"], ["Scale before → after"], ["First non-finite gradient"], ["Level"], ["Cause"]]);
  const summary = h("span", { class: "amp-summary", role: "status" });
  const row = (each) => h("tr", {},
    h("td", { class: "amp-num" }, integer(each.step)),
    h("td", { class: "amp-signature" }, power(each.before), h("span", { class: "amp-arrow" }, " → "), power(each.after)),
    h("td", {}, h("code", {}, each.tensor)),
    h("td", {}, each.level),
    h("td", { class: "amp-reason" }, each.cause));
  const show = (payload) => {
    const rows = payload.rows ?? [];
    write(summary, payload.summary ?? "");
    made.body.replaceChildren(...(rows.length ? rows.map(row) : [emptyRow(5, "No step has been skipped.")]));
  };
  return { box: h("div", { class: "amp-panel", "data-panel": "skipped" }, h("div", { class: "amp-bar" }, summary), made.box), show };
}
