"""Branches from a step of an episode that the page asks for, and how those of an episode came out."""

from __future__ import annotations

import json
import shlex
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.schema import WriterSchema, as_map
from gym_trace.data.vocabulary import OUTCOMES
from gym_trace.errors import CorruptTrace, EnvironmentUnavailable, InvalidOption
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.episode_table import outcome_codes
from gym_trace.playback.trace import Trace
from gym_trace.printable import printable
from gym_trace.storage.remote.address import is_url
from gym_trace.tools.branching import branch
from gym_trace.tools.replay.resimulate import AUTO, STATES, states_in
from gym_trace.tools.viewer.episode import ViewedEpisode
from gym_trace.tools.viewer.opinions import Question, trusted
from gym_trace.tools.viewer.rendering import Recipe
from gym_trace.tools.viewer.trace import ViewedTrace

MOST_BRANCHES = 200
_MOST_VERSIONS = 20  # the list of policies shows the newest
_ENDED = ("terminated", "truncated")


class Plan(NamedTuple):
    """Branches to record.

    Attributes:
        episode: index in the trace of the job.
        policy, seed: as for branch().
        needs: code or files that the trace names for the policy; "": none.
        directory: of the new trace.
    """

    episode: int
    step: int
    policy: str | Callable[..., Any]
    needs: str
    episodes: int
    seed: int | None
    directory: str


class Choice(NamedTuple):
    """A policy on the page: what it is called there, what branch() gets, and Plan.needs."""

    label: str
    policy: str | Callable[..., Any]
    needs: str = ""


class WhatIf:
    """Plans branches, and finds those of an episode.

    Args:
        recipe: settings of the replays.
        policies: policies that the user named, by name, as for branch().
        directory: directory of the new traces; their parent is made when there is one.
        is_kept: False if that directory is removed at the end.
    """

    def __init__(
        self, recipe: Recipe, policies: Mapping[str, str | Callable[..., Any]], directory: Path, is_kept: bool
    ):
        self._recipe, self._policies, self._directory, self._is_kept = recipe, policies, directory, is_kept

    def plan(self, viewed: ViewedTrace, episode: int, step: int, policy: str, episodes: int, seed: int | None) -> Plan:
        """Return what to record for a request of the page. Raises InvalidOption, IndexError."""
        if not 1 <= episodes <= MOST_BRANCHES:
            raise InvalidOption(f"episodes={episodes}: pass 1 to {MOST_BRANCHES}")
        one = viewed.episode(episode)
        choice = self._choice(one, policy)
        stem = f"{viewed.trace.directory.name}-{episode}-{step}"
        names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
        directory = next(path for path in map(self._directory.joinpath, names) if not path.exists())
        return Plan(one.index, step, choice.policy, choice.needs, episodes, seed, str(directory))

    def question(self, viewed: ViewedTrace, episode: int, policy: str) -> Question:
        """Return what to ask a policy about an episode. Raises InvalidOption, IndexError."""
        one = viewed.episode(episode)
        choice = self._choice(one, policy)
        return Question(one.index, one.key, printable(choice.label), choice.policy, choice.needs)

    def _choice(self, one: ViewedEpisode, policy: str) -> Choice:
        if (choice := self._choices(one).get(policy)) is None:
            raise InvalidOption(f"policy={policy!r}: not among those of this episode; name it with --policy")
        return choice

    def _choices(self, one: ViewedEpisode) -> dict[str, Choice]:
        """Return the policies of an episode by name: those of the user, of its run, and the one that it names."""
        choices = {"random": Choice("random actions", "random")}
        choices |= {name: Choice(name, policy) for name, policy in self._policies.items()}
        run = Path(one.trace.directory).parent
        if Path(one.trace.directory).name == "trace" and (run / "run.json").is_file():
            files = sorted((run / "checkpoints").glob("[0-9]*.safetensors"), reverse=True)[:_MOST_VERSIONS]
            versions = [("@best", "best version")] * (run / "checkpoints" / "best.safetensors").is_file()
            versions += [(f"@{int(file.stem)}", f"version {int(file.stem)}") for file in files if file.stem.isdecimal()]
            for suffix, label in [("", "newest version"), *versions]:
                for option, acting in (("?sample", "sampled"), ("", "likeliest action")):
                    name = f"run:{run}{suffix}{option}"
                    choices.setdefault(name, Choice(f"{label}, {acting}", name))
        named = _policy_of(index_of(one.trace).locate(one.index)[0].about_or_empty)
        if named.startswith("run:"):
            text = f"the trace names its policy, {named}: files there would be read. Pass --trust if you trust it"
            choices.setdefault(named, Choice(f"as recorded: {named}", named, text))
        return choices

    def facts(self, viewed: ViewedTrace, episode: int, others: list[ViewedTrace]) -> dict[str, Any]:
        """Return the policies to choose from, and the branches of an episode in all traces. Raises IndexError."""
        one = viewed.episode(episode)
        policies = [{"name": name, "label": printable(choice.label)} for name, choice in self._choices(one).items()]
        found = [facts for other in others for facts in self._branches(one, other)]
        return {"policies": policies, "start": start_of(one.trace, one.index, self._recipe), "branches": found}

    def _branches(self, one: ViewedEpisode, other: ViewedTrace) -> list[dict[str, Any]]:
        """Return the branches of an episode in a trace, by writer. Those without their first steps are left out."""
        trace, origin = other.trace, (one.episode.writer, one.episode.episode_id)
        found = []
        for number, reader in enumerate(index_of(trace).readers):
            about = reader.about_or_empty
            step, table = about.branch.get("step"), trace.episodes
            if (about.branch.get("writer"), about.branch.get("episode_id")) != origin or type(step) is not int:
                continue
            rows = np.flatnonzero((table["writer"] == number) & (table["first_step"] == 0))[:MOST_BRANCHES]
            table = table[rows]
            outcomes = [OUTCOMES[code] for code in outcome_codes(table).tolist()]
            ended = np.isin(outcomes, _ENDED)
            returns, lengths = table["return"].astype(np.float64), table["steps"].astype(np.int64)
            policy, seed = _policy_of(about), about.branch.get("seed")
            found.append(
                {
                    "trace": other.number,
                    "name": printable(other.name),
                    "directory": printable(str(trace.directory)),
                    "kept": self._is_kept or self._directory not in Path(trace.directory).parents,
                    "step": step,
                    "policy": printable(_short(policy)),
                    "live": other.is_live,
                    "returns": _quartiles(returns[ended]),
                    "lengths": _quartiles(lengths[ended] - step),
                    "outcomes": Counter(outcomes),
                    "episodes": [
                        {"episode": int(index), "return": finite, "length": length, "outcome": outcome}
                        for index, finite, length, outcome in zip(
                            index_of(trace).whole_indices[rows],
                            map(_finite, returns.tolist()),
                            lengths.tolist(),
                            outcomes,
                        )
                    ],
                    "command": self._command(one, step, policy, len(rows), seed, Path(trace.directory).name),
                }
            )
        return found

    def _command(self, one: ViewedEpisode, step: int, policy: str, episodes: int, seed: Any, name: str) -> str | None:
        """Return the command that records the same branches; None if it would need a function of this process."""
        making, directory = self._recipe.making, str(one.trace.directory)
        if making.make_env is not None:
            return None
        number = int(index_of(one.trace).whole_indices[one.index])
        words = ["gym-trace", "branch", directory, "--episode", number, "--step", step, "--policy", policy]
        words += ["--episodes", episodes, *(["--seed", seed] if type(seed) is int else [])]
        words += ["--from", start] if (start := start_of(one.trace, one.index, self._recipe)) != AUTO else []
        words += [word for module in self._recipe.imports for word in ("--import", module)]
        for name, value in (making.env_kwargs or {}).items():
            words += ["--env-arg", f"{name}={json.dumps(value)}"]
        words += ["--trust"] * making.trust + [
            "-o",
            name if is_url(directory) else str(Path(directory).with_name(name)),
        ]
        return printable(shlex.join(map(str, words)))


