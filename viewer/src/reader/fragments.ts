// The fragment table of chunks, and the writers whose episodes are in one file (docs/FORMAT.md, section 4).

import { u32, u64, viewOf, type Bytes } from "./bytes.ts";
import { frameSize, inflate } from "./columns.ts";
import { demand } from "./framing.ts";
import { unpackMetadata, type Metadata } from "./values.ts";

export const STARTS = 1, HAS_INITIAL = 2, TERMINATED = 4, TRUNCATED = 8, STOPS = 16, ENDS = 32, PLACEHOLDER = 64;
export const FRAGMENT = 80; // bytes of a row
export const ID_RANGE = 2 ** 40; // of episode ids of an origin
export const OUTCOMES = ["lost", "terminated", "truncated", "cut", "closed", "running"];
const MOST_ORIGINS = 2 ** 24; // bytes

export interface Fragment {
  episode: number;
  firstStep: number;
  steps: number;
  lane: number;
  flags: number;
  outcome: number;
  reward: number;
  seed: bigint;
  start: bigint;
  offset: bigint;
  duration: bigint;
  drift: bigint;
}

/** Read the row at an offset of the bytes of a table. */
export function readFragment(table: Bytes, at = 0): Fragment {
  const view = viewOf(table);
  const i64 = (offset: number): bigint => view.getBigInt64(at + offset, true);
  return {
    episode: u64(table, at), firstStep: u64(table, at + 8), steps: u32(table, at + 16), lane: u32(table, at + 20),
    flags: u32(table, at + 24), outcome: u32(table, at + 28), reward: view.getFloat64(at + 32, true),
    seed: i64(40), start: i64(48), offset: i64(56), duration: i64(64), drift: i64(72),
  };
}

export const observationRows = ({ steps, flags }: { steps: number; flags: number }): number => steps + (flags & HAS_INITIAL ? 1 : 0);

/** The schemas of the origins that a schema tells of; null if it tells of none. It is binary in a batch, base64 in a manifest. */
export function originsOf(schema: Metadata): (Metadata | null)[] | null {
  if (schema.origins === undefined) return null;
  const packed: Bytes = typeof schema.origins === "string" ? Uint8Array.from(atob(schema.origins), (c) => c.charCodeAt(0)) : schema.origins;
  const size = frameSize(packed);
  demand(size <= MOST_ORIGINS, "origins are too large");
  let known = schema;
  return (unpackMetadata(inflate(packed, size)) as (Metadata | null)[]).map((origin) => {
    if (origin === null) return null; // nothing of it is left
    known = { ...known, ...origin.schema };
    for (const key of origin.without ?? []) delete known[key];
    return { ...known, writer: origin.writer };
  });
}
