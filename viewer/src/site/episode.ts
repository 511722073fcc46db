// One episode: its columns, curves, pictures and steps, as gym_trace/tools/viewer/episode.py gives them.

import type { ColumnFacts, EpisodeFacts, Json, StepFacts } from "../api.ts";
import { doubles, pack } from "../container.ts";
import { absent, asTyped, CONSTANT, Damaged, joined, leavesOf, product, typedValue, unpack, ID_RANGE, OUTCOMES, type Bytes, type Column, type Leaf, type Value } from "../reader/index.ts";
import { ADVANTAGE, annotation, CRITIC, discountOf, PART, PARTS, PROBABILITY, returnsToGo } from "./agent.ts";
import { Refusal } from "./files.ts";
import { arrayText, isNumber, isNumeric, MOST_NUMBERS, numberOf, numbersOf, toJson } from "./json.ts";
import { isOfAgents, namesOf } from "./names.ts";
import { bmp, imageIn } from "./pictures.ts";
import { bytesOf, type Trace } from "./trace.ts";
import type { Writer } from "./writer.ts";

const MOST_ITEMS = 64, MOST_STEPS = 1024, MOST_FRAMES = 64, MOST_PICTURE_BYTES = 64 << 20, MOST_PIXELS = 8192;
const MOST_PLOTTED = 1 << 16, MOST_DESCRIBED = 1 << 26, SMALLEST_PICTURE = 8, SAMPLED = 8;
const MOST_CURVE = 1 << 26; // numbers of a curve
const LONG = 1 << 16;
const FLAGS = ["terminated", "truncated"];
const NAME = /^[A-Za-z_]\w*$/;

interface ViewColumn extends ColumnFacts {
  path: string[];
}

export const columnName = (path: (string | number)[]): string =>
  path.map((key, i) => (i === 0 ? key : typeof key === "number" ? `[${key}]` : NAME.test(key) ? `.${key}` : `[${JSON.stringify(key)}]`)).join("");

/** The value of a row. */
const valueOf = (column: Column, i: number): Value => (column.dtype === "msgpack" ? unpack(column.row(i)) : typedValue(column.dtype, column.shape, column.row(i)));

export class Episode {
  private readonly writer: Writer;
  private readonly row: number;
  private readonly length: number;
  private readonly hasFinal: boolean;
  private known: Promise<ViewColumn[]> | null = null;

  constructor(private readonly trace: Trace, private readonly number: number) {
    ({ writer: this.writer, row: this.row } = trace.locate(number));
    this.length = trace.value("steps", number)!;
    this.hasFinal = this.writer.hasFinal(this.row);
  }

  private leaves(group: "observations" | "actions"): Leaf[] {
    return leavesOf(this.space(group), [group]);
  }

  private space(group: "observations" | "actions"): { [key: string]: any } {
    return this.writer.schema[group === "observations" ? "observation_space" : "action_space"];
  }

  private stored(root: string): string[][] {
    return this.writer.paths.filter(([first]) => first === root);
  }

  columns(): Promise<ViewColumn[]> {
    return (this.known ??= this.allColumns());
  }

  private async column(name: string, kind: "numeric" | "frames"): Promise<ViewColumn> {
    const found = (await this.columns()).find((column) => column.name === name);
    if (!found) throw new Refusal(404, `no column ${name.slice(0, 200)} in this episode`);
    if (found.kind !== kind) throw new Refusal(404, `${name}: is a column of ${found.kind}, not ${kind}`);
    return found;
  }

