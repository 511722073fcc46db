// A writer of a trace: its batches by their indexes, its episodes, and the columns of its chunks.

import { align, crc32, type Bytes, Damaged, decodeColumn, demand, ENDS, extentOf, FRAGMENT, fileHeader, footerOf, HAS_INITIAL, HEADER, ID_RANGE, INDEX, CHUNK, SCHEMA,
  blobsOf, nameOf, observationRows, originsOf, PLACEHOLDER, readColumns, recordAt, runOf, STARTS, TERMINATED, TRUNCATED, u16, u32, u64, unpackMetadata,
  viewOf, type Column, type Descriptor, Fragment, type Metadata } from "../reader/index.ts";
import type { Read } from "./files.ts";

const HEAD = 16 << 10; // bytes read first of a batch: its header and its schema
const CHUNK_HEAD = 4 << 10; // bytes read first of a large chunk; a small one is read at once
const SMALL_CHUNK = 128 << 10;
const KEPT_COLUMNS = 96 << 20; // bytes of decoded columns
const KEPT_HEADS = 1024;
const MOST_TABLE = 1 << 20; // rows

interface ChunkHead {
  blobs: Map<string, { descriptor: Descriptor; begin: number; end: number }>; // offsets in the file
  known: Bytes; // the first bytes of the record
}

/** Values by key, the last used last, limited by their sum of sizes. */
class Recent<T> {
  private readonly values = new Map<string, { value: Promise<T>; size: number }>();
  private total = 0;

  constructor(private readonly most: number, private readonly sizeOf: (value: T) => number) {}

  get(key: string, make: () => Promise<T>): Promise<T> {
    const known = this.values.get(key);
    if (known) {
      this.values.delete(key);
      this.values.set(key, known);
      return known.value;
    }
    const entry = { value: make(), size: 0 };
    this.values.set(key, entry);
    entry.value.then((value) => {
      entry.size = this.sizeOf(value);
      this.total += entry.size;
      for (const [old, { size }] of this.values) {
        if (this.total <= this.most) break;
        this.total -= size;
        this.values.delete(old);
      }
    }, () => this.values.delete(key));
    return entry.value;
  }
}

const columns = new Recent<Column>(KEPT_COLUMNS, ({ bytes }) => bytes.length);
const heads = new Recent<ChunkHead>(KEPT_HEADS, () => 1);

/** A batch file: what its index says. */
interface Batch {
  url: string;
  fileId: Bytes;
  fragments: Bytes;
  chunks: Bytes;
  paths: string[][];
}

/** Read the schema of a batch; all batches of a writer have the same one. */
export async function openSchema(url: string, size: number, read: Read): Promise<Metadata> {
  const head = await read(url, 0, Math.min(size, HEAD));
  const header = fileHeader(head);
  demand(header !== null, "the header of the file");
  const schema = recordAt(head, HEADER, header!.subarray(16, 32));
  demand(schema !== null && u16(schema, 8) === SCHEMA, "the schema");
  const end = 2 * HEADER + u32(schema!, 12);
  demand(end <= size, "the schema");
  return metadataAt(end > head.length ? await read(url, 0, end) : head, HEADER, schema!);
}

/** Open a sealed batch by its footer and its index. */
export async function openBatch(url: string, size: number, read: Read): Promise<Batch> {
  demand(size > 3 * HEADER, "the file is too short");
  const end = await read(url, size - HEADER, size);
  const fileId = end.subarray(24, 40);
  const footer = footerOf(end, fileId, size);
  demand(footer !== null, "the file has no footer");
  const [indexAt, parityAt] = [u64(footer!, 8), u64(footer!, 40)];
  const until = parityAt > indexAt ? parityAt : size - HEADER;
  demand(indexAt >= HEADER && indexAt < until && until < size, "offset of the index");
  const index = await read(url, indexAt, until);
  const head = recordAt(index, 0, fileId, indexAt);
  demand(head !== null && u16(head, 8) === INDEX, "the index");
  const metadata = metadataAt(index, 0, head!);
  const { body, end: indexEnd } = extentOf(head!);
  const found = readColumns(metadata, index.subarray(body - indexAt, indexEnd - indexAt));
  const [fragments, chunks] = [found.get("fragments"), found.get("chunks")];
  demand(fragments !== undefined && chunks !== undefined, "the index");
  const paths = ((metadata.totals ?? []) as [string[]][]).map(([path]) => path);
  return { url, fileId, fragments: table(fragments!), chunks: table(chunks!), paths };
}

