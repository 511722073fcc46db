// What if: branches from the step of the player, recorded in the background; their curves fan out in the plots.

import type { Branches, Changes, EpisodeFacts, EpisodeId, Proof, WhatIfFacts } from "./api.ts";
import { askConsent } from "./dialogs.ts";
import { fill, h, icon, set } from "./dom.ts";
import { Fan } from "./fan.ts";
import { OutcomeStrip } from "./outcomes.ts";
import type { PlotStack } from "./plots.ts";
import { POLL, progressOf } from "./proofs.ts";
import type { Page } from "./view.ts";
import { count, plural, short } from "./words.ts";

const COLOURS = [1, 2, 4, 6, 5, 3]; // of sets of branches: series of the page

export class WhatIf {
  readonly element = h("section", { class: "whatif", "aria-label": "What if", hidden: true });
  private readonly place = h("b");
  private readonly start = h("span", { class: "quiet" });
  private readonly policy = h("select", { "aria-label": "Policy" });
  private readonly episodes = h("input", { type: "number", min: 1, max: 200, value: 20, required: true, "aria-label": "Number of branches" });
  private readonly seed = h("input", { type: "number", min: 0, value: 0, placeholder: "none", "aria-label": "Seed", title: "Seed of the policy and of the environment from this step on: the same branches each time. Empty: the environment keeps its generator" });
  private readonly button = h("button", { class: "button primary" }, ["Branch"]);
  private readonly ask = h("button", { type: "button", class: "button", title: "Ask this policy what it would do at each step of the recorded episode" }, ["Ask"]);
  private readonly status = h("output", { class: "quiet", "aria-live": "polite" });
  private readonly note = h("p", { class: "note quiet", "aria-live": "polite" });
  private readonly list = h("ul", { class: "sets" });
  private side: { id: EpisodeId; facts: EpisodeFacts } | null = null;
  private facts: WhatIfFacts | null = null;
  private strips: OutcomeStrip[] = [];
  private fan: Fan | null = null;
  private readonly hidden = new Set<number>(); // traces
  private turn = 0; // counts episodes, so that a late answer is known as one
  private watching = false;
  private position = 0;

