// A trace at a glance: what it is, how its episodes are distributed, and the list of them.

import type { Axis, Bins, Changes, Histograms, Learning, TraceFacts } from "./api.ts";
import { brushed, chosenName, readable, withName, withRange } from "./conditions.ts";
import { fill, h, icon, set } from "./dom.ts";
import { EpisodeList, outcomeKind } from "./episode_list.ts";
import { Gallery } from "./gallery.ts";
import { HeatMap } from "./heat.ts";
import { Histogram, NamedBars } from "./histogram.ts";
import { LearningCurve, type CurveLine } from "./learning.ts";
import { COLOURS } from "./plots.ts";
import { Proofs } from "./proofs.ts";
import type { Route } from "./route.ts";
import { runLines } from "./runs.ts";
import { Refused } from "./source.ts";
import { count, plural } from "./words.ts";
import { debounced, FLAG_NAMES, isAbort, Latest, type Page, type View } from "./view.ts";

let axis: Axis = "steps"; // of curves, for all traces
let y = "return";

const SITE = "A static site has no policy versions and value errors of episodes, no Lint, no search for steps and no What if: 'gym-trace view' has them.";

export class Overview implements View {
  readonly element = h("main", { class: "overview" });
  readonly list: EpisodeList;
  private readonly gallery: Gallery;
  private readonly head = h("div", { class: "trace-head" });
  private readonly notes = h("div", { class: "banners" });
  private readonly search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search episodes", class: "search" });
  private readonly where = h("input", { type: "text", placeholder: "return > 100 and steps < 50", "aria-label": "Condition", class: "where", spellcheck: "false", autocomplete: "off", autocapitalize: "off" });
  private readonly problem = h("p", { class: "problem", role: "alert", hidden: true, id: "where-problem" });
  private readonly matched = h("output", { class: "matched" });
  private readonly curve = new LearningCurve({
    open: (episode) => this.open(episode),
    brush: (range) => this.brushCurve(range),
    axes: (chosen, of) => {
      [axis, y] = [chosen, of];
      void this.loadCurve(this.latest.signal);
    },
  });
  private learning: Learning | null = null;
  private readonly returns = new Histogram("return", (range) => this.brush("return", range));
  private readonly lengths = new Histogram("length", (range) => this.brush("length", range));
  private readonly outcomes = new NamedBars("outcome", (name) => this.choose("outcome", name));
  private readonly flags = new NamedBars("flag", (name) => this.choose("flag", name));
  private readonly filter = h("div", { class: "filter-lines" });
  private readonly proofs: Proofs | null;
  private readonly heat: HeatMap | null;
  private readonly latest = new Latest();
  private all: Histograms | null = null;
  private readonly typed = debounced(250, () => this.page.go({ where: this.where.value.trim(), search: this.search.value.trim() }, true));
  private readonly again = debounced(400, () => void this.load(true));

  constructor(private readonly page: Page, readonly trace: number, private route: Route) {
    this.list = new EpisodeList(page, trace, (sort) => page.go({ sort }, true));
    this.gallery = new Gallery(page, trace, this.list);
    this.list.onOpen((episode) => this.open(episode));
    this.search.addEventListener("input", this.typed);
    this.where.addEventListener("input", this.typed);
    for (const field of [this.search, this.where]) {
      field.addEventListener("keydown", (event) => {
        if (event.key === "Escape") {
          event.preventDefault(); // Chromium would empty a search field and not say so
          field.blur();
        }
        if (event.key === "Enter") {
          this.typed.cancel();
          page.go({ where: this.where.value.trim(), search: this.search.value.trim() }, true);
        }
      });
    }
    const saved = page.api.source.saved;
    this.proofs = page.api.source.readOnly ? null : new Proofs(page, trace);
    this.heat = this.proofs && new HeatMap(page.api, trace, (condition) => void this.proofs!.find(condition), (error) => page.fail(error));
    this.element.append(
      this.head, this.notes, ...(this.proofs ? [this.proofs.element] : []),
      h("div", { class: "query" }, [
        this.search,
        !saved && h("label", { class: "where-field" }, [h("span", { class: "prompt", "aria-hidden": "true" }, ["where"]), this.where]),
        this.matched,
        this.gallery.choice,
      ]),
      this.problem,
      this.curve.element,
      h("div", { class: "histograms" }, [this.returns.element, this.lengths.element, this.outcomes.element, this.flags.element]),
      ...(this.heat ? [this.heat.element] : []),
      this.list.element,
      this.gallery.element,
      this.filter,
    );
    this.flags.element.hidden = this.curve.element.hidden = true;
    this.drawHead();
    this.fields(route);
    void this.load(false);
  }

