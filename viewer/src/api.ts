// The questions the page asks, with the types of their answers.

import { doubles, parse } from "./container.ts";
import { decimate, difference, type Curves } from "./curves.ts";
import type { Source } from "./source.ts";

export interface TraceFacts {
  trace: number;
  setting: number; // that it is a run of
  name: string;
  title?: string | null;
  env_id: string | null;
  episodes: number;
  steps: number;
  live: boolean;
  lanes: number | null;
  damage: number;
  damage_notes?: string[];
  notes?: string[];
  version: number;
  renderable: boolean;
  branches?: boolean; // that the page asked for
  facts?: [string, string][];
}

export interface ColumnFacts {
  name: string;
  group: string;
  kind: "numeric" | "frames" | "text" | "bytes";
  shape: number[];
  dtype: string;
  items: number;
  labels: string[] | null; // of the numbers of a row
  values: { start: number; count: number; names: string[] | null } | null; // of a discrete column
  rows: number;
  frame_shape: [number, number] | null;
  stacked?: boolean; // its numbers are parts of a whole
  note?: string;
}

export interface EpisodeFacts {
  trace: number;
  episode: number;
  identity: string;
  writer: string;
  branch: { writer: string; episode_id: number } | null; // the episode whose first steps this one repeats
  length: number;
  return: number | null;
  outcome: string;
  lane: number | null;
  seed: number | string | null;
  flag: Flag;
  live: boolean;
  damage: string[];
  frames: string[];
  renderable: boolean;
  rendering?: boolean; // more pictures will follow
  columns: ColumnFacts[];
  facts: [string, string][];
  figures?: [string, string][]; // of the agent
  fps: number | null;
  version: number;
}

export type Flag = "good" | "bad" | "look" | null;

export interface ListColumn {
  name: string;
  kind: "number" | "text";
  title: string;
}

/** A part of the list of episodes: its columns, and what each row holds in them. */
export interface Rows {
  total: number;
  matched: number;
  offset: number;
  count: number;
  columns: ListColumn[];
  value(column: string, row: number): number | string | null;
}

export interface Bins {
  edges: number[];
  ends: [number, number] | null; // the smallest and the largest value
  counts: number[];
  nan: number;
}

export interface Names {
  names: string[];
  counts: number[];
}

export interface Histograms {
  return: Bins;
  length: Bins;
  outcome: Names;
  flag: Names;
  matched: number;
  total: number;
  terms: { return: string; length: string; outcome: string; flag?: string };
}

/** Complete episodes as points, and means over `window` of them, all with their positions on each axis. */
export interface Learning {
  axes: Axis[];
  ys: string[]; // what curves can be of
  y: string;
  proved?: Proved;
  window: number;
  term: "index" | "end_time"; // the column of conditions whose values are in "at"
  episodes: number;
  values(name: string): Float64Array;
}

/** How many versions of a policy were learned again, of how many, and the first difference. */
export interface Proved {
  versions: number;
  of: number;
  differs: string;
}

export interface Estimate {
  value: number | null;
  low: number | null;
  high: number | null;
}

/** Statistics of the complete episodes of the runs of a setting, and its curve at the points of Runs.grid. */
export interface Setting {
  traces: number[];
  name: string;
  environments: string[];
  episodes: number;
  steps: number;
  outcomes: Record<string, number>;
  lengths: number | null; // mean
  mean: Estimate;
  median: Estimate;
  iqm: Estimate;
  seconds: number | null;
  steps_per_second: number | null;
  curve: (number | null)[];
  low: (number | null)[]; // of its interval over several runs
  high: (number | null)[];
}

export interface Runs {
  groups: Setting[];
  grid: number[];
  window: number;
}

/** How often pairs of numbers occur: edges of the bins, and counts by bins of y and of x. */
export interface Heat {
  x: number[];
  y: number[];
  counts: number[][];
  steps: number; // that are counted, one of `every`
  missing: number;
  every: number;
  episodes: number; // that were read, of `of`
  of: number;
}