  private async allColumns(): Promise<ViewColumn[]> {
    const { schema } = this.writer;
    const about = (path: (string | number)[], group: string, kind: ColumnFacts["kind"], dtype: string, shape: number[], rows: number, name = columnName(path), leaf: Leaf | null = null): ViewColumn => {
      const image = kind === "frames" ? imageIn(dtype, shape) : null;
      const names = namesOf(name, path, shape, leaf, this.trace.facts.names, schema);
      return { name, group, kind, shape, dtype, items: kind === "numeric" ? product(shape) : 0, ...names, rows, frame_shape: image && [image.height, image.width], path: path.map(String) };
    };
    const seen = this.length + (this.hasFinal ? 1 : 0);
    const found: ViewColumn[] = [];
    for (const [group, rows] of [["observations", seen], ["actions", this.length]] as const) {
      for (const leaf of this.leaves(group)) found.push(about(leaf.path, group, kindOf(leaf), leaf.dtype ?? "", leaf.shape, rows, columnName(leaf.path), leaf));
    }
    const notes = this.stored("annotations");
    const [rewards, ...sampled] = await Promise.all([["rewards"], ...notes].map((path) => this.sampled(path)));
    const isPlotted = ([dtype, shape]: [string, number[]]): boolean => dtype !== "" && product(shape) > 0 && product(shape) <= MOST_PLOTTED;
    const shape = isPlotted(rewards!) ? rewards![1] : [];
    found.push(about(["rewards"], "rewards", "numeric", rewards![0] || "<f8", shape, this.length), about(["rewards"], "return", "numeric", "<f8", shape, this.length, "return"));
    const ofAgents = Array.isArray(schema.environment?.agents?.names) ? this.leaves("observations").find(({ path }) => path.length === 3 && isOfAgents(path[1]) && path[2] === "rewards") : null;
    if (ofAgents) found.push(about(ofAgents.path, "return", "numeric", "<f8", ofAgents.shape, seen, "returns of agents"));
    const oneEach = notes.filter((_, i) => sampled[i]![0] !== "" && product(sampled[i]![1]) === 1);
    const [value, logprob] = [annotation("value", oneEach), annotation("logprob", oneEach)];
    if (value && !shape.length) {
      const critic = about(value, "agent", "numeric", "<f8", [2], this.length, CRITIC);
      found.push({ ...critic, labels: CRITIC.split(", "), note: discountOf(this.trace.facts).note }, about(value, "agent", "numeric", "<f8", [], this.length, ADVANTAGE));
    }
    const isDiscrete = this.leaves("actions").every(({ dtype }) => dtype !== null && /^[<|=]?[iub]/.test(dtype));
    if (logprob && isDiscrete && !annotation("probabilities", notes)) found.push(about(logprob, "agent", "numeric", "<f8", [], this.length, PROBABILITY));
    sampled.forEach(([dtype, shape], i) => found.push(about(notes[i]!, "annotations", isPlotted([dtype, shape]) ? "numeric" : "text", dtype, dtype ? shape : [], this.length)));
    const keys = this.stored("infos").length ? await this.numbersInInfos() : [];
    const parts = keys.filter((key) => key.startsWith(PART));
    if (parts.length > 1) found.push({ ...about(["infos", ...parts], "parts", "numeric", "", [parts.length], this.length, PARTS), labels: parts.map((key) => key.slice(PART.length)), stacked: true });
    for (const key of keys) found.push(about(["infos", key], "infos", "numeric", "", [], this.length));
    for (const name of FLAGS) found.push(about([name], "flags", "numeric", "|b1", [], this.length));
    const actions = found.find(({ group, values }) => group === "actions" && values)?.values;
    const chances = found.find(({ path, items }) => annotation("probabilities", [path]) && items === actions?.count);
    if (chances) Object.assign(chances, { labels: chances.labels ?? actions!.names ?? Array.from({ length: chances.items }, (_, i) => String(actions!.start + i)), stacked: true });
    return found;
  }

  /** First steps of the samples that show which kind of values a column has. */
  private get samples(): number[] {
    return [...new Set([0, Math.floor(this.length / 2), Math.max(0, this.length - SAMPLED)])].sort((a, b) => a - b);
  }

