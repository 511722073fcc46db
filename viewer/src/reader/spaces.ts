// The leaves of a space (docs/FORMAT.md, section 5).

import type { Path } from "./columns.ts";
import type { Metadata } from "./values.ts";

/** dtype and shape of a leaf are null and empty if it holds values. */
export interface Leaf {
  path: Path;
  space: Metadata;
  dtype: string | null;
  shape: number[];
}

const TYPED = ["Box", "Discrete", "MultiDiscrete", "MultiBinary"];

export function leavesOf(space: Metadata, path: Path): Leaf[] {
  if (space.type === "Dict") return space.spaces.flatMap(([key, child]: [string | number, Metadata]) => leavesOf(child, [...path, key]));
  if (space.type === "Tuple") return space.spaces.flatMap((child: Metadata, i: number) => leavesOf(child, [...path, i]));
  const typed = TYPED.includes(space.type);
  return [{ path, space, dtype: typed ? space.dtype : null, shape: (typed && space.shape) || [] }];
}

/** One value per leaf in the structure of the space; `join` makes a value of the parts of a Dict or Tuple. */
export function joined<T>(space: Metadata, values: Iterator<T>, join: (keys: (string | number)[] | null, parts: T[]) => T): T {
  if (space.type === "Dict") return join(space.spaces.map(([key]: [string | number]) => key), space.spaces.map(([, child]: [string, Metadata]) => joined(child, values, join)));
  if (space.type === "Tuple") return join(null, space.spaces.map((child: Metadata) => joined(child, values, join)));
  return values.next().value as T;
}
