"""The losses that most formats have, reported only if the trace has such content."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from gym_trace.formats.contract import Loss
from gym_trace.formats.source import Source


def losses(source: Source, *names: str) -> Iterator[Loss]:
    """Yield those of these losses that apply, such as "seed" if an episode has one.

    names: "final_observation", "seed", "options", "reset_info", "outcome", "flags", "infos", "annotations", "identity",
    "dtype", "empty_episode", "parts", "facts". Raises CorruptTrace.
    """
    for name in names:
        why = _FOUND[name](source)
        if why:
            yield Loss(name, why)


def _many(count: int, one: str, several: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def _final_observation(source: Source) -> str:
    return "the final observation of each episode is not kept"


def _seed(source: Source) -> str:
    count = int(np.count_nonzero(source.episodes["seed"] != -1))
    return f"the {_many(count, 'seed')} that episodes began with are not kept" if count else ""


def _options(source: Source) -> str:
    count = sum(bool(episode.options) for episode in source.trace.scan(columns=()))
    return f"the options that reset was given for {_many(count, 'episode')} are not kept" if count else ""


def _reset_info(source: Source) -> str:
    count = sum(episode.reset_info is not None for episode in source.trace.scan(columns=()))
    return f"the infos of the resets of {_many(count, 'episode')} are not kept" if count else ""


def _outcome(source: Source) -> str:
    table = source.episodes
    count = int(np.count_nonzero(np.isin(table["outcome"], ("cut", "closed", "lost"))))
    return f"{_many(count, 'episode')} that came to no end (cut, closed or lost) read as truncated" if count else ""


def _flags(source: Source) -> str:
    found = source.has_flags_within()
    return "what was said to be terminated or truncated before the end of an episode is not kept" if found else ""


def _infos(source: Source) -> str:
    return "infos are not kept" if ("infos",) in source.forms else ""


def _annotations(source: Source) -> str:
    names = [str(path[1]) for path in source.forms if path[0] == "annotations"]
    return f"annotations are not kept: {', '.join(sorted(names))}" if names else ""


def _dtype(source: Source) -> str:
    mixed = [f"{'/'.join(map(str, path))} ({form.dtype})" for path, form in source.forms.items() if form and form.mixed]
    return f"rows of several dtypes are written as one that holds them all: {', '.join(mixed)}" if mixed else ""


def _identity(source: Source) -> str:
    return "writer, id, times and generator state of an episode are not kept"


def _empty_episode(source: Source) -> str:
    count = int(np.count_nonzero(source.episodes["steps"] == 0))
    return f"{_many(count, 'episode')} without a step {'is' if count == 1 else 'are'} left out" if count else ""


def _parts(source: Source) -> str:
    count = int(np.count_nonzero(source.is_part))
    return f"{_many(count, 'part')} of episodes, whose other steps were not recorded, read as episodes" if count else ""


def _facts(source: Source) -> str:
    return f"facts of the trace are not kept: {', '.join(sorted(source.facts))}" if source.facts else ""


_FOUND: dict[str, Callable[[Source], str]] = {
    "annotations": _annotations,
    "dtype": _dtype,
    "empty_episode": _empty_episode,
    "facts": _facts,
    "final_observation": _final_observation,
    "flags": _flags,
    "identity": _identity,
    "infos": _infos,
    "options": _options,
    "outcome": _outcome,
    "parts": _parts,
    "reset_info": _reset_info,
    "seed": _seed,
}
