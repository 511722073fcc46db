// The page: which view is open, its address, the keyboard, light and dark, and news from the server.

import { Api, type Changes, type TraceFacts } from "./api.ts";
import { showHelp } from "./dialogs.ts";
import { fill, h, icon } from "./dom.ts";
import { Overview } from "./overview.ts";
import { Player } from "./player.ts";
import { formatRoute, HOME, LIST, parseRoute, type Route } from "./route.ts";
import { RunsView } from "./runs.ts";
import { keepToken, openSource, Refused } from "./source.ts";
import { count } from "./words.ts";
import { isAbort, type Page, type View } from "./view.ts";

const DARK = matchMedia("(prefers-color-scheme: dark)");
const RETRY = 3000; // milliseconds
const MANY_TRACES = 8; // from here on the list of traces has a search field

class App implements Page {
  route: Route = HOME;
  traces: TraceFacts[] = [];
  private view: (View & { redraw(): void }) | null = null;
  private overview: Overview | null = null;
  private readonly place = h("div", { class: "place" });
  private readonly crumbs = h("nav", { class: "crumbs", "aria-label": "Where you are" });
  private readonly side = h("nav", { class: "traces", "aria-label": "Traces" });
  private readonly toast = h("div", { class: "toast", role: "status", "aria-live": "polite" });
  private toastTimer = 0;

  constructor(readonly api: Api, private readonly host: HTMLElement) {
    document.documentElement.classList.toggle("compact", this.compact);
    const theme = h("button", { type: "button", class: "icon-button theme", "aria-label": "Light or dark", title: "Light or dark (t)" }, [icon("moon"), icon("sun")], { click: () => this.toggleTheme() });
    const help = h("button", { type: "button", class: "icon-button", "aria-label": "Keyboard help", title: "Keyboard (?)" }, [h("span", { "aria-hidden": "true" }, ["?"])], { click: showHelp });
    fill(this.host, [
      h("header", { class: "top" }, [h("a", { class: "brand", href: "#" }, [h("span", { class: "mark", "aria-hidden": "true" }), "gym-trace"]), this.crumbs, h("div", { class: "tools" }, [theme, help])]),
      h("div", { class: "body" }, [this.side, this.place]),
      this.toast,
    ]);
    window.addEventListener("hashchange", () => this.follow());
    window.addEventListener("popstate", () => this.follow());
    window.addEventListener("keydown", (event) => this.key(event));
    DARK.addEventListener("change", () => this.setTheme(DARK.matches));
  }

  get compact(): boolean {
    return this.api.source.page === "notebook";
  }

  async start(): Promise<void> {
    this.traces = await this.api.traces();
    this.route = this.completed(parseRoute(location.hash || this.api.source.start));
    this.show();
    if (!this.api.source.readOnly) void this.listen();
  }

  go(change: Partial<Route>, replace = false): void {
    this.route = this.completed({ ...this.route, ...change });
    // A page inside an iframe's srcdoc has no address of its own.
    if (location.protocol !== "about:") history[replace ? "replaceState" : "pushState"](null, "", formatRoute(this.route) || "#");
    this.show();
  }

  say(text: string, kind: "note" | "error" = "note"): void {
    fill(this.toast, [h("p", { class: kind }, [text])]);
    clearTimeout(this.toastTimer);
    this.toastTimer = window.setTimeout(() => fill(this.toast, []), kind === "error" ? 8000 : 2500);
  }

  fail(error: unknown): void {
    if (isAbort(error)) return;
    const text = error instanceof Error ? error.message : String(error);
    this.say(error instanceof Refused && error.hint ? `${text} ${error.hint}` : text, "error");
  }

  neighbours(trace: number, episode: number, by: -1 | 1): number | null {
    const listed = this.overview?.trace === trace ? this.overview.list.neighbour(episode, by) : null;
    if (listed !== null) return listed;
    const next = episode + by;
    const { where, search, sort } = this.route;
    const known = this.traces.find((one) => one.trace === trace)?.episodes ?? 0;
    return where || search || sort || this.api.source.saved || next < 0 || next >= known ? null : next;
  }

  private follow(): void {
    this.route = this.completed(parseRoute(location.hash));
    this.show();
  }

  /** Whether the start of the page compares the traces. */
  private get compares(): boolean {
    return this.traces.filter(({ branches }) => !branches).length > 1 && this.api.source.compares;
  }

  /** A route without a trace, or with one that is not there, compares all traces, or shows the only one. */
  private completed(route: Route): Route {
    const known = this.traces.some(({ trace }) => trace === route.trace);
    if (!known && route.trace !== null) this.say(`There is no trace ${route.trace} here.`, "error");
    return known ? route : { ...HOME, trace: this.compares ? null : this.traces[0]?.trace ?? null };
  }

  private show(): void {
    const { route } = this;
    this.drawTraces();
    this.drawCrumbs();
    if (route.trace === null && this.compares) {
      if (!(this.view instanceof RunsView)) this.open(new RunsView(this));
    } else if (route.trace === null) {
      this.view?.close();
      this.view = null;
      fill(this.place, [h("p", { class: "empty" }, ["There are no traces here."])]);
    } else if (route.episode !== null) {
      if (this.view instanceof Player) this.view.update(route);
      else this.open(new Player(this, route));
    } else if (this.view instanceof Overview && this.view.trace === route.trace) {
      this.view.update(route);
    } else {
      this.overview = new Overview(this, route.trace, route);
      this.open(this.overview);
    }
  }