/** The bytes of all rows, also of equal ones. */
function table({ bytes, count, row }: Column): Bytes {
  demand(count <= MOST_TABLE, "the index is too large");
  if (!count || bytes.length === count * row(0).length) return bytes;
  const out = new Uint8Array(count * bytes.length);
  for (let i = 0; i < count; i++) out.set(bytes, i * bytes.length);
  return out;
}

function metadataAt(bytes: Bytes, at: number, head: Bytes): Metadata {
  const packed = bytes.subarray(at + HEADER, at + HEADER + u32(head, 12));
  demand(crc32(packed) === u32(head, 56), "metadata of a record");
  return unpackMetadata(packed);
}

/** Rows of a column of an episode that lie in one chunk: rows `begin` to `begin + count` of what is decoded. `column` is null where the chunk has none. */
export interface Part {
  start: number;
  count: number;
  begin: number;
  column: Column | null;
}

/** The parts of episodes of a writer, in the order of the table. */
export class Writer {
  readonly paths: string[][];
  readonly fragmentsOf: Int32Array; // those of row i are [first[i], first[i + 1])
  readonly first: Int32Array;
  private readonly starts = new Map<number, number>(); // by episode, the first fragment with the flag
  private readonly ends = new Map<number, number>();

  constructor(readonly schema: Metadata, private readonly files: WriterFiles, begin: number, end: number) {
    this.paths = files.paths;
    const { view } = files;
    const flags = (f: number): number => view.getUint32(f * FRAGMENT + 24, true);
    const steps = (f: number): number => view.getUint32(f * FRAGMENT + 16, true);
    const episode = (f: number): number => Number(view.getBigUint64(f * FRAGMENT, true));
    const firstStep = (f: number): number => Number(view.getBigUint64(f * FRAGMENT + 8, true));
    for (let f = begin; f < end; f++) {
      if (flags(f) & STARTS && !this.starts.has(episode(f))) this.starts.set(episode(f), f);
      if (flags(f) & ENDS && !this.ends.has(episode(f))) this.ends.set(episode(f), f);
    }
    const dropped = schema.recorder?.keep_bytes !== undefined; // what began in a dropped batch is gone
    const carrying: number[] = [];
    let isInOrder = true;
    for (let f = begin; f < end; f++) {
      if ((flags(f) & HAS_INITIAL || steps(f)) && !(dropped && !this.starts.has(episode(f)))) carrying.push(f);
    }
    for (let i = 1; i < carrying.length && isInOrder; i++) isInOrder = episode(carrying[i - 1]!) <= episode(carrying[i]!);
    if (!isInOrder) carrying.sort((a, b) => episode(a) - episode(b) || a - b);
    const runs: number[][] = [];
    carrying.forEach((f, i) => {
      const before = carrying[i - 1];
      const opens = before === undefined || flags(f) & HAS_INITIAL || episode(before) !== episode(f) || firstStep(before) + steps(before) !== firstStep(f);
      if (opens) runs.push([f]);
      else runs.at(-1)!.push(f);
    });
    if (!isInOrder) runs.sort((a, b) => a.at(-1)! - b.at(-1)!); // a part comes where its last fragment lies
    this.fragmentsOf = Int32Array.from(runs.flat());
    this.first = new Int32Array(runs.length + 1);
    runs.forEach((run, i) => (this.first[i + 1] = this.first[i]! + run.length));
  }

  get length(): number {
    return this.first.length - 1;
  }

  get id(): string {
    return String(this.schema.writer);
  }

  fragments(row: number): Fragment[] {
    return Array.from(this.fragmentsOf.subarray(this.first[row], this.first[row + 1]), (f) => this.files.fragment(f));
  }

  /** The fragments with the start and with the end of an episode, where they are known. */
  edges(episode: number): { start: Fragment | null; end: Fragment | null } {
    const at = (f: number | undefined): Fragment | null => (f === undefined ? null : this.files.fragment(f));
    return { start: at(this.starts.get(episode)), end: at(this.ends.get(episode)) };
  }

