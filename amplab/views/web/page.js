// What a view shares with the page: JupyterLab's keys and theme, and messages to the kernel about whether it is open.

/**
 * Keep JupyterLab's one-key shortcuts (D D deletes a cell) away from keys pressed in a view; Ctrl and Meta pass.
 * JupyterLab looks for the attribute on the focused element itself, and tests its shortcuts before any ancestor hears
 * the key, so a listener of the window sets the attribute first. Returns the cleanup.
 */
export function ownKeys(root) {
  const listen = (event) => {
    if ((root.closest(".amp-dashboard") ?? root).contains(event.target)) {
      event.target.toggleAttribute("data-lm-suppress-shortcuts", !(event.ctrlKey || event.metaKey));
    }
  };
  window.addEventListener("keydown", listen, true);
  return () => window.removeEventListener("keydown", listen, true);
}

/** Call `tell` whenever JupyterLab changes between light and dark; returns the cleanup. */
export function onTheme(tell) {
  const observer = new MutationObserver(() => tell());
  observer.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
  return () => observer.disconnect();
}

/** Disable a view when its kernel has gone, because nothing that is pressed can be sent; returns the cleanup. */
export function endWithKernel(model, root, tell = () => {}) {
  const end = () => {
    // The event comes before the widget's class changes, and only the view that is on the page has the class.
    setTimeout(() => {
      if (!root.closest(".jupyter-widgets-disconnected")) return;
      root.inert = true;
      tell();
    }, 0);
  };
  model.on("comm_live_update", end);
  return () => model.off("comm_live_update", end);
}

const PATIENCE = 3000; // ms from a press to the question whether the kernel still has the widget that was pressed

/**
 * Call `tell` when the kernel has the widget of `model` no more: another page has restarted it, and JupyterLab tells only
 * that page. It is asked when this page comes to the front and after a press in `box`; a busy kernel answers once it is
 * free. Returns the cleanup.
 */
export function missKernel(model, box, tell) {
  let timer = null;
  let isAsking = false;
  const ask = async () => {
    timer = null;
    if (isAsking || document.hidden) return;
    isAsking = true;
    try {
      const { content } = await model.widget_manager.kernel.requestCommInfo({});
      if (content.status === "ok" && !(model.get("id_in_kernel") in content.comms)) tell();
    } catch {
      // There is no kernel, of which JupyterLab tells, or this is another Jupyter.
    }
    isAsking = false;
  };
  const askSoon = () => { timer ??= setTimeout(ask, PATIENCE); };
  document.addEventListener("visibilitychange", ask);
  for (const press of ["click", "change"]) box.addEventListener(press, askSoon, true);
  return () => {
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", ask);
    for (const press of ["click", "change"]) box.removeEventListener(press, askSoon, true);
  };
}

/**
 * Tell the kernel that a view, known by a random name, is open, and later that it has closed; returns the cleanup. A page
 * that slept or had no connection may count as closed, so it says that it is there when it wakes.
 */
export function attend(model, view = Math.random().toString(36).slice(2)) {
  const say = (type) => model.send({ type, view });
  const sayIfHeard = (type) => {
    try {
      say(type);
    } catch {
      // The kernel has already gone, so nobody needs the message.
    }
  };
  const leave = () => sayIfHeard("bye");
  const wake = () => { if (!document.hidden) sayIfHeard("seen"); };
  window.addEventListener("pagehide", leave);
  window.addEventListener("online", wake);
  document.addEventListener("visibilitychange", wake);
  say("hello");
  return () => {
    window.removeEventListener("pagehide", leave);
    window.removeEventListener("online", wake);
    document.removeEventListener("visibilitychange", wake);
    leave();
  };
}