  /** dtype and shape of the numbers in a column of a type that no space declares; "" if it has other values. */
  private async sampled(path: string[]): Promise<[string, number[]]> {
    for (const start of this.samples) {
      for await (const part of this.writer.parts(this.row, path, start, Math.min(this.length, start + SAMPLED))) {
        if ("error" in part || part.column === null) continue;
        const { dtype, shape } = part.column;
        if (dtype !== "msgpack") return isNumeric(dtype) ? [dtype, shape] : ["", []];
        for (let i = 0; i < part.count; i++) {
          const value = unpack(part.column.row(part.begin + i));
          if (value === null || value === absent || typeof value === "string" || value instanceof Map || Array.isArray(value)) continue;
          const typed = asTyped(value);
          return isNumber(value) || (typed && numbersOf(typed)) ? ["<f8", typed?.shape ?? []] : ["", []];
        }
      }
    }
    return ["", []];
  }

  /** Keys of infos that hold one number each, in the first and the last steps. */
  private async numbersInInfos(): Promise<string[]> {
    const keys = new Set<string>();
    for (const start of new Set([this.samples[0]!, this.samples.at(-1)!])) {
      for await (const part of this.writer.parts(this.row, ["infos"], start, Math.min(this.length, start + SAMPLED))) {
        if ("error" in part || part.column === null) continue;
        for (let i = 0; i < part.count; i++) {
          const info = unpack(part.column.row(part.begin + i));
          if (info instanceof Map) for (const [key, value] of info) if (typeof key === "string" && keys.size < MOST_ITEMS && !Number.isNaN(numberOf(value))) keys.add(key);
        }
      }
    }
    return [...keys];
  }

  async about(): Promise<EpisodeFacts> {
    const { trace, writer, number, row } = this;
    const columns = await this.columns();
    const first = writer.fragments(row)[0]!;
    const { start, end } = writer.edges(first.episode);
    const firstStep = trace.value("first_step", number)!;
    const more = await this.start();
    const seed = start === null || start.seed === -1n ? null : start.seed === -2n ? toJson(more.get("seed") ?? null) : start.seed <= BigInt(Number.MAX_SAFE_INTEGER) ? Number(start.seed) : String(start.seed);
    const environment = writer.schema.environment ?? {};
    const facts: [string, string][] = [["writer", writer.id], ["episode_id", String(first.episode % ID_RANGE)], ["split", String(writer.schema.split)]];
    if (firstStep) facts.push(["first_step", firstStep.toLocaleString("en-US")]);
    if (start) facts.push(["start_time", `${new Date(Number(start.start / 1000000n)).toISOString().slice(0, 19).replace("T", " ")} UTC`]);
    if (start && end) facts.push(["duration", `${Number((Number(end.duration) / 1e9).toPrecision(4))} s`]);
    if (!this.hasFinal) facts.push(["final observation", "not known"]);
    if (seed !== null) facts.push(["seed", String(seed)]);
    const options = more.get("options");
    if (options instanceof Map && options.size) facts.push(["options", JSON.stringify(toJson(options))]);
    facts.push(["environment", String(environment.id ?? "not known")]);
    const damage: string[] = [];
    if (firstStep) damage.push(`the first ${firstStep.toLocaleString("en-US")} steps are not here: filtered out or lost`);
    if (end === null) damage.push("the recording process died before the episode ended");
    if (!this.hasFinal) damage.push("the final observation is not known");
    const origin = writer.schema.branch;
    const fps = environment.render_fps;
    const total = trace.value("return", number);
    return {
      trace: trace.number,
      episode: number,
      identity: `${writer.id}:${first.episode % ID_RANGE}:${firstStep}`,
      writer: writer.id,
      branch: typeof origin?.writer === "string" && Number.isInteger(origin.episode_id) ? { writer: origin.writer, episode_id: origin.episode_id } : null,
      length: this.length,
      return: total !== null && Number.isFinite(total) ? total : null,
      outcome: OUTCOMES[trace.value("outcome", number)!]!,
      lane: trace.hasLanes ? first.lane : null,
      seed: typeof seed === "number" || typeof seed === "string" ? seed : null,
      flag: trace.flag(number),
      live: false,
      damage: [...damage, ...(await this.lost())],
      frames: columns.filter(({ kind }) => kind === "frames").map(({ name }) => name),
      renderable: false,
      columns: columns.map(({ path: _, ...facts }) => facts),
      figures: [],
      facts,
      fps: typeof fps === "number" && fps > 0 && Number.isFinite(fps) ? fps : null,
      version: 1,
    };
  }

