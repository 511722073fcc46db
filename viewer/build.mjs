// Build the page into gym_trace/tools/viewer/static (or the folder given): one script, one style sheet, one HTML file.
// The first line of app.js holds the hash of the sources, so that a test can tell a stale build without npm.
import { createHash } from "node:crypto";
import { copyFileSync, mkdirSync, readFileSync, readdirSync } from "node:fs";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const root = dirname(fileURLToPath(import.meta.url));
const target = process.argv[2] ?? join(root, "../gym_trace/tools/viewer/static");

// Everything that decides what is built: names and bytes, in the order of the names.
function sourceHash() {
  const names = ["package-lock.json", "build.mjs", "index.html", ...readdirSync(join(root, "src"), { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile()).map((entry) => relative(root, join(entry.parentPath, entry.name)).replaceAll("\\", "/"))];
  const hash = createHash("sha256");
  for (const name of names.sort()) {
    hash.update(`${name}\0`).update(readFileSync(join(root, name))).update("\0");
  }
  return hash.digest("hex").slice(0, 32);
}

mkdirSync(target, { recursive: true });
const common = { bundle: true, minify: true, charset: "utf8", legalComments: "inline", logLevel: "warning" };
const modules = { ...common, format: "esm", target: "es2022" };
const licence = (name) => readFileSync(join(root, "node_modules", name, "LICENSE"), "utf8").trim();
await build({
  ...modules,
  entryPoints: [join(root, "src/main.ts")],
  outfile: join(target, "app.js"),
  banner: { js: `/* sources ${sourceHash()} */\n/*! uPlot (https://github.com/leeoniya/uPlot)\n\n${licence("uplot")} */` },
});
// The worker of a static site, and the reader that the tests of the format use, too.
await build({
  ...modules,
  entryPoints: [join(root, "src/site/worker.ts")],
  outfile: join(target, "site.js"),
  banner: { js: `/*! zstddec (https://github.com/donmccurdy/zstddec)\n\n${licence("zstddec").replaceAll("*/", "")} */` },
});
await build({ ...common, entryPoints: [join(root, "src/app.css")], outfile: join(target, "app.css") });
copyFileSync(join(root, "index.html"), join(target, "index.html"));
