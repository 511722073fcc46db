// The server of a static site, in a worker of the browser: it reads the traces, and the page asks it as it asks gym-trace view.

import { Answers } from "./answers.ts";
import { compared, Host, listed, Refusal } from "./files.ts";

export { Answers } from "./answers.ts";
export { listed } from "./files.ts";
export * from "../reader/index.ts";

/** A request; without a path, it is no longer wanted. */
export type Request = { id: number; path: string | null } | { base: string; traces: string[] };
export type Answer = { id: number } & ({ bytes: Uint8Array<ArrayBuffer> } | { status: number; error: string; hint: string });

interface Scope {
  onmessage: ((event: MessageEvent<Request>) => void) | null;
  postMessage(answer: Answer, moved?: Transferable[]): void;
}

/** Answer the messages of a page; the first one says where the site and its traces are. */
function serve(scope: Scope): void {
  let answers: Promise<Answers> | null = null;
  let base = "";
  const asked = new Map<number, AbortController>();
  scope.onmessage = async ({ data }: MessageEvent<Request>) => {
    if ("base" in data) {
      base = data.base;
      answers = listed(data.base, data.traces).then((listings) => Answers.open(listings, new Host().read));
      answers.catch(() => {}); // the first request gets the error
      return;
    }
    const { id, path } = data;
    if (path === null) return asked.get(id)?.abort();
    const controller = new AbortController();
    asked.set(id, controller);
    try {
      const bytes = path.startsWith("/api/runs?x=") ? await compared(base, path.slice(12)) : await (await answers!).get(path, controller.signal);
      scope.postMessage({ id, bytes }, [bytes.buffer]);
    } catch (error) {
      if (controller.signal.aborted) return; // nobody waits for it
      const { message } = error as Error;
      scope.postMessage(error instanceof Refusal ? { id, status: error.status, error: message, hint: error.hint } : { id, status: 422, error: message, hint: "Is the trace damaged? 'gym-trace check' says so." });
    } finally {
      asked.delete(id);
    }
  };
}

declare const WorkerGlobalScope: unknown;
if (typeof WorkerGlobalScope !== "undefined") serve(self as unknown as Scope);
