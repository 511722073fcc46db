// Restoring damaged bytes by the parity record (docs/FORMAT.md, section 4).

import { align, crc32, u16, u32, u64, viewOf, type Bytes } from "./bytes.ts";
import { extentOf, FOOTER_MAGIC, footerOf, HEADER, PARITY, recordAt } from "./framing.ts";
import { unpackMetadata } from "./values.ts";

const NEAR = 64 * 1024; // bytes at the end of a file where the record of a damaged footer is looked for

/** The footer of a file; if it is damaged, one made of what the parity record says; null without either. */
function knownFooter(bytes: Bytes, fileId: Bytes): Bytes | null {
  const footer = footerOf(bytes, fileId);
  if (footer !== null) return footer;
  for (let at = align(bytes.length) - HEADER; at >= Math.max(0, bytes.length - Math.max(NEAR, bytes.length / 16)); at -= 8) {
    const head = recordAt(bytes, at, fileId);
    if (head === null || u16(head, 8) !== PARITY || extentOf(head).end + HEADER !== bytes.length) continue;
    const packed = bytes.subarray(at + HEADER, at + HEADER + u32(head, 12));
    if (crc32(packed) !== u32(head, 56)) return null;
    const { block, groups, index } = unpackMetadata(packed);
    const made = new Uint8Array(HEADER);
    const view = viewOf(made);
    made.set(FOOTER_MAGIC);
    view.setBigUint64(8, BigInt(index), true);
    view.setBigUint64(16, BigInt(bytes.length), true);
    made.set(fileId, 24);
    view.setBigUint64(40, BigInt(at), true);
    view.setUint32(48, block, true);
    view.setUint32(52, groups, true);
    view.setUint32(60, crc32(made.subarray(0, 60)), true);
    return made;
  }
  return null;
}

/** Put back the damaged bytes of a batch, as far as its parity restores them; return whether there were any. */
export function heal(bytes: Bytes, fileId: Bytes): boolean {
  const footer = knownFooter(bytes, fileId);
  if (footer === null) return false;
  const [covered, block, groups] = [u64(footer, 40), u32(footer, 48), u32(footer, 52)];
  if (covered === 0) return false; // no parity
  const blocks = Math.ceil(covered / block);
  const head = recordAt(bytes, covered, fileId);
  const parityAt = head === null ? bytes.length - HEADER - align(groups * block) - align(4 * blocks) : extentOf(head).body;
  const blockOf = (i: number): Bytes => bytes.subarray(i * block, Math.min((i + 1) * block, covered));
  const checksum = (i: number): number => u32(bytes, parityAt + align(groups * block) + 4 * i);
  const restored: [number, Bytes][] = [];
  for (let bad = 0; bad < blocks; bad++) {
    if (crc32(blockOf(bad)) === checksum(bad)) continue;
    const place = (bad + groups - (blocks % groups)) % groups; // of the parity block of this group
    const sum = bytes.slice(parityAt + place * block, parityAt + (place + 1) * block);
    for (let i = bad % groups; i < blocks; i += groups) if (i !== bad) blockOf(i).forEach((byte, j) => (sum[j]! ^= byte));
    const whole = sum.subarray(0, blockOf(bad).length);
    if (crc32(whole) === checksum(bad)) restored.push([bad * block, whole]);
  }
  if (footerOf(bytes, fileId) === null) restored.push([bytes.length - HEADER, footer]);
  for (const [at, whole] of restored) bytes.set(whole, at);
  return restored.length > 0;
}
