// Columns of a record (docs/FORMAT.md, section 3).

import { ZSTDDecoder } from "zstddec";
import { align, crc32, u32, u64, viewOf, type Bytes } from "./bytes.ts";
import { demand } from "./framing.ts";
import type { Metadata } from "./values.ts";

const LARGE_ROW = 4096;
const ZSTD = 1, SHUFFLE = 2, XOR = 4;
export const CONSTANT = 8, CHANGES = 16, DICTIONARY = 32, BLOCKS = 64;
const KNOWN = ZSTD | SHUFFLE | XOR | CONSTANT | CHANGES | DICTIONARY | BLOCKS;
const MOST_RAW = 2 ** 31, MOST_ROWS = 2 ** 24, MOST_PLAIN = 2 ** 28; // bytes, rows, bytes of more than one row

export type Path = (string | number)[];
export type Descriptor = [
  path: Path, dtype: string, shape: number[], rows: number, encoding: number, stored: number, raw: number, crc: number,
  blocks?: [rows: number, table: Bytes],
];

/** Rows of a column that can be decoded alone: the bytes [begin, end) of its blob, and the CRC of the blob up to both. */
export interface Run {
  first: number;
  count: number;
  begin: number;
  end: number;
  crcs: [before: number, after: number];
}

/** A decoded column, or a run of it. `row(i)` has the bytes of a row, the first one of them is 0. */
export interface Column {
  path: Path;
  dtype: string;
  shape: number[];
  first: number; // row of the column with which the run begins
  count: number;
  raw: number;
  stored: number;
  encoding: number;
  bytes: Bytes; // of all rows, or of the one that all are equal to
  row(i: number): Bytes;
}

export const nameOf = (path: Path): string => path.join("/");
export const product = (numbers: number[]): number => numbers.reduce((a, b) => a * b, 1);
export const elementSize = (dtype: string): number => {
  const found = /^[<|][biufcV](\d+)$/.exec(dtype);
  demand(found !== null, `the type ${dtype}`);
  return Number(found![1]);
};

const decoder = new ZSTDDecoder();

/** Wait for this before columns are decoded: the decoder is WebAssembly. */
export const ready = decoder.init();

/** Decode a zstd frame of `raw` bytes. */
export function inflate(blob: Bytes, raw: number): Bytes {
  const bytes = raw ? (decoder.decode(blob, raw) as Bytes) : new Uint8Array(0);
  demand(bytes.length === raw, "a zstd frame");
  return bytes;
}

/** The size that a zstd frame declares. */
export function frameSize(blob: Bytes): number {
  const [descriptor, view] = [blob[4] ?? 0, viewOf(blob)];
  const [field, single] = [descriptor >> 6, (descriptor >> 5) & 1];
  const at = 6 - single + [0, 1, 2, 4][descriptor & 3]!;
  demand(field > 0 || single === 1, "a zstd frame without its size");
  return [() => view.getUint8(at), () => 256 + view.getUint16(at, true), () => view.getUint32(at, true), () => u64(blob, at)][field]!();
}

function unshuffle(bytes: Bytes, width: number): Bytes {
  const count = bytes.length / width;
  const out = new Uint8Array(bytes.length);
  for (let j = 0; j < width; j++) for (let i = 0, at = j * count, to = j; i < count; i++, to += width) out[to] = bytes[at + i]!;
  return out;
}

function undoXor(bytes: Bytes, rowSize: number): void {
  if (rowSize % 4 || bytes.byteOffset % 4) {
    for (let i = rowSize; i < bytes.length; i++) bytes[i]! ^= bytes[i - rowSize]!;
    return;
  }
  const words = new Uint32Array(bytes.buffer, bytes.byteOffset, bytes.length >> 2);
  for (let i = rowSize >> 2, j = 0; i < words.length; i++, j++) words[i]! ^= words[j]!;
}

