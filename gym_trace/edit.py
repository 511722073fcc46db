"""Make new traces from recorded ones. Seeds, generator states, times, writers and episode ids are kept."""

from __future__ import annotations

from gym_trace.tools.editing.annotate import annotate_trace as annotate
from gym_trace.tools.editing.compact import compact_trace as compact
from gym_trace.tools.editing.drop import drop_columns as drop
from gym_trace.tools.editing.episodes import filter_trace as filter
from gym_trace.tools.editing.episodes import merge_traces as merge
from gym_trace.tools.editing.episodes import split_trace as split
from gym_trace.tools.editing.rewrite import EditReport

__all__ = ["EditReport", "annotate", "compact", "drop", "filter", "merge", "split"]