  /** What is known of the reset; empty if it is lost. */
  private async start(): Promise<Map<Value, Value>> {
    const place = this.writer.startOf(this.writer.fragments(this.row)[0]!.episode);
    if (place === null) return new Map();
    try {
      const column = await this.writer.column(place.chunk, "starts");
      const value = column && place.row < column.count ? unpack(column.row(place.row)) : null;
      return value instanceof Map ? value : new Map();
    } catch (error) {
      if (error instanceof Damaged) return new Map();
      throw error;
    }
  }

  /** The steps around the samples whose rewards cannot be read: the whole episode would have to be fetched. */
  private async lost(): Promise<string[]> {
    const found = new Set<string>();
    for (const start of this.samples) {
      for await (const part of this.writer.parts(this.row, ["rewards"], start, Math.min(this.length, start + SAMPLED))) {
        if ("error" in part) found.add(`steps ${part.start} to ${part.start + part.count - 1} and others beside them cannot be read: ${part.error.message}`);
      }
    }
    return [...found];
  }

  // -- curves -------------------------------------------------------------------------------------------------------

  /** Rows [begin, end) of a column of numbers, minus those of another episode, if any: each row, or the least and largest of bins of rows. */
  async plot(name: string, begin: number, end: number, pixels: number, items: [number, number] | null, minus: Episode | null): Promise<Bytes> {
    if (!(pixels >= 1 && pixels <= MOST_PIXELS)) throw new Refusal(400, `pixels=${pixels}: out of range; pass 1 to ${MOST_PIXELS}`);
    const column = { ...(await this.column(name, "numeric")) };
    const other = minus && (await minus.column(name, "numeric"));
    if (other) {
      if (other.shape.join() !== column.shape.join()) throw new Refusal(404, `${name}: has other shapes in these episodes`);
      column.rows = Math.min(column.rows, other.rows);
    }
    const [from, to] = items ?? [0, MOST_ITEMS];
    const most = end - begin > MOST_FRAMES ? MOST_ITEMS : MOST_PLOTTED; // few rows are shown as pictures
    if (!(from >= 0 && from <= to && to - from <= most)) throw new Refusal(400, `items: pass up to ${most} items, such as 0:16`);
    const chosen: [number, number] = [Math.min(from, column.items), Math.min(to, column.items)];
    begin = Math.max(0, begin);
    end = Math.min(end, column.rows);
    const bin = end - begin <= 2 * pixels ? 1 : 2 ** Math.floor(Math.log2((end - begin) / pixels));
    if (bin > 1) [begin, end] = [Math.floor(begin / bin) * bin, Math.min(Math.ceil(end / bin) * bin, column.rows)];
    const { values, missing } = await this.numbers(column, begin, end, chosen);
    if (other) {
      const theirs = await minus.numbers(other, begin, end, chosen);
      theirs.values.forEach((value, i) => ((values[i]! -= value), (missing[i]! |= theirs.missing[i]!)));
    }
    const width = chosen[1] - chosen[0];
    const count = Math.max(0, Math.ceil((end - begin) / bin));
    const low = new Float64Array(count * width).fill(NaN);
    const high = bin === 1 ? low : low.slice();
    const odd = new Uint8Array(count);
    const head: Record<string, number | boolean> & { missing: number; nan: number; infinite: number } = { rows: column.rows, decimated: bin > 1, bin, nan: 0, infinite: 0, missing: 0 };
    if (column.name === ADVANTAGE && column.rows < LONG) {
      const sizes = (await this.numbers(column, 0, column.rows, [0, 1])).values.map((one) => (Number.isNaN(one) ? -1 : Math.abs(one)));
      if (sizes.some((size) => size >= 0)) head.peak = sizes.indexOf(sizes.reduce((one, other) => Math.max(one, other)));
    }
    for (let i = 0; i < values.length; i++) {
      const [value, row] = [values[i]!, Math.floor(i / width)];
      const at = (i % width) * count + Math.floor(row / bin);
      if (bin === 1) low[at] = value;
      if (Number.isFinite(value)) {
        if (!(low[at]! <= value)) low[at] = value;
        if (!(high[at]! >= value)) high[at] = value;
      } else if (missing[i]) {
        head.missing++;
      } else {
        odd[Math.floor(row / bin)] = 1;
        if (Number.isNaN(value)) head.nan++;
        else head.infinite++;
      }
    }
    const x = Int32Array.from({ length: count }, (_, i) => begin + i * bin);
    const curves = bin === 1 ? [["y", low] as const] : [["low", low] as const, ["high", high] as const];
    return pack(head, [["x", "<i4", [count], bytesOf(x)], ...curves.map(([name, array]): [string, string, number[], Bytes] => [name, "<f8", [width, count], bytesOf(array)]), ["odd", "|u1", [count], bytesOf(odd)]]);
  }

