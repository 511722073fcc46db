// The form of answers with columns: a JSON head, then little-endian arrays, each at a multiple of 8 bytes.

export interface Column {
  dtype: string;
  shape: number[];
  bytes: Uint8Array<ArrayBuffer>;
}

export interface Container {
  head: Record<string, unknown>;
  arrays: Map<string, Column>;
}

interface Entry {
  name: string;
  dtype: string;
  shape: number[];
  offset: number;
  bytes: number;
}

const padded = (length: number): number => (length + 7) & ~7;

/** Parse a container; offsets count from the first array. Throws an Error if it is cut short. */
export function parse(data: Uint8Array<ArrayBuffer>): Container {
  if (data.byteLength < 4) throw new Error("The answer is cut short.");
  const length = new DataView(data.buffer, data.byteOffset, 4).getUint32(0, true);
  const start = padded(4 + length);
  if (data.byteLength < 4 + length) throw new Error("The answer is cut short.");
  const head = JSON.parse(new TextDecoder().decode(data.subarray(4, 4 + length))) as { arrays: Entry[] } & Record<string, unknown>;
  const arrays = new Map<string, Column>();
  for (const { name, dtype, shape, offset, bytes } of head.arrays) {
    const begin = start + offset;
    if (begin + bytes > data.byteLength) throw new Error("The answer is cut short.");
    arrays.set(name, { dtype, shape, bytes: data.subarray(begin, begin + bytes) });
  }
  return { head, arrays };
}

/** Return a container. */
export function pack(head: Record<string, unknown>, columns: [name: string, dtype: string, shape: number[], bytes: Uint8Array<ArrayBuffer>][]): Uint8Array<ArrayBuffer> {
  let offset = 0;
  const arrays = columns.map(([name, dtype, shape, bytes]): Entry => {
    const entry = { name, dtype, shape, offset, bytes: bytes.length };
    offset += padded(bytes.length);
    return entry;
  });
  const text = new TextEncoder().encode(JSON.stringify({ ...head, arrays }));
  const start = padded(4 + text.length);
  const data = new Uint8Array(start + offset);
  new DataView(data.buffer).setUint32(0, text.length, true);
  data.set(text, 4);
  columns.forEach(([, , , bytes], i) => data.set(bytes, start + arrays[i]!.offset));
  return data;
}

/** Return the values of a column as doubles, in the order in which they are stored. */
export function doubles(column: { dtype: string; bytes: Uint8Array<ArrayBuffer> }): Float64Array {
  const { dtype, bytes } = column;
  const aligned = bytes.byteOffset % 8 === 0 ? bytes : bytes.slice();
  const at = [aligned.buffer, aligned.byteOffset] as const;
  const kind = dtype.replace(/^[<|=]/, "");
  switch (kind) {
    case "f8": return new Float64Array(...at, bytes.byteLength / 8);
    case "f4": return Float64Array.from(new Float32Array(...at, bytes.byteLength / 4));
    case "f2": return Float64Array.from(new Uint16Array(...at, bytes.byteLength / 2), half);
    case "i1": return Float64Array.from(new Int8Array(...at, bytes.byteLength));
    case "i2": return Float64Array.from(new Int16Array(...at, bytes.byteLength / 2));
    case "i4": return Float64Array.from(new Int32Array(...at, bytes.byteLength / 4));
    case "i8": return Float64Array.from(new BigInt64Array(...at, bytes.byteLength / 8), Number);
    case "b1":
    case "u1": return Float64Array.from(aligned);
    case "u2": return Float64Array.from(new Uint16Array(...at, bytes.byteLength / 2));
    case "u4": return Float64Array.from(new Uint32Array(...at, bytes.byteLength / 4));
    case "u8": return Float64Array.from(new BigUint64Array(...at, bytes.byteLength / 8), Number);
    default: throw new Error(`The page does not know the type ${dtype}.`);
  }
}

function half(bits: number): number {
  const [sign, exponent, fraction] = [bits & 0x8000 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 25) * (1024 + fraction) : 2 ** -24 * fraction);
}
