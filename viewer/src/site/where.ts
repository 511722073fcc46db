// Conditions and orders of --where and --sort, over the columns that the indexes of a trace have.
// The grammar is that of gym_trace/data/selecting/language.py.

import { Refusal } from "./files.ts";

export type Kind = "number" | "text" | "time" | "condition";

/** A column: its values by row, null where they are not known. Times are nanoseconds since 1970. */
export interface Column {
  kind: Kind;
  at(row: number): number | string | boolean | null;
}

type Value = number | string | boolean | null;
type Operand = { kind: Kind | "none" | "list"; at(row: number): Value; list?: Value[]; begin: number; end: number };

interface Token {
  kind: "number" | "text" | "name" | "sign" | "end";
  text: string;
  begin: number;
  end: number;
}

const TOKEN = /(?<number>(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:e[+-]?\d[\d_]*)?)|(?<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?<name>[\p{L}_][\p{L}\p{N}_]*)|(?<sign>==|!=|<=|>=|[-+*/%<>()[\],.])/iuy;
const CONSTANTS: Record<string, Value> = { True: true, true: true, False: false, false: false, None: null, none: null, null: null };
const RESERVED = ["and", "or", "not", "in", "is"];
const DEEPEST = 50;
const TIME = /^(\d{4})(?:-(\d\d)(?:-(\d\d)(?:[T ](\d\d):(\d\d)(?::(\d\d)(?:\.(\d{1,9}))?)?\s*(?:Z|([+-])(\d\d):?(\d\d))?)?)?)?$/;

/** The columns of a trace by name; null for one that only gym-trace itself knows, undefined for none. */
export type Columns = (name: string) => Column | null | undefined;

/** Return the rows of [0, count) for which a condition holds. Throws Refusal, which marks the position. */
export function rowsWhere(source: string, columns: Columns, count: number): Int32Array {
  const all = Int32Array.from({ length: count }, (_, i) => i);
  if (!source.trim()) return all;
  const parser = new Parser(source, columns);
  const holds = parser.asCondition(parser.condition());
  parser.expectEnd("'and', 'or' or a comparison");
  return all.filter(holds);
}

/** Sort rows by keys, stably; values that are not known come last. `rank` puts some rows behind others where a key names the return. */
export function sortRows(source: string, columns: Columns, rows: Int32Array, isComplete: ((row: number) => boolean) | null): Int32Array {
  if (!source.trim()) return rows;
  const parser = new Parser(source, columns);
  const keys: { key: Operand; sign: number; named: boolean }[] = [];
  do {
    const sign = parser.takes("-") ? -1 : 1;
    const key = parser.sum();
    keys.push({ key, sign, named: /\breturn\b/.test(source.slice(key.begin, key.end)) });
  } while (parser.takes(","));
  parser.expectEnd("',' and another column");
  return rows.sort((a, b) => {
    for (const { key, sign, named } of keys) {
      const [left, right] = [key.at(a), key.at(b)];
      if (left === null || right === null) {
        if (left !== right) return left === null ? 1 : -1;
      }
      if (named && isComplete && isComplete(a) !== isComplete(b)) return isComplete(a) ? -1 : 1;
      if (left !== null && right !== null && left !== right) return left < right ? -sign : sign;
    }
    return a - b;
  });
}

class Parser {
  private readonly tokens: Token[];
  private next = 0;
  private depth = 0;

  constructor(private readonly source: string, private readonly columns: Columns) {
    this.tokens = this.tokenize();
  }

  private error(begin: number, end: number, problem: string): Refusal {
    return new Refusal(400, `${problem}\n  ${this.source.replace(/\s/g, " ")}\n  ${" ".repeat(begin)}${"^".repeat(Math.max(1, Math.min(end, this.source.length) - begin))}`);
  }

