// What begins and ends files and records: magic, checksum, file id (docs/FORMAT.md, section 2).

import { crc32 } from "node:zlib";

export const HEADER = 64;
export const FILE_MAGIC = Buffer.from("894754420d0a1a0a", "hex");
export const SYNC_MARK = Buffer.from("f747545245430d0a", "hex");
export const FOOTER_MAGIC = Buffer.from("89475442454e440a", "hex");
export const SCHEMA = 1, CHUNK = 2, INDEX = 3, PARITY = 4;

export const align = (n) => Math.ceil(n / 8) * 8;
export const u64 = (bytes, at) => Number(bytes.readBigUInt64LE(at));

/** The 64 bytes at an offset if they have this magic and check, otherwise null. */
export function headerAt(bytes, at, magic) {
  const head = bytes.subarray(at, at + HEADER);
  const whole = at >= 0 && head.length === HEADER && head.subarray(0, 8).equals(magic);
  return whole && crc32(head.subarray(0, 60)) === head.readUInt32LE(60) ? head : null;
}

/** The header of the record at an offset, or null. */
export function recordAt(bytes, at, fileId) {
  const head = headerAt(bytes, at, SYNC_MARK);
  return head !== null && u64(head, 24) === at && head.subarray(40, 56).equals(fileId) ? head : null;
}

/** Where the body of a record begins, and where the record ends. */
export function extentOf(head) {
  const body = u64(head, 24) + HEADER + align(head.readUInt32LE(12));
  return { body, end: body + u64(head, 16) };
}

/** The footer at the end of a file, or null. */
export function footerOf(bytes, fileId) {
  const head = headerAt(bytes, bytes.length - HEADER, FOOTER_MAGIC);
  return head?.subarray(24, 40).equals(fileId) && u64(head, 16) === bytes.length ? head : null;
}
