// The line between pictures and plots, which a pointer or the arrow keys move.

import { h, set } from "./dom.ts";

const [NARROWEST, USUAL, WIDEST] = [18, 32, 75]; // percent of the width
const KEY = "gym-trace-split";

/** Return a separator that sets --split of `around`. keep: remember it for the next episode. */
export function splitter(around: () => HTMLElement, keep: boolean): HTMLElement {
  const element = h("div", { class: "splitter", role: "separator", tabindex: 0, "aria-orientation": "vertical", "aria-label": "Width of the pictures", "aria-valuemin": NARROWEST, "aria-valuemax": WIDEST, "aria-valuenow": USUAL, title: "Drag to make the pictures larger or smaller" });
  const move = (percent: number): void => {
    const value = Math.round(Math.max(NARROWEST, Math.min(WIDEST, percent)) * 10) / 10;
    around().style.setProperty("--split", `${value}%`);
    set(element, { "aria-valuenow": value });
    if (keep) localStorage.setItem(KEY, String(value));
  };
  const now = (): number => {
    const box = around().getBoundingClientRect();
    return (100 * (element.getBoundingClientRect().left - box.left)) / box.width;
  };
  element.addEventListener("pointerdown", (event) => {
    element.setPointerCapture(event.pointerId);
    event.preventDefault();
    element.focus();
  });
  element.addEventListener("pointermove", (event) => {
    if (!element.hasPointerCapture(event.pointerId)) return;
    const box = around().getBoundingClientRect();
    move((100 * (event.clientX - box.left)) / box.width);
  });
  element.addEventListener("dblclick", () => {
    around().style.removeProperty("--split");
    set(element, { "aria-valuenow": USUAL });
    if (keep) localStorage.removeItem(KEY);
  });
  element.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -2, ArrowRight: 2 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    move(now() + by);
  });
  const kept = keep ? Number(localStorage.getItem(KEY)) : 0;
  if (kept) queueMicrotask(() => move(kept));
  return element;
}