  update(route: Route): void {
    const before = this.route;
    this.route = route;
    this.fields(route);
    if (before.where !== route.where || before.search !== route.search || before.sort !== route.sort) void this.load(false);
  }

  changed(changes: Changes): void {
    if (!changes.traces.some(({ trace }) => trace === this.trace)) return;
    this.drawHead();
    this.proofs?.changed();
    this.again();
  }

  key(event: KeyboardEvent): boolean {
    switch (event.key) {
      case "/": this.search.focus(); this.search.select(); return true;
      case "w": this.where.focus(); return true;
      case "ArrowDown":
      case "ArrowUp": this.list.element.focus(); return true;
      case "c": if (!this.list.element.hidden) this.list.pick(); return true;
      case "Enter": {
        const episode = this.list.activeEpisode;
        if (episode !== null) this.open(episode);
        return true;
      }
    }
    return false;
  }

  close(): void {
    this.gallery.close();
    this.proofs?.close();
    this.heat?.close();
    this.latest.cancel();
    this.typed.cancel();
    this.again.cancel();
  }

  redraw(): void {
    this.curve.redraw();
    this.heat?.redraw();
  }

  private open(episode: number): void {
    this.page.go({ episode, step: 0, compare: null, zoom: null });
  }

  private get facts(): TraceFacts {
    return this.page.traces.find(({ trace }) => trace === this.trace)!;
  }

  private fields(route: Route): void {
    if (document.activeElement !== this.search) this.search.value = route.search;
    if (document.activeElement !== this.where) this.where.value = route.where;
  }

  private drawHead(): void {
    const { name, title, env_id, episodes, steps, live, lanes, damage, damage_notes = [], notes = [], facts = [] } = this.facts;
    fill(this.head, [
      h("div", { class: "title" }, [h("h1", {}, [title || name]), live && h("span", { class: "live" }, ["live"])]),
      h("p", { class: "numbers" }, [
        env_id !== null && h("span", { class: "env" }, [env_id]),
        h("span", {}, [plural(episodes, "episode")]),
        h("span", {}, [plural(steps, "step")]),
        lanes !== null && lanes > 1 && h("span", {}, [plural(lanes, "lane")]),
      ]),
      facts.length > 0 && h("details", { class: "about" }, [h("summary", {}, ["About"]), h("dl", {}, facts.flatMap(([key, value]) => [h("dt", {}, [key]), h("dd", {}, [value])]))]),
    ]);
    fill(this.notes, [
      ...notes.map((note) => h("p", { class: "banner quiet" }, [note])),
      damage > 0 && h("div", { class: "banner bad" }, [
        h("b", {}, ["Damaged"]), ` ${plural(damage, "damaged part")}; everything else is shown. `, h("code", {}, ["gym-trace edit repair"]), " keeps the readable episodes.",
        damage_notes.length > 0 && h("details", {}, [h("summary", {}, ["Details"]), h("ul", {}, damage_notes.map((note) => h("li", {}, [note])))]),
      ]),
    ]);
  }

  /** Fetch the list and the histograms; `grown` says that the trace itself has changed. */
  private async load(grown: boolean): Promise<void> {
    const signal = this.latest.next();
    const { where, search, sort } = this.route;
    try {
      const rows = await this.list.show({ where, search, sort }, signal);
      if (signal.aborted) return;
      this.gallery.show(grown);
      this.heat?.show(where, search, this.list.activeEpisode);
      const matched = search && this.page.api.source.saved ? this.list.length : rows.matched;
      this.problem.hidden = true;
      set(this.where, { "aria-invalid": null, "aria-describedby": null });
      this.matched.textContent = matched === rows.total ? plural(rows.total, "episode") : `${count(matched)} of ${plural(rows.total, "episode")}`;
      if (!this.all || grown) this.all = await this.page.api.histograms(this.trace, { where: "", search: "" }, signal);
      const some = where || search ? await this.page.api.histograms(this.trace, { where, search }, signal) : this.all;
      if (signal.aborted) return;
      this.drawHistograms(this.all, some);
      await this.loadCurve(signal);
      if (signal.aborted) return;
      if (!this.page.api.source.readOnly) await this.drawFilter();
      else if (this.page.api.source.page === "site") fill(this.filter, [h("p", { class: "quiet" }, [SITE])]);
    } catch (error) {
      if (isAbort(error)) return;
      if (error instanceof Refused && error.status === 400 && where) {
        this.problem.hidden = false;
        fill(this.problem, [error.message, error.hint !== null && h("span", { class: "hint" }, [error.hint])]);
        set(this.where, { "aria-invalid": "true", "aria-describedby": "where-problem" });
      } else {
        this.page.fail(error);
      }
    }
  }

