// The list of episodes. Only the rows in sight exist; they are fetched in blocks, so a million rows cost as much as a hundred.

import { LIST_BLOCK, type EpisodeId, type ListColumn, type ListQuery, type Rows } from "./api.ts";
import { fill, h, icon, set, svg } from "./dom.ts";
import { count, short } from "./words.ts";
import { debounced, FLAG_NAMES, isAbort, type Page } from "./view.ts";

const ROW = 30; // pixels, as in app.css
const TALLEST = 8_000_000; // pixels; browsers stop at 17 to 33 million
const KEPT_BLOCKS = 40;

/** Widths in the grid; columns that are not named here share what is left. */
const WIDTHS: Record<string, string> = { episode: "5.5em", flag: "7em", outcome: "9.2em", return: "minmax(9em, 2fr)", length: "minmax(9em, 2fr)", lane: "4.5em", verify: "8.5em", found: "6em", seed: "8em", "value error": "minmax(7em, 1fr)" };

const UNSORTED = new Set(["verify", "found"]); // what the page has run is not in the trace

export const outcomeKind = (outcome: string): string =>
  outcome === "terminated" ? "terminated" : outcome === "truncated" ? "truncated" : outcome === "running" || outcome === "live" || outcome === "open" ? "running" : "broken";

let picked: EpisodeId | null = null; // the first of two episodes that are to be compared, of any trace

export class EpisodeList {
  readonly element: HTMLElement;
  private readonly head = h("div", { class: "row head", role: "row" });
  private readonly space = h("div", { class: "space" });
  private readonly body = h("div", { class: "window", role: "presentation" }, [this.space]);
  private readonly blocks = new Map<number, Rows>();
  private readonly asked = new Map<number, AbortController>();
  private query: ListQuery = { where: "", search: "", sort: "" };
  private columns: ListColumn[] = [];
  private ends: Record<string, [number, number]> = {};
  private total = 0;
  private active = 0;
  private pressed = false;
  private chosen: ((row: number) => void) | null = null;
  private order: Uint32Array | null = null; // of a saved page, which sorts its rows itself
  private readonly refill = debounced(60, () => this.fetchVisible());

  constructor(private readonly page: Page, private readonly trace: number, private readonly sorted: (sort: string) => void) {
    this.element = h("div", { class: "episodes", role: "grid", "aria-label": "Episodes", tabindex: 0 }, [this.head, this.body]);
    this.body.addEventListener("scroll", () => this.draw(), { passive: true });
    this.element.addEventListener("keydown", (event) => this.key(event));
    // A row that is replaced while a pointer is down on it gets no click.
    this.body.addEventListener("pointerdown", (event) => (this.pressed = (event.target as Element).closest(".row") !== null));
    for (const end of ["pointerup", "pointercancel"]) {
      window.addEventListener(end, () => {
        if (!this.pressed) return;
        this.pressed = false;
        setTimeout(() => this.draw()); // after the click
      });
    }
    new ResizeObserver(() => this.draw()).observe(this.body);
  }

  /** Show the first rows of a query and return its facts; Refused if the condition is wrong. */
  async show(query: ListQuery, signal: AbortSignal): Promise<Rows> {
    const rows = await this.page.api.episodes(this.trace, query, 0, LIST_BLOCK, signal);
    const fresh = JSON.stringify(query) !== JSON.stringify(this.query);
    this.query = query;
    for (const controller of this.asked.values()) controller.abort();
    this.asked.clear();
    this.blocks.clear();
    this.blocks.set(0, rows);
    this.columns = rows.columns;
    this.total = rows.matched;
    this.order = this.page.api.source.saved ? sortedRows(rows, query) : null;
    if (this.order) this.total = this.order.length;
    if (fresh) {
      this.active = 0;
      this.body.scrollTop = 0;
    }
    this.active = Math.min(this.active, Math.max(0, this.total - 1));
    this.space.style.height = `${Math.min(this.total * ROW, TALLEST)}px`;
    this.element.style.setProperty("--columns", this.columns.map(({ name }) => WIDTHS[name] ?? "minmax(6em, 1fr)").join(" "));
    set(this.element, { "aria-rowcount": this.total + 1 });
    this.drawHead();
    this.draw();
    return rows;
  }

  /** The smallest and largest values of columns that are shown as bars. */
  scale(ends: Record<string, [number, number]>): void {
    this.ends = ends;
    this.draw();
  }

  /** Return the episode before (-1) or after (1) another in the order of the list, as far as it is loaded. */
  neighbour(episode: number, by: -1 | 1): number | null {
    for (const [number, rows] of this.blocks) {
      for (let i = 0; i < rows.count; i++) {
        const row = number * LIST_BLOCK + i;
        if (this.value("episode", row) === episode) return this.value("episode", row + by) as number | null;
      }
    }
    return null;
  }

  onOpen(chosen: (episode: number) => void): void {
    this.chosen = (row) => {
      const episode = this.value("episode", row);
      if (typeof episode === "number") chosen(episode);
    };
  }

