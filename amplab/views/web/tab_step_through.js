// The tab that walks through one training step: a strip of stages, one sentence, and what is before and after the stage.
// The kernel sends a whole step at once; which of its stages is shown is the only state of the page.

import { h, icon, moveByArrows, write } from "./elements.js";
import { raised } from "./numbers.js";
import { chip } from "./tables.js";

const LOW = -44; // the power of two of the first bin
const BANDS = [[-44, -25, "→ 0 in fp16"], [-25, -14, "subnormal"], [-14, 16, "normal in fp16"], [16, 25, "→ inf"]];
const PLOT = { width: 260, height: 74, top: 13, bottom: 15 };
const DWELL = 3600; // ms on a stage while it plays
const IDLE_DWELL = 1500; // ms on a stage in which nothing happens
const FIELDS = ["sign", "exponent", "fraction"];

// -- from a payload to what is drawn --

/** The name of a tensor in few letters: a gradient as ∂. */
export const shortName = (name) => name.replace(/^gradient of (the )?/, "∂ ");

/** The stage after `index`, or null at the end. */
export const nextStage = (index, count) => (index + 1 < count ? index + 1 : null);

/** The outline of a histogram as an SVG path: steps of one unit in x, shares of `top` in y, downwards from 0 to 1. */
export function stairs(shares, top) {
  const y = (share) => +(1 - share / top).toFixed(4);
  return `M0 1${shares.map((share, bin) => `V${y(share)}H${bin + 1}`).join("")}V1Z`;
}

/** The largest share of two histograms, so that both have one axis; never 0. */
export const commonTop = (...pictures) => Math.max(1, ...pictures.flatMap((picture) => picture?.shares ?? []));

/** The bits of a pattern as cells: {bit, field, isChanged, isCut}. */
export function bitCells(bits) {
  const cells = FIELDS.flatMap((field) => [...bits[field]].map((bit) => ({ bit, field })));
  return cells.map((cell, position) => ({
    ...cell, isChanged: bits.changed.includes(position), isCut: position >= cells.length - bits.cut }));
}

/** The bits in words, for a screen reader. */
export const bitsInWords = (bits) => `sign ${bits.sign}, exponent ${bits.exponent}, fraction ${bits.fraction}: ${bits.kind}`;

// -- drawing --

const SVG_NAMES = "http://www.w3.org/2000/svg";

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG_NAMES, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** A picture of a few letters' height for the strip. */
function miniature(stage) {
  const picture = stage.after ?? stage.before;
  const bins = picture?.shares.length ?? 69;
  const box = svg("svg", { class: "amp-mini-plot", viewBox: `0 0 ${bins} 1`, preserveAspectRatio: "none", "aria-hidden": "true" });
  for (const [from, to, name] of BANDS) {
    if (!name.startsWith("normal")) box.append(svg("rect", { class: name === "subnormal" ? "amp-band-some" : "amp-band-lost", x: from - LOW, y: 0, width: to - from, height: 1 }));
  }
  if (picture) box.append(svg("path", { class: "amp-hills", d: stairs(picture.shares, commonTop(picture)) }));
  return box;
}

/** A histogram over powers of two with the ranges of float16; `ghost` is drawn dashed behind it. */
function plot(picture, ghost, top) {
  const { width, height, top: above, bottom } = PLOT;
  const bins = picture.shares.length;
  const x = (exponent) => ((exponent - LOW) / bins) * width;
  const inner = height - above - bottom;
  const box = svg("svg", { class: "amp-plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": picture.description });
  for (const [from, to, name] of BANDS) {
    const kind = { subnormal: "amp-band-some", "normal in fp16": "amp-band-kept" }[name] ?? "amp-band-lost";
    box.append(svg("rect", { class: kind, x: x(from), y: above, width: x(to) - x(from), height: inner }));
    box.append(svg("text", { class: "amp-band-name", x: x((from + to) / 2), y: 9, "text-anchor": "middle" }, name));
  }
  const layer = (shares, kind) => svg("path", { class: kind, d: stairs(shares, top * 1.04), "vector-effect": "non-scaling-stroke",
    transform: `translate(0 ${above}) scale(${width / bins} ${inner})` });
  if (ghost) box.append(layer(ghost.shares, "amp-ghost"));
  box.append(layer(picture.shares, "amp-hills"));
  if (picture.exponent !== null) {
    const at = x(Math.min(Math.max(picture.exponent, LOW), LOW + bins - 1) + 0.5);
    box.append(svg("path", { class: "amp-here", d: `M${at} ${above}V${height - bottom}M${at - 4} ${above - 1}h8l-4 5z` }));
  }
  for (let exponent = -40; exponent <= 20; exponent += 10) {
    box.append(svg("text", { class: "amp-tick", x: x(exponent), y: height - 4, "text-anchor": "middle" }, `2${raised(exponent)}`));
  }
  return box;
}