  private open(view: View & { redraw(): void }): void {
    this.view?.close();
    this.view = view;
    fill(this.place, [view.element]);
    window.scrollTo(0, 0);
  }

  private drawCrumbs(): void {
    const trace = this.traces.find((one) => one.trace === this.route.trace);
    const name = trace ? trace.title || trace.name : "";
    const { episode } = this.route;
    document.title = [episode === null ? null : `episode ${episode}`, name, "gym-trace"].filter(Boolean).join(" · ");
    if (this.compact) return;
    const back = h("button", { type: "button", class: "crumb" }, [name], { click: () => this.go(LIST) });
    fill(this.crumbs, [trace && back, episode !== null && h("span", { class: "crumb here" }, [`episode ${episode}`])]);
  }

  private traceSearch = "";

  private drawTraces(): void {
    const several = this.traces.length > 1;
    this.side.hidden = !several || this.compact || this.route.episode !== null;
    if (this.side.hidden) return;
    const sought = this.traceSearch.toLowerCase();
    const items = this.traces.filter(({ name, env_id }) => `${name} ${env_id ?? ""}`.toLowerCase().includes(sought)).map((one) => h("li", {}, [
      h("button", { type: "button", "aria-current": one.trace === this.route.trace ? "page" : null }, [
        h("span", { class: "name" }, [one.title || one.name, one.live && h("span", { class: "live", "aria-label": "live" })]),
        h("span", { class: "quiet" }, [[one.env_id, count(one.episodes)].filter((part) => part !== null).join(" · ")]),
      ], { click: () => this.go({ ...HOME, trace: one.trace }) }),
    ]));
    if (this.compares) {
      items.unshift(h("li", {}, [h("button", { type: "button", "aria-current": this.route.trace === null ? "page" : null }, [
        h("span", { class: "name" }, ["Compare"]), h("span", { class: "quiet" }, ["all traces"]),
      ], { click: () => this.go(HOME) })]));
    }
    const list = this.side.querySelector("ul") ?? h("ul");
    fill(list, items);
    if (list.parentElement) return;
    const search = h("input", { type: "search", placeholder: "Search traces", "aria-label": "Search traces" }, [], {
      input: (event) => {
        this.traceSearch = (event.target as HTMLInputElement).value;
        this.drawTraces();
      },
    });
    fill(this.side, [this.traces.length >= MANY_TRACES && search, list]);
  }

  private toggleTheme(): void {
    const dark = document.documentElement.dataset.theme !== "dark";
    if (!this.api.source.saved) localStorage.setItem("gym-trace-theme", dark ? "dark" : "light");
    this.setTheme(dark);
  }

  private setTheme(dark: boolean): void {
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    this.view?.redraw();
  }

  private key(event: KeyboardEvent): void {
    const target = event.target as HTMLElement;
    const typing = target instanceof HTMLInputElement && target.type !== "range" && target.type !== "checkbox";
    if (typing || target instanceof HTMLSelectElement || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    // A focused button answers to space and Enter itself.
    if ((event.key === " " || event.key === "Enter") && target.closest("button, summary, a")) return;
    if (event.key === "?") showHelp();
    else if (event.key === "t") this.toggleTheme();
    else if (event.key === "/" && this.view instanceof Player) this.go(LIST);
    else if (!this.view?.key(event)) return;
    event.preventDefault();
  }

  /** Wait for news as long as the page is open. */
  private async listen(): Promise<void> {
    let since = this.traces.reduce((sum, { version }) => sum + version, 0);
    let lost = false;
    for (;;) {
      try {
        const changes = await this.api.changes(since, new AbortController().signal);
        if (lost) this.say("The server is back.");
        lost = false;
        if (changes.version > since) await this.renew(changes);
        since = changes.version;
      } catch (error) {
        if (!lost) this.fail(error);
        lost = true;
        await new Promise((resolve) => setTimeout(resolve, RETRY));
      }
    }
  }

  private async renew(changes: Changes): Promise<void> {
    this.traces = await this.api.traces();
    this.drawTraces();
    this.view?.changed(changes);
  }
}

async function main(): Promise<void> {
  const host = document.getElementById("app")!;
  try {
    keepToken();
    const source = await openSource();
    // Saved pages and notebooks have no storage of their own.
    const chosen = source.saved ? null : localStorage.getItem("gym-trace-theme");
    document.documentElement.dataset.theme = chosen ?? (DARK.matches ? "dark" : "light");
    await new App(new Api(source), host).start();
  } catch (error) {
    const hint = error instanceof Refused ? error.hint : null;
    fill(host, [h("p", { class: "empty", role: "alert" }, [error instanceof Error ? error.message : String(error), hint !== null && ` ${hint}`])]);
    if (!(error instanceof Refused)) throw error;
  }
}

void main();
