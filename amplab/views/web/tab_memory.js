// The tab of memory: a bar of bytes for each level, for the batch size and the card that are chosen here.

import { h, write } from "./elements.js";
import { batchAt, GB, largestBatch, partsOf, sliderOf, totalOf, typedBatch, typedCard } from "./memory_sums.js";
import { bytes, integer } from "./numbers.js";
import { emptyRow, table } from "./tables.js";

const LARGEST = 24; // log2 of the slider's largest batch

function memoryBar(level, kinds, batch, longest) {
  const parts = partsOf(level, kinds, batch).filter(([, size]) => size > 0);
  const names = Object.fromEntries(kinds);
  const said = parts.map(([kind, size]) => `${names[kind]} ${bytes(size)}`).join(", ");
  return h("div", { class: "amp-mem-bar", role: "img", "aria-label": said, title: said },
    parts.map(([kind, size]) => h("i", { "data-kind": kind, style: `width: ${(100 * size) / longest}%` })));
}

function fits(level, batch, card) {
  const total = totalOf(level, batch);
  const share = (100 * total) / card;
  return { fits: total <= card, text: total <= card ? `✓ fits, ${share < 0.1 ? "<0.1" : share.toFixed(share < 10 ? 1 : 0)} %` : `✗ ${bytes(total - card)} too much` };
}

function largest(level, card) {
  const batch = largestBatch(level, card);
  return batch === null ? "any" : integer(batch);
}

export function memoryPanel() {
  let payload = { levels: [], kinds: [], cards: [] };
  let batch = null;
  let gigabytes = 16;
  let said = ""; // above the table, unless a value is refused
  const slider = h("input", { type: "range", class: "amp-speed", min: "0", max: String(LARGEST), step: "0.25", "aria-label": "Batch size, as a power of two",
    oninput: () => { batch = batchAt(Number(slider.value)); fill(); } });
  const field = h("input", { type: "number", min: "1", step: "1", class: "amp-mem-batch", "aria-label": "Batch size",
    oninput: () => { const typed = typedBatch(field.value); batch = typed.value ?? batch; refuse(typed.refused); },
    onblur: () => { field.value = String(batch ?? 1); refuse(); } });
  const cards = h("select", { "aria-label": "GPU", onchange: () => { if (cards.value) { memory.value = cards.value; gigabytes = Number(cards.value); } fill(); } });
  const memory = h("input", { type: "number", min: "0.1", step: "any", value: String(gigabytes), class: "amp-mem-batch", "aria-label": "GPU memory in GB", 
    oninput: () => { const typed = typedCard(memory.value); gigabytes = typed.value ?? gigabytes; cards.value = ""; refuse(typed.refused); },
    onblur: () => { memory.value = String(gigabytes); refuse(); } });
  const summary = h("span", { class: "amp-summary", role: "status" });
  const key = h("div", { class: "amp-mem-key" });
  const note = h("p", { class: "amp-mem-note" });
  const made = table("Bytes of one training step at each opt_level", [["opt_level"], ["Bytes of one step"], ["Total", "amp-num"], ["On this card"], ["Largest batch", "amp-num"]]);

  const refuse = (sentence = "") => {
    write(summary, sentence || said);
    if (!sentence) fill();
  };
  const fill = () => {
    const { levels, kinds } = payload;
    const card = gigabytes * GB;
    if (document.activeElement !== slider) slider.value = String(sliderOf(batch ?? 1));
    if (document.activeElement !== field) field.value = String(batch ?? 1);
    const longest = Math.max(1, ...levels.map((level) => totalOf(level, batch)));
    const rows = levels.map((level) => {
      const answer = fits(level, batch, card);
      return h("tr", { "data-level": level.name, class: answer.fits ? "" : "amp-mem-over" },
        h("td", {}, level.name === payload.present ? h("b", {}, level.label) : level.label),
        h("td", { class: "amp-mem-cell" }, memoryBar(level, kinds, batch, longest)),
        h("td", { class: "amp-num" }, bytes(totalOf(level, batch))),
        h("td", {}, answer.text),
        h("td", { class: "amp-num" }, largest(level, card)));
    });
    made.body.replaceChildren(...(rows.length ? rows : [emptyRow(5, "Counting the first level …")]));
  };
  const show = (given) => {
    payload = { levels: [], kinds: [], cards: [], ...given };
    batch ??= payload.batch ?? null;
    if (!cards.options.length && payload.cards.length) {
      cards.replaceChildren(h("option", { value: "" }, "other"), ...payload.cards.map(([name, size]) => h("option", { value: String(size) }, `${name}: ${size} GB`)));
      cards.value = memory.value;
    }
    const isUncounted = payload.levels.some((level) => level.activations === null);
    said = payload.summary || (isUncounted ? "Activations cannot be counted in this model: it calls torch.func." : "");
    write(summary, said);
    const occurs = (kind) => payload.levels.some((level) => kind === "activations" || level.fixed[kind]);
    key.replaceChildren(...payload.kinds.filter(([kind]) => occurs(kind)).map(([kind, name]) => h("span", {}, h("i", { "data-kind": kind }), name)));
    write(note, payload.note ?? "");
    fill();
  };
  const labeled = (text, ...inputs) => h("span", { class: "amp-mem-field" }, h("span", { "aria-hidden": "true" }, text), ...inputs);
  return {
    box: h("div", { class: "amp-panel", "data-panel": "memory" },
      h("div", { class: "amp-bar" }, labeled("Batch size", slider, field), labeled("GPU", cards, memory, "GB"), summary),
      key, made.box, note),
    show,
  };
}
