"""Results of a run: restore any version, act as a policy. Needs PyTorch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gymnasium.vector.utils import batch_space, iterate

from gym_trace.envs.clipping import clipped
from gym_trace.errors import CorruptRun, CorruptTrace, InvalidOption
from gym_trace.playback.trace import open_trace
from gym_trace.training.network.forms import ActionForm, SpaceLeaf, leaves_of, picked
from gym_trace.training.network.learning import REMOVE, Learner, read_checkpoint
from gym_trace.training.network.model import ActorCritic, set_weights, tensors
from gym_trace.training.rollouts import RecordedRollouts
from gym_trace.training.run import Run, Update

BEST = "best.safetensors"
_VERSION = re.compile(r"(?P<directory>.+?)(@(?P<version>\d{1,9}|best))?", re.DOTALL)
_POLICY = re.compile(r"(?P<version>.+?)(?P<options>\?(sample|trust)(&(sample|trust))*)?", re.DOTALL)


# -- any version ------------------------------------------------------------------------------------------------------


class Version(NamedTuple):
    """Version of a run. directory: as the user wrote it. learner: in the state of the version, on the CPU."""

    directory: str
    learner: Learner

    @property
    def name(self) -> str:
        return f"{self.directory}@{self.learner.version}"


def version_of(name: str, trust: bool = False) -> Version:
    """Return a version of a run: DIR for the newest checkpoint, DIR@NUMBER, or DIR@best for the largest mean return.

    trust: allow the import of the module that the run names as its model.

    Raises InvalidOption, TraceNotFound, CorruptTrace.
    """
    match = _VERSION.fullmatch(name)
    if match is None:
        raise InvalidOption(f"{name!r}: pass DIR, DIR@VERSION or DIR@best")
    directory, wanted = match["directory"], match["version"]
    run = Run(directory)
    learner = initial_learner(run, trust)
    if wanted == "best":
        if not (path := run.checkpoints / BEST).exists():
            raise InvalidOption(f"{directory}: no best version yet: needs 100 episodes")
        learner.load(path)
        return Version(directory, learner)
    files = {version: path for path, version in checkpoint_files(run).items()}
    number = int(wanted) if wanted is not None else max(files, default=None)
    load_newest(learner, {version: path for version, path in files.items() if number is None or version <= number})
    if learner.version != number:
        updates = [update for update in run.updates() if number is None or update.version <= number]
        if not updates or (number is not None and updates[-1].version < number):
            available = f"versions 0 to {updates[-1].version}" if updates else "no versions"
            raise InvalidOption(f"{run.path}: no version {number}; the run has {available}")
        for _ in relearn(run, learner, updates[learner.version :]):
            pass
    return Version(directory, learner)


def initial_learner(run: Run, trust: bool, device: str | None = "cpu") -> Learner:
    """Return the learner of a run at version 0. device: None for the device in its settings.

    Raises InvalidOption, TraceNotFound, CorruptTrace.
    """
    about, settings = run.about, run.trusted_settings(trust)
    trace = open_trace(run.trace)
    total = settings.updates_of(about.get("steps"))
    settings = settings if device is None else replace(settings, device=device)
    try:
        return Learner(trace.observation_space, trace.action_space, settings, about["seed"], total)
    except (RuntimeError, MemoryError) as error:
        raise CorruptTrace(f"{run.path}: invalid settings: {error}") from error


def load_newest(learner: Learner, files: Mapping[int, Path]) -> None:
    """Load the newest of these checkpoints, if any. Raises CorruptTrace."""
    if files:
        learner.load(files[max(files)], max(files))


def relearn(run: Run, learner: Learner, updates: Sequence[Update]) -> Iterator[tuple[Update, dict[str, float] | None]]:
    """Reproduce updates of the log from the trace; yield each with its losses. They begin at the learner's version.

    Raises CorruptTrace if the weights differ, or a rollout is missing.
    """
    recorded: RecordedRollouts | None = None
    for update in updates:
        losses: dict[str, float] | None = None
        if update.version > learner.version:
            if recorded is None:
                recorded = RecordedRollouts(open_trace(run.trace), learner.shape)
            if update.changed:
                learner.adopt(update.changed, run.checkpoints)
            elif len(update.rollouts) != learner.settings.rollouts_per_batch:
                raise CorruptTrace(f"{run.path}: version {update.version} has {len(update.rollouts)} rollouts", None)
            else:
                try:
                    rollouts = [recorded.read(origin) for origin in update.rollouts]
                except CorruptTrace as error:
                    raise CorruptTrace(f"version {update.version} cannot be relearned: {error}") from error
                losses = learner.learn(rollouts)
        if learner.digest() != update.digest:
            raise CorruptTrace(f"{run.path}: version {update.version} differs when relearned", None)
        yield update, losses


def checkpoint_files(run: Run) -> dict[Path, int]:
    """Return all checkpoints with their versions, including milestones and the best. Raises CorruptTrace."""
    found = {run.checkpoint(version): version for version in run.saved()}
    for path in sorted(run.checkpoints.glob("milestone-*.safetensors")):
        if match := re.fullmatch(r"milestone-(\d{9})\.safetensors", path.name):
            found[path] = int(match[1])
    best = run.checkpoints / BEST
    if best.exists():
        version = read_checkpoint(best)[0].get("version")
        if type(version) is not int:
            raise CorruptRun("invalid checkpoint: it has no version", best, REMOVE)
        found[best] = version
    return found


# -- versions as policies ---------------------------------------------------------------------------------------------


class RunPolicies:
    """PolicyMaker for a version: DIR, DIR@VERSION or DIR@best, with suffix ?sample, ?trust or ?sample&trust.

    sample: sample actions by the seed of the episode, not the most likely one. trust: allow the import of the module
    that the run names as its model. The weights are loaded, or relearned, once, and sent to workers.

    Attributes:
        name: name of the policy, with the version.

    Examples:
        >>> policies = gym_trace.training.RunPolicies("runs/cartpole@8")  # doctest: +SKIP
        >>> policy = policies(env.observation_space, env.action_space)  # doctest: +SKIP
    """

    def __init__(self, name: str):
        match = _POLICY.fullmatch(name)
        assert match is not None
        options = (match["options"] or "").lstrip("?").split("&")
        self._sample = "sample" in options
        version = version_of(match["version"], "trust" in options)
        learner = version.learner
        self.name = f"run:{version.name}{'?sample' * self._sample}"
        self._settings, self._weights = learner.settings, learner.weights()
        self._leaves, self._form = learner.shape.leaves, learner.shape.actions
        self._model: ActorCritic | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None}

    def __call__(self, observation_space: Any, action_space: Any) -> RunPolicy:
        """Raises InvalidOption if it was trained with other spaces."""
        leaves, form = leaves_of(observation_space), ActionForm(action_space)
        for what, trained, given in (
            ("observations", _shapes(self._leaves), _shapes(leaves)),
            ("actions", (self._form.choices, self._form.normals), (form.choices, form.normals)),
        ):
            if trained != given:
                raise InvalidOption(f"{self.name}: {what} of this environment differ from those in training")
        if self._model is None:
            torch.set_num_threads(1)
            self._model = ActorCritic(self._leaves, self._form, self._settings)
            with torch.no_grad():
                set_weights(self._model, self._weights)
        return RunPolicy(self._model, leaves, form, action_space, self._sample)


def _shapes(leaves: list[SpaceLeaf]) -> list[Any]:
    return [(leaf.path, leaf.dtype, leaf.shape, getattr(leaf.space, "n", None)) for leaf in leaves]


class RunPolicy:
    """Policy of a version. The state of a recurrent network is zero at the start of each episode.

    Its annotations are value, entropy and logprob; and probabilities, if there is one discrete action.
    """

    def __init__(self, model: ActorCritic, leaves: list[SpaceLeaf], form: ActionForm, action_space: Any, sample: bool):
        self._model, self._leaves, self._form, self._space = model, leaves, form, action_space
        self._batched = batch_space(action_space)
        self._generator = torch.Generator() if sample else None
        self._state = torch.zeros(1, model.state_size)

    def reset(self, seed: int) -> None:
        self._state = torch.zeros_like(self._state)
        if self._generator is not None:
            self._generator.manual_seed(seed)

    @torch.inference_mode()
    def act(self, observation: Any) -> tuple[Any, dict[str, Any]]:
        observed = [picked(observation, leaf.path)[None] for leaf in self._leaves]
        distribution, value, self._state = self._model(tensors(observed), self._state)
        drawn = distribution.mode() if self._generator is None else distribution.sample(self._generator)
        action = next(iterate(self._batched, self._form.to_batch(drawn.numpy())))
        numbers = {"value": self._model.value(value), "entropy": distribution.entropy()}
        numbers["logprob"] = distribution.log_prob(drawn)
        if len(distribution.logs) == 1 and not self._form.normals:
            numbers["probabilities"] = distribution.logs[0].exp()
        # training clips actions, too
        return clipped(self._space, action), {name: rows[0].numpy() for name, rows in numbers.items()}
