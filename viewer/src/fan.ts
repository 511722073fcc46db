// Curves of other episodes from a step on, such as branches: they fan out in the plots of an episode, and the pointer finds them.

import type uPlot from "uplot";
import type { Api, EpisodeId } from "./api.ts";
import { valueAt, type Curves } from "./curves.ts";

const NEAR = 7; // pixels from a line to the pointer
const PIXELS = 400; // of a line, at most

/** Episodes of a trace; `length` is that of the longest. */
export interface FanSet {
  trace: number;
  step: number;
  colour: number;
  episodes: number[];
  length: number;
}

export interface FanLine {
  id: EpisodeId;
  colour: number;
  curves: Curves;
}

export interface FanEvents {
  pointed(id: EpisodeId | null): void;
  open(id: EpisodeId, row: number): void;
}

/** Returns the scale of an item in a plot, or null where the item is not shown. */
type Scales = (item: number) => string | null;

const same = (a: EpisodeId | null, b: EpisodeId | null): boolean => a?.trace === b?.trace && a?.episode === b?.episode;

export class Fan {
  lit: EpisodeId | null = null; // in front of the others

  constructor(private readonly api: Api, private readonly sets: FanSet[], private readonly events: FanEvents) {}

  get length(): number {
    return Math.max(0, ...this.sets.map(({ length }) => length));
  }

  /** Fetch rows [from, to) of a column, from the last row that all have in common. */
  async lines(column: string, items: [number, number], from: number, to: number, pixels: number, signal: AbortSignal): Promise<FanLine[]> {
    const found = await Promise.all(this.sets.map(async ({ trace, step, colour, episodes }) => {
      const begin = Math.max(from, step - 1);
      if (!episodes.length || begin >= to) return [];
      const lines = await this.api.fan(trace, episodes, column, items, begin, to, Math.min(pixels, PIXELS), signal);
      return lines.map(({ episode, curves }) => ({ id: { trace, episode }, colour, curves }));
    }));
    return found.flat();
  }

  /** Draw the line that is pointed at, or all others. */
  draw(plot: uPlot, lines: FanLine[], scales: Scales, lit: boolean, colour: (name: string) => string): void {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.lineJoin = "round";
    ctx.setLineDash([]);
    for (const line of lines) {
      if (same(line.id, this.lit) !== lit) continue;
      Object.assign(ctx, { strokeStyle: colour(`--series-${line.colour}`), lineWidth: (lit ? 2.5 : 1) * devicePixelRatio, globalAlpha: lit ? 1 : this.lit ? 0.25 : 0.55 });
      for (let item = 0; item < line.curves.items; item++) {
        const scale = scales(item);
        if (scale !== null) stroke(plot, line.curves, item, scale);
      }
    }
    ctx.restore();
  }

  /** The line next to a place in a plot, in pixels; null if none is near. */
  nearest(plot: uPlot, lines: FanLine[], scales: Scales, left: number, top: number): EpisodeId | null {
    const x = plot.posToVal(left, "x");
    let [found, best]: [EpisodeId | null, number] = [null, NEAR];
    for (const { id, curves } of lines) {
      for (let item = 0; item < curves.items; item++) {
        const scale = scales(item);
        const [a, b] = [valueAt(curves, item, Math.floor(x)), valueAt(curves, item, Math.floor(x) + 1)];
        if (scale === null || !a) continue;
        const part = x - Math.floor(x);
        const ends = a.map((value, i) => plot.valToPos(value * (1 - part) + (b ?? a)[i]! * part, scale));
        const distance = Math.max(0, Math.min(...ends) - top, top - Math.max(...ends));
        if (distance < best) [found, best] = [id, distance];
      }
    }
    return found;
  }

  /** The pointer is at a line, or leaves all. Returns whether that is news. */
  point(id: EpisodeId | null): boolean {
    if (same(id, this.lit)) return false;
    this.lit = id;
    this.events.pointed(id);
    return true;
  }

  open(id: EpisodeId, row: number): void {
    this.events.open(id, row);
  }
}

/** The range of an item, widened to its values in some lines. */
export function widened(lines: FanLine[], item: number, low: number | null, high: number | null): [number | null, number | null] {
  let [least, most] = [low ?? Infinity, high ?? -Infinity];
  for (const { curves } of lines) {
    const begin = item * curves.x.length;
    for (const value of curves.low.subarray(begin, begin + curves.x.length)) if (value < least && Number.isFinite(value)) least = value;
    for (const value of curves.high.subarray(begin, begin + curves.x.length)) if (value > most && Number.isFinite(value)) most = value;
  }
  return least <= most ? [least, most] : [low, high];
}

function stroke(plot: uPlot, { x, low, high, bin }: Curves, item: number, scale: string): void {
  const { ctx } = plot;
  ctx.beginPath();
  let begun = false;
  const to = (at: number, value: number): void => {
    if (!Number.isFinite(value)) {
      begun = false;
      return;
    }
    const [left, top] = [plot.valToPos(at, "x", true), plot.valToPos(value, scale, true)];
    begun ? ctx.lineTo(left, top) : ctx.moveTo(left, top);
    begun = true;
  };
  for (let i = 0; i < x.length; i++) {
    to(x[i]!, low[item * x.length + i]!);
    if (bin > 1) to(x[i]! + bin / 2, high[item * x.length + i]!);
  }
  ctx.stroke();
}
