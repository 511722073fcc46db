// Batch files as a whole, also unsealed and damaged ones (docs/FORMAT.md, sections 2 to 4).

import { readFileSync } from "node:fs";
import { join } from "node:path";
import { reader } from "./reader.mjs";

const { BLOCKS, CHANGES, CHUNK, CONSTANT, DICTIONARY, Damaged, FOOTER_MAGIC, Fragment, HEADER, INDEX, SCHEMA, SYNC_MARK, align, concat, crc32, demand, equal,
  extentOf, fileHeader, footerOf, headerAt, heal, observationRows, readColumns, recordAt, rowsOf, u16, u32, u64, unpackMetadata, viewOf } = reader;
const total = (numbers) => numbers.reduce((a, b) => a + b, 0);

export class Batch {
  constructor(path, file) {
    Object.assign(this, { file, bytes: new Uint8Array(readFileSync(join(path, file))) });
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
    const head = fileHeader(this.bytes);
    if (head === null && !(this.file.endsWith(".part") && this.bytes.length < HEADER)) {
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
      this.takeRecord(head, this.bytes.subarray(at + HEADER, at + HEADER + u32(head, 12)),
        this.bytes.subarray(body, end));
    } catch (error) {
      if (!(error instanceof Damaged)) throw error;
      this.damaged(at, end);
    }
    return end;
  }

  takeRecord(head, packed, body) {
    const type = u16(head, 8);
    demand(crc32(packed) === u32(head, 56), "metadata");
    if (![SCHEMA, CHUNK, INDEX].includes(type)) {
      if (u16(head, 10) & 1) return;
      throw new Error(`record type ${type} is not known`);
    }
    const metadata = unpackMetadata(packed);
    const columns = type === SCHEMA ? new Map() : readColumns(metadata, body);
    for (const column of columns.values()) column.rows = rowsOf(column);
    const fragments = columns.get("fragments")?.rows.map((row) => new Fragment(viewOf(row))) ?? [];
    this.records.push({ type, metadata, columns, fragments, offset: u64(head, 24),
      length: HEADER + align(packed.length) + body.length, bodyLength: body.length });
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

  /** An index that has the columns of the chunks has all of them, where they are. */
  checkColumns(index, chunks) {
    if (!index.columns.has("columns")) return;
    const forms = index.metadata.forms, tables = concat(index.columns.get("blocks")?.rows ?? []);
    let blocks = 0; // bytes of the tables of blocks so far
    const listed = index.columns.get("columns").rows.map((row) => {
      const [path, dtype, shape, together] = forms[u16(row, 12)], encoding = u16(row, 14), rows = u32(row, 16);
      const entry = [u64(row, 0), u32(row, 8), path, dtype, shape, rows, encoding, u32(row, 20), u32(row, 24), u32(row, 28)];
      if (!(encoding & BLOCKS)) return entry;
      const begin = blocks;
      blocks += 8 * Math.ceil(rows / together);
      return [...entry, [together, tables.subarray(begin, blocks)]];
    });
    demand(blocks === tables.length, "blocks of the index");
    const found = chunks.flatMap((chunk, number) => {
      let at = chunk.offset + chunk.length - chunk.bodyLength;
      return chunk.metadata.columns.map((descriptor) => {
        const entry = [at, number, ...descriptor];
        at += align(descriptor[5]);
        return entry;
      });
    });
    demand(JSON.stringify(listed) === JSON.stringify(found), "columns of the index");
  }

  /** The index of an undamaged batch says what its chunks say. */
  checkIndex(footer) {
    const chunks = this.chunks, index = this.records.at(-1);
    demand(index.type === INDEX && index.offset === u64(footer, 8), "offset of the index");
    const joined = chunks.flatMap((chunk) => chunk.columns.get("fragments").rows);
    demand(equal(concat(joined), concat(index.columns.get("fragments").rows)), "fragments of the index");
    index.columns.get("chunks").rows.forEach((row, i) => {
      const { offset, length, fragments } = chunks[i];
      const found = [offset, length, fragments.length, total(fragments.map(observationRows))];
      demand(found.every((number, j) => number === u64(row, 8 * j)), "chunks of the index");
    });
    this.checkColumns(index, chunks);
    for (const [path, raw, stored] of index.metadata.totals) {
      const columns = chunks.map((chunk) => chunk.columns.get(path.join("/"))).filter((column) => column !== undefined);
      const sizes = columns.map(({ encoding, raw, rows }) =>
        encoding & CONSTANT ? raw * rows.length : encoding & (CHANGES | DICTIONARY) ? rows[0].length * rows.length : raw);
      demand(total(sizes) === raw && total(columns.map((column) => column.stored)) === stored, "totals of the index");
    }
  }
}
