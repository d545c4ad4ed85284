// The tab of op dtypes: a picture of strips, one a module, or a table; beside it what is known of the chosen op.

import { ANY, cellText, keptRows, occurring, sameOp, strips } from "./dtype_rows.js";
import { arrowTarget, choices, h, write } from "./elements.js";
import { liveList } from "./lists.js";
import { chip, emptyRow, table } from "./tables.js";

const WHICH = [[ANY, "all ops"], ["forward", "forward"], ["backward", "backward"], ["casts", "casts"], ["changed", "changed"]];
const LISTS = { none: "no list", hook: "a hook", weights: "the weights", code: "the code", autograd: "autograd" };
const MANY = 24;

/** The dtypes of a row as chips, repeated ones counted: float32 ×2 float16 → float16. */
function signature({ inputs, outputs }) {
  const side = (dtypes) => dtypes.flatMap(([dtype, times], index) => [
    index ? " " : null, chip(dtype), times > 1 ? h("small", {}, `×${times}`) : null]);
  return [...side(inputs), h("span", { class: "amp-arrow" }, " → "), ...side(outputs)];
}

const signed = (row) => (row.inputs.length || row.outputs.length ? signature(row) : [h("i", {}, "not there")]);

function opRow(row, level, choose) {
  const times = row.times > 1 ? h("small", { class: "amp-times" }, ` ×${row.times}`) : null;
  const note = row.changed ? h("span", { class: "amp-changed", title: "Differs from before the change" }, "changed") : null;
  const other = row.other ? h("div", { class: "amp-other" }, `${level}: `, signed(row.other)) : null;
  const opens = h("button", { type: "button", class: "amp-op", "data-op": row.index, title: `${row.aten}  ${row.shapes}`, onclick: choose }, h("code", {}, row.op));
  return h("tr", { class: [row.cast ? "amp-cast" : "", row.changed ? "amp-row-changed" : ""].join(" ").trim(), "data-phase": row.phase, "data-index": row.index, "data-key": row.index },
    h("td", { class: "amp-num" }, row.index),
    h("td", {}, opens, times, note),
    h("td", { class: "amp-module" }, row.module),
    h("td", { class: "amp-signature" }, signature(row), other),
    h("td", { class: "amp-reason" }, row.reason));
}

function cell(row, choose) {
  const text = cellText(row);
  return h("button", {
    type: "button", class: `amp-cell${row.cast ? " amp-hatched" : ""}${row.changed ? " amp-cell-changed" : ""}`, tabindex: "-1",
    "data-dtype": row.dtype, "data-op": row.index, "data-other": row.other ? row.other.dtype || "none" : null,
    "aria-label": text, title: text, onclick: choose,
  }, row.cast ? null : h("span", {}, row.op));
}

function stripLine(line, { toggle, choose }) {
  const opens = line.hasChildren
    ? h("button", { type: "button", class: "amp-twist", "aria-expanded": String(!line.isClosed), "aria-label": `Modules in ${line.label}`, onclick: () => toggle(line.path) }, line.isClosed ? "▸" : "▾")
    : null;
  const strip = (rows, phase) => h("div", { class: "amp-strip", "data-phase": phase }, rows.map((row) => cell(row, () => choose(row.index))));
  return h("div", { class: "amp-strip-line", role: "group", "aria-label": line.path || line.label, "data-module": line.path, "data-key": `module ${line.path}` },
    h("div", { class: "amp-strip-name", style: `padding-left: ${6 + 12 * Math.min(line.depth, 5)}px` }, opens, h("span", { title: line.path }, line.label)),
    strip(line.forward, "forward"), strip(line.backward, "backward"));
}

/** A picture that the arrow keys move through, cell by cell. */
function picture(choose, toggle, marked) {
  const box = h("div", { class: "amp-scroll amp-picture", role: "region", "aria-label": "Picture of one training step: a strip of ops for each module", tabindex: "-1" });
  box.addEventListener("keydown", (event) => {
    const cells = [...box.querySelectorAll(".amp-cell")];
    const target = arrowTarget(event.key, cells.indexOf(event.target), cells.length);
    if (target === null) return;
    event.preventDefault();
    for (const each of cells) each.tabIndex = each === cells[target] ? 0 : -1;
    cells[target].focus();
  });
  const draw = liveList(box, marked);
  const show = (lines, empty) => {
    const head = h("div", { class: "amp-strip-line amp-strip-head", "data-key": "head", "aria-hidden": "true" }, h("div", {}, "Module"), h("div", {}, "forward →"), h("div", {}, "backward →"));
    draw([head, ...lines.map((line) => stripLine(line, { toggle, choose })), ...(lines.length ? [] : [h("p", { class: "amp-strip-empty" }, empty)])]);
  };
  const mark = (index) => {
    const cells = [...box.querySelectorAll(".amp-cell")];
    const chosen = cells.find((each) => each.dataset.op === index);
    for (const each of cells) {
      each.setAttribute("aria-pressed", String(each === chosen));
      each.tabIndex = each === (chosen ?? cells[0]) ? 0 : -1;
    }
  };
  return { box, show, mark };
}