export type Axis = "steps" | "episodes" | "time" | "version";

export type Json = null | boolean | number | string | Json[] | { [key: string]: Json };

export interface StepFacts {
  step: number;
  [key: string]: Json;
}

export interface Difference {
  same: boolean;
  step: number | null;
  column: string | null;
  a: string | null;
  b: string | null;
  note: string | null;
}

export interface Changes {
  version: number;
  traces: { trace: number; version: number; episodes: number; steps: number; live: boolean }[];
}

export interface Job {
  phase: "compared" | "rendered";
  done: number;
  of: number;
  state: "running" | "ready" | "failed";
  error?: string;
  consent?: string;
  note?: string;
}

/** A tool that runs over a trace, or has run. */
export interface Proof {
  state: "running" | "done" | "failed" | "canceled";
  done: number;
  of: number;
  where: string;
  good: boolean;
  summary: string;
  error: string;
  claims: [name: string, verdict: string, text: string][]; // of an audit
  consent?: string;
}

/** Branches of an episode, in one trace; lengths count from their first own step, those of episodes from the reset. */
export interface Branches {
  trace: number;
  directory: string;
  kept: boolean;
  step: number;
  policy: string;
  live: boolean;
  returns: number[] | null; // smallest, quartiles, largest
  lengths: number[] | null;
  outcomes: Record<string, number>;
  episodes: { episode: number; return: number | null; length: number; outcome: string }[];
  command: string | null;
}

export interface WhatIfFacts {
  policies: { name: string; label: string }[];
  start: "auto" | "replay" | "states";
  branches: Branches[];
}

/** A finding of a tool; without an episode or a position, it is of all of the trace, or of the episode. */
export interface Mark {
  tool: string;
  episode: number | null;
  position: number | null;
  severity: "error" | "warning" | "note";
  text: string;
}

export interface EpisodeId {
  trace: number;
  episode: number;
}

/** Pictures of consecutive rows by row, encoded as they came. Those that cannot be read are missing. */
export interface FrameBlock {
  type: string;
  size?: [number, number]; // height and width of raw pictures
  pictures: Map<number, Uint8Array<ArrayBuffer>>;
  free(): void;
}

export interface ListQuery {
  where: string;
  search: string;
  sort: string;
}

export const EDITED = 412; // status
export const STEPS_BLOCK = 32;
export const FRAMES_BLOCK = 16;
export const LIST_BLOCK = 200;

const query = (values: Record<string, string | number>): string =>
  Object.entries(values).map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&");

export class Api {
  private readonly whole = new Map<string, Promise<Curves>>(); // columns of a saved page

  constructor(readonly source: Source) {}

  private async json<T>(path: string, signal?: AbortSignal): Promise<T> {
    const bytes = await this.source.bytes(path, signal);
    const text = new TextDecoder().decode(bytes);
    this.source.free(bytes);
    return JSON.parse(text) as T;
  }

  traces(): Promise<TraceFacts[]> {
    return this.json("/api/traces");
  }

  /** Return the rows from `offset` on; a saved page returns all, unsorted. */
  async episodes(trace: number, list: ListQuery, offset: number, limit: number, signal?: AbortSignal): Promise<Rows> {
    const path = this.source.saved
      ? `/api/episodes?trace=${trace}`
      : `/api/episodes?${query({ trace, where: list.where, search: list.search, sort: list.sort, offset, limit })}`;
    const { head, arrays } = parse(await this.source.bytes(path, signal));
    const facts = head as unknown as { total: number; matched: number; columns: ListColumn[]; texts?: Record<string, { words: string[]; codes: string }> };
    const values = new Map<string, Float64Array>();
    for (const [name, column] of arrays) values.set(name, doubles(column));
    const texts = facts.texts ?? {};
    const value = (column: string, row: number): number | string | null => {
      const text = texts[column];
      if (text) return text.words[values.get(text.codes)?.[row] ?? -1] ?? null;
      const found = values.get(column)?.[row];
      return found === undefined || Number.isNaN(found) ? null : found;
    };
    const count = values.get("episode")?.length ?? 0;
    return { total: facts.total, matched: facts.matched, columns: facts.columns, offset: this.source.saved ? 0 : offset, count, value };
  }

