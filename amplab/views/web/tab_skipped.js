// The tab of skipped steps: the first one on top, then the newest first, each row with its reason.

import { h, write } from "./elements.js";
import { integer, power } from "./numbers.js";
import { emptyRow, table } from "./tables.js";

const SKIP_SIGNS = { scale: "▲", format: "◆", data: "✕", divergence: "↗", injected: "△", weights: "✕", float32: "∞", "other-rank": "⇄", once: "?", open: "…" };

/** Whether a row of skips holds a step. */
export const holdsStep = (row, step) => step !== null && row.step <= step && step <= row.last;

/** What a screen reader hears for a row. */
export function skipWords(row) {
  const steps = row.last === row.step ? `Step ${integer(row.step)}` : `Steps ${integer(row.step)} to ${integer(row.last)}`;
  return `${row.is_first ? "First skip. " : ""}${steps}: show in the charts`;
}

export function skippedPanel({ send, select, walk }) {
  const made = table("Skipped steps: the first one, then the newest first",
    [["Step"], ["Loss scale"], ["Reason"], [""]], () => mark());
  made.box.classList.add("amp-skips");
  const summary = h("span", { class: "amp-summary", role: "status" });
  let rows = [];
  let selected = null;

  const stepCell = (row) => h("td", { class: "amp-skip-step" },
    row.is_first ? h("span", { class: "amp-skip-first" }, "first") : null,
    h("button", { type: "button", class: "amp-link", "aria-label": skipWords(row), onclick: () => select(row.step) }, row.steps),
    row.times ? h("small", {}, row.times) : null);
  const badge = (row) => h("span", { class: "amp-skip-kind", "data-kind": row.kind },
    h("span", { "aria-hidden": "true" }, `${SKIP_SIGNS[row.kind]} `), row.label);
  const reason = (row) => h("td", { class: "amp-skip-why" }, badge(row), " ", row.why, row.line ? h("code", {}, ` ${row.line}`) : null);
  const button = (step, text, does) => (step === null ? null
    : h("button", { type: "button", class: "amp-mini", "aria-label": `${text} step ${integer(step)}`, onclick: () => does(step) }, text));
  const action = (row) => h("td", { class: "amp-skip-actions" },
    button(row.explain, "Explain", (step) => send({ type: "explain", step })),
    button(row.walk, "Step through", walk));
  const line = (row) => h("tr", { class: row.is_first ? "amp-skip-pinned" : "", "data-step": row.step, "data-key": row.step },
    stepCell(row),
    h("td", { class: "amp-skip-scale" }, power(row.before), h("span", { class: "amp-arrow" }, " → "), power(row.after)),
    reason(row),
    action(row));
  const mark = () => {
    for (const node of made.body.children) {
      const row = rows.find((each) => String(each.step) === node.dataset.step);
      if (row && holdsStep(row, selected)) node.setAttribute("aria-current", "true");
      else node.removeAttribute("aria-current");
    }
  };
  const show = (payload) => {
    rows = payload.rows ?? [];
    write(summary, payload.summary ?? "");
    made.draw(rows.length ? rows.map(line) : [emptyRow(4, "No step has been skipped.")]);
  };
  return {
    box: h("div", { class: "amp-panel", "data-panel": "skipped" }, h("div", { class: "amp-bar" }, summary), made.box),
    show,
    select: (step) => {
      selected = step;
      mark();
      const row = made.body.querySelector('[aria-current]');
      row?.scrollIntoView({ block: "nearest" });
    },
  };
}
