// Marks on the charts: where they would overlap, they merge into one with a count. Nothing here touches the page.

const GAP = 5; // px between a label and the next mark

/**
 * Merge marks, sorted by `at`, until no label overlaps another mark or leaves the chart.
 *
 * Each result is { at, last, marks, text, flipped }: the position of its first and of its last mark, its label, and
 * whether the label stands on the left, because the right edge would cut it.
 *
 * @param marks positions in px: { at, … }
 * @param options.label the label of some marks
 * @param options.measure the width of a text in px
 * @param options.left the left edge of the chart, px
 * @param options.right the right edge of the chart, px
 * @param options.offset px from a mark to its label
 * @param options.reach half the width of a mark itself, px
 */
export function mergedMarks(marks, options) {
  const groups = [];
  for (const mark of marks) {
    let group = placed([mark], options);
    while (groups.length && group.start < groups.at(-1).end + GAP) group = placed([...groups.pop().marks, ...group.marks], options);
    groups.push(group);
  }
  return groups;
}

function placed(marks, { label, measure, left, right, offset, reach }) {
  const { at } = marks[0];
  const last = marks.at(-1).at;
  const text = label(marks);
  const width = text ? offset + measure(text) : reach;
  const flipped = at + width > right && at - width >= left;
  // The label alone counts, so that a dense row of marks becomes many groups and not one.
  return { at, last, marks, text, flipped, start: at - (flipped ? width : reach), end: at + (flipped ? reach : width) };
}

/** The label of some changes: that of one, that of equal ones with a count, or how many there are. */
export function changesLabel(changes) {
  const [{ label }] = changes;
  if (changes.length === 1) return label;
  return changes.every((each) => each.label === label) ? `${label} ×${changes.length}` : `${changes.length} changes`;
}

/** The changes that a range of steps shows: those in it, and at its start the level that is in effect there. */
export function visibleChanges(changes, low, high) {
  const isLevel = ({ field }) => field === "opt_level" || field === "start";
  const inside = changes.filter(({ step }) => step >= low && step <= high);
  const before = changes.filter((each) => isLevel(each) && each.step < low).at(-1);
  const atStart = inside.some((each) => isLevel(each) && each.step === low);
  return before && !atStart ? [{ ...before, step: low, isBefore: true }, ...inside] : inside;
}
