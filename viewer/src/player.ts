// One episode, or two side by side: pictures, plots and values at one position.

import { EDITED, type Changes, type ColumnFacts, type Difference, type EpisodeFacts, type EpisodeId, type Flag, type Mark, type FrameBlock } from "./api.ts";
import { askEpisode } from "./dialogs.ts";
import { fill, h, icon, type Child } from "./dom.ts";
import { outcomeKind } from "./episode_list.ts";
import { FrameStore, Picture } from "./frames.ts";
import { GridFrames, planesOf } from "./grid.ts";
import { PlotStack } from "./plots.ts";
import { markList, neighbourMark } from "./proofs.ts";
import { Rendering } from "./rendering.ts";
import { offers } from "./offers.ts";
import { LIST, type Route } from "./route.ts";
import { Refused } from "./source.ts";
import { StepPanel } from "./step_panel.ts";
import { splitter } from "./splitter.ts";
import { SPEEDS, Transport } from "./transport.ts";
import { WhatIf } from "./whatif.ts";
import { count, plural, short } from "./words.ts";
import { FLAG_NAMES, type Page, type View } from "./view.ts";

const DEFAULT_FPS = 30;
const LATE = 0.1; // seconds that playing makes up for; after a longer wait it goes on from where it is
const MOST_LISTED = 50; // findings of an episode
const FLAG_KEYS: Record<string, Exclude<Flag, null>> = { g: "good", b: "bad", l: "look" };

interface Side {
  id: EpisodeId;
  facts: EpisodeFacts;
  frames: FrameStore | null;
  picture: Picture;
}

export class Player implements View {
  readonly element = h("main", { class: "player", tabindex: -1 });
  private readonly head = h("div", { class: "episode-head" });
  private readonly banner = h("div", { class: "banners" });
  private readonly pictures = h("div", { class: "pictures" });
  private readonly chooser = h("select", { class: "chooser", "aria-label": "Picture" });
  private readonly stage: HTMLElement;
  private readonly columns: HTMLElement;
  private readonly plots: PlotStack;
  private readonly transport: Transport;
  private readonly panel: StepPanel;
  private readonly whatif: WhatIf;
  private rendering: Rendering | null = null;
  private sides: Side[] = [];
  private difference: Difference | null = null;
  private marks: Mark[] = []; // findings in the trace of the first side
  private position = 0;
  private playing = false;
  private speed = 1;
  private clock = { time: 0, row: 0 };
  private due: number | null = null; // the step whose pictures playing waits for
  private frame = 0;
  private routeTimer = 0;
  private loading = 0; // counts loads, so that a late answer is known as one
  private shownRoute: Route;

  constructor(private readonly page: Page, route: Route) {
    this.shownRoute = route;
    const failed = (error: unknown): void => this.page.fail(error);
    this.plots = new PlotStack(page.api, { seek: (row) => this.seek(row), zoom: (zoom) => this.page.go({ zoom }, true), failed });
    this.whatif = new WhatIf(page, this.plots);
    this.panel = new StepPanel(page.api, failed);
    this.transport = new Transport({
      toggle: () => this.toggle(),
      seek: (row) => this.seek(row),
      by: (steps) => this.seek(this.position + steps),
      speed: (speed) => this.setSpeed(speed),
    });
    this.chooser.addEventListener("change", () => this.page.go({ picture: this.chooser.value }, true));
    this.stage = h("div", { class: "stage" }, [this.pictures, this.chooser, this.panel.element]);
    this.columns = h("div", { class: "columns" }, [this.stage, splitter(() => this.columns, !page.api.source.saved), this.plots.element]);
    this.element.append(this.head, this.banner, this.whatif.element, this.columns, this.transport.element);
    void this.load(route);
  }

  update(route: Route): void {
    const before = this.shownRoute;
    this.shownRoute = route;
    const same = before.trace === route.trace && before.episode === route.episode && JSON.stringify(before.compare) === JSON.stringify(route.compare);
    if (!same) {
      this.pause();
      void this.load(route);
      return;
    }
    if (!this.sides.length) return;
    if (before.picture !== route.picture) this.openPictures();
    this.plots.setZoom(route.zoom);
    if (route.step !== this.position && route.step !== before.step) this.seek(route.step);
  }

