// The fragment table of chunks, and the writers whose episodes are in one file (docs/FORMAT.md, section 4).

import { type Bytes } from "./bytes.ts";
import { frameSize, inflate } from "./columns.ts";
import { demand } from "./framing.ts";
import { unpackMetadata, type Metadata } from "./values.ts";

export const STARTS = 1, HAS_INITIAL = 2, TERMINATED = 4, TRUNCATED = 8, STOPS = 16, ENDS = 32, PLACEHOLDER = 64;
export const FRAGMENT = 80; // bytes of a row
export const ID_RANGE = 2 ** 40; // of episode ids of an origin
export const OUTCOMES = ["lost", "terminated", "truncated", "cut", "closed", "running"];
const MOST_ORIGINS = 2 ** 24; // bytes

/** A row of a fragment table, at an offset of its bytes; a field is decoded when it is read. */
export class Fragment {
  constructor(private readonly view: DataView, private readonly at = 0) {}

  get episode(): number { return Number(this.view.getBigUint64(this.at, true)); }
  get firstStep(): number { return Number(this.view.getBigUint64(this.at + 8, true)); }
  get steps(): number { return this.view.getUint32(this.at + 16, true); }
  get lane(): number { return this.view.getUint32(this.at + 20, true); }
  get flags(): number { return this.view.getUint32(this.at + 24, true); }
  get outcome(): number { return this.view.getUint32(this.at + 28, true); }
  get reward(): number { return this.view.getFloat64(this.at + 32, true); }
  get seed(): bigint { return this.view.getBigInt64(this.at + 40, true); }
  get start(): bigint { return this.view.getBigInt64(this.at + 48, true); }
  get offset(): bigint { return this.view.getBigInt64(this.at + 56, true); }
  get duration(): bigint { return this.view.getBigInt64(this.at + 64, true); }
  get drift(): bigint { return this.view.getBigInt64(this.at + 72, true); }
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
