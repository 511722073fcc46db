// Answers of a static site: reads from stdin [[directory, [requests]], …], prints [[answer, …], …]: base64, or the error.

import { closeSync, openSync, readFileSync, readSync, readdirSync, statSync } from "node:fs";
import { fileURLToPath, pathToFileURL } from "node:url";
import { reader } from "../../node_reader/reader.mjs";

const { Answers } = reader;

async function read(url, begin, end) {
  const bytes = new Uint8Array(end - begin), file = openSync(fileURLToPath(url));
  readSync(file, bytes, 0, end - begin, begin);
  closeSync(file);
  return bytes;
}

const printed = [];
for (const [directory, requests] of JSON.parse(readFileSync(0, "utf8"))) {
  const url = `${pathToFileURL(directory)}/`;
  const files = readdirSync(directory).map((name) => [name, statSync(new URL(name, url)).size]);
  const answers = await Answers.open([{ name: directory.split("/").at(-1), url, files }], read);
  const one = async (request) => {
    try {
      return Buffer.from(await answers.get(request)).toString("base64");
    } catch (error) {
      return { error: error.message, hint: error.hint, status: error.status ?? error.stack };
    }
  };
  const found = [];
  for (const request of requests) found.push(await one(request));
  printed.push(found);
}
process.stdout.write(JSON.stringify(printed));
