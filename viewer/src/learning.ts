// Learning curves: complete episodes as points, their mean with a band, one colour a trace. A click opens an episode, dragging selects.

import type { Axis, Proved } from "./api.ts";
import { fill, h, set } from "./dom.ts";
import { compact, count, short, UNITS } from "./words.ts";

const AXES: Record<Axis, string> = { steps: "environment steps", episodes: "episodes", time: "time", version: "policy version" };
const [LEFT, RIGHT, TOP, BOTTOM] = [46, 12, 8, 20]; // pixels around the curves
const NEAR = 16; // pixels from a point to the pointer
const DRAGGED = 4; // pixels; less is a click

/** What a curve shows of a trace, or of the runs of a setting. */
export interface CurveLine {
  name: string;
  colour: number;
  x: Float64Array;
  mean: Float64Array;
  low: Float64Array;
  high: Float64Array;
}

export interface CurvePoints {
  colour: number;
  x: Float64Array;
  y: Float64Array;
  episode: Float64Array;
  selected: Float64Array;
  at: Float64Array; // in the column of the condition
  steps: Float64Array;
  more: [string, Float64Array][]; // what else is known of the episodes, with its name
  proved: Proved | undefined;
}

export interface CurveEvents {
  open(episode: number): void;
  /** Select points with `at` in this range; null: all. */
  brush(range: [number, number] | null): void;
  /** Show other curves. */
  axes(axis: Axis, y: string): void;
}

export class LearningCurve {
  readonly element: HTMLElement;
  private readonly canvas = h("canvas", { "aria-hidden": "true" });
  private readonly chart = h("div", { class: "chart" }, [this.canvas]);
  private readonly axes = h("select", { "aria-label": "Curve over" });
  private readonly ys = h("select", { "aria-label": "Curve of" });
  private readonly of = h("span");
  private readonly note = h("span", { class: "note" });
  private readonly legend = h("div", { class: "names" });
  private lines: CurveLine[] = [];
  private points: CurvePoints | null = null;
  private about = "";
  private bounds = { left: 0, right: 1, low: 0, high: 1 };
  private range: [number, number] | null = null; // of `at`
  private active: number | null = null; // point
  private start: number | null = null; // of a drag
  private end = 0;

  constructor(private readonly events: CurveEvents) {
    this.element = h("figure", { class: "learning" }, [
      h("figcaption", {}, [h("span", { class: "of" }, [this.of, " over ", this.axes]), this.legend, this.note]),
      this.chart,
    ]);
    for (const choice of [this.axes, this.ys]) choice.addEventListener("change", () => events.axes(this.axes.value as Axis, this.ys.value));
    this.chart.addEventListener("pointerdown", (event) => this.down(event));
    this.chart.addEventListener("pointermove", (event) => this.move(event));
    this.chart.addEventListener("pointerup", (event) => this.up(event));
    this.chart.addEventListener("pointercancel", () => this.leave());
    this.chart.addEventListener("pointerleave", () => this.start === null && this.leave());
    this.chart.addEventListener("dblclick", () => this.points && events.brush(null));
    this.chart.addEventListener("keydown", (event) => this.key(event));
    this.chart.addEventListener("blur", () => this.leave());
    new ResizeObserver(() => this.redraw()).observe(this.chart);
  }

