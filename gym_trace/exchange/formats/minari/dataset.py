"""Export and import of Minari datasets: their directories and metadata."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from gymnasium.envs.registration import EnvSpec

from gym_trace.data.layout import PlainSpace, leaves_in
from gym_trace.errors import InvalidOption, TraceError, UnreadableRecording
from gym_trace.exchange.formats.contract import ExportPlan, Target
from gym_trace.exchange.formats.foreign import read_json
from gym_trace.exchange.formats.hdf5.writing import new_file
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.imported import Imported, imported, new_schema
from gym_trace.exchange.formats.minari.arrow import ArrowEpisodes, ArrowReader
from gym_trace.exchange.formats.minari.hdf5 import HDF5_FILE, HDF5Episodes, HDF5Reader
from gym_trace.exchange.formats.minari.plan import FILE, KINDS, MinariPlan, is_number, is_spec, plan_of
from gym_trace.exchange.formats.minari.spaces import from_json, is_picture
from gym_trace.exchange.formats.rows import first_writer
from gym_trace.exchange.formats.source import ExportSource
from gym_trace.format.manifest import json_of
from gym_trace.playback.episode_index import index_of
from gym_trace.printable import printable
from gym_trace.storage.staging import bytes_in

_VERSION = "0.5.4"  # the first Minari that reads images that are not JPEG
_IDS = re.compile(r"(?:[-_\w][-_\w/]*[-_\w]+/)?[-_\w]+?-v\d+")  # dataset ids: NAMESPACE/NAME-v0


@dataclass(frozen=True)
class MinariExporter:
    """A dataset of Minari, which minari.load_dataset() finds by the name of its directory: NAMESPACE/NAME-v0.

    kind: data format of Minari: "hdf5", "arrow" or "parquet".
    id: of the dataset; "": derived from its path below Minari's directory.
    """

    kind: str = "hdf5"
    id: str = ""

    name: ClassVar[str] = "minari"
    makes: ClassVar[str] = "directory"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidOption(f"kind={self.kind!r}: pass {', '.join(KINDS)}")
        if self.id and not _IDS.fullmatch(self.id):
            raise InvalidOption(f"id={self.id!r}: invalid; pass an id such as cartpole/random-v0")

    def plan(self, source: ExportSource) -> ExportPlan:
        plan = plan_of(source, self.kind == "hdf5")
        return ExportPlan(plan.losses, partial(self._write, source, plan), self._how_to_load)

    def _write(self, source: ExportSource, plan: MinariPlan, target: Target) -> None:
        data = target.staged / "data"
        data.mkdir()
        with self._episodes(data, plan) as episodes:
            for window in source.windows():
                if window.start == 0:
                    episodes.begin(window.episode, source.identity(window.episode))
                episodes.add(window)
        size = bytes_in(data)
        metadata: dict[str, Any] = {
            "total_episodes": episodes.count,
            "total_steps": source.steps,
            "data_format": self.kind,
            "jpeg_encoding": False,
            "observation_space": plan.spaces[0],
            "action_space": plan.spaces[1],
            "dataset_size": float(np.round(size / 1e6, 1)),
            "dataset_id": self.id or _id_of(target.final),
            **_metadata_of(source),
        }
        (data / FILE).write_text(json.dumps(metadata))

    @contextmanager
    def _episodes(self, data: Path, plan: MinariPlan) -> Iterator[HDF5Episodes | ArrowEpisodes]:
        if self.kind == "hdf5":
            with new_file(data / HDF5_FILE) as (file, check):
                yield HDF5Episodes(file, check, plan)
        else:
            with closing(ArrowEpisodes(data, plan, self.kind)) as episodes:
                yield episodes

    def _how_to_load(self, path: Path) -> str:
        path = path.resolve()
        name = self.id or _id_of(path)
        parts = len(Path(name).parts)
        root = Path(*path.parts[:-parts])
        if root / name != path:
            return f"import minari; dataset = minari.MinariDataset({str(path / 'data')!r})"
        if root == _root_of(path) and root != path.parent:
            return f"import minari; dataset = minari.load_dataset({name!r})"
        set_root = f"import os; os.environ['MINARI_DATASETS_PATH'] = {str(root)!r}"
        return f"{set_root}\nimport minari; dataset = minari.load_dataset({name!r})"


# -- directories -----------------------------------------------------------------------------------------------------


def _root_of(path: Path) -> Path:
    """Return the root of datasets for the dataset at path: that of Minari if path is below it, else the parent."""
    variable = os.environ.get("MINARI_DATASETS_PATH")
    root = (Path(variable) if variable else Path.home() / ".minari" / "datasets").resolve()
    return root if path.is_relative_to(root) and path != root else path.parent


def _id_of(path: Path) -> str:
    """Return an id for the dataset at path: the path below the root, if that is a valid id."""
    name = path.relative_to(_root_of(path)).as_posix()
    if _IDS.fullmatch(name):
        return name
    return (re.sub(r"[^-\w]+", "-", path.name).strip("-") or "trace") + "-v0"


# -- metadata.json ----------------------------------------------------------------------------------------------------


def _metadata_of(source: ExportSource) -> dict[str, Any]:
    """Return the facts of the trace with the keys of Minari."""
    facts, environment = source.facts, source.environment
    provenance = index_of(source.trace).readers[0].schema.get("provenance")
    policy = provenance.get("policy") if isinstance(provenance, dict) else None
    scores = facts.get("reference_scores")
    low, high = (scores.get(name) if isinstance(scores, dict) else None for name in ("random", "expert"))
    metadata = {
        "author": [author] if (author := _text(facts, "author")) else None,
        "author_email": [email] if (email := _text(facts, "author_email", "email")) else None,
        "algorithm_name": _text(facts, "algorithm", "algorithm_name") or (policy if isinstance(policy, str) else None),
        "code_permalink": _text(facts, "code", "code_permalink", "homepage"),
        "description": _text(facts, "description"),
        "env_spec": spec if is_spec(spec := environment.get("spec")) and not environment.get("note") else None,
        "ref_min_score": low if is_number(low) and is_number(high) else None,
        "ref_max_score": high if is_number(low) and is_number(high) else None,
    }
    return {
        "minari_version": _VERSION,
        **{key: value for key, value in metadata.items() if value is not None},
        KEY: source.about,
    }


def _text(facts: Mapping[str, Any], *names: str) -> str | None:
    return next((facts[name] for name in names if isinstance(facts.get(name), str) and facts[name]), None)


_KIND = "Minari"
_IMPORTED_KEYS = ("dataset_id", "minari_version", "data_format", "combined_datasets", "requirements", "eval_env_spec")
_REMOVED_FIELDS = ("apply_api_compatibility", "autoreset")  # EnvSpec had them before gymnasium 1.0
_WARNINGS = (
    "Minari stores only the flags at the end of an episode; its DataCollector marks incomplete episodes as truncated",
    "Minari stores no episode times and no versions of the recorder",
)


class MinariImporter:
    """Minari dataset (hdf5, arrow or parquet): its directory, or the directory data in it"""

    name: ClassVar[str] = "minari"

    def recognises(self, path: Path) -> bool:
        with suppress(TraceError):
            return "data_format" in read_json(_data_of(path) / FILE)
        return False

    def read(self, path: Path) -> Imported:
        data = _data_of(path)
        metadata = read_json(data / FILE)
        about = metadata.get(KEY) if isinstance(metadata.get(KEY), str) else None
        kind = metadata.get("data_format")
        if kind not in KINDS:
            problem = f"data_format is {printable(kind)!r}, not one of {', '.join(KINDS)}"
            raise UnreadableRecording(f"{data / FILE}: {problem}")
        spaces = _spaces(metadata, about, data)
        jpeg = metadata.get("jpeg_encoding", True) is not False
        warnings = [] if about is not None else [*_WARNINGS]
        if None in spaces:
            warnings.append("the dataset has no spaces: they are as wide as the arrays allow")
        if jpeg and any(is_picture(leaf) for space in spaces if space is not None for _, leaf in leaves_in(space, ())):
            warnings.append("images were stored as JPEG and differ from the observed ones")
        source = HDF5Reader(data / HDF5_FILE, spaces, jpeg) if kind == "hdf5" else ArrowReader(data, kind, spaces, jpeg)
        total, steps = metadata.get("total_episodes"), metadata.get("total_steps")
        if type(total) is int and total != len(source):
            problem = f"has {len(source):,} episodes, but {FILE} declares {total:,}; get a good copy"
            raise UnreadableRecording(f"{data}: {problem}")
        schema = new_schema(
            _KIND,
            *source.spaces,
            _environment_of(metadata, path),
            {"imported_from": _KIND} | {key: metadata[key] for key in _IMPORTED_KEYS if key in metadata},
            infos=True,
        )
        return imported(
            _KIND, source.episodes(), schema, about, _facts_of(metadata), warnings, steps if type(steps) is int else 0
        )  # fmt: skip


def _data_of(path: Path) -> Path:
    return path / "data" if (path / "data").is_dir() else path


def _spaces(metadata: dict[str, Any], about: str | None, data: Path) -> tuple[PlainSpace | None, PlainSpace | None]:
    """Return the spaces in `about` if gym-trace exported the dataset, else those of Minari's metadata."""
    names = ("observation_space", "action_space")
    try:
        if about is not None:
            schema, _ = first_writer(about)
            return schema[names[0]], schema[names[1]]
        observations, actions = (from_json(metadata[name]) if name in metadata else None for name in names)
        return observations, actions
    except (KeyError, UnreadableRecording) as error:
        raise UnreadableRecording(f"{data / FILE}: {error}") from error


def _facts_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata.json as facts of a trace."""
    texts = {
        "author": _listed(metadata.get("author")),
        "author_email": _listed(metadata.get("author_email")),
        "algorithm": metadata.get("algorithm_name"),
        "code": metadata.get("code_permalink"),
        "description": metadata.get("description"),
    }
    facts: dict[str, Any] = {key: value for key, value in texts.items() if isinstance(value, str) and value}
    low, high = metadata.get("ref_min_score"), metadata.get("ref_max_score")
    if is_number(low) and is_number(high):
        facts["reference_scores"] = {"random": low, "expert": high}
    return facts


def _listed(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def _environment_of(metadata: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the environment of metadata.json, for new_schema()."""
    try:
        fields = json_of(metadata["env_spec"])
        spec = json.dumps({name: value for name, value in fields.items() if name not in _REMOVED_FIELDS})
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        spec = None
    if not is_spec(spec):
        return {"note": f"Minari's dataset {printable(metadata.get('dataset_id', path.name))} names no environment"}
    return {"id": EnvSpec.from_json(str(spec)).id, "spec": spec, "note": ""}
