// MessagePack values with the extension types of docs/FORMAT.md, section 6.

import { viewOf, type Bytes } from "./bytes.ts";
import { Damaged } from "./framing.ts";

export const NDARRAY = 1, SCALAR = 2, TUPLE = 4, COMPLEX = 6, OBJECTS = 7, UNSTORED = 8, MISFIT = 9, MASKED = 11, FOREIGN = 12, MEMBER = 13;
const BIG_INTEGER = 3, ABSENT = 10;
const NESTED = [NDARRAY, SCALAR, TUPLE, 5, OBJECTS, UNSTORED, MISFIT, MASKED, FOREIGN, MEMBER]; // their payload is MessagePack
const DEEPEST = 100, MOST_ENTRIES = 2 ** 23;

export class Extension {
  constructor(readonly code: number, readonly content: Value) {}
}

/** A map has keys of any kind, in their order. */
export type Value = null | boolean | number | bigint | string | Bytes | Value[] | Map<Value, Value> | Extension;

export const absent = new Extension(ABSENT, null);

export const isMisfit = (value: Value): value is Extension => value instanceof Extension && value.code === MISFIT;

/** A row of a typed column as the value that it is. */
export function typedValue(dtype: string, shape: number[], bytes: Bytes): Extension {
  return shape.length ? new Extension(NDARRAY, [dtype, shape, bytes]) : new Extension(SCALAR, [dtype, bytes]);
}

export interface Typed {
  dtype: string;
  shape: number[];
  bytes: Bytes;
}

/** The dtype, shape and bytes of a value that is a NumPy array or scalar, otherwise null. */
export function asTyped(value: Value | undefined): Typed | null {
  if (!(value instanceof Extension) || value.code > SCALAR || !Array.isArray(value.content)) return null;
  const [dtype, ...rest] = value.content;
  return { dtype, shape: value.code === NDARRAY ? rest[0] : [], bytes: rest.at(-1) } as Typed;
}

/** Decode a value. Throws Damaged. */
export function unpack(bytes: Bytes): Value {
  const decoder = new Decoder(bytes);
  const value = decoder.value(0);
  if (decoder.at !== bytes.length) throw new Damaged("bytes after a value");
  return value;
}

export type Metadata = { [key: string]: any };

/** The metadata of a record: maps become objects without a prototype. */
export function unpackMetadata(bytes: Bytes): Metadata {
  const plain = plainObject(unpack(bytes));
  if (plain === null || typeof plain !== "object") throw new Damaged("metadata are not a map");
  return plain;
}

export function plainObject(value: any): any {
  if (Array.isArray(value)) return value.map(plainObject);
  if (!(value instanceof Map)) return value;
  const plain = Object.create(null);
  for (const [key, item] of value) plain[typeof key === "string" ? key : String(key)] = plainObject(item);
  return plain;
}

class Decoder {
  at = 0;
  private entries = 0; // of lists and maps
  private readonly view: DataView;

  constructor(private readonly bytes: Bytes, private readonly depth = 0) {
    this.view = viewOf(bytes);
  }

