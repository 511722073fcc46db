// A trace: its writers, and its episodes as a table to search, sort and count.

import type { Bins, Flag, Histograms, Names, TraceFacts } from "../api.ts";
import { pack } from "../container.ts";
import { Damaged, ENDS, HAS_INITIAL, ID_RANGE, OUTCOMES, type Bytes, type Metadata } from "../reader/index.ts";
import { Refusal, type Listing, type Read } from "./files.ts";
import { rowsWhere, sortRows, type Column } from "./where.ts";
import { openBatch, openSchema, Writer, WriterFiles } from "./writer.ts";

const BATCH = /^([\w-][\w.-]{0,119}?)\.(\d{6,9})\.gtb$/;
const FLAGS: Exclude<Flag, null>[] = ["good", "bad", "look"];
const MOST_ROWS = 2000, MOST_WORDS = 256, MOST_CHARACTERS = 2000, MOST_NOTES = 20, BINS = 40, MOST_FACTS = 1 << 20;
const ONLY_HERE = ["metadata", "options"]; // columns that need more than the indexes

/** Text without characters that control a terminal or turn its direction. */
export const printable = (text: string): string =>
  text.replace(/[^\P{C}]|[^\P{Z} ]/gu, (c) => `\\u{${c.codePointAt(0)!.toString(16)}}`);

export class Trace {
  readonly length: number;
  readonly writers: Writer[];
  private readonly bounds: number[] = [0]; // of the rows of each writer
  private readonly numbers: Record<string, Float64Array>; // NaN where a value is not known
  private readonly flags: Uint8Array; // 0, or the number in FLAGS and 1
  private readonly selections = new Map<string, Int32Array>();
  private hasSeeds = false;

  constructor(readonly number: number, private readonly setting: number, readonly name: string, writers: Writer[], readonly facts: { [key: string]: unknown }, private readonly damage: string[], private readonly notes: string[]) {
    this.writers = writers.sort((a, b) => Number(a.schema.created) - Number(b.schema.created) || (a.id < b.id ? -1 : 1));
    for (const writer of this.writers) this.bounds.push(this.bounds.at(-1)! + writer.length);
    this.length = this.bounds.at(-1)!;
    const column = (): Float64Array => new Float64Array(this.length).fill(NaN);
    this.numbers = { writer: column(), episode_id: column(), first_step: column(), steps: column(), return: column(), outcome: column(), lane: column(), seed: column(), start_time: column(), end_time: column(), duration: column(), has_final_observation: column() };
    this.flags = new Uint8Array(this.length);
    let at = 0;
    this.writers.forEach((writer, w) => {
      const flagged = this.flagsOf(writer.id);
      for (let row = 0; row < writer.length; row++, at++) this.fill(at, w, writer, row, flagged);
    });
  }

  private fill(at: number, w: number, writer: Writer, row: number, flagged: Map<number, number>): void {
    const fragments = writer.fragments(row);
    const first = fragments[0]!;
    const trimmed = first.flags & HAS_INITIAL ? 0 : 1;
    const { start, end } = writer.edges(first.episode);
    const id = first.episode % ID_RANGE;
    const set = (name: string, value: number): number => (this.numbers[name]![at] = value);
    set("writer", w);
    set("episode_id", id);
    set("first_step", first.firstStep + trimmed);
    set("steps", fragments.reduce((sum, { steps }) => sum + steps, 0) - trimmed);
    set("return", trimmed ? NaN : fragments.reduce((sum, { reward }) => sum + reward, 0));
    set("outcome", end === null ? 0 : Math.min(end.outcome, 4));
    set("lane", first.lane);
    set("has_final_observation", Number(writer.hasFinal(row)));
    if (start && start.seed !== -1n) this.hasSeeds = true;
    if (start && start.seed >= 0n) set("seed", Number(start.seed)); // others are too large for the table
    if (start) set("start_time", Number(start.start));
    if (end && end.flags & ENDS) set("duration", Number(end.duration) / 1e9);
    if (start && end) set("end_time", Number(start.start + end.duration + end.drift));
    else set("duration", NaN);
    this.flags[at] = flagged.get(id) ?? 0;
  }

