// How brushes become conditions of --where and are found again in the text.

import { exact } from "./words.ts";

const NUMBER = '-?[\\d.]+(?:e[+-]?\\d+)?|"\\d{4}-[-\\d]+T[\\d:.]+Z"'; // times are milliseconds since 1970
const escaped = (text: string): string => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");

const rangeTerm = (column: string): RegExp => new RegExp(`(?<![\\w.])(${NUMBER}) <= ${escaped(column)} <=? (${NUMBER})(?![\\w.])`, "i");
const nameTerm = (column: string): RegExp => new RegExp(`(?<![\\w.])${escaped(column)} (?:== ("(?:[^"\\\\]|\\\\.)*")|is None(?!\\w))`);

/** The bar of the episodes without a name. */
export const NONE = "none";

/** Round a range to two digits more than the width of a bin has; a range to the first or last edge still holds it. */
export function readable([low, high]: [number, number], edges: number[]): [number, number] {
  const width = (edges[1] ?? 0) - (edges[0] ?? 0);
  const digits = width > 0 ? Math.max(0, Math.min(100, 2 - Math.floor(Math.log10(width)))) : 100;
  const unit = 10 ** -digits;
  const rounded = (value: number, by: number): number => {
    const near = Number(value.toFixed(digits));
    return by * (near - value) < 0 ? Number((near + by * unit).toFixed(digits)) : near;
  };
  return [rounded(low, low === edges[0] ? -1 : 0), rounded(high, high === edges[edges.length - 1] ? 1 : 0)];
}

const numberOf = (text: string): number => (text.startsWith('"') ? Date.parse(text.slice(1, -1)) : Number(text));
const written = (column: string, value: number): string => (column === "end_time" ? `"${new Date(value).toISOString()}"` : exact(value));

/** The range of a column that the condition asks for, if it was made by a brush. */
export function brushed(where: string, column: string): [number, number] | null {
  const found = rangeTerm(column).exec(where);
  return found ? [numberOf(found[1]!), numberOf(found[2]!)] : null;
}

export function chosenName(where: string, column: string): string | null {
  const found = nameTerm(column).exec(where);
  if (!found) return null;
  return found[1] === undefined ? NONE : (JSON.parse(found[1]) as string);
}

/** Put the range of a column into a condition, in place of the one before; null takes it out. */
export function withRange(where: string, column: string, range: [number, number] | null, closed: boolean): string {
  const term = range && `${written(column, range[0])} <= ${column} ${closed ? "<=" : "<"} ${written(column, range[1])}`;
  return replaced(where, rangeTerm(column), term);
}

export function withName(where: string, column: string, name: string | null): string {
  return replaced(where, nameTerm(column), name === null ? null : name === NONE ? `${column} is None` : `${column} == ${JSON.stringify(name)}`);
}

function replaced(where: string, old: RegExp, term: string | null): string {
  if (old.test(where)) {
    if (term !== null) return where.replace(old, () => term);
    const bare = new RegExp(` and ${old.source}|${old.source} and |${old.source}`, old.flags);
    return where.replace(bare, "").trim();
  }
  if (term === null) return where;
  const rest = where.trim();
  if (!rest) return term;
  return `${/\bor\b/.test(rest) ? `(${rest})` : rest} and ${term}`;
}
