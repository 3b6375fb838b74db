// In which order? Heads of columns that sort, by click or key; remembered for the tab.

import { html, useState } from "./html.js";

/** `[order, sort]`: the column and the direction, and how to change them; the same column again turns it round. */
export function useOrder(name, first) {
  const place = `muster-order-${name}`;
  const [order, set] = useState(() => kept(place) ?? first);
  const sort = (column, down = column === order.column ? !order.down : false) => {
    const next = { column, down };
    sessionStorage.setItem(place, JSON.stringify(next));
    set(next);
  };
  return [order, sort];
}

function kept(place) {
  try {
    const found = JSON.parse(sessionStorage.getItem(place));
    return typeof found?.column === "string" ? found : null;
  } catch {
    return null; // somebody else wrote it
  }
}

export const directionOf = (order, column) => (order.column !== column ? "none" : order.down ? "descending" : "ascending");

export const Sorter = ({ column, order, sort }) => html`<button class="sorter" onClick=${() => sort(column)}>${column}<span aria-hidden="true">${
  order.column === column ? (order.down ? "▾" : "▴") : ""}</span></button>`;

/** The same for where there is no room for heads. */
export const SortChoice = ({ columns, order, sort }) => html`<label class="sort-choice">Order <select value=${order.column}
    onChange=${(event) => sort(event.target.value, false)}>${columns.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}</select>
  <button onClick=${() => sort(order.column)} aria-label=${order.down ? "Descending; turn round" : "Ascending; turn round"}>${order.down ? "▾" : "▴"}</button></label>`;
