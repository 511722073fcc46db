// Batch files and their columns (docs/FORMAT.md, sections 2 and 3).

import { readFileSync } from "node:fs";
import { join } from "node:path";
import { crc32 } from "node:zlib";
import { decompress } from "fzstd";
import { CHUNK, FILE_MAGIC, FOOTER_MAGIC, HEADER, INDEX, SCHEMA, SYNC_MARK, align, extentOf, footerOf, headerAt, recordAt, u64 } from "./framing.mjs";
import { heal } from "./parity.mjs";
import { unpackMetadata } from "./values.mjs";

const LARGE_ROW = 4096;
const ZSTD = 1, SHUFFLE = 2, XOR = 4, CONSTANT = 8, CHANGES = 16;
const ORIGINS = 1; // a feature
export const STARTS = 1, HAS_INITIAL = 2, TERMINATED = 4, TRUNCATED = 8, ENDS = 32;

const product = (numbers) => numbers.reduce((a, b) => a * b, 1);
const total = (numbers) => numbers.reduce((a, b) => a + b, 0);

class Damaged extends Error {}

function demand(holds, problem) {
  if (!holds) throw new Damaged(problem);
}

// -- columns (3) ------------------------------------------------------------------------------------------------------

const elementSize = (dtype) => Number(/^[<|][biufcV](\d+)$/.exec(dtype)[1]);

function unshuffle(bytes, width) {
  const count = bytes.length / width;
  const out = Buffer.alloc(bytes.length);
  for (let i = 0; i < count; i++) for (let j = 0; j < width; j++) out[i * width + j] = bytes[j * count + i];
  return out;
}

function undoXor(bytes, rowSize) {
  for (let i = rowSize; i < bytes.length; i++) bytes[i] ^= bytes[i - rowSize];
}

function undoChanges(bytes, rowSize, rows) {
  const word = [8, 4, 2, 1].find((size) => rowSize % size === 0), wide = rowSize / word > 65536;
  const out = Buffer.alloc(rows * rowSize);
  let at = bytes.copy(out, 0, 0, rowSize);
  for (let row = 1; row < rows; ) {
    const n = bytes.readUInt32LE(at);
    const counts = Array.from({ length: n }, (_, i) => bytes.readUInt32LE(at + 4 + 4 * i));
    let words = at + 4 + 4 * n, gaps = words + word * total(counts);
    for (const count of counts) {
      const begin = row * rowSize;
      out.copy(out, begin, begin - rowSize, begin);
      for (let i = 0, place = 0; i < count; i++, words += word, gaps += wide ? 4 : 2) {
        place += wide ? bytes.readUInt32LE(gaps) : bytes.readUInt16LE(gaps);
        demand((place + 1) * word <= rowSize, "a change outside its row");
        bytes.copy(out, begin + place * word, words, words + word);
      }
      row++;
    }
    at = gaps;
  }
  demand(at === bytes.length, "size of changes");
  return out;
}

function decodeColumn(blob, [path, dtype, shape, rows, encoding, stored, raw, crc]) {
  if (encoding > 31) throw new Error(`encoding ${encoding} is not known`);
  demand(blob.length === stored && crc32(blob) === crc, `column ${path.join("/")}`);
  let bytes = Buffer.from(encoding & ZSTD ? decompress(blob) : blob);
  demand(bytes.length === raw, `size of column ${path.join("/")}`);
  const column = { path, dtype, shape, raw, stored, encoding };
  const kept = encoding & CONSTANT ? 1 : rows;
  if (dtype === "msgpack") {
    column.rows = encoding & CONSTANT ? [bytes] : splitValues(bytes, rows);
  } else {
    const width = elementSize(dtype), rowSize = width * product(shape);
    if (encoding & CHANGES) bytes = undoChanges(bytes, rowSize, rows);
    demand(bytes.length === kept * rowSize, `rows of column ${path.join("/")}`);
    if (encoding & SHUFFLE && rowSize < LARGE_ROW) bytes = unshuffle(bytes, width);
    else if (encoding & SHUFFLE) for (let at = 0; at < bytes.length; at += rowSize) unshuffle(bytes.subarray(at, at + rowSize), width).copy(bytes, at);
    if (encoding & XOR) undoXor(bytes, rowSize);
    column.rows = Array.from({ length: kept }, (_, i) => bytes.subarray(i * rowSize, (i + 1) * rowSize));
  }
  if (encoding & CONSTANT) column.rows = Array(rows).fill(column.rows[0]);
  return column;
}

