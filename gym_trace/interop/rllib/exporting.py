"""RLlib: a trace as Parquet for Ray's new API stack, an episode or a step a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gym_trace.errors import InvalidOption
from gym_trace.interop.contract import Loss
from gym_trace.interop.rllib.episodes import EpisodeKind
from gym_trace.interop.rllib.rows import RowKind
from gym_trace.interop.source import Source
from gym_trace.interop.steps.windows import LEFT_OUT

_KINDS: dict[str, type[EpisodeKind | RowKind]] = {"episodes": EpisodeKind, "rows": RowKind}


@dataclass(frozen=True)
class RLlibExporter:
    """RLlib (Ray's new API stack): Parquet of episodes, or of rows with kind=rows, for BC, MARWIL and CQL.

    kind: "episodes", each as SingleAgentEpisode.get_state() has it, or "rows", a step each: of any length, but neither
        Dict nor Tuple.
    """

    name: ClassVar[str] = "rllib"
    extra: ClassVar[str] = "rllib"
    makes: ClassVar[str] = "directory"
    finals: ClassVar[str] = LEFT_OUT

    kind: str = "episodes"

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise InvalidOption(f'kind={self.kind!r}: RLlib reads "episodes" or "rows"')

    def lost(self, source: Source) -> Iterator[Loss]:
        """Of rows also infos, and episodes without a step. Raises InvalidOption for spaces that RLlib cannot hold."""
        return _KINDS[self.kind](source).lost()

    def write(self, source: Source, target: Path) -> None:
        """Writes files of some 128 MiB; of an episode all is in memory, of rows some."""
        _KINDS[self.kind](source).write(target)

    def how_to_load(self, path: Path) -> str:
        """Behaviour cloning on the directory, which runs on a machine of two processors, too."""
        how = "input_read_episodes=True, input_read_batch_size=32, " if self.kind == "episodes" else ""
        return (
            "from ray.rllib.algorithms.bc import BCConfig\n"
            "from gym_trace.interop.rllib.loading import spaces_of\n"
            f"observation_space, action_space = spaces_of({str(path)!r})\n"
            "config = BCConfig().environment(observation_space=observation_space, action_space=action_space)\n"
            f"config = config.offline_data(input_=[{str(path)!r}], input_compress_columns=[], {how}"
            'dataset_num_iters_per_learner=100, map_batches_kwargs={"concurrency": 1})\n'
            "algorithm = config.training(train_batch_size_per_learner=256).build_algo()  # then algorithm.train()"
        )