function bitRow(bits) {
  if (!bits) return h("div", { class: "amp-bits-row" });
  const groups = FIELDS.map((field) => h("span", { class: `amp-bits amp-bits-${field}`, "data-field": field },
    bitCells(bits).filter((cell) => cell.field === field).map((cell) => h("i", {
      class: [cell.bit === "1" ? "amp-on" : "", cell.isChanged ? "amp-bit-changed" : "", cell.isCut ? "amp-bit-cut" : ""].join(" ").trim() }, cell.bit))));
  return h("div", { class: "amp-bits-row", role: "img", "aria-label": bitsInWords(bits), title: `${bits.hex}: ${bits.kind}` }, groups);
}

function valueRow(picture, pick) {
  return h("div", { class: "amp-values" }, picture.values.map((each) => {
    const isChosen = each.index === picture.index;
    return isChosen
      ? h("b", { class: "amp-value", title: each.place }, picture.value)
      : h("button", { type: "button", tabindex: pick ? 0 : -1, disabled: !pick, title: each.place, "aria-label": `Show element ${each.place}, ${each.value}`, onclick: () => pick(each.index) }, each.value);
  }));
}

const FIGURE_TITLES = { min: "smallest magnitude that is not 0", mean: "mean magnitude", max: "largest magnitude" };

/** One tensor: its name, values around the chosen element, the bits of that element, the histogram, the statistics. */
function tensorBox(side, picture, ghost, top, pick) {
  if (!picture) return h("div", { class: "amp-tensor amp-none", "data-side": side }, h("span", {}, "no floating-point tensor seen here"));
  return h("div", { class: "amp-tensor", "data-side": side, role: "group", "aria-label": `${side[0].toUpperCase()}${side.slice(1)}: ${picture.name}` },
    h("div", { class: "amp-tensor-head" },
      h("code", { title: `${picture.name}${picture.place}` }, shortName(picture.name)), h("b", {}, picture.place),
      chip(picture.dtype), h("span", { class: "amp-shape" }, h("small", {}, picture.shape))),
    valueRow(picture, pick),
    bitRow(picture.bits),
    plot(picture, ghost, top),
    h("div", { class: "amp-magnitudes" }, picture.figures.map(([name, value]) =>
      h("span", { title: FIGURE_TITLES[name] ?? name, class: name === "inf, NaN" ? "amp-broken" : null }, `${name} `, h("b", {}, value)))));
}

// -- the panel --

/** The buttons that walk through the stages; `act` has step, move and play. */
function walkButtons(act) {
  const step = h("button", { type: "button", class: "amp-button amp-primary amp-take", title: "Train one step and record its stages; a run that is running pauses", onclick: act.step }, icon("step"), "Take one step");
  const button = (label, name, does) => h("button", { type: "button", class: "amp-button amp-walk-button", "aria-label": label, title: label, onclick: does }, icon(name));
  const previous = button("Previous stage", "previous", () => act.move(-1));
  const next = button("Next stage", "step", () => act.move(1));
  const play = h("button", { type: "button", class: "amp-button amp-walk-button amp-play", onclick: act.play });
  const show = (isPlaying, index, count) => {
    const label = isPlaying ? "Stop the walk" : "Play: walk through the stages, then take the next step";
    if (play.title !== label) {
      play.replaceChildren(icon(isPlaying ? "pause" : "play"));
      play.title = label;
      play.setAttribute("aria-label", label);
    }
    previous.disabled = !count || index === 0;
    next.disabled = !count || index === count - 1;
  };
  return { parts: [step, h("span", { class: "amp-walk" }, previous, play, next)], show };
}

function picker(label, choose) {
  const select = h("select", { "aria-label": label, onchange: () => choose(select.value) });
  let drawn = "";
  const show = (options, value) => {
    if (JSON.stringify(options) !== drawn) {
      drawn = JSON.stringify(options);
      select.replaceChildren(...options.map(([name, text]) => h("option", { value: name }, text)));
    }
    select.value = value;
  };
  return { select, show };
}

