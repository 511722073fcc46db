"""Export and import of HDF5 files in the layout of robomimic, which robosuite, LIBERO, MimicGen and Isaac Lab write."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gym_trace.data.schema import Layouts
from gym_trace.envs.recipe import factory_recipe
from gym_trace.envs.robosuite import ROBOSUITE
from gym_trace.errors import TraceError
from gym_trace.exchange.formats.contract import RESTORED, ExportPlan, Loss, Target, losses
from gym_trace.exchange.formats.foreign import begins_with
from gym_trace.exchange.formats.hdf5.reading import MAGIC, MOST_ARRAYS, H5File, H5Group
from gym_trace.exchange.formats.hdf5.writing import Group, attribute, new_file, new_group, text
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.imported import Imported, NewEpisode
from gym_trace.exchange.formats.infos import is_text
from gym_trace.exchange.formats.simulators.groups import Demonstration, GroupMap, content_of, episode_names, plain
from gym_trace.exchange.formats.simulators.writing import (
    MASK,
    GroupPlan,
    arguments_of,
    facts_of_episode,
    imported_metadata,
    plan_of,
    write_episodes,
)
from gym_trace.exchange.formats.source import ExportSource
from gym_trace.exchange.formats.steps.windows import Window
from gym_trace.format import wire
from gym_trace.format.manifest import json_of
from gym_trace.playback.row_types import RowType
from gym_trace.playback.scan import KEPT
from gym_trace.printable import printable

_KIND = "robomimic"
_MAP = GroupMap("demo_", "obs", "flat", "next_obs", "dones", "", "states", flag=RowType(np.dtype(np.int64), ()))
_ROBOSUITE, _GYM = 1, 2  # types of environments in env_args
_COUNTED = ("num_samples", "total")  # attributes that follow from the arrays
_OWN = (*_COUNTED, KEY, "seed")
_VALUES = (bool, int, float, np.ndarray)
_WARNING = "robomimic stores no spaces and no truncation: episodes that do not end with dones are cut"


@dataclass(frozen=True)
class RobomimicExporter:
    """One HDF5 file in the layout of robomimic, with a group data/demo_N per episode."""

    name: ClassVar[str] = "robomimic"
    makes: ClassVar[str] = "file"
    keeps_states: ClassVar[bool] = True
    finals: ClassVar[str] = KEPT

    def plan(self, source: ExportSource) -> ExportPlan:
        plan = plan_of(source, _MAP)
        lost = [*plan.losses, *_losses(source, plan)]
        return ExportPlan(lost, partial(_write, source, plan), self._how_to_load)

    def _how_to_load(self, path: Path) -> str:
        read = '{name: demo["actions"][()] for name, demo in file["data"].items()}'
        return f"import h5py\nwith h5py.File({str(path.resolve())!r}) as file:\n    actions = {read}"


def _losses(source: ExportSource, plan: GroupPlan) -> Iterator[Loss]:
    usual = () if imported_metadata(source, _KIND) is not None else ("reset_info",)
    yield from losses(source, "options", *usual, restored=True)
    table = source.episodes
    if large := int(np.count_nonzero(table["seed"] == wire.SEED_ELSEWHERE)):
        yield Loss("seed", f"{large:,} seeds of 2^63 and more{RESTORED}")
    if unlike := int(np.isin(table["outcome"], ("truncated", "cut", "closed", "lost")).sum()):
        yield Loss("outcome", f"{unlike:,} episodes that did not terminate (truncated, cut, …) look alike{RESTORED}")
    ended = source.trace[table["outcome"] == "terminated"]
    if any(episode.truncations.any() for episode in ended.scan(columns=["truncations"])):
        yield Loss("flags", f"truncated flags of episodes that terminated{RESTORED}")
    unknown = int(np.count_nonzero(~table["has_final_observation"] & (table["steps"] > 0)))
    if unknown and plan.after:
        yield Loss("final_observation", f"unknown final observation in {unknown:,} episodes: they have no next_obs")


def _write(source: ExportSource, plan: GroupPlan, target: Target) -> None:
    of_file = imported_metadata(source, _KIND)
    masks: dict[str, list[str]] = {}
    with new_file(target.staged) as (file, check):
        data = new_group(file.id, "data")

        def begin(window: Window, number: int) -> Group:
            episode, name = window.episode, f"{_MAP.prefix}{number}"
            group = new_group(data, name)
            attribute(group, "num_samples", len(episode))
            attribute(group, KEY, source.identity(episode))
            if episode.seed is not None and episode.seed < 1 << 63:
                attribute(group, "seed", episode.seed)
            if of_file is not None:
                facts, arrays = facts_of_episode(episode)
                _add_attributes(group, facts)
                for path, rows in arrays.items():
                    file.create_dataset(f"data/{name}/{path}", data=rows)
            for key, rows in window.columns.items():
                if key[0] == "annotations" and str(key[1]).startswith(MASK):
                    members = masks.setdefault(str(key[1]).removeprefix(MASK), [])
                    members += [name] * bool(np.any(rows[:1]))
            return group

        write_episodes(source, plan, check, begin)
        attribute(data, "total", int(source.episodes["steps"].sum()))
        made = {"env_name": source.environment.get("id") or "", "type": _GYM, "env_kwargs": arguments_of(source)}
        _add_attributes(data, {"env_args": json.dumps(made)} if of_file is None else of_file)
        for key, names in masks.items():
            file.create_dataset(MASK + key, data=np.array(names, "S"))
        text(new_group(file.id, KEY), "about", source.about)


def _add_attributes(group: Group, values: Mapping[str, Any]) -> None:
    """Add attributes; values that no attribute can hold are skipped."""
    for name, value in values.items():
        if name not in _OWN and (is_text(value) if type(value) is str else isinstance(value, _VALUES)):
            with suppress(TypeError, ValueError, OverflowError):  # arrays of objects, or numbers that are too large
                attribute(group, name, value if type(value) in (int, str) else np.asarray(value))


class RobomimicImporter:
    """HDF5 file in the layout of robomimic, also of robosuite, LIBERO, MimicGen and Isaac Lab"""

    name: ClassVar[str] = "robomimic"

    def recognises(self, path: Path) -> bool:
        if begins_with(path, MAGIC):
            with suppress(TraceError), H5File(path) as file:
                return bool(episode_names(file.root.group("data"), _MAP.prefix))
        return False

    def read(self, path: Path) -> Imported:
        with ExitStack() as on_error:  # afterwards, the episodes close the file
            file = on_error.enter_context(H5File(path))
            data = file.root.group("data")
            names = episode_names(data, _MAP.prefix)
            if not names:
                raise data.fault(f"has no episodes {_MAP.prefix}N")
            about = file.root.group(KEY).rows("about").text() if KEY in file.root else None
            attributes, first = _attributes_of(data), Demonstration(data.group(names[0]), _MAP)
            environment, episodes = _environment_of(attributes, path), partial(_episodes, file, names)
            content = content_of(_KIND, first, environment, attributes, about, _WARNING, episodes)
            on_error.pop_all()
            return content


def _attributes_of(group: H5Group) -> dict[str, Any]:
    return {name: plain(value) for name, value in group.attributes().items() if name not in _COUNTED}


def _episodes(file: H5File, names: list[str], layouts: Layouts, warnings: list[str]) -> Iterator[NewEpisode]:
    with file:
        data, masks = file.root.group("data"), dict[str, set[str]]()
        if "mask" in file.root:
            group = file.root.group("mask")
            masks = {f"{MASK}{key}": {*map(str, group.rows(key).read())} for key in group.names()[:MOST_ARRAYS]}
        for name in names:
            facts = _attributes_of(data.group(name))
            seed, identity = facts.pop("seed", None), facts.pop(KEY, None)
            yield Demonstration(data.group(name), _MAP).episode(
                layouts,
                warnings,
                {key: name in members for key, members in masks.items()},
                seed=seed if type(seed) is int and seed >= 0 else None,
                identity=identity if isinstance(identity, str) else None,
                reset_info=facts or None,
            )


def _environment_of(attributes: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the environment of env_args, or of the files of robosuite, for new_schema()."""
    with suppress(AttributeError, KeyError, TypeError, ValueError, RecursionError):
        if "env_args" in attributes:
            stored = json_of(attributes["env_args"])
            name, kind, kwargs = stored["env_name"], stored["type"], dict(stored.get("env_kwargs") or {})
        else:
            name, kind, kwargs = attributes["env"], _ROBOSUITE, json_of(attributes["env_info"])
        if kind == _ROBOSUITE:
            made = {**factory_recipe(ROBOSUITE, {**kwargs, "env_name": name}, []), "id": f"robosuite/{name}"}
        else:
            made = {**factory_recipe("", kwargs, []), "id": name, "entry_point": None}
        if isinstance(name, str) and name:
            return {"id": made["id"], "note": "", "made": made}
    return {"note": f"{printable(path.name)} names no environment"}
