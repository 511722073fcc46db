// The reader that the page of a static site has, as it is built (viewer/src/reader, written from docs/FORMAT.md alone).

import { readFileSync } from "node:fs";

const built = readFileSync(new URL("../../gym_trace/tools/viewer/static/site.js", import.meta.url));
export const reader = await import(`data:text/javascript;base64,${built.toString("base64")}`);
await reader.ready;
