"""Lint rules: the registered ones, and the interfaces for your own."""

from __future__ import annotations

from gym_trace.playback.scan import StepRuns
from gym_trace.tools.linting.findings import Kind, Sighting
from gym_trace.tools.linting.rules import Rule, all_kinds, all_rules, merged_thresholds

__all__ = ["Kind", "Rule", "Sighting", "StepRuns", "all_kinds", "all_rules", "merged_thresholds"]
