// The charts in words: the values of a step, and a summary of each chart for a screen reader. Nothing here touches the page.

import { INJECTED, SKIPPED } from "./charts.js";
import { decimal, integer, power } from "./numbers.js";

const LISTED = 5;

/** The end of a sentence about a row: whether its step was skipped. */
const skippedText = (row) => (row[3] & SKIPPED ? (row[3] & INJECTED ? "skipped, injected" : "skipped") : "");

/** The values of a step, line by line, with what was changed at it. */
export function stepLines(row, changes) {
  const texts = changes.map(({ text }) => text);
  const more = texts.length > LISTED ? [`and ${texts.length - LISTED} more changes`] : [];
  const lines = [`step ${integer(row[0])}`, `loss ${decimal(row[1], 4)}`, `scale ${power(row[2])}`, skippedText(row)];
  return [...lines, ...texts.slice(0, LISTED), ...more].filter(Boolean);
}

const listed = (texts) => (texts.length > LISTED ? `${texts.slice(0, LISTED).join(", ")} and ${texts.length - LISTED} more` : texts.join(", "));

const rangeText = (low, rows) => `steps ${integer(low)} to ${integer(rows.at(-1)[0])}`;

/** The chart of the loss in words. */
export function lossSummary(rows, low) {
  if (!rows.length) return "No step yet.";
  const finite = rows.filter((row) => Number.isFinite(row[1]));
  const broken = rows.length - finite.length;
  const values = finite.length
    ? (() => {
        const least = finite.reduce((a, b) => (b[1] < a[1] ? b : a));
        const most = finite.reduce((a, b) => (b[1] > a[1] ? b : a));
        return `from ${decimal(finite[0][1], 3)} to ${decimal(finite.at(-1)[1], 3)}; smallest ${decimal(least[1], 3)} at step ${integer(least[0])}, `
          + `largest ${decimal(most[1], 3)} at step ${integer(most[0])}`;
      })()
    : "no finite value";
  const bad = broken ? `; ${broken} of the drawn steps have a loss that is NaN or infinite` : "";
  return `Training loss, ${rangeText(low, rows)}: ${values}${bad}.`;
}

/** The chart of the loss scale in words, with the skipped steps and the changes. */
export function scaleSummary(rows, low, changes) {
  if (!rows.length) return "No step yet.";
  const scales = rows.map((row) => row[2]);
  const skips = rows.filter((row) => row[3] & SKIPPED).map((row) => integer(row[0]) + (row[3] & INJECTED ? " (injected)" : ""));
  const made = changes.filter(({ field }) => field !== "start").map(({ step, text }) => `step ${integer(step)}: ${text}`);
  const sentences = [
    `Loss scale, ${rangeText(low, rows)}: from ${power(scales[0])} to ${power(scales.at(-1))}, `
      + `lowest ${power(scales.reduce((a, b) => Math.min(a, b)))}, highest ${power(scales.reduce((a, b) => Math.max(a, b)))}.`,
    skips.length ? `Skipped steps: ${listed(skips)}.` : "No step was skipped.",
    made.length ? `Changes: ${listed(made)}.` : "",
  ];
  return sentences.filter(Boolean).join(" ");
}
