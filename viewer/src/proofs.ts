// Lint, check, verify, audit and a condition on steps: run from the page, with progress, and what they have found.

import type { Mark, Proof } from "./api.ts";
import { askConsent } from "./dialogs.ts";
import { fill, h, set, type Child } from "./dom.ts";
import { count, plural } from "./words.ts";
import type { Page } from "./view.ts";

export const POLL = 300; // milliseconds between questions about a tool that runs
const LISTED = 200; // findings on the page; the key walks through all

const UNITS: Record<string, string> = { check: "bytes", verify: "episodes", audit: "claims", branch: "branches" }; // of progress, or steps

const VERDICTS = ["no", "not tried", "yes"]; // of claims, those that matter first

const TOOLS: [string, string, string][] = [
  ["lint", "Lint", "Look for problems in the recorded data"],
  ["check", "Check", "Read every byte, and compare it with its checksum"],
  ["verify", "Verify", "Run the episodes again in their environment, and compare the results"],
  ["audit", "Audit", "Find out which promises the environment keeps, by playing episodes in other ways"],
];

export class Proofs {
  readonly element = h("section", { class: "proofs", "aria-label": "Proof" });
  private readonly buttons = h("div", { class: "runs" });
  private readonly status = h("output", { class: "quiet", "aria-live": "polite" });
  private readonly found = h("details", { class: "found", hidden: true });
  private shownClaims = "[]";
  private readonly claims = h("details", { class: "found", hidden: true });
  private readonly field = h("input", { type: "text", placeholder: "abs(reward) > 1", "aria-label": "Find steps where", class: "steps-where", spellcheck: "false", autocomplete: "off", autocapitalize: "off" });
  private closed = false;
  private watching = false;
  private asked: string | null = null; // the tool that the reader has started here, who may be asked to agree

  constructor(private readonly page: Page, private readonly trace: number) {
    const form = h("form", { class: "where-field" }, [h("span", { class: "prompt", "aria-hidden": "true" }, ["find steps"]), this.field], {
      submit: (event) => {
        event.preventDefault();
        if (this.field.value.trim()) void this.start("steps", this.field.value.trim());
      },
    });
    this.field.addEventListener("keydown", (event) => event.key === "Escape" && this.field.blur());
    this.element.append(h("div", { class: "line" }, [this.buttons, form, this.status]), this.found, this.claims);
    void this.watch();
  }

  /** The trace has changed, perhaps by a tool that another page has started. */
  changed(): void {
    void this.watch();
  }

  close(): void {
    this.closed = true;
  }

  /** Find the steps where a condition holds. */
  async find(condition: string): Promise<void> {
    this.field.value = condition;
    await this.start("steps", condition);
    const above = this.field.getBoundingClientRect().bottom < 0; // out of sight, with what was found
    if (above && this.status.textContent) this.page.say(`${this.status.textContent}: listed above`);
  }

  private async start(tool: string, where = "", trust = false): Promise<void> {
    try {
      this.asked = tool;
      await this.page.api.prove(this.trace, tool, where, trust);
      await this.watch();
    } catch (error) {
      this.page.fail(error);
    }
  }

  /** Show how the tools are doing until none is running. */
  private async watch(): Promise<void> {
    if (this.watching) return;
    this.watching = true;
    try {
      let proofs = await this.page.api.proofs(this.trace);
      for (;;) {
        if (this.closed) return;
        this.draw(proofs);
        if (!Object.values(proofs).some(({ state }) => state === "running")) break;
        await new Promise((resolve) => setTimeout(resolve, POLL));
        proofs = await this.page.api.proofs(this.trace);
      }
      this.drawFound(await this.page.api.marks(this.trace));
      const [tool, asks] = Object.entries(proofs).find(([name, { consent }]) => name === this.asked && consent !== undefined) ?? [];
      this.asked = null;
      if (tool !== undefined && (await askConsent(asks!.consent!))) setTimeout(() => void this.start(tool, "", true));
    } catch (error) {
      this.page.fail(error);
    } finally {
      this.watching = false;
    }
  }

