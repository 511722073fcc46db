// Restoring damaged bytes by the parity record (docs/FORMAT.md, section 4).

import { crc32 } from "node:zlib";
import { FOOTER_MAGIC, HEADER, PARITY, align, extentOf, footerOf, recordAt, u64 } from "./framing.mjs";
import { unpackMetadata } from "./values.mjs";

const NEAR = 64 * 1024; // bytes at the end of a file where the record of a damaged footer is looked for

/** The footer of a file; if it is damaged, one made of what the parity record says; null without either. */
function knownFooter(bytes, fileId) {
  const footer = footerOf(bytes, fileId);
  if (footer !== null) return footer;
  for (let at = align(bytes.length) - HEADER; at >= Math.max(0, bytes.length - Math.max(NEAR, bytes.length / 16)); at -= 8) {
    const head = recordAt(bytes, at, fileId);
    if (head?.readUInt16LE(8) !== PARITY || extentOf(head).end + HEADER !== bytes.length) continue;
    const packed = bytes.subarray(at + HEADER, at + HEADER + head.readUInt32LE(12));
    if (crc32(packed) !== head.readUInt32LE(56)) return null;
    const { block, groups, index } = unpackMetadata(packed);
    const made = Buffer.alloc(HEADER);
    FOOTER_MAGIC.copy(made);
    made.writeBigUInt64LE(BigInt(index), 8);
    made.writeBigUInt64LE(BigInt(bytes.length), 16);
    fileId.copy(made, 24);
    made.writeBigUInt64LE(BigInt(at), 40);
    made.writeUInt32LE(block, 48);
    made.writeUInt32LE(groups, 52);
    made.writeUInt32LE(crc32(made.subarray(0, 60)), 60);
    return made;
  }
  return null;
}

/** Puts back the damaged bytes of a batch, as far as its parity restores them; returns whether there were any. */
export function heal(bytes, fileId) {
  const footer = knownFooter(bytes, fileId);
  if (footer === null) return false;
  const covered = u64(footer, 40), block = footer.readUInt32LE(48), groups = footer.readUInt32LE(52);
  if (covered === 0) return false; // no parity
  const blocks = Math.ceil(covered / block), head = recordAt(bytes, covered, fileId);
  const parityAt = head === null ? bytes.length - HEADER - align(groups * block) - align(4 * blocks) : extentOf(head).body;
  const blockOf = (i) => bytes.subarray(i * block, Math.min((i + 1) * block, covered));
  const checksum = (i) => bytes.readUInt32LE(parityAt + align(groups * block) + 4 * i);
  const restored = [];
  for (let bad = 0; bad < blocks; bad++) {
    if (crc32(blockOf(bad)) === checksum(bad)) continue;
    const place = (bad + groups - (blocks % groups)) % groups; // of the parity block of this group
    const sum = Buffer.from(bytes.subarray(parityAt + place * block, parityAt + (place + 1) * block));
    for (let i = bad % groups; i < blocks; i += groups) if (i !== bad) blockOf(i).forEach((byte, j) => (sum[j] ^= byte));
    const whole = sum.subarray(0, blockOf(bad).length);
    if (crc32(whole) === checksum(bad)) restored.push([bad * block, whole]);
  }
  if (footerOf(bytes, fileId) === null) restored.push([bytes.length - HEADER, footer]);
  for (const [at, whole] of restored) whole.copy(bytes, at);
  return restored.length > 0;
}
