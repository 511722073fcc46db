"""Policies by name: functions, objects, trained agents."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from copy import deepcopy
from typing import Any, Protocol

import numpy as np
from gymnasium.spaces import Discrete, Tuple
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from gym_trace.errors import InvalidOption, MissingExtra
from gym_trace.plugins import entry_points
from gym_trace.recording.provenance import policy_name


class Policy(Protocol):
    """Chooses actions."""

    def reset(self, seed: int) -> None:
        """Prepare for an episode; called before each one."""

    def act(self, observation: Any) -> tuple[Any, dict[str, Any]]:
        """Return an action, and annotations to record with it."""


MakePolicy = Callable[[Any, Any], Policy]  # called with observation and action space


class PolicyMaker(Protocol):
    """A MakePolicy with a name. Picklable if its source is.

    Attributes:
        name: name of the policy.
    """

    name: str

    def __call__(self, observation_space: Any, action_space: Any) -> Policy:
        """Make a policy. Raises InvalidOption if it does not fit the spaces."""


_ENTRY_POINTS = "gym_trace.policies"  # group; the name of each is the word before the colon


class RandomPolicy:
    """Sample actions from the action space."""

    def __init__(self, observation_space: Any, action_space: Any):
        self.reset = action_space.seed
        self._sample = action_space.sample

    def act(self, observation: Any) -> tuple[Any, dict[str, Any]]:
        return self._sample(), {}

    def __call__(self, observation: Any) -> Any:
        return self._sample()


class CalledPolicy:
    """User function, or object with a method act; either may return (action, {name: value}) to annotate."""

    def __init__(self, called: Any, action_space: Any):
        self._act = getattr(called, "act", called)
        self._reset = getattr(called, "reset", None)
        self._may_annotate = not isinstance(action_space, Tuple)  # actions of a Tuple space may be pairs themselves

    def reset(self, seed: int) -> None:
        if self._reset is not None:
            self._reset(seed)

    def act(self, observation: Any) -> tuple[Any, dict[str, Any]]:
        result = self._act(observation)
        if type(result) is tuple and len(result) == 2 and isinstance(result[1], dict) and self._may_annotate:
            return result
        return result, {}


class SB3Policy:
    """Checkpoint of Stable-Baselines3, acting as in evaluation.

    Stable-Baselines3 unpickles the file, which can run any code: load only files that you trust.
    """

    def __init__(self, path: str):
        try:
            from stable_baselines3.common.save_util import load_from_zip_file
        except ImportError as error:
            raise MissingExtra(f"sb3:{path} needs Stable-Baselines3: pip install 'gym-trace[sb3]'") from error
        import stable_baselines3

        _check_file(path, "sb3")
        data, _, _ = load_from_zip_file(path, device="cpu")
        kinds = [getattr(stable_baselines3, name) for name in ("PPO", "A2C", "DQN", "SAC", "TD3", "DDPG")]
        problems = []
        for kind in kinds:
            policies = set(kind.policy_aliases.values())
            if data is not None and data.get("policy_class") in policies:
                try:
                    self._model = kind.load(path, device="cpu")
                    return
                except Exception as error:  # the next kind may fit
                    problems.append(f"{kind.__name__}: {error}")
        raise InvalidOption(f"sb3:{path}: not a checkpoint of PPO, A2C, DQN, SAC, TD3 or DDPG {'; '.join(problems)}")

    def reset(self, seed: int) -> None:
        self._model.set_random_seed(seed)

    def act(self, observation: Any) -> tuple[Any, dict[str, Any]]:
        action, _ = self._model.predict(observation, deterministic=True)
        return (action.item() if action.ndim == 0 else action), {}


class OnnxPolicy:
    """Exported network: the input is a batch of observations; the first output is actions, or one value per action."""

    def __init__(self, path: str, action_space: Any):
        try:
            import onnxruntime
        except ImportError as error:
            raise MissingExtra(f"onnx:{path} needs onnxruntime: pip install 'gym-trace[onnx]'") from error
        _check_file(path, "onnx")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0].name
        self._first = int(action_space.start) if isinstance(action_space, Discrete) else None

    def reset(self, seed: int) -> None:
        pass

    def act(self, observation: Any) -> tuple[Any, dict[str, Any]]:
        (first, *_) = self._session.run(None, {self._input: np.asarray(observation)[None]})
        action = np.asarray(first)[0]
        if self._first is None:
            return action, {}
        return (self._first + int(action.argmax()) if action.size > 1 else int(action.reshape(()))), {}


def policy_maker(policy: str | Callable[..., Any] | None) -> PolicyMaker:
    """Return the maker of a policy.

    Args:
        policy: None or "random", "sb3:PATH", "onnx:PATH", or "run:DIR" for the policy of a training run (also
            run:DIR@VERSION and run:DIR@best; a suffix ?sample samples actions instead of taking the likeliest), or
            a kind that another package adds (an entry point of the group gym_trace.policies: a PolicyMaker); or a
            callable: a function of the observation, or a class, which is called with observation and action space if
            it takes them.

    Raises:
        InvalidOption, MissingExtra; for a run also TraceNotFound, CorruptTrace
    """
    if policy is not None and not isinstance(policy, str) and not callable(policy):
        raise InvalidOption(f"policy={policy!r}: pass a name, a function or a class")
    if isinstance(policy, str) and policy != "random" and not policy.startswith(("sb3:", "onnx:")):
        kind, colon, name = policy.partition(":")
        named = [entry for entry in entry_points(_ENTRY_POINTS) if entry.name == kind] if colon else []
        if named:
            maker: PolicyMaker = named[0].load()(name)
            return maker
        raise InvalidOption(f"policy={policy!r}: pass random, sb3:PATH, onnx:PATH, run:DIR, or the function or class "
                            "itself")  # fmt: skip
    return _Maker(policy)


class _Maker:
    def __init__(self, policy: Any):
        self._policy, self.name = policy, policy_name(policy)

    def __call__(self, observation_space: Any, action_space: Any) -> Policy:
        policy = self._policy
        if policy is None or policy == "random":
            return RandomPolicy(observation_space, action_space)
        if isinstance(policy, str):
            kind, _, path = policy.partition(":")
            return SB3Policy(path) if kind == "sb3" else OnnxPolicy(path, action_space)
        if inspect.isclass(policy):
            policy = _instance(policy, (observation_space, action_space))
        return CalledPolicy(policy, action_space)


def _instance(policy_class: Any, spaces: tuple[Any, ...]) -> Any:
    try:
        inspect.signature(policy_class).bind(*spaces)
    except (TypeError, ValueError):
        return policy_class()
    return policy_class(*spaces)


def _check_file(path: str, kind: str) -> None:
    if not os.path.exists(path):
        hint = f"; did you mean {kind}:{path}.zip?" if os.path.exists(f"{path}.zip") else ""
        raise InvalidOption(f"{kind}:{path}: file not found{hint}")


class Annotating:
    """Policy as a function of the observation; its annotations go to the recorder."""

    def __init__(self, policy: Policy | LanePolicies, recorder: Any):
        self.reset: Any = policy.reset
        self._act, self._recorder = policy.act, recorder

    def __call__(self, observation: Any) -> Any:
        action, annotations = self._act(observation)
        if annotations:
            self._recorder.annotate(**annotations)
        return action


class LanePolicies:
    """One policy per lane of a vector environment: its actions depend on its own episode alone."""

    def __init__(self, make_policy: MakePolicy, envs: Any):
        self._envs = envs
        space = envs.single_action_space
        self._lanes = [make_policy(envs.single_observation_space, deepcopy(space)) for _ in range(envs.num_envs)]
        self._actions_out: Any = create_empty_array(space, envs.num_envs)

    def reset(self, lane: int, seed: int) -> None:
        self._lanes[lane].reset(seed)

    def act(self, observations: Any) -> tuple[Any, dict[str, list[Any]]]:
        """Return a batch of actions, and annotations with one value per lane. Raises InvalidOption."""
        each = iterate(self._envs.observation_space, observations)
        results = [policy.act(observation) for policy, observation in zip(self._lanes, each)]
        names = {name: None for _, annotations in results for name in annotations}
        if any(len(annotations) != len(names) for _, annotations in results):
            raise InvalidOption(f"policy: annotates only some lanes with {', '.join(names)}; annotate all or none")
        actions = concatenate(self._envs.single_action_space, [action for action, _ in results], self._actions_out)
        return actions, {name: [annotations[name] for _, annotations in results] for name in names}
