// Parts of a whole over time, such as the probabilities of actions: areas on top of each other, negative parts below zero.

import type uPlot from "uplot";
import type { Curves } from "./curves.ts";

interface Part {
  item: number;
  from: Float64Array; // at each point
  to: Float64Array;
}

/** Return where each shown item begins and ends; a bin has the middle of its smallest and its largest value. */
function parts(curves: Curves, hidden: Set<number>): Part[] {
  const points = curves.x.length;
  const ends = { up: new Float64Array(points), down: new Float64Array(points) };
  return Array.from({ length: curves.items }, (_, item) => item).filter((item) => !hidden.has(item)).map((item) => {
    const [from, to] = [new Float64Array(points), new Float64Array(points)];
    for (let i = 0; i < points; i++) {
      const middle = (curves.low[item * points + i]! + curves.high[item * points + i]!) / 2;
      const value = Number.isFinite(middle) ? middle : 0;
      const end = value < 0 ? ends.down : ends.up;
      from[i] = end[i]!;
      to[i] = end[i] = end[i]! + value;
    }
    return { item, from, to };
  });
}

/** Return the smallest and the largest end of the areas, with zero. */
export function stackRange(curves: Curves, hidden: Set<number>): [number, number] {
  let [low, high] = [0, 0];
  for (const { to } of parts(curves, hidden)) for (const end of to) [low, high] = [Math.min(low, end), Math.max(high, end)];
  return low === high ? [0, 1] : [low, high];
}

export function drawStack(plot: uPlot, curves: Curves, hidden: Set<number>, colourOf: (item: number) => string): void {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  const left = Array.from(curves.x, (x) => plot.valToPos(x, "x", true));
  const right = Array.from(curves.x, (x) => plot.valToPos(x + curves.bin, "x", true));
  ctx.globalAlpha = 0.75;
  for (const { item, from, to } of parts(curves, hidden)) {
    const at = (value: number): number => plot.valToPos(value, "y", true);
    ctx.beginPath();
    for (let i = 0; i < to.length; i++) {
      ctx.lineTo(left[i]!, at(to[i]!));
      ctx.lineTo(right[i]!, at(to[i]!));
    }
    for (let i = from.length - 1; i >= 0; i--) {
      ctx.lineTo(right[i]!, at(from[i]!));
      ctx.lineTo(left[i]!, at(from[i]!));
    }
    ctx.fillStyle = colourOf(item);
    ctx.fill();
  }
  ctx.restore();
}
