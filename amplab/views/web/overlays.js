// The lines of other runs behind the present one in both charts: {name, color, dash, rows}, rows as in charts.js. Each
// line has its name at its right end, beside a sample of its color and dashes.

const LABEL_GAP = 11; // px between two labels
const SAMPLE = 16; // px
const HEADROOM = 1.5; // a run that diverges does not flatten the others

/** The overlays of a message, with their rows unpacked. */
export function unpackOverlays(message, buffers, unpack) {
  return message.overlays.map((line, index) => ({ ...line, rows: unpack(buffers[index]) }));
}

/**
 * The steps of the overlays to ask for, if a page that shows `low` to `high` lacks some: more than it shows, so that a run
 * that goes on seldom asks again. Null if the rows that it has are complete.
 */
export function stepsBehind(overlays, low, high) {
  if (overlays.every(({ rows }) => rows.length > rows.at(-1)[0])) return null;
  const span = 2 ** Math.ceil(Math.log2(Math.max(high - low, 1)));
  const start = Math.floor(low / span) * span;
  return { low: start, high: start + 2 * span };
}

/** How many steps the longest overlay has. */
export const overlaidSteps = (overlays) => overlays.reduce((most, { rows }) => Math.max(most, (rows.at(-1)?.[0] ?? -1) + 1), 0);

/** The losses that the axis must show: those of the present run, and of the others up to somewhat above what they began with. */
export function lossesToShow(finite, overlays) {
  const others = overlays.map(({ rows }) => rows.map((row) => row[1]).filter(Number.isFinite));
  const begun = others.map((losses) => losses[0] ?? 0);
  const most = HEADROOM * [...finite, ...begun].reduce((a, b) => Math.max(a, b), 0);
  return [...finite, ...others.flat().filter((loss) => loss <= most)];
}

/** The overlays to draw on the scale's chart: a scale that never changes, as that of O0, would flatten the others. */
export function movingScales(overlays, rows) {
  const scales = new Set(rows.map((row) => row[2]));
  const moves = (every) => every.some((row) => row[2] !== every[0][2]) || scales.has(every[0]?.[2]);
  return overlays.filter(({ whole, rows: visible }) => moves(whole ?? visible));
}

/** The heights of labels, moved apart so that none covers another, within [top, bottom]; in the given order. */
export function labelHeights(wanted, top, bottom, gap = LABEL_GAP) {
  const order = wanted.map((height, index) => ({ height: Math.min(Math.max(height, top), bottom), index })).sort((a, b) => a.height - b.height);
  order.forEach((each, place) => {
    if (place > 0) each.height = Math.max(each.height, order[place - 1].height + gap);
  });
  let limit = bottom;
  for (const each of [...order].reverse()) {
    each.height = Math.min(each.height, limit);
    limit = each.height - gap;
  }
  return order.sort((a, b) => a.index - b.index).map(({ height }) => height);
}

/** Draw the lines; `points` returns the points of a line in px. */
export function drawOverlays(chart, { overlays, palette }, points, { top, right, bottom }) {
  const lines = overlays.map((overlay) => ({ ...overlay, points: points(overlay.rows) })).filter((line) => line.points.length);
  chart.clipped(() => {
    for (const { points: line, color, dash } of lines) chart.paths([line], palette[color], 1.3, dash);
  });
  return () => {
    const heights = labelHeights(lines.map((line) => line.points.at(-1)[1]), top + 4, bottom - 5);
    const font = `10px ${palette.font}`;
    chart.pen.font = font;
    lines.forEach(({ name, color, dash }, index) => {
      const width = chart.pen.measureText(name).width;
      const y = heights[index];
      chart.pen.fillStyle = palette.paper;
      chart.pen.globalAlpha = 0.8;
      chart.pen.fillRect(right - width - SAMPLE - 6, y - 5, width + SAMPLE + 6, 10);
      chart.pen.globalAlpha = 1;
      chart.paths([[[right - width - SAMPLE - 4, y], [right - width - 4, y]]], palette[color], 2, dash);
      chart.text(name, right - width, y, palette.ink, "left", font);
    });
  };
}
