"""Write the episodes of Isaac Lab's recorder manager to a trace.

cfg.recorders.dataset_file_handler_class_type = gym_trace.exchange.isaaclab.TraceFileHandler
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from gym_trace.data.layout import PlainSpace
from gym_trace.data.schema import IMPORTED_FROM
from gym_trace.data.tensors import plain_array
from gym_trace.data.trees import joined, mapped
from gym_trace.data.values import placeholder
from gym_trace.envs import spaces
from gym_trace.errors import InvalidOption, MissingExtra
from gym_trace.exchange.formats.imported import NewEpisode, NewSteps, imported
from gym_trace.format.batch_files import BatchFiles
from gym_trace.format.ring.chunk_builder import ChunkWriter
from gym_trace.playback.trace import open_trace
from gym_trace.recording.options import RecordingOptions, new_schema, opened_directory, storage_in
from gym_trace.storage.interrupts import held_back

try:
    from isaaclab.utils.datasets import DatasetFileHandlerBase, EpisodeData
except ImportError as missing:
    raise MissingExtra(f"it runs within Isaac Lab ({missing}): https://isaac-sim.github.io/IsaacLab") from missing

__all__ = ["TraceFileHandler"]

_KIND = "Isaac Lab"
_EPISODE = "demo_"
_AT_RESET = "initial_state"  # root of values with one row, of the reset


class TraceFileHandler(DatasetFileHandlerBase):
    """A dataset_file_handler_class_type that keeps each exported episode, also if the process is killed later.

    Isaac Lab collects an episode on the device and exports it at its end, so an episode that is not over is lost.
    Episodes have the observations before each action ("obs"); the last one is unknown. Rewards are those of a term
    "rewards", otherwise NaN. All other values with a row per step are annotations, such as "states/articulation/…", and
    the rest is in the info of the reset: initial_state, success, env_args. load_episode() returns what was exported.

    Attributes:
        options: of RecordingOptions, such as on_exist, level and metadata; set them in a subclass.

    Examples:
        >>> cfg.dataset_file_handler_class_type = gym_trace.exchange.isaaclab.TraceFileHandler  # doctest: +SKIP
    """

    options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self._path: str | None = None
        self._env_args: dict[str, Any] = {}
        self._schema: dict[str, Any] = {}  # of the writer, whose episodes have these spaces
        self._spaces: tuple[PlainSpace, PlainSpace] | None = None
        self._chunks: ChunkWriter | None = None
        self._before = self._count = 0  # episodes of an opened trace; episodes written

    # -- files --------------------------------------------------------------------------------------------------------

    def create(self, file_path: str, env_name: str | None = None) -> None:
        """Prepare the directory of a new trace. Raises TraceExists."""
        self._demand_closed()
        options = RecordingOptions(directory=file_path, **self.options)
        with opened_directory(file_path, options.on_exist):
            self._path, self._env_args = file_path, {"env_name": env_name}

    def open(self, file_path: str, mode: str = "r") -> None:
        """Open a trace to read its episodes; with another mode also to add some. Raises TraceNotFound."""
        self._demand_closed()
        trace = open_trace(file_path)
        self._path, self._before = file_path, len(trace)
        self._env_args = dict((trace[0].reset_info or {})["env_args"]) if len(trace) else {}

    def flush(self) -> None:
        """Write all episodes so far, so that a kill loses none of them."""
        if self._chunks is not None:
            with held_back():
                self._chunks.write()

    def close(self) -> None:
        """Save the trace. Closing twice is fine."""
        self._end()
        self._path = None

    def _end(self) -> None:
        self.flush()
        if self._chunks is not None and self._chunks.writer is not None:
            self._chunks.writer.close({})
        self._chunks = None

    def _demand_closed(self) -> None:
        if self._path is not None:
            raise InvalidOption(f"{self._path}: is open; close it first")

    # -- facts --------------------------------------------------------------------------------------------------------

    def add_env_args(self, env_args: dict[str, Any]) -> None:
        """Keep facts about the environment."""
        self._env_args |= env_args

    def set_env_name(self, env_name: str) -> None:
        """Keep the name of the environment."""
        self._env_args["env_name"] = env_name

    def get_env_name(self) -> str | None:
        """Return the name of the environment."""
        return self._env_args.get("env_name")

    def get_episode_names(self) -> Iterable[str]:
        """Return the names of the episodes."""
        return [f"{_EPISODE}{number}" for number in range(self.get_num_episodes())]

    def get_num_episodes(self) -> int:
        """Return the number of episodes."""
        return self._before + self._count

    # -- episodes -----------------------------------------------------------------------------------------------------

    def write_episode(self, episode: Any, demo_id: int | None = None) -> None:
        """Add an episode; one without actions is skipped. demo_id: stored with it."""
        data = mapped(plain_array, episode.data)
        steps = len(data.get("actions", ()))
        if not steps:
            return
        columns = dict(_by_path(data))
        rows = {path: rows for path, rows in columns.items() if len(rows) == steps and not path.startswith(_AT_RESET)}
        known = {"env_args": self._env_args, "success": episode.success, "demo_id": demo_id}
        known["data"] = {path: values for path, values in columns.items() if path not in rows}
        actions, observed = rows.pop("actions"), {path for path in columns if path.partition("/")[0] == "obs"}
        observations: Any = np.zeros((steps, 0), np.float32)
        if observed and observed <= {*rows}:
            observations, rows = data["obs"], {path: rows[path] for path in rows if path not in observed}
        rewards = rows.pop("rewards") if "rewards" in rows and rows["rewards"].ndim == 1 else np.full(steps, np.nan)
        recorded = [spaces.inferred(mapped(lambda rows: rows[0], tree)) for tree in (observations, actions)]
        chunks = self._writer_for(*recorded)
        unknown = mapped(lambda rows: placeholder(rows.dtype, rows.shape[1:]), observations)
        new = NewEpisode(
            steps,
            [NewSteps(joined(observations, unknown), actions, rewards, annotations=rows)],
            "terminated" if episode.success else "cut",
            episode.seed,
            reset_info=known,
            has_final_observation=False,
            number=self._count,
        )
        with held_back():
            for _, segment in imported(_KIND, [new], self._schema, writer=self._schema["writer"]).segments:
                if segment is not None:
                    chunks.add(segment)
            if chunks.writer is not None:
                chunks.writer.seal_if_due()
            self._count += 1

    def _writer_for(self, observation_space: PlainSpace, action_space: PlainSpace) -> ChunkWriter:
        """Return the writer of episodes with these spaces: the one of the last episode, or another one."""
        if self._path is None:
            raise InvalidOption("no trace is open; call create() or open() first")
        if self._chunks is not None and (observation_space, action_space) == self._spaces:
            return self._chunks
        self._end()
        options = RecordingOptions(directory=self._path, **{**self.options, "on_exist": "append"})
        environment = {"id": self.get_env_name(), **self._env_args}
        with opened_directory(self._path, options.on_exist) as directory:
            recorder = {IMPORTED_FROM: _KIND, "record_infos": True}
            self._schema = new_schema(options, environment, observation_space, action_space, recorder)
            files = BatchFiles(storage_in(directory, options), self._schema, options.level, options.fsync)
        self._chunks, self._spaces = ChunkWriter(lambda: files, None), (observation_space, action_space)
        return self._chunks

    def load_episode(self, episode_name: str, device: str = "cpu") -> Any:
        """Return an episode as it was exported, with tensors on a device; None for an unknown name."""
        import torch

        self.flush()
        number = episode_name.removeprefix(_EPISODE)
        if not number.isdecimal() or int(number) >= self.get_num_episodes():
            return None
        assert self._path is not None
        stored = open_trace(self._path)[int(number)]
        known = stored.reset_info or {}
        columns = {**known["data"], "actions": stored.actions, **stored.annotations}
        if not np.isnan(stored.rewards).all():
            columns["rewards"] = stored.rewards
        columns |= _by_path({"obs": mapped(lambda rows: rows[:-1], stored.observations)})
        episode = EpisodeData()
        for path, rows in columns.items():
            *parents, name = path.split("/")
            part = episode.data
            for parent in parents:
                part = part.setdefault(parent, {})
            if rows.size or path != "obs":
                part[name] = torch.tensor(rows, device=device)
        episode.seed, episode.success, episode.env_id = stored.seed, known["success"], self.get_env_name()
        return episode


def _by_path(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the arrays of nested dicts with their paths, as Isaac Lab writes them: "obs/joint_pos"."""
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _by_path(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value
