// Plots of the columns of an episode on one time axis: one position, one zoom, one pointer for all of them.

import uPlot from "uplot";
import type { Api, ColumnFacts, EpisodeId } from "./api.ts";
import { BAND, drawBands, namesOf, valueName } from "./bands.ts";
import { valueAt, type Curves } from "./curves.ts";
import { fill, h, set } from "./dom.ts";
import { widened, type Fan, type FanLine } from "./fan.ts";
import { PlotChoice } from "./plot_choice.ts";
import { drawStack, stackRange } from "./stack.ts";
import { count, itemName, range, short } from "./words.ts";
import { isAbort, Latest } from "./view.ts";

const HEIGHT = 92; // pixels of a plot whose lines share an axis
const LANE = 30; // pixels of a line that has a lane of its own
const AXIS = 54; // pixels at the left of every plot
const RIGHT = 46; // and at the right, with the smallest and the largest value of each lane
const PER_PLOT = 6; // items; more are hard to tell apart
const SHARING = 2; // items that share an axis; more get a lane each
const OPEN_PLOTS = 4; // of a column; the rest are folded up
const FOLDED = 64; // items; a column with more, such as a small picture, is folded up as a whole
const FETCH_PAUSE = 40; // milliseconds after a zoom

export const COLOURS = 10;

export interface Shown {
  id: EpisodeId;
  columns: ColumnFacts[];
  length: number;
}

/** What the plots tell the player. */
export interface PlotEvents {
  seek(row: number): void;
  zoom(range: [number, number] | null): void;
  failed(error: unknown): void;
}

interface Panel {
  element: HTMLElement;
  column: ColumnFacts;
  items: [number, number];
  body: HTMLElement;
  tag: HTMLElement;
  legend: HTMLElement;
  values: HTMLElement[];
  hidden: Set<number>;
  lanes: boolean;
  bands: boolean; // of the values of a discrete column
  minus: boolean; // the difference of the two episodes
  cursor: HTMLElement;
  marker: HTMLElement;
  plot: uPlot | null;
  curves: (Curves | null)[]; // of the episode and of the one it is compared with
  fan: FanLine[]; // curves of branches
  latest: Latest;
  visible: boolean;
  stale: boolean;
}

export class PlotStack {
  readonly element = h("section", { class: "plots", "aria-label": "Plots" });
  private readonly panels: Panel[] = [];
  private readonly axis = h("div", { class: "axis", "aria-hidden": "true" });
  private axisPlot: uPlot | null = null;
  private shown: Shown[] = [];
  private view: [number, number] = [0, 1];
  private zoomed = false;
  private position = 0;
  private hover: number | null = null;
  private difference: number | null = null;
  private fan: Fan | null = null;
  private timer = 0;
  private readonly sizes = new ResizeObserver(() => this.resized());
  private readonly sight = new IntersectionObserver((entries) => this.sighted(entries), { rootMargin: "200px" });

  private readonly choice: PlotChoice;
  private readonly delta = h("div", { class: "group delta" });
  private minuend = ""; // what the plot of the difference shows

  constructor(private readonly api: Api, private readonly events: PlotEvents) {
    this.choice = new PlotChoice(!api.source.saved);
    this.sizes.observe(this.element);
  }

  /** Show an episode, and the one it is compared with, from scratch. */
  show(shown: Shown[]): void {
    this.drop();
    this.shown = shown;
    this.difference = null;
    if (!this.zoomed) this.view = this.whole();
    const columns = shown[0]!.columns.filter(({ kind, group }) => kind === "numeric" && group !== "flags");
    const groups = columns.sort((a, b) => order(a) - order(b)).map((column) => this.choice.add(column, this.group(column)));
    fill(this.element, [this.choice.element, this.axis, this.two && this.delta, ...groups]);
    if (this.two) this.drawDelta(columns);
    this.choice.apply();
    this.drawAxis();
  }

  /** Draw the curves of other episodes, too; null: none. */
  setFan(fan: Fan | null): void {
    this.fan = fan;
    if (!this.zoomed) this.view = this.whole();
    this.refresh();
    this.drawAxis();
  }

