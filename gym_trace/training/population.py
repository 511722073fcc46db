"""Population-based training (Jaderberg et al., 2017): the worst of several policies take over from the best."""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from gym_trace.errors import InvalidOption
from gym_trace.training.driver import Driver
from gym_trace.training.run import Run
from gym_trace.training.settings import Settings, settings_from

_BOUNDS = {"learning_rate": (1e-7, 1e-1), "clip": (0.01, 1.0), "max_grad_norm": (0.01, 100.0)}
_MUTATED = ("learning_rate", "exploration_coefficient", "value_coefficient", "clip", "max_grad_norm")
_MUTATED_TO_ONE = ("gamma", "adam_beta1")  # mutation scales their distance to 1
_SHARED_SETTINGS = (
    *("hidden", "activation", "share", "rnn", "rnn_size", "model", "adaptive_std"),
    *("normalize_returns", "normalize_observations", "num_envs", "rollout", "device", "inference"),
)


@dataclass(frozen=True)
class Exchange:
    """Rules of population-based training: which policy takes over from which, and how settings change.

    Attributes:
        period: steps that each policy learns from between two comparisons. start: steps before the first.
        replaced: fraction of policies, at least one, that counts as worst and can be replaced by one of as many best.
        gap: minimum lead of the better policy, in standard deviations of the population's objectives, so that
            negative returns compare like positive ones.
        mutated: probability that a setting changes, by a factor of factor_least to factor_most, or its inverse.
            Policy 0 keeps its settings, unless it is replaced by another policy.
        objective: value to compare, over the last 100 episodes: "return", "length", or a key of their last infos with
            a number.

    Examples:
        >>> exchange = gym_trace.training.Exchange(period=50_000)
        >>> gym_trace.train(make_env, "runs/many", policies=4, exchange=exchange, steps=10**6)  # doctest: +SKIP
    """

    period: int = 100_000
    start: int = 0
    replaced: float = 0.3
    gap: float = 0.25
    mutated: float = 0.15
    factor_least: float = 1.1
    factor_most: float = 1.5
    objective: str = "return"

    def __post_init__(self) -> None:
        for name, least, most in (("replaced", 0.0, 0.5), ("mutated", 0.0, 1.0), ("gap", 0.0, math.inf)):
            if not least <= getattr(self, name) <= most:
                raise InvalidOption(f"{name}={getattr(self, name)!r}: pass {least:g} to {most:g}")
        if self.period < 1 or self.start < 0:
            raise InvalidOption(f"period={self.period!r}, start={self.start!r}: pass numbers of steps")
        if not 1 < self.factor_least <= self.factor_most:
            raise InvalidOption(f"factor_least={self.factor_least!r}: pass more than 1, and at most factor_most")
        if not self.objective:
            raise InvalidOption("objective='': pass return, length, or a key of infos")

    def plain(self) -> dict[str, Any]:
        """Return the fields as JSON restores them."""
        return asdict(self)

    @property
    def info_key(self) -> str | None:
        """Key of the last infos of episodes that is the objective; None for return and length."""
        return None if self.objective in ("return", "length") else self.objective

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Exchange:
        """Return an exchange from names and values. Raises InvalidOption."""
        names = {field.name: type(field.default) for field in fields(cls)}
        for name, value in given.items():
            fits = isinstance(value, str if names.get(name) is str else (int, float))
            if name not in names or not fits:
                raise InvalidOption(f"{name}={value!r}: pass {', '.join(names)}, as numbers, and objective as a name")
        return cls(**given)


def mutated(settings: Settings, exchange: Exchange, generator: np.random.Generator) -> Settings:
    """Return settings with some random changes."""
    changes: dict[str, Any] = {}

    def factor() -> float:
        """Return the factor of a change; 1 for none."""
        changes_now = generator.random() < exchange.mutated
        by = float(generator.uniform(exchange.factor_least, exchange.factor_most))
        by = 1 / by if generator.random() < 0.5 else by
        return by if changes_now else 1.0

    for name in (*_MUTATED, *_MUTATED_TO_ONE):
        if (change := factor()) != 1.0:
            value = getattr(settings, name)
            least, most = _BOUNDS.get(name, (0.0, math.inf))
            distance = 1 - value if name in _MUTATED_TO_ONE else value
            distance = min(max(distance * change, least), most)
            changes[name] = max(0.0, 1 - distance) if name in _MUTATED_TO_ONE else distance
    if settings.reward_shaping is not None:
        changes["reward_shaping"] = {name: value * factor() for name, value in settings.reward_shaping.items()}
    return replace(settings, **changes)


