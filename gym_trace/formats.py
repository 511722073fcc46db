"""Export and import formats: the registered ones, and the interfaces for your own.

gym_trace.testing has the tests that every exporter and importer must pass.
"""

from __future__ import annotations

from gym_trace.exchange.formats.contract import (
    LOSSES,
    Exporter,
    ExportPlan,
    Importer,
    Loss,
    Target,
    losses,
)
from gym_trace.exchange.formats.imported import Imported, NewEpisode, NewSteps, imported, new_schema
from gym_trace.exchange.formats.registry import (
    FormatEntry,
    exporters,
    format_for,
    importers,
    listed,
)
from gym_trace.exchange.formats.source import ExportSource

__all__ = [
    "LOSSES",
    "ExportPlan",
    "ExportSource",
    "Exporter",
    "FormatEntry",
    "Imported",
    "Importer",
    "Loss",
    "NewEpisode",
    "NewSteps",
    "Target",
    "exporters",
    "format_for",
    "imported",
    "importers",
    "listed",
    "losses",
    "new_schema",
]