  /** Rows of a column as numbers, (rows, items), NaN where there is none, and which of these are missing. */
  private async numbers(column: ViewColumn, start: number, stop: number, [from, to]: [number, number]): Promise<{ values: Float64Array; missing: Uint8Array }> {
    const width = to - from;
    if (column.group === "return") {
      const { values, missing } = await this.numbers({ ...column, group: "rewards" }, 0, stop, [from, to]);
      for (let i = width; i < values.length; i++) {
        values[i]! += values[i - width]!;
        missing[i]! |= missing[i - width]!;
      }
      return { values: values.subarray(start * width), missing: missing.subarray(start * width) };
    }
    if (column.group === "agent") return this.ofAgent(column, start, stop, [from, to]);
    const size = Math.max(0, stop - start) * width;
    if (size > MOST_CURVE) throw new Refusal(413, "this does not fit in memory", "ask for fewer rows or items");
    const values = new Float64Array(size).fill(NaN);
    const missing = new Uint8Array(size).fill(1);
    if (column.group === "flags") {
      values.set(this.writer.flags(this.row, column.path[0]!, start, stop));
      return { values, missing: missing.fill(0) };
    }
    const isInfo = column.path[0] === "infos";
    const path = isInfo ? ["infos"] : column.path;
    const items = product(column.shape);
    const keys = column.path.slice(1);
    for await (const part of this.writer.parts(this.row, path, start, stop)) {
      if ("error" in part || part.column === null) continue;
      const found = part.column;
      const isPlain = isNumeric(found.dtype) && found.shape.join() === column.shape.join();
      const all = isPlain ? doubles(found) : null;
      const constant = (found.encoding & CONSTANT) !== 0;
      for (let i = 0; i < part.count; i++) {
        const to_ = (part.start - start + i) * width;
        let row: ArrayLike<number> | null = all;
        let at = constant ? 0 : (part.begin + i) * items;
        if (all === null) {
          const value = valueOf(found, part.begin + i);
          if (isInfo) {
            const given = keys.map((key) => (value instanceof Map ? value.get(key) : undefined));
            for (let item = from; item < to; item++) if (isNumber(given[item])) (values[to_ + item - from] = numberOf(given[item])), (missing[to_ + item - from] = 0);
            continue;
          }
          const typed = asTyped(value);
          row = column.shape.length ? (typed && typed.shape.join() === column.shape.join() ? numbersOf(typed) : null) : isNumber(value) ? [numberOf(value)] : null;
          at = 0;
        }
        if (row) for (let item = from; item < to; item++) (values[to_ + item - from] = row[at + item]!), (missing[to_ + item - from] = 0);
      }
    }
    return { values, missing };
  }