  private flagsOf(writer: string): Map<number, number> {
    const found = new Map<number, number>();
    const given = (this.facts.flags as Record<string, Record<string, unknown>> | undefined)?.[writer];
    FLAGS.forEach((flag, i) => {
      const ids = given && typeof given === "object" ? given[flag] : null;
      for (const id of Array.isArray(ids) ? ids : []) if (typeof id === "number") found.set(id, i + 1);
    });
    return found;
  }

  /** The writer and the row of an episode. */
  locate(episode: number): { writer: Writer; row: number } {
    if (!(episode >= 0 && episode < this.length)) throw new Refusal(404, `no episode ${episode}; the trace has ${this.length}`);
    const w = this.numbers.writer![episode]!;
    return { writer: this.writers[w]!, row: episode - this.bounds[w]! };
  }

  value(name: string, episode: number): number | null {
    const value = this.numbers[name]![episode]!;
    return Number.isNaN(value) ? null : value;
  }

  flag(episode: number): Flag {
    return FLAGS[this.flags[episode]! - 1] ?? null;
  }

  get hasLanes(): boolean {
    return this.numbers.lane!.some((lane) => lane > 0);
  }

  about(): TraceFacts {
    const ids = this.writers.map(({ schema }) => schema.environment?.id).filter((id) => typeof id === "string");
    const lanes = this.numbers.lane!.reduce((most, lane) => Math.max(most, lane + 1), 1);
    const facts = Object.entries(this.facts).filter(([key]) => key !== "flags");
    return {
      trace: this.number,
      setting: this.setting,
      name: printable(this.name),
      title: null,
      env_id: ids[0] ?? null,
      episodes: this.length,
      steps: this.numbers.steps!.reduce((sum, steps) => sum + steps, 0),
      live: false,
      lanes: lanes > 1 ? lanes : null,
      damage: this.damage.length,
      damage_notes: this.damage.slice(0, MOST_NOTES).map((note) => printable(note).slice(0, MOST_CHARACTERS)),
      notes: this.notes,
      version: 1,
      renderable: false,
      facts: [["writers", String(this.writers.length)], ...facts.map(([key, value]): [string, string] => [key, (typeof value === "string" ? value : JSON.stringify(value)).slice(0, MOST_CHARACTERS)])],
    };
  }

  // -- the table ----------------------------------------------------------------------------------------------------

  private texts(): Record<string, string[]> {
    return {
      split: this.writers.map(({ schema }) => String(schema.split)),
      environment: this.writers.map(({ schema }) => String(schema.environment?.id ?? "")),
      writer: this.writers.map(({ id }) => id),
    };
  }

  private column(name: string): Column | null | undefined {
    if (ONLY_HERE.includes(name)) return null;
    if (name === "index") return { kind: "number", at: (row) => row };
    if (name === "outcome") return { kind: "text", at: (row) => OUTCOMES[this.numbers.outcome![row]!]! };
    if (name === "flag") return { kind: "text", at: (row) => this.flag(row) };
    if (name === "writer" || name === "split") {
      const words = this.texts()[name]!;
      return { kind: "text", at: (row) => words[this.numbers.writer![row]!]! };
    }
    if (!Object.hasOwn(this.numbers, name)) return undefined;
    const kind = name === "has_final_observation" ? "condition" : name.endsWith("_time") ? "time" : "number";
    return { kind, at: kind === "condition" ? (row) => this.value(name, row) === 1 : (row) => this.value(name, row) };
  }

  /** Whether an episode counts in mean returns: its end was recorded, or it was imported. */
  isComplete(row: number): boolean {
    const outcome = this.numbers.outcome![row]!;
    const imported = this.writers[this.numbers.writer![row]!]!.schema.recorder?.imported_from !== undefined;
    return (outcome === 1 || outcome === 2 || imported) && this.numbers.steps![row]! > 0;
  }

