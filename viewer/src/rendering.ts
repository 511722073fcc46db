// Pictures of episodes that were recorded without: their environment replays them, at once where no consent is needed.

import type { EpisodeFacts, EpisodeId, Job } from "./api.ts";
import { askConsent } from "./dialogs.ts";
import { fill, h } from "./dom.ts";
import { Refused } from "./source.ts";
import { count, plural } from "./words.ts";
import type { Page } from "./view.ts";

const POLL = 300; // milliseconds between questions about a rendering

export interface Renderable {
  id: EpisodeId;
  facts: EpisodeFacts;
}

/** What a rendering tells the player. */
export interface RenderingEvents {
  position(): number;
  /** More pictures are there, perhaps the first; `done` says that there will be no more. */
  arrived(done: boolean): void;
}

export class Rendering {
  readonly element = h("div", { class: "render" });
  private readonly note = h("span", { class: "quiet" });
  private readonly bar = h("progress", { max: 1, value: 0, "aria-label": "Rendering" });
  private readonly button = h("button", { type: "button", class: "button", title: "Run the episode again in its environment, and show what that renders" }, [], { click: () => void this.run(true) });
  private sides: Renderable[] = [];
  private running = false;
  private closed = false;

  constructor(private readonly page: Page, private readonly events: RenderingEvents) {
    fill(this.element, [this.note, this.bar, this.button]);
    this.bar.hidden = true;
  }

  /** Offer to render these episodes, and begin with those that have no pictures. */
  show(sides: Renderable[]): void {
    this.sides = this.page.api.source.readOnly ? [] : sides.filter(({ facts }) => facts.renderable);
    this.offer();
    if (this.sides.some(({ facts }) => facts.rendering || (!facts.frames.length && !facts.live))) void this.run(false);
  }

  /** Whether more pictures may follow. */
  get busy(): boolean {
    return this.running;
  }

  /** Show the button for episodes that have no pictures of a replay yet. */
  offer(facts: EpisodeFacts[] = this.sides.map((side) => side.facts)): void {
    const alone = facts.every(({ frames }) => !frames.length);
    const rendered = facts.every(({ frames, renderable }) => !renderable || frames.includes("render"));
    this.element.hidden = !this.sides.length || (rendered && !this.running);
    this.element.classList.toggle("again", !alone);
    if (this.running) return;
    this.note.textContent = alone ? "No pictures were recorded. The environment can run the episode again." : "";
    this.button.textContent = this.sides.length === 2 ? "Render both" : "Render";
  }

  close(): void {
    this.closed = true;
  }

  /** asked: the reader has pressed the button, and may be asked to agree. */
  private async run(asked: boolean): Promise<void> {
    if (this.running) return;
    this.running = true;
    this.button.hidden = !(this.bar.hidden = false);
    let problem = "";
    try {
      for (const { id } of this.sides) {
        const remark = await this.rendered(id, asked, false);
        if (remark && !this.closed) this.page.say(remark, "error");
        if (remark === null || this.closed) break;
      }
    } catch (error) {
      problem = error instanceof Error ? error.message : String(error);
      if (asked) this.page.fail(error);
    }
    this.running = false;
    if (this.closed) return;
    this.button.hidden = !(this.bar.hidden = true);
    this.offer();
    if (problem) this.note.textContent = problem;
    this.events.arrived(true);
  }

  /** Render an episode. Resolves to a remark on the replay, or null where the reader has not agreed, or was not asked. */
  private async rendered(id: EpisodeId, asked: boolean, trust: boolean): Promise<string | null> {
    let consent: string | undefined;
    try {
      const job = await this.page.api.startRendering(id, { trust, asked, step: this.events.position() });
      while (!this.closed && consent === undefined) {
        const answer = await this.page.api.rendering(job);
        if (answer.state === "ready") return answer.note ?? "";
        if (answer.state === "failed" && !answer.consent) throw new Error(answer.error || "The episode could not be rendered.");
        consent = answer.consent;
        this.progress(answer);
        if (consent === undefined) await new Promise((resolve) => setTimeout(resolve, POLL));
      }
    } catch (error) {
      if (!(error instanceof Refused) || error.consent === null) throw error;
      consent = error.consent;
    }
    if (consent === undefined || trust || !asked) return null;
    return (await askConsent(consent)) ? this.rendered(id, asked, true) : null;
  }

  private progress({ phase, done, of }: Job): void {
    this.bar.max = Math.max(1, of);
    this.bar.value = done;
    this.note.textContent = `Replay for the pictures: ${count(done)} of ${plural(of, "step")} ${phase === "compared" ? "compared with the recording" : "rendered"}`;
    if (phase === "rendered" && !this.closed) this.events.arrived(false);
  }
}
