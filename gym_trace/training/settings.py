"""Settings of a training run, as plain data that the run stores."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from gym_trace.errors import InvalidOption

ANY, CONSTANT = "any", "constant"
_CHOICES: dict[str, tuple[Any, ...]] = {
    "lag": (0, 1, ANY),
    "off_policy": ("vtrace", "none"),
    **dict.fromkeys(("learning_rate_schedule", "exploration_schedule"), (CONSTANT, "linear", "cosine")),
    "exploration": ("entropy", "symmetric_kl"),
    "activation": ("tanh", "relu", "elu"),
    "initialization": ("orthogonal", "xavier"),
    "rnn": (None, "gru", "lstm"),
    "inference": ("actor", "server"),
}
# Smallest and largest value. All numbers must also be finite.
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("workers", "learner_threads"), (1, 1024)),
    "splits": (1, 64),
    "num_envs": (1, 1 << 16),
    "rollout": (1, 1 << 20),
    "max_lag": (0, 1 << 20),
    "epochs": (1, 1000),
    "rnn_size": (1, 1 << 12),
    **dict.fromkeys(("batch", "minibatches"), (1, math.inf)),
    **dict.fromkeys(("gamma", "lam", "adam_beta1", "adam_beta2"), (0, 1)),
    **dict.fromkeys(("learning_rate", "clip", "value_clip", "max_grad_norm", "reward_clip"), (0, math.inf)),
    **dict.fromkeys(("target_kl", "adaptive_kl", "initial_std", "adam_eps"), (0, math.inf)),
}
_EXCLUDED = {"adam_beta1": 1, "adam_beta2": 1, "initial_std": 0, "adam_eps": 0}  # ends that the range excludes
_MAX_SLOTS = 1 << 16  # a message between processes has 16 bits for the slot
_MAX_LAYERS, _MAX_WIDTH = 16, 1 << 12


@dataclass(frozen=True)
class Settings:
    """All settings that affect learning, except environment and seed. docs/reference/training.md has a table.

    Attributes:
        workers: processes that collect. splits: vector environments per worker. num_envs: lanes of a split.
        rollout: steps per lane in a rollout.
        batch: steps of an update, a multiple of the steps of a rollout; None: one rollout per split.
        lag: 0: collect with the newest weights, and wait for them; 1: collect during the previous update, so that
            experience is one version old (deterministic, like 0); "any": up to max_lag versions old.
        max_lag: with "any", rollouts of weights more than this many versions old are dropped, and counted.
        stagger: whether the lanes of a split begin their first episodes at different times.
        learning_rate … adam_eps: of Adam. learning_rate_schedule: how the rate falls to 0 over the steps of the run,
            "linear" or "cosine", or "constant". exploration_schedule: the same for exploration_coefficient.
        gamma, lam: discount and trace decay. off_policy: "vtrace" corrects for lag, clipped at rho and c; or "none".
        clip: ratios are clipped to [1 / (1 + clip), 1 + clip]. value_clip: limit on changes of a value, in standard
            deviations of the return; None: no limit.
        exploration: "entropy", or "symmetric_kl" to the uniform distribution (of discrete actions).
        exploration_coefficient, value_coefficient: weights of these losses.
        target_kl: ends the epochs of an update at this divergence; None: never. adaptive_kl: divergence to which the
            learning rate is adapted; None: the rate stays.
        reward_scale, reward_clip: for learning only; the trace has the original rewards.
        reward_shaping: weights by name, passed to each reset as options["reward_shaping"], for environments that weigh
            parts of their reward; a population changes them.
        hidden: sizes of the layers. share: whether actor and critic share them; None: if there are images or rnn.
        rnn: None, "gru" or "lstm", with rnn_size units. model: "module:function" that makes your own network,
            head and loss, see docs/reference/training.md; None: a network that fits the spaces.
        initial_std, adaptive_std: of continuous actions; adaptive: the network computes it from the observation.
        inference: "actor": each worker has the policy; "server": a process acts for all of them (GPU, large networks).
        device: of learner and server. learner_threads: PyTorch threads; the weights depend on their number.

    Examples:
        >>> gym_trace.training.Settings(workers=1, num_envs=4, rollout=32).rollout_steps
        128
    """

    workers: int = 2
    splits: int = 1
    num_envs: int = 8
    rollout: int = 128
    batch: int | None = None
    lag: int | str = 1
    max_lag: int = 8
    stagger: bool = False

    learning_rate: float = 1e-3
    learning_rate_schedule: str = "constant"
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-5
    gamma: float = 0.997
    lam: float = 0.97
    off_policy: str = "vtrace"
    rho: float = 1.0
    c: float = 1.0
    clip: float = 0.2
    value_clip: float | None = None
    value_coefficient: float = 0.5
    exploration: str = "entropy"
    exploration_coefficient: float = 0.003
    exploration_schedule: str = "constant"
    epochs: int = 4
    minibatches: int = 8
    max_grad_norm: float = 0.5
    target_kl: float | None = None
    adaptive_kl: float | None = None
    reward_scale: float = 1.0
    reward_clip: float | None = None
    reward_shaping: dict[str, float] | None = None
    normalize_advantages: bool = True
    normalize_returns: bool = True
    normalize_observations: bool = True

    hidden: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    initialization: str = "orthogonal"
    initial_gain: float = 1.0
    share: bool | None = None
    rnn: str | None = None
    rnn_size: int = 128
    model: str | None = None
    initial_std: float = 1.0
    adaptive_std: bool = False
    inference: str = "actor"
    device: str = "cpu"
    learner_threads: int = 1

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices or isinstance(value, bool):
                raise InvalidOption(f"{name}={value!r}: pass one of {', '.join(map(str, choices))}")
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and (not least <= value <= most or value == _EXCLUDED.get(name)):
                bounds = f"{least:g} to {most:g}" if most < math.inf else f"{least:g} or more"
                exclusion = f", but not {_EXCLUDED[name]}" if name in _EXCLUDED else ""
                raise InvalidOption(f"{name}={value!r}: pass {bounds}{exclusion}")
        if len(self.hidden) > _MAX_LAYERS or not all(0 < width <= _MAX_WIDTH for width in self.hidden):
            raise InvalidOption(f"hidden={self.hidden!r}: pass at most {_MAX_LAYERS} sizes, of 1 to {_MAX_WIDTH}")
        shaping = {f"reward_shaping: {name}": value for name, value in (self.reward_shaping or {}).items()}
        for name, value in {**asdict(self), **shaping}.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise InvalidOption(f"{name}={value!r}: pass a finite number")
        if self.batch is not None and self.batch % self.rollout_steps:
            raise InvalidOption(f"batch={self.batch}: pass a multiple of num_envs x rollout = {self.rollout_steps}")
        steps = self.workers * self.splits * self.rollout_steps
        if self.lag != ANY and self.batch_steps % steps:
            raise InvalidOption(
                f"batch={self.batch}: with lag={self.lag} pass a multiple of the {steps} steps that all splits "
                "collect, or lag='any'"
            )
        if self.adaptive_kl is not None and self.learning_rate_schedule != CONSTANT:
            falls = self.learning_rate_schedule
            raise InvalidOption(
                f"learning_rate_schedule={falls!r}: adaptive_kl sets the learning rate; omit one of them"
            )
        parts = self.batch_steps // self.rollout if self.rnn else self.batch_steps
        if self.minibatches > parts:
            raise InvalidOption(f"minibatches={self.minibatches}: an update has only {parts} parts to distribute")
        if self.workers * self.splits * self.slots_per_split > _MAX_SLOTS:
            raise InvalidOption(f"batch={self.batch_steps}: takes more than {_MAX_SLOTS} rollouts in memory")

    @property
    def rollout_steps(self) -> int:
        """Steps of a rollout, all lanes together."""
        return self.num_envs * self.rollout

    @property
    def batch_steps(self) -> int:
        """Steps of an update."""
        return self.workers * self.splits * self.rollout_steps if self.batch is None else self.batch

    def updates_of(self, steps: int | None) -> int | None:
        """Return the number of updates for these steps; None: no limit."""
        return None if steps is None else -(-steps // self.batch_steps)

    @property
    def rollouts_per_batch(self) -> int:
        return self.batch_steps // self.rollout_steps

    @property
    def slots_per_split(self) -> int:
        """Rollouts of a split in memory: being collected, or waiting for the learner."""
        if self.lag == ANY:
            return 2 + 2 * self.rollouts_per_batch // (self.workers * self.splits)
        return self.rollouts_per_batch // (self.workers * self.splits) * (int(self.lag) + 1)

    def plain(self) -> dict[str, Any]:
        """Return the settings as JSON restores them."""
        return {**asdict(self), "hidden": list(self.hidden)}


_TYPE_TEXTS = {
    **{"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a name", "None": "None"},
    "tuple[int, ...]": "numbers such as 64,64",
    "dict[str, float]": "numbers such as goal=1,step=-0.01",
}


_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def settings_from(given: Mapping[str, Any]) -> Settings:
    """Return settings from names and values, which may be text from a command line or a file. Raises InvalidOption.

    Examples:
        >>> settings = gym_trace.training.settings_from({"learning_rate": 3e-4, "workers": 1})
        >>> settings.learning_rate, settings.gamma
        (0.0003, 0.997)
    """
    types = {field.name: str(field.type) for field in fields(Settings)}
    for name in given:
        if name not in types:
            near = difflib.get_close_matches(name, types, n=1)
            raise InvalidOption(f"{name}: no setting" + (f"; did you mean {near[0]}?" if near else ""))
    return Settings(**{name: _value(name, types[name], value) for name, value in given.items()})


def _value(name: str, type_: str, value: Any) -> Any:
    kind, *others = (part.strip() for part in type_.split("|"))
    is_text = isinstance(value, str)
    try:
        if "None" in others and (value is None or (is_text and value.lower() == "none")):
            return None
        if "str" in others and value == ANY:
            return ANY
        if kind.startswith("tuple"):
            parts = value.split(",") if is_text else [value] if isinstance(value, int) else value
            return tuple(int(part) for part in parts)
        if kind.startswith("dict"):
            pairs = [part.split("=") for part in value.split(",")] if is_text else value.items()
            return {str(key): float(number) for key, number in pairs}
        if kind == "bool":
            return value if isinstance(value, bool) else _BOOLEANS[value.lower()]
        if kind == "int" and not isinstance(value, bool) and float(value) == int(float(value)):
            return int(float(value))
        if kind == "float" and not isinstance(value, bool):
            return float(value)
        if kind == "str" and is_text:
            return value
    except (KeyError, ValueError, TypeError, OverflowError, AttributeError):
        pass
    raise InvalidOption(f"{name}={value!r}: pass {' or '.join(_TYPE_TEXTS[one] for one in (kind, *others))}")