function undoChanges(bytes: Bytes, rowSize: number, rows: number): Bytes {
  const word = [8, 4, 2, 1].find((size) => rowSize % size === 0)!;
  const wide = rowSize / word > 65536;
  const out = new Uint8Array(rows * rowSize);
  const view = viewOf(bytes);
  out.set(bytes.subarray(0, rowSize));
  let at = rowSize;
  for (let row = 1; row < rows; ) {
    const n = view.getUint32(at, true);
    demand(n > 0 && row + n <= rows, "a group of changes");
    let words = at + 4 + 4 * n;
    let gaps = words;
    for (let i = 0; i < n; i++) gaps += word * view.getUint32(at + 4 + 4 * i, true);
    for (let i = 0; i < n; i++, row++) {
      const begin = row * rowSize;
      out.copyWithin(begin, begin - rowSize, begin);
      const count = view.getUint32(at + 4 + 4 * i, true);
      for (let k = 0, place = 0; k < count; k++, words += word, gaps += wide ? 4 : 2) {
        place += wide ? view.getUint32(gaps, true) : view.getUint16(gaps, true);
        demand((place + 1) * word <= rowSize, "a change outside its row");
        for (let byte = 0; byte < word; byte++) out[begin + place * word + byte] = bytes[words + byte]!;
      }
    }
    at = gaps;
  }
  demand(at === bytes.length, "size of changes");
  return out;
}

function undoDictionary(bytes: Bytes, rowSize: number, rows: number): Bytes {
  demand(bytes.length >= 4 && rows > 0 && rowSize > 0 && rowSize < LARGE_ROW && rows * rowSize <= MOST_PLAIN, "a dictionary");
  const distinct = u32(bytes, 0);
  const bits = [1, 2, 4, 8, 16].find((width) => distinct <= 2 ** width) ?? 0;
  const begin = 4 + distinct * rowSize;
  demand(distinct > 0 && distinct <= rows && bits > 0 && bytes.length === begin + Math.ceil((rows * bits) / 8), "size of a dictionary");
  const table = bytes.slice(4, begin);
  undoXor(table, rowSize);
  const out = new Uint8Array(rows * rowSize);
  for (let row = 0, to = 0; row < rows; row++) {
    const at = begin + ((row * bits) >> 3);
    const code = bits === 16 ? bytes[at]! | (bytes[at + 1]! << 8) : (bytes[at]! >> ((row * bits) & 7)) & (2 ** bits - 1);
    demand(code < distinct, "a code outside its dictionary");
    for (let from = code * rowSize, end = from + rowSize; from < end; ) out[to++] = table[from++]!;
  }
  return out;
}

/** The blocks of a column with rows [from, to), or the whole column if it is not in blocks. Throws Damaged. */
export function runOf([path, , , rows, encoding, stored, , crc, blocks]: Descriptor, from = 0, to = rows): Run {
  if (!(encoding & BLOCKS)) return { first: 0, count: rows, begin: 0, end: stored, crcs: [0, crc] };
  const [together, table] = blocks ?? [0, new Uint8Array(0)];
  demand(together > 0 && table.length === 8 * Math.ceil(rows / together), `blocks of column ${nameOf(path)}`);
  const [block, next] = [Math.floor(from / together), Math.ceil(Math.min(to, rows) / together)];
  demand(block < next, `rows of column ${nameOf(path)}`);
  const upTo = (number: number): [end: number, crc: number] => (number ? [u32(table, 8 * number - 8), u32(table, 8 * number - 4)] : [0, 0]);
  const [[begin, before], [end, after]] = [upTo(block), upTo(next)];
  demand(begin < end && end <= stored, `blocks of column ${nameOf(path)}`);
  const first = block * together;
  return { first, count: Math.min(next * together, rows) - first, begin, end, crcs: [before, after] };
}