  private tokenize(): Token[] {
    const found: Token[] = [];
    for (let at = 0; ; ) {
      while (/\s/.test(this.source[at] ?? "")) at++;
      if (at >= this.source.length) return [...found, { kind: "end", text: "the end", begin: at, end: at + 1 }];
      TOKEN.lastIndex = at;
      const match = TOKEN.exec(this.source);
      const sign = this.source[at]!;
      if (!match) throw this.error(at, at + 1, `"'`.includes(sign) ? "missing closing quote" : `unexpected character ${sign}${sign === "=" ? "; write == to compare" : ""}`);
      const kind = (["number", "text", "name", "sign"] as const).find((name) => match.groups![name] !== undefined)!;
      found.push({ kind, text: match[0], begin: at, end: TOKEN.lastIndex });
      at = TOKEN.lastIndex;
    }
  }

  private get token(): Token {
    return this.tokens[this.next]!;
  }

  takes(...texts: string[]): Token | null {
    const { kind, text } = this.token;
    return (kind === "sign" || kind === "name") && texts.includes(text) ? this.tokens[this.next++]! : null;
  }

  private expect(text: string, opened: Token): Token {
    const token = this.takes(text);
    if (!token) throw this.error(this.token.begin, this.token.end, `missing '${text}' for '${opened.text}'`);
    return token;
  }

  expectEnd(instead: string): void {
    if (this.token.kind !== "end") throw this.error(this.token.begin, this.token.end, `expected ${instead}, not '${this.token.text}'`);
  }

  private nested<T>(token: Token, part: () => T): T {
    if (++this.depth > DEEPEST) throw this.error(token.begin, token.end, `more than ${DEEPEST} nested brackets or signs`);
    const found = part();
    this.depth--;
    return found;
  }

  private text({ begin, end }: { begin: number; end: number }): string {
    return this.source.slice(begin, end);
  }

  asCondition(operand: Operand): (row: number) => boolean {
    if (operand.kind !== "condition") throw this.error(operand.begin, operand.end, `${this.text(operand)} is ${NAMES[operand.kind]}, not a condition; compare it, such as ${this.text(operand)} == …`);
    return (row) => operand.at(row) === true;
  }

  condition(): Operand {
    return this.logical("or", () => this.logical("and", () => this.negation()));
  }

  private logical(sign: "and" | "or", part: () => Operand): Operand {
    const first = part();
    const parts = [first];
    while (this.takes(sign)) parts.push(part());
    if (parts.length === 1) return first;
    const masks = parts.map((one) => this.asCondition(one));
    const at = sign === "and" ? (row: number) => masks.every((mask) => mask(row)) : (row: number) => masks.some((mask) => mask(row));
    return { kind: "condition", at, begin: first.begin, end: parts.at(-1)!.end };
  }

  private negation(): Operand {
    const word = this.takes("not");
    if (!word) return this.comparison();
    const operand = this.nested(word, () => this.negation());
    const mask = this.asCondition(operand);
    return { kind: "condition", at: (row) => !mask(row), begin: word.begin, end: operand.end };
  }

  private comparison(): Operand {
    const parts = [this.sum()];
    const masks: ((row: number) => boolean)[] = [];
    for (let token = this.takes("==", "!=", "<=", ">=", "<", ">", "in", "is", "not"); token; token = this.takes("==", "!=", "<=", ">=", "<", ">", "in", "is", "not")) {
      let sign = token.text;
      if (sign === "not" && !this.takes("in")) throw this.error(this.token.begin, this.token.end, "expected 'in' after 'not'");
      if (sign === "not") sign = "not in";
      if (sign === "is" && this.takes("not")) sign = "is not";
      parts.push(this.sum());
      masks.push(this.compared(sign, parts.at(-2)!, parts.at(-1)!));
    }
    if (!masks.length) return parts[0]!;
    return { kind: "condition", at: (row) => masks.every((mask) => mask(row)), begin: parts[0]!.begin, end: parts.at(-1)!.end };
  }

  private compared(sign: string, a: Operand, b: Operand): (row: number) => boolean {
    const mask = this.plainly(sign, a, b);
    return ["!=", "is not", "not in"].includes(sign) ? (row) => !mask(row) : mask;
  }

