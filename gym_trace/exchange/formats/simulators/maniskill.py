"""Export and import of ManiSkill's trajectories: an HDF5 file, and a JSON file of the same name beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from gym_trace.data.schema import Layouts
from gym_trace.envs.recipe import factory_recipe
from gym_trace.errors import TraceError, UnreadableRecording
from gym_trace.exchange.formats.contract import ExportPlan, Target, losses
from gym_trace.exchange.formats.foreign import begins_with, check_files, read_json
from gym_trace.exchange.formats.hdf5.reading import MAGIC, H5File
from gym_trace.exchange.formats.hdf5.writing import Group, new_file, new_group
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.imported import Imported, NewEpisode
from gym_trace.exchange.formats.simulators.groups import Demonstration, GroupMap, content_of, episode_names
from gym_trace.exchange.formats.simulators.writing import (
    GroupPlan,
    arguments_of,
    facts_of_episode,
    imported_metadata,
    is_json,
    plan_of,
    write_episodes,
)
from gym_trace.exchange.formats.source import ExportSource
from gym_trace.exchange.formats.steps.windows import Window

_KIND = "ManiSkill"
_NAME = "trajectory"  # an export writes NAME.h5 and NAME.json
_MAP = GroupMap("traj_", "obs", "", "", "terminated", "truncated", "env_states", True, ("success", "fail"))
_OWN = ("episode_id", "elapsed_steps", KEY)  # keys of an episode in the JSON that follow from the arrays
_WARNING = "ManiSkill stores no spaces and no times; the spaces are as wide as the dtypes"


@dataclass(frozen=True)
class ManiSkillExporter:
    """A directory with trajectory.h5 and trajectory.json, as ManiSkill's RecordEpisode writes them."""

    name: ClassVar[str] = "maniskill"
    makes: ClassVar[str] = "directory"
    keeps_states: ClassVar[bool] = True

    def plan(self, source: ExportSource) -> ExportPlan:
        plan = plan_of(source, _MAP)
        usual = () if imported_metadata(source, _KIND) is not None else ("options", "reset_info")
        lost = [*plan.losses, *losses(source, *usual, restored=True)]
        return ExportPlan(lost, partial(_write, source, plan), self._how_to_load)

    def _how_to_load(self, path: Path) -> str:
        file = str(path.resolve() / f"{_NAME}.h5")
        read = '{name: steps["actions"][()] for name, steps in file.items()}'
        return f"import h5py\nwith h5py.File({file!r}) as file:\n    actions = {read}"


def _write(source: ExportSource, plan: GroupPlan, target: Target) -> None:
    of_file = imported_metadata(source, _KIND)
    target.staged.mkdir(exist_ok=True)
    entries: list[dict[str, Any]] = []
    with new_file(target.staged / f"{_NAME}.h5") as (file, check):

        def begin(window: Window, number: int) -> Group:
            name, (facts, arrays) = f"{_MAP.prefix}{number}", facts_of_episode(window.episode)
            if of_file is None:
                given = {"seed": window.episode.seed, "options": window.episode.options}
                given = {key: value for key, value in given.items() if value is not None and is_json(value)}
                facts, arrays = {"episode_seed": window.episode.seed, "reset_kwargs": given}, {}
            own = {"episode_id": number, "elapsed_steps": len(window.episode), KEY: source.identity(window.episode)}
            entries.append({key: value for key, value in facts.items() if is_json(value)} | own)
            group = new_group(file.id, name)
            for path, rows in arrays.items():
                file.create_dataset(f"{name}/{path}", data=rows)
            return group

        write_episodes(source, plan, check, begin)
    made = {"env_info": {"env_id": source.environment.get("id") or "", "env_kwargs": arguments_of(source)}}
    facts = {key: value for key, value in (of_file or made).items() if is_json(value)}
    (target.staged / f"{_NAME}.json").write_text(json.dumps({**facts, "episodes": entries, KEY: source.about}))


class ManiSkillImporter:
    """Trajectories of ManiSkill: an .h5 file with its .json beside it, or a directory with one such pair"""

    name: ClassVar[str] = "maniskill"

    def recognises(self, path: Path) -> bool:
        with suppress(TraceError, OSError):
            file = _file_of(path)
            return begins_with(file, MAGIC) and isinstance(_read_json(file).get("env_info"), Mapping)
        return False

    def read(self, path: Path) -> Imported:
        with ExitStack() as on_error:  # afterwards, the episodes close the file
            of_file = _read_json(_file_of(path))
            entries, about = of_file.pop("episodes", None), of_file.pop(KEY, None)
            if not isinstance(entries, list):
                raise UnreadableRecording(f"{path}: the JSON file has no list of episodes")
            file = on_error.enter_context(H5File(_file_of(path)))
            names = episode_names(file.root, _MAP.prefix)
            if not names:
                raise file.root.fault(f"has no episodes {_MAP.prefix}N")
            first = Demonstration(file.root.group(names[0]), _MAP)
            by_id = {f"{_MAP.prefix}{entry.get('episode_id')}": entry for entry in entries if isinstance(entry, dict)}
            environment, episodes = _environment_of(of_file), partial(_episodes, file, names, by_id)
            about = about if isinstance(about, str) else None
            content = content_of(_KIND, first, environment, of_file, about, _WARNING, episodes)
            on_error.pop_all()
            return content


def _file_of(path: Path) -> Path:
    """Return the HDF5 file. Raises UnreadableRecording for a directory with none or several."""
    if not path.is_dir():
        return path
    files = sorted(path.glob("*.h5"))
    if len(files) != 1:
        raise UnreadableRecording(f"{path}: has {len(files)} files *.h5; name one of them")
    return files[0]


def _read_json(file: Path) -> dict[str, Any]:
    beside = file.with_suffix(".json")
    check_files(beside)
    return read_json(beside)


def _environment_of(of_file: Mapping[str, Any]) -> dict[str, Any]:
    info = of_file.get("env_info")
    name, kwargs = (info.get(key) if isinstance(info, dict) else None for key in ("env_id", "env_kwargs"))
    if not isinstance(name, str) or not name or not isinstance(kwargs, dict):
        return {"note": "the JSON file names no environment"}
    made = {**factory_recipe("", kwargs, []), "id": name, "entry_point": None}
    return {"id": name, "note": "", "made": made, "imports": ["mani_skill.envs"]}


def _episodes(
    file: H5File, names: list[str], entries: Mapping[str, dict[str, Any]], layouts: Layouts, warnings: list[str]
) -> Iterator[NewEpisode]:
    with file:
        for name in names:
            entry = entries.get(name, {})
            given = kwargs if isinstance(kwargs := entry.get("reset_kwargs"), dict) else {}
            seed, options, identity = given.get("seed", entry.get("episode_seed")), given.get("options"), entry.get(KEY)
            yield Demonstration(file.root.group(name), _MAP).episode(
                layouts,
                warnings,
                seed=seed if type(seed) is int and seed >= 0 else None,
                options=options if isinstance(options, dict) else None,
                identity=identity if isinstance(identity, str) else None,
                reset_info={key: value for key, value in entry.items() if key not in _OWN} or None,
            )
