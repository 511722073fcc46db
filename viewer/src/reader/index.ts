// A reader of the format, written from docs/FORMAT.md alone. The page of a static site reads with it, and so do the tests
// that compare it with the reader in Python (tests/node_reader).

export * from "./bytes.ts";
export * from "./columns.ts";
export * from "./fragments.ts";
export * from "./framing.ts";
export * from "./parity.ts";
export * from "./spaces.ts";
export * from "./values.ts";
