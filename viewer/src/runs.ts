// Several traces beside each other, as by gym-trace compare: their learning curves, and statistics with intervals.

import type { Axis, Changes, Estimate, Runs, Setting, TraceFacts } from "./api.ts";
import { fill, h, svg, type Child } from "./dom.ts";
import { LearningCurve, type CurveLine } from "./learning.ts";
import { COLOURS } from "./plots.ts";
import { HOME, type Route } from "./route.ts";
import { count, duration, plural, short } from "./words.ts";
import { debounced, Latest, type Page, type View } from "./view.ts";

const AXES: Axis[] = ["steps", "episodes", "time"];

export class RunsView implements View {
  readonly element = h("main", { class: "overview runs" });
  private readonly head = h("div", { class: "trace-head" });
  private readonly notes = h("div", { class: "banners" });
  private readonly table = h("div", { class: "runs-table", tabindex: 0, role: "region", "aria-label": "Statistics of the traces" });
  private readonly note = h("p", { class: "quiet" });
  private readonly curve: LearningCurve;
  private readonly latest = new Latest();
  private readonly again = debounced(400, () => void this.load());
  private axis: Axis = "steps";

  constructor(private readonly page: Page) {
    this.curve = new LearningCurve({
      open: () => {},
      brush: () => {},
      axes: (axis) => {
        this.axis = axis;
        void this.load();
      },
    });
    this.curve.element.hidden = true;
    this.element.append(this.head, this.notes, this.curve.element, this.table, this.note);
    void this.load();
  }

  update(_route: Route): void {}

  changed(_changes: Changes): void {
    this.again();
  }

  key(_event: KeyboardEvent): boolean {
    return false;
  }

  close(): void {
    this.latest.cancel();
    this.again.cancel();
  }

  redraw(): void {
    this.curve.redraw();
  }

  private async load(): Promise<void> {
    const signal = this.latest.next();
    const { traces } = this.page;
    fill(this.head, [h("h1", {}, ["Compare"]), h("p", { class: "numbers" }, [plural(traces.length, "trace")])]);
    try {
      const runs = await this.page.api.runs(this.axis, signal);
      if (!signal.aborted) this.draw(runs);
    } catch (error) {
      this.page.fail(error);
    }
  }

  private draw(runs: Runs): void {
    const environments = new Set(runs.groups.flatMap(({ environments }) => environments));
    fill(this.notes, [environments.size > 1 && h("div", { class: "banner" }, ["Returns of different environments: ", [...environments].map((name) => name || "one without an id").join(", ")])]);
    const lines = runLines(runs);
    this.curve.element.hidden = lines.length === 0;
    const several = runs.groups.some(({ traces }) => traces.length > 1);
    const about = [runs.window > 1 && `mean of ${count(runs.window)} complete episodes`, several && "95 % intervals over runs"].filter(Boolean).join(", ");
    if (lines.length) this.curve.show("return", ["return"], this.axis, AXES, lines, null, null, about);
    fill(this.table, [statistics(runs, this.page.traces, (trace) => this.page.go({ ...HOME, trace }))]);
    this.note.textContent = `Complete episodes, with 95 % bootstrap intervals over ${several ? "the runs of a name; over the episodes of a single run" : "the episodes of each trace"}. IQM: the mean without the lowest and the highest quarter.`;
  }
}

/** The curves of settings, without those that have none. */
export function runLines({ grid, groups }: Runs): (CurveLine & { traces: number[] })[] {
  const numbers = (values: (number | null)[]): Float64Array => Float64Array.from(values, (value) => value ?? NaN);
  return groups.map(({ traces, name, curve, low, high }, i) => ({ traces, name, colour: i % COLOURS, x: numbers(grid), mean: numbers(curve), low: numbers(low), high: numbers(high) }))
    .filter(({ mean }) => mean.some(Number.isFinite));
}

function statistics({ groups }: Runs, all: TraceFacts[], open: (trace: number) => void): HTMLElement {
  const ends = groups.flatMap(({ iqm }) => [iqm.value, iqm.low, iqm.high]).filter((value) => value !== null);
  const scale: [number, number] = [Math.min(0, ...ends), Math.max(0, ...ends)];
  const known = (value: number | null, shown: (value: number) => string = (value) => short(value, 4)): string => (value === null ? "–" : shown(value));
  const columns: [string, (run: Setting, colour: number) => Child[]][] = [
    ["episodes", ({ episodes }) => [count(episodes)]],
    ["steps", ({ steps }) => [count(steps)]],
    ["mean return", ({ mean }) => interval(mean)],
    ["median", ({ median }) => interval(median)],
    ["IQM", ({ iqm }) => interval(iqm)],
    ["", ({ iqm }, colour) => [whisker(iqm, scale, colour)]],
    ["length", ({ lengths }) => [known(lengths)]],
    ["outcomes", ({ outcomes }) => [Object.entries(outcomes).map(([name, number]) => `${name} ${count(number)}`).join(", ")]],
    ["time", ({ seconds }) => [known(seconds, duration)]],
    ["steps/s", ({ steps_per_second }) => [known(steps_per_second, (value) => short(value, 3))]],
  ];
  return h("table", {}, [
    h("thead", {}, [h("tr", {}, [h("th", { scope: "col" }, [groups.some(({ traces }) => traces.length > 1) ? "setting" : "trace"]), ...columns.map(([name]) => (name ? h("th", { scope: "col" }, [name]) : h("td")))])]),
    h("tbody", {}, groups.map((run, i) => {
      const name = (tag: "button" | "span", text: string, trace: number): HTMLElement =>
        h(tag, { type: tag === "button" ? tag : null, class: `name series-${i % COLOURS}` }, [h("i", { class: "swatch", "aria-hidden": "true" }), text], tag === "button" ? { click: () => open(trace) } : {});
      const [first = 0, ...others] = run.traces;
      const runs = [first, ...others].map((trace) => h("button", { type: "button", class: "quiet run" }, [all.find((one) => one.trace === trace)?.name], { click: () => open(trace) }));
      return h("tr", {}, [
        h("th", { scope: "row" }, others.length ? [name("span", run.name, first), h("div", {}, runs)] : [name("button", run.name, first)]),
        ...columns.map(([name, cell]) => h("td", { class: name === "outcomes" ? "text" : null }, cell(run, i % COLOURS))),
      ]);
    })),
  ]);
}

function interval({ value, low, high }: Estimate): Child[] {
  if (value === null) return ["–"];
  return [short(value, 4), low !== null && high !== null && h("span", { class: "quiet" }, [` ${short(low, 4)} … ${short(high, 4)}`])];
}

/** A dot with its interval, on the scale of all rows, from zero. */
function whisker({ value, low, high }: Estimate, [from, to]: [number, number], colour: number): SVGElement | null {
  if (value === null) return null;
  const at = (number: number): number => ((number - from) / (to - from || 1)) * 96 + 2;
  return svg("svg", { class: `whisker series-${colour}`, viewBox: "0 0 100 12", preserveAspectRatio: "none", "aria-hidden": "true" }, [
    svg("line", { class: "base", x1: at(0), x2: at(0), y1: 0, y2: 12 }),
    svg("line", { x1: at(low ?? value), x2: at(high ?? value), y1: 6, y2: 6 }),
    svg("line", { class: "value", x1: at(value), x2: at(value), y1: 1, y2: 11 }),
  ]);
}