  /** Show curves of `kind` over an axis; `range` is the brush, `about` says what a point of a line is. */
  show(kind: string, kinds: string[], axis: Axis, axes: Axis[], lines: CurveLine[], points: CurvePoints | null, range: [number, number] | null, about: string): void {
    const pointed = this.active === null ? undefined : this.points?.episode[this.active];
    Object.assign(this, { lines, points, range, about });
    fill(this.axes, axes.map((one) => h("option", { value: one, selected: one === axis }, [AXES[one]])));
    fill(this.of, [kinds.length > 1 ? this.ys : h("span", { class: "name" }, [kind])]);
    fill(this.ys, kinds.map((one) => h("option", { value: one, selected: one === kind }, [one])));
    fill(this.legend, lines.length > 1 ? lines.map(({ name, colour }) => h("span", { class: `series-${colour}` }, [h("i", { class: "swatch" }), name])) : []);
    const finite = (of: Float64Array[]): Float64Array => Float64Array.from(of.flatMap((values) => [...values].filter(Number.isFinite)));
    const x = finite([...lines.map((line) => line.x), points?.x ?? new Float64Array(0)]);
    const y = finite([...lines.flatMap(({ mean, low, high }) => [mean, low, high]), points?.y ?? new Float64Array(0)]);
    const [low, high] = [extreme(y, Math.min), extreme(y, Math.max)];
    const margin = (high - low || Math.abs(high) || 1) * 0.04;
    this.bounds = { left: axis === "version" ? extreme(x, Math.min) : 0, right: extreme(x, Math.max) || 1, low: low - margin, high: high + margin };
    const last = points ? points.x.length - 1 : 0;
    set(this.chart, points
      ? { tabindex: 0, role: "slider", "aria-label": `Episodes, by ${kind} over ${AXES[axis]}`, "aria-valuemin": 0, "aria-valuemax": last, "aria-valuenow": last, "aria-valuetext": this.said(last) }
      : { role: "img", "aria-label": `${kind} over ${AXES[axis]}: ${lines.map(({ name, mean }) => `${name} ends at ${short(mean.findLast(Number.isFinite) ?? NaN)}`).join(", ")}` });
    const active = points && pointed !== undefined ? points.episode.indexOf(pointed) : -1;
    this.point(active < 0 ? null : active);
  }

  redraw(): void {
    const { width, height } = this.size;
    const scale = devicePixelRatio;
    set(this.canvas, { width: Math.round(width * scale), height: Math.round(height * scale) });
    const draw = this.canvas.getContext("2d");
    if (!draw || width < LEFT + RIGHT + 20) return;
    const style = getComputedStyle(this.element);
    const colour = (name: string): string => style.getPropertyValue(`--${name}`);
    draw.scale(scale, scale);
    draw.font = `11px ${style.fontFamily}`;
    this.drawAxes(draw, colour);
    draw.save();
    draw.beginPath();
    draw.rect(LEFT - 3, 0, width - LEFT - RIGHT + 6, height - BOTTOM + 3);
    draw.clip();
    this.drawPoints(draw, colour);
    for (const line of this.lines) this.drawLine(draw, line, colour(`series-${line.colour}`));
    draw.restore();
    this.drawProved(draw, colour);
    this.drawBrush(draw, colour("accent"));
    const { points, active } = this;
    if (points && active !== null) {
      draw.beginPath();
      draw.arc(this.px(points.x[active]!), this.py(points.y[active]!), 5, 0, 7);
      Object.assign(draw, { strokeStyle: colour("text"), lineWidth: 1.5 });
      draw.stroke();
    }
  }

  private get size(): { width: number; height: number } {
    return { width: this.chart.clientWidth, height: this.chart.clientHeight };
  }

  private px(x: number): number {
    const { left, right } = this.bounds;
    return LEFT + ((x - left) / (right - left || 1)) * (this.size.width - LEFT - RIGHT);
  }

  private py(y: number): number {
    const { low, high } = this.bounds;
    return TOP + ((high - y) / (high - low)) * (this.size.height - TOP - BOTTOM);
  }

  private drawAxes(draw: CanvasRenderingContext2D, colour: (name: string) => string): void {
    const { width, height } = this.size;
    const { left, right, low, high } = this.bounds;
    const quiet = colour("quiet");
    Object.assign(draw, { strokeStyle: colour("grid"), fillStyle: quiet, lineWidth: 1, textAlign: "right", textBaseline: "middle" });
    for (const y of ticks(low, high, Math.max(2, Math.floor(height / 44)))) {
      const at = Math.round(this.py(y)) + 0.5;
      draw.beginPath();
      draw.moveTo(LEFT, at);
      draw.lineTo(width - RIGHT, at);
      draw.stroke();
      draw.fillText(compact(y), LEFT - 7, at);
    }
    const [unit, name] = this.axes.value === "time" ? UNITS.find(([seconds]) => right >= 2 * seconds) ?? [1, "s"] : [1, ""];
    Object.assign(draw, { textAlign: "center", textBaseline: "alphabetic" });
    for (const x of ticks(left / unit, right / unit, Math.max(2, Math.floor(width / 110)))) {
      const text = name ? `${compact(x)} ${name}` : compact(x);
      const half = draw.measureText(text).width / 2;
      draw.fillText(text, Math.max(half, Math.min(width - half - 2, this.px(x * unit))), height - 5);
    }
  }