  changed(changes: Changes): void {
    const grown = this.sides.some(({ id, facts }) => {
      const now = changes.traces.find(({ trace }) => trace === id.trace);
      return now !== undefined && (facts.live || now.version !== facts.version);
    });
    if (grown) void this.grow();
    this.whatif.changed(changes);
  }

  /** Colours have changed. */
  redraw(): void {
    this.plots.redraw();
  }

  close(): void {
    this.loading++;
    cancelAnimationFrame(this.frame);
    clearTimeout(this.routeTimer);
    for (const { frames } of this.sides) frames?.close();
    this.rendering?.close();
    this.whatif.close();
    this.plots.close();
    this.panel.close();
  }

  key(event: KeyboardEvent): boolean {
    const by = event.shiftKey ? 10 : 1;
    switch (event.key) {
      case " ": this.toggle(); return true;
      case "ArrowLeft": this.seek(this.position - by); return true;
      case "ArrowRight": this.seek(this.position + by); return true;
      case "Home": this.seek(0); return true;
      case "End": this.seek(this.length); return true;
      case "[": this.setSpeed(SPEEDS[SPEEDS.indexOf(this.speed) - 1] ?? this.speed); return true;
      case "]": this.setSpeed(SPEEDS[SPEEDS.indexOf(this.speed) + 1] ?? this.speed); return true;
      case "+":
      case "=": this.zoomBy(0.5); return true;
      case "-": this.zoomBy(2); return true;
      case "0": this.page.go({ zoom: null }, true); return true;
      case "n": this.neighbour(1); return true;
      case "p": this.neighbour(-1); return true;
      case "c": void this.askCompare(); return true;
      case "d": if (this.difference?.step != null) this.seek(this.difference.step); return true;
      case "f": this.enlarge(); return true;
      case "i": this.whatif.toggle(); return true;
      case "m":
      case "M": this.toMark(event.shiftKey ? -1 : 1); return true;
      case "Escape": this.element.classList.contains("large") ? this.enlarge() : this.page.go(LIST); return true;
    }
    const flag = FLAG_KEYS[event.key];
    if (flag && !this.page.api.source.readOnly) {
      void this.flag(flag);
      return true;
    }
    return false;
  }

  /** Make the picture as large as the window, or as small as before. */
  private enlarge(): void {
    const large = this.element.classList.toggle("large");
    if (large) window.scrollTo(0, 0);
    this.page.say(large ? "Large picture; f or Escape makes it small again." : "Small picture.");
  }

  private get length(): number {
    return Math.max(0, ...this.sides.map(({ facts }) => facts.length));
  }

  private async load(route: Route): Promise<void> {
    const turn = ++this.loading;
    const ids: EpisodeId[] = [{ trace: route.trace!, episode: route.episode! }];
    if (route.compare) ids.push(route.compare);
    this.element.classList.add("loading");
    try {
      const [marks, ...facts] = await Promise.all([this.page.api.marks(ids[0]!.trace), ...ids.map((id) => this.page.api.episode(id))]);
      if (turn !== this.loading) return;
      for (const { frames } of this.sides) frames?.close();
      this.sides = ids.map((id, i) => ({ id, facts: facts[i]!, frames: null, picture: new Picture(`Episode ${id.episode}`) }));
      this.difference = null;
      this.marks = marks;
      this.element.classList.add("shown");
      this.element.classList.toggle("two", ids.length === 2);
      this.position = Math.min(route.step, this.length);
      this.rendering?.close();
      this.rendering = new Rendering(this.page, { position: () => this.position, arrived: (done) => void this.pictured(done) });
      this.rendering.show(this.sides);
      this.openPictures();
      this.panel.show(ids, this.sides[0]!.facts.columns);
      this.plots.setZoom(null);
      this.showPlots();
      this.plots.setZoom(route.zoom);
      this.whatif.show(ids[0]!, this.sides[0]!.facts);
      this.drawHead();
      this.seek(this.position);
      this.element.focus({ preventScroll: true });
      if (ids.length === 2) await this.compare(turn, ids[0]!, ids[1]!);
    } catch (error) {
      if (turn !== this.loading) return;
      fill(this.banner, [h("p", { class: "banner bad", role: "alert" }, [error instanceof Error ? error.message : String(error)])]);
      this.page.fail(error);
    } finally {
      if (turn === this.loading) this.element.classList.remove("loading");
    }
  }

