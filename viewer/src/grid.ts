// Small arrays of numbers as pictures: a pixel for each number, planes side by side.

import { FRAMES_BLOCK, type Api, type ColumnFacts, type EpisodeId, type FrameBlock } from "./api.ts";
import type { Curves } from "./curves.ts";
import { short } from "./words.ts";

const LARGEST = 64; // numbers of a side
const MOST_PLANES = 8;
const MOST_SAVED = 512; // numbers of a row in a saved page
const MOST_COLOURS = 10; // whole numbers up to here have a colour each
const RAMP = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]] as const; // viridis
export const RAW = "raw"; // type of pictures of 4 bytes a pixel

interface Planes {
  height: number;
  width: number;
  count: number;
  last: boolean; // the planes are the last axis
}

/** Return how an array lies on a grid, or null if it is none, or too large. */
export function planesOf({ kind, shape, items }: ColumnFacts, saved: boolean): Planes | null {
  if (kind !== "numeric" || (saved && items > MOST_SAVED)) return null;
  const fits = (height = 0, width = 0, count = 1): boolean => Math.min(height, width) > 1 && Math.max(height, width) <= LARGEST && count >= 1 && count <= MOST_PLANES;
  const [a, b, c] = shape;
  if (shape.length === 2) return fits(a, b) ? { height: a!, width: b!, count: 1, last: true } : null;
  if (shape.length !== 3) return null;
  if (fits(a, b, c)) return { height: a!, width: b!, count: c!, last: true };
  return fits(b, c, a) ? { height: b!, width: c!, count: a!, last: false } : null;
}

/** The pictures of a column of arrays. Colours go from the smallest to the largest value of some rows, which `range` tells. */
export class GridFrames {
  private limits: Promise<[number, number]> | null = null;
  private readonly colours: number[][] | null;

  constructor(private readonly api: Api, private readonly id: EpisodeId, private readonly column: ColumnFacts, private readonly planes: Planes, private readonly range: (text: string) => void) {
    const style = getComputedStyle(document.documentElement);
    const names = Array.from({ length: MOST_COLOURS }, (_, i) => `--series-${i}`);
    const whole = /^[<|=]?[iub]/.test(column.dtype);
    this.colours = whole ? ["--bar", ...names].map((name) => rgb(style.getPropertyValue(name).trim())) : null;
  }

  async frames(block: number, signal: AbortSignal): Promise<FrameBlock> {
    const from = block * FRAMES_BLOCK;
    const limits = await (this.limits ??= this.sampled().catch((error: unknown) => {
      this.limits = null;
      throw error;
    }));
    const curves = await this.rows(from, signal);
    const pictures = new Map<number, Uint8Array<ArrayBuffer>>();
    for (let at = 0; at < curves.x.length; at++) pictures.set(curves.x[at]!, this.picture(curves, at, limits));
    return { type: RAW, size: this.size, pictures, free: () => {} };
  }

  private get size(): [number, number] {
    const { height, width, count } = this.planes;
    return [height, count * (width + 1) - 1];
  }

  private rows(from: number, signal?: AbortSignal): Promise<Curves> {
    return this.api.curves(this.id, this.column.name, [0, this.column.items], from, Math.min(this.column.rows, from + FRAMES_BLOCK), 64, signal);
  }

  /** The smallest and the largest value in the first, the middle and the last rows. */
  private async sampled(): Promise<[number, number]> {
    const { rows } = this.column;
    const starts = new Set([0, Math.floor(rows / 2), Math.max(0, rows - FRAMES_BLOCK)]);
    const all = await Promise.all([...starts].map((from) => this.rows(from)));
    let [low, high] = [Infinity, -Infinity];
    for (const { low: values } of all) {
      for (const value of values) {
        if (!Number.isFinite(value)) continue;
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
    if (low > high) [low, high] = [0, 1];
    this.range(low === high ? short(low) : `${short(low, 3)} … ${short(high, 3)}`);
    return [low, high];
  }

  private picture({ low: values, x }: Curves, at: number, [from, to]: [number, number]): Uint8Array<ArrayBuffer> {
    const { height, width, count, last } = this.planes;
    const across = this.size[1];
    const bytes = new Uint8Array(4 * height * across);
    const named = this.colours && from >= 0 && to <= MOST_COLOURS ? this.colours : null;
    for (let plane = 0; plane < count; plane++) {
      for (let row = 0; row < height; row++) {
        for (let column = 0; column < width; column++) {
          const item = last ? (row * width + column) * count + plane : (plane * height + row) * width + column;
          const value = values[item * x.length + at]!;
          const colour = !Number.isFinite(value) ? null : named ? named[value] : ramp((value - from) / (to - from || 1));
          bytes.set(colour ? [...colour, 255] : [189, 44, 44, 255], 4 * (row * across + plane * (width + 1) + column));
        }
      }
    }
    return bytes;
  }
}

function ramp(part: number): number[] {
  const at = Math.max(0, Math.min(1, part)) * (RAMP.length - 1);
  const [low, high] = [RAMP[Math.floor(at)]!, RAMP[Math.ceil(at)]!];
  return low.map((value, i) => Math.round(value + (high[i]! - value) * (at % 1)));
}

const rgb = (colour: string): number[] => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