  constructor(private readonly page: Page, private readonly plots: PlotStack) {
    const form = h("form", { class: "line" }, [
      h("span", {}, ["From ", this.place, " on,"]), this.policy, h("label", {}, [this.episodes, " times"]), h("label", {}, ["seed ", this.seed]), this.button, this.ask, this.start, this.status,
    ], {
      submit: (event) => {
        event.preventDefault();
        void this.run("branch", false);
      },
    });
    this.ask.addEventListener("click", () => void this.run("ask", false));
    this.element.append(form, this.list, this.note);
    this.element.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.toggle();
      this.element.parentElement?.focus({ preventScroll: true });
    });
  }

  /** Whether branches of this episode can be recorded. */
  get possible(): boolean {
    return this.side?.facts.renderable === true;
  }

  /** Show the branches of an episode; those of the one before disappear. */
  show(id: EpisodeId, facts: EpisodeFacts): void {
    const before = this.side?.id;
    this.side = this.page.api.source.readOnly ? null : { id, facts };
    if (before?.trace === id.trace && before.episode === id.episode) return;
    this.turn++;
    this.facts = null;
    fill(this.status, []);
    if (!this.possible) this.element.hidden = true;
    this.draw();
    if (this.possible) void this.load().then(() => this.watch("branch", false));
  }

  toggle(): void {
    if (!this.possible) return;
    this.element.hidden = !this.element.hidden;
    this.spread();
    if (!this.element.hidden) this.policy.focus();
  }

  setPosition(row: number): void {
    this.position = row;
    this.place.textContent = `step ${count(row)}`;
    this.start.textContent = row >= (this.side?.facts.length ?? Infinity) ? "the episode ends here: choose an earlier step" : this.facts?.start === "states" ? "starts at the recorded state" : row ? `repeats ${plural(row, "step")} before each` : "";
  }

  changed(changes: Changes): void {
    const known = new Map(this.facts?.branches.map(({ trace, episodes, live }) => [trace, `${episodes.length} ${live}`]));
    const news = changes.traces.some(({ trace, episodes, live }) => (known.has(trace) ? known.get(trace) !== `${episodes} ${live}` : this.page.traces[trace]?.branches));
    if (this.possible && news) void this.load();
  }

  close(): void {
    this.turn++;
    this.side = null;
  }

  private async load(): Promise<void> {
    const { turn } = this;
    try {
      const facts = await this.page.api.branches(this.side!.id);
      if (turn !== this.turn) return;
      const first = !this.facts?.branches.length && facts.branches.length > 0;
      this.facts = facts;
      if (first) this.element.hidden = false;
      this.draw();
    } catch (error) {
      this.page.fail(error);
    }
  }

  private async run(tool: "branch" | "ask", trust: boolean): Promise<void> {
    const [asked, policy] = [{ ...this.side!.id, trust }, this.policy.value];
    try {
      if (tool === "ask") await this.page.api.ask({ ...asked, ask: policy });
      else await this.page.api.branch({ ...asked, policy, step: this.position, episodes: Number(this.episodes.value), seed: this.seed.value === "" ? null : Number(this.seed.value) });
      await this.watch(tool, true);
    } catch (error) {
      this.page.fail(error);
    }
  }

  /** Show how the tool is doing until it has ended; asked: the reader has started it here. */
  private async watch(tool: "branch" | "ask", asked: boolean): Promise<void> {
    if (this.watching || !this.side) return;
    this.watching = true;
    const { trace } = this.side.id;
    try {
      let proof: Proof | undefined;
      while (this.side) {
        proof = (await this.page.api.proofs(trace))[tool];
        this.button.disabled = this.ask.disabled = proof?.state === "running";
        if (proof?.state !== "running") break;
        asked = true;
        fill(this.status, progressOf(this.page, tool, proof));
        await new Promise((resolve) => setTimeout(resolve, POLL));
      }
      if (!asked || !proof || !this.side) return;
      const failed = proof.state === "failed" && proof.consent === undefined;
      fill(this.status, [failed ? proof.error : proof.state === "done" && proof.summary]);
      this.status.classList.toggle("problem", failed);
      if (proof.consent !== undefined && (await askConsent(proof.consent))) setTimeout(() => void this.run(tool, true));
    } finally {
      this.watching = false;
    }
  }

  private draw(): void {
    const { facts } = this;
    const chosen = this.policy.value;
    fill(this.policy, (facts?.policies ?? []).map(({ name, label }) => h("option", { value: name, selected: name === chosen }, [label])));
    const sets = facts?.branches ?? [];
    this.strips = [];
    const returns = [this.side?.facts.return ?? null, ...sets.flatMap(({ episodes }) => episodes.map((one) => one.return))].filter((value) => value !== null);
    const axis: [number, number] = [Math.min(...returns), Math.max(...returns)]; // of all strips
    fill(this.list, sets.map((one, i) => this.set(one, i, axis)).reverse());
    this.point(null);
    this.setPosition(this.position);
    this.spread();
  }

  /** Draw the curves of the shown sets into the plots. */
  private spread(): void {
    const sets = this.element.hidden ? [] : (this.facts?.branches ?? []).flatMap(({ trace, step, episodes }, i) =>
      this.hidden.has(trace) ? [] : [{ trace, step, colour: COLOURS[i % COLOURS.length]!, episodes: episodes.map(({ episode }) => episode), length: Math.max(0, ...episodes.map(({ length }) => length)) }]);
    if (!sets.length && !this.fan) return;
    this.fan = sets.length ? new Fan(this.page.api, sets, { pointed: (id) => this.point(id), open: (id, row) => this.open(id, row) }) : null;
    this.plots.setFan(this.fan);
  }

  private set(one: Branches, i: number, axis: [number, number]): HTMLElement {
    const recorded = this.side!.facts.return;
    const about = (branch: Branches["episodes"][number]): string =>
      `branch ${branch.episode}: return ${branch.return === null ? "unknown" : short(branch.return, 6)}, ${branch.outcome} after ${plural(branch.length - one.step, "step")}`;
    const outcomes = one.episodes.flatMap((branch) => (branch.return === null ? [] : [{ id: { trace: one.trace, episode: branch.episode }, return: branch.return, about: about(branch) }]));
    const name = `${one.policy} from step ${count(one.step)}`;
    const strip = new OutcomeStrip(outcomes, one.returns, recorded, axis, name, { pointed: (id) => this.light(id), open: (id) => this.open(id, this.position) });
    this.strips.push(strip);
    const shown = h("button", { type: "button", class: "shown", "aria-pressed": String(!this.hidden.has(one.trace)), title: "Show or hide its curves" }, [h("i", { class: "swatch", "aria-hidden": "true" }), name], {
      click: () => {
        if (!this.hidden.delete(one.trace)) this.hidden.add(one.trace);
        set(shown, { "aria-pressed": String(!this.hidden.has(one.trace)) });
        this.spread();
      },
    });
    const [steps, ends] = [one.lengths, Object.entries(one.outcomes).map(([outcome, of]) => `${count(of)} ${outcome}`).join(", ")];
    const words = ["min", "25 %", "median", "75 %", "max"];
    return h("li", { class: `series-${COLOURS[i % COLOURS.length]}` }, [
      h("div", { class: "line" }, [
        shown,
        h("span", {}, [`${count(one.episodes.length)} branch${one.episodes.length === 1 ? "" : "es"}${one.live ? " so far" : ""}`]),
        h("span", { class: "quiet" }, [ends, steps && ` after ${steps[0] === steps[4] ? `${short(steps[0]!)} steps` : `${short(steps[0]!)} to ${short(steps[4]!)} steps (median ${short(steps[2]!)})`}`]),
        h("button", { type: "button", class: "link", title: "Its page has the list, and Verify" }, ["its episodes"], { click: () => this.page.go({ trace: one.trace, episode: null, step: 0, compare: null, zoom: null, where: "", search: "", sort: "" }) }),
      ]),
      h("div", { class: "spread" }, [
        strip.element,
        h("dl", {}, one.returns ? one.returns.flatMap((value, at) => [h("dt", {}, [words[at]!]), h("dd", {}, [short(value)])]) : []),
      ]),
      h("details", {}, [
        h("summary", {}, [one.kept ? "kept in " : "kept until the viewer ends: ", h("code", {}, [one.directory])]),
        one.command !== null && h("div", { class: "command" }, [h("code", {}, [one.command]), h("button", { type: "button", class: "icon-button", "aria-label": "Copy the command", title: "Copy" }, [icon("copy")], {
          click: () => void navigator.clipboard.writeText(one.command!).then(() => this.page.say("Copied."), (error: unknown) => this.page.fail(error)),
        })]),
      ]),
    ]);
  }

  /** The pointer is at a branch in the plots, or in a strip: say which one it is. */
  private point(id: EpisodeId | null): void {
    for (const strip of this.strips) strip.light(id);
    const found = id && this.facts?.branches.find(({ trace }) => trace === id.trace);
    const one = found?.episodes.find(({ episode }) => episode === id?.episode);
    this.note.textContent = found && one
      ? `Branch ${one.episode} of ${found.policy}: return ${one.return === null ? "unknown" : short(one.return, 6)}, ${one.outcome} after ${plural(one.length - found.step, "step")}; a click opens it beside the recorded episode.`
      : this.facts?.branches.length ? "Each dot is the return of a branch, and each line in the plots a branch; the diamond is the recorded episode." : "";
  }

  private light(id: EpisodeId | null): void {
    if (this.fan?.point(id)) this.plots.redrawFan();
    else this.point(id);
  }

  private open(id: EpisodeId, row: number): void {
    this.page.go({ compare: id, step: row });
  }
}
