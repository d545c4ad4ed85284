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
