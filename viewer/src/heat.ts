// Two columns of the steps against each other: how often each pair of values occurs. A rectangle that is dragged is a condition on steps.

import type { Api, ColumnFacts, Heat } from "./api.ts";
import { readable, withRange } from "./conditions.ts";
import { fill, h, set } from "./dom.ts";
import { count, itemName, plural, short } from "./words.ts";
import { isAbort, Latest } from "./view.ts";

const MOST_ITEMS = 64; // of a column that are offered
const GROUPS = ["observations", "actions", "rewards", "annotations", "infos"];

let isOpen = false; // also of the next trace
let chosen: [string, string] = ["", ""];

export class HeatMap {
  readonly element: HTMLDetailsElement;
  private readonly canvas = h("canvas", { role: "img" });
  private readonly brush = h("div", { class: "brush", hidden: true });
  private readonly chart = h("div", { class: "chart" }, [this.canvas, this.brush]);
  private readonly axes = [h("select", { "aria-label": "Across" }), h("select", { "aria-label": "Up" })] as const;
  private readonly ends = { x: h("div", { class: "ends" }), y: h("div", { class: "ends up" }) };
  private readonly note = h("output", { class: "note" });
  private readonly latest = new Latest();
  private terms: string[] | null = null;
  private selection: [where: string, search: string, episode: number] | null = null;
  private heat: Heat | null = null;
  private start: [number, number] | null = null; // bin of a drag

  /** `found`: a condition on steps was dragged. */
  constructor(private readonly api: Api, private readonly trace: number, private readonly found: (condition: string) => void, private readonly failed: (error: unknown) => void) {
    this.element = h("details", { class: "heat", open: isOpen }, [
      h("summary", {}, ["Two columns of the steps", h("span", { class: "quiet" }, [" · drag over a rectangle to find its steps"])]),
      h("figure", {}, [
        h("figcaption", {}, [h("label", {}, ["up ", this.axes[1]]), h("label", {}, ["across ", this.axes[0]]), this.note]),
        h("div", { class: "plane" }, [this.ends.y, this.chart, this.ends.x]),
      ]),
    ]);
    this.element.addEventListener("toggle", () => {
      isOpen = this.element.open;
      void this.load();
    });
    for (const select of this.axes) {
      select.addEventListener("change", () => {
        chosen = [this.axes[0].value, this.axes[1].value];
        void this.load();
      });
    }
    this.chart.addEventListener("pointerdown", (event) => {
      this.start = this.binAt(event);
      if (this.start) this.chart.setPointerCapture(event.pointerId);
      this.move(event);
    });
    this.chart.addEventListener("pointermove", (event) => this.move(event));
    this.chart.addEventListener("pointerup", (event) => this.up(event));
    this.chart.addEventListener("pointercancel", () => (this.start = null));
    this.chart.addEventListener("pointerleave", () => this.start === null && this.say());
  }

  close(): void {
    this.latest.cancel();
  }

  /** Show the steps of a selection; `episode` is one of it. */
  show(where: string, search: string, episode: number | null): void {
    this.element.hidden = episode === null;
    if (episode === null) return;
    this.selection = [where, search, episode];
    void this.load();
  }

  /** Colours have changed. */
  redraw(): void {
    const draw = this.canvas.getContext("2d");
    if (!this.heat || !draw) return;
    const { counts } = this.heat;
    const [rows, columns] = [counts.length, counts[0]?.length ?? 0];
    set(this.canvas, { width: Math.max(1, columns), height: Math.max(1, rows) });
    const most = Math.log1p(Math.max(1, ...counts.map((row) => Math.max(...row))));
    draw.fillStyle = getComputedStyle(this.element).getPropertyValue("--series-0");
    counts.forEach((row, y) => row.forEach((value, x) => {
      if (!value) return;
      draw.globalAlpha = 0.12 + 0.88 * (Math.log1p(value) / most);
      draw.fillRect(x, rows - 1 - y, 1, 1);
    }));
  }

