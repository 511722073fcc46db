// The episodes as cards with their last pictures; those without pictures show lines of their observations.

import { FRAMES_BLOCK, type EpisodeFacts, type EpisodeId } from "./api.ts";
import { fill, h, icon, set, svg } from "./dom.ts";
import { outcomeKind, type EpisodeList } from "./episode_list.ts";
import { decoded } from "./frames.ts";
import { GridFrames, planesOf } from "./grid.ts";
import { count, short } from "./words.ts";
import { isAbort, type Page } from "./view.ts";

const AT_ONCE = 60; // cards that are added when the last is in sight
const LOADING = 3; // pictures that are fetched at a time
const POINTS = 120; // of a line
const LINES = 3; // in a card
const KEY = "gym-trace-episodes"; // "list" or "grid"

export class Gallery {
  readonly element: HTMLElement;
  /** Buttons that switch between list and pictures. */
  readonly choice: HTMLElement;
  private readonly cards = h("div", { class: "cards" });
  private readonly end = h("div", { class: "end" });
  private readonly waiting: (() => Promise<void>)[] = [];
  private loading = 0;
  private shown = 0;
  private turn = 0; // counts the lists that were shown
  private control = new AbortController();
  private readonly ahead = new IntersectionObserver((entries) => entries.some(({ isIntersecting }) => isIntersecting) && void this.more(), { rootMargin: "300px" });
  private readonly sight = new IntersectionObserver((entries) => this.sighted(entries), { rootMargin: "200px" });
  private readonly loads = new Map<Element, () => Promise<void>>();

  constructor(private readonly page: Page, private readonly trace: number, private readonly list: EpisodeList) {
    this.element = h("section", { class: "gallery", "aria-label": "Episodes as pictures" }, [this.cards, this.end]);
    this.ahead.observe(this.end);
    const keeps = !page.api.source.saved;
    const button = (name: "list" | "grid", label: string): HTMLElement =>
      h("button", { type: "button", class: "icon-button", "aria-label": label, title: label }, [icon(name === "grid" ? "grid" : "rows")], {
        click: () => {
          if (keeps) localStorage.setItem(KEY, name);
          this.turnTo(name);
          this.show(false);
        },
      });
    this.choice = h("div", { class: "list-or-grid", role: "group", "aria-label": "Episodes as" }, [button("list", "List"), button("grid", "Last pictures")]);
    this.turnTo(keeps && localStorage.getItem(KEY) === "grid" ? "grid" : "list");
  }

  private turnTo(name: "list" | "grid"): void {
    this.element.hidden = name === "list";
    this.list.element.hidden = name === "grid";
    [...this.choice.children].forEach((button, i) => set(button, { "aria-pressed": String((i === 1) === (name === "grid")) }));
  }

  /** Show the episodes of the list from the first on; `grown`: there may be more of the same. */
  show(grown: boolean): void {
    if (grown && this.shown) {
      void this.more();
      return;
    }
    this.close();
    this.control = new AbortController();
    fill(this.cards, []);
    this.shown = 0;
    void this.more();
  }

  close(): void {
    this.turn++;
    this.control.abort();
    this.waiting.length = 0;
    this.loads.clear();
    this.sight.disconnect();
  }

  private async more(): Promise<void> {
    const { turn, shown } = this;
    if (this.element.hidden || shown >= this.list.length) return;
    const last = Math.min(this.list.length, shown + AT_ONCE);
    this.shown = last;
    try {
      for (let row = shown; row < last; row++) {
        await this.list.ready(row);
        if (turn !== this.turn) return;
        this.cards.append(this.card(row));
      }
    } catch (error) {
      if (turn === this.turn && !isAbort(error)) this.page.fail(error);
    }
    this.ahead.unobserve(this.end); // it may still be in sight
    this.ahead.observe(this.end);
  }