  histograms(trace: number, list: { where: string; search: string }, signal?: AbortSignal): Promise<Histograms> {
    if (this.source.saved) return this.json(`/api/histograms?trace=${trace}`);
    return this.json(`/api/histograms?${query({ trace, where: list.where, search: list.search })}`, signal);
  }

  async learning(trace: number, list: { where: string; search: string }, x: Axis, y: string, signal?: AbortSignal): Promise<Learning> {
    const { saved, readOnly } = this.source;
    const path = saved ? `/api/learning?trace=${trace}` : `/api/learning?${query({ trace, where: list.where, search: list.search, x, y })}`;
    const { head, arrays } = parse(await this.source.bytes(path, signal));
    const { axes, ys, ...facts } = head as unknown as Omit<Learning, "values">;
    const values = (name: string): Float64Array => (arrays.has(name) ? doubles(arrays.get(name)!) : new Float64Array(0));
    return { ...facts, ys: readOnly ? ["return"] : ys, axes: axes.filter((axis) => !saved || axis !== "version"), values };
  }

  runs(x: Axis, signal?: AbortSignal): Promise<Runs> {
    return this.json(`/api/runs?${query({ x })}`, signal);
  }

  heat(trace: number, [x, y]: [string, string], list: { where: string; search: string }, signal?: AbortSignal): Promise<Heat> {
    return this.json(`/api/heat?${query({ trace, x, y, where: list.where, search: list.search })}`, signal);
  }

  episode({ trace, episode }: EpisodeId): Promise<EpisodeFacts> {
    return this.json(`/api/episode?${query({ trace, episode })}`);
  }

  /** Return rows [from, to) of some items of a column, at most two points a pixel; of one episode minus another, if there is one. */
  async curves({ trace, episode }: EpisodeId, column: string, items: [number, number], from: number, to: number, pixels: number, signal?: AbortSignal, minus: EpisodeId | null = null): Promise<Curves> {
    if (!this.source.saved) {
      const other = minus && { minus: `${minus.trace}:${minus.episode}` };
      const path = `/api/plot?${query({ trace, episode, column, from, to, pixels, items: `${items[0]}:${items[1]}`, ...other })}`;
      return readCurves(await this.source.bytes(path, signal));
    }
    const whole = (id: EpisodeId): Promise<Curves> => {
      const path = `/api/plot?${query({ trace: id.trace, episode: id.episode, column, full: 1 })}`;
      const known = this.whole.get(path) ?? this.source.bytes(path).then(readCurves);
      this.whole.set(path, known);
      return known;
    };
    const one = await whole({ trace, episode });
    return decimate(minus ? difference(one, await whole(minus)) : one, items, from, to, pixels);
  }

  async steps(id: EpisodeId, block: number, signal?: AbortSignal): Promise<StepFacts[]> {
    const from = block * STEPS_BLOCK;
    const { steps } = await this.json<{ steps: StepFacts[] }>(`/api/steps?${query({ trace: id.trace, episode: id.episode, from, count: STEPS_BLOCK })}`, signal);
    return steps;
  }

  async frames(id: EpisodeId, column: string, block: number, signal?: AbortSignal): Promise<FrameBlock> {
    const values = { trace: id.trace, episode: id.episode, column, from: block * FRAMES_BLOCK, count: FRAMES_BLOCK, scale: 1 };
    const answer = await this.source.bytes(`/api/frames?${query(values)}`, signal);
    const { head, arrays } = parse(answer);
    const pictures = new Map([...arrays].map(([row, { bytes }]) => [Number(row), bytes]));
    return { type: String(head.mime), pictures, free: () => this.source.free(answer) };
  }

