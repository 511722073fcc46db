// What a view gets from the page, and what the page asks of a view.

import type { Api, Changes, Flag, TraceFacts } from "./api.ts";
import type { Route } from "./route.ts";

export interface Page {
  readonly api: Api;
  readonly route: Route;
  readonly traces: TraceFacts[];
  readonly compact: boolean;
  /** Show another place; `replace` leaves no entry in the browser's history. */
  go(change: Partial<Route>, replace?: boolean): void;
  /** Say something to the reader for a moment, and to screen readers. */
  say(text: string, kind?: "note" | "error"): void;
  fail(error: unknown): void;
  /** Return the episode before (-1) or after (1) another in the order of the list. */
  neighbours(trace: number, episode: number, by: -1 | 1): number | null;
}

export interface View {
  readonly element: HTMLElement;
  /** The route has changed within this view. */
  update(route: Route): void;
  /** A trace has grown or changed. */
  changed(changes: Changes): void;
  /** Handle a key; return whether it was one of this view's. */
  key(event: KeyboardEvent): boolean;
  close(): void;
}

export const FLAG_NAMES: Record<Exclude<Flag, null>, string> = { good: "good", bad: "bad", look: "look again" };

/** Run `task` after a pause without further calls. */
export function debounced(milliseconds: number, task: () => void): { (): void; cancel(): void } {
  let timer = 0;
  const later = (): void => {
    clearTimeout(timer);
    timer = window.setTimeout(task, milliseconds);
  };
  later.cancel = () => clearTimeout(timer);
  return later;
}

/** Gives a signal for each new request and cancels the one before. */
export class Latest {
  private controller: AbortController | null = null;

  next(): AbortSignal {
    this.cancel();
    return this.signal;
  }

  /** The signal of the newest request. */
  get signal(): AbortSignal {
    this.controller ??= new AbortController();
    return this.controller.signal;
  }

  cancel(): void {
    this.controller?.abort();
    this.controller = null;
  }
}

export const isAbort = (error: unknown): boolean => error instanceof DOMException && error.name === "AbortError";
