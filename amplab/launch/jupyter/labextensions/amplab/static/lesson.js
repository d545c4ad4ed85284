// A prebuilt extension of JupyterLab, loaded by `amplab lab` alone. It runs the lab's cell when its lesson opens, brings
// the dashboard into view when all cells have run, and hides the sources where the server says so (`amplab lab --app`).
//
// It runs one cell with one known source, in a lesson that the server names, whose outputs are all trusted (signed),
// only while the kernel has no lab on this page, and only in a folder without Python modules: the cell could import
// them, and nobody has asked for that yet. It never changes a source and never saves.

(() => {
  const CELL = "the-lab";
  const SOURCE = "import amplab.lab\n\nlab = amplab.lab.open()\nlab";
  const WIDGET = "application/vnd.jupyter.widget-view+json";
  const HAS_LAB = "'amplab.lab' in __import__('sys').modules and __import__('amplab.lab').lab.active() is not None";
  const IMPORTABLE = "','.join(__import__('amplab.launch.beside', fromlist=['*']).modules_beside())";
  const OPENING = "amplab-opening"; // class of a notebook in which the lab may open by itself
  const REDRAWN_MS = 4000; // within which the widgets of a reloaded page are there again

  /** What the server says about the page: the names of the lessons, and whether the sources are hidden. */
  function pageOptions() {
    const data = JSON.parse(document.getElementById("jupyter-config-data")?.textContent ?? "{}");
    return { lessons: JSON.parse(data.amplabLessons ?? "[]"), hides: data.amplabSources === "hidden" };
  }

  /** The lab's cell, if the notebook has it unchanged and every output in it may be shown. */
  function labCell(notebook) {
    const code = notebook.widgets.filter((cell) => cell.model.type === "code");
    const cell = code.find((each) => each.model.id === CELL);
    const known = cell?.model.sharedModel.getSource().trim() === SOURCE;
    return known && code.every((each) => each.model.trusted) ? cell : null;
  }

  /** Whether the kernel has a lab, and the Python modules in its folder; null if it does not say. */
  async function askKernel(kernel) {
    const content = { code: "", silent: true, store_history: false, user_expressions: { lab: HAS_LAB, modules: IMPORTABLE } };
    const told = (await kernel.requestExecute(content).done).content.user_expressions;
    const modules = told?.modules?.data?.["text/plain"];
    return { hasLab: told?.lab?.data?.["text/plain"] === "True", modules: modules?.slice(1, -1).split(",").filter(Boolean) ?? null };
  }

  /** Say above the outputs of a cell why it does not run by itself, until it runs. */
  function explain(cell, modules) {
    const line = document.createElement("div");
    line.className = "amplab-not-opened";
    line.setAttribute("role", "status");
    const names = modules.slice(0, 5).join(", ") + (modules.length > 5 ? ` and ${modules.length - 5} more` : "");
    line.textContent = `The lab did not start by itself: this folder holds Python modules or packages (${names}), which the cell may import. `
      + "If you trust them, click into this cell and press Shift+Enter.";
    cell.node.querySelector(".jp-Cell-outputWrapper").before(line);
    cell.model.stateChanged.connect((_, { name }) => { if (name === "executionCount" || name === "executionState") line.remove(); });
  }

  const dashboardIn = (cell) => cell.node.querySelector(".amp-dashboard");

  async function appears(find, patience) {
    const end = Date.now() + patience;
    while (Date.now() < end) {
      if (find()) return true;
      await new Promise((done) => { setTimeout(done, 100); });
    }
    return false;
  }

  const holdsWidget = (cell) => {
    const { outputs } = cell.model;
    return Array.from({ length: outputs.length }, (_, index) => outputs.get(index)).some((each) => WIDGET in each.data);
  };

  /** Open the lab if it may; until then its stored picture, which says what to press, is not shown. */
  async function openLab(panel, execute) {
    panel.addClass(OPENING);
    try {
      await Promise.all([panel.context.ready, panel.revealed]);
      if (labCell(panel.content)) await openTrusted(panel, execute);
    } finally {
      panel.removeClass(OPENING);
    }
  }

  async function openTrusted(panel, execute) {
    await panel.sessionContext.ready;
    const kernel = panel.sessionContext.session?.kernel;
    const cell = kernel && labCell(panel.content);
    if (!cell) return;
    const { hasLab, modules } = await askKernel(kernel);
    if (hasLab && holdsWidget(cell) && (await appears(() => dashboardIn(cell), REDRAWN_MS))) return;
    if (panel.isDisposed || cell.model.executionState === "running" || modules === null) return;
    if (modules.length > 0) explain(cell, modules);
    else await execute(cell);
  }

  /** After the cells of a batch have run, JupyterLab shows the last of them: if the lab's was among them, show the lab. */
  function showAfterBatches({ executed, selectionExecuted }, isLesson) {
    const opened = new WeakMap(); // by notebook: the lab's cell, since the last batch
    executed.connect((_, { notebook, cell, success }) => {
      if (success && cell.model.id === CELL && isLesson(notebook)) opened.set(notebook, cell);
    });
    selectionExecuted.connect(async (_, { notebook, lastCell }) => {
      const cell = opened.get(notebook);
      opened.delete(notebook);
      if (!cell || cell === lastCell || !(await appears(() => dashboardIn(cell), REDRAWN_MS))) return;
      notebook.activeCellIndex = notebook.widgets.indexOf(cell);
      dashboardIn(cell).scrollIntoView({ block: "start" });
    });
  }

  const plugin = ({ CodeCell }, { NotebookActions }) => ({
    id: "amplab:lesson",
    description: "Opens the lab of a lesson by itself.",
    autoStart: true,
    activate(app) {
      const { lessons, hides } = pageOptions();
      const opened = new WeakSet();
      app.docRegistry.addWidgetExtension("Notebook", {
        createNew(panel, context) {
          if (!lessons.includes(context.path)) return;
          opened.add(panel.content);
          if (hides) panel.addClass("amplab-sources-hidden");
          openLab(panel, (cell) => CodeCell.execute(cell, panel.sessionContext)).catch((error) => {
            console.info(`amplab: the lab did not open by itself: ${error}`); // as when the page is left meanwhile
          });
        },
      });
      showAfterBatches(NotebookActions, (notebook) => opened.has(notebook));
      addStyle();
    },
  });

  function addStyle() {
    const style = document.createElement("style");
    const picture = `.${OPENING} .jp-OutputArea-child:has(> .jp-RenderedImage)`;
    style.textContent = `
      .amplab-not-opened { padding: 8px 14px; color: var(--jp-ui-font-color1); }
      .amplab-sources-hidden .jp-CodeCell .jp-Cell-inputWrapper { display: none; }
      ${picture} > .jp-RenderedImage { visibility: hidden; }
      ${picture} { position: relative; }
      ${picture}::after { content: "Starting the lab: waiting for the kernel."; position: absolute; top: 14px; left: 84px; color: var(--jp-ui-font-color1); }`;
    document.head.append(style);
  }

  /** A module that JupyterLab shares with its extensions, in the version that it runs. */
  async function shared(scope, name) {
    const versions = Object.values(scope[name]);
    const chosen = versions.find((each) => each.loaded) ?? versions[0];
    return (await chosen.get())();
  }

  let scope;
  globalThis._JUPYTERLAB ??= {};
  globalThis._JUPYTERLAB.amplab = {
    init(sharing) { scope = sharing; },
    async get() {
      const modules = ["@jupyterlab/cells", "@jupyterlab/notebook"].map((name) => shared(scope, name));
      const [cells, notebook] = await Promise.all(modules);
      return () => plugin(cells, notebook);
    },
  };
})();
