// A histogram: all episodes behind, the selected ones in front, and a brush that selects a range.

import type { Bins, Names } from "./api.ts";
import { fill, h, set, svg } from "./dom.ts";
import { count, plural, short } from "./words.ts";

const HEIGHT = 56;

export class Histogram {
  readonly element: HTMLElement;
  private readonly bars = svg("g");
  private readonly brush = svg("rect", { class: "brush", y: 0, height: HEIGHT, visibility: "hidden" });
  private readonly chart = svg("svg", { class: "bars", preserveAspectRatio: "none", role: "img" }, [this.bars, this.brush]);
  private readonly axis = h("div", { class: "ends" });
  private readonly note = h("span", { class: "note" });
  private all: Bins | null = null;
  private start: number | null = null;

  constructor(readonly title: string, private readonly selected: (range: [number, number] | null) => void) {
    this.element = h("figure", { class: "histogram" }, [h("figcaption", {}, [h("span", { class: "name" }, [title]), this.note]), this.chart, this.axis]);
    this.chart.addEventListener("pointerdown", (event) => this.down(event));
    this.chart.addEventListener("pointermove", (event) => this.move(event));
    this.chart.addEventListener("pointerup", (event) => this.up(event));
    this.chart.addEventListener("pointercancel", () => (this.start = null));
    this.chart.addEventListener("pointerleave", () => this.start === null && (this.note.textContent = ""));
    this.chart.addEventListener("dblclick", () => this.selected(null));
  }

  /** Show the bins of all episodes and of the selected ones; `range` is the brush. */
  show(all: Bins, some: Bins, range: [number, number] | null): void {
    this.all = all;
    const bins = all.counts.length;
    const top = Math.max(1, ...all.counts);
    set(this.chart, { viewBox: `0 0 ${Math.max(1, bins)} ${HEIGHT}` });
    // A bin with one episode among a million stays visible.
    const height = (value: number): number => (value ? Math.max(1.5, (value / top) * HEIGHT) : 0);
    const bar = (kind: string) => (value: number, bin: number) =>
      value ? svg("rect", { class: kind, x: bin + 0.06, width: 0.88, y: HEIGHT - height(value), height: height(value) }) : null;
    fill(this.bars, [...all.counts.map(bar("all")), ...some.counts.map(bar("some"))]);
    const [first, last] = all.ends ?? [];
    const odd = all.nan ? `${count(all.nan)} not a number` : "";
    fill(this.axis, first === undefined || last === undefined ? ["no values"] : [h("span", {}, [short(first)]), h("span", {}, [odd]), h("span", {}, [short(last)])]);
    const label = first === undefined || last === undefined ? "no values" : `${short(first)} to ${short(last)}, ${plural(sum(some.counts), "episode")} selected of ${count(sum(all.counts))}`;
    set(this.chart, { "aria-label": `Histogram of ${this.title}: ${label}` });
    const edges = range && [this.binOf(range[0]), this.binOf(range[1])];
    set(this.brush, edges ? { x: edges[0], width: Math.max(0.1, edges[1]! - edges[0]!), visibility: "visible" } : { visibility: "hidden" });
  }

  private binOf(value: number): number {
    const edges = this.all?.edges ?? [];
    const first = edges[0] ?? 0;
    const last = edges[edges.length - 1] ?? 1;
    const bins = edges.length - 1;
    return last === first ? 0 : Math.min(bins, Math.max(0, ((value - first) / (last - first)) * bins));
  }

  private binAt(event: PointerEvent): number {
    const box = this.chart.getBoundingClientRect();
    const bins = this.all?.counts.length ?? 1;
    return Math.min(bins - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * bins)));
  }

  private down(event: PointerEvent): void {
    if (!this.all?.counts.length || event.button !== 0) return;
    this.start = this.binAt(event);
    this.chart.setPointerCapture(event.pointerId);
    this.move(event);
  }

  private move(event: PointerEvent): void {
    if (!this.all?.counts.length) return;
    const at = this.binAt(event);
    const begin = Math.min(at, this.start ?? at);
    const end = Math.max(at, this.start ?? at) + 1;
    const inside = sum(this.all.counts.slice(begin, end));
    this.note.textContent = `${short(this.all.edges[begin]!)} to ${short(this.all.edges[end]!)}: ${count(inside)}`;
    if (this.start !== null) set(this.brush, { x: begin, width: end - begin, visibility: "visible" });
  }

  private up(event: PointerEvent): void {
    if (this.start === null || !this.all) return;
    const at = this.binAt(event);
    const [begin, end] = [Math.min(at, this.start), Math.max(at, this.start) + 1];
    this.start = null;
    this.note.textContent = "";
    this.selected([this.all.edges[begin]!, this.all.edges[end]!]);
  }
}

/** Bars with names, each a button that selects its episodes. */
export class NamedBars {
  readonly element: HTMLElement;
  private readonly list = h("div", { class: "named" });

  constructor(readonly title: string, private readonly selected: (name: string) => void) {
    this.element = h("figure", { class: "histogram named-bars" }, [h("figcaption", {}, [h("span", { class: "name" }, [title])]), this.list]);
  }

  show(all: Names, some: Names, chosen: string | null, kind: (name: string) => string): void {
    const top = Math.max(1, ...all.counts);
    const few = new Map(some.names.map((name, i) => [name, some.counts[i] ?? 0]));
    fill(this.list, all.names.slice(0, 6).map((name, i) => {
      const number = few.get(name) ?? 0;
      const wide = (value: number): string => `${value ? Math.max(0.8, (value / top) * 100) : 0}`;
      const bar = svg("svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" }, [
        svg("rect", { class: "all", width: wide(all.counts[i] ?? 0), height: 6 }),
        svg("rect", { class: `some ${kind(name)}`, width: wide(number), height: 6 }),
      ]);
      return h("button", { type: "button", "aria-pressed": String(chosen === name), title: `Select ${name}` },
        [h("span", { class: "name" }, [name]), bar, h("span", { class: "number" }, [count(number)])], { click: () => this.selected(name) });
    }));
  }
}

const sum = (values: number[]): number => values.reduce((total, value) => total + value, 0);
