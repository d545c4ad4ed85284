// The tabs below the charts. Each tab's own file builds its panel from { send, select, walk }: `send` sends a message to
// the tab's side in the kernel, `select` selects a step everywhere, `walk` steps through a skipped one. A panel is
// { box, show(payload), open?(), select?(step), end?() }: `open` is called when the tab opens, `select` when a step was
// selected, null for none.

import { h, moveByArrows, write } from "./elements.js";
import { endWithKernel, ownKeys } from "./page.js";
import { dtypesPanel } from "./tab_dtypes.js";
import { findingsPanel } from "./tab_findings.js";
import { gradientsPanel } from "./tab_gradients.js";
import { memoryPanel } from "./tab_memory.js";
import { runsPanel } from "./tab_runs.js";
import { scalePanel } from "./tab_scale.js";
import { skippedPanel } from "./tab_skipped.js";
import { stepThroughPanel } from "./tab_step_through.js";

const PANELS = {
  dtypes: dtypesPanel,
  gradients: gradientsPanel,
  skipped: skippedPanel,
  findings: findingsPanel,
  step_through: stepThroughPanel,
  runs: runsPanel,
  scale: scalePanel,
  memory: memoryPanel,
};

function tabStrip(model) {
  const counts = {};
  const buttons = model.get("tabs").map(([name, text]) => {
    counts[name] = h("span", { class: "amp-count" });
    return h("button", { type: "button", role: "tab", "data-tab": name, onclick: () => open(name) }, text, counts[name]);
  });
  const open = (name) => { model.set("tab", name); model.save_changes(); };
  const strip = h("div", { class: "amp-tabs", role: "tablist", "aria-label": "Details" }, buttons);
  moveByArrows(strip, buttons);
  const show = (chosen) => {
    for (const button of buttons) {
      const on = button.dataset.tab === chosen;
      button.setAttribute("aria-selected", on);
      button.tabIndex = on ? 0 : -1;
    }
  };
  return { strip, show, counts, open };
}

function render({ model, el }) {
  const tabs = tabStrip(model);
  const select = (step) => model.send({ type: "select", step });
  const walk = (step) => {
    tabs.open("step_through");
    model.send({ type: "again", step, tab: "step_through" });
  };
  const panels = model.get("tabs").map(([name]) => {
    const panel = PANELS[name]({ select, walk, send: (message) => model.send({ ...message, tab: name }) });
    return { name, ...panel };
  });
  const root = h("section", { class: "amplab amp-panels", "aria-label": "Details" }, tabs.strip, panels.map((panel) => panel.box));
  el.append(root);

  const cleanups = [ownKeys(root), endWithKernel(model, root)];
  const follow = (event, act) => {
    model.on(event, act);
    cleanups.push(() => model.off(event, act));
    act();
  };
  for (const panel of panels) {
    follow(`change:${panel.name}`, () => {
      panel.show(model.get(panel.name));
      write(tabs.counts[panel.name], model.get(panel.name).count ?? "");
    });
    if (panel.end) cleanups.push(panel.end);
  }
  follow("change:tab", () => {
    const chosen = model.get("tab");
    tabs.show(chosen);
    for (const panel of panels) {
      panel.box.hidden = panel.name !== chosen;
      if (panel.name === chosen) panel.open?.();
    }
  });
  follow("change:selected", () => {
    for (const panel of panels) panel.select?.(model.get("selected"));
  });
  return () => { for (const cleanup of cleanups) cleanup(); };
}

export default { render };