  selected(where: string, search: string, sort: string): Int32Array {
    const key = JSON.stringify([where, search, sort]);
    const known = this.selections.get(key);
    if (known) return known;
    let rows = rowsWhere(where, (name) => this.column(name), this.length);
    if (search.trim()) rows = rows.filter(this.matcher(search.trim()));
    const isComplete = /\boutcome\b/.test(where) ? null : (row: number): boolean => this.isComplete(row);
    rows = sortRows(namesOfSort(sort) || "start_time", (name) => this.column(name), rows, isComplete);
    if (this.selections.size > 8) this.selections.clear();
    this.selections.set(key, rows);
    return rows;
  }

  /** Whether an episode has this text in a text column, or this number or seed. */
  private matcher(text: string): (row: number) => boolean {
    if (/^\d+$/.test(text)) return (row) => row === Number(text) || this.numbers.seed![row] === Number(text);
    const wanted = text.toLowerCase();
    const words = Object.values(this.texts()).map((names) => names.map((name) => name.toLowerCase().includes(wanted)));
    return (row) => words.some((hits) => hits[this.numbers.writer![row]!]) || OUTCOMES[this.numbers.outcome![row]!]!.includes(wanted) || (this.flag(row) ?? "").includes(wanted);
  }

  /** A part of the table of the selected episodes, as a container. */
  episodes(where: string, search: string, sort: string, offset: number, limit: number): Bytes {
    const chosen = this.selected(where, search, sort);
    const rows = chosen.subarray(Math.max(0, offset), Math.max(0, offset) + Math.max(0, Math.min(limit, MOST_ROWS)));
    const columns = [["episode", "number", "#"], ["length", "number", "steps"], ["return", "number", "return"], ["outcome", "text", "outcome"], ["flag", "text", "flag"]];
    const values: Record<string, Float64Array> = { episode: Float64Array.from(rows) };
    const take = (name: string): Float64Array => Float64Array.from(rows, (row) => this.numbers[name]![row]!);
    const words: Record<string, string[]> = { outcome: OUTCOMES, flag: ["", ...FLAGS], damage: ["", "damaged"] };
    Object.assign(values, { length: take("steps"), return: take("return"), outcome: take("outcome"), flag: Float64Array.from(rows, (row) => this.flags[row]!), damage: new Float64Array(rows.length) });
    if (this.hasLanes) columns.push(["lane", "number", "lane"]), (values.lane = take("lane"));
    if (this.hasSeeds) columns.push(["seed", "number", "seed"]), (values.seed = take("seed"));
    for (const [name, names] of Object.entries(this.texts())) {
      if (new Set(names).size < 2 || names.length > MOST_WORDS) continue;
      columns.push([name, "text", name]);
      words[name] = names.map(printable);
      values[name] = take("writer");
    }
    const head = {
      total: this.length,
      matched: chosen.length,
      columns: columns.map(([name, kind, title]) => ({ name, kind, title })),
      texts: Object.fromEntries(Object.entries(words).map(([name, names]) => [name, { words: names, codes: name }])),
    };
    return pack(head, Object.entries(values).map(([name, array]) => [name, "<f8", [array.length], bytesOf(array)]));
  }

  histograms(where: string, search: string): Histograms {
    const chosen = this.selected(where, search, "");
    const counts = (codes: ArrayLike<number>, names: string[], keep: (i: number, total: number) => boolean): Names => {
      const [all, some] = [names.map(() => 0), names.map(() => 0)];
      for (let row = 0; row < this.length; row++) all[codes[row]!]!++;
      for (const row of chosen) some[codes[row]!]!++;
      const shown = names.map((_, i) => i).filter((i) => keep(i, all[i]!));
      return { names: shown.map((i) => names[i]!), counts: shown.map((i) => some[i]!) };
    };
    return {
      return: histogram(this.numbers.return!, chosen),
      length: histogram(this.numbers.steps!, chosen),
      outcome: counts(this.numbers.outcome!, OUTCOMES, (_, total) => total > 0),
      flag: counts(this.flags, ["none", ...FLAGS], (i, total) => total > 0 || i > 0),
      matched: chosen.length,
      total: this.length,
      terms: { return: "return", length: "steps", outcome: "outcome", flag: "flag" },
    };
  }
}

export const bytesOf = (array: Float64Array | Int32Array | Uint8Array): Bytes => new Uint8Array(array.buffer as ArrayBuffer, array.byteOffset, array.byteLength);

