// What the tab of op dtypes makes of its rows before it draws them. Nothing here touches the page.

export const ANY = "";

/** The choices of a filter: every value that occurs, in the order in which it occurs. */
export function occurring(rows, field) {
  return [...new Set(rows.map((row) => row[field]).filter(Boolean))];
}

const PHASES = {
  casts: (row) => row.cast,
  changed: (row) => row.changed,
  differing: (row) => Boolean(row.other),
  forward: (row) => row.phase === "forward",
  backward: (row) => row.phase === "backward",
};

/** A function that tells whether a path is that of a module, or of one inside it; ops outside of all have the path "". */
function nesting(modules) {
  const parents = new Map(modules.map((each) => [each.path, each.parent]));
  return (path, outer) => {
    for (let at = path; at; at = parents.get(at)) if (at === outer) return true;
    return path === outer;
  };
}

/** The rows that every filter keeps. */
export function keptRows(rows, { dtype, list, module, which }, modules) {
  const isWithin = nesting(modules);
  const reads = (row) => [...row.inputs, ...row.outputs].some(([name]) => name === dtype);
  return rows.filter((row) =>
    (dtype === ANY || reads(row)) &&
    (list === ANY || row.list === list) &&
    (module === ANY || isWithin(row.module, module)) &&
    (which === ANY || PHASES[which](row)));
}

/** The lines of the picture: each module with the rows of its strips. A closed one shows those of all modules in it. */
export function strips(modules, rows, closed) {
  const parents = new Map(modules.map((each) => [each.path, each.parent]));
  const hidden = (path) => {
    for (let at = parents.get(path); at; at = parents.get(at)) if (closed.has(at)) return true;
    return false;
  };
  const isWithin = nesting(modules);
  return modules.filter((each) => !hidden(each.path)).map((each) => {
    const isClosed = closed.has(each.path);
    const own = rows.filter((row) => (isClosed ? isWithin(row.module, each.path) : row.module === each.path));
    return {
      ...each,
      isClosed,
      hasChildren: each.path !== ANY && modules.some((other) => other.path !== each.path && other.parent === each.path),
      forward: own.filter((row) => row.phase === "forward"),
      backward: own.filter((row) => row.phase === "backward"),
    };
  }).filter((line) => line.hasChildren || line.forward.length || line.backward.length);
}

/** What a screen reader says of a cell, and its tooltip. */
export function cellText(row) {
  const what = row.cast ? `cast to ${row.dtype}` : `${row.op}${row.times > 1 ? ` ×${row.times}` : ""} in ${row.dtype || "no floating-point dtype"}`;
  return `${what}, ${row.phase}${row.changed ? ", changed" : ""}`;
}

const keyOf = (row) => JSON.stringify([row.module, row.op, row.phase]);

/** The index that an op has in another trace: the same occurrence of the same op in the same module; null if it is gone. */
export function sameOp(before, after, index) {
  const row = before.find((each) => each.index === index);
  if (!row) return null;
  const alike = (rows) => rows.filter((each) => keyOf(each) === keyOf(row));
  return alike(after)[alike(before).indexOf(row)]?.index ?? null;
}
