// The menu "Export" beside the charts: pictures of the charts and of the gradients, the run as a file, a report, and the whole setting.

import { h, write } from "./elements.js";
import { TAKE_CHARTS } from "./svg_pen.js";
import { endWithKernel, ownKeys } from "./page.js";

const ITEMS = [
  ["png", "Charts as PNG"], ["svg", "Charts as SVG"],
  ["histogram", "Gradients of one step as PNG"], ["heat", "Gradients over the run as PNG"],
  ["csv", "Run as CSV"], ["json", "Run as JSON"], ["report", "Report as one HTML file"],
];

const PICTURES = ["png", "svg", "histogram", "heat"];

/** Offer a text or a blob as a download. */
function saveFile(name, content, mime) {
  const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type: mime }));
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

const dashboardOf = (root) => root.closest(".amp-dashboard") ?? document.body;

/** A picture of this dashboard as SVG, as it is shown, or null if it is not drawn: "charts", "histogram" or "heat". */
function pictureOf(root, which) {
  let given = null;
  document.dispatchEvent(new CustomEvent(TAKE_CHARTS, { detail: { within: dashboardOf(root), which, give: (svg) => { given = svg; } } }));
  return given;
}

const GRADIENTS = { histogram: "now", heat: "run" }; // the view of the tab that draws it
const DRAWN_MS = 5000; // within which the kernel has measured the gradients

/** Bring a picture of the gradients to the front, as only what is shown is drawn; returns its SVG, or null. */
async function gradientsOf(root, which) {
  const [within, end] = [dashboardOf(root), Date.now() + DRAWN_MS];
  within.querySelector("[data-tab=gradients]").click();
  within.querySelector(`[data-panel=gradients] [data-value=${GRADIENTS[which]}]`).click();
  let svg = null;
  while (svg === null && Date.now() < end) {
    await new Promise((resolve) => { setTimeout(resolve, 50); });
    svg = pictureOf(root, which);
  }
  return svg;
}

async function asPng(svg) {
  const picture = new Image();
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  await picture.decode();
  const canvas = h("canvas", { width: 2 * picture.width, height: 2 * picture.height });
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => { canvas.toBlob(resolve, "image/png"); });
}

async function takePicture(root, kind) {
  if (kind in GRADIENTS) {
    const svg = await gradientsOf(root, kind);
    if (svg) saveFile(kind === "heat" ? "gradients-over-the-run.png" : "gradients.png", await asPng(svg));
    return;
  }
  const svg = pictureOf(root, "charts");
  if (svg) saveFile(`charts.${kind}`, kind === "svg" ? svg : await asPng(svg), "image/svg+xml");
}

function render({ model, el }) {
  const opens = h("button", { type: "button", class: "amp-mini amp-take-open", "aria-haspopup": "true", "aria-expanded": "false", onclick: () => toggle(menu.hidden) }, "Export ▾");
  const answer = h("p", { class: "amp-note amp-take-answer", role: "status" });
  const setting = h("input", { type: "text", "aria-label": "A copied configuration", placeholder: "amplab/1 task=…", spellcheck: "false" });
  const start = h("button", { type: "button", class: "amp-mini" }, "Start it");
  const form = h("div", { class: "amp-take-setting" }, setting, start);
  const take = (kind) => {
    if (PICTURES.includes(kind)) takePicture(root, kind);
    else model.send({ type: "file", kind });
    toggle(false);
    opens.focus();
  };
  const items = ITEMS.map(([kind, text]) => h("button", { type: "button", "data-take": kind, onclick: () => take(kind) }, text));
  const menu = h("div", { class: "amp-take-menu", role: "group", "aria-label": "Export" }, items,
    h("p", { class: "amp-note" }, "The configuration restores this setting. Copy it on the left; paste one here:"), form, answer);
  const root = h("section", { class: "amplab amp-take", "aria-label": "Export" }, opens, menu);
  const toggle = (open) => {
    menu.hidden = !open;
    opens.setAttribute("aria-expanded", open);
    if (open) items[0].focus();
  };
  toggle(false);
  const send = (event) => {
    event.preventDefault();
    model.send({ type: "setting", text: setting.value });
  };
  setting.addEventListener("keydown", (event) => { if (event.key === "Enter") send(event); });
  start.addEventListener("click", send);
  const leave = (event) => {
    if (event.key !== "Escape" || menu.hidden) return;
    toggle(false);
    opens.focus();
  };
  const outside = (event) => { if (!root.contains(event.target)) toggle(false); };
  root.addEventListener("keydown", leave);
  document.addEventListener("pointerdown", outside);
  const receive = (message) => {
    if (message.kind === "file") saveFile(message.name, message.text, message.mime);
    else if (message.kind === "answer") {
      write(answer, message.text);
      if (!message.text) { setting.value = ""; toggle(false); }
    }
  };
  model.on("msg:custom", receive);
  el.append(root);
  const cleanups = [ownKeys(root), endWithKernel(model, root)];
  return () => {
    model.off("msg:custom", receive);
    document.removeEventListener("pointerdown", outside);
    for (const cleanup of cleanups) cleanup();
  };
}

export default { render };
