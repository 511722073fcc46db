// What is computed from the annotations of an agent, as gym_trace/tools/viewer/microscope.py and episode.py do.

const NAMES = {
  value: ["value", "values", "vf_preds"],
  logprob: ["logprob", "log_prob", "logp", "action_logp"],
  probabilities: ["probabilities", "probs", "action_probs"],
};
export const CRITIC = "value, return to go", ADVANTAGE = "advantage", PROBABILITY = "probability of the action";
export const PARTS = "parts of the reward", PART = "reward_";

/** The path of the annotation of this kind. */
export const annotation = (kind: keyof typeof NAMES, stored: string[][]): string[] | undefined =>
  NAMES[kind].map((name) => stored.find((path) => path.length === 2 && path[0] === "annotations" && path[1] === name)).find((path) => path !== undefined);

/** The discount that a fact of the trace names, and a text about it. */
export function discountOf({ gamma }: { [key: string]: unknown }): { gamma: number; note: string } {
  const known = typeof gamma === "number" && gamma >= 0 && gamma <= 1;
  return known ? { gamma, note: `discount ${Number(gamma.toPrecision(6))}` } : { gamma: 1, note: "no discount: none is known" };
}

/** The discounted rewards from each step to the end; the last value stands for what would have followed an episode that was not terminated. */
export function returnsToGo(rewards: Float64Array, values: Float64Array, terminated: boolean, gamma: number): Float64Array {
  const found = rewards.slice();
  const last = found.length - 1;
  if (!terminated && last >= 0) found[last] = values[last]!;
  for (let i = last - 1; i >= 0; i--) found[i]! += gamma * found[i + 1]!;
  return found;
}