  /** Rows of a column that is computed from the agent's annotations, as numbers(). */
  private async ofAgent(column: ViewColumn, start: number, stop: number, [from, to]: [number, number]): Promise<{ values: Float64Array; missing: Uint8Array }> {
    const all = await this.columns();
    const of = async (wanted: ViewColumn, begin: number, end: number): Promise<{ values: Float64Array; missing: Uint8Array }> => this.numbers(wanted, begin, end, [0, 1]);
    const annotated = all.find(({ group, path }) => group === "annotations" && path.join() === column.path.join())!;
    if (column.name === PROBABILITY) {
      const { values, missing } = await of(annotated, start, stop);
      return { values: values.map(Math.exp), missing };
    }
    const [rewards, value] = [await of(all.find(({ group }) => group === "rewards")!, 0, this.length), await of(annotated, 0, this.length)];
    const isTerminated = OUTCOMES[this.trace.value("outcome", this.number)!] === "terminated";
    const toGo = returnsToGo(rewards.values, value.values, isTerminated, discountOf(this.trace.facts).gamma);
    const width = to - from;
    const values = Float64Array.from({ length: Math.max(0, stop - start) * width }, (_, i) => {
      const [row, item] = [start + Math.floor(i / width), from + (i % width)];
      return column.name === ADVANTAGE ? toGo[row]! - value.values[row]! : item ? toGo[row]! : value.values[row]!;
    });
    return { values, missing: Uint8Array.from(values, (one) => Number(Number.isNaN(one))) };
  }

  // -- pictures -----------------------------------------------------------------------------------------------------

  async frames(name: string, start: number, count: number, signal?: AbortSignal): Promise<Bytes> {
    const column = await this.column(name, "frames");
    count = Math.max(1, Math.min(count, MOST_FRAMES, Math.floor(MOST_PICTURE_BYTES / product(column.shape))));
    const found: [string, string, number[], Bytes][] = [];
    for await (const part of this.writer.parts(this.row, column.path, Math.max(0, start), Math.min(start + count, column.rows), signal)) {
      if ("error" in part || part.column === null) continue;
      for (let i = 0; i < part.count; i++) {
        const typed = asTyped(valueOf(part.column, part.begin + i));
        const image = typed && imageIn(typed.dtype, typed.shape);
        if (!image) continue;
        const file = bmp(typed.bytes, image);
        found.push([String(part.start + i), "|u1", [file.length], file]);
      }
    }
    return pack({ mime: "image/bmp", rows: column.rows }, found);
  }

  // -- steps --------------------------------------------------------------------------------------------------------

  /** Positions of the episode: observation, action, and the results of the action. */
  async steps(start: number, count: number): Promise<{ steps: StepFacts[] }> {
    start = Math.max(0, start);
    const stop = Math.min(start + Math.min(count, MOST_STEPS), this.length + 1);
    const firstStep = this.trace.value("first_step", this.number)!;
    const positions: StepFacts[] = Array.from({ length: Math.max(0, stop - start) }, (_, i) => ({ step: firstStep + start + i }));
    const end = Math.max(start, Math.min(stop, this.length));
    const lastKnown = this.length - (this.hasFinal ? 0 : 1);
    const infos = this.stored("infos").length > 0;
    const notes = this.stored("annotations");
    const [seen, action, reward, info, ...noted] = await Promise.all([
      this.rowsAsJson("observations", start, Math.min(stop, lastKnown + 1)),
      this.rowsAsJson("actions", start, end),
      this.asJson(["rewards"], start, end),
      infos ? this.asJson(["infos"], start, end) : [],
      ...notes.map((path) => this.asJson(path, start, end)),
    ]);
    const flags = FLAGS.map((name) => this.writer.flags(this.row, name, start, end));
    positions.forEach((one, i) => {
      one.observation = seen![i] ?? null;
      if (i >= end - start) return;
      Object.assign(one, { action: action![i], reward: reward![i], terminated: flags[0]![i] === 1, truncated: flags[1]![i] === 1 });
      if (infos) one.infos = info![i]!;
      if (notes.length) one.annotations = Object.fromEntries(notes.map((path, k) => [path[1]!, noted[k]![i]!]));
    });
    if (!start && positions.length && !firstStep) {
      const packed = (await this.start()).get("reset_info");
      if (packed instanceof Uint8Array) positions[0]!.reset_info = toJson(unpack(packed as Bytes));
    }
    return { steps: positions };
  }

