"""Metadata that users add to a trace, such as author, license, description and tags."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gym_trace.errors import InvalidOption
from gym_trace.format.facts import SPELT, Facts, changed_facts, checked
from gym_trace.playback.trace import as_trace, writable_storage_of
from gym_trace.printable import shown
from gym_trace.tools.editing.sources import TraceOrPath


def annotate_trace(
    trace: TraceOrPath, facts: Mapping[str, Any] | None = None, *, unset: str | Iterable[str] = ()
) -> Facts:
    """Add metadata to a trace: gym_trace.format.facts.KNOWN lists common keys.

    The change is atomic and does not touch episodes. The trace may still be recorded.

    Args:
        trace: a trace, or a directory; for a view, its whole trace is changed.
        facts: JSON values by name; existing facts of these names are replaced.
        unset: names of facts to remove.

    Returns:
        All facts of the trace.

    Raises:
        InvalidOption: a fact has the wrong form, or one to unset is missing.
        TraceNotFound, CorruptTrace, OSError

    Examples:
        >>> _ = gym_trace.edit.compact("traces/cartpole", "traces/described")
        >>> gym_trace.edit.annotate("traces/described", {"author": "Ada", "license": "CC-BY-4.0"})
        {'author': 'Ada', 'license': 'CC-BY-4.0'}
    """
    storage = writable_storage_of(as_trace(trace))
    with changed_facts(storage) as stored:
        for name in [unset] if isinstance(unset, str) else unset:
            name = name if name in stored else SPELT.get(name, name)
            if name not in stored:
                known = f"; it has {', '.join(map(shown, stored))}" if stored else ", and no other facts"
                raise InvalidOption(f"unset: no fact {shown(name)} in this trace{known}")
            del stored[name]
        stored |= checked(facts or {})
    return stored
