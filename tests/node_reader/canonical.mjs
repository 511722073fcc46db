// One canonical text for each value, so that readers in different languages can compare hashes. JavaScript cannot tell 1
// from 1.0, so numbers are told by their value.

import { reader } from "./reader.mjs";

export function canonical(value) {
  if (value === null || typeof value === "boolean" || typeof value === "string") return JSON.stringify(value);
  if (typeof value === "number" || typeof value === "bigint") return canonicalNumber(value);
  if (value instanceof Uint8Array) return `{"bytes":"${Buffer.from(value).toString("hex")}"}`;
  if (value instanceof reader.Extension) return `{"ext":${value.code},"value":${canonical(value.content)}}`;
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  const keyOf = (key) => (typeof key === "string" ? `text ${key}` : `value ${canonical(key)}`);
  return `{"map":[${[...value].map(([key, item]) => `[${JSON.stringify(keyOf(key))},${canonical(item)}]`).join(",")}]}`;
}

function canonicalNumber(value) {
  if (typeof value === "bigint" && BigInt(Number(value)) !== value) return `"#${value}"`;
  if (Number.isNaN(Number(value))) return '"#nan"';
  const bytes = Buffer.alloc(8);
  bytes.writeDoubleBE(Number(value));
  return `"#${bytes.toString("hex")}"`;
}
