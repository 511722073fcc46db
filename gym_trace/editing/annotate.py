"""Metadata that users add to a trace: author, licence, description, tags, reference scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gym_trace.editing.sources import TraceOrPath
from gym_trace.errors import InvalidOption
from gym_trace.format.facts import SPELT, Facts, changed_facts, checked
from gym_trace.playback.trace import as_trace, writable_storage_of
from gym_trace.printable import shown


def annotate_trace(
    trace: TraceOrPath, facts: Mapping[str, Any] | None = None, *, unset: str | Iterable[str] = ()
) -> Facts:
    """Add metadata to a trace: gym_trace.format.facts.KNOWN lists common keys.

    It takes the place of what was said at once; episodes and their files are not touched. The trace may be recorded
    meanwhile.

    Args:
        trace: a trace, or a directory; of a view, the trace it is of.
        facts: what JSON can hold, by any names. Those that the trace says are replaced.
        unset: names of facts that go.

    Returns:
        All that the trace says now.

    Raises:
        InvalidOption: a fact is not of the form it should have, or there is none to unset.
        TraceNotFound, CorruptTrace, OSError
    """
    storage = writable_storage_of(as_trace(trace))
    with changed_facts(storage) as said:
        for name in [unset] if isinstance(unset, str) else unset:
            name = name if name in said else SPELT.get(name, name)
            if name not in said:
                there = f"; it says {', '.join(map(shown, said))}" if said else ", or anything else"
                raise InvalidOption(f"unset: the trace does not say {shown(name)}{there}")
            del said[name]
        said |= checked(facts or {})
    return said
