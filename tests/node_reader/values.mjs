// MessagePack values with the extension types of docs/FORMAT.md, section 6, and one canonical text for each value, so that
// readers in different languages can compare hashes. JavaScript cannot tell 1 from 1.0, so numbers are told by their value.

import { Decoder, ExtensionCodec } from "@msgpack/msgpack";

export const TUPLE = 4;
const NDARRAY = 1, SCALAR = 2, BIG_INTEGER = 3, GRAPH = 5, COMPLEX = 6, OBJECTS = 7, UNSTORED = 8, MISFIT = 9;
const ABSENT = 10;

export class Extension {
  constructor(code, content) {
    this.code = code;
    this.content = content;
  }
}

export const isMisfit = (value) => value instanceof Extension && value.code === MISFIT;

export const absent = new Extension(ABSENT, null);

/** A row of a typed column as the value that it is. */
export function typedValue(dtype, shape, bytes) {
  return shape.length ? new Extension(NDARRAY, [dtype, shape, bytes]) : new Extension(SCALAR, [dtype, bytes]);
}

/** The dtype, shape and bytes of a value that is a NumPy array or scalar, otherwise null. */
export function asTyped(value) {
  if (!(value instanceof Extension) || value.code > SCALAR) return null;
  const [dtype, ...rest] = value.content;
  return value.code === NDARRAY ? { dtype, shape: rest[0], bytes: rest[1] } : { dtype, shape: [], bytes: rest[0] };
}

const codec = new ExtensionCodec();
const register = (type, decode) => codec.register({ type, encode: () => null, decode });
for (const code of [NDARRAY, SCALAR, TUPLE, GRAPH, OBJECTS, UNSTORED, MISFIT])
  register(code, (payload) => new Extension(code, unpack(payload)));
register(COMPLEX, (payload) => new Extension(COMPLEX, payload.slice()));
register(BIG_INTEGER, bigInteger);
register(ABSENT, () => absent);

function bigInteger(payload) {
  const digits = Buffer.from(payload).reverse().toString("hex");
  return BigInt.asIntN(8 * payload.length, BigInt("0x" + digits));
}

// A prefix keeps keys that look like numbers in their order, and apart from numbers.
const mapKeyConverter = (key) => (typeof key === "string" ? "text " + key : "value " + canonical(key));

export function unpack(bytes) {
  return new Decoder({ extensionCodec: codec, useBigInt64: true, mapKeyConverter }).decode(bytes);
}

/** The metadata of a record: plain MessagePack, its keys strings, its integers small. */
export function unpackMetadata(bytes) {
  return new Decoder({ extensionCodec: codec }).decode(bytes);
}

export function canonical(value) {
  if (value === null || typeof value === "boolean" || typeof value === "string") return JSON.stringify(value);
  if (typeof value === "number" || typeof value === "bigint") return canonicalNumber(value);
  if (value instanceof Uint8Array) return `{"bytes":"${Buffer.from(value).toString("hex")}"}`;
  if (value instanceof Extension) return `{"ext":${value.code},"value":${canonical(value.content)}}`;
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  const pairs = Object.entries(value).map(([key, item]) => `[${JSON.stringify(key)},${canonical(item)}]`);
  return `{"map":[${pairs.join(",")}]}`;
}

function canonicalNumber(value) {
  if (typeof value === "bigint" && BigInt(Number(value)) !== value) return `"#${value}"`;
  if (Number.isNaN(Number(value))) return '"#nan"';
  const bytes = Buffer.alloc(8);
  bytes.writeDoubleBE(Number(value));
  return `"#${bytes.toString("hex")}"`;
}
