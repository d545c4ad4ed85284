// Messages above the dashboard: a traceback, a sentence, or the choice between two experiments.

import { h } from "./elements.js";
import { liveList } from "./lists.js";
import { endWithKernel, missKernel, ownKeys } from "./page.js";

function render({ model, el }) {
  const root = h("section", { class: "amplab amp-notices", "aria-label": "Messages" });
  el.append(root);
  const send = (type, id) => model.send({ type, id });
  const card = (notice) => {
    const buttons = notice.choices.map(([type, text], index) =>
      h("button", { type: "button", class: index === 0 ? "amp-button amp-primary" : "amp-button", onclick: () => send(type, notice.id) }, text));
    return h("div", { class: `amp-notice amp-${notice.kind}`, "data-key": notice.id, role: notice.kind === "error" ? "alert" : "status" },
      h("div", { class: "amp-notice-head" }, h("strong", {}, notice.title), h("span", { class: "amp-notice-text" }, notice.text), buttons),
      notice.detail ? h("pre", { tabindex: "0", "aria-label": "Traceback" }, notice.detail) : null);
  };
  const draw = liveList(root);
  const show = () => {
    draw(model.get("notices").map(card));
    // The last lines of a traceback hold the error.
    for (const detail of root.querySelectorAll("pre")) detail.scrollTop = detail.scrollHeight;
  };
  model.on("change:notices", show);
  show();
  const gone = h("p", { class: "amp-gone", role: "alert" },
    "The kernel has restarted. Click here and press Shift+Enter: the lab opens again and offers to continue the run.");
  // Beside the root, which becomes inert: what is in it is not read out and cannot be clicked.
  const cleanups = [ownKeys(root), endWithKernel(model, root, () => el.prepend(gone))];
  // The dashboard is complete only after this part of it.
  const watching = requestAnimationFrame(() => {
    const dashboard = root.closest(".amp-dashboard");
    if (!dashboard) return;
    cleanups.push(missKernel(model, dashboard, () => {
      for (const part of dashboard.querySelectorAll(".amplab")) part.inert = true;
      el.prepend(gone);
    }));
  });
  return () => {
    cancelAnimationFrame(watching);
    model.off("change:notices", show);
    for (const cleanup of cleanups) cleanup();
  };
}

export default { render };