  private drawPoints(draw: CanvasRenderingContext2D, colour: (name: string) => string): void {
    const { points } = this;
    if (!points) return;
    const size = points.x.length > 800 ? 1.5 : points.x.length > 100 ? 2 : 2.75;
    for (const selected of [0, 1]) { // selected ones in front
      draw.fillStyle = selected ? colour(`series-${points.colour}`) : colour("bar");
      draw.globalAlpha = selected ? 0.5 : 1;
      for (let i = 0; i < points.x.length; i++) {
        if (points.selected[i] !== selected || Number.isNaN(points.x[i]!)) continue;
        draw.beginPath();
        draw.arc(this.px(points.x[i]!), this.py(points.y[i]!), size, 0, 7);
        draw.fill();
      }
    }
    draw.globalAlpha = 1;
  }

  private drawLine(draw: CanvasRenderingContext2D, { x, mean, low, high }: CurveLine, colour: string): void {
    const known = [...x.keys()].filter((i) => Number.isFinite(x[i]) && Number.isFinite(mean[i]));
    const trace = (values: Float64Array, order: number[], begin: boolean): void => {
      for (const i of order) {
        if (begin) draw.moveTo(this.px(x[i]!), this.py(values[i]!));
        else draw.lineTo(this.px(x[i]!), this.py(values[i]!));
        begin = false;
      }
    };
    const banded = known.filter((i) => Number.isFinite(low[i]) && Number.isFinite(high[i]));
    Object.assign(draw, { fillStyle: colour, strokeStyle: colour, lineWidth: 2, lineJoin: "round", globalAlpha: 0.14 });
    draw.beginPath();
    trace(low, banded, true);
    trace(high, banded.reverse(), false);
    draw.fill();
    draw.globalAlpha = 1;
    draw.beginPath();
    trace(mean, known, true);
    draw.stroke();
  }

  /** A tick below the first episode of each version that was proved, and of the one that differs. */
  private drawProved(draw: CanvasRenderingContext2D, colour: (name: string) => string): void {
    const { proved, x, more } = this.points ?? { proved: undefined };
    if (!proved) return;
    const versions = more!.find(([name]) => name === "version")?.[1] ?? new Float64Array(0);
    const seen = new Set<number>();
    versions.forEach((version, i) => {
      const differs = version === proved.versions + 1 && proved.differs !== "";
      if (seen.has(version) || version < 1 || (version > proved.versions && !differs)) return;
      seen.add(version);
      draw.fillStyle = colour(differs ? "bad" : "good");
      draw.fillRect(Math.round(this.px(x![i]!)) - 1, this.size.height - BOTTOM, 2, differs ? 9 : 5);
    });
  }

  private drawBrush(draw: CanvasRenderingContext2D, accent: string): void {
    const { points, range } = this;
    let [begin, end] = [this.start ?? 0, this.end];
    if (this.start === null) {
      if (!points || !range) return;
      const inside = points.x.filter((x, i) => Number.isFinite(x) && points.at[i]! >= range[0] && points.at[i]! <= range[1]);
      if (!inside.length) return;
      [begin, end] = [this.px(extreme(inside, Math.min)) - 2, this.px(extreme(inside, Math.max)) + 2];
    } else if (Math.abs(end - begin) < DRAGGED) {
      return;
    }
    const box = [Math.min(begin, end), TOP - 4, Math.abs(end - begin), this.size.height - TOP - BOTTOM + 8] as const;
    Object.assign(draw, { fillStyle: accent, strokeStyle: accent, lineWidth: 1, globalAlpha: 0.1 });
    draw.fillRect(...box);
    draw.globalAlpha = 1;
    draw.strokeRect(...box);
  }

