// Which plots are shown, and where: a text to find, pinned plots first, folded ones without their lines.

import type { ColumnFacts } from "./api.ts";
import { h, icon, set } from "./dom.ts";

const KEY = "gym-trace-plots";
const FEW = 6; // columns; fewer need no search

interface Kept {
  pinned: string[];
  folded: string[];
}

export class PlotChoice {
  readonly element: HTMLElement;
  private readonly search = h("input", { type: "search", placeholder: "Find plots", "aria-label": "Find plots by name" });
  private readonly groups: { column: ColumnFacts; element: HTMLElement; place: number }[] = [];
  private readonly kept: Kept = { pinned: [], folded: [] };

  /** `keeps`: whether choices are remembered on this machine. */
  constructor(private readonly keeps: boolean) {
    this.element = h("div", { class: "plot-tools" }, [this.search]);
    this.search.addEventListener("input", () => this.apply());
    this.search.addEventListener("keydown", ({ key }) => {
      if (key !== "Escape") return;
      this.search.value = "";
      this.search.blur();
      this.apply();
    });
    try {
      const found = keeps ? (JSON.parse(localStorage.getItem(KEY) ?? "{}") as Partial<Kept>) : {};
      for (const name of ["pinned", "folded"] as const) if (Array.isArray(found[name])) this.kept[name] = found[name].map(String);
    } catch {
      // written by something else
    }
  }

  clear(): void {
    this.groups.length = 0;
  }

  /** Add the plots of a column, with buttons in the header of the first. */
  add(column: ColumnFacts, element: HTMLElement): HTMLElement {
    this.groups.push({ column, element, place: this.groups.length });
    const header = element.querySelector(":scope > .panel > header");
    header?.prepend(this.button(column, "folded", "Fold up or open"));
    header?.append(this.button(column, "pinned", "Keep at the top, here and in other episodes"));
    return element;
  }

  /** Hide, fold and sort the plots as chosen. */
  apply(): void {
    const sought = this.search.value.trim().toLowerCase();
    this.element.hidden = this.groups.length < FEW;
    for (const { column, element } of this.groups) {
      const pinned = this.kept.pinned.includes(column.name);
      const folded = this.kept.folded.includes(column.name);
      element.hidden = ![column.name, ...(column.labels ?? [])].some((name) => name.toLowerCase().includes(sought));
      element.classList.toggle("pinned", pinned);
      element.classList.toggle("folded", folded);
      for (const [name, on] of [["pinned", pinned], ["folded", folded]] as const) {
        const button = element.querySelector(`.choose.${name}`);
        if (button) set(button, { "aria-pressed": String(on) });
      }
    }
    const rank = ({ column, place }: (typeof this.groups)[0]): number => place - (this.kept.pinned.includes(column.name) ? this.groups.length : 0);
    const sorted = [...this.groups].sort((a, b) => rank(a) - rank(b)).map(({ element }) => element);
    const parent = sorted[0]?.parentElement;
    if (!parent || sorted.every((element, i) => i === 0 || element.previousElementSibling === sorted[i - 1])) return;
    const focused = document.activeElement;
    parent.append(...sorted);
    if (focused instanceof HTMLElement) focused.focus({ preventScroll: true });
  }

  private button({ name }: ColumnFacts, list: keyof Kept, title: string): HTMLElement {
    return h("button", { type: "button", class: `choose ${list}`, "aria-label": `${list === "folded" ? "Fold up" : "Pin"} ${name}`, title }, [icon(list === "folded" ? "down" : "pin")], {
      click: () => {
        this.kept[list] = this.kept[list].includes(name) ? this.kept[list].filter((one) => one !== name) : [...this.kept[list], name];
        if (this.keeps) localStorage.setItem(KEY, JSON.stringify(this.kept));
        this.apply();
      },
    });
  }
}
