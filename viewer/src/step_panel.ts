// What was recorded at one step: action, reward, infos and texts; of two episodes, what differs stands out.

import { STEPS_BLOCK, type Api, type ColumnFacts, type EpisodeId, type Json, type StepFacts } from "./api.ts";
import { valueName } from "./bands.ts";
import { fill, h } from "./dom.ts";
import { isAbort } from "./view.ts";

const KEPT_BLOCKS = 24;
const MOST_LINES = 300;

class StepStore {
  private readonly blocks = new Map<number, StepFacts[]>();
  private asked: { block: number; controller: AbortController } | null = null;

  constructor(private readonly api: Api, private readonly id: EpisodeId, private readonly arrived: () => void, private readonly failed: (error: unknown) => void) {}

  get(row: number): StepFacts | null {
    const block = Math.floor(row / STEPS_BLOCK);
    const steps = this.blocks.get(block);
    if (!steps) void this.fetch(block);
    return steps?.[row % STEPS_BLOCK] ?? null; // their `step` counts from the first step of the episode, which may be lost
  }

  forget(): void {
    this.blocks.clear();
  }

  close(): void {
    this.asked?.controller.abort();
  }

  private async fetch(block: number): Promise<void> {
    if (this.asked?.block === block) return;
    this.asked?.controller.abort();
    const asked = { block, controller: new AbortController() };
    this.asked = asked;
    try {
      this.blocks.set(block, await this.api.steps(this.id, block, asked.controller.signal));
      for (const old of this.blocks.keys()) {
        if (this.blocks.size <= KEPT_BLOCKS) break;
        this.blocks.delete(old);
      }
    } catch (error) {
      if (!isAbort(error)) this.failed(error);
      return;
    } finally {
      if (this.asked === asked) this.asked = null;
    }
    this.arrived();
  }
}

export class StepPanel {
  readonly element: HTMLElement;
  private readonly title = h("h3", { "aria-level": 2 });
  private readonly list = h("div", { class: "values", role: "table", "aria-label": "Values of this step" });
  private stores: StepStore[] = [];
  private columns = new Map<string, ColumnFacts>();
  private position = 0;
  private all = false;

  constructor(private readonly api: Api, private readonly failed: (error: unknown) => void) {
    this.element = h("section", { class: "step", "aria-label": "Step", tabindex: 0 }, [this.title, this.list]);
  }

  /** columns: their names of numbers and values. */
  show(ids: EpisodeId[], columns: ColumnFacts[]): void {
    this.close();
    this.columns = new Map(columns.map((column) => [column.name.replace(/^(action|observation)s/, "$1"), column]));
    this.stores = ids.map((id) => new StepStore(this.api, id, () => this.draw(), this.failed));
  }

  setPosition(row: number): void {
    this.position = row;
    this.draw();
  }

  grow(): void {
    for (const store of this.stores) store.forget();
    this.draw();
  }

  close(): void {
    for (const store of this.stores) store.close();
  }

  private draw(): void {
    const found = this.stores.map((store) => store.get(this.position));
    this.title.textContent = `Step ${this.position}`;
    this.element.classList.toggle("waiting", found[0] === null);
    if (found[0] === null) return; // the values before stay until the new ones are there
    const sides = found.map((step) => new Map(step ? lines(step, this.columns) : []));
    const names = [...new Set(sides.flatMap((side) => [...side.keys()]))];
    const shown = this.all ? names : names.slice(0, MOST_LINES);
    fill(this.list, [
      ...shown.map((name) => {
        const values = sides.map((side) => side.get(name));
        const differs = values.length === 2 && values[0] !== values[1];
        return h("div", { class: differs ? "line differs" : "line", role: "row" }, [
          h("span", { class: "key", role: "rowheader", title: name }, name.split(/(?<=\.)/).flatMap((part) => [part, h("wbr")])),
          ...values.map((value, i) => h("span", { class: differs ? `${kindOf(value)} side-${i}` : kindOf(value), role: "cell" }, [value ?? "–"])),
        ]);
      }),
      shown.length < names.length && h("button", { type: "button", class: "more" }, [`Show ${names.length - shown.length} more`], { click: () => { this.all = true; this.draw(); } }),
    ]);
  }
}

/** The values of a step with their paths; short lists stay in one line. */
function* lines(step: StepFacts, columns: Map<string, ColumnFacts>): Generator<[string, string]> {
  const entries = Object.entries(step).filter(([name]) => name !== "step");
  const last = (name: string): number => Number(name.startsWith("observation")); // often long
  for (const [name, value] of entries.sort(([a], [b]) => last(a) - last(b))) yield* line(name, value, columns);
}

function* line(path: string, value: Json, columns: Map<string, ColumnFacts>): Generator<[string, string]> {
  const column = columns.get(path);
  if (value !== null && typeof value === "object" && !Array.isArray(value)) {
    for (const [name, part] of Object.entries(value)) yield* line(`${path}.${name}`, part, columns);
  } else if (column?.labels && Array.isArray(value) && value.length === column.labels.length) {
    for (const [i, part] of value.entries()) yield [`${path}.${column.labels[i]}`, text(part)];
  } else if (column?.values?.names && typeof value === "number") {
    yield [path, `${value} · ${valueName(column, value)}`];
  } else {
    yield [path, text(value)];
  }
}

function text(value: Json): string {
  if (typeof value === "string") return value;
  if (typeof value === "number") return plain(value);
  if (Array.isArray(value)) return `[${value.map((part) => text(part)).join(", ")}]`;
  return JSON.stringify(value);
}

const plain = (value: number): string => String(Number.isInteger(value) ? value : Number(value.toPrecision(7)));

function kindOf(value: string | undefined): string {
  if (value === undefined) return "value none";
  return /^[-\d[]/.test(value) || value === "true" || value === "false" ? "value number" : "value text";
}
