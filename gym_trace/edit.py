"""Make new traces from recorded ones. Seeds, generator states, times, writers and episode ids are kept."""

from __future__ import annotations

from gym_trace.format.facts import fact_from_text
from gym_trace.tools.editing.annotate import annotate_trace as annotate
from gym_trace.tools.editing.columns import add_columns as add
from gym_trace.tools.editing.columns import drop_columns as drop
from gym_trace.tools.editing.columns import map_columns as map
from gym_trace.tools.editing.columns import rename_columns as rename
from gym_trace.tools.editing.compact import compact_trace as compact
from gym_trace.tools.editing.episodes import filter_trace as filter
from gym_trace.tools.editing.episodes import merge_traces as merge
from gym_trace.tools.editing.episodes import split_trace as split
from gym_trace.tools.editing.rewrite import EditReport

__all__ = [
    "EditReport",
    "add",
    "annotate",
    "compact",
    "drop",
    "fact_from_text",
    "filter",
    "map",
    "merge",
    "rename",
    "split",
]
