// The ring of a writer that was killed (docs/FORMAT.md, section 8): its slabs as chunks. Of rows alone.

import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { reader } from "./reader.mjs";

const { ENDS, HAS_INITIAL, STARTS, STOPS, absent, align, crc32, typedValue, unpack, unpackMetadata } = reader;

const MAGIC = Buffer.from("894754524e470d0a", "hex"), BOOT = "/proc/sys/kernel/random/boot_id";
const START = 1, INITIAL = 2, FLAG = 3, STOP = 4, END = 5, VALUE = 6, CHANGES = 7, WHOLE = 8, REWARD_TYPE = 9, CONTINUE = 10;
const ROWS = 1, SLAB_HEADER = 64, ENTRY = 56;

const bootId = () => (existsSync(BOOT) ? readFileSync(BOOT, "utf8").trim().replaceAll("-", "") : "0".repeat(32));
const sizeOf = (dtype, shape) => shape.reduce((a, b) => a * b, Number(/\d+$/.exec(dtype)[0]));

/** The slabs of a ring that have a larger number than that, in order, as chunks; and the last one's pending action. */
export function readRing(directory, file, after) {
  const bytes = readFileSync(join(directory, file));
  if (bytes.subarray(0, 8).every((byte) => byte === 0)) return { chunks: [], numbers: [], pending: null };
  if (!bytes.subarray(0, 8).equals(MAGIC) || crc32(bytes.subarray(0, 124)) !== bytes.readUInt32LE(124))
    throw new Error(`${file}: the header is damaged`);
  if (bytes.readUInt16LE(8) !== 1 || bytes.readUInt32LE(12) !== 0 || bytes.readUInt32LE(48) !== ROWS)
    throw new Error(`${file}: a version, feature or kind that is not known`);
  if (bytes.toString("hex", 32, 48) !== bootId()) return { chunks: [], numbers: [], pending: null };
  const count = bytes.readUInt32LE(52), [size, first] = [56, 64].map((at) => Number(bytes.readBigUInt64LE(at)));
  const packed = bytes.subarray(128, 128 + bytes.readUInt32LE(72));
  if (crc32(packed) !== bytes.readUInt32LE(76)) throw new Error(`${file}: the layout is damaged`);
  const slabs = Array.from({ length: count }, (_, i) => bytes.subarray(first + i * size, first + (i + 1) * size))
    .map((slab) => ({ slab, number: Number(slab.readBigUInt64LE(0)) }))
    .filter(({ number }) => number > after).sort((a, b) => a.number - b.number);
  const read = slabs.map(({ slab, number }) => new Slab(unpackMetadata(packed), slab, BigInt(number)));
  return { chunks: read, numbers: slabs.map(({ number }) => number), pending: read.at(-1)?.pending ?? null };
}

/** A slab of rows, with the columns and fragments of a chunk. Its columns have values, not bytes, but for starts. */
class Slab {
  constructor(layout, bytes, number) {
    Object.assign(this, { layout, bytes, number, fragments: [], columns: new Map(), pending: null, open: null });
    this.entries = this.readLog();
    this.before = new Map(); // of each column with changes, its last bytes
    this.rewardType = "<f8";
    let row = 0;
    while (this.hasMark(row, layout.done)) this.takeRow(row++);
    for (const entry of this.entries.filter((entry) => entry.row === row)) this.takeMark(entry, false);
    if (this.hasMark(row, layout.asked) && this.open) this.pending = this.readPending(row);
    if (this.open) this.close(0);
  }

  readLog() {
    const found = [];
    for (let at = SLAB_HEADER; at + ENTRY <= this.bytes.length; ) {
      const mark = this.bytes.readBigUInt64LE(at + 48), length = this.bytes.readUInt32LE(at + 4);
      if (mark !== this.mark(found.length + 1)) break;
      const [a, b, c, d] = [16, 24, 32, 40].map((offset) => this.bytes.readBigInt64LE(at + offset));
      found.push({
        row: this.bytes.readUInt32LE(at), kind: this.bytes.readUInt16LE(at + 8), flags: this.bytes.readUInt16LE(at + 10),
        column: this.bytes.readUInt32LE(at + 12), a, b, c, d, payload: this.bytes.subarray(at + ENTRY, at + ENTRY + length),
      });
      at += ENTRY + align(length);
    }
    return found;
  }

  mark(count) {
    return (this.number << 32n) | BigInt(count);
  }

  rowAt(row) {
    return this.bytes.length - (row + 1) * this.layout.row;
  }

  hasMark(row, offset) {
    const at = this.rowAt(row);
    return at >= SLAB_HEADER && this.bytes.readBigUInt64LE(at + offset) === this.mark(row + 1);
  }

  // -- what happened --------------------------------------------------------------------------------------------------

  takeRow(row) {
    const entries = this.entries.filter((entry) => entry.row === row);
    for (const entry of entries) this.takeMark(entry, true);
    const isStep = this.hasMark(row, this.layout.asked), steps = this.layout.columns.slice(this.layout.observations);
    this.layout.columns.slice(0, this.layout.observations).forEach((column, i) => this.add(column[0], this.value(entries, row, i)));
    if (isStep) {
      steps.forEach((column, i) => this.add(column[0], this.value(entries, row, this.layout.observations + i)));
      this.takeReward(entries, row);
      this.takeNotes(entries);
      this.open.steps++;
      this.nextStep++;
    }
    const flag = entries.find((entry) => entry.kind === FLAG);
    if (flag) this.close(STOPS | ENDS | flag.flags, flag);
  }