  compare(a: EpisodeId, b: EpisodeId): Promise<Difference> {
    return this.json(`/api/compare?${query({ a: `${a.trace}:${a.episode}`, b: `${b.trace}:${b.episode}` })}`);
  }

  changes(since: number, signal: AbortSignal): Promise<Changes> {
    return this.json(`/api/changes?since=${since}`, signal);
  }

  filterLines(trace: number): Promise<{ lines: { title: string; line: string }[] }> {
    return this.json(`/api/filter?trace=${trace}`);
  }

  proofs(trace: number): Promise<Record<string, Proof>> {
    return this.json(`/api/proofs?trace=${trace}`);
  }

  /** Findings in the order of episodes and positions. */
  marks(trace: number): Promise<Mark[]> {
    return this.source.readOnly ? Promise.resolve([]) : this.json(`/api/marks?trace=${trace}`);
  }

  prove(trace: number, tool: string, where: string, trust: boolean): Promise<unknown> {
    return this.source.post("/api/proofs", { trace, tool, where, trust });
  }

  branches({ trace, episode }: EpisodeId): Promise<WhatIfFacts> {
    return this.json(`/api/branches?${query({ trace, episode })}`);
  }

  /** Ask a policy what it would do at each step of an episode. */
  ask(asked: EpisodeId & { ask: string; trust: boolean }): Promise<unknown> {
    return this.source.post("/api/proofs", asked);
  }

  branch(asked: EpisodeId & { step: number; policy: string; episodes: number; seed: number | null; trust: boolean }): Promise<unknown> {
    return this.source.post("/api/proofs", asked);
  }

  /** Return the curves of some items of a column, of those episodes that have it. */
  async fan(trace: number, episodes: number[], column: string, items: [number, number], from: number, to: number, pixels: number, signal: AbortSignal): Promise<{ episode: number; curves: Curves }[]> {
    const values = { trace, episodes: episodes.join(","), column, items: `${items[0]}:${items[1]}`, from, to, pixels };
    const { arrays } = parse(await this.source.bytes(`/api/fan?${query(values)}`, signal));
    return [...arrays].map(([episode, { bytes }]) => ({ episode: Number(episode), curves: readCurves(bytes) }));
  }

  cancelProof(): Promise<unknown> {
    return this.source.post("/api/proofs", { cancel: true });
  }

  /** Flag an episode; Refused with EDITED if the trace was edited and it is another one now. */
  flag({ trace, episode, identity }: EpisodeFacts, flag: Flag): Promise<unknown> {
    return this.source.post("/api/flags", { trace, episode, identity, flag });
  }

  /** `step` is rendered first; what nobody has `asked` for makes way for others, and starts only where it needs no consent. */
  async startRendering(id: EpisodeId, options: { trust: boolean; asked: boolean; step: number }): Promise<string> {
    const { job } = (await this.source.post("/api/render", { ...id, ...options })) as { job: string };
    return job;
  }

  rendering(job: string): Promise<Job> {
    return this.json(`/api/render?${query({ job })}`);
  }
}

function readCurves(bytes: Uint8Array<ArrayBuffer>): Curves {
  const { head, arrays } = parse(bytes);
  const column = (name: string): Float64Array | null => {
    const found = arrays.get(name);
    return found ? doubles(found) : null;
  };
  const x = column("x") ?? new Float64Array(0);
  const y = column("y");
  const low = y ?? column("low") ?? new Float64Array(0);
  const items = x.length ? low.length / x.length : arrays.get(y ? "y" : "low")?.shape[0] ?? 0;
  return {
    x,
    low,
    high: y ?? column("high") ?? new Float64Array(0),
    odd: column("odd"),
    items,
    decimated: head.decimated === true,
    bin: typeof head.bin === "number" ? head.bin : 1,
    rows: Number(head.rows),
    nan: Number(head.nan ?? 0),
    infinite: Number(head.infinite ?? 0),
    missing: Number(head.missing ?? 0),
    peak: typeof head.peak === "number" ? head.peak : null,
  };
}
