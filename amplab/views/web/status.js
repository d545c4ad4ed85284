// The line that says how the run is. It keeps its height, and only another kind of status is announced.

import { h, write } from "./elements.js";
import { endWithKernel, ownKeys } from "./page.js";

const STATUS_SIGNS = { good: "●", odd: "▲", bad: "✕" };

/** What a screen reader hears: the whole line where its kind has changed, else what it heard before. */
export function announced(before, status) {
  const now = `${status.kind} ${status.state}`;
  return before.key === now ? before : { key: now, text: `${status.state ? `${status.state}. ` : ""}${status.text}` };
}

function render({ model, el }) {
  const sign = h("span", { class: "amp-status-sign", "aria-hidden": "true" });
  const state = h("span", { class: "amp-status-state" });
  const text = h("span", { class: "amp-status-text" });
  const button = h("button", { type: "button", class: "amp-mini amp-status-button", onclick: () => model.send({ type: "apply" }) });
  const spoken = h("span", { class: "amp-sr", role: "status", "aria-live": "polite" });
  const root = h("section", { class: "amplab amp-status", "aria-label": "How the run is" }, sign, state, text, button, spoken);
  el.append(root);
  let heard = { key: "", text: "" };
  const show = () => {
    const status = model.get("shown");
    if (!status.kind) return;
    root.dataset.tone = status.tone;
    root.dataset.kind = status.kind;
    write(sign, STATUS_SIGNS[status.tone]);
    write(state, status.state);
    state.hidden = !status.state;
    write(text, status.text);
    text.title = text.textContent;
    button.hidden = !status.button;
    write(button, status.button ?? "");
    heard = announced(heard, status);
    write(spoken, heard.text);
  };
  model.on("change:shown", show);
  show();
  const cleanups = [ownKeys(root), endWithKernel(model, root), () => model.off("change:shown", show)];
  return () => { for (const cleanup of cleanups) cleanup(); };
}

export default { render };