  private plainly(sign: string, a: Operand, b: Operand): (row: number) => boolean {
    const ordered = sign[0] === "<" || sign[0] === ">";
    if (sign.startsWith("is") && a.kind !== "none" && b.kind !== "none") throw this.error(b.begin, b.end, `'${sign}' supports only None; write ${sign === "is" ? "==" : "!="}`);
    if (sign.endsWith("in")) {
      if (b.kind === "text" && a.kind === "text") return (row) => a.at(row) !== null && b.at(row) !== null && String(b.at(row)).includes(String(a.at(row)));
      if (b.kind !== "list") throw this.error(b.begin, b.end, `${this.text(b)} is ${NAMES[b.kind]}; 'in' takes text or a list such as [1, 2]`);
      const equal = b.list!.map((value) => this.plainly(value === null ? "is" : "==", a, { ...b, kind: kindOf(value), at: () => value }));
      return (row) => equal.some((mask) => mask(row));
    }
    if (a.kind === "list" || b.kind === "list") throw this.error(a.begin, b.end, "lists support only 'in'");
    if (a.kind === "none" || b.kind === "none") {
      if (ordered) throw this.error(a.begin, b.end, "None has no order; write 'is None'");
      return (row) => a.at(row) === null && b.at(row) === null;
    }
    if (a.kind === "time" || b.kind === "time") [a, b] = [this.asTime(a), this.asTime(b)];
    if (a.kind !== b.kind) throw this.error(b.begin, b.end, `${this.text(a)} is ${NAMES[a.kind]}, ${this.text(b)} is ${NAMES[b.kind]}; they cannot be compared`);
    if (a.kind === "condition" && ordered) throw this.error(a.begin, a.end, "true and false have no order; write == or !=");
    const compare = COMPARE[sign]!;
    return (row) => {
      const [left, right] = [a.at(row), b.at(row)];
      return left !== null && right !== null && compare(left, right);
    };
  }

  private asTime(operand: Operand): Operand {
    if (operand.kind === "time") return operand;
    const match = operand.kind === "text" ? TIME.exec(String(operand.at(0)).trim()) : null;
    if (!match) throw this.error(operand.begin, operand.end, 'not a time; write times as "2026-11-01" or "2026-11-01 20:15", in UTC');
    const [year, month = 1, day = 1, hour = 0, minute = 0, second = 0] = match.slice(1, 7).map((part) => (part === undefined ? undefined : Number(part)));
    const shift = (match[8] === "-" ? -1 : 1) * (60 * Number(match[9] ?? 0) + Number(match[10] ?? 0));
    const time = 1e6 * (Date.UTC(year!, month! - 1, day, hour, minute, second) - 60_000 * shift) + Number((match[7] ?? "").padEnd(9, "0"));
    return { ...operand, kind: "time", at: () => time };
  }

  sum(): Operand {
    return this.arithmetic("+-", () => this.arithmetic("*/%", () => this.factor()));
  }

  private arithmetic(signs: string, part: () => Operand): Operand {
    let left = part();
    for (let sign = this.takes(...signs); sign; sign = this.takes(...signs)) {
      const [a, b, of] = [this.number(left), this.number(part()), CALCULATE[sign.text]!];
      const at = (row: number): number | null => {
        const [x, y] = [a.at(row), b.at(row)];
        return x === null || y === null ? null : finiteOrNull(of(x as number, y as number));
      };
      left = { kind: "number", at, begin: a.begin, end: b.end };
    }
    return left;
  }

  private number(operand: Operand): Operand {
    if (operand.kind !== "number") throw this.error(operand.begin, operand.end, `${this.text(operand)} is ${NAMES[operand.kind]}, not a number${operand.kind === "time" ? "; use duration for seconds from start to end" : ""}`);
    return operand;
  }

