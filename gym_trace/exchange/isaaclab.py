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
from gym_trace.data.trees import mapped
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
    """

    options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self._path: str | None = None
        self._env_args: dict[str, Any] = {}
        self._chunks: ChunkWriter | None = None
        self._schema: dict[str, Any] = {}
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
        self._chunks, self._schema = None, {}

    def _demand_closed(self) -> None:
        if self._path is not None:
            raise InvalidOption(f"{self._path}: is open; close it first")

    @property
    def _directory(self) -> str:
        if self._path is None:
            raise InvalidOption("no trace is open; call create() or open() first")
        return self._path

    # -- facts --------------------------------------------------------------------------------------------------------

    def add_env_args(self, env_args: dict[str, Any]) -> None:
        """Keep facts about the environment."""
        self._env_args |= env_args

    def set_env_name(self, env_name: str) -> None:
        """Keep the name of the environment."""
        self.add_env_args({"env_name": env_name})

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
        if episode.is_empty():
            return
        data = mapped(plain_array, episode.data)
        actions = data.get("actions")
        steps = 0 if actions is None else len(actions)
        if not steps:
            return
        columns = dict(_by_path(data))
        rows = {
            path: values for path, values in columns.items() if len(values) == steps and not path.startswith(_AT_RESET)
        }
        observed = {path for path in columns if path.partition("/")[0] == "obs"}
        observations = data["obs"] if observed and observed <= {*rows} else np.zeros((steps, 0), np.float32)
        others = {path: values for path, values in rows.items() if path != "actions" and path not in observed}
        rewards = others.pop("rewards") if "rewards" in rows and rows["rewards"].ndim == 1 else np.full(steps, np.nan)
        known = {"env_args": self._env_args, "success": episode.success, "demo_id": demo_id}
        known["data"] = {path: values for path, values in columns.items() if path not in rows}
        recorded = [spaces.inferred(mapped(lambda values: values[0], tree)) for tree in (observations, actions)]
        if recorded != [self._schema.get("observation_space"), self._schema.get("action_space")]:
            self._begin(*recorded)
        new = NewEpisode(
            steps,
            [NewSteps(mapped(_with_unknown, observations), actions, rewards, annotations=others)],
            "terminated" if episode.success else "cut",
            episode.seed,
            reset_info=known,
            has_final_observation=False,
            number=self._count,
        )
        assert self._chunks is not None
        with held_back():
            for _, segment in imported(_KIND, [new], self._schema, writer=self._schema["writer"]).segments:
                if segment is not None:
                    self._chunks.add(segment)
            if self._chunks.writer is not None:
                self._chunks.writer.seal_if_due()
            self._count += 1

    def _begin(self, observation_space: PlainSpace, action_space: PlainSpace) -> None:
        """Begin a writer for episodes with these spaces."""
        self._end()
        options = RecordingOptions(directory=self._directory, **{**self.options, "on_exist": "append"})
        environment = {"id": self.get_env_name(), **self._env_args}
        recorder = {IMPORTED_FROM: _KIND, "record_infos": True}
        with opened_directory(self._directory, options.on_exist) as directory:
            self._schema = new_schema(options, environment, observation_space, action_space, recorder)
            files = BatchFiles(storage_in(directory, options), self._schema, options.level, options.fsync)
        self._chunks = ChunkWriter(lambda: files, None)

    def load_episode(self, episode_name: str, device: str = "cpu") -> Any:
        """Return an episode as it was exported, with tensors on a device; None for an unknown name."""
        import torch

        self.flush()
        number = episode_name.removeprefix(_EPISODE)
        if not number.isdecimal() or int(number) >= self.get_num_episodes():
            return None
        stored = open_trace(self._directory)[int(number)]
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


def _with_unknown(rows: Any) -> Any:
    """Return rows with one more, which stands for the unknown last observation."""
    return np.concatenate([rows, np.full_like(rows[:1], np.nan if rows.dtype.kind == "f" else 0)])
