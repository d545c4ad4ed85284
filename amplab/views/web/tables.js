// Tables of the tabs, and the chip of a dtype.

import { h } from "./elements.js";
import { liveList } from "./lists.js";

/** A scrolling table: `box` is its element, `body` has the rows, `draw` draws them and then calls `marked`; see `liveList`. Each head is its text and a class. */
export function table(caption, heads, marked) {
  const body = h("tbody");
  const head = h("tr", {}, heads.map(([text, kind]) => 
    // A head without text is that of buttons.
    h("th", { scope: "col", class: kind ?? "" }, text || h("span", { class: "amp-sr" }, "Actions"))));
  return { body, draw: liveList(body, marked), box: h("div", { class: "amp-scroll", tabindex: "0", role: "group", "aria-label": caption },
    h("table", {}, h("caption", { class: "amp-sr" }, caption), h("thead", {}, head), body)) };
}

/** The only row of a table without rows. */
export const emptyRow = (columns, text) => h("tr", { class: "amp-empty", "data-key": "empty" }, h("td", { colspan: columns }, text));

/** A dtype as a colored chip; the color only repeats the text. */
export function chip(dtype) {
  return h("span", { class: "amp-chip", "data-dtype": dtype }, dtype);
}
