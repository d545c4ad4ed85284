// The live view: figures, training loss, log2 of the loss scale. A frame holds the whole run, thinned for the screen, as one
// binary buffer; nothing is polled and no frame depends on the one before.

const FIGURES = [
  ["step", "Step", (s) => integer(s.step)],
  ["skipped", "Skipped", (s) => integer(s.skipped)],
  ["scale", "Loss scale", (s) => power(s.scale)],
  ["accuracy", "Accuracy", (s) => (s.accuracy === null ? "–" : `${(100 * s.accuracy).toFixed(1)} %`)],
  ["rate", "Steps/s", (s) => (s.rate === null ? "–" : integer(s.rate))],
  ["memory", "Memory", (s) => (s.memory === null ? "–" : bytes(s.memory))],
];

function palette(root) {
  const style = getComputedStyle(root);
  const pick = (name) => style.getPropertyValue(name).trim();
  return {
    ink: pick("--amp-ink"), soft: pick("--amp-soft"), grid: pick("--amp-grid"), accent: pick("--amp-accent"),
    faint: pick("--amp-faint"), skip: pick("--amp-warning"), paper: pick("--amp-paper"), font: style.fontFamily,
  };
}

function figures() {
  const cells = FIGURES.map(([name, label]) => [name, h("dd", { "data-figure": name }, "–"), label]);
  const list = h("dl", { class: "amp-figures" }, cells.map(([, value, label]) => h("div", {}, h("dt", {}, label), value)));
  const show = (summary) => FIGURES.forEach(([name, , format], index) => {
    write(cells[index][1], format(summary));
    cells[index][1].parentNode.hidden = Boolean(summary.unknown?.includes(name)); // a run that is only watched has no accuracy
  });
  return { list, show, memory: cells[5][1].parentNode };
}

function chartBox(title, label, ...extras) {
  const now = h("output", { class: "amp-now", "aria-live": "off" });
  const canvas = h("canvas", { class: "amp-canvas", role: "img", tabindex: "0", "aria-label": label });
  return { now, canvas, box: h("div", { class: "amp-chart" }, h("div", { class: "amp-chart-head" }, h("h3", {}, title), now, extras), canvas) };
}

function render({ model, el }) {
  const numbers = figures();
  const logButton = h("button", { type: "button", class: "amp-mini", "aria-pressed": "false", title: "Draw the loss on a logarithmic axis" }, "log");
  const loss = chartBox("Training loss", "Training loss over steps", logButton);
  const scale = chartBox("Loss scale, log₂", "Loss scale over steps, as a power of two",
    h("span", { class: "amp-key" }, h("i", { class: "amp-tri" }), "skipped step"),
    h("span", { class: "amp-key" }, h("i", { class: "amp-tri amp-tri-hollow" }), "injected"));
  const modes = h("p", { class: "amp-modes" });
  const news = h("div", { class: "amp-sr", role: "status", "aria-live": "polite" });
  const root = h("section", { class: "amplab amp-live", "aria-label": "Live run" }, numbers.list, loss.box, scale.box, modes, news);
  el.append(root);

  const live = { rows: [], levels: [], low: 0, high: 100, logarithmic: false, reading: null, scale: 0, palette: null };
  const charts = [new LossChart(loss.canvas), new ScaleChart(scale.canvas)];
  let asked = 0;
  let patience = 0;
  const draw = () => {
    asked = 0;
    // JupyterLab hides the page for a moment while it changes its theme, and no observer tells when it is back.
    if (loss.canvas.clientWidth === 0) {
      if (patience < 30) setTimeout(soon, 200);
      patience += 1;
      return;
    }
    patience = 0;
    const last = live.rows.length ? live.rows[live.rows.length - 1][0] : 0;
    live.high = Math.max(100, last);
    live.palette = palette(root); // read late: the style sheet arrives after the first render, and themes change
    charts.forEach((chart) => chart.draw(live));
    readout(live, loss.now, scale.now);
  };
  const soon = () => { asked ||= requestAnimationFrame(draw); };

  const receive = (message, buffers) => {
    if (message.kind !== "frame") return;
    live.rows = unpack(buffers[0]);
    live.levels = message.levels;
    live.scale = message.summary.scale;
    numbers.show(message.summary);
    numbers.memory.title = message.summary.memory_parts;
    write(modes, message.summary.modes);
    if (message.summary.news !== "") write(news, message.summary.news);
    soon();
  };
  model.on("msg:custom", receive);
  logButton.addEventListener("click", () => {
    live.logarithmic = !live.logarithmic;
    logButton.setAttribute("aria-pressed", live.logarithmic);
    soon();
  });
  charts.forEach((chart) => listenForReading(chart, live, soon));
  const sized = new ResizeObserver(soon);
  [loss.canvas, scale.canvas].forEach((canvas) => sized.observe(canvas));
  const cleanups = [onTheme(soon), ownKeys(root), attend(model), endWithKernel(model, root)];
  return () => {
    model.off("msg:custom", receive);
    sized.disconnect();
    cancelAnimationFrame(asked);
    cleanups.forEach((cleanup) => cleanup());
  };
}

/** Float64 rows of four out of a DataView that may start at any byte. */
function unpack(view) {
  const numbers = new Float64Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
  const rows = [];
  for (let at = 0; at < numbers.length; at += 4) rows.push(numbers.subarray(at, at + 4));
  return rows;
}

/** The row nearest to a step, by bisection. */
function nearest(rows, step) {
  let low = 0, high = rows.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows[middle][0] < step) low = middle + 1;
    else high = middle;
  }
  if (low > 0 && step - rows[low - 1][0] < rows[low][0] - step) low -= 1;
  return rows[low];
}

/** Pointer or arrow keys put a reading line on both charts. */
function listenForReading(chart, live, soon) {
  const { canvas } = chart;
  canvas.addEventListener("pointermove", (event) => {
    if (!live.rows.length || !chart.x) return;
    const share = (event.offsetX - GUTTER.left) / (chart.width - GUTTER.left - GUTTER.right);
    live.reading = nearest(live.rows, live.low + share * (live.high - live.low))[0];
    soon();
  });
  const leave = () => { live.reading = null; soon(); };
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("blur", leave);
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") leave();
    if (!move || !live.rows.length) return;
    event.preventDefault();
    const from = live.reading ?? live.rows[live.rows.length - 1][0];
    const jump = Math.max(1, Math.round((live.high - live.low) / 200));
    live.reading = nearest(live.rows, from + move * jump)[0];
    soon();
  });
}

function readout(live, lossNow, scaleNow) {
  if (!live.rows.length) {
    write(lossNow, "");
    write(scaleNow, "");
    return;
  }
  const row = live.reading === null ? live.rows[live.rows.length - 1] : nearest(live.rows, live.reading);
  const at = live.reading === null ? "" : `step ${integer(row[0])}: `;
  const end = row[3] & SKIPPED ? (row[3] & INJECTED ? " (skipped, injected)" : " (skipped)") : "";
  write(lossNow, at + decimal(row[1], 3));
  // Without a reading the next step's scale, as the figure above says it.
  write(scaleNow, live.reading === null ? power(live.scale) : at + power(row[2]) + end);
}

export default { render };
