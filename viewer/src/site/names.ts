// Names of the numbers of a column, and of the values of a discrete one, as gym_trace/tools/viewer/names.py finds them.

import type { ColumnFacts } from "../api.ts";
import { product, type Leaf, type Metadata } from "../reader/index.ts";
import { printable } from "./trace.ts";

const MOST_VALUES = 64, MOST_CHARACTERS = 200;

/** The key of the agents' own columns: with underscores where an agent has this name. */
export const isOfAgents = (key: unknown): boolean => /^agents_*$/.test(String(key));

/** Labels, one for each number of a row, or the values of a discrete column. given: the fact "names". leaf: of a space, if it is of one. */
export function namesOf(name: string, path: (string | number)[], shape: number[], leaf: Leaf | null, given: unknown, schema: Metadata): Pick<ColumnFacts, "labels" | "values"> {
  const { type, n, start = 0 } = leaf?.space ?? {};
  const isDiscrete = type === "Discrete" && n > 0 && n <= MOST_VALUES;
  const count = isDiscrete ? n : product(shape);
  const found = [...candidates(name, path, given, schema)].find((names) => Array.isArray(names) && names.length === count);
  const texts = found ? found.map((text: unknown) => printable(String(text)).slice(0, MOST_CHARACTERS)) : null;
  return isDiscrete ? { labels: null, values: { start, count, names: texts } } : { labels: texts, values: null };
}

function* candidates(name: string, path: (string | number)[], given: any, schema: Metadata): Generator<any> {
  yield given?.[name];
  yield schema.environment?.names?.[name];
  const feature = schema.recorder?.imported_from === undefined ? null : schema.metadata?.features?.[path.join("/")]?.names;
  if (feature) yield Array.isArray(feature) ? feature : Object.values(feature).flat();
  const agents = schema.environment?.agents?.names;
  if (!Array.isArray(agents) || !isOfAgents(path[1])) return;
  yield agents;
  yield ["–", ...agents]; // whose turn it is
}