  private async loadCurve(signal: AbortSignal): Promise<void> {
    const { where, search } = this.route;
    try {
      const wanted = this.learning?.ys.includes(y) ? y : "return";
      const learning = await this.page.api.learning(this.trace, { where, search }, axis, wanted, signal);
      if (signal.aborted) return;
      const { traces, api } = this.page;
      const beside = traces.length > 1 && traces.every(({ setting }) => setting < COLOURS) && api.source.compares && axis !== "version" && learning.y === "return";
      const others = beside ? runLines(await api.runs(axis, signal)).filter(({ traces }) => !traces.includes(this.trace)) : [];
      if (signal.aborted) return;
      this.learning = learning;
      this.drawCurve(learning, others);
    } catch (error) {
      if (!isAbort(error) && !(error instanceof Refused && error.status === 404)) this.page.fail(error); // 404: a page without curves
    }
  }

  private drawCurve({ axes, ys, y, proved, window, term, episodes, values }: Learning, others: CurveLine[]): void {
    this.curve.element.hidden = (episodes < 2 && y === "return") || axes.length === 0;
    if (this.curve.element.hidden) return;
    const shown = axes.includes(axis) ? axis : axes[0]!;
    const colour = this.facts.setting % COLOURS;
    const more = [...new Set(["return", "version", ...ys])].map((name): [string, Float64Array] => [name, values(name)]).filter(([, known]) => known.length);
    const line = { name: this.facts.name, colour, x: values(`mean_${shown}`), mean: values("mean"), low: values("low"), high: values("high") };
    const points = { colour, x: values(shown), y: values(y), episode: values("episode"), selected: values("selected"), at: values("at"), steps: values("steps"), more, proved };
    const about = [
      proved && `${count(proved.versions)} of ${plural(proved.of, "version")} proved${proved.differs && `; then ${proved.differs}`}`,
      window > 1 && `mean of ${count(window)} episodes, and 10 to 90 % of them`,
    ].filter(Boolean).join(" · ");
    this.curve.show(y, ys, shown, axes, [...others, line], points, brushed(this.route.where, term), about);
  }

  private brushCurve(range: [number, number] | null): void {
    if (!this.learning || this.page.api.source.saved) return;
    const { term } = this.learning;
    const whole = range && term === "end_time" ? [Math.floor(range[0]), Math.ceil(range[1])] as [number, number] : range;
    this.page.go({ where: withRange(this.route.where, term, whole, true) }, true);
  }

  private drawHistograms(all: Histograms, some: Histograms): void {
    const { where } = this.route;
    const { terms } = all;
    const ends = ({ edges }: Bins): [number, number] => [edges[0] ?? 0, edges[edges.length - 1] ?? 0];
    this.list.scale({ return: ends(all.return), length: ends(all.length) });
    this.returns.show(all.return, some.return, brushed(where, terms.return));
    this.lengths.show(all.length, some.length, brushed(where, terms.length));
    this.outcomes.show(all.outcome, some.outcome, chosenName(where, terms.outcome), outcomeKind);
    this.flags.element.hidden = !flagged(all);
    if (flagged(all)) this.flags.show(all.flag, some.flag, chosenName(where, terms.flag ?? "flag"), (name) => `flag-${name}`);
  }

  private brush(of: "return" | "length", range: [number, number] | null): void {
    if (!this.all || this.page.api.source.saved) return;
    const { edges } = this.all[of];
    const closed = range !== null && range[1] === edges[edges.length - 1];
    this.page.go({ where: withRange(this.route.where, this.all.terms[of], range && readable(range, edges), closed) }, true);
  }

  private choose(of: "outcome" | "flag", name: string): void {
    if (!this.all || this.page.api.source.saved) return;
    const column = this.all.terms[of] ?? of;
    this.page.go({ where: withName(this.route.where, column, chosenName(this.route.where, column) === name ? null : name) }, true);
  }

  /** The command that keeps what is flagged. */
  private async drawFilter(): Promise<void> {
    if (!this.all || !flagged(this.all)) {
      fill(this.filter, []);
      return;
    }
    const { lines } = await this.page.api.filterLines(this.trace);
    fill(this.filter, lines.map(({ title, line }) => h("div", { class: "command" }, [
      h("span", { class: "quiet" }, [title]),
      h("code", {}, [line]),
      h("button", { type: "button", class: "icon-button", "aria-label": "Copy the command", title: "Copy" }, [icon("copy")], {
        click: () => void navigator.clipboard.writeText(line).then(() => this.page.say("The command is copied."), (error: unknown) => this.page.fail(error)),
      }),
    ])));
  }
}

const isFlag = (name: string): boolean => name in FLAG_NAMES;

const flagged = ({ flag }: Histograms): boolean => flag.names.some((name, i) => isFlag(name) && flag.counts[i]! > 0);