class Population:
    """Compares policies after each period of steps, and lets the worst take over from the best.

    Args:
        members: drivers of the policies. runs: their runs. settings: their settings at the start.
        event: called with kind and facts of each exchange.
    """

    def __init__(
        self,
        members: Sequence[Driver],
        runs: Sequence[Run],
        settings: Sequence[Settings],
        exchange: Exchange,
        seed: int,
        event: Callable[..., None],
    ):
        self._members, self._runs, self._settings = members, runs, list(settings)
        self._exchange, self._event = exchange, event
        self._generator = np.random.default_rng(seed)
        self._due = [max(exchange.period, exchange.start)] * len(members)
        self._wanted: dict[int, tuple[int, Settings]] = {}  # by taker: giver, and settings to take over

    def turn(self) -> None:
        """Compare policies that are due, and finish pending exchanges. Call it repeatedly during training."""
        for number, wanted in list(self._wanted.items()):
            self._hand_over(number, *wanted)
        for number, member in enumerate(self._members):
            steps = member.progress.steps
            if steps >= self._due[number] and number not in self._wanted and not member.processes.stopping:
                self._due[number] = steps - steps % self._exchange.period + self._exchange.period
                self._compare(number)

    def _compare(self, number: int) -> None:
        """Let a policy continue from a better one, with other settings, or unchanged."""
        exchange = self._exchange
        objectives = [member.objective(exchange.objective) for member in self._members]
        objective_of = {other: value for other, value in enumerate(objectives) if value is not None}
        count = max(1, math.ceil(exchange.replaced * len(self._members)))
        order = sorted(objective_of, key=lambda other: objective_of[other], reverse=True)
        best = order[: min(count, len(order) - 1)]
        if number not in objective_of or len(objective_of) < 2 or number in best:
            return
        giver = int(self._generator.choice(best))
        spread = statistics.pstdev(objective_of.values())
        is_behind = objective_of[giver] - objective_of[number] > exchange.gap * spread
        if number in order[-count:] and is_behind and not self._members[giver].processes.stopping:
            settings = self._changed(number, self._settings[giver])
            self._wanted[number] = giver, settings
            self._members[giver].saved = None
            self._members[giver].processes.tell(("save", None))
        elif (settings := self._changed(number, self._settings[number])) != self._settings[number]:
            self._take_over(number, settings)

    def _changed(self, number: int, settings: Settings) -> Settings:
        return settings if number == 0 else mutated(settings, self._exchange, self._generator)

    def _hand_over(self, number: int, of: int, settings: Settings) -> None:
        """Give policy `number` its own copy of the checkpoint of policy `of`, once it is written."""
        giver, taker = self._members[of], self._members[number]
        if taker.processes.stopping or (giver.saved is None and giver.processes.stopping):
            del self._wanted[number]
        elif giver.saved is not None:
            del self._wanted[number]
            name = f"of-policy-{of}-{giver.saved:09d}.safetensors"
            target = self._runs[number].checkpoints / name
            target.unlink(missing_ok=True)  # never write through a link
            shutil.copyfile(self._runs[of].checkpoint(giver.saved), target)
            self._take_over(number, settings, checkpoint=name, giver=of)

    def _take_over(self, number: int, settings: Settings, **more: Any) -> None:
        member = self._members[number]
        before = self._settings[number].plain()
        changed = {name: value for name, value in settings.plain().items() if value != before[name]}
        self._settings[number] = settings
        member.processes.tell(("adopt", {"settings": settings.plain(), **more}))
        member.processes.shape_rewards(settings.reward_shaping)
        if more:
            member.clear_returns()
        self._event("exchange", policy=number, steps=member.progress.steps, changed=changed, **more)


def policy_seed(seed: int, number: int) -> int:
    return int(np.random.SeedSequence(seed, spawn_key=(number,)).generate_state(1)[0] >> 1) if number else seed


def first_settings(
    settings: Settings, policies: int | Sequence[Mapping[str, Any]], exchange: Exchange, seed: int
) -> list[Settings]:
    """Return the first settings of the policies: mutated for all but the first, or as `policies` has them."""
    if isinstance(policies, int) and policies < 1:
        raise InvalidOption(f"policies={policies!r}: pass 1 or more")
    if not isinstance(policies, int):
        found = [settings_from({**settings.plain(), **changes}) for changes in policies]
        for name in _SHARED_SETTINGS:
            if len({getattr(own, name) for own in found}) > 1:
                raise InvalidOption(f"{name}: differs; policies that exchange weights need the same network")
        if len({frozenset(own.reward_shaping or ()) for own in found}) > 1:
            raise InvalidOption("reward_shaping: names differ; policies that exchange weights need the same names")
        return found
    generator = np.random.default_rng([seed, policies])
    always = replace(exchange, mutated=1.0)
    return [settings, *(mutated(settings, always, generator) for _ in range(policies - 1))]
