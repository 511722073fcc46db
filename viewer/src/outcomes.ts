// How some episodes came out, on one axis: their quartiles as a box, each as a dot that can be opened.

import type { EpisodeId } from "./api.ts";
import { h, set } from "./dom.ts";
import { short } from "./words.ts";

const ROWS = 5; // of dots, so that equal ones can be told apart

export interface Outcome {
  id: EpisodeId;
  return: number;
  about: string;
}

export interface OutcomeEvents {
  pointed(id: EpisodeId | null): void;
  open(id: EpisodeId): void;
}

export class OutcomeStrip {
  readonly element: HTMLElement;
  private readonly dots: HTMLElement[];
  private readonly sorted: Outcome[];
  private active: number | null = null;

  /** quartiles: with the smallest and the largest return. recorded: return of the recorded episode. The axis goes from low to high. */
  constructor(outcomes: Outcome[], quartiles: number[] | null, recorded: number | null, [low, high]: [number, number], name: string, private readonly events: OutcomeEvents) {
    this.sorted = [...outcomes].sort((a, b) => a.return - b.return);
    const place = (element: HTMLElement, value: number, to?: number): HTMLElement => {
      const at = (one: number): number => (high > low ? 3 + (94 * (one - low)) / (high - low) : 50);
      element.style.left = `${at(value)}%`;
      if (to !== undefined) element.style.width = `${at(to) - at(value)}%`;
      return element;
    };
    this.dots = this.sorted.map((one, i) => {
      const dot = place(h("i", { class: "dot" }), one.return);
      dot.style.top = `${14 + (72 * (i % ROWS)) / (ROWS - 1)}%`;
      return dot;
    });
    const last = this.sorted.length - 1;
    this.element = h("div", { class: "strip", tabindex: 0, role: "slider", "aria-label": `Branches of ${name}, by return`, "aria-valuemin": 0, "aria-valuemax": last, "aria-valuenow": 0, "aria-valuetext": this.sorted[0]?.about ?? "none" }, [
      quartiles && place(h("i", { class: "box" }), quartiles[1]!, quartiles[3]),
      quartiles && place(h("i", { class: "median" }), quartiles[2]!),
      recorded !== null && place(h("i", { class: "recorded", title: `recorded: return ${short(recorded)}` }), recorded),
      ...this.dots,
    ], {
      pointermove: (event) => this.point(this.nearest(event)),
      pointerleave: () => this.point(null),
      blur: () => this.point(null),
      click: (event) => this.open(this.nearest(event)),
      keydown: (event) => this.key(event),
    });
  }

  /** Show which one is pointed at elsewhere. */
  light(id: EpisodeId | null): void {
    this.sorted.forEach((one, i) => this.dots[i]!.classList.toggle("lit", one.id.trace === id?.trace && one.id.episode === id.episode));
  }

  private nearest(event: MouseEvent): number | null {
    let [found, best]: [number | null, number] = [null, 24 ** 2];
    this.dots.forEach((dot, i) => {
      const box = dot.getBoundingClientRect();
      const distance = ((box.left + box.right) / 2 - event.clientX) ** 2 + ((box.top + box.bottom) / 2 - event.clientY) ** 2;
      if (distance < best) [found, best] = [i, distance];
    });
    return found;
  }

  private point(at: number | null): void {
    if (at === this.active) return;
    this.active = at;
    const one = at === null ? undefined : this.sorted[at];
    if (one) set(this.element, { "aria-valuenow": at, "aria-valuetext": one.about });
    this.events.pointed(one?.id ?? null);
  }

  private open(at: number | null): void {
    const one = at === null ? undefined : this.sorted[at];
    if (one) this.events.open(one.id);
  }

  private key(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const last = this.sorted.length - 1;
    const [before, after] = this.active === null ? [last, 0] : [this.active - 1, this.active + 1];
    const to = ({ ArrowLeft: before, ArrowDown: before, ArrowRight: after, ArrowUp: after, Home: 0, End: last } as Record<string, number>)[event.key];
    if (to !== undefined) this.point(Math.max(0, Math.min(last, to)));
    else if (event.key === "Enter" && this.active !== null) this.open(this.active);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