  get length(): number {
    return this.total;
  }

  /** Pick an episode; with the one that was picked before, go to their comparison. */
  pick(row = this.active): void {
    const { page, trace } = this;
    const episode = this.value("episode", row);
    if (typeof episode !== "number" || page.api.source.saved) return;
    const [before, again] = [picked, picked?.trace === trace && picked.episode === episode];
    picked = before ? null : { trace, episode };
    if (before && !again) {
      page.go({ trace: before.trace, episode: before.episode, step: 0, compare: { trace, episode }, zoom: null });
      return;
    }
    page.say(again ? `Episode ${episode} is not picked now.` : `Episode ${episode} is picked: pick another one, and they are compared.`);
    this.draw();
  }

  get activeEpisode(): number | null {
    const episode = this.value("episode", this.active);
    return typeof episode === "number" ? episode : null;
  }

  /** Return a value of a row that is loaded. */
  value(column: string, row: number): number | string | null {
    if (row < 0 || row >= this.total) return null;
    if (this.order) return this.blocks.get(0)!.value(column, this.order[row]!);
    const block = this.blocks.get(Math.floor(row / LIST_BLOCK));
    return block ? block.value(column, row - block.offset) : null;
  }

  /** Load a row. */
  async ready(row: number): Promise<void> {
    if (!this.loaded(row)) await this.fetch(Math.floor(row / LIST_BLOCK));
  }

  private loaded(row: number): boolean {
    return this.order !== null || this.blocks.has(Math.floor(row / LIST_BLOCK));
  }

  private drawHead(): void {
    const descending = this.query.sort.startsWith("-");
    const by = this.query.sort.replace(/^-/, "");
    fill(this.head, this.columns.map(({ name, title, kind }) => {
      const on = by === name;
      const sort = on ? (descending ? "descending" : "ascending") : "none";
      const next = on ? (descending ? "" : `-${name}`) : name;
      return h("div", { class: `cell ${kind} ${classOf(name)}`, role: "columnheader", "aria-sort": sort }, [
        UNSORTED.has(name) ? h("b", {}, [title]) : h("button", { type: "button", title: `Sort by ${title}` }, [title, on && icon(descending ? "down" : "up")], { click: () => this.sorted(next) }),
      ]);
    }));
  }

  /** The first row in sight, and how many. */
  private visible(): [number, number] {
    const seen = Math.ceil(this.body.clientHeight / ROW) + 1;
    return [Math.min(Math.floor(this.above() / ROW), Math.max(0, this.total - 1)), seen];
  }

  /** Pixels of rows above those in sight. Beyond TALLEST pixels the scroll bar stands for a part of the rows. */
  private above(): number {
    if (this.total * ROW <= TALLEST) return this.body.scrollTop;
    const scrollable = this.space.offsetHeight - this.body.clientHeight;
    const hidden = this.total * ROW - this.body.clientHeight;
    return scrollable > 0 ? Math.min(1, this.body.scrollTop / scrollable) * hidden : 0;
  }

  private top(row: number): number {
    if (this.total * ROW <= TALLEST) return row * ROW;
    const hidden = this.total * ROW - this.body.clientHeight;
    const scrollable = TALLEST - this.body.clientHeight;
    return (Math.min(row * ROW, hidden) / hidden) * scrollable;
  }

  private draw(): void {
    if (this.pressed) return;
    const [first, seen] = this.visible();
    const last = Math.min(this.total, first + seen);
    const shift = this.body.scrollTop - this.above();
    const rows: HTMLElement[] = [];
    for (let row = first; row < last; row++) {
      const element = this.row(row);
      element.style.transform = `translateY(${row * ROW + shift}px)`;
      rows.push(element);
    }
    fill(this.space, rows);
    set(this.element, { "aria-activedescendant": this.total ? `row-${this.active}` : null });
    if (rows.some((_, i) => !this.loaded(first + i))) this.refill();
  }

  private row(row: number): HTMLElement {
    const open = (): void => {
      this.active = row;
      this.chosen?.(row);
    };
    const attributes = { class: row === this.active ? "row active" : "row", role: "row", id: `row-${row}`, "aria-rowindex": row + 2, "aria-selected": String(row === this.active) };
    if (!this.loaded(row)) return h("div", { ...attributes, class: "row waiting" }, [h("div", { class: "cell" }, ["…"])]);
    if (picked?.trace === this.trace && picked.episode === this.value("episode", row)) attributes.class += " picked";
    return h("div", attributes, this.columns.map(({ name, kind }) => h("div", { class: `cell ${kind} ${classOf(name)}`, role: "gridcell" }, [name === "episode" && this.picker(row), this.bar(name, row), cell(name, this.value(name, row)), name === "outcome" && this.damage(row)])), { click: open });
  }