  /** Find the first difference while the episodes are on the page already: long ones take seconds. */
  private async compare(turn: number, a: EpisodeId, b: EpisodeId): Promise<void> {
    const difference = await this.page.api.compare(a, b);
    if (turn !== this.loading) return;
    this.difference = difference;
    this.plots.mark(difference.step);
    this.drawHead();
  }

  /** A live episode has grown, or a flag or a rendering has changed. */
  private async grow(): Promise<void> {
    const turn = this.loading;
    try {
      const [marks, ...facts] = await Promise.all([this.page.api.marks(this.sides[0]!.id.trace), ...this.sides.map(({ id }) => this.page.api.episode(id))]);
      if (turn !== this.loading) return;
      if (facts.some(({ identity }, i) => identity !== this.sides[i]!.facts.identity)) {
        this.page.say("The trace was edited: this number is another episode now.", "error");
        void this.load(this.shownRoute);
        return;
      }
      this.marks = marks;
      const longer = facts.some(({ length }, i) => length !== this.sides[i]!.facts.length);
      const pictured = facts.some(({ frames }, i) => frames.join() !== this.sides[i]!.facts.frames.join());
      const asked = facts.some(({ columns }, i) => opinions(columns) !== opinions(this.sides[i]!.facts.columns));
      const atEnd = this.position === this.length;
      this.sides.forEach((side, i) => {
        side.facts = facts[i]!;
        side.frames?.grow(rowsOf(side.facts, side.frames.column));
      });
      this.drawHead();
      if (pictured) this.openPictures();
      if (asked) this.showPlots();
      if (!longer) return;
      this.panel.grow();
      this.plots.grow(this.sides.map(({ id, facts: { columns, length } }) => ({ id, columns, length })));
      this.seek(atEnd ? this.length : this.position);
    } catch (error) {
      this.page.fail(error);
    }
  }

  private showPlots(): void {
    this.plots.show(this.sides.map(({ id, facts: { columns, length } }) => ({ id, columns, length })));
    this.plots.mark(this.difference?.step ?? null);
  }

  private openPictures(): void {
    const saved = this.page.api.source.saved;
    const pictured = [...new Set(this.sides.flatMap(({ facts }) => facts.frames))];
    const grids = this.sides.flatMap(({ facts }) => facts.columns.filter((column) => planesOf(column, saved))).map(({ name }) => name);
    const names = [...new Set([...pictured, ...grids])];
    const wanted = this.shownRoute.picture ?? "";
    const chosen = names.includes(wanted) ? wanted : names.includes("render") ? "render" : names[0];
    for (const side of this.sides) {
      side.frames?.close();
      side.frames = null;
      const column = side.facts.columns.find(({ name }) => name === chosen);
      if (!column) continue;
      const planes = planesOf(column, saved);
      const grid = planes && new GridFrames(this.page.api, side.id, column, planes, (range) => side.picture.range(range));
      side.picture.range("");
      const ask = (block: number, signal: AbortSignal): Promise<FrameBlock> => (grid ? grid.frames(block, signal) : this.page.api.frames(side.id, column.name, block, signal));
      side.frames = new FrameStore(ask, column.name, rowsOf(side.facts, column.name), (row, bitmap) => side.picture.show(row, bitmap), () => this.drawPictures(), (error) => {
        this.pause();
        this.page.fail(error);
      });
      if (chosen === "render") side.frames.refresh(this.rendering?.busy ?? false);
    }
    fill(this.chooser, names.map((name) => h("option", { value: name, selected: name === chosen }, [name === "render" ? "rendered again" : name])));
    this.chooser.hidden = names.length < 2;
    fill(this.pictures, [
      ...this.sides.map(({ frames, picture, id, facts }) => {
        picture.element.className = this.two ? `picture side-${this.sides.findIndex((side) => side.picture === picture)}` : "picture";
        picture.shape(facts.columns.find(({ name }) => name === chosen)?.frame_shape ?? null);
        picture.title(this.two ? this.nameOf(id) : "");
        return frames && picture.element;
      }),
      this.rendering?.element,
      chosen === undefined && this.page.api.source.page === "site" && h("p", { class: "render quiet" }, ["No pictures were recorded. This page has no simulator: 'gym-trace view' on a machine can render the episode."]),
    ]);
    this.rendering?.offer(this.sides.map(({ facts }) => facts));
    this.pictures.hidden = ![...this.pictures.children].some((child) => !(child as HTMLElement).hidden);
    this.element.classList.toggle("no-pictures", chosen === undefined);
    this.drawPictures();
  }

