// Numbers and names as people read them.

const GROUPED = new Intl.NumberFormat("en-US");

/** A whole number with separators. */
export const count = (value: number): string => GROUPED.format(value);

const COMPACT = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 2 });

/** A number in a few characters, such as 1.5K. */
export const compact = (value: number): string => (Math.abs(value) >= 1e12 ? short(value, 3) : COMPACT.format(value).replace("-", "−"));

/** "1 episode", "2 episodes". */
export const plural = (value: number, noun: string): string => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

/** A number with at most `digits` significant digits, whole numbers in full. */
export function short(value: number, digits = 4): string {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  let text: string;
  if (Number.isInteger(value) && size < 1e15) text = size >= 1e4 ? count(size) : String(size);
  else if (size >= 1e6 || size < 1e-4) text = size.toExponential(Math.max(0, digits - 2)).replace("e+", "e");
  else text = String(Number(size.toPrecision(digits)));
  return value < 0 ? `−${text}` : text;
}

/** Seconds as people say them, such as "1.5 min". */
export function duration(seconds: number): string {
  const [size, unit] = UNITS.find(([size]) => seconds >= size) ?? [1, "s"];
  return `${short(seconds / size, 3)} ${unit}`;
}

export const UNITS: [number, string][] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]]; // seconds

/** The value of a bin: one number, or a range. */
export function range([low, high]: [number, number]): string {
  return low === high || (Number.isNaN(low) && Number.isNaN(high)) ? short(low) : `${short(low, 3)} … ${short(high, 3)}`;
}

/** A condition's number: exact, and with a point only where it has one. */
export const exact = (value: number): string => String(value);

/** The name of an item of a column: "[2, 1]" for item 5 of shape (3, 2). */
export function itemName(item: number, shape: number[]): string {
  const parts: number[] = [];
  let rest = item;
  for (const size of [...shape].reverse()) {
    parts.unshift(rest % size);
    rest = Math.floor(rest / size);
  }
  return `[${parts.join(", ")}]`;
}
