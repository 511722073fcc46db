"""Record environments of mjlab, by a term of their recorder manager, and set them to recorded states.

cfg.recorders["trace"] = gym_trace.exchange.mjlab.recorder("traces/run", lanes=40)
env = ManagerBasedRlEnv(cfg, device="cuda:0")
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import Space, vector

from gym_trace.data.episode import Episode
from gym_trace.data.trees import mapped
from gym_trace.envs import spaces
from gym_trace.errors import InvalidOption, MissingExtra
from gym_trace.recording.vector.wrapper import TraceRecordingVectorWrapper

try:
    import torch
    from mjlab.managers.recorder_manager import RecorderTerm, RecorderTermCfg
except ImportError as missing:
    raise MissingExtra(f"recording in it needs mjlab 1.6 or newer ({missing}): pip install mjlab") from missing

__all__ = ["STATE", "TraceRecorder", "recorder", "restore"]

# Fields of the simulator's data that its next step depends on.
STATE = (
    *("time", "qpos", "qvel", "act", "qacc_warmstart", "ctrl", "qfrc_applied", "xfrc_applied", "eq_active"),
    *("mocap_pos", "mocap_quat"),
)
_PREFIX = "sim/"  # begins the names of their annotations


def recorder(
    directory: str | os.PathLike[str] | None = None,
    *,
    lanes: Any = None,
    states: bool | Sequence[str] = False,
    **options: Any,
) -> RecorderTermCfg:
    """Return the configuration of a term that records all steps, for cfg.recorders of an environment.

    mjlab resets an environment in the step that ends its episode, and never computes the last observation:
    Episode.has_final_observation is False. With cfg.auto_reset = False the last observations are recorded.

    Args:
        directory: of the trace; None: a new temporary one.
        lanes: record only these environments, as in TraceRecordingVectorWrapper.
        states: record the simulator's state before each step, as annotations "sim/qpos", "sim/qvel" …: True for all of
            STATE, or names of fields of env.sim.data.
        options: other options of TraceRecordingVectorWrapper.

    Examples:
        >>> cfg.recorders["trace"] = gym_trace.exchange.mjlab.recorder("traces/go1")  # doctest: +SKIP
    """
    fields = STATE if states is True else tuple(states or ())
    params = {"directory": directory, "lanes": lanes, "states": fields, "options": options}
    return RecorderTermCfg(func=TraceRecorder, params=params)


class TraceRecorder(RecorderTerm):
    """The term of recorder(): ``env.recorder_manager.get_term(name)``. It records from the first reset on.

    Attributes:
        wrapper: the TraceRecordingVectorWrapper that writes the trace, for annotate(), flush() and its directory; None
            before the first reset.

    Examples:
        >>> recorder = env.recorder_manager.get_term("trace")  # doctest: +SKIP
    """

    def __init__(self, cfg: RecorderTermCfg, env: Any):
        super().__init__(cfg, env)
        self._states: tuple[str, ...] = cfg.params["states"]
        if unknown := [name for name in self._states if not hasattr(env.sim.data, name)]:
            raise InvalidOption(f"states: env.sim.data has no field {unknown[0]}; known are {', '.join(STATE)}")
        self.wrapper: TraceRecordingVectorWrapper | None = None
        self._ended: Any = None  # the environments that are reset within this step, as record_pre_reset() got them
        self._actions: Any = None  # the actions of this step, if it resets environments, which clears theirs

    def record_pre_reset(self, env_ids: Any) -> None:
        """Keep the actions of a step that resets environments."""
        self._ended, self._actions = env_ids, self._env.action_manager.action.clone()

    def record_post_reset(self, env_ids: Any) -> None:
        """Record a reset by the user; resets within a step are recorded with it."""
        if env_ids is self._ended:
            return
        env = self._env
        if self.wrapper is None:
            params = self.cfg.params
            results = _Results(env)
            self.wrapper = TraceRecordingVectorWrapper(
                results, params["directory"], lanes=params["lanes"], **params["options"]
            )
        mask = np.zeros(env.num_envs, np.bool_)
        mask[env_ids.cpu().numpy()] = True
        self.wrapper.reset(options=None if mask.all() else {"reset_mask": mask})
        self._annotate_states()

    def record_post_step(self) -> None:
        """Record the step of all environments."""
        if self.wrapper is not None:
            self.wrapper.step(self._env.action_manager.action if self._actions is None else self._actions)
            self._annotate_states()
        self._ended = self._actions = None

    def close(self) -> None:
        """Save the trace."""
        if self.wrapper is not None:
            self.wrapper.close()

    def _annotate_states(self) -> None:
        """Annotate the next step with the simulator's state now, which is that before it."""
        if self._states and self.wrapper is not None:
            fields = {name: getattr(self._env.sim.data, name)[:] for name in self._states}
            self.wrapper.annotate(**{_PREFIX + name: rows.clone() for name, rows in fields.items() if rows.numel()})


class _Results(vector.VectorEnv[Any, Any, Any]):
    """Returns what an environment of mjlab has computed, as reset() and step() of a vector environment."""

    def __init__(self, env: Any):
        self._env, self.num_envs = env, env.num_envs
        mode = vector.AutoresetMode.SAME_STEP if env.cfg.auto_reset else vector.AutoresetMode.DISABLED
        self.metadata = {"autoreset_mode": mode, "render_fps": 1 / env.step_dt}
        self.single_observation_space = _space(env.obs_buf)
        self.single_action_space = _space(env.action_manager.action)
        self.observation_space = vector.utils.batch_space(self.single_observation_space, self.num_envs)
        self.action_space = vector.utils.batch_space(self.single_action_space, self.num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._env.obs_buf, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        env = self._env
        return env.obs_buf, env.reward_buf, env.reset_terminated, env.reset_time_outs, {}


def _space(batch: Any) -> Space[Any]:
    """Return the space of one environment: boxes without bounds."""
    return spaces.restore(spaces.inferred(mapped(lambda rows: rows[0], batch)))


def restore(env: Any, episode: Episode, step: int, env_ids: Any = slice(None)) -> None:
    """Set environments to the simulator's state before a step of a recorded episode, and compute what derives from it.

    The states of managers, such as commands, delays and histories of observations, are not recorded.

    Args:
        env: an environment of mjlab with the same model.
        episode: recorded with states.
        env_ids: which environments; default: all.

    Raises InvalidOption if the episode has no states.

    Examples:
        >>> episode = gym_trace.open_trace("traces/go1")[0]  # doctest: +SKIP
        >>> gym_trace.exchange.mjlab.restore(env, episode, 100)  # doctest: +SKIP
    """
    fields = {name: rows for name, rows in episode.annotations.items() if name.startswith(_PREFIX)}
    if not fields:
        raise InvalidOption("episode: has no states of the simulator; record with recorder(…, states=True)")
    sim = env.unwrapped.sim
    for name, rows in fields.items():
        field = getattr(sim.data, name.removeprefix(_PREFIX))
        field[env_ids] = torch.as_tensor(rows[step], device=sim.device)
    sim.forward()
    sim.sense()