/** The names of --sort for those of the list. */
function namesOfSort(sort: string): string {
  const names: Record<string, string> = { episode: "index", length: "steps", environment: "writer" };
  return sort.split(",").map((part) => part.trim()).filter(Boolean).map((part) => {
    const name = part.replace(/^-/, "");
    return `${part.startsWith("-") ? "-" : ""}${names[name] ?? name}`;
  }).join(", ");
}

/** Bins of equal width over all values, with the counts of the chosen ones; for whole numbers the width is whole, too. */
function histogram(values: Float64Array, chosen: Int32Array): Bins {
  const good = values.filter(Number.isFinite);
  const some = Float64Array.from(chosen, (row) => values[row]!);
  const finite = some.filter(Number.isFinite);
  const nan = some.length - finite.length;
  const low = good.reduce((least, value) => Math.min(least, value), Infinity);
  const high = good.reduce((most, value) => Math.max(most, value), -Infinity);
  if (!good.length || !Number.isFinite(high - low)) return { edges: [], counts: [], nan, ends: null };
  if (low === high) return { edges: [low, low], counts: [finite.length], nan, ends: [low, high] };
  const whole = good.every((value) => Number.isSafeInteger(value));
  const width = whole ? Math.ceil((high - low + 1) / BINS) : (high - low) / BINS;
  const bins = whole ? Math.floor((high - low) / width) + 1 : BINS;
  const counts = new Array<number>(bins).fill(0);
  for (const value of finite) counts[Math.min(bins - 1, Math.floor((value - low) / width))]!++;
  return { edges: Array.from({ length: bins + 1 }, (_, i) => low + i * width), counts, nan, ends: [low, high] };
}

/** Open a trace by the indexes of its batches. */
export async function openTrace(number: number, { name, setting = number, url, files }: Listing, read: Read): Promise<Trace> {
  const batches = new Map<string, [number: number, file: string, size: number][]>();
  let unread = 0;
  for (const [file, size] of files) {
    const match = BATCH.exec(file);
    if (match) batches.set(match[1]!, [...(batches.get(match[1]!) ?? []), [Number(match[2]), file, size]]);
    else if (/\.(ring|gtb\.part)$/.test(file)) unread++;
  }
  const damage: string[] = [];
  const orNull = async <T>(file: string, open: Promise<T>): Promise<T | null> => {
    try {
      return await open;
    } catch (error) {
      if (error instanceof Refusal) throw error;
      damage.push(`${file}: ${error instanceof Damaged ? `damaged: ${error.message}` : (error as Error).message}`);
      return null;
    }
  };
  const writers = await Promise.all([...batches.values()].map(async (found) => {
    found.sort(([a], [b]) => a - b);
    const at = (file: string): string => new URL(file, url).href;
    const firstSchema = async (): Promise<Metadata | null> => {
      for (const [, file, size] of found) {
        const schema = await orNull(file, openSchema(at(file), size, read));
        if (schema) return schema;
      }
      return null;
    };
    const [schema, ...opened] = await Promise.all([
      firstSchema(),
      ...found.map(([, file, size]) => orNull(file, openBatch(at(file), size, read))),
    ] as const);
    const good = opened.filter((batch) => batch !== null);
    return schema && good.length ? new WriterFiles(schema, good, read).writers() : [];
  }));
  const notes = unread ? [`${unread} unfinished file${unread === 1 ? " is" : "s are"} not read here: 'gym-trace edit repair' puts the steps of writers that were killed into batches.`] : [];
  return new Trace(number, setting, name, writers.flat(), await factsOf(files, url, read), damage, notes);
}

async function factsOf(files: Listing["files"], url: string, read: Read): Promise<{ [key: string]: unknown }> {
  const size = files.find(([file]) => file === "facts.json")?.[1] ?? 0;
  if (!size || size > MOST_FACTS) return {};
  try {
    const facts: unknown = JSON.parse(new TextDecoder().decode(await read(`${url}facts.json`, 0, size)));
    return facts && typeof facts === "object" ? { ...facts } : {};
  } catch (error) {
    if (error instanceof Refusal) throw error;
    return {};
  }
}
