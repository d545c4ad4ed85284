// Lists that are drawn again while they are used: the rows of a table, cards, buttons.

import { renew } from "./elements.js";

/**
 * Returns the function that draws elements as the only children of `parent`. Those with the `data-key` of a present one, or
 * without a key at its place, renew it, so that the focus, a press of a key and a text that is being typed stay.
 *
 * While a pointer is pressed in the list, drawing waits: the browser sends no click where the element under the pointer
 * has moved. `marked` is called after each drawing.
 */
export function liveList(parent, marked = () => {}) {
  let isPressed = false;
  let waiting = null;
  const draw = (nodes) => {
    waiting = isPressed ? nodes : null;
    if (isPressed) return;
    arrange(parent, nodes);
    marked();
  };
  // The click comes after these events.
  const release = () => setTimeout(() => {
    isPressed = false;
    if (waiting) draw(waiting);
  });
  parent.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    isPressed = true;
    for (const end of ["pointerup", "pointercancel"]) window.addEventListener(end, release, { once: true, capture: true });
  });
  return draw;
}

/** No element that stays is moved, unless the order has changed: that would take the focus and the press away. */
function arrange(parent, nodes) {
  const keyed = (list) => new Map([...list].map((node, place) => [node.dataset.key ?? place, node]));
  const [present, wanted] = [keyed(parent.children), keyed(nodes)];
  for (const [key, node] of present) if (wanted.get(key)?.nodeName !== node.nodeName) node.remove();
  let next = parent.firstElementChild;
  for (const [key, fresh] of wanted) {
    const old = present.get(key);
    const isKept = old?.parentNode === parent;
    if (isKept) renew(old, fresh);
    if (isKept && old === next) next = next.nextElementSibling;
    else parent.insertBefore(isKept ? old : fresh, next);
  }
}
