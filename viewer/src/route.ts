// What the page shows, as the part of its address after "#": a link shows what you see.

import type { EpisodeId } from "./api.ts";

export interface Route {
  trace: number | null;
  episode: number | null;
  step: number;
  compare: EpisodeId | null;
  zoom: [number, number] | null;
  picture: string | null;
  where: string;
  search: string;
  sort: string;
}

export const HOME: Route = { trace: null, episode: null, step: 0, compare: null, zoom: null, picture: null, where: "", search: "", sort: "" };

/** What changes on the way back to the list. */
export const LIST: Partial<Route> = { episode: null, compare: null, step: 0, zoom: null };

function natural(text: string | null): number | null {
  return text !== null && /^\d{1,15}$/.test(text) ? Number(text) : null;
}

function pair(text: string | null, between: string): [number, number] | null {
  const [a, b, ...rest] = (text ?? "").split(between).map(natural);
  return typeof a === "number" && typeof b === "number" && rest.length === 0 ? [a, b] : null;
}

export function parseRoute(hash: string): Route {
  const values = new URLSearchParams(hash.replace(/^#/, ""));
  const compare = pair(values.get("compare"), ":");
  const zoom = pair(values.get("zoom"), "-");
  return {
    trace: natural(values.get("trace")),
    episode: natural(values.get("episode")),
    step: natural(values.get("step")) ?? 0,
    compare: compare && { trace: compare[0], episode: compare[1] },
    zoom: zoom && zoom[0] < zoom[1] ? zoom : null,
    picture: values.get("picture"),
    where: values.get("where") ?? "",
    search: values.get("search") ?? "",
    sort: values.get("sort") ?? "",
  };
}

export function formatRoute(route: Route): string {
  const parts: string[] = [];
  const add = (name: string, value: string | number | null): void => {
    if (value !== null && value !== "") parts.push(`${name}=${encodeURIComponent(value).replaceAll("%3A", ":")}`);
  };
  add("trace", route.trace);
  add("episode", route.episode);
  if (route.episode !== null) {
    add("step", route.step);
    add("compare", route.compare && `${route.compare.trace}:${route.compare.episode}`);
    add("zoom", route.zoom && `${route.zoom[0]}-${route.zoom[1]}`);
    add("picture", route.picture);
  }
  add("where", route.where);
  add("search", route.search);
  add("sort", route.sort);
  return parts.length ? `#${parts.join("&")}` : "";
}
