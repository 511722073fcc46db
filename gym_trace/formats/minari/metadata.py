"""Minari's metadata.json, made of the facts of a trace, and back."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gymnasium.envs.registration import EnvSpec

from gym_trace.format.manifest import json_of
from gym_trace.formats.identity import KEY
from gym_trace.formats.source import Source
from gym_trace.printable import printable

VERSION = "0.5.4"  # the first Minari that reads pictures in other forms than JPEG
FILE = "metadata.json"
IDS = re.compile(r"(?:[-_\w][-_\w/]*[-_\w]+/)?[-_\w]+?-v\d+")  # of data sets: NAMESPACE/NAME-v0
_OF_OLD_SPECS = ("apply_api_compatibility", "autoreset")  # of gymnasium before 1.0, which say nothing now
_MOST_BYTES = 256 << 20


# -- where a data set lies --------------------------------------------------------------------------------------------


def root_of(path: Path) -> Path:
    """The directory in which Minari would look for the data set at path: the one it does look in, or the parent."""
    given = os.environ.get("MINARI_DATASETS_PATH")
    usual = Path(given) if given else Path.home() / ".minari" / "datasets"
    return usual.resolve() if path.is_relative_to(usual.resolve()) and path != usual.resolve() else path.parent


def id_of(path: Path) -> str:
    """The id of the data set at a path: as Minari finds it there, if it can be one."""
    name = path.relative_to(root_of(path)).as_posix()
    if IDS.fullmatch(name):
        return name
    return (re.sub(r"[^-\w]+", "-", path.name).strip("-") or "trace") + "-v0"


# -- out --------------------------------------------------------------------------------------------------------------


def described(source: Source) -> dict[str, Any]:
    """Metadata of the trace in Minari's words."""
    facts, said = source.facts, source.environment
    provenance = source.trace.readers[0].schema.get("provenance")
    policy = provenance.get("policy") if isinstance(provenance, dict) else None
    scores = facts.get("reference_scores")
    low, high = (scores.get(name) if isinstance(scores, dict) else None for name in ("random", "expert"))
    told = {
        "author": [author] if (author := _text(facts, "author")) else None,
        "author_email": [email] if (email := _text(facts, "author_email", "email")) else None,
        "algorithm_name": _text(facts, "algorithm", "algorithm_name") or (policy if isinstance(policy, str) else None),
        "code_permalink": _text(facts, "code", "code_permalink", "homepage"),
        "description": _text(facts, "description"),
        "env_spec": spec if is_spec(spec := said.get("spec")) and not said.get("note") else None,
        "ref_min_score": low if _is_number(low) and _is_number(high) else None,
        "ref_max_score": high if _is_number(low) and _is_number(high) else None,
    }
    return {
        "minari_version": VERSION,
        **{key: value for key, value in told.items() if value is not None},
        KEY: source.about,
    }


def _text(facts: Mapping[str, Any], *names: str) -> str | None:
    return next((facts[name] for name in names if isinstance(facts.get(name), str) and facts[name]), None)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_spec(text: Any) -> bool:
    """Return True for JSON text of an EnvSpec. Does not make the environment."""
    try:
        return isinstance(text, str) and isinstance(EnvSpec.from_json(text), EnvSpec)
    except Exception:  # gymnasium says in many ways that it does not like what it is given
        return False


# -- in ---------------------------------------------------------------------------------------------------------------


def facts_of(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata.json as facts of a trace."""
    facts = {
        "author": _listed(said.get("author")),
        "author_email": _listed(said.get("author_email")),
        "algorithm": said.get("algorithm_name"),
        "code": said.get("code_permalink"),
        "description": said.get("description"),
    }
    found: dict[str, Any] = {key: value for key, value in facts.items() if isinstance(value, str) and value}
    low, high = said.get("ref_min_score"), said.get("ref_max_score")
    if _is_number(low) and _is_number(high):
        found["reference_scores"] = {"random": low, "expert": high}
    return found


def _listed(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def environment_of(said: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the environment of metadata.json, as a writer of a trace describes it."""
    try:
        fields = json_of(said["env_spec"])
        spec = json.dumps({name: value for name, value in fields.items() if name not in _OF_OLD_SPECS})
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        spec = None
    if not is_spec(spec):
        return {"note": f"Minari's data set {printable(said.get('dataset_id', path.name))} names no environment"}
    return {"id": EnvSpec.from_json(str(spec)).id, "spec": spec, "note": ""}