  private draw(proofs: Record<string, Proof>): void {
    const running = Object.entries(proofs).find(([, { state }]) => state === "running");
    fill(this.buttons, TOOLS.map(([tool, name, does]) => {
      const proof = proofs[tool];
      const result = proof?.state === "done" ? (proof.good ? "good" : "bad") : "";
      return h("button", { type: "button", class: `button proof ${result}`, title: does, disabled: running !== undefined, "data-tool": tool }, [
        name, proof?.state === "done" && h("span", { class: "result" }, [`${proof.good ? "✓" : "!"} ${proof.summary}`]),
      ], { click: () => void this.start(tool) });
    }));
    const { steps, audit } = proofs;
    this.drawClaims(audit?.claims ?? []);
    const latest = Object.entries(proofs).slice(-1); // an older failure says nothing about what the reader did last
    const failed = [...latest, ...(steps ? [["steps", steps] as const] : [])].find(([, { state, consent }]) => state === "failed" && consent === undefined);
    set(this.field, { "aria-invalid": steps?.state === "failed" ? "true" : null });
    if (running) {
      fill(this.status, progressOf(this.page, ...running));
    } else {
      fill(this.status, [failed ? `${failed[0]}: ${failed[1].error}` : steps?.state === "done" && `${steps.summary} where ${steps.where}`]);
    }
    this.status.classList.toggle("problem", !running && failed !== undefined);
  }

  private drawClaims(claims: Proof["claims"]): void {
    this.claims.hidden = !claims.length;
    if (JSON.stringify(claims) === this.shownClaims) return; // it may be open
    this.shownClaims = JSON.stringify(claims);
    fill(this.claims, [
      h("summary", {}, ["Audit", h("span", { class: "quiet" }, [" · what the environment promises, and what was seen of it"])]),
      h("ul", { class: "claims" }, [...claims].sort((a, b) => VERDICTS.indexOf(a[1]) - VERDICTS.indexOf(b[1])).map(([name, verdict, text]) => h("li", {}, [
        h("b", {}, [name]), h("span", { class: verdict === "yes" ? "holds" : verdict === "no" ? "error" : "quiet" }, [verdict]), h("span", {}, [text]),
      ]))),
    ]);
  }

  private drawFound(marks: Mark[]): void {
    this.found.hidden = !marks.length;
    fill(this.found, [
      h("summary", {}, [plural(marks.length, "finding"), h("span", { class: "quiet" }, [" on the scrubber of their episodes; m goes to the next one"])]),
      markList(marks.slice(0, LISTED), ({ episode, position }) => {
        if (episode !== null) this.page.go({ episode, step: position ?? 0, compare: null, zoom: null });
      }, true),
    ]);
  }
}

/** The progress of a tool, and a button that ends it. */
export function progressOf(page: Page, tool: string, { done, of }: Proof): Child[] {
  const bar = h("progress", { ...(of ? { max: of, value: done } : {}), "aria-label": tool });
  const cancel = h("button", { type: "button", class: "button" }, ["Cancel"], { click: () => void page.api.cancelProof().catch((error: unknown) => page.fail(error)) });
  return [`${tool} `, bar, of > 0 && ` ${count(done)} of ${count(of)} ${UNITS[tool] ?? "steps"} `, cancel];
}

/** A list of findings; a click goes there. */
export function markList(marks: Mark[], go: (mark: Mark) => void, episodes: boolean): HTMLElement {
  const place = ({ episode, position }: Mark): string =>
    [episodes && (episode === null ? "whole trace" : `episode ${episode}`), position !== null && `step ${count(position)}`].filter(Boolean).join(", ");
  return h("ul", {}, marks.map((mark) => h("li", {}, [
    mark.episode === null ? h("span", { class: "quiet" }, [place(mark)]) : h("button", { type: "button", class: "link" }, [place(mark) || "here"], { click: () => go(mark) }),
    h("span", { class: mark.severity }, [mark.text]),
  ])));
}

/** The finding after (1) or before (-1) a place, in the order of the trace. */
export function neighbourMark(marks: Mark[], episode: number, position: number, by: 1 | -1): Mark | undefined {
  const beyond = (mark: Mark): boolean => {
    if (mark.episode === null) return false;
    const difference = mark.episode - episode || (mark.position ?? 0) - position;
    return difference * by > 0;
  };
  return by > 0 ? marks.find(beyond) : marks.filter(beyond).pop();
}
