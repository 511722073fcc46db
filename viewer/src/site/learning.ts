// The learning curve of a trace, as gym_trace/tools/viewer/learning.py gives it: complete episodes as points, and their mean with a band.

import { pack } from "../container.ts";
import type { Bytes } from "../reader/index.ts";
import { bytesOf, type Trace } from "./trace.ts";

const MOST_POINTS = 1500, MEANS = 300, LEAST_WINDOWS = 10, MOST_AVERAGED = 100;

interface Ended {
  row: number; // the first one of the episode in the table
  steps: number; // without those that repeat another episode
  return: number;
  end: number; // NaN if it is not known
  start: number;
  position: number; // steps of all episodes until its end
  place: number; // its number in the order of the ends
}

/** The episodes in the order of their ends, unfinished ones last. */
function byEnd(trace: Trace): Ended[] {
  const found = new Map<string, Ended>();
  for (let row = 0; row < trace.length; row++) {
    const value = (name: string): number => trace.value(name, row) ?? NaN;
    const { writer } = trace.locate(row);
    const [steps, first] = [value("steps"), value("first_step")];
    const prefix = Number(writer.schema.branch?.step ?? 0);
    const own = steps - Math.max(0, Math.min(prefix - first, steps));
    const key = `${value("writer")}:${value("episode_id")}`;
    const known = found.get(key);
    if (known) {
      known.steps += own;
      known.return += value("return");
    } else {
      found.set(key, { row, steps: own, return: value("return"), end: value("end_time"), start: value("start_time"), position: 0, place: 0 });
    }
  }
  const last = (end: number): number => (Number.isNaN(end) ? Infinity : end);
  const ended = [...found.values()].sort((a, b) => (last(a.end) === last(b.end) ? a.row - b.row : last(a.end) - last(b.end)));
  let position = 0;
  ended.forEach((one, i) => {
    one.position = position += one.steps;
    one.place = i + 1;
  });
  return ended;
}

/** Points, or if there are too many, those with the lowest and the highest return of each bin. */
function few(points: Ended[]): Ended[] {
  if (points.length <= MOST_POINTS) return points;
  const kept = new Set<Ended>();
  const bins = MOST_POINTS / 2;
  for (let bin = 0; bin < bins; bin++) {
    const inside = points.slice(Math.ceil((bin * points.length) / bins), Math.ceil(((bin + 1) * points.length) / bins));
    kept.add(inside.reduce((low, one) => (one.return < low.return ? one : low)));
    kept.add(inside.reduce((high, one) => (one.return >= high.return ? one : high)));
  }
  return points.filter((one) => kept.has(one));
}

function percentile(sorted: Float64Array, part: number): number {
  const at = part * (sorted.length - 1);
  const [low, high] = [sorted[Math.floor(at)]!, sorted[Math.ceil(at)]!];
  return low + (high - low) * (at % 1);
}

/** The curve as a container, in which selected rows are marked. */
export function learning(trace: Trace, selected: Int32Array): Bytes {
  const all = byEnd(trace);
  const points = all.filter((one) => trace.isComplete(one.row) && Number.isFinite(one.return));
  const begin = all.reduce((least, { start }) => (start < least ? start : least), Infinity);
  const axes: Record<string, (one: Ended) => number> = { steps: (one) => one.position, episodes: (one) => one.place };
  if (!points.length || points.some(({ end }) => Number.isFinite(end - begin))) axes.time = ({ end }) => (Number.isFinite(begin) ? (end - begin) / 1e9 : NaN);
  const isKnown = points.every(({ end }) => !Number.isNaN(end));
  const term = !isKnown || points.every(({ row }, i) => i === 0 || row > points[i - 1]!.row) ? "index" : "end_time";
  const marked = new Set(selected);
  const shown = [...few(points.filter(({ row }) => marked.has(row))), ...few(points.filter(({ row }) => !marked.has(row)))].sort((a, b) => a.place - b.place);
  const window = Math.max(1, Math.min(MOST_AVERAGED, Math.floor(points.length / LEAST_WINDOWS)));
  const count = Math.min(MEANS, points.length);
  const span = points.length - window; // from the end of the first window
  const last = points.length ? [...new Set(Array.from({ length: count }, (_, i) => window - 1 + Math.floor(count > 1 ? (i * span) / (count - 1) : 0)))] : [];
  const windows = last.map((end) => Float64Array.from(points.slice(end + 1 - window, end + 1), (one) => one.return).sort());
  const arrays: Record<string, number[]> = {
    return: shown.map((one) => one.return),
    mean: windows.map((values) => values.reduce((sum, value) => sum + value, 0) / window),
    low: windows.map((values) => percentile(values, 0.1)),
    high: windows.map((values) => percentile(values, 0.9)),
    episode: shown.map(({ row }) => row),
    selected: shown.map(({ row }) => Number(marked.has(row))),
    at: shown.map(({ row, end }) => (term === "index" ? row : end / 1e6)),
  };
  for (const [axis, of] of Object.entries(axes)) {
    arrays[axis] = shown.map(of);
    arrays[`mean_${axis}`] = last.map((i) => of(points[i]!));
  }
  const head = { axes: Object.keys(axes), ys: ["return"], y: "return", window, term, episodes: points.length };
  return pack(head, Object.entries(arrays).map(([name, values]) => [name, "<f8", [values.length], bytesOf(Float64Array.from(values))]));
}
