"""An environment of robosuite with Gymnasium's interface, and with states, to play its demonstrations."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from gym_trace.data.packing import pack, unpack
from gym_trace.data.values import Array

ROBOSUITE = f"{__name__}:RobosuiteEnv"  # entry point
_SIZE = 512  # pixels of each side of a picture
_CAMERAS = ("agentview", "frontview")


class RobosuiteEnv(gymnasium.Env[Any, Any]):
    """Makes an environment of robosuite by its name and arguments. Observations are dicts of arrays, as robosuite's.

    A state is a packed array: the flattened state of MuJoCo, as in robosuite's files, without that of controllers.
    begin_episode() takes the model of the episode, which set_state() loads first.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 - as Gymnasium has it

    def __init__(self, env_name: str, render_mode: str | None = None, **kwargs: Any):
        self.render_mode = render_mode
        has_pictures = render_mode == "rgb_array" or bool(kwargs.get("use_camera_obs"))
        fixed = {"has_renderer": False, "has_offscreen_renderer": has_pictures, "ignore_done": True}
        self._sim: Any = importlib.import_module("robosuite").make(
            env_name, **{"use_camera_obs": False, **kwargs, **fixed}
        )
        low, high = self._sim.action_spec
        self.action_space = gymnasium.spaces.Box(low, high, dtype=np.float64)
        boxes = [(name, _box(rows)) for name, rows in self._observed().items()]
        self.observation_space = gymnasium.spaces.Dict(boxes)
        self._model: str | None = None  # XML of the episode; None: the last reset made one
        self._is_loaded = False

    def _observed(self) -> dict[str, Array]:
        return {name: np.asarray(value) for name, value in self._sim._get_observations(force_update=True).items()}

    def begin_episode(self, reset_info: Mapping[str, Any]) -> None:
        """Take the model of an episode, which its states belong to."""
        model = reset_info.get("model_file")
        self._model, self._is_loaded = model if isinstance(model, str) else None, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._sim.rng = np.random.default_rng(seed)
        self._sim.reset()
        self._is_loaded = False
        return self._observed(), {"model_file": self._sim.sim.model.get_xml()}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        _, reward, done, info = self._sim.step(action)
        return self._observed(), float(reward), bool(done), False, dict(info)

    def get_state(self) -> bytes:
        """Return the flattened state."""
        return pack(np.array(self._sim.sim.get_state().flatten()))

    def set_state(self, state: bytes) -> None:
        """Set the simulator to a state, with the model of the episode."""
        if self._model is not None and not self._is_loaded:
            self._sim.reset_from_xml_string(self._sim.edit_model_xml(self._model))
            self._sim.sim.reset()
            self._is_loaded = True
        self._sim.sim.set_state_from_flattened(unpack(state))
        self._sim.sim.forward()

    def render(self) -> Any:
        """Return a picture, (512, 512, 3) uint8."""
        known = self._sim.sim.model.camera_names
        camera = next((name for name in _CAMERAS if name in known), known[0])
        return self._sim.sim.render(camera_name=camera, width=_SIZE, height=_SIZE)[::-1].copy()

    def close(self) -> None:
        self._sim.close()


def _box(value: Array) -> gymnasium.Space[Any]:
    if value.dtype.kind == "f":
        return gymnasium.spaces.Box(-np.inf, np.inf, value.shape, value.dtype.type)
    return gymnasium.spaces.Box(np.iinfo(value.dtype).min, np.iinfo(value.dtype).max, value.shape, value.dtype.type)
