// The tab of findings: one card for each, the most harmful first.

import { h, icon, write } from "./elements.js";
import { liveList } from "./lists.js";
import { integer, raisedPowers } from "./numbers.js";

const SEVERITY_SIGNS = { error: "✕", warning: "▲", note: "●" };

/** The evidence of a card in one line. */
export const evidenceLine = (card) => card.evidence.map(([name, value]) => `${name} ${raisedPowers(String(value))}`).join(" · ");

export function findingsPanel({ send, select }) {
  const summary = h("span", { class: "amp-summary", role: "status" });
  const list = h("ul", { class: "amp-findings" });
  const box = h("div", { class: "amp-scroll", tabindex: "0", role: "region", "aria-label": "Findings, the most harmful first" }, list);
  const draw = liveList(list);
  let shown = "";

  const copy = (card) => h("button", { type: "button", class: "amp-mini", onclick: async (event) => {
    const button = event.currentTarget;
    await navigator.clipboard.writeText(card.remedy);
    button.classList.add("amp-done");
    write(button.lastElementChild, "Copied");
  } }, icon("copy"), h("span", {}, "Copy code"));
  const details = (card) => h("details", {},
    h("summary", {}, "Why, and the code for a loop of your own"),
    h("p", {}, `${raisedPowers(card.cause)} (${card.certainty})`),
    h("div", { class: "amp-finding-code" }, h("pre", { tabindex: "0", "aria-label": "Code" }, card.remedy), copy(card)));
  const buttons = (card) => [
    card.apply ? h("button", { type: "button", class: "amp-mini amp-finding-apply", onclick: () => send({ type: "apply", key: card.key }) }, card.apply) : null,
    card.step === null ? null : h("button", { type: "button", class: "amp-mini", onclick: () => select(card.step) }, `Show step ${integer(card.step)}`),
  ];
  const element = (card) => h("li", { class: "amp-finding", "data-severity": card.severity, "data-name": card.name, "data-key": card.key },
    h("div", { class: "amp-finding-head" },
      h("span", { class: "amp-finding-severity" }, h("span", { "aria-hidden": "true" }, `${SEVERITY_SIGNS[card.severity]} `), card.severity),
      h("strong", {}, raisedPowers(card.title)), h("span", { class: "amp-finding-buttons" }, buttons(card))),
    h("p", {}, raisedPowers(card.symptom)),
    h("p", { class: "amp-finding-evidence" }, card.where ? h("code", {}, card.where) : null, card.where && card.evidence.length ? " · " : null, evidenceLine(card)),
    details(card));
  const show = (payload) => {
    write(summary, raisedPowers(payload.summary ?? ""));
    const cards = payload.cards ?? [];
    const now = JSON.stringify(cards);
    if (now === shown) return; // an open card, a selection and the focus stay
    shown = now;
    draw(cards.length ? cards.map(element) : [h("li", { class: "amp-finding-none", "data-key": "none" }, "Nothing found.")]);
  };
  return { box: h("div", { class: "amp-panel", "data-panel": "findings" }, h("div", { class: "amp-bar" }, summary), box), show };
}
