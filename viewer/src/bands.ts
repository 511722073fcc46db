// Discrete values over time: a band of a colour for each run of the same value.

import type uPlot from "uplot";
import type { ColumnFacts } from "./api.ts";
import type { Curves } from "./curves.ts";
import { range } from "./words.ts";

export const BAND = 20; // pixels of an episode's bands

/** Return the name of a value, or its number. */
export function valueName({ values }: ColumnFacts, value: number): string {
  return values?.names?.[value - values.start] ?? String(value);
}

/** Return the names of the values of a bin, or its numbers where the column has no names. */
export function namesOf(column: ColumnFacts, [low, high]: [number, number]): string {
  if (!column.values || !Number.isFinite(low + high)) return range([low, high]);
  return low === high ? valueName(column, low) : `${valueName(column, low)} … ${valueName(column, high)}`;
}

/** Draw the bands of each episode below those of the one before; of two, with their colours at the left. A bin of several values shows the smallest below the largest. */
export function drawBands(plot: uPlot, curves: (Curves | null)[], colourOf: (value: number) => string, sideColour: (side: number) => string): void {
  const { ctx, bbox } = plot;
  const height = bbox.height / curves.length;
  const pixel = devicePixelRatio;
  ctx.save();
  for (let side = 0; side < curves.length && curves.length > 1; side++) {
    ctx.fillStyle = sideColour(side);
    ctx.fillRect(bbox.left - 9 * pixel, Math.round(bbox.top + side * height), 4 * pixel, Math.round(height - 2 * pixel));
  }
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  curves.forEach((one, place) => {
    const top = Math.round(bbox.top + place * height);
    const tall = Math.round(height - (curves.length > 1 ? 2 : 0) * pixel);
    const [count, bin] = [one?.x.length ?? 0, one?.bin ?? 1];
    for (let at = 0, end = 1; at < count; at = end++) {
      const [low, high] = [one!.low[at]!, one!.high[at]!];
      while (end < count && one!.low[end] === low && one!.high[end] === high) end++;
      const left = plot.valToPos(one!.x[at]!, "x", true);
      const width = Math.max(1, plot.valToPos(one!.x[end - 1]! + bin, "x", true) - left);
      if (!Number.isFinite(low)) continue;
      ctx.fillStyle = colourOf(high);
      ctx.fillRect(left, top, width, tall);
      if (low === high) continue;
      ctx.fillStyle = colourOf(low);
      ctx.fillRect(left, top + tall / 2, width, tall / 2);
    }
  });
  ctx.restore();
}