  /** Pictures of a rendering have arrived. */
  private async pictured(done: boolean): Promise<void> {
    if (done || this.sides.some(({ frames }) => frames?.column !== "render")) await this.grow();
    for (const { frames } of this.sides) if (frames?.column === "render") frames.refresh(!done);
  }

  private drawHead(): void {
    const [side, other] = this.sides;
    if (!side) return;
    const { facts } = side;
    const { saved, readOnly } = this.page.api.source;
    const fact = (name: string, of: (facts: EpisodeFacts) => string | null): Child => {
      const values = this.sides.map(({ facts }) => of(facts));
      if (values.every((value) => value === null)) return null;
      return h("span", { class: "fact" }, [h("span", { class: "quiet" }, [name]), ...values.flatMap((value, i) => [" ", h("span", { class: this.two ? `side-${i}` : null }, [value ?? "–"])])]);
    };
    const outcome = (of: EpisodeFacts): HTMLElement => h("span", { class: `outcome ${outcomeKind(of.outcome)}` }, [of.outcome]);
    const step = (by: -1 | 1, label: string): HTMLElement =>
      h("button", { type: "button", class: "icon-button", "aria-label": label, title: label }, [icon(by < 0 ? "left" : "right")], { click: () => this.neighbour(by) });
    const flags = readOnly ? [] : Object.entries(FLAG_KEYS).map(([key, flag]) =>
      h("button", { type: "button", class: `flag-button ${flag}`, "aria-pressed": String(facts.flag === flag), title: `Flag as ${FLAG_NAMES[flag]} (${key})` }, [FLAG_NAMES[flag]], { click: () => void this.flag(flag) }));
    fill(this.head, [
      h("div", { class: "title" }, [
        step(-1, "Previous episode (p)"),
        h("h1", { class: other ? "side-0" : null }, [`Episode ${facts.episode}`]),
        step(1, "Next episode (n)"),
        outcome(facts),
        other && h("h2", { class: "side-1" }, [`${other.id.trace === side.id.trace ? "Episode" : `${this.page.traces[other.id.trace]?.name ?? ""} ·`} ${other.id.episode}`]),
        other && outcome(other.facts),
        facts.live && h("span", { class: "live" }, ["live"]),
        readOnly && facts.flag !== null && h("span", { class: `flag ${facts.flag}` }, [FLAG_NAMES[facts.flag]]),
      ]),
      h("div", { class: "numbers" }, [
        fact("return", (of) => of.return === null ? null : short(of.return, 6)),
        fact("steps", (of) => count(of.length)),
        ...(facts.figures ?? []).map(([name]) => fact(name, (of) => of.figures?.find(([one]) => one === name)?.[1] ?? null)),
        fact("lane", (of) => of.lane === null ? null : String(of.lane)),
        fact("seed", (of) => of.seed === null ? null : String(of.seed)),
        facts.facts.length > 0 && h("details", { class: "about" }, [h("summary", {}, ["About"]), h("dl", {}, facts.facts.flatMap(([name, value]) => [h("dt", {}, [name]), h("dd", {}, [value])]))]),
      ]),
      h("div", { class: "actions" }, [
        h("div", { class: "flags", role: "group", "aria-label": "Flag" }, flags),
        this.whatif.possible && h("button", { type: "button", class: "button", title: "Branch off at this step (i)" }, [icon("branch"), "What if"], { click: () => this.whatif.toggle() }),
        !saved && (other
          ? h("button", { type: "button", class: "button" }, [icon("close"), "End comparison"], { click: () => this.page.go({ compare: null }) })
          : h("button", { type: "button", class: "button", title: "Compare with another episode (c)" }, [icon("compare"), "Compare"], { click: () => void this.askCompare() })),
      ]),
    ]);
    fill(this.banner, [
      ...this.sides.map(({ facts: { damage, episode } }) => damageBanner(damage, other ? `Episode ${episode}: ` : "")),
      other && this.differenceBanner(),
      this.foundBanner(),
    ]);
    this.transport.show(this.length, this.difference?.step ?? null, this.marksHere);
  }

