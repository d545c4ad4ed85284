// Elements of every view: a maker and a writer. assets.py joins this file in front of a module.

/** Make an element; attributes that start with "on" are listeners, null and false ones are left out. */
function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Write text only where it changed, so that a screen reader and the layout stay calm. */
function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
