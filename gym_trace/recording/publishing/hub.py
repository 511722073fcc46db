"""Datasets on the Hugging Face Hub: several files in one commit, with a card."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gym_trace.errors import InvalidOption, MissingExtra
from gym_trace.storage.remote.objects import persistently

_PLACE = re.compile(r"hf://datasets/(?P<name>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?(?P<below>/.*)?")
_FILES = 50  # of a commit
_CARD = "README.md"


def is_hub(url: str) -> bool:
    return url.startswith("hf://")


def commit(
    url: str, directory: Path, names: Sequence[str], on_bytes: Callable[[int], None], card: Callable[[Path], str] | None
) -> None:
    """Add files to a dataset, which is made, private, unless it exists. card: makes the card of one that has none.

    Raises InvalidOption, MissingExtra, RemoteError.
    """
    place = _PLACE.fullmatch(url)
    if place is None:
        raise InvalidOption(f"{url}: not a dataset; write hf://datasets/USER/NAME")
    try:
        from huggingface_hub import CommitOperationAdd, HfApi
    except ImportError:
        raise MissingExtra("hf:// needs huggingface_hub; install it with: pip install huggingface_hub") from None
    api: Any = HfApi()
    dataset: dict[str, Any] = {"repo_id": place["name"], "repo_type": "dataset"}
    at = {"revision": place["revision"], **dataset}
    below = (place["below"] or "").strip("/")
    persistently(partial(api.create_repo, **dataset, private=True, exist_ok=True), url)
    has_card = persistently(partial(api.file_exists, filename=_CARD, **at), url)
    for begin in range(0, len(names), _FILES):
        some = names[begin : begin + _FILES]
        added: list[Any] = [CommitOperationAdd(f"{below}/{name}".lstrip("/"), str(directory / name)) for name in some]
        if card is not None and not has_card and begin + _FILES >= len(names):
            added.append(CommitOperationAdd(_CARD, card(directory).encode()))
        message = f"{len(some)} files of a gym-trace recording"
        persistently(partial(api.create_commit, operations=added, commit_message=message, **at), url)
        on_bytes(sum((directory / name).stat().st_size for name in some))