  private picker(row: number): Node | null {
    if (this.page.api.source.saved) return null;
    const name = `Compare episode ${this.value("episode", row)}`;
    return h("button", { type: "button", class: "pick", tabindex: -1, "aria-label": name, title: `${name} with another one (c)` }, [icon("compare")], {
      click: (event) => {
        event.stopPropagation();
        this.pick(row);
      },
    });
  }

  private damage(row: number): HTMLElement | null {
    return this.value("damage", row) === "damaged" ? h("span", { class: "damaged", role: "img", "aria-label": "damaged", title: "Some of its steps cannot be read" }, ["!"]) : null;
  }

  /** A bar from zero to the value, on the scale of the whole trace. */
  private bar(name: string, row: number): SVGElement | null {
    const ends = this.ends[name];
    const value = this.value(name, row);
    if (!ends || typeof value !== "number" || !Number.isFinite(value)) return null;
    const [low, high] = [Math.min(0, ends[0]), Math.max(0, ends[1])];
    const at = (number: number): number => ((number - low) / (high - low || 1)) * 100;
    return svg("svg", { class: "bar", viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" }, [
      svg("rect", { x: Math.min(at(0), at(value)), width: Math.max(0.6, Math.abs(at(value) - at(0))), height: 6 }),
    ]);
  }

  private fetchVisible(): void {
    const [first, seen] = this.visible();
    const wanted = new Set([Math.floor(first / LIST_BLOCK), Math.floor(Math.min(this.total - 1, first + seen) / LIST_BLOCK)]);
    for (const [block, controller] of this.asked) if (!wanted.has(block)) controller.abort();
    for (const block of wanted) if (!this.blocks.has(block) && !this.asked.has(block)) void this.fetch(block);
  }

  private async fetch(block: number): Promise<void> {
    const controller = new AbortController();
    this.asked.set(block, controller);
    try {
      const rows = await this.page.api.episodes(this.trace, this.query, block * LIST_BLOCK, LIST_BLOCK, controller.signal);
      if (controller.signal.aborted) return;
      this.blocks.set(block, rows);
      for (const old of this.blocks.keys()) {
        if (this.blocks.size <= KEPT_BLOCKS) break;
        this.blocks.delete(old);
      }
      this.draw();
    } catch (error) {
      if (!isAbort(error)) this.page.fail(error);
    } finally {
      if (this.asked.get(block) === controller) this.asked.delete(block);
    }
  }

  private key(event: KeyboardEvent): void {
    const seen = Math.max(1, Math.floor(this.body.clientHeight / ROW) - 1);
    const steps: Record<string, number> = { ArrowDown: 1, ArrowUp: -1, PageDown: seen, PageUp: -seen, Home: -this.total, End: this.total };
    const by = steps[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== this.element) return;
    if (by !== undefined) {
      this.active = Math.max(0, Math.min(this.total - 1, this.active + by));
      const [first, shown] = this.visible();
      const lastWhole = first + shown - 3;
      if (this.active < first) this.body.scrollTop = this.top(this.active);
      else if (this.active > lastWhole) this.body.scrollTop = this.top(Math.max(0, this.active - shown + 3));
      this.draw();
    } else if (event.key === "Enter") {
      this.chosen?.(this.active);
    } else {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  }
}

/** The class of a column; names of agents can be any text. */
const classOf = (name: string): string => (/^\w+$/.test(name) ? `of-${name}` : "of-other");

function cell(name: string, value: number | string | null): Node | string {
  if (value === null || value === "") return name === "flag" ? "" : "–";
  if (name === "outcome") return h("span", { class: `outcome ${outcomeKind(String(value))}` }, [value]);
  if (name === "verify") return h("span", { class: `outcome ${value === "identical" || value === "close" ? "running" : "broken"}` }, [value]);
  if (name === "found") return value === 0 ? "" : h("span", { class: "tag bad" }, [value]);
  if (name === "flag") return flagMark(String(value));
  if (typeof value === "number") return name === "episode" || name === "seed" || name === "lane" ? String(value) : name === "length" ? count(value) : short(value, 5);
  return value;
}

export function flagMark(flag: string): HTMLElement {
  return h("span", { class: `flag ${flag}` }, [FLAG_NAMES[flag as keyof typeof FLAG_NAMES] ?? flag]);
}

/** Rows of a saved page in the order that is asked for, those that hold the text searched for. */
function sortedRows(rows: Rows, { sort, search }: ListQuery): Uint32Array {
  const column = sort.replace(/^-/, "");
  const sign = sort.startsWith("-") ? -1 : 1;
  const sought = search.toLowerCase();
  const holds = (row: number): boolean => !sought || rows.columns.some(({ name }) => String(rows.value(name, row) ?? "").toLowerCase().includes(sought));
  const found = Array.from({ length: rows.count }, (_, row) => row).filter(holds);
  if (column) {
    found.sort((a, b) => {
      const [left, right] = [rows.value(column, a), rows.value(column, b)];
      if (left === null || right === null) return Number(left === null) - Number(right === null);
      return left === right ? a - b : (left < right ? -1 : 1) * sign;
    });
  }
  return Uint32Array.from(found);
}
