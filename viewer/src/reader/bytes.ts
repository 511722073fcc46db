// Little-endian numbers and checksums in bytes.

export type Bytes = Uint8Array<ArrayBuffer>;

export const align = (n: number): number => Math.ceil(n / 8) * 8;

export const viewOf = (bytes: Bytes): DataView<ArrayBuffer> => new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
export const u16 = (bytes: Bytes, at: number): number => viewOf(bytes).getUint16(at, true);
export const u32 = (bytes: Bytes, at: number): number => viewOf(bytes).getUint32(at, true);
export const u64 = (bytes: Bytes, at: number): number => Number(viewOf(bytes).getBigUint64(at, true));

export function equal(a: Bytes, b: Bytes): boolean {
  return a.length === b.length && a.every((byte, i) => byte === b[i]);
}

export function concat(parts: Bytes[]): Bytes {
  const joined = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    joined.set(part, at);
    at += part.length;
  }
  return joined;
}

export const fromHex = (text: string): Bytes => Uint8Array.from(text.match(/../g) ?? [], (byte) => parseInt(byte, 16));

// CRC-32 as in zlib, four bytes at once: table k is for a byte with k bytes after it.
const TABLES = Array.from({ length: 4 }, () => new Uint32Array(256));
for (let i = 0; i < 256; i++) {
  let c = i;
  for (let bit = 0; bit < 8; bit++) c = c & 1 ? (c >>> 1) ^ 0xedb88320 : c >>> 1;
  TABLES[0]![i] = c;
}
for (let i = 0; i < 256; i++) {
  for (let k = 1; k < 4; k++) TABLES[k]![i] = (TABLES[k - 1]![i]! >>> 8) ^ TABLES[0]![TABLES[k - 1]![i]! & 255]!;
}

/** The CRC of bytes, or of those that have the CRC `before` and these. */
export function crc32(bytes: Bytes, before = 0): number {
  const [a, b, c, d] = TABLES as [Uint32Array, Uint32Array, Uint32Array, Uint32Array];
  let crc = ~before;
  let i = 0;
  for (; i + 4 <= bytes.length; i += 4) {
    crc ^= bytes[i]! | (bytes[i + 1]! << 8) | (bytes[i + 2]! << 16) | (bytes[i + 3]! << 24);
    crc = d[crc & 255]! ^ c[(crc >>> 8) & 255]! ^ b[(crc >>> 16) & 255]! ^ a[crc >>> 24]!;
  }
  for (; i < bytes.length; i++) crc = a[(crc ^ bytes[i]!) & 255]! ^ (crc >>> 8);
  return ~crc >>> 0;
}