  redrawFan(): void {
    for (const panel of this.panels) if (panel.visible && panel.fan.length) panel.plot?.redraw(false, false);
  }

  /** Mark the first difference. */
  mark(difference: number | null): void {
    this.difference = difference;
    this.setPosition(this.position);
  }

  /** The episode has grown: fetch its plots again, keep what is chosen. */
  grow(shown: Shown[]): void {
    this.shown = shown;
    if (!this.zoomed) this.view = this.whole();
    for (const panel of this.panels) panel.column = shown[0]!.columns.find(({ name }) => name === panel.column.name) ?? panel.column;
    this.refresh();
    this.drawAxis();
  }

  setPosition(row: number): void {
    this.position = row;
    for (const panel of this.panels) {
      if (!panel.visible) continue;
      this.place(panel);
      if (this.hover === null) this.legend(panel);
    }
    if (this.axisPlot) this.placeAxis();
  }

  setZoom(range: [number, number] | null): void {
    const whole = this.whole();
    this.zoomed = range !== null;
    const view: [number, number] = range ? [Math.max(0, range[0]), Math.min(whole[1], Math.max(range[1], range[0] + 2))] : whole;
    if (view[0] === this.view[0] && view[1] === this.view[1]) return;
    this.view = view;
    this.refresh();
    this.drawAxis();
  }

  get zoom(): [number, number] {
    return this.view;
  }

  /** Colours or sizes have changed: draw everything again. */
  redraw(): void {
    for (const panel of this.panels) this.draw(panel, true);
    this.drawAxis();
  }

  close(): void {
    this.drop();
    this.sizes.disconnect();
    this.sight.disconnect();
  }

  private drop(): void {
    clearTimeout(this.timer);
    this.choice.clear();
    for (const panel of this.panels.splice(0)) this.forget(panel);
    this.axisPlot?.destroy();
    this.axisPlot = null;
  }

  /** Whether two episodes are compared. */
  private get two(): boolean {
    return this.shown.length > 1;
  }

  /** Plot the second episode minus the first, of a column that the reader chooses. */
  private drawDelta(columns: ColumnFacts[]): void {
    const { columns: others } = this.shown[1]!;
    const shared = columns.filter(({ name, shape, kind }) => others.some((one) => one.name === name && one.kind === kind && one.shape.join() === shape.join()));
    const choices = shared.flatMap((column) => pieces(column).map((items) => ({ column, items, name: items[1] - items[0] < column.items ? `${column.name} ${items[0]} to ${items[1] - 1}` : column.name })));
    const choice = choices.find(({ name }) => name === this.minuend) ?? choices[0];
    for (const panel of this.panels.filter(({ minus }) => minus)) {
      this.forget(panel);
      this.panels.splice(this.panels.indexOf(panel), 1);
    }
    fill(this.delta, []);
    if (!choice) return;
    const panel = this.panel(choice.column, choice.items, true);
    const select = h("select", { "aria-label": "Difference of" }, choices.map(({ name }) => h("option", { selected: name === choice.name }, [name])), {
      change: () => {
        this.minuend = select.value;
        this.drawDelta(columns);
        this.delta.querySelector("select")?.focus();
      },
    });
    panel.element.querySelector("h3")!.replaceWith(h("h3", { "aria-level": 2 }, ["Difference of "]), select);
    this.panels.push(panel);
    this.sight.observe(panel.element);
    fill(this.delta, [panel.element]);
  }

  private forget(panel: Panel): void {
    panel.latest.cancel();
    panel.plot?.destroy();
    this.sight.unobserve(panel.element);
  }

  private whole(): [number, number] {
    return [0, Math.max(1, this.fan?.length ?? 0, ...this.shown.map(({ length }) => length))];
  }