  private async rowsAsJson(group: "observations" | "actions", start: number, stop: number): Promise<Json[]> {
    const columns = await Promise.all(this.leaves(group).map((leaf) => this.asJson(leaf.path.map(String), start, stop, leaf)));
    const join = (keys: (string | number)[] | null, parts: Json[]): Json => (keys ? Object.assign(Object.create(null), Object.fromEntries(keys.map((key, i) => [key, parts[i]!]))) : parts);
    return Array.from({ length: Math.max(0, stop - start) }, (_, i) => joined<Json>(this.space(group), columns.map((column) => column[i] ?? null).values(), join));
  }

  /** Rows of a column as JSON. Large arrays are not read. */
  private async asJson(path: string[], start: number, stop: number, leaf: Leaf | null = null): Promise<Json[]> {
    const rows = Array.from({ length: Math.max(0, stop - start) }, (): Json => null);
    if (leaf?.dtype && product(leaf.shape) > MOST_NUMBERS) return rows.fill(arrayText(leaf.dtype, leaf.shape));
    for await (const part of this.writer.parts(this.row, path, start, stop)) {
      for (let i = 0; i < part.count; i++) {
        const value = "error" in part ? null : part.column === null ? null : valueOf(part.column, part.begin + i);
        rows[part.start - start + i] = "error" in part ? `unreadable: ${part.error.message}` : value === null ? null : value === absent && leaf ? "ABSENT" : toJson(value);
      }
    }
    return rows;
  }

  // -- comparison ---------------------------------------------------------------------------------------------------

  /** What compare() looks at: leaves and rewards of both episodes, where both have them. */
  get compared(): string[][] {
    return [...this.leaves("observations"), ...this.leaves("actions"), { path: ["rewards"] }].map(({ path }) => path.map(String));
  }

  /** Rows of a column, one after the other, as bytes and as JSON for the reader. */
  async *rowsOf(path: string[]): AsyncGenerator<{ bytes: Bytes; value: () => Value }> {
    for (let at = 0, rows = this.length + (path[0] === "observations" ? Number(this.hasFinal) : 0); at < rows; at += MOST_STEPS) {
      for await (const part of this.writer.parts(this.row, path, at, Math.min(rows, at + MOST_STEPS))) {
        if ("error" in part) throw new Refusal(422, part.error.message, "gym-trace check lists all damage");
        for (let i = 0; i < part.count && part.column; i++) {
          const { column } = part;
          yield { bytes: column.row(part.begin + i), value: () => valueOf(column, part.begin + i) };
        }
      }
    }
  }
}

function kindOf({ dtype, shape }: Leaf): ColumnFacts["kind"] {
  const size = product(shape);
  if (dtype === null || !isNumeric(dtype) || !(size > 0 && size <= MOST_DESCRIBED)) return "text";
  const image = imageIn(dtype, shape);
  if (image && Math.min(image.height, image.width) >= SMALLEST_PICTURE) return "frames";
  return size <= MOST_PLOTTED ? "numeric" : "text";
}
