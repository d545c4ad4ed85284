// Which steps the charts show, and where a step lies on the axis. A range is null for the whole run, { low, high } for a
// zoomed part, or { last } for the newest steps, which follows the run. Nothing here touches the page.

import { decades, ticks } from "./numbers.js";

const FEWEST = 4; // steps, so that a zoom ends where single steps are far apart
const LEAST_AXIS = 100; // a run that begins does not fill its axis with its first steps
const LEAST_BESIDE = 300; // of other runs behind one that begins
const BESIDE = 2; // times its own steps
const FAR = 1000; // a longer range hides the steps around a selected one
const NEAR = 100;

/** The first and the last step to show, for a run of `count` steps. */
export function windowOf(range, count) {
  if (range === null) return { low: 0, high: Math.max(LEAST_AXIS, count - 1) };
  if (range.last === undefined) return range;
  const high = Math.max(count, range.last) - 1;
  return { low: high - range.last + 1, high };
}

/** The range that a drag from one step to another asks for, in whole steps; null if that is the whole run. */
export function draggedRange(from, to, count) {
  const [low, high] = [Math.min(from, to), Math.max(from, to)];
  return within(Math.round((low + high) / 2), Math.max(Math.round(high - low), FEWEST), count);
}

/** The range after zooming by `factor` around a step. */
export function zoomed(range, factor, around, count) {
  const { low, high } = windowOf(range, count);
  const span = Math.max(Math.round((high - low) * factor), FEWEST);
  if (range?.last !== undefined) return span >= count ? null : { last: span + 1 };
  return within(Math.round(around + ((low + high) / 2 - around) * factor), span, count);
}

/** The range moved by a share of its length. */
export function panned(range, share, count) {
  if (range === null) return null;
  const { low, high } = windowOf(range, count);
  return within(Math.round((low + high) / 2 + share * (high - low)), high - low, count);
}

/**
 * How many steps the axis shows of a whole run of `count` steps, behind which others of up to `overlaid` steps lie: it
 * follows the present run, so that a far longer one does not press it into a corner.
 */
export function stepsToShow(count, overlaid) {
  return count === 0 ? overlaid : Math.max(count, Math.min(overlaid, Math.max(BESIDE * count, LEAST_BESIDE)));
}

/** The range after zooming out of the whole present run: that of the longest one behind it, if it is longer. */
export function beyond(count, overlaid) {
  return overlaid > stepsToShow(count, overlaid) ? { low: 0, high: overlaid - 1 } : null;
}

/**
 * The range in which a selected step is seen: the same if it is in it and not too long, else one around the step. The
 * newest step, as one taken on its own is, moves nothing where the chart shows the end of the run.
 */
export function showing(range, step, count) {
  if (step >= count - 1 && (range === null || range.last !== undefined)) return range;
  const { low, high } = windowOf(range, count);
  if (low <= step && step <= high && high - low <= FAR) return range;
  return within(step, Math.min(high - low, NEAR), count);
}

/** A range of `span` steps around a middle, moved into the run. */
function within(middle, span, count) {
  const end = Math.max(LEAST_AXIS, count - 1);
  if (span >= end) return null;
  const low = Math.min(Math.max(Math.round(middle - span / 2), 0), end - span);
  return { low, high: low + span };
}

/** The horizontal axis: `share` maps a step to [0, 1], `step` maps back, and `marks` are its ticks. */
export function stepAxis(low, high, logarithmic) {
  if (!logarithmic) {
    return { share: (step) => (step - low) / (high - low), step: (share) => low + share * (high - low), marks: ticks(low, high, 6) };
  }
  const start = Math.log(low + 1);
  const span = Math.log(high + 1) - start;
  return {
    share: (step) => (Math.log(Math.max(step, low) + 1) - start) / span,
    step: (share) => Math.exp(start + share * span) - 1,
    marks: [...(low === 0 ? [0] : []), ...decades(Math.max(low, 1), high)],
  };
}