  private group(column: ColumnFacts): HTMLElement {
    const panels = pieces(column).map((items) => this.panel(column, items, false));
    this.panels.push(...panels);
    for (const panel of panels) this.sight.observe(panel.element);
    const elements = panels.map(({ element }) => element);
    const open = column.items > FOLDED ? 0 : OPEN_PLOTS;
    if (panels.length <= open) return h("div", { class: "group" }, elements);
    const folded = column.items - (panels[open - 1]?.items[1] ?? 0);
    const summary = h("summary", {}, [h("b", {}, [column.name]), ` ${count(folded)} ${open ? "more" : "values"}`]);
    return h("div", { class: "group" }, [...elements.slice(0, open), h("details", {}, [summary, ...elements.slice(open)])]);
  }

  private panel(column: ColumnFacts, items: [number, number], minus: boolean): Panel {
    const several = column.items > 1;
    const tag = h("span", { class: "tags" });
    const legend = h("div", { class: "legend" });
    const body = h("div", { class: "plot", role: "img" });
    const panel: Panel = {
      element: h("article", { class: "panel" }, [h("header", {}, [h("h3", { title: column.name, "aria-level": 2 }, [column.name]), legend, tag]), body]),
      column, items, body, tag, legend,
      // Colours tell two episodes apart, and lanes their items.
      values: [], hidden: new Set(), lanes: this.two ? items[1] - items[0] > 1 : items[1] - items[0] > SHARING && !column.stacked, bands: column.values !== null && !minus, minus, plot: null, curves: [], fan: [], latest: new Latest(), visible: false, stale: true,
      cursor: h("div", { class: "position" }),
      marker: h("div", { class: "difference" }),
    };
    const value = (): HTMLElement => h("span", { class: "value" }, minus ? [h("span")] : this.shown.map((_, i) => h("span", { class: this.two ? `side-${i}` : null })));
    if (panel.bands) {
      const { start, count: of, names } = column.values!;
      panel.values.push(value());
      legend.append(panel.values[0]!);
      if (names || of <= COLOURS) legend.append(...Array.from({ length: of }, (_, i) => h("span", { class: `key series-${i % COLOURS}` }, [h("span", { class: "swatch", "aria-hidden": "true" }), valueName(column, start + i)])));
    }
    for (let item = items[0]; item < items[1] && !panel.bands; item++) {
      const text = value();
      panel.values.push(text);
      const label = column.labels?.[item] ?? (several ? itemName(item, column.shape) : "");
      const button = h("button", { type: "button", class: `series-${colour(column, item)}`, "aria-pressed": "true", title: `${column.name}${several ? ` ${label}` : ""}: show or hide` },
        [!this.two && h("span", { class: "swatch", "aria-hidden": "true" }), label && h("span", { class: "label" }, [label]), text],
        { click: (event) => this.toggle(panel, item - items[0], button, event) });
      legend.append(button);
    }
    if (panel.values.length > 1 && !this.two) {
      const label = (): string => (panel.lanes ? (column.stacked ? "stacked" : "overlay") : "separate");
      const button = h("button", { type: "button", class: "mode", title: "Together, or each in a lane of its own" }, [label()], {
        click: () => {
          panel.lanes = !panel.lanes;
          button.textContent = label();
          this.draw(panel, true);
        },
      });
      tag.before(button);
    }
    panel.element.classList.toggle("bands", panel.bands);
    panel.element.setAttribute("data-column", column.name);
    return panel;
  }

  private toggle(panel: Panel, item: number, button: HTMLElement, event: MouseEvent): void {
    const all = panel.values.length;
    if (event.shiftKey || event.altKey) {
      const alone = panel.hidden.size === all - 1 && !panel.hidden.has(item);
      panel.hidden = new Set(alone ? [] : Array.from({ length: all }, (_, i) => i).filter((i) => i !== item));
    } else if (!panel.hidden.delete(item)) {
      panel.hidden.add(item);
    }
    [...button.parentElement!.children].forEach((child, i) => set(child, { "aria-pressed": String(!panel.hidden.has(i)) }));
    this.draw(panel, true);
  }

  private sighted(entries: IntersectionObserverEntry[]): void {
    for (const entry of entries) {
      const panel = this.panels.find(({ element }) => element === entry.target);
      if (!panel) continue;
      panel.visible = entry.isIntersecting;
      if (panel.visible && panel.stale) void this.fetch(panel);
      if (panel.visible) {
        this.place(panel);
        this.legend(panel);
      }
    }
  }