def start_of(trace: Trace, index: int, recipe: Recipe) -> str:
    """Return how branches of an episode get to their step: where states were recorded, from them, at once."""
    start = recipe.making.start
    try:
        return STATES if start == AUTO and states_in(trace[index]) else start
    except CorruptTrace:
        return start


def record(trace: Trace, recipe: Recipe, plan: Plan, on_progress: Callable[[int, int], Any]) -> str:
    """Record branches, and return what to say about them. on_progress: called with their number so far, and in all.

    Raises the errors of branch().
    """
    making, policy = recipe.making, trusted(plan.policy, plan.needs, recipe)
    start, notes = start_of(trace, plan.episode, recipe), []
    settings = {name: value for name, value in making._asdict().items() if name not in ("wrappers", "start")}
    settings |= {"episodes": plan.episodes, "seed": plan.seed, "command": "gym-trace view"}
    settings["on_progress"] = lambda episodes, steps: on_progress(episodes, plan.episodes)
    with warnings.catch_warnings(record=True) as issued:
        try:
            found = branch(trace, plan.episode, plan.step, policy, plan.directory, start=start, **settings)
        except EnvironmentUnavailable as error:
            if start == making.start:
                raise
            notes = [f"its steps were repeated, not its states used: {error}"]
            found = branch(trace, plan.episode, plan.step, policy, plan.directory, start=making.start, **settings)
    notes += [str(one.message) for one in issued if str(one.message).startswith(f"episode {plan.episode}: ")]
    if found.drew is False:
        notes.append("the environment drew nothing from the seeded generator")
    return "; ".join([f"{len(found.returns):,} branches", *notes])


def _short(policy: str) -> str:
    """Return a name of a policy without directories and options."""
    kind, _, path = policy.partition(":")
    if kind not in ("run", "sb3", "onnx"):
        return policy
    name, _, options = Path(path).name.partition("?")
    return f"{name}, sampled" if "sample" in options else name


def _policy_of(about: WriterSchema) -> str:
    return str(as_map(about.raw.get("provenance")).get("policy", ""))


def _quartiles(values: Any) -> list[float] | None:
    good = values[np.isfinite(values)]
    return np.quantile(good, [0, 0.25, 0.5, 0.75, 1]).tolist() if len(good) else None


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
