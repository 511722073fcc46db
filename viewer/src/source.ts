// Where answers come from: the server, the data inside a saved page, or a worker that reads the traces of a static site.

import { parse, type Container } from "./container.ts";
import type { Answer } from "./site/worker.ts";

export class Refused extends Error {
  constructor(message: string, readonly hint: string | null, readonly status: number, readonly consent: string | null = null) {
    super(message);
  }
}

export interface Source {
  /** All answers are known, and there are no others. */
  readonly saved: boolean;
  /** There is no server: nothing can be changed, rendered or computed by gym-trace itself. */
  readonly readOnly: boolean;
  readonly page: "server" | "saved" | "notebook" | "site";
  /** Several traces are compared as runs. */
  readonly compares: boolean;
  readonly start: string;
  bytes(path: string, signal?: AbortSignal): Promise<Uint8Array<ArrayBuffer>>;
  /** Free the memory of an answer now. Browsers collect buffers late: they would hold a hundred megabytes of old pictures. */
  free(bytes: Uint8Array<ArrayBuffer>): void;
  post(path: string, body: unknown): Promise<unknown>;
}

const TOKEN = "gym-trace-token";

/** Take the token out of the address. Not a cookie: browsers send those to servers of other users on other ports, too. */
export function keepToken(): void {
  const token = new URLSearchParams(location.search).get("token");
  if (token === null) return;
  localStorage.setItem(TOKEN, token);
  history.replaceState(null, "", location.pathname + location.hash);
}

type Movable = ArrayBuffer & { transfer?(length: number): ArrayBuffer }; // in browsers since 2024
const release = (bytes: Uint8Array<ArrayBuffer>): void => void (bytes.buffer as Movable).transfer?.(0);

class Server implements Source {
  readonly saved = false;
  readonly readOnly = false;
  readonly page = "server";
  readonly compares = true;
  readonly start = "";

  async bytes(path: string, signal?: AbortSignal): Promise<Uint8Array<ArrayBuffer>> {
    const response = await reach(path, { signal: signal ?? null });
    if (!response.ok) throw await refusal(response);
    return new Uint8Array(await response.arrayBuffer());
  }

  free = release;

  async post(path: string, body: unknown): Promise<unknown> {
    const headers = { "Content-Type": "application/json", "X-Requested-With": "gym-trace-viewer" };
    const response = await reach(path, { method: "POST", headers, body: JSON.stringify(body) });
    if (!response.ok) throw await refusal(response);
    return response.json();
  }
}

async function reach(path: string, options: RequestInit): Promise<Response> {
  const headers = { ...options.headers, Authorization: `Bearer ${localStorage.getItem(TOKEN) ?? ""}` };
  try {
    return await fetch(path, { credentials: "omit", cache: "no-store", ...options, headers });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new Refused("The server does not answer.", "Is gym-trace view still running?", 0);
  }
}

async function refusal(response: Response): Promise<Refused> {
  const text = await response.text();
  let body: { error?: string; hint?: string; consent?: string } = {};
  if (response.headers.get("Content-Type")?.startsWith("application/json")) body = JSON.parse(text) as typeof body;
  return new Refused(body.error ?? `The server answered ${response.status}.`, body.hint ?? null, response.status, body.consent ?? null);
}

class Saved implements Source {
  readonly saved = true;
  readonly readOnly = true;
  readonly page: "saved" | "notebook";
  readonly compares = false;
  readonly start: string;

  constructor(private readonly container: Container) {
    this.page = container.head.page === "notebook" ? "notebook" : "saved";
    this.start = typeof container.head.start === "string" ? container.head.start : "";
  }

  bytes(path: string): Promise<Uint8Array<ArrayBuffer>> {
    const found = this.container.arrays.get(path);
    if (found) return Promise.resolve(found.bytes);
    const text = this.page === "notebook" ? "Not in this cell; gym_trace.viewer.serve(trace) shows it." : "This is not in the saved page.";
    return Promise.reject(new Refused(text, null, 404));
  }

  free(): void {} // the page keeps its answers

  post(): Promise<unknown> {
    return Promise.reject(new Refused("A saved page cannot be changed.", null, 405));
  }
}

/** A static site. Its traces lie beside the page, or where its address says: ?t=https://HOST/TRACE/ or ?t=hf://datasets/OWNER/NAME/TRACE. */
class Site implements Source {
  readonly saved = false;
  readonly readOnly = true;
  readonly page = "site";
  readonly compares: boolean; // by gym-trace, when it wrote the site
  readonly start = "";
  private readonly worker: Worker;
  private readonly asked = new Map<number, { resolve(bytes: Uint8Array<ArrayBuffer>): void; reject(error: Error): void }>();
  private last = 0;

  constructor(script: string) {
    this.worker = new Worker(script, { type: "module" });
    const traces = new URLSearchParams(location.search).getAll("t");
    this.compares = !traces.length;
    this.worker.postMessage({ base: location.href.replace(/[?#].*/, ""), traces });
    this.worker.onmessage = ({ data }: MessageEvent<Answer>) => {
      const asked = this.asked.get(data.id);
      this.asked.delete(data.id);
      if ("bytes" in data) asked?.resolve(data.bytes);
      else asked?.reject(new Refused(data.error, data.hint || null, data.status));
    };
    this.worker.onerror = () => {
      for (const { reject } of this.asked.values()) reject(new Refused("The reader of the traces could not be started.", `Is ${script} beside the page?`, 0));
    };
  }

  bytes(path: string, signal?: AbortSignal): Promise<Uint8Array<ArrayBuffer>> {
    const id = ++this.last;
    return new Promise((resolve, reject) => {
      this.asked.set(id, { resolve, reject });
      signal?.addEventListener("abort", () => {
        if (!this.asked.delete(id)) return;
        this.worker.postMessage({ id, path: null });
        reject(new DOMException("", "AbortError"));
      });
      this.worker.postMessage({ id, path });
    });
  }

  free = release;

  post(): Promise<unknown> {
    return Promise.reject(new Refused("A page without a server cannot change a trace.", "'gym-trace view' on a machine can.", 405));
  }
}

/** Return the data inside this page if there is some, the worker of a static site, or else the server. */
export async function openSource(): Promise<Source> {
  const site = document.querySelector<HTMLMetaElement>('meta[name="gym-trace-site"]');
  if (site) return new Site(site.content);
  const script = document.querySelector('script[type="application/x-gym-trace-saved"]');
  if (!script) return new Server();
  const packed = fromBase64((script.textContent ?? "").trim());
  script.remove();
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Saved(parse(new Uint8Array(await new Response(unpacked).arrayBuffer())));
}

function fromBase64(text: string): Uint8Array<ArrayBuffer> {
  const native = (Uint8Array as unknown as { fromBase64?: (text: string) => Uint8Array<ArrayBuffer> }).fromBase64;
  if (native) return native.call(Uint8Array, text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}