  private refresh(): void {
    for (const panel of this.panels) panel.stale = true;
    for (const panel of this.panels) panel.plot?.setScale("x", { min: this.view[0], max: this.view[1] });
    for (const panel of this.panels) if (panel.visible) this.place(panel);
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => {
      for (const panel of this.panels) if (panel.visible) void this.fetch(panel);
    }, FETCH_PAUSE);
  }

  private get width(): number {
    return Math.max(160, this.element.clientWidth);
  }

  private async fetch(panel: Panel): Promise<void> {
    const pixels = Math.max(50, Math.round((this.width - AXIS - RIGHT) * devicePixelRatio));
    const signal = panel.latest.next();
    panel.stale = false;
    const [from, to] = this.view;
    try {
      const range = [Math.max(0, Math.floor(from) - 1), Math.ceil(to) + 1] as const;
      const fan = panel.minus || panel.bands || panel.column.stacked ? undefined : this.fan?.lines(panel.column.name, panel.items, ...range, pixels, signal);
      fan?.catch(() => undefined); // told below
      const curves = await Promise.all((panel.minus ? [this.shown[1]!] : this.shown).map(async ({ id, columns }) => {
        const column = columns.find(({ name }) => name === panel.column.name);
        if (!column || column.kind !== "numeric" || column.items < panel.items[1]) return null;
        return this.api.curves(id, column.name, panel.items, ...range, pixels, signal, panel.minus ? this.shown[0]!.id : null);
      }));
      panel.fan = (await fan) ?? [];
      if (signal.aborted) return;
      panel.curves = curves;
      this.draw(panel, false);
    } catch (error) {
      if (isAbort(error)) return;
      fill(panel.tag, [h("span", { class: "tag bad" }, [error instanceof Error ? error.message : String(error)])]);
      this.events.failed(error);
    }
  }

  private resized(): void {
    for (const panel of this.panels) {
      if (panel.plot && panel.plot.width !== this.width) {
        panel.plot.setSize({ width: this.width, height: heightOf(panel) });
        this.place(panel);
        panel.stale = true;
        if (panel.visible) void this.fetch(panel);
      }
    }
    if (this.axisPlot && this.axisPlot.width !== this.width) this.drawAxis();
  }

  private draw(panel: Panel, again: boolean): void {
    if (!panel.curves.length) return;
    const data = this.aligned(panel);
    const lines = data.length - 1;
    if (panel.plot && (again || panel.plot.series.length - 1 !== lines)) {
      panel.plot.destroy();
      panel.plot = null;
    }
    if (panel.plot) {
      panel.plot.setData(data, false);
      panel.plot.setScale("x", { min: this.view[0], max: this.view[1] });
    } else {
      panel.plot = this.plot(panel, data);
      panel.plot.over.append(panel.marker, panel.cursor);
    }
    this.tags(panel);
    this.place(panel);
    this.legend(panel);
  }

  /** Items of one episode after the other on common rows. A bin is two points: its minimum and its maximum. */
  private aligned(panel: Panel): uPlot.AlignedData {
    const tables = panel.curves.map((curves): uPlot.AlignedData => (curves ? table(curves) : [[]]));
    return tables.length === 1 ? tables[0]! : uPlot.join(tables);
  }

  private plot(panel: Panel, data: uPlot.AlignedData): uPlot {
    const style = getComputedStyle(document.documentElement);
    const variable = (name: string): string => style.getPropertyValue(name).trim();
    const whole = /^[<|=]?[iub]/.test(panel.column.dtype);
    const stack = stackOf(panel);
    const stepped = uPlot.paths.stepped!({ align: 1 });
    const lanes = panel.lanes ? panel.values.map((_, item) => item).filter((item) => !panel.hidden.has(item)) : [];
    const series: uPlot.Series[] = [{}];
    panel.curves.forEach((curves, other) => {
      for (let item = 0; item < (curves?.items ?? 0); item++) {
        series.push({
          scale: panel.lanes ? `y${item}` : "y",
          show: !panel.hidden.has(item),
          stroke: variable(panel.minus ? "--text" : `--series-${this.two ? other : colour(panel.column, panel.items[0] + item)}`),
          width: 1.35,
          points: { show: (curves?.rows ?? 0) < 3, size: 5 },
          ...(panel.bands || stack ? { paths: () => null, points: { show: false } } : whole && !curves?.decimated ? { paths: stepped } : {}),
        });
      }
    });
    const scales: uPlot.Scales = { x: { time: false, range: () => this.view } };
    if (panel.lanes) panel.values.forEach((_, item) => (scales[`y${item}`] = { range: (_, low, high) => laned(...widened(panel.fan, item, low, high), lanes.indexOf(item), lanes.length) }));
    else scales.y = { range: (_, low, high) => { const now = stackOf(panel); return now ? stackRange(now, panel.hidden) : padded(...fanned(panel, low, high)); } };
    const font = `11px ${variable("--sans")}`;
    const options: uPlot.Options = {
      width: this.width,
      height: heightOf(panel),
      padding: panel.lanes || panel.bands ? [2, RIGHT, 2, AXIS] : [6, RIGHT, 6, 0],
      legend: { show: false },
      scales,
      axes: panel.lanes || panel.bands ? [{ show: false }, { show: false }] : [
        { show: false },
        { scale: "y", size: AXIS, gap: 6, font, stroke: variable("--quiet"), ticks: { show: false }, grid: { stroke: variable("--grid"), width: 1 }, space: 26, ...(whole ? { incrs: STEPS } : {}), values: (_, splits) => splits.map((value) => short(value)) },
      ],
      series,
      cursor: {
        y: false,
        points: { show: false },
        sync: { key: "gym-trace" },
        drag: { x: true, y: false, setScale: false, dist: 4 },
        bind: { dblclick: () => () => { this.events.zoom(null); return null; } },
      },
      hooks: {
        setSelect: [(plot) => this.selected(plot)],
        setCursor: [(plot) => this.hovered(panel, plot)],
        drawClear: [(plot) => {
          this.laneNames(panel, plot, lanes, font, variable);
          this.fan?.draw(plot, panel.fan, scaleOf(panel), false, variable);
        }],
        draw: [(plot) => {
          const now = stackOf(panel);
          if (now) drawStack(plot, now, panel.hidden, (item) => variable(`--series-${colour(panel.column, panel.items[0] + item)}`));
          if (panel.bands) drawBands(plot, panel.curves, (value) => variable(`--series-${(value - panel.column.values!.start) % COLOURS}`), (side) => variable(`--series-${side}`));
          this.fan?.draw(plot, panel.fan, scaleOf(panel), true, variable);
          this.laneEnds(panel, plot, lanes, font, variable("--quiet"));
          this.drawn(panel, plot, variable("--bad"));
        }],
      },
    };
    fill(panel.body, []);
    const plot = new uPlot(options, data, panel.body);
    this.pointer(panel, plot);
    return plot;
  }

  /** Lines between lanes, and the name of each at its left. */
  private laneNames(panel: Panel, plot: uPlot, lanes: number[], font: string, variable: (name: string) => string): void {
    const { ctx, bbox } = plot;
    const height = bbox.height / Math.max(1, lanes.length);
    ctx.save();
    ctx.font = font.replace("11px", `${11 * devicePixelRatio}px`);
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    lanes.forEach((item, lane) => {
      ctx.fillStyle = variable("--grid");
      if (lane) ctx.fillRect(bbox.left, Math.round(bbox.top + lane * height), bbox.width, devicePixelRatio);
      ctx.fillStyle = variable("--quiet");
      ctx.fillText(clipped(panel.column.labels?.[panel.items[0] + item] ?? itemName(panel.items[0] + item, panel.column.shape).replace(/^\[(.*, .*)\]$/, "$1")), bbox.left - 6 * devicePixelRatio, bbox.top + (lane + 0.5) * height);
    });
    ctx.restore();
  }

  /** The largest and the smallest value of each lane, at its right. */
  private laneEnds({ curves }: Panel, { ctx, bbox }: uPlot, lanes: number[], font: string, colour: string): void {
    const height = bbox.height / Math.max(1, lanes.length);
    const pixel = devicePixelRatio;
    ctx.save();
    ctx.font = font.replace("11px", `${9.5 * pixel}px`);
    ctx.textBaseline = "middle";
    ctx.fillStyle = colour;
    lanes.forEach((item, lane) => {
      const [low, high] = ends(curves, item);
      if (low > high) return;
      const texts: [number, number][] = low === high ? [[high, 0.5 * height]] : [[high, 8 * pixel], [low, height - 8 * pixel]];
      for (const [value, at] of texts) ctx.fillText(short(value, 3), bbox.left + bbox.width + 4 * pixel, bbox.top + lane * height + at);
    });
    ctx.restore();
  }

  /** A click seeks, or opens the curve of a fan; a finger that moves sideways scrubs. */
  private pointer(panel: Panel, plot: uPlot): void {
    let down: number | null = null;
    const rowAt = (event: MouseEvent): number => Math.round(plot.posToVal(event.clientX - plot.over.getBoundingClientRect().left, "x"));
    const point = (event: PointerEvent | null): EpisodeId | null => {
      if (!this.fan) return null;
      const box = plot.over.getBoundingClientRect();
      const found = event && this.fan.nearest(plot, panel.fan, scaleOf(panel), event.clientX - box.left, event.clientY - box.top);
      if (this.fan.point(found)) this.redrawFan();
      plot.over.classList.toggle("near", found !== null);
      return found;
    };
    plot.over.addEventListener("pointerleave", () => point(null));
    plot.over.addEventListener("pointerdown", (event) => {
      down = event.clientX;
      if (event.pointerType === "touch") plot.over.setPointerCapture(event.pointerId);
    });
    plot.over.addEventListener("pointermove", (event) => {
      if (event.pointerType === "touch" && down !== null) this.events.seek(rowAt(event));
      else if (down === null) point(event);
    });
    plot.over.addEventListener("pointerup", (event) => {
      if (down !== null && Math.abs(event.clientX - down) < 4) {
        const branch = point(event);
        if (branch) this.fan?.open(branch, rowAt(event));
        else this.events.seek(rowAt(event));
      }
      down = null;
    });
    plot.over.addEventListener("pointercancel", () => (down = null));
  }

  private selected(plot: uPlot): void {
    const { left, width } = plot.select;
    if (width < 4) return;
    const from = Math.max(0, Math.floor(plot.posToVal(left, "x")));
    const to = Math.ceil(plot.posToVal(left + width, "x"));
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.events.zoom([from, Math.max(to, from + 2)]);
  }

  private hovered(panel: Panel, plot: uPlot): void {
    const left = plot.cursor.left ?? -1;
    this.hover = left < 0 ? null : Math.round(plot.posToVal(left, "x"));
    if (panel.visible) this.legend(panel);
    if (this.axisPlot) this.placeAxis();
  }

  private legend(panel: Panel): void {
    const row = this.hover ?? this.position;
    panel.values.forEach((element, item) => {
      panel.curves.forEach((curves, side) => {
        const value = curves && valueAt(curves, item, row);
        const text = value ? (panel.bands ? namesOf(panel.column, value) : range(value)) : "–";
        const span = element.children[side];
        if (span && span.textContent !== text) span.textContent = text;
      });
    });
  }

  private tags(panel: Panel): void {
    const all = panel.curves.filter((curves) => curves !== null);
    const peak = all[0]?.peak ?? null;
    const decimated = all.find((curves) => curves.decimated);
    const nan = all.reduce((total, curves) => total + curves.nan, 0);
    const infinite = all.reduce((total, curves) => total + curves.infinite, 0);
    const missing = all.reduce((total, curves) => total + curves.missing, 0);
    fill(panel.tag, [
      panel.column.note && h("span", { class: "tag" }, [panel.column.note]),
      peak !== null && h("button", { type: "button", class: "tag link", title: "Go to the step where it is farthest from zero" }, [`peak at step ${count(peak)}`], { click: () => this.events.seek(peak) }),
      nan > 0 && h("span", { class: "tag bad" }, [`${count(nan)} NaN`]),
      infinite > 0 && h("span", { class: "tag bad" }, [`${count(infinite)} ∞`]),
      missing > 0 && h("span", { class: "tag", title: "Values that were not recorded, or cannot be read" }, [`${count(missing)} missing`]),
      decimated && h("span", { class: "tag", title: `Minimum and maximum of each ${count(decimated.bin)} steps: spikes stay` }, ["min and max"]),
    ]);
    const several = panel.items[1] - panel.items[0] > 1 ? ` ${panel.items[0]} to ${panel.items[1] - 1}` : "";
    set(panel.body, { "aria-label": `Plot of ${panel.minus ? "the difference of " : ""}${panel.column.name}${several}, steps ${count(this.view[0])} to ${count(this.view[1])}` });
  }

  /** The scales are known now: put the markers in place, and ticks at the top where a value is NaN or infinite. */
  private drawn(panel: Panel, plot: uPlot, colour: string): void {
    panel.plot = plot;
    this.place(panel);
    const { ctx, bbox } = plot;
    const pixel = devicePixelRatio;
    ctx.fillStyle = colour;
    for (const curves of panel.curves) {
      if (!curves?.odd) continue;
      for (let i = 0; i < curves.odd.length; i++) {
        if (!curves.odd[i]) continue;
        const x = plot.valToPos(curves.x[i]! + (curves.bin - 1) / 2, "x", true);
        if (x >= bbox.left - 1 && x <= bbox.left + bbox.width + 1) ctx.fillRect(x - pixel, bbox.top, 2 * pixel, 5 * pixel);
      }
    }
  }

  private place(panel: Panel): void {
    if (!panel.plot) return;
    const at = (row: number | null, element: HTMLElement): void => {
      const inside = row !== null && row >= this.view[0] && row <= this.view[1];
      element.hidden = !inside;
      if (inside) element.style.transform = `translateX(${panel.plot!.valToPos(row, "x")}px)`;
    };
    at(this.position, panel.cursor);
    at(this.difference, panel.marker);
  }

  private readonly bubble = h("div", { class: "bubble" });

  private drawAxis(): void {
    this.axisPlot?.destroy();
    fill(this.axis, []);
    if (!this.element.clientWidth) return;
    const style = getComputedStyle(document.documentElement);
    const quiet = style.getPropertyValue("--quiet").trim();
    this.axisPlot = new uPlot({
      width: this.width,
      height: 24,
      padding: [0, RIGHT, 0, AXIS],
      legend: { show: false },
      cursor: { show: false },
      scales: { x: { time: false, range: () => this.view } },
      axes: [{ size: 24, gap: 4, stroke: quiet, font: `11px ${style.getPropertyValue("--sans").trim()}`, ticks: { size: 4, width: 1, stroke: quiet }, grid: { show: false }, incrs: STEPS, values: (_, splits) => splits.map(count) }],
      series: [{}],
    }, [[this.view[0], this.view[1]]], this.axis);
    this.axis.append(this.bubble);
    this.placeAxis();
  }

  private placeAxis(): void {
    const row = this.hover ?? this.position;
    const [from, to] = this.view;
    const part = (row - from) / (to - from);
    this.bubble.hidden = part < 0 || part > 1;
    this.bubble.classList.toggle("hover", this.hover !== null);
    this.bubble.textContent = count(row);
    this.bubble.style.transform = `translateX(${AXIS + part * (this.width - AXIS - RIGHT)}px) translateX(-50%)`;
  }
}

