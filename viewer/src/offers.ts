// Episodes that are worth comparing with one: the best and the worst, those of its seed, the one it branched from, and its sibling.

import type { EpisodeFacts, EpisodeId } from "./api.ts";
import { short } from "./words.ts";
import type { Page } from "./view.ts";

const MOST_TRACES = 8; // in which episodes of the same seed are sought

export interface Offer {
  id: EpisodeId;
  names: string[];
  detail: string;
}

export async function offers({ api, traces }: Page, { trace, episode, seed, branch, writer }: EpisodeFacts): Promise<Offer[]> {
  const found = new Map<string, Offer>();
  const first = async (name: string, of: number, where: string, sort = ""): Promise<void> => {
    const rows = await api.episodes(of, { where, search: "", sort }, 0, 2);
    const row = rows.value("episode", 0) === episode && of === trace ? 1 : 0;
    const number = rows.value("episode", row);
    if (typeof number !== "number") return;
    const total = rows.value("return", row);
    const at = `${of}:${number}`;
    const detail = [of !== trace && traces.find((one) => one.trace === of)?.name, `episode ${number}`, typeof total === "number" && `return ${short(total)}`].filter(Boolean).join(" · ");
    const offer = found.get(at) ?? { id: { trace: of, episode: number }, names: [], detail };
    offer.names.push(name);
    found.set(at, offer);
  };
  const near = traces.slice(0, MOST_TRACES).map((one) => one.trace);
  const of = (name: string): string => `writer == ${JSON.stringify(name)}`;
  await first("Best", trace, "", "-return");
  await first("Worst", trace, "", "return");
  if (seed !== null) for (const one of near) await first("Same seed", one, `seed == ${seed}`);
  if (branch) {
    for (const one of near) await first("Branched from", one, `${of(branch.writer)} and episode_id == ${branch.episode_id}`);
    await first("Same branch", trace, of(writer));
  }
  return [...found.values()];
}