  /** Whether two episodes are side by side. */
  private get two(): boolean {
    return this.sides.length === 2;
  }

  private nameOf({ trace, episode }: EpisodeId): string {
    const { traces } = this.page;
    return `${traces.length > 1 ? `${traces[trace]?.name ?? ""} · ` : ""}episode ${episode}`;
  }

  private get marksHere(): Mark[] {
    return this.marks.filter(({ episode }) => episode === this.sides[0]?.id.episode);
  }

  private foundBanner(): Child {
    const marks = this.marksHere;
    if (!marks.length) return null;
    const list = markList(marks.slice(0, MOST_LISTED), ({ position }) => this.seek(position ?? 0), false);
    return h("details", { class: "banner found" }, [h("summary", {}, [plural(marks.length, "finding"), h("span", { class: "quiet" }, [" · m goes to the next one"])]), list]);
  }

  /** Go to the next or the previous finding, also of another episode. */
  private toMark(by: 1 | -1): void {
    const id = this.sides[0]?.id;
    if (!id) return;
    const mark = neighbourMark(this.marks, id.episode, this.position, by);
    if (!mark) {
      this.page.say(this.marks.length ? `There is no finding ${by > 0 ? "after" : "before"} this step.` : "There are no findings. Lint, check or verify the trace on its page.");
      return;
    }
    if (mark.episode === id.episode) this.seek(mark.position ?? 0);
    else this.page.go({ episode: mark.episode, step: mark.position ?? 0, compare: null, zoom: null });
    this.page.say(mark.text);
  }

  private differenceBanner(): Child {
    const difference = this.difference;
    const [a, b] = this.sides;
    if (!a || !b) return null;
    if (!difference) return h("p", { class: "banner quiet", role: "status" }, ["Looking for the first difference…"]);
    if (difference.same) return h("p", { class: "banner same" }, [h("b", {}, ["Same"]), ` ${this.nameOf(a.id)} and ${this.nameOf(b.id)} hold the same values, bit for bit.`]);
    const go = difference.step === null ? null : h("button", { type: "button", class: "button", title: "Go there (d)" }, ["Go there"], { click: () => this.seek(difference.step!) });
    return h("div", { class: "banner difference" }, [
      h("p", {}, [
        h("b", {}, [difference.step === null ? "Different" : `First difference at step ${count(difference.step)}`]),
        difference.column !== null && ` in ${difference.column}`,
        difference.note !== null && `: ${difference.note}`,
      ]),
      difference.a !== null && difference.b !== null && h("p", { class: "sides" }, [h("span", { class: "side-0" }, [this.nameOf(a.id)]), h("code", {}, [difference.a]), h("span", { class: "side-1" }, [this.nameOf(b.id)]), h("code", {}, [difference.b])]),
      go,
    ]);
  }

  private seek(row: number): void {
    if (!this.sides.length) return;
    this.position = Math.max(0, Math.min(this.length, Math.round(row)));
    this.startClock();
    this.draw();
    clearTimeout(this.routeTimer);
    // Browsers limit how often an address may change.
    this.routeTimer = window.setTimeout(() => this.page.go({ step: this.position }, true), this.playing ? 1000 : 200);
  }