  value(depth: number): Value {
    if (depth + this.depth > DEEPEST) throw new Damaged("values are nested too deep");
    const byte = this.number(1, "Uint8");
    if (byte < 0x80) return byte;
    if (byte < 0x90) return this.map(byte & 15, depth);
    if (byte < 0xa0) return this.list(byte & 15, depth);
    if (byte < 0xc0) return text(this.take(byte & 31));
    if (byte >= 0xe0) return byte - 256;
    switch (byte) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: return this.take(this.number(1, "Uint8"));
      case 0xc5: return this.take(this.number(2, "Uint16"));
      case 0xc6: return this.take(this.number(4, "Uint32"));
      case 0xc7: return this.extension(this.number(1, "Uint8"));
      case 0xc8: return this.extension(this.number(2, "Uint16"));
      case 0xc9: return this.extension(this.number(4, "Uint32"));
      case 0xca: return this.number(4, "Float32");
      case 0xcb: return this.number(8, "Float64");
      case 0xcc: return this.number(1, "Uint8");
      case 0xcd: return this.number(2, "Uint16");
      case 0xce: return this.number(4, "Uint32");
      case 0xcf: return exactInteger(viewOf(this.take(8)).getBigUint64(0));
      case 0xd0: return this.number(1, "Int8");
      case 0xd1: return this.number(2, "Int16");
      case 0xd2: return this.number(4, "Int32");
      case 0xd3: return exactInteger(viewOf(this.take(8)).getBigInt64(0));
      case 0xd9: return text(this.take(this.number(1, "Uint8")));
      case 0xda: return text(this.take(this.number(2, "Uint16")));
      case 0xdb: return text(this.take(this.number(4, "Uint32")));
      case 0xdc: return this.list(this.number(2, "Uint16"), depth);
      case 0xdd: return this.list(this.number(4, "Uint32"), depth);
      case 0xde: return this.map(this.number(2, "Uint16"), depth);
      case 0xdf: return this.map(this.number(4, "Uint32"), depth);
    }
    if (byte >= 0xd4 && byte <= 0xd8) return this.extension(1 << (byte - 0xd4));
    throw new Damaged("not MessagePack");
  }

  private take(length: number): Bytes {
    if (this.at + length > this.bytes.length) throw new Damaged("a value is cut short");
    return this.bytes.subarray(this.at, (this.at += length));
  }

  private number(width: number, kind: "Uint8" | "Uint16" | "Uint32" | "Int8" | "Int16" | "Int32" | "Float32" | "Float64"): number {
    if (this.at + width > this.bytes.length) throw new Damaged("a value is cut short");
    this.at += width;
    return this.view[`get${kind}`](this.at - width);
  }

  private count(entries: number): void {
    this.entries += entries;
    if (this.entries > MOST_ENTRIES) throw new Damaged("too many values");
  }

  private list(length: number, depth: number): Value[] {
    const items: Value[] = [];
    this.count(length);
    for (let i = 0; i < length; i++) items.push(this.value(depth + 1));
    return items;
  }

  private map(length: number, depth: number): Map<Value, Value> {
    const items = new Map<Value, Value>();
    this.count(length);
    for (let i = 0; i < length; i++) {
      const key = this.value(depth + 1);
      items.set(key, this.value(depth + 1));
    }
    return items;
  }

  private extension(length: number): Value {
    const code = this.number(1, "Int8");
    const payload = this.take(length);
    if (NESTED.includes(code)) return new Extension(code, new Decoder(payload, this.depth + 6).value(0));
    if (code === ABSENT) return absent;
    if (code !== BIG_INTEGER) return new Extension(code, payload.slice());
    let digits = "";
    for (const part of payload) digits = part.toString(16).padStart(2, "0") + digits;
    return exactInteger(BigInt.asIntN(8 * length, BigInt(`0x${digits || 0}`)));
  }
}

const exactInteger = (value: bigint): number | bigint => {
  const near = Number(value);
  return Number.isSafeInteger(near) ? near : value;
};

const UTF8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** Strings may hold lone surrogates, encoded as in WTF-8. */
function text(bytes: Bytes): string {
  try {
    return UTF8.decode(bytes);
  } catch {
    let found = "";
    for (let i = 0; i < bytes.length; ) {
      const [a, b = 0, c = 0, d = 0] = bytes.subarray(i, i + 4);
      if (a! < 0x80) found += String.fromCharCode(a!), (i += 1);
      else if (a! < 0xe0) found += String.fromCharCode(((a! & 31) << 6) | (b & 63)), (i += 2);
      else if (a! < 0xf0) found += String.fromCharCode(((a! & 15) << 12) | ((b & 63) << 6) | (c & 63)), (i += 3);
      else found += String.fromCodePoint(Math.min(0x10ffff, ((a! & 7) << 18) | ((b & 63) << 12) | ((c & 63) << 6) | (d & 63))), (i += 4);
    }
    return found;
  }
}
