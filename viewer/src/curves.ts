// Some items of a column over a range of rows, each row or the minimum and maximum of each bin of rows.

export interface Curves {
  x: Float64Array; // rows, or the first row of each bin
  low: Float64Array; // (items, x.length)
  high: Float64Array; // the same array as `low` where nothing is decimated
  odd: Float64Array | null; // 1 where a row or bin holds NaN or an infinity; other NaN stand for missing values
  items: number;
  decimated: boolean;
  bin: number; // rows a bin
  rows: number; // of the column in all
  nan: number;
  infinite: number;
  missing: number;
  peak: number | null; // the row of the whole column that is farthest from zero, where the server says so
}

/** Return a whole column minus another one, as far as both go. */
export function difference(one: Curves, other: Curves): Curves {
  const rows = Math.min(one.x.length, other.x.length);
  const items = Math.min(one.items, other.items);
  const value = (curves: Curves, item: number, row: number): number => curves.low[item * curves.x.length + row]!;
  const low = Float64Array.from({ length: rows * items }, (_, i) => value(one, Math.floor(i / rows), i % rows) - value(other, Math.floor(i / rows), i % rows));
  const odd = one.odd && other.odd && one.odd.slice(0, rows).map((flag, row) => flag || other.odd![row]!);
  return { ...one, x: one.x.slice(0, rows), low, high: low, odd, items, rows };
}

/** Return rows [from, to) of some items of a whole column, in bins aligned to their width, as the server does it. */
export function decimate(whole: Curves, items: [number, number], from: number, to: number, pixels: number): Curves {
  const total = whole.x.length;
  const first = Math.max(0, from);
  const last = Math.min(total, to);
  const [begin, end] = [items[0], Math.min(items[1], whole.items)];
  const bin = last - first <= 2 * pixels ? 1 : Math.ceil((last - first) / pixels);
  const start = Math.floor(first / bin) * bin;
  const count = Math.max(0, Math.ceil((last - start) / bin));
  const x = Float64Array.from({ length: count }, (_, i) => start + i * bin);
  const low = new Float64Array(count * (end - begin)).fill(NaN);
  const high = bin === 1 ? low : new Float64Array(low.length).fill(NaN);
  const odd = new Float64Array(count);
  let [nan, infinite, missing] = [0, 0, 0];
  for (let item = begin; item < end; item++) {
    const base = (item - begin) * count;
    for (let row = start; row < last; row++) {
      const value = whole.low[item * total + row]!;
      const at = Math.floor((row - start) / bin);
      if (!Number.isFinite(value)) {
        const isMissing = Number.isNaN(value) && !whole.odd?.[row];
        if (!isMissing) odd[at] = 1;
        if (row >= first) isMissing ? missing++ : Number.isNaN(value) ? nan++ : infinite++;
        if (bin === 1) low[base + at] = value;
      } else {
        if (!(low[base + at]! <= value)) low[base + at] = value;
        if (!(high[base + at]! >= value)) high[base + at] = value;
      }
    }
  }
  return { x, low, high, odd, items: end - begin, decimated: bin > 1, bin, rows: whole.rows, nan, infinite, missing, peak: whole.peak };
}

/** Return the values of an item at a row: one number, or the range of its bin; null where nothing is loaded or recorded. */
export function valueAt(curves: Curves, item: number, row: number): [number, number] | null {
  const first = curves.x[0];
  if (first === undefined) return null;
  const at = Math.floor((row - first) / curves.bin);
  if (at < 0 || at >= curves.x.length) return null;
  const index = item * curves.x.length + at;
  if (Number.isNaN(curves.low[index]) && curves.odd && !curves.odd[at]) return null;
  return [curves.low[index]!, curves.high[index]!];
}