  private factor(): Operand {
    const token = this.token;
    const { begin } = token;
    if (this.takes("-", "+")) {
      const part = this.number(this.nested(token, () => this.factor()));
      const at = token.text === "+" ? part.at : (row: number): Value => (part.at(row) === null ? null : -(part.at(row) as number));
      return { ...part, at, begin };
    }
    if (this.takes("[")) return this.nested(token, () => this.list(token, "]", []));
    if (this.takes("(")) {
      return this.nested(token, () => {
        if (this.token.text === ")") return this.list(token, ")", []);
        const inner = this.condition();
        if (this.takes(",")) return this.list(token, ")", [inner]);
        return { ...inner, begin, end: this.expect(")", token).end };
      });
    }
    this.next += token.kind === "end" ? 0 : 1;
    if (token.kind === "number") return this.literal(token, Number(token.text.replaceAll("_", "")));
    if (token.kind === "text") return this.literal(token, token.text.slice(1, -1).replace(/\\(.)/gs, (_, c: string) => ({ n: "\n", t: "\t", r: "\r" })[c] ?? c));
    if (token.kind !== "name" || RESERVED.includes(token.text)) throw this.error(begin, token.end, `expected a column, number or text, not '${token.text}'`);
    if (Object.hasOwn(CONSTANTS, token.text)) return this.literal(token, CONSTANTS[token.text]!);
    if (this.takes("(")) return this.call(token);
    return this.column(token);
  }

  private call(token: Token): Operand {
    if (!["abs", "isnan", "isinf"].includes(token.text)) throw this.error(token.begin, token.end, `unknown function '${token.text}'; use abs(), isnan() or isinf()`);
    const part = this.number(this.nested(token, () => this.sum()));
    const end = this.expect(")", token).end;
    if (token.text === "abs") return { kind: "number", at: (row) => (part.at(row) === null ? null : Math.abs(part.at(row) as number)), begin: token.begin, end };
    const test = token.text === "isnan" ? (value: Value) => value === null : (value: Value) => Math.abs(value as number) === Infinity;
    return { kind: "condition", at: (row) => test(part.at(row)), begin: token.begin, end };
  }

  private column(token: Token): Operand {
    const column = this.columns(token.text);
    if (column === undefined) throw this.error(token.begin, token.end, `no column '${token.text}' on this page`);
    if (column === null || [".", "["].includes(this.token.text)) throw this.error(token.begin, token.end, `'${token.text}' is not in the index that this page reads; 'gym-trace view' on a machine knows it`);
    return { ...column, begin: token.begin, end: token.end };
  }

  private literal({ begin, end }: Token, value: Value): Operand {
    return { kind: kindOf(value), at: () => value, begin, end };
  }

  private list(opened: Token, closing: string, parts: Operand[]): Operand {
    let closed = this.takes(closing);
    while (!closed) {
      parts.push(this.factor());
      closed = this.takes(",") ? this.takes(closing) : this.expect(closing, opened);
    }
    return { kind: "list", at: () => null, list: parts.map((part) => part.at(0)), begin: opened.begin, end: closed.end };
  }
}

const NAMES = { number: "a number", time: "a time", text: "text", condition: "true or false", list: "a list", none: "None" };
const kindOf = (value: Value): Kind | "none" => (value === null ? "none" : typeof value === "number" ? "number" : typeof value === "string" ? "text" : "condition");
const finiteOrNull = (value: number): number | null => (Number.isNaN(value) ? null : value);
const COMPARE: Record<string, (a: number | string | boolean, b: number | string | boolean) => boolean> = {
  "==": (a, b) => a === b, "!=": (a, b) => a === b, "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b,
};
const CALCULATE: Record<string, (a: number, b: number) => number> = {
  "+": (a, b) => a + b, "-": (a, b) => a - b, "*": (a, b) => a * b,
  "/": (a, b) => (b === 0 ? NaN : a / b), "%": (a, b) => (b === 0 ? NaN : a - Math.floor(a / b) * b),
};
