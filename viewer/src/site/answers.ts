// Answers to the requests of the page, as the server of gym-trace view gives them, from the files of a static host.

import type { Difference } from "../api.ts";
import { asTyped, elementSize, equal, ready, type Bytes, type Typed, type Value } from "../reader/index.ts";
import { itemName } from "../words.ts";
import { Episode } from "./episode.ts";
import { Refusal, type Listing, type Read } from "./files.ts";
import { numbersOf, toJson, typedJson } from "./json.ts";
import { learning } from "./learning.ts";
import { openTrace, type Trace } from "./trace.ts";

const KEPT_EPISODES = 8;

export class Answers {
  private readonly episodes = new Map<string, Episode>();

  private constructor(private readonly traces: Trace[]) {}

  static async open(listings: Listing[], read: Read): Promise<Answers> {
    await ready;
    return new Answers(await Promise.all(listings.map((listing, number) => openTrace(number, listing, read))));
  }

  /** Answer a request such as "/api/episode?trace=0&episode=7". Throws Refusal. */
  async get(request: string, signal?: AbortSignal): Promise<Bytes> {
    const url = new URL(request, "http://site");
    const query = url.searchParams;
    const text = (name: string): string => query.get(name) ?? "";
    const number = (name: string, otherwise?: number): number => {
      const value = query.get(name);
      if (value === null && otherwise !== undefined) return otherwise;
      if (value === null || !/^-?\d{1,16}$/.test(value)) throw new Refusal(400, `${name}: pass a whole number`);
      return Number(value);
    };
    const trace = (): Trace => this.trace(number("trace", 0));
    const episode = (): Episode => this.episode(number("trace", 0), number("episode"));
    const named = (name: string): Episode => {
      const numbers = pair(query.get(name));
      if (!numbers) throw new Refusal(400, `${name}: pass TRACE:EPISODE, such as 0:7`);
      return this.episode(...numbers);
    };
    switch (url.pathname) {
      case "/api/traces": return json(this.traces.map((one) => one.about()));
      case "/api/episodes": return trace().episodes(text("where"), text("search"), text("sort"), number("offset", 0), number("limit", 200));
      case "/api/histograms": return json(trace().histograms(text("where"), text("search")));
      case "/api/learning": return learning(trace(), trace().selected(text("where"), text("search"), ""));
      case "/api/episode": return json(await episode().about());
      case "/api/plot": {
        const minus = query.has("minus") ? named("minus") : null;
        return episode().plot(text("column"), number("from", 0), number("to", Number.MAX_SAFE_INTEGER), number("pixels", 1200), pair(query.get("items")), minus);
      }
      case "/api/frames": return episode().frames(text("column"), number("from", 0), number("count", 16), signal);
      case "/api/steps": return json(await episode().steps(number("from", 0), number("count", 32)));
      case "/api/compare": return json(await firstDifference(named("a"), named("b")));
    }
    throw new Refusal(404, "A page without a server cannot do this.", "'gym-trace view' on a machine can.");
  }

  private trace(number: number): Trace {
    const trace = this.traces[number];
    if (!trace) throw new Refusal(404, `no trace ${number}; there are ${this.traces.length}`);
    return trace;
  }

  private episode(trace: number, number: number): Episode {
    const key = `${trace}:${number}`;
    const episode = this.episodes.get(key) ?? new Episode(this.trace(trace), number);
    this.episodes.delete(key);
    this.episodes.set(key, episode);
    if (this.episodes.size > KEPT_EPISODES) this.episodes.delete(this.episodes.keys().next().value!);
    return episode;
  }
}

const json = (value: unknown): Bytes => new TextEncoder().encode(JSON.stringify(value));

function pair(value: string | null): [number, number] | null {
  if (value === null) return null;
  const match = /^(\d{1,9}):(\d{1,9})$/.exec(value);
  if (!match) throw new Refusal(400, `${value.slice(0, 40)}: pass A:B, such as 0:16`);
  return [Number(match[1]), Number(match[2])];
}

/** The first position at which the values of two episodes differ; an observation belongs to the position after its step. */
async function firstDifference(a: Episode, b: Episode): Promise<Difference> {
  let found: Difference = { same: true, step: null, column: null, a: null, b: null, note: null };
  const others = new Set(b.compared.map((path) => path.join("/")));
  for (const path of a.compared) {
    if (!others.has(path.join("/"))) continue;
    const [left, right] = [a.rowsOf(path), b.rowsOf(path)];
    for (let at = 0; found.step === null || at < found.step; at++) {
      const [x, y] = await Promise.all([left.next(), right.next()]);
      if (x.done && y.done) break;
      if (!x.done && !y.done && equal(x.value.bytes, y.value.bytes)) continue;
      found = { same: false, step: at, ...described(path.join("/"), x.done ? null : x.value.value(), y.done ? null : y.value.value()) };
    }
  }
  return found;
}

/** Two values of a column that differ; of arrays, the first item that does. null: the episode has ended. */
function described(column: string, a: Value, b: Value): Pick<Difference, "column" | "a" | "b" | "note"> {
  const [left, right] = [asTyped(a), asTyped(b)];
  const numbers = left && right && left.shape.join() === right.shape.join() ? ([numbersOf(left), numbersOf(right)] as const) : null;
  if (left && numbers && numbers[0] && numbers[1]) {
    const [x, y] = numbers as [Float64Array, Float64Array];
    const differs = (i: number): boolean => !Object.is(x[i], y[i]);
    const at = x.findIndex((_, i) => differs(i));
    const largest = x.reduce((most, value, i) => Math.max(most, Math.abs(value - y[i]!) || 0), 0);
    const part = (typed: Typed): string => {
      const width = elementSize(typed.dtype.replace(">", "<"));
      return JSON.stringify(typedJson({ dtype: typed.dtype, shape: [], bytes: typed.bytes.subarray(at * width, (at + 1) * width) }));
    };
    const name = left.shape.length ? `${column}${itemName(at, left.shape)}` : column;
    if (at >= 0) return { column: name, a: part(left), b: part(right!), note: largest > 0 ? `largest difference ${Number(largest.toPrecision(3))}` : null };
  }
  const text = (value: Value): string => (value === null ? "the episode has ended" : JSON.stringify(toJson(value)));
  return { column, a: text(a), b: text(b), note: null };
}
