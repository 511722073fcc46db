// What begins and ends files and records: magic, checksum, file id (docs/FORMAT.md, section 2).

import { align, crc32, equal, fromHex, u16, u32, u64, type Bytes } from "./bytes.ts";

export const HEADER = 64;
export const FILE_MAGIC = fromHex("894754420d0a1a0a");
export const SYNC_MARK = fromHex("f747545245430d0a");
export const FOOTER_MAGIC = fromHex("89475442454e440a");
export const SCHEMA = 1, CHUNK = 2, INDEX = 3, PARITY = 4;
const ORIGINS = 1; // a feature

/** Damaged data; what is beside it may be read. */
export class Damaged extends Error {}

export function demand(holds: boolean, problem: string): void {
  if (!holds) throw new Damaged(problem);
}

/** The 64 bytes at an offset if they have this magic and check, otherwise null. */
export function headerAt(bytes: Bytes, at: number, magic: Bytes): Bytes | null {
  if (at < 0) return null;
  const head = bytes.subarray(at, at + HEADER);
  const whole = head.length === HEADER && equal(head.subarray(0, 8), magic);
  return whole && crc32(head.subarray(0, 60)) === u32(head, 60) ? head : null;
}

/** The file header at the beginning of a batch; null if it is damaged. Throws an Error if it is of another version. */
export function fileHeader(bytes: Bytes): Bytes | null {
  const head = headerAt(bytes, 0, FILE_MAGIC);
  if (head === null) return null;
  if (u16(head, 8) !== 1) throw new Error(`format version ${u16(head, 8)} is not known`);
  if (u32(head, 12) & ~ORIGINS) throw new Error("a required feature is not known");
  return head;
}

/** The header of the record at `at` in these bytes, which begin at `begin` in the file; or null. */
export function recordAt(bytes: Bytes, at: number, fileId: Bytes, begin = 0): Bytes | null {
  const head = headerAt(bytes, at, SYNC_MARK);
  return head !== null && u64(head, 24) === begin + at && equal(head.subarray(40, 56), fileId) ? head : null;
}

/** Where in the file the body of a record begins, and where the record ends. */
export function extentOf(head: Bytes): { body: number; end: number } {
  const body = u64(head, 24) + HEADER + align(u32(head, 12));
  return { body, end: body + u64(head, 16) };
}

/** The footer in the last 64 of these bytes, or null. */
export function footerOf(bytes: Bytes, fileId: Bytes, fileLength = bytes.length): Bytes | null {
  const head = headerAt(bytes, bytes.length - HEADER, FOOTER_MAGIC);
  return head !== null && equal(head.subarray(24, 40), fileId) && u64(head, 16) === fileLength ? head : null;
}