  private at(event: PointerEvent): [number, number] {
    const box = this.chart.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  /** The point next to a position; null if none is near. Selected ones come first. */
  private nearest([x, y]: [number, number]): number | null {
    const { points } = this;
    let [found, best]: [number | null, number] = [null, NEAR ** 2];
    for (let i = 0; points && i < points.x.length; i++) {
      const distance = (this.px(points.x[i]!) - x) ** 2 + (this.py(points.y[i]!) - y) ** 2 + (points.selected[i] ? 0 : 25);
      if (distance < best) [found, best] = [i, distance];
    }
    return found;
  }

  private point(at: number | null): void {
    this.active = at;
    this.note.textContent = at === null ? this.about : this.said(at);
    if (at !== null) set(this.chart, { "aria-valuenow": at, "aria-valuetext": this.said(at) });
    this.chart.classList.toggle("near", at !== null);
    this.redraw();
  }

  private said(at: number): string {
    const { points } = this;
    if (!points || !points.x.length) return "no episodes";
    const steps = points.steps.length ? `, ended at step ${count(points.steps[at]!)}` : "";
    const more = points.more.map(([name, values]) => `${name} ${short(values[at]!)}`);
    return `episode ${points.episode[at]}: ${more.join(", ")}${steps}`;
  }

  private leave(): void {
    this.start = null;
    this.point(null);
  }

  private down(event: PointerEvent): void {
    if (!this.points || event.button !== 0) return;
    this.start = this.end = this.at(event)[0];
    this.chart.setPointerCapture(event.pointerId);
  }

  private move(event: PointerEvent): void {
    if (!this.points) return;
    this.end = Math.max(LEFT, Math.min(this.size.width - RIGHT, this.at(event)[0]));
    if (this.start === null || Math.abs(this.end - this.start) < DRAGGED) this.point(this.nearest(this.at(event)));
    else this.point(null);
  }

  private up(event: PointerEvent): void {
    const { points, start } = this;
    if (!points || start === null) return;
    this.start = null;
    const [begin, end] = [Math.min(start, this.at(event)[0]), Math.max(start, this.at(event)[0])];
    if (end - begin < DRAGGED) {
      const near = this.nearest(this.at(event));
      if (near !== null) this.events.open(points.episode[near]!);
      return;
    }
    const inside = points.at.filter((_, i) => this.px(points.x[i]!) >= begin && this.px(points.x[i]!) <= end);
    this.point(null);
    if (inside.length) this.events.brush([extreme(inside, Math.min), extreme(inside, Math.max)]);
  }

  private key(event: KeyboardEvent): void {
    const { points } = this;
    if (!points || event.ctrlKey || event.metaKey || event.altKey) return;
    const last = points.x.length - 1;
    const by = event.shiftKey ? 10 : 1;
    const from = this.active ?? last;
    const to = ({ ArrowLeft: from - by, ArrowDown: from - by, ArrowRight: from + by, ArrowUp: from + by, Home: 0, End: last } as Record<string, number>)[event.key];
    if (to !== undefined) this.point(this.active === null && to < last && to > 0 ? last : Math.max(0, Math.min(last, to)));
    else if (event.key === "Enter" && this.active !== null) this.events.open(points.episode[this.active]!);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

function extreme(values: Float64Array, of: (a: number, b: number) => number): number {
  return values.length ? values.reduce((one, other) => of(one, other)) : 0;
}

/** Round numbers from low to high, about as many as asked for. */
function ticks(low: number, high: number, about: number): number[] {
  const rough = (high - low) / about || 1;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * ([1, 2, 5].find((factor) => factor * unit >= rough) ?? 10);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.max(0, Math.floor(high / step) - first + 1) }, (_, i) => (first + i) * step);
}