  private async load(): Promise<void> {
    if (!this.element.open || !this.selection) return;
    const signal = this.latest.next();
    const [where, search, episode] = this.selection;
    this.note.textContent = "reading…";
    try {
      this.terms ??= (await this.api.episode({ trace: this.trace, episode })).columns.flatMap(termsOf);
      if (signal.aborted) return;
      const { terms } = this;
      if (terms.length < 2) {
        this.note.textContent = "the steps have no two numbers";
        return;
      }
      const axes = this.axes.map((_, i) => (terms.includes(chosen[i]!) ? chosen[i]! : terms[Math.min(i, terms.length - 1)]!)) as [string, string];
      this.axes.forEach((select, i) => fill(select, terms.map((term) => h("option", { selected: term === axes[i] }, [term]))));
      this.heat = await this.api.heat(this.trace, axes, { where, search }, signal);
      if (signal.aborted) return;
      const ends = (edges: number[]): HTMLElement[] => (edges.length ? [edges[0]!, edges.at(-1)!] : []).map((value) => h("span", {}, [short(value)]));
      fill(this.ends.x, ends(this.heat.x));
      fill(this.ends.y, ends(this.heat.y).reverse());
      this.brush.hidden = true;
      set(this.canvas, { "aria-label": `${axes[1]} against ${axes[0]}: ${this.about}` });
      this.say();
      this.redraw();
    } catch (error) {
      if (isAbort(error)) return;
      this.note.textContent = "";
      this.failed(error);
    }
  }

  private get about(): string {
    const { steps, missing, every, episodes, of } = this.heat!;
    return [
      plural(steps, "step"), every > 1 && `one of ${count(every)}`, episodes < of && `${count(episodes)} of ${count(of)} episodes`, missing > 0 && `${count(missing)} without a number`,
    ].filter(Boolean).join(", ");
  }

  private say(): void {
    this.note.textContent = this.heat ? this.about : "";
  }

  /** The bin under the pointer, from the lower left; null without bins. */
  private binAt(event: PointerEvent): [number, number] | null {
    const box = this.chart.getBoundingClientRect();
    const [columns, rows] = [(this.heat?.x.length ?? 0) - 1, (this.heat?.y.length ?? 0) - 1];
    if (columns < 1 || rows < 1) return null;
    const at = (part: number, bins: number): number => Math.max(0, Math.min(bins - 1, Math.floor(part * bins)));
    return [at((event.clientX - box.left) / box.width, columns), at((box.bottom - event.clientY) / box.height, rows)];
  }

  private move(event: PointerEvent): void {
    const now = this.binAt(event);
    if (!now || !this.heat) return;
    const { x, y, counts } = this.heat;
    const [from, to] = span(this.start ?? now, now);
    const inside = counts.slice(from[1], to[1]).reduce((sum, row) => sum + row.slice(from[0], to[0]).reduce((part, value) => part + value, 0), 0);
    this.note.textContent = `${short(x[from[0]]!)} to ${short(x[to[0]]!)}, ${short(y[from[1]]!)} to ${short(y[to[1]]!)}: ${count(inside)}`;
    this.brush.hidden = this.start === null;
    const percent = (bin: number, edges: number[]): number => (bin / (edges.length - 1)) * 100;
    Object.assign(this.brush.style, { left: `${percent(from[0], x)}%`, bottom: `${percent(from[1], y)}%`, width: `${percent(to[0] - from[0], x)}%`, height: `${percent(to[1] - from[1], y)}%` });
  }

  private up(event: PointerEvent): void {
    const now = this.binAt(event);
    if (!now || !this.start || !this.heat) return;
    const { heat } = this;
    const [from, to] = span(this.start, now);
    this.start = null;
    this.found([heat.x, heat.y].reduce((condition, edges, i) => {
      const range: [number, number] = [edges[from[i]!]!, edges[to[i]!]!];
      return withRange(condition, this.axes[i]!.value, readable(range, edges), to[i] === edges.length - 1);
    }, ""));
  }
}

/** The first bins of a rectangle, and those after its last ones. */
function span(a: [number, number], b: [number, number]): [[number, number], [number, number]] {
  return [[Math.min(a[0], b[0]), Math.min(a[1], b[1])], [Math.max(a[0], b[0]) + 1, Math.max(a[1], b[1]) + 1]];
}

/** The numbers of a column, as conditions on steps name them. */
function termsOf({ name, group, kind, items, shape }: ColumnFacts): string[] {
  if (kind !== "numeric" || !GROUPS.includes(group) || items > MOST_ITEMS) return [];
  const term = group === "annotations" ? name : name.replace(/^(observation|action|reward|info)s/, "$1");
  return shape.length ? Array.from({ length: items }, (_, item) => `${term}${itemName(item, shape).replaceAll(", ", "][")}`) : [term];
}