/** Decode a run of a column from its bytes, which are checked first. Throws Damaged, or an Error if it needs a newer reader. */
export function decodeColumn(blob: Bytes, descriptor: Descriptor, run = runOf(descriptor)): Column {
  const [path, dtype, shape, rows, encoding, stored, raw] = descriptor;
  const name = nameOf(path);
  if (encoding & ~KNOWN) throw new Error(`encoding ${encoding} is not known`);
  demand(blob.length === run.end - run.begin && crc32(blob, run.crcs[0]) === run.crcs[1], `column ${name}`);
  const kept = encoding & CONSTANT ? Math.min(1, rows) : rows;
  demand(rows <= MOST_ROWS && raw <= (kept > 1 ? MOST_PLAIN : MOST_RAW), `column ${name} is too large`);
  const column = { path, dtype, shape, first: run.first, count: run.count, raw, stored, encoding };
  if (encoding & BLOCKS) {
    const bytes = decodeBlocks(blob, descriptor, run);
    const rowSize = bytes.length / run.count;
    return { ...column, bytes, row: (i) => bytes.subarray(i * rowSize, (i + 1) * rowSize) };
  }
  let bytes = encoding & ZSTD ? inflate(blob, raw) : blob;
  demand(bytes.length === raw, `size of column ${name}`);
  if (dtype === "msgpack") {
    const ends = valueEnds(bytes, encoding & CONSTANT ? null : rows);
    const begin = encoding & CONSTANT ? 0 : 4 * rows;
    const row = (i: number): Bytes => (encoding & CONSTANT ? bytes : bytes.subarray(i ? ends[i - 1] : begin, ends[i]));
    return { ...column, bytes, row };
  }
  const width = elementSize(dtype);
  const rowSize = width * product(shape);
  demand(kept * rowSize <= MOST_RAW, `column ${name} is too large`);
  if (encoding & CHANGES) bytes = undoChanges(bytes, rowSize, rows);
  if (encoding & DICTIONARY) bytes = undoDictionary(bytes, rowSize, rows);
  demand(bytes.length === kept * rowSize, `rows of column ${name}`);
  if (encoding & SHUFFLE && rowSize < LARGE_ROW) bytes = unshuffle(bytes, width);
  else if (encoding & SHUFFLE) for (let at = 0; at < bytes.length; at += rowSize) bytes.set(unshuffle(bytes.subarray(at, at + rowSize), width), at);
  if (encoding & XOR) undoXor(encoding & ZSTD || encoding & SHUFFLE ? bytes : (bytes = bytes.slice()), rowSize);
  const same = (encoding & CONSTANT) !== 0;
  return { ...column, bytes, row: (i) => (same ? bytes : bytes.subarray(i * rowSize, (i + 1) * rowSize)) };
}

/** Decode blocks of rows, each of which is encoded by itself. */
function decodeBlocks(blob: Bytes, [path, dtype, shape, rows, encoding, , raw, , blocks]: Descriptor, { first, count, begin }: Run): Bytes {
  const [width, [together, table]] = [elementSize(dtype), blocks!];
  const rowSize = width * product(shape);
  demand(!(encoding & (CONSTANT | CHANGES | DICTIONARY)) && raw === rows * rowSize, `blocks of column ${nameOf(path)}`);
  const out = new Uint8Array(count * rowSize);
  for (let row = 0, at = 0; row < count; row += together) {
    const end = u32(table, (8 * (first + row)) / together) - begin;
    let bytes = inflate(blob.subarray(at, end), Math.min(together, count - row) * rowSize);
    if (encoding & SHUFFLE) bytes = unshuffle(bytes, width);
    if (encoding & XOR) undoXor(bytes, rowSize);
    out.set(bytes, row * rowSize);
    at = end;
  }
  return out;
}

function valueEnds(bytes: Bytes, rows: number | null): number[] {
  if (rows === null) return [];
  demand(4 * rows <= bytes.length, "lengths of values");
  let at = 4 * rows;
  const ends = Array.from({ length: rows }, (_, i) => (at += u32(bytes, 4 * i)));
  demand(at === bytes.length, "lengths of values");
  return ends;
}

/** The rows of a column as bytes. */
export const rowsOf = (column: Column): Bytes[] => Array.from({ length: column.count }, (_, i) => column.row(i));

/** Where in the body of a record each column lies. */
export function* blobsOf(metadata: Metadata): Generator<{ descriptor: Descriptor; begin: number; end: number }> {
  let begin = 0;
  for (const descriptor of metadata.columns as Descriptor[]) {
    yield { descriptor, begin, end: begin + descriptor[5] };
    begin = align(begin + descriptor[5]);
  }
}

/** The columns of a record by path, as text. */
export function readColumns(metadata: Metadata, body: Bytes): Map<string, Column> {
  return new Map([...blobsOf(metadata)].map(({ descriptor, begin, end }) => {
    const column = decodeColumn(body.subarray(begin, end), descriptor);
    return [nameOf(column.path), column];
  }));
}