/** A filter as a list of values, the first of which keeps everything. */
function filter(label, any, choose) {
  const box = h("select", { "aria-label": label, title: label, onchange: () => choose(box.value) });
  const show = (values, chosen) => {
    const wanted = [[ANY, any], ...values];
    if (JSON.stringify(wanted) !== box.dataset.values) {
      box.dataset.values = JSON.stringify(wanted);
      box.replaceChildren(...wanted.map(([value, text]) => h("option", { value }, text)));
    }
    box.value = chosen;
  };
  return { box, show };
}

function measuredTable(inputs) {
  const made = table("Inputs of this op", [["Input"], ["absmax", "amp-num"], ["→ 0", "amp-num"], ["→ inf", "amp-num"]]);
  made.body.replaceChildren(...inputs.map((each) => h("tr", {}, h("td", {}, each.tensor),
    h("td", { class: "amp-num" }, each.absmax), h("td", { class: "amp-num" }, each.flushed), h("td", { class: "amp-num" }, each.overflowed))));
  return made.box.querySelector("table");
}

/** What is known of one op, and what can be changed. */
function detail(row, payload, { send, close }) {
  const has = (kind, name) => (payload.overrides ?? []).some((each) => each.kind === kind && each.name === name);
  const action = (kind, name) => {
    const on = !has(kind, name);
    return h("button", { type: "button", "data-override": kind, onclick: () => send({ type: "override", kind, name, on }) },
      on ? `Run ${name} in float32` : `Undo ${name} in float32`);
  };
  const measured = payload.measured?.index === row.index ? payload.measured : null;
  const line = (title, ...content) => h("div", {}, h("dt", {}, title), h("dd", {}, ...content));
  return [
    h("div", { class: "amp-detail-head" }, h("b", {}, row.op, row.times > 1 ? ` ×${row.times}` : ""), h("span", {}, [row.module || "outside any module", row.phase].join(" · ")),
      h("button", { type: "button", class: "amp-mini", "aria-label": "Close", onclick: close }, "×")),
    h("dl", {},
      line("Dtypes", ...signature(row), row.moved ? ` ${row.moved}` : ""),
      line("Why", row.reason),
      row.other ? line(`At ${payload.compared}`, ...signed(row.other), h("p", {}, row.other.reason)) : null,
      row.policy ? line("Row of the op table", row.policy) : null,
      line("Tensors", row.shapes),
      row.line ? line("Line", h("code", {}, row.line), h("code", { class: "amp-code-line" }, row.code)) : null,
      payload.fixed ? null : line("Inputs now", measured ? measuredTable(measured.inputs) : h("button", { type: "button", onclick: () => send({ type: "measure", index: row.index }) }, "Measure in the next step"))),
    !payload.fixed && (row.canOp || row.canModule) ? h("div", { class: "amp-actions" }, row.canOp ? action("op", row.op) : null, row.canModule ? action("module", row.module) : null) : null,
  ].filter(Boolean);
}

function legend(rows) {
  return [...occurring(rows, "dtype").map((dtype) => chip(dtype)), rows.some((row) => row.cast) ? h("span", {}, h("i", { class: "amp-swatch amp-hatched" }), " cast") : null].filter(Boolean);
}