export function stepThroughPanel({ send }) {
  let payload = {};
  let index = 0;
  let timer = 0;
  let isPlaying = false;
  let focused = false;

  const stages = () => payload.stages ?? [];
  const takeStep = () => send({ type: "step" });
  const go = (target) => {
    if (target < 0 || target >= stages().length) return;
    index = target;
    draw();
  };
  const stop = () => {
    isPlaying = false;
    clearTimeout(timer);
  };
  const tick = () => {
    clearTimeout(timer);
    if (!isPlaying) return;
    const idle = stages()[index]?.tone === "idle";
    timer = setTimeout(() => {
      if (box.hidden || !box.isConnected) { // another tab is open
        stop();
        return;
      }
      const next = nextStage(index, stages().length);
      if (next === null) takeStep();
      else go(next);
    }, idle ? IDLE_DWELL : DWELL);
  };
  const play = () => {
    if (isPlaying) stop();
    else {
      isPlaying = true;
      if (!stages().length) takeStep();
    }
    draw();
  };

  const walk = walkButtons({ step: () => { stop(); takeStep(); draw(); }, move: (by) => { stop(); go(index + by); }, play });
  const tensor = picker("Parameter", (name) => send({ type: "parameter", name }));
  const element = picker("Element", (value) => value !== "picked" && send({ type: "element", value }));
  const title = h("b", { class: "amp-walk-title" });
  const sentence = h("span");
  const strip = h("div", { class: "amp-film", role: "group", "aria-label": "Stages of the step" });
  const told = h("p", { class: "amp-told", role: "status" }, title, sentence);
  const sides = h("div", { class: "amp-sides" });
  const refusal = h("p", { class: "amp-error", role: "alert", hidden: true });
  const empty = h("div", { class: "amp-walk-empty" },
    h("p", {}, "One training step in slow motion: cast weights, forward, loss × scale, backward, unscale and check, clip, step or skip, update scale."),
    h("p", { class: "amp-note" }, h("strong", {}, "Take one step"), " records a real step of this run, once and as a whole. You then walk through the record. The run is bit for bit what it would be without it."));
  const content = h("div", { class: "amp-walk-content" }, strip, told, sides);
  const bar = h("div", { class: "amp-bar" }, walk.parts, tensor.select, element.select);
  const box = h("div", { class: "amp-panel", "data-panel": "step_through" }, bar, refusal, empty, content);

  const frame = (stage, number) => {
    const isPresent = number === index;
    return h("button", { type: "button", class: `amp-frame amp-tone-${stage.tone}`, "data-stage": stage.name, tabindex: isPresent ? 0 : -1,
      "aria-current": isPresent ? "step" : null, "aria-label": `Stage ${number + 1} of ${stages().length}: ${stage.title}, ${stage.brief}`, onclick: () => { stop(); go(number); } },
    h("b", {}, stage.title), miniature(stage), h("small", {}, stage.brief));
  };
  strip.addEventListener("focusin", () => { focused = true; });
  strip.addEventListener("focusout", () => { focused = false; });

  function drawStrip() {
    const hadFocus = focused;
    const buttons = stages().map(frame);
    const row = h("div", { class: "amp-frames" }, buttons);
    moveByArrows(row, buttons);
    strip.replaceChildren(row);
    if (hadFocus) buttons[index].focus();
  }

  /** Return what gives the focus to the value at the same place again, after the values were drawn anew. */
  function keepFocus() {
    const buttons = () => [...sides.querySelectorAll(".amp-values button")];
    const place = buttons().indexOf(document.activeElement);
    return () => { if (place >= 0) buttons()[place]?.focus(); };
  }

  function drawStage() {
    const stage = stages()[index];
    const { before, after } = stage;
    const top = commonTop(before, after);
    const pick = (chosen) => send({ type: "element", value: chosen });
    // Only elements of the parameter itself can be chosen.
    const own = (picture) => (picture && picture.index === payload.index && picture.shape === payload.shape ? pick : null);
    write(title, `Step ${payload.step}, ${payload.level} · ${stage.title}:`);
    write(sentence, stage.sentence);
    told.dataset.tone = stage.tone;
    const refocus = keepFocus();
    sides.replaceChildren(
      tensorBox("before", before, null, top, own(before)),
      h("div", { class: "amp-operator" }, h("b", {}, stage.operator), h("span", { "aria-hidden": "true" }, "→"),
        stage.compares && before && after ? h("small", {}, "dashed: before") : null),
      tensorBox("after", after, stage.compares ? before : null, top, own(after)));
    refocus();
  }

  function draw() {
    const has = stages().length > 0;
    empty.hidden = has;
    content.hidden = !has;
    tensor.select.hidden = !has;
    element.select.hidden = !has;
    walk.show(isPlaying, index, stages().length);
    if (has) {
      tensor.show(payload.parameters, payload.parameter);
      element.show(payload.elements, payload.element);
      drawStrip();
      drawStage();
    }
    tick();
  }

  const show = (shown) => {
    if (shown.step !== payload.step) index = 0;
    payload = shown;
    if (shown.refusal) stop();
    write(refusal, shown.refusal || shown.note || "");
    refusal.hidden = !(shown.refusal || shown.note);
    draw();
  };
  return { box, show, end: stop };
}