  private card(row: number): HTMLElement {
    const { list, page, trace } = this;
    const [episode, total, length] = ["episode", "return", "length"].map((name) => Number(list.value(name, row) ?? NaN)) as [number, number, number];
    const outcome = String(list.value("outcome", row) ?? "");
    const picture = h("div", { class: "thumb" });
    const card = h("button", { type: "button", class: "card" }, [
      picture,
      h("span", { class: "quiet" }, [`Episode ${episode}`]),
      h("b", { title: "return" }, [Number.isNaN(total) ? "–" : short(total, 5)]),
      h("span", { class: "quiet" }, [`${count(length)} steps`]),
      h("span", { class: `outcome ${outcomeKind(outcome)}` }, [outcome]),
    ], { click: () => page.go({ episode, step: 0, compare: null, zoom: null }) });
    this.loads.set(card, () => this.pictured({ trace, episode }, picture));
    this.sight.observe(card);
    return card;
  }

  private sighted(entries: IntersectionObserverEntry[]): void {
    for (const { target, isIntersecting } of entries) {
      const load = this.loads.get(target);
      if (!isIntersecting || !load) continue;
      this.loads.delete(target);
      this.sight.unobserve(target);
      this.waiting.push(load);
    }
    this.next();
  }

  private next(): void {
    while (this.loading < LOADING && this.waiting.length) {
      this.loading++;
      void this.waiting.shift()!().catch((error: unknown) => {
        if (!isAbort(error)) console.debug(error); // the card stays without a picture
      }).finally(() => {
        this.loading--;
        this.next();
      });
    }
  }

  /** Put the last picture of an episode, or lines of its numbers, into a card. */
  private async pictured(id: EpisodeId, into: HTMLElement): Promise<void> {
    const { api } = this.page;
    const { signal } = this.control;
    const facts = await api.episode(id);
    const column = facts.columns.find(({ name }) => name === (facts.frames.includes("render") ? "render" : facts.frames[0]))
      ?? facts.columns.find((one) => planesOf(one, api.source.saved));
    if (signal.aborted) return;
    if (!column?.rows) {
      fill(into, [await this.lines(id, facts, signal)]);
      return;
    }
    const planes = planesOf(column, api.source.saved);
    const last = Math.floor((column.rows - 1) / FRAMES_BLOCK);
    const block = planes ? await new GridFrames(api, id, column, planes, () => {}).frames(last, signal) : await api.frames(id, column.name, last, signal);
    const bytes = block.pictures.get(Math.max(...block.pictures.keys()));
    try {
      if (!bytes || signal.aborted) return;
      const bitmap = await decoded(bytes, block);
      const canvas = h("canvas", { width: bitmap.width, height: bitmap.height, class: bitmap.width < 160 ? "enlarged" : "", role: "img", "aria-label": `Last picture of episode ${id.episode}` });
      canvas.getContext("2d")!.drawImage(bitmap.image, 0, 0);
      bitmap.close();
      fill(into, [canvas]);
    } finally {
      block.free();
    }
  }

  /** The first numbers of the observations over the steps, each on its own scale; where there are none, the return. */
  private async lines(id: EpisodeId, { length, columns }: EpisodeFacts, signal: AbortSignal): Promise<Node> {
    const { name, items } = columns.find(({ group, kind }) => group === "observations" && kind === "numeric") ?? { name: "return", items: 1 };
    const { x, low, high, items: lines } = await this.page.api.curves(id, name, [0, Math.min(LINES, items)], 0, length + 1, POINTS, signal);
    return svg("svg", { viewBox: "0 0 100 40", preserveAspectRatio: "none", class: "lines", role: "img", "aria-label": `${name} of episode ${id.episode}` }, Array.from({ length: lines }, (_, item) => {
      const values = [...x].map((_, i) => (low[item * x.length + i]! + high[item * x.length + i]!) / 2);
      const known = values.filter(Number.isFinite);
      const [from, to] = [Math.min(...known), Math.max(...known)];
      const points = values.flatMap((value, i) => (Number.isFinite(value) ? [`${(100 * x[i]!) / Math.max(1, length)},${38 - (36 * (value - from)) / (to - from || 1)}`] : []));
      return svg("polyline", { points: points.join(" "), class: `series-${item}` });
    }));
  }
}
