// Reads gym-trace directories and prints what is in each as a line of JSON, every column as a hash of its bytes.
// Written from docs/FORMAT.md alone, to show that the document is enough; numbers in parentheses are its sections.
// Made for small traces, which it holds in memory. Node.js has no flock, so that every writer is taken for dead.
//
//     node read_trace.mjs TRACE_DIRECTORY...

import { createHash } from "node:crypto";
import { existsSync, readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { Batch } from "./batch.mjs";
import { canonical } from "./canonical.mjs";
import { reader } from "./reader.mjs";
import { readRing } from "./ring.mjs";

const { ENDS, Extension, HAS_INITIAL, HEADER, INDEX, ID_RANGE, OUTCOMES, STARTS, TERMINATED, TRUNCATED, TUPLE, absent, align, asTyped, crc32, isMisfit, joined, leavesOf, nameOf,
  observationRows, originsOf, typedValue, unpack } = reader;
const sha256 = (...parts) => parts.reduce((hash, part) => hash.update(part), createHash("sha256")).digest("hex");

// -- episodes (4) -----------------------------------------------------------------------------------------------------

/** Adds the fragments of a chunk to the episodes, a Map by id, that they belong to. */
function takeChunk({ columns, fragments }, episodes) {
  const starts = columns.get("starts")?.rows.map(unpack) ?? [];
  let step = 0, observation = 0;
  for (const f of fragments) {
    if (!episodes.has(f.episode)) episodes.set(f.episode, { id: f.episode, lane: f.lane, runs: [] });
    const episode = episodes.get(f.episode);
    const rowsOf = ({ path, rows }) => path[0] === "observations"
      ? rows.slice(observation, observation + observationRows(f)) : rows.slice(step, step + f.steps);
    takeSteps(episode, f, new Map([...columns].map(([name, column]) => [name, { ...column, rows: rowsOf(column) }])));
    if (f.flags & STARTS) episode.start ??= { __proto__: f, more: starts.shift() };
    if (f.flags & ENDS) episode.end ??= f;
    step += f.steps;
    observation += observationRows(f);
  }
}

function takeSteps(episode, f, columns) {
  let run = episode.runs.at(-1);
  if (f.flags & HAS_INITIAL || (f.steps > 0 && run?.firstStep + run?.steps !== f.firstStep)) {
    run = { firstStep: f.firstStep, steps: 0, trimmed: !(f.flags & HAS_INITIAL), pieces: [], terminated: [], truncated: [] };
    episode.runs.push(run);
  }
  if (!observationRows(f)) return;
  run.steps += f.steps;
  run.pieces.push({ steps: f.steps, columns });
  if (f.flags & TERMINATED) run.terminated.push(run.steps - 1);
  if (f.flags & TRUNCATED) run.truncated.push(run.steps - 1);
}

// -- what is printed --------------------------------------------------------------------------------------------------

/** The leaves of a space (5): by name the dtype and shape of a typed column, null for one of values. */
const leavesByName = (space, name) =>
  leavesOf(space, [name]).map(({ path, dtype, shape }) => [nameOf(path), dtype === null ? null : { dtype, shape }]);

function describeRun(run, { id, lane, start, end }, schema) {
  const cut = run.trimmed ? 1 : 0; // the step before the first observation is lost
  const steps = run.steps - cut;
  const leaves = new Map([...leavesByName(schema.observation_space, "observations"), ...leavesByName(schema.action_space, "actions"),
    ["rewards", { dtype: "<f8", shape: [] }]]);
  for (const [steps, name] of run.pieces.flatMap((piece) => [...piece.columns.keys()].map((name) => [piece.steps, name])))
    if (name === "infos" || (steps && name.startsWith("annotations/"))) leaves.set(name, null);
  const whole = [["observations", schema.observation_space, 0], ["actions", schema.action_space, cut]].flatMap(
    ([name, space, cut]) => describeWhole(name, space, leavesByName(space, name), run.pieces, cut, leaves));
  const columns = [...leaves].map(([name, leaf]) => {
    const told = describeLeaf(name, leaf, run.pieces, name.startsWith("observations") ? 0 : cut);
    return [name, told];
  }).concat(whole);
  const marks = (at) => sha256(Buffer.from(Array.from({ length: steps }, (_, i) => (at.includes(i + cut) ? 1 : 0))));
  const seed = [-1n, undefined].includes(start?.seed) ? null : start.seed === -2n ? start.more.get("seed") : start.seed;
  const more = ["options", "rng_state", "reset_info"].map((key) => start?.more.get(key) ?? null);
  if (more[2] !== null) more[2] = unpack(more[2]);
  return {
    episode_id: id, lane, first_step: run.firstStep + cut, steps, outcome: OUTCOMES[end?.outcome ?? 0],
    seed: seed === null ? null : String(seed), reset: sha256(canonical(more)),
    start_time: start ? String(start.start) : null, start_monotonic: start ? String(start.start - start.offset) : null,
    end_time: start && end ? String(start.start + end.duration + end.drift) : null,
    end_monotonic: start && end ? String(start.start - start.offset + end.duration) : null,
    columns: Object.fromEntries([...columns, ["terminations", `|b1 ${steps} ${marks(run.terminated)}`],
      ["truncations", `|b1 ${steps} ${marks(run.truncated)}`]]),
  };
}

/** Values that do not have the structure of their space (6, code 9), as one column of whole values; its leaves go. */
function describeWhole(name, space, own, pieces, cut, leaves) {
  const rows = new Map(own.map(([path]) => [path, valuesOf(path, pieces)]));
  const first = rows.get(own[0]?.[0]) ?? [];
  if (own.length < 2 || !first.some(isMisfit)) return [];
  for (const [path] of own) leaves.delete(path);
  const join = (keys, parts) => (keys ? new Map(keys.map((key, k) => [key, parts[k]])) : new Extension(TUPLE, parts));
  const whole = (i) => joined(space, own.map(([path]) => rows.get(path)[i]).values(), join);
  const values = first.map((value, i) => (isMisfit(value) ? value.content : whole(i))).slice(cut);
  return [[name, `values ${values.length} ${sha256(canonical(values))}`]];
}

function valuesOf(name, pieces) {
  return pieces.flatMap(({ steps, columns }) => {
    const column = columns.get(name);
    if (column === undefined) return name.startsWith("annotations/") ? Array(steps).fill(absent) : [];
    if (column.dtype === "value") return column.rows; // of a ring
    return column.rows.map((row) => (column.dtype === "msgpack" ? unpack(row) : typedValue(column.dtype, column.shape, row)));
  });
}

/** Rows that all have one dtype and shape as one array, others as a list of values. leaf: what the space says. */
function describeLeaf(name, leaf, pieces, cut) {
  const values = valuesOf(name, pieces);
  const typed = leaf === null && !name.startsWith("annotations/") ? [null] : values.map(asTyped);
  const { dtype, shape } = typed[0] ?? leaf ?? {};
  const rows = values.length - cut;
  if (dtype && typed.every((row) => row?.dtype === dtype && row.shape.join() === shape.join()))
    return `${dtype} ${[rows, ...shape].join("x")} ${sha256(...typed.slice(cut).map((row) => row.bytes))}`;
  return `values ${rows} ${sha256(canonical(values.slice(cut).map((value) => (value === absent ? null : value))))}`;
}

// -- a directory (1), journals (7) ------------------------------------------------------------------------------------

function findWriters(directory) {
  const writers = new Map();
  for (const name of readdirSync(directory).sort()) { // X.gtb comes before X.gtb.part
    const match = /^([\w-][\w.-]{0,119}?)\.(?:manifest\.jsonl|ring|(\d{6,9})\.gtb(\.part)?)$/.exec(name);
    if (match === null) continue;
    const [, writer, number] = match;
    if (!writers.has(writer)) writers.set(writer, { batches: new Map(), manifest: null, ring: null });
    const files = writers.get(writer);
    if (name.endsWith(".ring")) files.ring = name;
    else if (number === undefined) files.manifest = name;
    else if (!files.batches.has(Number(number))) files.batches.set(Number(number), name);
  }
  const known = [...writers].filter(([, files]) => files.manifest !== null || files.batches.size);
  return new Map(known.sort(([a], [b]) => (a < b ? -1 : 1)));
}

/** Whether the index in the line of a batch, or its header alone, is that in the file. */
function isIndexOf({ file, index }, bytes) {
  const raw = Buffer.from(index, "base64"), record = raw.subarray(0, -4);
  const at = Number(record.readBigUInt64LE(24)), end = at + HEADER + align(record.readUInt32LE(12)) + Number(record.readBigUInt64LE(16));
  return crc32(new Uint8Array(Buffer.concat([record, Buffer.from(file)]))) === raw.readUInt32LE(record.length)
    && record.equals(bytes.subarray(at, at + record.length)) && record.readUInt16LE(8) === INDEX && [HEADER, end - at].includes(record.length);
}

function readJournal(directory, name) {
  const lines = readFileSync(join(directory, name), "utf8").split("\n").slice(0, -1).map((line) => JSON.parse(line));
  const closed = lines.find((line) => line.type === "closed");
  const dropped = new Map(lines.flatMap((line, i) => (line.type === "dropped" ? [[line.file, i]] : [])));
  const listed = lines.filter((line, i) => line.type === "batch" && i > (dropped.get(line.file) ?? -1));
  const batches = listed.map((line) => {
    const path = join(directory, line.file);
    const bytes = existsSync(path) ? readFileSync(path) : Buffer.alloc(0);
    const agrees = bytes.length === line.bytes && crc32(new Uint8Array(bytes)) === line.crc32;
    return { ...line, agrees: agrees && (line.index === undefined || isIndexOf(line, bytes)) };
  });
  return { schema: lines[0], closed: closed ? [closed.episodes, closed.steps] : null, batches };
}

/** What is in the ring of a writer and in none of these chunks (8). */
function readEnd(directory, name, chunks) {
  const complete = chunks.filter(({ metadata }) => metadata.slab && !metadata.slab[1]).map(({ metadata }) => metadata.slab[0]);
  if (name === null) return { chunks: [], numbers: [], pending: null };
  return readRing(directory, name, Math.max(0, ...complete));
}

function readWriter(directory, writer, files) {
  const journal = files.manifest && readJournal(directory, files.manifest);
  const batches = [...files.batches].sort(([a], [b]) => a - b).map(([, file]) => new Batch(directory, file));
  const schema = batches.find((batch) => batch.schema !== undefined)?.schema ?? journal.schema;
  const episodes = new Map();
  const chunks = batches.flatMap((batch) => batch.chunks), ring = readEnd(directory, files.ring, chunks);
  for (const chunk of [...chunks.filter(({ metadata }) => !ring.numbers.includes(metadata.slab?.[0])), ...ring.chunks])
    takeChunk(chunk, episodes);
  if (schema.recorder?.keep_bytes !== undefined) // what began in a dropped batch is gone
    for (const [id, { start }] of episodes) if (start === undefined) episodes.delete(id);
  const origins = originsOf(schema);
  if (origins !== null) return origins.flatMap((origin, number) => {
    if (origin === null) return [];
    const own = [...episodes.values()].filter(({ id }) => Math.floor(id / ID_RANGE) === number);
    const runs = own.flatMap((episode) => episode.runs.map((run) => describeRun(run, { ...episode, id: episode.id % ID_RANGE }, origin)));
    return { writer: origin.writer, split: origin.split, damage: batches.flatMap((batch) => batch.damage), episodes: runs };
  });
  return {
    writer, split: schema.split, closed: journal?.closed ?? null, journal: journal?.batches ?? [],
    batches: batches.map(({ file, sealed, torn }) => ({ file, sealed, torn })),
    damage: batches.flatMap((batch) => batch.damage),
    pending: ring.pending && { ...ring.pending, leaves: ring.pending.leaves.map(canonical) },
    episodes: [...episodes.values()].flatMap((episode) => episode.runs.map((run) => describeRun(run, episode, schema))),
  };
}

for (const directory of process.argv.slice(2)) {
  const found = [...findWriters(directory)].flatMap(([writer, files]) => readWriter(directory, writer, files));
  process.stdout.write(JSON.stringify(found.sort((a, b) => (a.writer < b.writer ? -1 : 1))) + "\n");
}
