// Lint, check, verify and a condition on steps: run from the page, with progress, and what they have found.

import type { Mark, Proof } from "./api.ts";
import { askConsent } from "./dialogs.ts";
import { fill, h, set } from "./dom.ts";
import { count, plural } from "./words.ts";
import type { Page } from "./view.ts";

const POLL = 300; // milliseconds between questions about a tool that runs
const LISTED = 200; // findings on the page; the key walks through all

const TOOLS: [string, string, string][] = [
  ["lint", "Lint", "Look for problems in the recorded data"],
  ["check", "Check", "Read every byte, and compare it with its checksum"],
  ["verify", "Verify", "Run the episodes again in their environment, and compare the results"],
];

export class Proofs {
  readonly element = h("section", { class: "proofs", "aria-label": "Proof" });
  private readonly buttons = h("div", { class: "runs" });
  private readonly status = h("output", { class: "quiet", "aria-live": "polite" });
  private readonly found = h("details", { class: "found", hidden: true });
  private readonly field = h("input", { type: "text", placeholder: "abs(reward) > 1", "aria-label": "Find steps where", class: "steps-where", spellcheck: "false", autocomplete: "off", autocapitalize: "off" });
  private closed = false;
  private watching = false;
  private asked = false; // the reader has started a tool here, and may be asked to agree

  constructor(private readonly page: Page, private readonly trace: number) {
    const form = h("form", { class: "where-field" }, [h("span", { class: "prompt", "aria-hidden": "true" }, ["find steps"]), this.field], {
      submit: (event) => {
        event.preventDefault();
        if (this.field.value.trim()) void this.start("steps", this.field.value.trim());
      },
    });
    this.field.addEventListener("keydown", (event) => event.key === "Escape" && this.field.blur());
    this.element.append(h("div", { class: "line" }, [this.buttons, form, this.status]), this.found);
    void this.watch();
  }

  /** The trace has changed, perhaps by a tool that another page has started. */
  changed(): void {
    void this.watch();
  }

  close(): void {
    this.closed = true;
  }

  private async start(tool: string, where = "", trust = false): Promise<void> {
    try {
      this.asked = true;
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
      const { verify } = proofs;
      if (this.asked && verify?.consent !== undefined) {
        this.asked = false;
        if (await askConsent(verify.consent)) setTimeout(() => void this.start("verify", "", true));
      }
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
    const { steps } = proofs;
    const failed = Object.entries(proofs).find(([, { state, consent }]) => state === "failed" && consent === undefined);
    set(this.field, { "aria-invalid": steps?.state === "failed" ? "true" : null });
    if (running) {
      const [tool, { done, of }] = running;
      const bar = h("progress", { ...(of ? { max: of, value: done } : {}), "aria-label": tool });
      const cancel = h("button", { type: "button", class: "button" }, ["Cancel"], { click: () => void this.page.api.cancelProof().catch((error: unknown) => this.page.fail(error)) });
      fill(this.status, [`${tool} `, bar, of > 0 && ` ${count(done)} of ${count(of)} ${tool === "check" ? "bytes" : tool === "verify" ? "episodes" : "steps"} `, cancel]);
    } else {
      fill(this.status, [failed ? `${failed[0]}: ${failed[1].error}` : steps?.state === "done" && `${steps.summary} where ${steps.where}`]);
    }
    this.status.classList.toggle("problem", !running && failed !== undefined);
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