function splitValues(bytes, rows) {
  let at = 4 * rows;
  const values = Array.from({ length: rows }, (_, i) => bytes.subarray(at, (at += bytes.readUInt32LE(4 * i))));
  demand(at === bytes.length, "lengths of values");
  return values;
}

/** The columns of a record by path, as text. */
function readColumns(metadata, body) {
  let at = 0;
  return new Map(metadata.columns.map((descriptor) => {
    const stored = descriptor[5];
    const column = decodeColumn(body.subarray(at, at + stored), descriptor);
    at = align(at + stored);
    return [column.path.join("/"), column];
  }));
}

// -- the fragment table of a chunk (4) -----------------------------------------------------------------------------------

function readFragment(row) {
  const [seed, start, offset, duration, drift] = [40, 48, 56, 64, 72].map((at) => row.readBigInt64LE(at));
  return {
    episode: u64(row, 0), firstStep: u64(row, 8), steps: row.readUInt32LE(16), lane: row.readUInt32LE(20),
    flags: row.readUInt32LE(24), outcome: row.readUInt32LE(28), seed, start, offset, duration, drift,
  };
}

/** The origins that a schema tells of (4); it is binary in a batch, and base64 in a manifest. */
export function originsOf(schema) {
  if (schema.origins === undefined) return null;
  const packed = typeof schema.origins === "string" ? Buffer.from(schema.origins, "base64") : schema.origins;
  let known = schema;
  return unpackMetadata(decompress(packed)).map((origin) => {
    if (origin === null) return null; // nothing of it is left
    const { writer, schema, without } = origin;
    known = { ...known, ...schema };
    for (const key of without ?? []) delete known[key];
    return { ...known, writer };
  });
}

export const observationRows = (fragment) => fragment.steps + (fragment.flags & HAS_INITIAL ? 1 : 0);

// -- a batch file (2) -------------------------------------------------------------------------------------------------

export class Batch {
  constructor(path, file) {
    Object.assign(this, { file, bytes: readFileSync(join(path, file)) });
    this.load();
    if (this.damage.length && this.fileId !== null && heal(this.bytes, this.fileId)) this.load();
  }

  load() {
    Object.assign(this, { records: [], damage: [], torn: 0 });
    this.findFileId();
    let at = this.fileId === null ? this.bytes.length : HEADER;
    while (at < this.bytes.length && !this.isFooter(at)) at = this.take(at);
    this.sealed = at < this.bytes.length;
    if (!this.sealed && !this.file.endsWith(".part")) this.damaged(Math.max(0, this.bytes.length - HEADER), this.bytes.length);
    if (this.sealed && !this.damage.length) this.checkIndex(this.footer);
  }

  damaged(start, end) {
    this.damage.push([this.file, start, end]);
  }

  findFileId() {
    const head = headerAt(this.bytes, 0, FILE_MAGIC);
    if (head !== null) {
      if (head.readUInt16LE(8) !== 1) throw new Error(`format version ${head.readUInt16LE(8)} is not known`);
      if (head.readUInt32LE(12) & ~ORIGINS) throw new Error("a required feature is not known");
    } else if (!(this.file.endsWith(".part") && this.bytes.length < HEADER)) {
      this.damaged(0, Math.min(HEADER, this.bytes.length));
    }
    const schema = headerAt(this.bytes, HEADER, SYNC_MARK), footer = headerAt(this.bytes, this.bytes.length - HEADER, FOOTER_MAGIC);
    this.fileId = head?.subarray(16, 32) ?? schema?.subarray(40, 56) ?? footer?.subarray(24, 40) ?? null;
  }

