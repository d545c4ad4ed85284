// What a view shares with the page: JupyterLab's keys and theme, and the kernel's knowledge that the view is open.

/**
 * Keep JupyterLab's one-key shortcuts (D D deletes a cell) away from keys pressed in a view; Ctrl and Meta pass.
 * JupyterLab looks for the attribute on the focused element itself, and its shortcuts match that before any ancestor.
 */
function ownKeys(root) {
  const listen = (event) => {
    if ((root.closest(".amp-dashboard") ?? root).contains(event.target)) {
      event.target.toggleAttribute("data-lm-suppress-shortcuts", !(event.ctrlKey || event.metaKey));
    }
  };
  window.addEventListener("keydown", listen, true);
  return () => window.removeEventListener("keydown", listen, true);
}

/** Call tell whenever JupyterLab changes between light and dark; returns the cleanup. */
function onTheme(tell) {
  const observer = new MutationObserver(() => tell());
  observer.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
  return () => observer.disconnect();
}

const isDark = () => document.body.dataset.jpThemeLight
  ? document.body.dataset.jpThemeLight === "false"
  : window.matchMedia("(prefers-color-scheme: dark)").matches;

/** Switch a view off once its kernel has gone, when nothing that is pressed can be sent; returns the cleanup. */
function endWithKernel(model, root, tell = () => {}) {
  const end = () => {
    // The widget's class says it, in the view that is shown; the event tells when to look.
    setTimeout(() => {
      if (!root.closest(".jupyter-widgets-disconnected")) return;
      root.inert = true;
      tell();
    }, 0);
  };
  model.on("comm_live_update", end);
  return () => model.off("comm_live_update", end);
}

/** Tell the kernel that a view is open, and that it is gone; returns the cleanup. */
function attend(model) {
  const view = Math.random().toString(36).slice(2);
  const say = (type) => model.send({ type, view });
  const leave = () => {
    try {
      say("bye");
    } catch {
      // The kernel has gone first; there is nobody to tell.
    }
  };
  window.addEventListener("pagehide", leave);
  say("hello");
  return () => {
    window.removeEventListener("pagehide", leave);
    leave();
  };
}
