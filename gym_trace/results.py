"""Classes of the results and reports of public functions, for type annotations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_trace.data.agents import AgentEpisode
from gym_trace.data.returns import Return
from gym_trace.exchange.formats.contract import ExportReport, ImportReport, Loss
from gym_trace.format.batch_reader import Damage
from gym_trace.format.healing import HealReport
from gym_trace.on_first_use import on_first_use
from gym_trace.recording.collecting.rollout import RolloutProgress
from gym_trace.recording.collecting.supervisor import Collected, WorkerState
from gym_trace.recording.publishing.transfer import TransferReport
from gym_trace.tools.audit.report import AuditReport, Claim
from gym_trace.tools.branching import Branched
from gym_trace.tools.editing.rewrite import EditReport
from gym_trace.tools.integrity.repair import RepairReport
from gym_trace.tools.integrity.scan import CheckReport, LostChunk, LostSteps, SalvagedSteps
from gym_trace.tools.linting.findings import Finding
from gym_trace.tools.playing.report import PlayReport
from gym_trace.tools.remake import RemadeEpisode, RemakeReport
from gym_trace.tools.replay.compare import Difference
from gym_trace.tools.replay.diff import EpisodeDifference
from gym_trace.tools.replay.divergence import Divergence
from gym_trace.tools.replay.resimulate import Verdict
from gym_trace.tools.statistics.comparison import Estimate, RunComparison, RunGroup
from gym_trace.tools.video.render import Rendered

if TYPE_CHECKING:
    from gym_trace.playback.tables.partitions import Partition
else:
    __getattr__ = on_first_use(__name__, {"Partition": "gym_trace.playback.tables.partitions"})  # needs pyarrow

__all__ = [
    "AgentEpisode",
    "AuditReport",
    "Branched",
    "CheckReport",
    "Claim",
    "Collected",
    "Damage",
    "Difference",
    "Divergence",
    "EditReport",
    "EpisodeDifference",
    "Estimate",
    "ExportReport",
    "Finding",
    "HealReport",
    "ImportReport",
    "Loss",
    "LostChunk",
    "LostSteps",
    "Partition",
    "PlayReport",
    "RemadeEpisode",
    "RemakeReport",
    "Rendered",
    "RepairReport",
    "Return",
    "RolloutProgress",
    "RunComparison",
    "RunGroup",
    "SalvagedSteps",
    "TransferReport",
    "Verdict",
    "WorkerState",
]