/** Ticks of whole steps: 1, 2, 5, 10, … */
const STEPS = Array.from({ length: 36 }, (_, i) => [1, 2, 5][i % 3]! * 10 ** Math.floor(i / 3));

/** Fixed colours: return and rewards have their own, items of a column have theirs by number. */
function colour(column: ColumnFacts, item: number): number | string {
  if (column.name === "return") return "return";
  if (column.name === "rewards") return "rewards";
  return item % COLOURS;
}

/** The items of each plot of a column: 17 are 6, 6 and 5. Those of a stack stay together. */
function pieces({ items, stacked }: ColumnFacts): [number, number][] {
  const plots = stacked && items <= COLOURS ? 1 : Math.ceil(items / PER_PLOT);
  const each = Math.ceil(items / Math.max(1, plots));
  return Array.from({ length: items && Math.ceil(items / each) }, (_, i) => [i * each, Math.min(items, (i + 1) * each)]);
}

const GROUPS = ["return", "rewards", "parts", "agent", "actions", "opinions", "observations", "annotations", "infos"];

function order(column: ColumnFacts): number {
  const group = GROUPS.indexOf(column.name === "return" ? "return" : column.stacked && column.group === "annotations" ? "agent" : column.group);
  return group < 0 ? GROUPS.length : group;
}

