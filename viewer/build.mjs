// Build the page into gym_trace/tools/viewer/static (or the folder given): one script, one style sheet, one HTML file.
// The first line of app.js holds the hash of the sources, so that a test can tell a stale build without npm.
import { createHash } from "node:crypto";
import { copyFileSync, mkdirSync, readFileSync, readdirSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const root = dirname(fileURLToPath(import.meta.url));
const target = process.argv[2] ?? join(root, "../gym_trace/tools/viewer/static");

// Everything that decides what is built: names and bytes, in the order of the names.
function sourceHash() {
  const names = ["package-lock.json", "build.mjs", "index.html", ...readdirSync(join(root, "src")).map((name) => `src/${name}`)];
  const hash = createHash("sha256");
  for (const name of names.sort()) {
    hash.update(`${name}\0`).update(readFileSync(join(root, name))).update("\0");
  }
  return hash.digest("hex").slice(0, 32);
}

mkdirSync(target, { recursive: true });
const common = { bundle: true, minify: true, charset: "utf8", legalComments: "inline", logLevel: "warning" };
const licence = readFileSync(join(root, "node_modules/uplot/LICENSE"), "utf8").trim();
await build({
  ...common,
  entryPoints: [join(root, "src/main.ts")],
  outfile: join(target, "app.js"),
  format: "esm",
  target: "es2022",
  banner: { js: `/* sources ${sourceHash()} */\n/*! uPlot (https://github.com/leeoniya/uPlot)\n\n${licence} */` },
});
await build({ ...common, entryPoints: [join(root, "src/app.css")], outfile: join(target, "app.css") });
copyFileSync(join(root, "index.html"), join(target, "index.html"));
