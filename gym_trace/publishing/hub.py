"""Datasets on the Hugging Face Hub: several files in one commit, with a card."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gym_trace.errors import InvalidOption, MissingExtra
from gym_trace.statistics.card import dataset_card
from gym_trace.storage.remote.objects import persistently

_PLACE = re.compile(r"hf://(?P<kind>datasets|spaces)/(?P<name>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?(?P<below>/.*)?")
_FILES = 50  # of a commit
_CARD = "README.md"


class _Place(NamedTuple):
    """name: of the dataset, with its user. below: path in it, with a slash at the end, or empty."""

    name: str
    revision: str | None
    below: str


def is_hub(url: str) -> bool:
    return url.startswith("hf://")


def commit(url: str, directory: Path, names: Sequence[str], on_bytes: Callable[[int], None]) -> None:
    """Add files to a dataset, which is made, private, unless it exists. It gets a card unless it has one.

    Raises InvalidOption, MissingExtra, RemoteError.
    """
    place = _place(url)
    try:
        from huggingface_hub import CommitOperationAdd, HfApi
    except ImportError:
        raise MissingExtra("hf:// needs huggingface_hub; install it with: pip install huggingface_hub") from None
    api: Any = HfApi()
    known = {"repo_id": place.name, "repo_type": "dataset"}
    persistently(lambda: api.create_repo(**known, private=True, exist_ok=True), url)
    has_card = persistently(lambda: api.file_exists(filename=_CARD, revision=place.revision, **known), url)
    for begin in range(0, len(names), _FILES):
        some = names[begin : begin + _FILES]
        added: list[Any] = [
            CommitOperationAdd(path_in_repo=place.below + name, path_or_fileobj=str(directory / name)) for name in some
        ]
        if not has_card and begin + _FILES >= len(names):
            card = dataset_card(directory).encode()
            added.append(CommitOperationAdd(path_in_repo=_CARD, path_or_fileobj=card))
        message = f"{len(some)} files of a gym-trace recording"
        persistently(_commit(api, added, message, place, known), url)
        on_bytes(sum((directory / name).stat().st_size for name in some))


def _commit(api: Any, added: list[Any], message: str, place: _Place, known: dict[str, str]) -> Callable[[], object]:
    return lambda: api.create_commit(operations=added, commit_message=message, revision=place.revision, **known)


def _place(url: str) -> _Place:
    found = _PLACE.fullmatch(url)
    if found is None or found["kind"] != "datasets":
        raise InvalidOption(f"{url}: not a dataset; write hf://datasets/USER/NAME")
    below = (found["below"] or "").strip("/")
    return _Place(found["name"], found["revision"], f"{below}/" if below else "")