  /** Whether the observation before the first step is lost: then that step is left out. */
  isTrimmed(row: number): boolean {
    return !(this.files.fragment(this.fragmentsOf[this.first[row]!]!).flags & HAS_INITIAL);
  }

  /** The row of `starts` of an episode: its chunk and its number in there. */
  startOf(episode: number): { chunk: number; row: number } | null {
    const f = this.starts.get(episode);
    return f === undefined ? null : this.files.startRow(f);
  }

  /** Return the rows [start, stop) of a column, chunk by chunk; without their columns, and the rows of their fragment. */
  *places(row: number, observed: boolean, start: number, stop: number): Generator<Part & { chunk: number; fragment: [begin: number, end: number] }> {
    let at = 0;
    let skip = !observed && this.isTrimmed(row) ? 1 : 0;
    for (let k = this.first[row]!; k < this.first[row + 1]! && at < stop; k++) {
      const f = this.fragmentsOf[k]!;
      const fragment = this.files.fragment(f);
      const [first, own] = [this.files.offset(f, observed), observed ? observationRows(fragment) : fragment.steps];
      const rows = own - skip;
      const [from, to] = [Math.max(start, at), Math.min(stop, at + rows)];
      if (from < to) yield { start: from, count: to - from, begin: first + skip + from - at, column: null, chunk: this.files.chunkOf(f), fragment: [first, first + own] };
      at += rows;
      skip = 0;
    }
  }

  /** Yield rows [start, stop) of a column; for those that cannot be read, the error. All chunks are fetched at the same time. */
  async *parts(row: number, path: string[], start: number, stop: number, signal?: AbortSignal): AsyncGenerator<Part | { start: number; count: number; error: Damaged }> {
    const found = [...this.places(row, path[0] === "observations", start, stop)].map((place) => {
      const column = this.files.column(place.chunk, nameOf(path), place.fragment, signal);
      column.catch(() => {}); // it is awaited below
      return { ...place, column };
    });
    for (const { column, ...place } of found) {
      try {
        const known = await column;
        demand(known !== null || ["annotations", "infos"].includes(path[0]!), `a chunk lacks the column ${nameOf(path)}`);
        const begin = place.begin - (known?.first ?? 0);
        demand(known === null || begin + place.count <= known.count, `rows of column ${nameOf(path)}`);
        yield { ...place, begin, column: known };
      } catch (error) {
        if (!(error instanceof Damaged || error instanceof RangeError)) throw error;
        yield { start: place.start, count: place.count, error: new Damaged(error.message) };
      }
    }
  }

  /** The flag of each step of [start, stop). */
  flags(row: number, name: string, start: number, stop: number): Uint8Array {
    const flag = name === "terminated" ? TERMINATED : TRUNCATED;
    const found = new Uint8Array(Math.max(0, stop - start));
    let at = this.isTrimmed(row) ? -1 : 0;
    for (const { steps, flags } of this.fragments(row)) {
      at += steps;
      if (flags & flag && at - 1 >= start && at - 1 < stop) found[at - 1 - start] = 1;
    }
    return found;
  }

  column(chunk: number, name: string): Promise<Column | null> {
    return this.files.column(chunk, name);
  }

  hasFinal(row: number): boolean {
    return !(this.files.fragment(this.fragmentsOf[this.first[row + 1]! - 1]!).flags & PLACEHOLDER);
  }
}

/** The batches of one writer, or of several whose episodes are in the same files. */
export class WriterFiles {
  readonly paths: string[][];
  readonly view: DataView;
  private readonly table: Bytes;
  private readonly places: { batch: Batch; offset: number; length: number; begin: number; end: number }[] = []; // chunks, and their fragments
  private readonly before: [steps: Int32Array, observations: Int32Array]; // rows of its chunk before those of a fragment