function table(curves: Curves): uPlot.AlignedData {
  const points = curves.x.length;
  const finite = (value: number | undefined): number | null => (value !== undefined && Number.isFinite(value) ? value : null);
  const lines: (number | null)[][] = [];
  if (!curves.decimated) {
    for (let item = 0; item < curves.items; item++) lines.push(Array.from({ length: points }, (_, i) => finite(curves.low[item * points + i])));
    return [Array.from(curves.x), ...lines] as uPlot.AlignedData;
  }
  const x = Array.from({ length: 2 * points }, (_, i) => curves.x[i >> 1]! + ((i & 1) * curves.bin) / 2);
  for (let item = 0; item < curves.items; item++) {
    lines.push(x.map((_, i) => finite((i & 1 ? curves.high : curves.low)[item * points + (i >> 1)])));
  }
  return [x, ...lines] as uPlot.AlignedData;
}

/** The range of an axis, with some air; one value lies in the middle. */
function padded(low: number | null, high: number | null): [number, number] {
  if (low === null || high === null || low === undefined || high === undefined) return [0, 1];
  if (low === high) return [low - Math.max(Math.abs(low) * 0.1, 0.5), high + Math.max(Math.abs(high) * 0.1, 0.5)];
  const air = (high - low) * 0.06;
  return [low - air, high + air];
}

