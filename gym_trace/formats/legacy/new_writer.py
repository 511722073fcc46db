"""What an old recording becomes: a writer of a trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from gym_trace.ring.segment import Segment


class NewWriter(NamedTuple):
    """A writer of a trace that is to be written.

    name: to be its id, if it can be one.
    schema: what its schema record says of the recording (docs/FORMAT.md, section 4).
    segments: its episodes, read as they are asked for.
    """

    name: str
    schema: dict[str, Any]
    segments: Iterator[Segment]