  private draw(): void {
    this.transport.setPosition(this.position);
    this.whatif.setPosition(this.position);
    this.drawPictures();
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => {
      this.plots.setPosition(this.position);
      this.panel.setPosition(this.position);
      if (this.playing) this.advance();
    });
  }

  private drawPictures(): void {
    for (const { frames, picture, facts } of this.sides) {
      if (!frames) continue;
      const row = Math.min(this.position, rowsOf(facts, frames.column) - 1);
      const bitmap = frames.get(row);
      if (frames.isLost(row)) picture.lost(row);
      else picture.show(row, bitmap);
    }
  }

  private toggle(): void {
    if (this.playing) {
      this.pause();
      return;
    }
    if (this.position >= this.length) this.seek(0);
    this.playing = true;
    this.startClock();
    this.transport.setPlaying(true);
    this.draw();
  }

  private pause(): void {
    this.playing = false;
    this.transport.setPlaying(false);
    this.page.go({ step: this.position }, true);
  }

  private setSpeed(speed: number): void {
    this.speed = speed;
    this.startClock();
    this.transport.setSpeed(speed);
    this.page.say(`Speed ${speed}×`);
  }

  private startClock(): void {
    this.clock = { time: performance.now(), row: this.position };
    this.due = null;
  }

  /** Go where the clock says, but not past pictures that have not arrived. */
  private advance(): void {
    const fps = (this.sides[0]?.facts.fps ?? DEFAULT_FPS) * this.speed;
    const now = performance.now();
    const row = this.due ?? Math.min(this.length, Math.floor(this.clock.row + ((now - this.clock.time) / 1000) * fps));
    const ready = this.sides.map(({ frames, facts }) => {
      const last = Math.min(row, frames ? rowsOf(facts, frames.column) - 1 : row);
      return !frames || frames.isLost(last) || frames.get(last) !== null;
    });
    if (!ready.every(Boolean)) {
      this.due = row;
      this.frame = requestAnimationFrame(() => this.playing && this.advance());
      return;
    }
    this.due = null;
    if (this.clock.row + ((now - this.clock.time) / 1000) * fps > row + 1 + LATE * fps) this.clock = { time: now, row };
    if (row !== this.position) {
      this.position = row;
      this.transport.setPosition(row);
      this.whatif.setPosition(row);
      this.drawPictures();
      this.plots.setPosition(row);
      this.panel.setPosition(row);
      if (row >= this.length && !this.sides.some(({ facts }) => facts.live)) {
        this.pause();
        return;
      }
    }
    this.frame = requestAnimationFrame(() => this.playing && this.advance());
  }

  private zoomBy(factor: number): void {
    const [from, to] = this.plots.zoom;
    const width = Math.max(4, (to - from) * factor);
    if (width >= this.length) {
      this.page.go({ zoom: null }, true);
      return;
    }
    const begin = Math.max(0, Math.min(this.length - width, this.position - width / 2));
    this.page.go({ zoom: [Math.round(begin), Math.round(begin + width)] }, true);
  }

  private neighbour(by: -1 | 1): void {
    const { trace, episode } = this.sides[0]?.id ?? { trace: 0, episode: 0 };
    const episodes = this.page.neighbours(trace, episode, by);
    if (episodes === null) this.page.say(by < 0 ? "This is the first episode." : "This is the last episode.");
    else this.page.go({ episode: episodes, step: 0, zoom: null });
  }

  private async askCompare(): Promise<void> {
    const side = this.sides[0];
    if (!side || this.page.api.source.saved) return;
    const { trace, episode } = side.id;
    const traces = this.page.traces;
    const elsewhere = traces.find((one) => one.trace !== trace && one.episodes > episode);
    try {
      const answer = await askEpisode(traces, elsewhere?.trace ?? trace, elsewhere ? episode : episode > 0 ? episode - 1 : 1, await offers(this.page, side.facts));
      if (answer) this.page.go({ compare: answer });
    } catch (error) {
      this.page.fail(error);
    }
  }

  private async flag(flag: Exclude<Flag, null>): Promise<void> {
    const side = this.sides[0];
    if (!side) return;
    const next = side.facts.flag === flag ? null : flag;
    try {
      await this.page.api.flag(side.facts, next);
      side.facts.flag = next;
      this.drawHead();
      this.page.say(next === null ? `Episode ${side.id.episode} has no flag now.` : `Episode ${side.id.episode} is flagged as ${FLAG_NAMES[next]}.`);
    } catch (error) {
      this.page.fail(error);
      if (error instanceof Refused && error.status === EDITED) this.page.go(LIST);
    }
  }
}

/** One banner, however many parts are damaged. */
function damageBanner(damage: string[], of: string): Child {
  if (!damage.length) return null;
  const head = [h("b", {}, ["Damaged"]), " ", of];
  if (damage.length === 1) return h("p", { class: "banner bad" }, [...head, damage[0]]);
  const details = h("details", {}, [h("summary", {}, ["Details"]), h("ul", {}, damage.map((text) => h("li", {}, [text])))]);
  return h("div", { class: "banner bad" }, [...head, `${damage.length} parts of it are missing`, details]);
}

function rowsOf(facts: EpisodeFacts, column: string): number {
  return Math.max(1, facts.columns.find(({ name }) => name === column)?.rows ?? facts.length + 1);
}

/** The number of columns that policies have filled on the page. */
const opinions = (columns: ColumnFacts[]): number => columns.filter(({ group }) => group === "opinions").length;