/** The range of a scale that puts its values into one lane of several, the first at the top. */
function laned(low: number | null, high: number | null, lane: number, lanes: number): [number, number] {
  const [from, to] = padded(low, high);
  const size = (to - from) * 1.1;
  const middle = (from + to) / 2;
  return [middle - size * (lanes - lane - 0.5), middle + size * (lane + 0.5)];
}

/** The smallest and the largest value of an item in all episodes. */
function ends(curves: (Curves | null)[], item: number): [number, number] {
  let [low, high] = [Infinity, -Infinity];
  for (const one of curves) {
    const begin = item * (one?.x.length ?? 0);
    for (const value of one?.low.subarray(begin, begin + one.x.length) ?? []) if (Number.isFinite(value)) low = Math.min(low, value);
    for (const value of one?.high.subarray(begin, begin + one.x.length) ?? []) if (Number.isFinite(value)) high = Math.max(high, value);
  }
  return [low, high];
}

/** What is drawn as parts of a whole: one episode, whose numbers are not in lanes of their own. */
const stackOf = ({ column, lanes, minus, curves }: Panel): Curves | null => (column.stacked && !lanes && !minus && curves.length === 1 ? curves[0]! : null);

const heightOf = (panel: Panel): number => panel.bands ? BAND * Math.max(1, panel.curves.length) + 4 : (panel.lanes ? Math.max(1, panel.values.length - panel.hidden.size) * LANE + 4 : HEIGHT);

/** The range of the shown items of a panel, with that of the fan. */
const fanned = (panel: Panel, low: number | null, high: number | null): [number | null, number | null] =>
  panel.values.reduce<[number | null, number | null]>((ends, _, item) => (panel.hidden.has(item) ? ends : widened(panel.fan, item, ...ends)), [low, high]);

/** The scales of the items of a panel; none for hidden ones. */
const scaleOf = (panel: Panel) => (item: number): string | null => (panel.hidden.has(item) ? null : panel.lanes ? `y${item}` : "y");

const clipped = (name: string): string => (name.length > 8 ? `${name.slice(0, 7)}…` : name);
