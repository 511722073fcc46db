"""Check a trace by itself: its bytes, and its episodes in their environment."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from gym_trace.data.showing.text import count
from gym_trace.data.values import Array
from gym_trace.envs.consent import called, named
from gym_trace.envs.make import completed
from gym_trace.envs.recipe import Arguments, Recipe, Wrappers, is_whole, recipe_of, recorded_factory, recorded_recipe
from gym_trace.errors import CorruptTrace, EnvironmentUnavailable, InvalidOption, ReplayDiverged
from gym_trace.format.facts import NAME as FACTS
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.trace import Trace
from gym_trace.storage.local import LocalStorage, open_regular, size_on_disk
from gym_trace.tools.integrity.repair import check_trace
from gym_trace.tools.replay.verify import verify_trace
from gym_trace.training.proof.result import Proof, ReportProgress, tally

_BLOCK = 1 << 20
# Wrappers that gymnasium.make() and training add to all environments.
_AUTOMATIC = {
    "gymnasium:PassiveEnvChecker",
    "gymnasium:OrderEnforcing",
    "gymnasium:ClipAction",
    "gym_trace:ClipActionParts",
}
TIME_LIMIT = "gymnasium:TimeLimit"


def files_of(directory: Path) -> dict[str, list[Any]]:
    """Return size and BLAKE2b digest of each file of a trace, except rings and facts, which may change.

    Raises CorruptTrace for a file that cannot be read.
    """
    found: dict[str, list[Any]] = {}
    for name in sorted(LocalStorage(directory).names()):
        if name != FACTS and not name.startswith(".") and not name.endswith(".ring"):
            hashed, size = hashlib.blake2b(digest_size=32), 0
            try:
                with open(open_regular(directory / name, os.O_RDONLY), "rb") as file:
                    size_on_disk(file.fileno(), directory / name)
                    while block := file.read(_BLOCK):
                        hashed.update(block)
                        size += len(block)
            except OSError as error:
                raise CorruptTrace(f"cannot be read: {error.strerror}", directory / name) from error
            found[name.encode(errors="backslashreplace").decode()] = [size, hashed.hexdigest()]
    return found


def check_bytes(trace: Path, proof: Proof) -> None:
    """Compare all checksums of a trace. Raises CorruptTrace for the first that is wrong."""
    report = check_trace(trace)
    for damage in [*report.damages, *report.healed]:
        raise damage.error()
    proof.proved.append(f"{trace}: every checksum, of {report.bytes:,} bytes in {count(report.files, 'file')}")


def check_files(trace: Path, recorded: Any, proof: Proof) -> None:
    """Compare the files of a trace with those at the end of a run. Raises ReplayDiverged."""
    then = recorded if isinstance(recorded, dict) else {}
    now = files_of(trace)
    if recorded is None:
        tally(proof, 0, len(now), "files of the trace", "", "the log was closed before the recorder, and lists none")
        return
    for name in sorted({*then, *now}):
        if then.get(name) != now.get(name):
            what = "was removed" if name not in now else "was added" if name not in then else "was changed"
            raise ReplayDiverged(f"{trace / name}: {what} after the end of the run")
    tally(proof, len(now), len(now), "files of the trace", "did not change after the end", "the trace is empty")


def replay(
    trace: Trace, proof: Proof, wanted: bool, make_env: Callable[[], Any] | None, trust: bool, report: ReportProgress
) -> None:
    """Replay the episodes in their environment, if wanted. Raises ReplayDiverged for one that differs.

    If the environment cannot be made here, `proof.unproved` says why.
    """
    if not wanted:
        proof.unproved.append("the episodes in their environment: --no-replay")
        return
    proof.doing, proof.done, proof.out_of = "episode", 0, len(trace)
    identical, reasons = 0, Counter[str]()
    try:
        described = [_played_in(writer.env_spec, make_env) for writer in index_of(trace).readers if len(writer.parts)]
        for verdict in verify_trace(trace, make_env=make_env, trust=trust):
            proof.done += 1
            if verdict.verdict == "differs":
                raise ReplayDiverged(f"{trace.directory}: episode {verdict.index} differs in its environment: "
                                     f"{verdict.difference}")  # fmt: skip
            if verdict.verdict == "identical":
                identical += 1
            else:
                reasons[verdict.reason] += 1
            report()
    except (EnvironmentUnavailable, InvalidOption) as error:
        proof.unproved.append(f"the episodes in their environment, which cannot be made here: {error}")
        return
    env = " and in ".join(dict.fromkeys(described))
    why = "; ".join(f"{reason} ({number:,})" for reason, number in reasons.items()) or "there is nothing to play"
    tally(proof, identical, len(trace), "episodes", f"played again in {env}, bit for bit", why)


def _played_in(description: Mapping[str, Any], make_env: Callable[[], Any] | None) -> str:
    """Describe the environment of a writer's episodes, with arguments and wrappers that its id does not imply.

    Raises EnvironmentUnavailable.
    """
    if make_env is not None:
        env = completed(make_env(), description)
        description = {"made": recipe_of(env)}
        env.close()
    recipe = recorded_recipe(description)
    if (recipe is None or not is_whole(recipe)) and (factory := recorded_factory(description)) is not None:
        return f"what {called(factory.id, factory.kwargs)} makes"
    if recipe is None:
        made = description.get("made")
        return f"their environment, {named(made.get('class') if isinstance(made, Mapping) else None)}"
    kwargs, wrappers = beyond_id(recipe)
    additions = [called(name, arguments) for name, arguments in wrappers]
    limit = getattr(gymnasium.registry.get(recipe.id), "max_episode_steps", None)
    if limit is not None and TIME_LIMIT not in [kind_of(name) for name, _ in recipe.wrappers]:
        additions.append("no step limit")
    return (called(recipe.id, kwargs) if kwargs else named(recipe.id)) + (
        f" with {', '.join(additions)}" if additions else ""
    )


def beyond_id(recipe: Recipe) -> tuple[Arguments, Wrappers]:
    """Return the arguments and wrappers of a recipe that its id does not imply."""
    spec = gymnasium.registry.get(recipe.id)
    kwargs = {
        name: stored
        for name, stored in recipe.kwargs.items()
        if spec is None or stored not in (["value", spec.kwargs.get(name, ...)], ["registered", stored[-1]])
    }
    limit = ["value", getattr(spec, "max_episode_steps", None)]
    wrappers = [
        (name, arguments)
        for name, arguments in recipe.wrappers
        if kind_of(name) not in _AUTOMATIC
        and not (kind_of(name) == TIME_LIMIT and (arguments or {}).get("max_episode_steps") == limit)
    ]
    return kwargs, wrappers


def kind_of(name: str) -> str:
    """Shorten MODULE:NAME of a class to PACKAGE:NAME, as a class may be imported from several modules of a package."""
    module, _, kind = name.rpartition(":")
    return f"{module.partition('.')[0]}:{kind}"


class StepUses:
    """Counts how often updates learned from each recorded step."""

    def __init__(self, trace: Trace):
        table = trace.episodes
        self._counts = {
            lane: np.zeros(int(begins[-1]) + int(table["steps"][rows[-1]]), np.uint32)
            for lane, (rows, begins) in lanes_of(trace).items()
        }

    def add(self, writer: str, lane: int, steps: Sequence[Array]) -> None:
        """Add an update.

        steps: the step numbers in the lane, one array per Steps of the update; a step in several arrays counts once.
        """
        counts = self._counts[writer, lane]
        counts += np.max([np.bincount(numbers, minlength=len(counts)) for numbers in steps], 0).astype(np.uint32)

    def add_to(self, proof: Proof) -> None:
        counts = np.concatenate([np.zeros(0, np.uint32), *self._counts.values()])
        used = counts[counts > 0]
        least, most = (int(used.min()), int(used.max())) if len(used) else (0, 0)
        often = "once" if most == 1 else f"{least:,} times" if least == most else f"{least:,} to {most:,} times"
        tally(
            proof,
            len(used),
            len(counts),
            "recorded steps",
            f"learned from, each {often}",
            "no update learned from them",
        )


def lanes_of(trace: Trace) -> dict[tuple[str, int], tuple[Array, Array]]:
    """Return the episodes of each writer and lane, in order, and the number of steps of the lane before each."""
    table = trace.episodes
    found, by_lane = {}, dict[tuple[str, int], list[int]]()
    for index, (writer, lane) in enumerate(zip(table["writer"].tolist(), table["lane"].tolist())):
        by_lane.setdefault((trace.writers[writer], lane), []).append(index)
    for name, indexes in by_lane.items():
        rows = np.array(indexes)
        rows = rows[np.lexsort((table["first_step"][rows], table["episode_id"][rows]))]
        ends = np.cumsum(table["steps"][rows].astype(np.int64))
        found[name] = rows, ends - table["steps"][rows]
    return found
