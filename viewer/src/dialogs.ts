// Questions and explanations in front of the page.

import type { EpisodeId } from "./api.ts";
import { h, icon } from "./dom.ts";
import type { Offer } from "./offers.ts";

export const KEYS: [string, string][] = [
  ["Space", "play or pause"],
  ["← →", "one step back, forward"],
  ["Shift + ← →", "ten steps back, forward"],
  ["Home End", "first, last step"],
  ["[ ]", "slower, faster"],
  ["+ − 0", "zoom the plots in, out, to the whole episode"],
  ["f", "large picture, and small again"],
  ["n p", "next, previous episode"],
  ["d", "go to the first difference"],
  ["m M", "next, previous finding"],
  ["g b l", "flag: good, bad, look again; once more takes it away"],
  ["c", "compare with another episode; in the list, the two episodes"],
  ["i", "what if: branches from this step"],
  ["/", "search episodes"],
  ["w", "write a condition"],
  ["↑ ↓ Enter", "choose and open an episode in the list"],
  ["Esc", "back to the list"],
  ["t", "light or dark"],
  ["?", "this help"],
];

function open(title: string, body: (Node | string)[], buttons: HTMLElement[] = []): HTMLDialogElement {
  const dialog = h("dialog", { "aria-label": title }, [
    h("header", {}, [h("h2", {}, [title]), h("button", { type: "button", class: "icon-button", "aria-label": "Close" }, [icon("close")], { click: () => dialog.close() })]),
    h("div", { class: "body" }, body),
    buttons.length > 0 && h("footer", {}, buttons),
  ]);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

export function showHelp(): void {
  open("Keyboard", [
    h("dl", { class: "keys" }, KEYS.flatMap(([keys, does]) => [h("dt", {}, keys.split(" ").map((key) => (key === "+" && keys.startsWith("Shift") ? h("span", {}, [" + "]) : h("kbd", {}, [key])))), h("dd", {}, [does])])),
    h("p", { class: "quiet" }, ["In a plot: click to go there, drag to zoom, double-click to see the whole episode. A legend's name hides its line; with Shift it shows that line alone."]),
  ]);
}

/** Show what would run on this machine; resolve to whether the reader agrees. */
export function askConsent(text: string): Promise<boolean> {
  return new Promise((resolve) => {
    let agreed = false;
    const no = h("button", { type: "button", class: "button" }, ["Cancel"], { click: () => dialog.close() });
    const yes = h("button", { type: "button", class: "button primary" }, ["Run it"], { click: () => { agreed = true; dialog.close(); } });
    const dialog = open("Run code of this recording?", [h("pre", { class: "consent" }, [text])], [no, yes]);
    dialog.addEventListener("close", () => resolve(agreed));
    no.focus();
  });
}

/** Ask which episode to compare with, one that is offered or any other; resolve to null if the reader closes the question. */
export function askEpisode(traces: { trace: number; name: string; episodes: number }[], trace: number, episode: number, offers: Offer[]): Promise<EpisodeId | null> {
  return new Promise((resolve) => {
    let answer: EpisodeId | null = null;
    const choose = (id: EpisodeId): void => {
      answer = id;
      dialog.close();
    };
    const offered = offers.map(({ id, names, detail }) => h("button", { type: "button" }, [h("b", {}, [names.join(", ")]), h("span", { class: "quiet" }, [detail])], { click: () => choose(id) }));
    const which = h("select", { id: "compare-trace" }, traces.map((one) => h("option", { value: one.trace, selected: one.trace === trace }, [one.name])));
    const number = h("input", { id: "compare-episode", type: "number", min: 0, value: episode, required: true });
    const limit = (): void => {
      number.max = String((traces.find((one) => one.trace === Number(which.value))?.episodes ?? 1) - 1);
    };
    limit();
    which.addEventListener("change", limit);
    const form = h("form", { class: "fields", method: "dialog" }, [
      h("label", { for: "compare-trace" }, ["Trace"]), which, h("label", { for: "compare-episode" }, ["Episode"]), number,
      h("button", { class: "button primary" }, ["Compare"]),
    ], {
      submit: (event) => {
        event.preventDefault();
        choose({ trace: Number(which.value), episode: Number(number.value) });
      },
    });
    const dialog = open("Compare with", [h("div", { class: "offers" }, offered), form]);
    dialog.addEventListener("close", () => resolve(answer));
    (offered[0] ?? number).focus();
    number.select();
  });
}
