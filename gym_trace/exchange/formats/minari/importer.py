"""Import of Minari's datasets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from gymnasium.envs.registration import EnvSpec

from gym_trace.data.layout import PlainSpace, leaves_in
from gym_trace.errors import TraceError, UnreadableRecording
from gym_trace.exchange.formats.foreign import read_json
from gym_trace.exchange.formats.identity import KEY, read_about
from gym_trace.exchange.formats.imported import Imported, imported, new_schema
from gym_trace.exchange.formats.minari.arrow_in import ArrowReader
from gym_trace.exchange.formats.minari.hdf5_in import HDF5Reader
from gym_trace.exchange.formats.minari.hdf5_out import FILE as HDF5_FILE
from gym_trace.exchange.formats.minari.plan import FILE, KINDS, is_number, is_spec
from gym_trace.exchange.formats.minari.spaces import from_json, is_picture
from gym_trace.format.manifest import json_of
from gym_trace.printable import printable

_KIND = "Minari"
_TOLD = ("dataset_id", "minari_version", "data_format", "combined_datasets", "requirements", "eval_env_spec")
_OF_OLD_SPECS = ("apply_api_compatibility", "autoreset")  # fields of gymnasium before 1.0 that no longer exist
_NOTES = (
    "Minari stores only the flags at the end of an episode; its DataCollector marks incomplete episodes as truncated",
    "Minari stores no episode times and no versions of the recorder",
)


class MinariImporter:
    """Minari dataset (hdf5, arrow or parquet): its directory, or the directory data in it."""

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
        notes = [] if about is not None else [*_NOTES]
        if None in spaces:
            notes.append("the dataset has no spaces: they are as wide as the arrays allow")
        if jpeg and any(is_picture(leaf) for space in spaces if space is not None for _, leaf in leaves_in(space, ())):
            notes.append("images were stored as JPEG and differ from what was observed")
        source = HDF5Reader(data / HDF5_FILE, spaces, jpeg) if kind == "hdf5" else ArrowReader(data, kind, spaces, jpeg)
        total, steps = metadata.get("total_episodes"), metadata.get("total_steps")
        if type(total) is int and total != len(source):
            problem = f"has {len(source):,} episodes, but {FILE} declares {total:,}; get a good copy"
            raise UnreadableRecording(f"{data}: {problem}")
        schema = new_schema(
            _KIND,
            *source.spaces,
            _environment_of(metadata, path),
            {"imported_from": _KIND} | {key: metadata[key] for key in _TOLD if key in metadata},
            infos=True,
        )
        return imported(
            _KIND, source.episodes(), schema, about, _facts_of(metadata), notes, steps if type(steps) is int else 0
        )  # fmt: skip


def _data_of(path: Path) -> Path:
    return path / "data" if (path / "data").is_dir() else path


def _spaces(metadata: dict[str, Any], about: str | None, data: Path) -> tuple[PlainSpace | None, PlainSpace | None]:
    """Return the writers of the exported trace, if it was one; otherwise Minari's metadata."""
    names = ("observation_space", "action_space")
    try:
        if about is not None:
            for schema in read_about(about)["writers"].values():
                observations, actions = (schema[name] for name in names)
                return observations, actions
        observations, actions = (from_json(metadata[name]) if name in metadata else None for name in names)
        return observations, actions
    except (KeyError, UnreadableRecording) as error:
        raise UnreadableRecording(f"{data / FILE}: {error}") from error


def _facts_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata.json as facts of a trace."""
    facts = {
        "author": _listed(metadata.get("author")),
        "author_email": _listed(metadata.get("author_email")),
        "algorithm": metadata.get("algorithm_name"),
        "code": metadata.get("code_permalink"),
        "description": metadata.get("description"),
    }
    found: dict[str, Any] = {key: value for key, value in facts.items() if isinstance(value, str) and value}
    low, high = metadata.get("ref_min_score"), metadata.get("ref_max_score")
    if is_number(low) and is_number(high):
        found["reference_scores"] = {"random": low, "expert": high}
    return found


def _listed(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def _environment_of(metadata: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the environment of metadata.json, as a writer of a trace describes it."""
    try:
        fields = json_of(metadata["env_spec"])
        spec = json.dumps({name: value for name, value in fields.items() if name not in _OF_OLD_SPECS})
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        spec = None
    if not is_spec(spec):
        return {"note": f"Minari's dataset {printable(metadata.get('dataset_id', path.name))} names no environment"}
    return {"id": EnvSpec.from_json(str(spec)).id, "spec": spec, "note": ""}
