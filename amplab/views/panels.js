// The tabs beneath the charts: op dtypes and overflows as tables; the gradients' figure is a neighbour that CSS shows.

const TABS = [["dtypes", "Op dtypes"], ["gradients", "Gradients"], ["overflows", "Overflows"]];

function tabStrip(model) {
  const counts = {};
  const buttons = TABS.map(([name, text]) => {
    counts[name] = h("span", { class: "amp-count" });
    return h("button", { type: "button", role: "tab", "data-tab": name, id: `amp-tab-${name}-${model.get("_view_key")}`, onclick: () => open(name) }, text, counts[name]);
  });
  const open = (name) => { model.set("tab", name); model.save_changes(); };
  const strip = h("div", { class: "amp-tabs", role: "tablist", "aria-label": "Details" }, buttons);
  strip.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const next = buttons[(buttons.indexOf(event.target) + move + buttons.length) % buttons.length];
    next.focus();
    next.click();
  });
  const show = (chosen) => buttons.forEach((button) => {
    const on = button.dataset.tab === chosen;
    button.setAttribute("aria-selected", on);
    button.tabIndex = on ? 0 : -1;
  });
  return { strip, show, counts };
}

function table(caption, heads) {
  const body = h("tbody");
  const head = h("tr", {}, heads.map(([text, kind]) => h("th", { scope: "col", class: kind ?? "" }, text)));
  return { body, box: h("div", { class: "amp-scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", { class: "amp-sr" }, caption), h("thead", {}, head), body)) };
}

/** A dtype as a coloured chip; the colour repeats the text, it never stands alone. */
function chip(dtype) {
  return h("span", { class: "amp-chip", "data-dtype": dtype }, dtype);
}

/** float32 ×2 + float16 -> float16: the dtypes of a record, repeated ones counted. */
function signature(row) {
  const side = (dtypes) => dtypes.flatMap(([dtype, times], index) => [
    index ? " " : null, chip(dtype), times > 1 ? h("small", {}, `×${times}`) : null]);
  return [...side(row.inputs), h("span", { class: "amp-arrow" }, " → "), ...side(row.outputs)];
}

function opRow(row) {
  const times = row.times > 1 ? h("small", { class: "amp-times" }, ` ×${row.times}`) : null;
  const note = row.changed ? h("span", { class: "amp-changed", title: "Different from the opt_level before" }, "changed") : null;
  return h("tr", { class: [row.cast ? "amp-cast" : "", row.changed ? "amp-row-changed" : ""].join(" ").trim(), "data-phase": row.phase },
    h("td", { class: "amp-num" }, row.index),
    h("td", {}, h("code", { title: `${row.aten}  ${row.shapes}` }, row.op), times, note),
    h("td", { class: "amp-module" }, row.module),
    h("td", { class: "amp-signature" }, signature(row)),
    h("td", { class: "amp-reason" }, h("span", { class: "amp-clamped", title: row.reason }, row.reason)));
}

function dtypePanel() {
  const made = table("Ops of one training step with their dtypes", [["#", "amp-num"], ["Op"], ["Module"], ["In → out"], ["Why"]]);
  const summary = h("span", { class: "amp-summary", role: "status" });
  let rows = [];
  let phase = "all";
  const filter = choices("Rows", ["all", "forward", "backward", "casts", "changed"], (value) => { phase = value; fill(); });
  const kept = (row) => phase === "all" || row.phase === phase || (phase === "casts" && row.cast) || (phase === "changed" && row.changed);
  const fill = () => {
    filter.show(phase);
    const shown = rows.filter(kept);
    made.body.replaceChildren(...(shown.length ? shown.map(opRow) : [emptyRow(5, rows.length ? "No row of this kind." : "The step is being traced …")]));
  };
  const show = (payload) => {
    rows = payload.rows ?? [];
    write(summary, payload.summary ?? "");
    fill();
  };
  return { box: h("div", { class: "amp-panel", "data-panel": "dtypes" }, h("div", { class: "amp-bar" }, filter.group, summary), made.box), show };
}

const emptyRow = (columns, text) => h("tr", { class: "amp-empty" }, h("td", { colspan: columns }, text));

function overflowPanel() {
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
  return { box: h("div", { class: "amp-panel", "data-panel": "overflows" }, h("div", { class: "amp-bar" }, summary), made.box), show };
}

function gradientPanel() {
  const summary = h("span", { class: "amp-summary" });
  const waiting = h("p", { class: "amp-note amp-waiting" }, "The figure is being prepared; plotly takes a moment the first time …");
  const show = (payload) => {
    write(summary, payload.summary ?? "");
    waiting.hidden = Boolean(payload.ready);
  };
  return { box: h("div", { class: "amp-panel", "data-panel": "gradients" }, h("div", { class: "amp-bar" }, summary), waiting), show };
}

/** Plotly draws 700 px wide until the window is resized: tell it so until the figure, which comes late, fits. */
function fitFigure(el, tries = 40) {
  const figure = el.closest(".amp-dashboard")?.querySelector(".amp-gradients .svg-container");
  const box = figure?.closest(".js-plotly-plot");
  if (box && Math.abs(figure.clientWidth - box.clientWidth) <= 2) return;
  if (box && box.clientWidth > 0) window.dispatchEvent(new Event("resize"));
  if (tries > 0) setTimeout(() => fitFigure(el, tries - 1), 150);
}

function render({ model, el }) {
  const tabs = tabStrip(model);
  const panels = { dtypes: dtypePanel(), gradients: gradientPanel(), overflows: overflowPanel() };
  const root = h("section", { class: "amplab amp-panels", "aria-label": "Details" }, tabs.strip, Object.values(panels).map((panel) => panel.box));
  el.append(root);

  const showTab = () => {
    const chosen = model.get("tab");
    tabs.show(chosen);
    for (const [name, panel] of Object.entries(panels)) panel.box.hidden = name !== chosen;
    // The figure lies beside this element in the dashboard.
    el.closest(".amp-dashboard")?.setAttribute("data-tab", chosen);
    if (chosen === "gradients") fitFigure(el);
  };
  const showers = Object.entries(panels).map(([name, panel]) => {
    const show = () => {
      panel.show(model.get(name));
      write(tabs.counts[name], model.get(name).count ?? "");
    };
    model.on(`change:${name}`, show);
    show();
    return () => model.off(`change:${name}`, show);
  });
  const tellTheme = () => {
    if (root.inert) return;
    model.set("dark", isDark());
    model.save_changes();
  };
  const fit = () => fitFigure(el);
  model.on("change:tab", showTab);
  model.on("change:gradients", fit);
  setTimeout(showTab, 0);
  showTab();
  tellTheme();
  const cleanups = [onTheme(tellTheme), ownKeys(root), endWithKernel(model, root), () => model.off("change:tab", showTab), () => model.off("change:gradients", fit), ...showers];
  return () => cleanups.forEach((cleanup) => cleanup());
}

export default { render };
