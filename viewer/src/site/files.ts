// Byte ranges of files on a static host, the newest request first, and the files of a trace there.

import type { Bytes } from "../reader/index.ts";

/** A refusal, as the server of gym-trace view gives it. */
export class Refusal extends Error {
  constructor(readonly status: number, message: string, readonly hint = "") {
    super(message);
  }
}

/** Read bytes [begin, end) of a file. */
export type Read = (url: string, begin: number, end: number, signal?: AbortSignal) => Promise<Bytes>;

/** The files of a trace: their names and sizes, at an address that ends with a slash. */
export interface Listing {
  name: string;
  setting?: number; // that it is a run of
  url: string;
  files: [name: string, size: number][];
}

const AT_ONCE = 6; // connections to a host over HTTP/1.1
const MOST_LISTING = 64 << 20;
const HUB = "https://huggingface.co";

/** Read ranges of files by HTTP. */
export class Host {
  private readonly waiting: (() => void)[] = [];
  private running = 0;

  readonly read: Read = async (url, begin, end, signal) => {
    if (end <= begin) return new Uint8Array(0);
    if (this.running >= AT_ONCE) await new Promise<void>((resolve) => this.waiting.push(resolve));
    else this.running++;
    try {
      signal?.throwIfAborted();
      const response = await reach(url, { headers: { Range: `bytes=${begin}-${end - 1}` }, signal: signal ?? null });
      const bytes = response.status === 206 ? new Uint8Array(await response.arrayBuffer()) : null;
      if (bytes?.length === end - begin) return bytes;
      void response.body?.cancel();
      if (response.status === 200) throw new Refusal(502, `${new URL(url).host} does not serve byte ranges of files.`, "Put the site on a host that does, such as GitHub Pages, Hugging Face, S3 or nginx; python -m http.server does not.");
      throw new Refusal(502, `${url}: the host answered ${response.status}${bytes ? " with another number of bytes" : ""}.`, "Has the file changed? Load the page again.");
    } finally {
      const next = this.waiting.pop();
      if (next) next();
      else this.running--;
    }
  };
}

async function reach(url: string, options: RequestInit = {}): Promise<Response> {
  try {
    return await fetch(url, { credentials: "omit", referrerPolicy: "no-referrer", ...options });
  } catch {
    options.signal?.throwIfAborted();
    throw new Refusal(502, `${url}: no answer.`, new URL(url).origin === self.location?.origin ? "" : "Does the host let pages of other sites read it (CORS)?");
  }
}

async function found(url: string): Promise<Response> {
  const response = await reach(url);
  if (!response.ok) throw new Refusal(response.status, `${url}: the host answered ${response.status}.`, "Is the address right, and may everybody read it?");
  if (Number(response.headers.get("Content-Length") ?? 0) > MOST_LISTING) throw new Refusal(413, `${url}: too large.`);
  return response;
}

/** List the traces of a site; of those that its address names by ?t=, if any. */
export async function listed(base: string, named: string[]): Promise<Listing[]> {
  if (named.length) return Promise.all(named.map((address) => (address.startsWith("hf://") ? onHub(address) : inFolder(new URL(address, base)))));
  const { traces } = (await (await found(new URL("traces.json", base).href)).json()) as { traces: Listing[] };
  return traces.map((trace) => ({ ...trace, url: new URL(trace.url, base).href }));
}

/** The comparison of the traces of a site over an axis, as gym-trace has written it. */
export async function compared(base: string, axis: string): Promise<Bytes> {
  const all = (await (await found(new URL("runs.json", base).href)).json()) as Record<string, unknown>;
  return new TextEncoder().encode(JSON.stringify(all[axis]));
}

const nameAt = (path: string): string => decodeURIComponent(path.split("/").filter(Boolean).at(-1) ?? "trace");

/** hf://datasets/OWNER/NAME[@REVISION]/PATH */
async function onHub(address: string): Promise<Listing> {
  const match = /^hf:\/\/(datasets|spaces|models)\/([\w.-]+\/[\w.-]+)(?:@([^/]+))?\/?(.*?)\/?$/.exec(address);
  if (!match) throw new Refusal(400, `${address}: not an address on Hugging Face.`, "Write hf://datasets/OWNER/NAME/PATH.");
  const [, kind, repository, revision = "main", path = ""] = match;
  const quoted = path.split("/").map(encodeURIComponent).join("/");
  const files: [string, number][] = [];
  let next: string | null = `${HUB}/api/${kind}/${repository}/tree/${encodeURIComponent(revision)}${quoted && `/${quoted}`}`;
  while (next) {
    const page: Response = await found(next);
    for (const one of (await page.json()) as { type: string; path: string; size: number }[]) if (one.type === "file") files.push([one.path.split("/").at(-1)!, one.size]);
    next = /<([^>]+)>;\s*rel="next"/.exec(page.headers.get("Link") ?? "")?.[1] ?? null;
    if (next && !next.startsWith(`${HUB}/`)) next = null;
  }
  const place = `${kind === "models" ? "" : `${kind}/`}${repository}/resolve/${encodeURIComponent(revision)}/${quoted ? `${quoted}/` : ""}`;
  return { name: nameAt(path || repository!), url: `${HUB}/${place}`, files };
}

/** A folder whose host lists its files, as nginx does with autoindex. */
async function inFolder(folder: URL): Promise<Listing> {
  if (!["https:", "http:"].includes(folder.protocol)) throw new Refusal(400, `${folder.protocol}// cannot be read by a browser.`, "Write https:// or hf://.");
  if (!folder.pathname.endsWith("/")) folder.pathname += "/";
  const text = await (await found(folder.href)).text();
  const names = new Set([...text.matchAll(/href=["']?(?:\.\/)?([\w.-]+\.gtb(?:\.part)?|facts\.json)["'?]/gi)].map((match) => match[1]!));
  if (!names.size) throw new Refusal(404, `${folder.href}: no list of files with a trace.`, "A host has to list the folder; 'gym-trace view DIR -o SITE' writes a site that needs no such list.");
  const sizes = await Promise.all([...names].map(async (name): Promise<[string, number]> => {
    const response = await reach(folder.href + name, { method: "HEAD" });
    return [name, Number(response.headers.get("Content-Length") ?? 0)];
  }));
  return { name: nameAt(folder.pathname), url: folder.href, files: sizes };
}
