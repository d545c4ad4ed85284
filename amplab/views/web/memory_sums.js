// Sums of bytes for a batch size, and what fits on a card. Nothing here touches the page.

export const GB = 1e9;

/** Bytes of activations of a batch. */
export function activationsOf(level, batch) {
  return Math.max(0, Math.round((level.activations ?? 0) + level.perExample * (batch - level.batch)));
}

/** The parts of a level's bar for a batch, in the order of `kinds`, as [kind, bytes]. */
export function partsOf(level, kinds, batch) {
  return kinds.map(([kind]) => [kind, kind === "activations" ? activationsOf(level, batch) : level.fixed[kind]]);
}

/** All bytes of a level for a batch. */
export function totalOf(level, batch) {
  return Object.values(level.fixed).reduce((a, b) => a + b, 0) + activationsOf(level, batch);
}

/** The largest batch that fits on a card of so many bytes, 0 for none; null if the batch size does not matter. */
export function largestBatch(level, bytes) {
  if (!(level.perExample > 0)) return null;
  const left = bytes - totalOf(level, level.batch);
  return Math.max(0, Math.floor(left / level.perExample) + level.batch);
}

/** The slider goes by powers of two from 1; a batch between two of them has a position between them. */
export const sliderOf = (batch) => Math.log2(Math.max(1, batch));
export const batchAt = (position) => Math.max(1, Math.round(2 ** position));

/** A typed batch size: {value}, or {refused}, a sentence. */
export function typedBatch(text) {
  const value = Number(text);
  return text !== "" && Number.isInteger(value) && value >= 1 ? { value } : { refused: `Batch size: ${text || "nothing"} is not allowed; enter a whole number above 0.` };
}

/** A typed size of a card in GB, as `typedBatch`. */
export function typedCard(text) {
  const value = Number(text);
  return text !== "" && Number.isFinite(value) && value > 0 ? { value } : { refused: `GPU memory: ${text || "nothing"} is not allowed; enter a number above 0.` };
}
