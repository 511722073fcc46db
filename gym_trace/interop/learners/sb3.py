"""Stable-Baselines3: the transitions of a replay buffer, as an .npz file (docs/EXPORT.md, Stable-Baselines3).

gym_trace.interop.sb3 fills a buffer with it. What Stable-Baselines3 itself saves is a pickle, which runs what is in it
when it is loaded, and fits one release of its packages: this is arrays alone.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import numpy as np

from gym_trace.errors import InvalidOption
from gym_trace.interop.contract import Loss
from gym_trace.interop.learners.arrays import (
    Actions,
    Observations,
    Part,
    actions_of,
    as_form,
    identities_of,
    lost_flags,
    narrowed_rewards,
    observations_of,
    reward_form,
)
from gym_trace.interop.losses import losses
from gym_trace.interop.source import Source
from gym_trace.interop.steps.blocks import Block
from gym_trace.interop.steps.plain import json_text, tagged
from gym_trace.interop.steps.windows import LEFT_OUT
from gym_trace.model.layout import Branch, Leaf, PlainSpace
from gym_trace.model.layout import Path as LeafPath
from gym_trace.model.values import Array
from gym_trace.printable import printable
from gym_trace.reading.forms import Form

ABOUT, EPISODES = "gym_trace.json", "gym_trace.jsonl"  # members that are text
_SPACES = ("Box", "Discrete", "MultiDiscrete", "MultiBinary")
_ENDS = ("terminations", "truncations")
_PICTURE = 1 << 10  # bytes of an array of uint8 that is compressed
_LEVEL = 1  # of deflate

Rows = Callable[[Block], Array]


@dataclass(frozen=True)
class ReplayBufferExporter:
    """Stable-Baselines3: transitions that gym_trace.interop.sb3.load_replay_buffer fills a ReplayBuffer with.

    observation: of dict observations the one that is exported, such as "image"; "": all, for a DictReplayBuffer.
    """

    name: ClassVar[str] = "sb3"
    extra: ClassVar[str] = ""
    makes: ClassVar[str] = "file"
    finals: ClassVar[str] = LEFT_OUT

    observation: str = ""

    def lost(self, source: Source) -> Iterator[Loss]:
        observations, actions, reward = self._checked(source)
        yield from losses(source, "infos", "annotations", "empty_episode", "parts")
        yield from observations.lost()
        dtypes = {leaf.path: leaf.dtype for leaf in observations.layout.leaves()}
        for part in observations.parts:
            if part.form.dtype != dtypes[part.path]:
                name = f"observations {printable(part.name)}".rstrip()
                yield Loss("dtype", f"{name}: {part.form.dtype} becomes {dtypes[part.path]}, as in the space")
        yield from actions.lost()
        yield from narrowed_rewards(source, reward)
        yield from lost_flags(source)
        if _is_scaled(actions.space):
            yield Loss("dtype", "actions are scaled to -1 … 1 as in Stable-Baselines3's own buffers, and rounded")

    def write(self, source: Source, target: Path) -> None:
        observations, actions, reward = self._checked(source)
        with zipfile.ZipFile(target, "w", compresslevel=_LEVEL) as archive:
            file = _File(archive, source, passes=2 * len(observations.parts) + 4)
            for part in observations.parts:
                name = member("observations", part.name if self._has_keys(observations) else "")
                file.put(name, part.form, _observed(part, 0), "observations")
                file.put(f"next_{name}", part.form, _observed(part, 1), "observations")
            file.put("actions", actions.form, _rows_of(("actions",), actions.form), "actions")
            file.put("rewards", Form(reward.dtype, ()), _rows_of(("rewards",), reward), "rewards")
            flag = Form(np.dtype(np.bool_), ())
            file.put("dones", flag, lambda block: _ends(block, np.ones(block.size, np.bool_)), *_ENDS)
            file.put("timeouts", flag, lambda block: _ends(block, ~block.columns[("terminations",)]), *_ENDS)
            with archive.open(EPISODES, "w", force_zip64=True) as stream:
                for texts in identities_of(source):
                    stream.write("".join(f"{text}\n" for text in texts).encode())
            observed, acted = source.plain_spaces
            space = _exported(observed, observations, self._has_keys(observations))
            told = {"observation_space": space, "action_space": acted, "about": source.about}
            archive.writestr(ABOUT, json_text(tagged(told)))

    def how_to_load(self, path: Path) -> str:
        return (
            "from gym_trace.interop.sb3 import load_replay_buffer\n"
            f"buffer = load_replay_buffer({str(path)!r})  # with a model as well, the model has it then"
        )

    def _has_keys(self, observations: Observations) -> bool:
        """Whether it is for a DictReplayBuffer."""
        return isinstance(observations.layout, Branch) and not self.observation

    def _checked(self, source: Source) -> tuple[Observations, Actions, Form]:
        actions = actions_of(source, _SPACES, "Stable-Baselines3")
        if actions.kind == "Discrete" and actions.space.start:
            raise InvalidOption("Stable-Baselines3 numbers discrete actions from 0; these begin elsewhere")
        observations = observations_of(source, self.observation)
        layout = observations.layout
        if isinstance(layout, Branch) and self._has_keys(observations):
            nested = any(not isinstance(child, Leaf) for child in layout.children)
            if layout.keys is None or nested or not all(type(key) is str for key in layout.keys):
                names = ", ".join(part.name for part in observations.parts)
                raise InvalidOption(
                    "Stable-Baselines3 takes observations that are one array, or a dict of arrays; export one with "
                    f"--set observation=KEY (observation=): {names}; or record the environment in a FlattenObservation"
                )
        for part in observations.parts:
            leaf = next(leaf for leaf in layout.leaves() if leaf.path == part.path)
            if part.form.shape != leaf.shape:
                raise InvalidOption(f"observations are of shape {part.form.shape}, and {leaf.shape} in their space")
        return observations, actions, reward_form(source, "Stable-Baselines3")


def member(column: str, key: str) -> str:
    """The name of the array of a key of dict observations, "" where there are none: a file name, whatever the key."""
    return f"{column}/{quote(key, safe=' ')}" if key else column


def _exported(space: PlainSpace, observations: Observations, has_keys: bool) -> PlainSpace:
    """The space of what is exported of observations of this one."""
    if has_keys:
        kept = {part.name for part in observations.parts}
        return {**space, "spaces": [pair for pair in space["spaces"] if pair[0] in kept]}
    for key in observations.parts[0].path[1:]:
        children = space["spaces"]
        space = dict(children)[key] if space["type"] == "Dict" else children[key]
    return space


def _rows_of(path: LeafPath, form: Form) -> Rows:
    """The rows of a column of a block; one number each where there is one reward each."""

    def rows(block: Block) -> Array:
        if path not in block.columns:
            raise InvalidOption("some values have not the structure of their space, and cannot be exported")
        found = as_form(block.columns[path], form)
        return found.reshape(-1) if path == ("rewards",) else found

    return rows


def _observed(part: Part, after: int) -> Rows:
    """The observations before each step of a block, or (1) after it."""
    rows_of = _rows_of(part.path, part.form)
    return lambda block: rows_of(block)[block.before + after]


def _ends(block: Block, flags: Array) -> Array:
    """What is so of each step that is the last of its episode. flags: (steps,) of all steps."""
    found = np.zeros(block.size, np.bool_)
    last = (np.cumsum(block.steps) - 1)[block.closes & (block.steps > 0)]
    found[last] = flags[last]
    return found


def _is_scaled(space: Any) -> bool:
    return type(space).__name__ == "Box" and not (np.all(space.low == -1) and np.all(space.high == 1))


class _File:
    """The members of an .npz file, of which each is a pass over the trace."""

    def __init__(self, archive: zipfile.ZipFile, source: Source, passes: int):
        self._archive, self._source, self._passes = archive, source, passes
        self._done = self._told = 0  # steps, of all passes, and that have been counted

    def put(self, name: str, form: Form, rows_of: Rows, *columns: str) -> None:
        """Writes an array of (steps, *form.shape)."""
        header = {"descr": form.dtype.str, "fortran_order": False, "shape": (self._source.steps, *form.shape)}
        is_picture = form.dtype == np.uint8 and np.prod(form.shape) >= _PICTURE
        self._archive.compression = zipfile.ZIP_DEFLATED if is_picture else zipfile.ZIP_STORED
        with self._archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
            np.lib.format.write_array_header_2_0(stream, header)
            for block in self._source.blocks(*columns):
                if not block.size:
                    continue
                stream.write(np.ascontiguousarray(rows_of(block)).data)
                self._count(block.size)

    def _count(self, steps: int) -> None:
        """All passes together count each step once."""
        self._done += steps
        due = self._done // self._passes
        self._source.advance(due - self._told)
        self._told = due