  /** Takes in what an entry says of episodes. hasRow: whether the row that it comes before is there. */
  takeMark(entry, hasRow) {
    const { kind, flags, a, b, c, d, payload } = entry;
    if (kind === CONTINUE) {
      this.episode = { id: Number(a), start: c, monotonic: d, seed: -1n };
      this.nextStep = Number(b);
      if (flags & 1) this.begin(0);
    } else if (kind === START && (hasRow || !(flags & 1))) {
      if (this.open) this.close(STOPS);
      this.episode = { id: Number(a), seed: b, start: c, monotonic: d };
      this.nextStep = 0;
      this.addPacked("starts", payload);
      this.begin(STARTS | (flags & 1 ? HAS_INITIAL : 0));
      if (!(flags & 1)) this.close(0);
    } else if (kind === INITIAL && hasRow) {
      if (this.open) this.close(STOPS);
      this.nextStep = Number(a);
      this.begin(HAS_INITIAL);
    } else if (kind === STOP || kind === END) {
      if (!this.open) this.begin(0);
      this.close(STOPS | (kind === END ? ENDS : 0), entry);
    } else if (kind === REWARD_TYPE && hasRow) {
      this.rewardType = payload.toString();
    }
  }

  begin(flags) {
    const { id: episode, seed, start, monotonic } = this.episode;
    this.open = { episode, firstStep: this.nextStep, steps: 0, lane: 0, flags, outcome: 0, seed, start, offset: start - monotonic };
    Object.assign(this.open, { duration: 0n, drift: 0n });
  }

  close(flags, end) {
    const fragment = this.open;
    fragment.flags |= flags;
    if (flags & ENDS) {
      const duration = end.d - this.episode.monotonic;
      Object.assign(fragment, { outcome: Number(end.a), duration, drift: end.c - end.d - fragment.offset });
    }
    this.fragments.push(fragment);
    this.open = null;
  }

  // -- values ---------------------------------------------------------------------------------------------------------

  add(path, value, missing = 0) {
    const name = path.join("/");
    if (!this.columns.has(name)) this.columns.set(name, { path, dtype: "value", rows: Array(missing).fill(absent) });
    this.columns.get(name).rows.push(value);
  }

  addPacked(name, payload) {
    if (!this.columns.has(name)) this.columns.set(name, { path: [name], dtype: "msgpack", rows: [] });
    this.columns.get(name).rows.push(payload);
  }

  /** The value of a leaf in a row. */
  value(entries, row, number) {
    const [, dtype, shape, offset] = this.layout.columns[number];
    const entry = entries.find(({ kind, column }) => [VALUE, CHANGES, WHOLE].includes(kind) && column === number);
    if (entry?.kind === VALUE) return unpack(entry.payload);
    if (offset !== null) {
      const at = this.rowAt(row) + offset;
      return typedValue(dtype, shape, this.bytes.subarray(at, at + sizeOf(dtype, shape)));
    }
    const bytes = Buffer.from(entry.kind === WHOLE ? entry.payload : this.before.get(number));
    if (entry.kind === CHANGES) {
      const word = [8, 4, 2, 1].find((size) => bytes.length % size === 0), count = Number(entry.a);
      for (let i = 0; i < count; i++)
        entry.payload.copy(bytes, word * entry.payload.readUInt32LE(4 * i), 4 * count + word * i, 4 * count + word * (i + 1));
    }
    this.before.set(number, bytes);
    return typedValue(dtype, shape, bytes);
  }

  takeReward(entries, row) {
    const odd = entries.find(({ kind, column }) => kind === VALUE && column === this.layout.columns.length);
    const at = this.rowAt(row) + this.layout.reward, width = sizeOf(this.rewardType, []);
    this.add(["rewards"], odd ? unpack(odd.payload) : typedValue(this.rewardType, [], this.bytes.subarray(at, at + width)));
  }

  takeNotes(entries) {
    const count = this.columns.get("rewards").rows.length - 1, columns = this.layout.columns.length;
    const valueOf = (number) => entries.find(({ kind, column }) => kind === VALUE && column === number);
    const info = valueOf(columns + 1), notes = valueOf(columns + 2);
    if (info) this.addPacked("infos", info.payload);
    const given = new Map(notes ? unpack(notes.payload) : []);
    for (const name of new Set([...this.noted, ...given.keys()]))
      this.add(["annotations", name], given.has(name) ? given.get(name) : absent, count);
  }

  get noted() {
    return [...this.columns.values()].filter(({ path }) => path[0] === "annotations").map(({ path }) => path[1]);
  }

  readPending(row) {
    const entries = this.entries.filter((entry) => entry.row === row);
    const numbers = this.layout.columns.map((_, i) => i).slice(this.layout.observations);
    return { episode: this.episode.id, step: this.nextStep, leaves: numbers.map((number) => this.value(entries, row, number)) };
  }
}