  constructor(private readonly schema: Metadata, batches: Batch[], private readonly read: Read) {
    this.table = new Uint8Array(batches.reduce((sum, { fragments }) => sum + fragments.length, 0));
    this.view = viewOf(this.table);
    let [at, fragment] = [0, 0];
    for (const batch of batches) {
      this.table.set(batch.fragments, at);
      at += batch.fragments.length;
      for (let c = 0; c < batch.chunks.length; c += 32) {
        const [offset, length, fragments] = [0, 8, 16].map((by) => u64(batch.chunks, c + by)) as [number, number, number];
        this.places.push({ batch, offset, length, begin: fragment, end: (fragment += fragments) });
      }
      demand(fragment === at / FRAGMENT, "fragments of the index");
    }
    this.before = [new Int32Array(fragment), new Int32Array(fragment)];
    for (const { begin, end } of this.places) {
      for (let f = begin, steps = 0, observations = 0; f < end; f++) {
        this.before[0][f] = steps;
        this.before[1][f] = observations;
        const own = { steps: this.view.getUint32(f * FRAGMENT + 16, true), flags: this.view.getUint32(f * FRAGMENT + 24, true) };
        steps += own.steps;
        observations += observationRows(own);
      }
    }
    this.paths = [...new Map(batches.flatMap(({ paths }) => paths.map((path) => [nameOf(path), path] as const))).values()];
  }

  /** The writers with their episodes. */
  writers(): Writer[] {
    const { schema } = this;
    const count = this.table.length / FRAGMENT;
    const origins = originsOf(schema);
    if (origins === null) return [new Writer(schema, this, 0, count)];
    const found: Writer[] = [];
    for (let begin = 0, number = 0; number < origins.length; number++) {
      let end = begin;
      while (end < count && Math.floor(u64(this.table, end * FRAGMENT) / ID_RANGE) === number) end++;
      const origin = origins[number];
      if (origin) found.push(new Writer(origin, this, begin, end));
      begin = end;
    }
    return found;
  }

  fragment(f: number): Fragment {
    return new Fragment(this.view, f * FRAGMENT);
  }

  offset(f: number, observed: boolean): number {
    return this.before[observed ? 1 : 0][f]!;
  }

  chunkOf(f: number): number {
    let [low, high] = [0, this.places.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.places[middle]!.end <= f) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  startRow(f: number): { chunk: number; row: number } {
    const chunk = this.chunkOf(f);
    let row = 0;
    for (let other = this.places[chunk]!.begin; other < f; other++) row += this.view.getUint32(other * FRAGMENT + 24, true) & STARTS;
    return { chunk, row };
  }

  /** Read a column of a chunk, if it is in blocks those with rows [from, to); null if it has none of this name. Throws Damaged. */
  async column(chunk: number, name: string, [from, to]: [from?: number, to?: number] = [], signal?: AbortSignal): Promise<Column | null> {
    const place = this.places[chunk]!;
    const { url } = place.batch;
    const { blobs, known } = await heads.get(`${url}\0${place.offset}`, () => this.head(place));
    const blob = blobs.get(name);
    if (!blob) return null;
    const run = runOf(blob.descriptor, from, to);
    const [begin, end] = [blob.begin + run.begin, blob.begin + run.end];
    const read = (): Promise<Column> => columns.get(`${url}\0${name}\0${begin}\0${end}`, async () => {
      const isKnown = end <= place.offset + known.length;
      return decodeColumn(isKnown ? known.subarray(begin - place.offset, end - place.offset) : await this.read(url, begin, end, signal), blob.descriptor, run);
    });
    for (;;) {
      try {
        return await read();
      } catch (error) {
        if (signal?.aborted || (error as Error).name !== "AbortError") throw error; // another reader has aborted: read it again
      }
    }
  }

  private async head({ batch, offset, length }: { batch: Batch; offset: number; length: number }): Promise<ChunkHead> {
    let known = await this.read(batch.url, offset, offset + (length <= SMALL_CHUNK ? length : CHUNK_HEAD));
    const head = recordAt(known, 0, batch.fileId, offset);
    demand(head !== null && u16(head, 8) === CHUNK, "the header of a chunk");
    const { body, end } = extentOf(head!);
    demand(end - offset <= align(length), "the length of a chunk");
    if (body - offset > known.length) known = await this.read(batch.url, offset, body);
    const blobs = [...blobsOf(metadataAt(known, 0, head!))].map(({ descriptor, begin, end }) =>
      [nameOf(descriptor[0]), { descriptor, begin: body + begin, end: body + end }] as const);
    demand(blobs.every(([, blob]) => blob.end <= end), "the columns of a chunk");
    return { blobs: new Map(blobs), known };
  }
}