  get footer() {
    return footerOf(this.bytes, this.fileId);
  }

  isFooter(at) {
    return at === this.bytes.length - HEADER && this.footer !== null;
  }

  recordAt(at) {
    return recordAt(this.bytes, at, this.fileId);
  }

  /** Takes in the record at an offset, or what is damaged there; returns the offset of the next one. */
  take(at) {
    const head = this.recordAt(at);
    const { body, end } = head === null ? {} : extentOf(head);
    if (head === null || end > this.bytes.length) return this.resynchronise(at, head);
    try {
      this.takeRecord(head, this.bytes.subarray(at + HEADER, at + HEADER + head.readUInt32LE(12)),
        this.bytes.subarray(body, end));
    } catch (error) {
      if (!(error instanceof Damaged)) throw error;
      this.damaged(at, end);
    }
    return end;
  }

  takeRecord(head, packed, body) {
    const type = head.readUInt16LE(8);
    demand(crc32(packed) === head.readUInt32LE(56), "metadata");
    if (![SCHEMA, CHUNK, INDEX].includes(type)) {
      if (head.readUInt16LE(10) & 1) return;
      throw new Error(`record type ${type} is not known`);
    }
    const metadata = unpackMetadata(packed);
    const columns = type === SCHEMA ? new Map() : readColumns(metadata, body);
    const fragments = columns.get("fragments")?.rows.map(readFragment) ?? [];
    this.records.push({ type, metadata, columns, fragments, offset: u64(head, 24),
      length: HEADER + align(packed.length) + body.length });
  }

  /** What is no record is damage, unless it is the end of a batch whose writer was killed. */
  resynchronise(start, head) {
    let at = start + 8;
    while (at < this.bytes.length && this.recordAt(at) === null && !this.isFooter(at)) at += 8;
    const rest = this.bytes.subarray(start);
    const cutShort = head !== null || rest.length < HEADER || rest.every((byte) => byte === 0);
    if (at < this.bytes.length) this.damaged(start, at);
    else if (cutShort && this.file.endsWith(".part")) this.torn = rest.length;
    else this.damaged(start, this.bytes.length);
    return Math.min(at, this.bytes.length);
  }

  get chunks() {
    return this.records.filter((record) => record.type === CHUNK);
  }

  get schema() {
    return this.records.find((record) => record.type === SCHEMA)?.metadata;
  }

  /** The index of an undamaged batch says what its chunks say. */
  checkIndex(footer) {
    const chunks = this.chunks, index = this.records.at(-1);
    demand(index.type === INDEX && index.offset === u64(footer, 8), "offset of the index");
    const joined = chunks.flatMap((chunk) => chunk.columns.get("fragments").rows);
    demand(Buffer.concat(joined).equals(Buffer.concat(index.columns.get("fragments").rows)), "fragments of the index");
    index.columns.get("chunks").rows.forEach((row, i) => {
      const { offset, length, fragments } = chunks[i];
      const found = [offset, length, fragments.length, total(fragments.map(observationRows))];
      demand(found.every((number, j) => number === u64(row, 8 * j)), "chunks of the index");
    });
    for (const [path, raw, stored] of index.metadata.totals) {
      const columns = chunks.map((chunk) => chunk.columns.get(path.join("/"))).filter((column) => column !== undefined);
      const sizes = columns.map(({ encoding, raw, rows }) =>
        encoding & CONSTANT ? raw * rows.length : encoding & CHANGES ? rows[0].length * rows.length : raw);
      demand(total(sizes) === raw && total(columns.map((column) => column.stored)) === stored, "totals of the index");
    }
  }
}
