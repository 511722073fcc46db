// Recorded values as JSON for a person to read, as gym_trace/tools/viewer/values.py makes it.

import type { Json } from "../api.ts";
import { doubles } from "../container.ts";
import { asTyped, elementSize, COMPLEX, Extension, MEMBER, MISFIT, OBJECTS, product, TUPLE, UNSTORED, viewOf, type Typed, type Value } from "../reader/index.ts";

export const MOST_NUMBERS = 64; // of a listed array
const MOST_ITEMS = 256, DEEPEST = 16, MOST_CHARACTERS = 4096;
const KINDS: Record<string, string> = { b: "bool", i: "int", u: "uint", f: "float", c: "complex" };

/** "float32" for "<f4". */
export const dtypeName = (dtype: string): string => {
  const kind = KINDS[dtype[1] ?? ""];
  return kind === undefined ? dtype : kind === "bool" ? kind : `${kind}${8 * Number(dtype.slice(2))}`;
};

/** The text that stands for an array that is too large to be listed. */
export const arrayText = (dtype: string, shape: number[]): string => `${dtypeName(dtype)} array (${shape.join(", ")}${shape.length === 1 ? "," : ""})`;

/** Whether rows of a dtype are numbers that a plot can show. */
export const isNumeric = (dtype: string): boolean => /^[<|][biuf][1248]$/.test(dtype);

/** Numbers of an array, also of a big-endian one; null if they are no numbers. */
export function numbersOf({ dtype, bytes }: Typed): Float64Array | null {
  if (isNumeric(dtype)) return doubles({ dtype, bytes });
  if (!/^>[iuf][248]$/.test(dtype)) return null;
  const width = elementSize(`<${dtype.slice(1)}`);
  const turned = bytes.slice();
  for (let i = 0; i < turned.length; i += width) turned.subarray(i, i + width).reverse();
  return doubles({ dtype: `<${dtype.slice(1)}`, bytes: turned });
}

/** A single number; NaN for anything else. */
export function numberOf(value: Value | undefined): number {
  if (typeof value === "number" || typeof value === "bigint" || typeof value === "boolean") return Number(value);
  const typed = asTyped(value);
  return (typed && !typed.shape.length ? numbersOf(typed)?.[0] : null) ?? NaN;
}

/** Whether numberOf() finds a number, which may be NaN. */
export function isNumber(value: Value | undefined): boolean {
  const typed = asTyped(value);
  return typed ? !typed.shape.length && numbersOf(typed) !== null : ["number", "bigint", "boolean"].includes(typeof value);
}

export function toJson(value: Value, depth = 0): Json {
  if (value === null || typeof value === "boolean") return value;
  if (typeof value === "number") return plainNumber(value);
  if (typeof value === "bigint") return String(value);
  if (typeof value === "string") return cut(value);
  if (value instanceof Uint8Array) return `${value.length} bytes`;
  if (value instanceof Extension) return extension(value, depth);
  if (depth >= DEEPEST) return "…";
  if (Array.isArray(value)) return [...value.slice(0, MOST_ITEMS).map((item) => toJson(item, depth + 1)), ...(value.length > MOST_ITEMS ? ["…"] : [])];
  const listed: { [key: string]: Json } = Object.create(null);
  for (const [key, item] of [...value].slice(0, MOST_ITEMS)) listed[cut(keyText(key))] = toJson(item, depth + 1);
  if (value.size > MOST_ITEMS) listed["…"] = `${value.size} entries`;
  return listed;
}

const keyText = (key: Value): string => (typeof key === "object" && key !== null ? JSON.stringify(toJson(key)) : String(key));
const cut = (text: string): string => (text.length <= MOST_CHARACTERS ? text : `${text.slice(0, MOST_CHARACTERS)}…`);
const plainNumber = (value: number): Json => (Number.isFinite(value) ? value : String(value));

function extension(value: Extension, depth: number): Json {
  const typed = asTyped(value);
  if (typed) return typedJson(typed);
  const { code, content } = value;
  if (code === TUPLE) return toJson(content, depth);
  if (code === MISFIT) return toJson(content, depth + 1);
  if (code === COMPLEX && content instanceof Uint8Array && content.length === 16) return `(${viewOf(content).getFloat64(0, true)}+${viewOf(content).getFloat64(8, true)}j)`.replace("+-", "-");
  if ((code === UNSTORED || code === MEMBER) && Array.isArray(content)) return content.map((part) => (typeof part === "string" ? part : JSON.stringify(toJson(part)))).join(": ").slice(0, 1000);
  if (code === OBJECTS && Array.isArray(content)) return toJson(content[1] ?? null, depth);
  return content === null ? null : toJson(content, depth + 1);
}

/** A typed row or array. */
export function typedJson(typed: Typed): Json {
  const { dtype, shape, bytes } = typed;
  if (product(shape) > MOST_NUMBERS) return arrayText(dtype, shape);
  if (/^[<|>=]?U/.test(dtype)) return nestedJson(shape, (i, width) => String.fromCodePoint(...new Uint32Array(bytes.slice(i * width, (i + 1) * width).buffer).filter((code) => code > 0 && code < 0x110000)), bytes.length);
  if (/^[<>][mM]8/.test(dtype)) return typedJson({ ...typed, dtype: `${dtype[0]}i8` }); // times as their count of units
  const integers = /^[<|>]([iu])8$/.exec(dtype);
  const numbers = numbersOf(typed);
  if (!numbers) return arrayText(dtype, shape);
  const view = viewOf(bytes);
  const one = (i: number): Json => {
    const number = numbers[i]!;
    if (dtype[1] === "b") return number !== 0;
    if (integers && !Number.isSafeInteger(number)) return String(integers[1] === "i" ? view.getBigInt64(8 * i, dtype[0] !== ">") : view.getBigUint64(8 * i, dtype[0] !== ">"));
    return plainNumber(dtype[1] === "f" && dtype[2] !== "8" ? shortest(number, dtype[2] === "4") : number);
  };
  return nestedJson(shape, one, 0);
}

/** Values in the nested lists of a shape. bytes: of all elements, whose width `one` gets. */
function nestedJson(shape: number[], one: (i: number, width: number) => Json, bytes: number): Json {
  const width = bytes / Math.max(1, product(shape));
  let at = 0;
  const list = (dimension: number): Json => (dimension === shape.length ? one(at++, width) : Array.from({ length: shape[dimension]! }, () => list(dimension + 1)));
  return list(0);
}

/** The double with the shortest text of those that a narrower float stands for. */
function shortest(value: number, isSingle: boolean): number {
  if (!Number.isFinite(value)) return value;
  for (let digits = isSingle ? 6 : 3; digits <= 9; digits++) {
    const near = Number(value.toPrecision(digits));
    if (isSingle ? Math.fround(near) === value : Math.abs(near - value) <= Math.abs(value) * 2 ** -12) return near;
  }
  return value;
}
