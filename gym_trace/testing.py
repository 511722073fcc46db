"""Tests for your own exporters and importers: every built-in format passes them.

    from gym_trace.testing import Loaded, check_exporter

The module gym_trace.exchange.formats.conformance has an example.
"""

from __future__ import annotations

from gym_trace.exchange.formats.conformance import (
    Loaded,
    check_exporter,
    check_importer,
    loaded_from,
)

__all__ = ["Loaded", "check_exporter", "check_importer", "loaded_from"]
