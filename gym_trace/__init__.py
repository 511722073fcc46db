"""Record Gymnasium environments to traces, bit for bit, and play them back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_trace import errors as errors
from gym_trace.on_first_use import on_first_use

if TYPE_CHECKING:
    from gym_trace import dm_env as dm_env
    from gym_trace import edit as edit
    from gym_trace import exchange as exchange
    from gym_trace import formats as formats
    from gym_trace import linting as linting
    from gym_trace import pettingzoo as pettingzoo
    from gym_trace import playback as playback
    from gym_trace import printable as printable
    from gym_trace import proof as proof
    from gym_trace import pytest_plugin as pytest_plugin
    from gym_trace import recording as recording
    from gym_trace import replay as replay
    from gym_trace import replay_env as replay_env
    from gym_trace import results as results
    from gym_trace import storage as storage
    from gym_trace import targets as targets
    from gym_trace import testing as testing
    from gym_trace import training as training
    from gym_trace import viewer as viewer
    from gym_trace import wrappers as wrappers
    from gym_trace.data.episode import Episode as Episode
    from gym_trace.exchange.formats.exporting import export as export
    from gym_trace.exchange.formats.importing import import_trace as import_trace
    from gym_trace.exchange.formats.legacy.monitor import load_results as load_results
    from gym_trace.exchange.formats.steps.table import StepTable as StepTable
    from gym_trace.playback.sampling.items import Hindsight as Hindsight
    from gym_trace.playback.tables.sql import query as query
    from gym_trace.playback.tables.sql import write_query as write_query
    from gym_trace.playback.trace import Trace as Trace
    from gym_trace.playback.trace import open_trace as open_trace
    from gym_trace.playback.trace import scan_recorded_traces as scan_recorded_traces
    from gym_trace.recording.collecting.api import collect as collect
    from gym_trace.recording.collecting.rollout import record as record
    from gym_trace.recording.collecting.rollout import record_episodes as record_episodes
    from gym_trace.recording.single.wrapper import TraceRecordingWrapper as TraceRecordingWrapper
    from gym_trace.recording.vector.wrapper import TraceRecordingVectorWrapper as TraceRecordingVectorWrapper
    from gym_trace.recording.writer import TraceWriter as TraceWriter
    from gym_trace.tools.audit.api import audit as audit
    from gym_trace.tools.branching import branch as branch
    from gym_trace.tools.integrity.healing import heal_trace as heal_trace
    from gym_trace.tools.integrity.repair import check_trace as check_trace
    from gym_trace.tools.integrity.repair import repair_trace as repair_trace
    from gym_trace.tools.linting.api import lint_trace as lint_trace
    from gym_trace.tools.playing.play import play as play
    from gym_trace.tools.remake import remake as remake
    from gym_trace.tools.replay.diff import diff_traces as diff_traces
    from gym_trace.tools.replay.env_at import env_at as env_at
    from gym_trace.tools.replay.replay_env import ReplayEnv as ReplayEnv
    from gym_trace.tools.replay.verify import verify_trace as verify_trace
    from gym_trace.tools.statistics.card import dataset_card as dataset_card
    from gym_trace.tools.statistics.comparison import compare as compare
    from gym_trace.tools.statistics.describe import describe as describe
    from gym_trace.tools.statistics.describe import find_traces as find_traces
    from gym_trace.tools.statistics.describe import list_episodes as list_episodes
    from gym_trace.tools.statistics.describe import list_trace as list_trace
    from gym_trace.tools.statistics.plot import plot_episodes as plot_episodes
    from gym_trace.tools.statistics.plot import plot_runs as plot_runs
    from gym_trace.tools.statistics.summary import summarize as summarize
    from gym_trace.tools.transfer import pull as pull
    from gym_trace.tools.transfer import push as push
    from gym_trace.tools.video.render import render as render
    from gym_trace.training.api import train as train

__version__ = "0.1.0"

# Imported on first access, so that "gym-trace --help" does not import gymnasium.
_HOMES = {
    "Episode": "gym_trace.data.episode",
    "Hindsight": "gym_trace.playback.sampling.items",
    "ReplayEnv": "gym_trace.tools.replay.replay_env",
    "StepTable": "gym_trace.exchange.formats.steps.table",
    "Trace": "gym_trace.playback.trace",
    "TraceRecordingVectorWrapper": "gym_trace.recording.vector.wrapper",
    "TraceRecordingWrapper": "gym_trace.recording.single.wrapper",
    "TraceWriter": "gym_trace.recording.writer",
    "audit": "gym_trace.tools.audit.api",
    "branch": "gym_trace.tools.branching",
    "check_trace": "gym_trace.tools.integrity.repair",
    "collect": "gym_trace.recording.collecting.api",
    "compare": "gym_trace.tools.statistics.comparison",
    "dataset_card": "gym_trace.tools.statistics.card",
    "describe": "gym_trace.tools.statistics.describe",
    "diff_traces": "gym_trace.tools.replay.diff",
    "env_at": "gym_trace.tools.replay.env_at",
    "export": "gym_trace.exchange.formats.exporting",
    "find_traces": "gym_trace.tools.statistics.describe",
    "heal_trace": "gym_trace.tools.integrity.healing",
    "import_trace": "gym_trace.exchange.formats.importing",
    "lint_trace": "gym_trace.tools.linting.api",
    "list_episodes": "gym_trace.tools.statistics.describe",
    "list_trace": "gym_trace.tools.statistics.describe",
    "load_results": "gym_trace.exchange.formats.legacy.monitor",
    "open_trace": "gym_trace.playback.trace",
    "play": "gym_trace.tools.playing.play",
    "plot_episodes": "gym_trace.tools.statistics.plot",
    "plot_runs": "gym_trace.tools.statistics.plot",
    "pull": "gym_trace.tools.transfer",
    "push": "gym_trace.tools.transfer",
    "query": "gym_trace.playback.tables.sql",
    "record": "gym_trace.recording.collecting.rollout",
    "record_episodes": "gym_trace.recording.collecting.rollout",
    "remake": "gym_trace.tools.remake",
    "render": "gym_trace.tools.video.render",
    "repair_trace": "gym_trace.tools.integrity.repair",
    "scan_recorded_traces": "gym_trace.playback.trace",
    "summarize": "gym_trace.tools.statistics.summary",
    "train": "gym_trace.training",
    "verify_trace": "gym_trace.tools.replay.verify",
    "write_query": "gym_trace.playback.tables.sql",
}
# Public modules; each lists its names in __all__.
_MODULES = (
    *("dm_env", "edit", "exchange", "formats", "linting", "pettingzoo", "playback", "printable", "proof"),
    *("pytest_plugin", "recording", "replay", "replay_env", "results", "storage", "targets", "testing"),
    *("training", "viewer", "wrappers"),
)

__all__ = sorted({*_HOMES, "errors"} - {"train"})  # "from gym_trace import *" must not need PyTorch

if not TYPE_CHECKING:  # or type checkers would accept every name
    __getattr__ = on_first_use(__name__, _HOMES, _MODULES)


def __dir__() -> list[str]:
    return sorted([*__all__, "train", *(name for name in globals() if name.startswith("__"))])