export function dtypesPanel({ send }) {
  let payload = {};
  let view = "picture";
  let chosen = null;
  let closed = null;
  const kept = { dtype: ANY, list: ANY, module: ANY, which: ANY };
  const set = (name) => (value) => { kept[name] = value; fill(); };

  const views = choices("View", ["picture", "table"], (value) => { view = value; fill(); }, { picture: "Picture", table: "Table" });
  const filters = {
    dtype: filter("Dtype", "any dtype", set("dtype")),
    list: filter("What decided", "any reason", set("list")),
    module: filter("Module", "any module", set("module")),
    which: filter("Ops", "all ops", set("which")),
  };
  const compare = filter("Compare with another opt_level", "compare …", (level) => send({ type: "compare", level: level || null }));
  const summary = h("span", { class: "amp-summary", role: "status" });
  const key = h("span", { class: "amp-legend" });
  const overrides = h("div", { class: "amp-overridden" });
  const drawOverrides = liveList(overrides);
  const made = table("Ops of one training step with their dtypes", [["#", "amp-num"], ["Op"], ["Module"], ["In → out"], ["Why"]], () => mark());
  const choose = (index) => { chosen = index === chosen ? null : index; mark(); };
  const drawn = picture(choose, (path) => { closed.has(path) ? closed.delete(path) : closed.add(path); fill(); }, () => mark());
  const aside = h("aside", { class: "amp-detail", "aria-label": "The chosen op", tabindex: "-1" });
  const drawDetail = liveList(aside);
  const body = h("div", { class: "amp-dtypes" }, drawn.box, made.box, aside);

  const mark = () => {
    const row = (payload.rows ?? []).find((each) => each.index === chosen) ?? null;
    aside.hidden = row === null;
    body.classList.toggle("amp-has-detail", row !== null);
    if (row) drawDetail(detail(row, payload, { send, close: () => choose(chosen) }));
    drawn.mark(chosen);
    for (const each of made.body.querySelectorAll("tr")) each.classList.toggle("amp-chosen", each.dataset.index === chosen);
  };
  const fill = () => {
    const rows = payload.rows ?? [];
    views.show(view);
    filters.dtype.show(occurring(rows, "dtype").map((each) => [each, each]), kept.dtype);
    filters.list.show(occurring(rows, "list").map((each) => [each, LISTS[each] ?? (each === "your rule" ? each : `${each} list`)]), kept.list);
    filters.module.show((payload.modules ?? []).filter((each) => each.path).map((each) => [each.path, each.path]), kept.module);
    filters.which.show([...WHICH.slice(1), ...(payload.compared ? [["differing", `other at ${payload.compared}`]] : [])], kept.which);
    const shown = keptRows(rows, kept, payload.modules ?? []);
    const empty = rows.length ? "No op passes these filters." : payload.empty ?? "Tracing one step …";
    drawn.box.hidden = view !== "picture";
    made.box.hidden = view !== "table";
    if (view === "picture") drawn.show(strips(payload.modules ?? [], shown, closed ?? new Set()), empty);
    else made.draw(shown.length ? shown.map((row) => opRow(row, payload.compared, () => choose(row.index))) : [emptyRow(5, empty)]);
  };
  const show = (given) => {
    chosen = sameOp(payload.rows ?? [], given.rows ?? [], chosen);
    payload = given;
    const modules = payload.modules ?? [];
    if (closed === null && modules.length) closed = new Set(modules.length > MANY ? repeated(modules) : []);
    if (!modules.some((each) => each.path === kept.module)) kept.module = ANY;
    if (!payload.compared && kept.which === "differing") kept.which = ANY;
    compare.box.hidden = Boolean(payload.fixed); // a step that ran elsewhere cannot run at another level here
    compare.show((payload.levels ?? []).map(([name, label]) => [name, `with ${label}`]), payload.compared ?? ANY);
    write(summary, payload.problem || payload.comparison || payload.summary || "");
    summary.classList.toggle("amp-problem", Boolean(payload.problem));
    key.replaceChildren(...legend(payload.rows ?? []));
    overrides.hidden = !(payload.overrides ?? []).length;
    drawOverrides([h("span", {}, "In float32: "), ...(payload.overrides ?? []).map((each) =>
      h("button", { type: "button", class: "amp-mini", "data-key": `${each.kind} ${each.name}`, title: "Take this override away", "aria-label": `${each.name}, in float32: take away`, onclick: () => send({ type: "override", kind: each.kind, name: each.name, on: false }) }, `${each.name} ×`))]);
    fill();
  };
  return {
    box: h("div", { class: "amp-panel", "data-panel": "dtypes" },
      h("div", { class: "amp-bar amp-dtypes-bar" }, views.group, ...Object.values(filters).map((each) => each.box), compare.box),
      h("div", { class: "amp-dtypes-line" }, summary, overrides, key), body),
    show,
  };
}

/** The modules that are closed at first in a large model: those that contain others, below the first level. */
function repeated(modules) {
  return modules.filter((each) => each.depth >= 2 && modules.some((other) => other.parent === each.path)).map((each) => each.path);
}
