"""Updates follow the formulas, and rollouts are the same in memory, in the trace, and for the actor."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from second_device import NAME, SecondDevice  # noqa: E402

from gym_trace import open_trace  # noqa: E402
from gym_trace.envs.clipping import clipping  # noqa: E402
from gym_trace.errors import CorruptTrace, InvalidOption, TrainingFailed  # noqa: E402
from gym_trace.training.network import learning  # noqa: E402
from gym_trace.training.network.forms import ActionForm, leaves_of  # noqa: E402
from gym_trace.training.network.learning import Learner  # noqa: E402
from gym_trace.training.network.model import ActorCritic, Distribution, tensors  # noqa: E402
from gym_trace.training.processes import actor as worker  # noqa: E402
from gym_trace.training.processes.actor import Actor, EnvGroup  # noqa: E402
from gym_trace.training.processes.inference import OwnModel  # noqa: E402
from gym_trace.training.processes.shared import PolicyTask, RolloutBuffer, Weights  # noqa: E402
from gym_trace.training.rollouts import Origin, RecordedRollouts, Rollout  # noqa: E402
from gym_trace.training.settings import Settings  # noqa: E402

PICTURE, VECTOR = spaces.Box(0, 255, (6, 6, 3), np.uint8), spaces.Box(-9, 9, (3,), np.float64)
MASKED = spaces.Dict({"seen": VECTOR, "action_mask": spaces.MultiBinary(3)})
SPACES: dict[str, tuple[Any, Any]] = {
    "discrete": (VECTOR, spaces.Discrete(3, start=-1)),
    "multi-discrete": (spaces.Discrete(4, start=2), spaces.MultiDiscrete([2, 3], start=[1, -1])),
    "multi-binary": (PICTURE, spaces.MultiBinary(3)),
    "box": (spaces.Dict({"p": PICTURE, "v": VECTOR}), spaces.Box(-0.5, 0.5, (2,), np.float32)),
    "tuple": (spaces.Tuple([VECTOR, spaces.MultiDiscrete([3, 2])]), spaces.Tuple([spaces.Discrete(2), VECTOR])),
    "dict": (spaces.MultiBinary(4), spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(-1, 1, (2,))})),
    "masked": (MASKED, spaces.Discrete(3)),
}


class Sampled(gymnasium.Env[Any, Any]):
    """Observations at random; short episodes, of which some are truncated."""

    mask: ClassVar = [0, 1, 0]  # in any order

    def __init__(self, observation_space: Any, action_space: Any):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self._seen(), {}

    def _seen(self) -> Any:
        seen = self.observation_space.sample()
        if isinstance(seen, dict) and "action_mask" in seen:
            seen["action_mask"][:] = self.np_random.permutation(self.mask)
            self._mask = seen["action_mask"]
        return seen

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action in self.action_space
        if hasattr(self, "_mask"):
            assert self._mask[action]
        ends, cut = self.np_random.random(2) < 0.15
        return self._seen(), float(self.np_random.normal()), bool(ends), bool(cut), {}


@dataclass
class Collected:
    learner: Learner
    rollouts: list[Rollout]
    origins: list[Origin]
    directory: Path


def collected(
    directory: Path, observation_space: Any, action_space: Any, count: int = 3, alive: Any = lambda: None, **given: Any
) -> Collected:
    """Rollouts of a worker, in this process, of the weights of version 0."""
    settings = Settings(num_envs=3, rollout=11, workers=1, minibatches=1, hidden=(8,), rnn_size=5, **given)
    env = clipping(Sampled(observation_space, action_space))
    learner = Learner(env.observation_space, env.action_space, settings, 5, None)
    weights, buffer = Weights(len(learner.weights())), RolloutBuffer(learner.shape, count)
    weights.publish(0, learner.weights())
    ours, theirs = multiprocessing.Pipe()

    def make_env() -> Any:
        return Sampled(observation_space, action_space)

    pipes: Any = dict.fromkeys(("free", "full"), theirs)
    task = PolicyTask(str(directory), learner.spaces, settings, learner.shape, weights.size, seed=9)
    actor = Actor(task, make_env, number=0, life=0, buffer=buffer, weights=weights, **pipes)
    group = EnvGroup(actor, 0, alive)
    group.begin()
    acting, origins = OwnModel(learner.shape, settings, weights, [group.seed]), []
    for slot in range(count):
        for _ in group.collect(buffer.rollout(slot), acting, acting.begin(0, 0)):
            pass
        origins.append(group.origin)
    group.envs.close()
    for pipe in (ours, theirs):
        pipe.close()
    return Collected(learner, [buffer.rollout(slot) for slot in range(count)], origins, directory / "trace")


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("rnn", [None, "lstm"])
def test_the_trace_has_what_the_learner_was_given(tmp_path: Path, name: str, rnn: str | None) -> None:
    found = collected(tmp_path / "t", *SPACES[name], rnn=rnn, stagger=rnn is None)
    recorded = RecordedRollouts(open_trace(found.directory), found.learner.shape)
    for rollout, origin in zip(found.rollouts, found.origins):
        again = recorded.read(origin)
        for column in ("actions", "rewards", "terminations", "truncations", "logprob", "state"):
            np.testing.assert_array_equal(getattr(again, column), getattr(rollout, column), column)
        ended = rollout.terminations[-1] | rollout.truncations[-1]  # behind the last step is the next episode
        where, finals = rollout.bootstrapped()
        for leaf, seen in enumerate(rollout.observations):
            np.testing.assert_array_equal(again.observations[leaf][:-1], seen[:-1])
            np.testing.assert_array_equal(again.observations[leaf][-1, ~ended], seen[-1, ~ended])
            np.testing.assert_array_equal(again.finals[leaf][where], finals[leaf])
        assert where.any()
    assert [found.learner.learn(found.rollouts[:1])] == [
        collected(tmp_path / "u", *SPACES[name], rnn=rnn, stagger=rnn is None).learner.learn(
            [recorded.read(found.origins[0])]
        )
    ]
    with pytest.raises(CorruptTrace, match="of steps 10000 to 10011"):
        recorded.read(found.origins[0]._replace(first_step=10_000))
    with pytest.raises(CorruptTrace):
        recorded.read(found.origins[0]._replace(first_step=-5))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of vtrace() and their results."""
    calls: list[Any] = []
    actual = learning.vtrace

    def vtrace(*args: Any, **named: Any) -> Any:
        calls.append((args, named, actual(*args, **named)))
        return calls[-1][2]

    monkeypatch.setattr(learning, "vtrace", vtrace)
    return calls


def test_a_worker_gives_signs_of_life_while_a_rollout_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_HEARTBEAT_SECONDS", 0.0)
    signs: list[None] = []
    collected(tmp_path / "t", *SPACES["discrete"], count=1, alive=lambda: signs.append(None))
    assert len(signs) >= 11


@pytest.mark.parametrize("rnn", [None, "gru", "lstm"])
def test_the_learner_evaluates_what_the_actor_did_step_by_step(
    tmp_path: Path, rnn: str | None, asked: list[Any]
) -> None:
    found = collected(tmp_path / "t", *SPACES["discrete"], rnn=rnn, epochs=1)
    for index, rollout in enumerate(found.rollouts):  # also from the middle of episodes on
        fresh = Learner(*found.learner.spaces, found.learner.settings, 5, None)
        fresh.learn([rollout])
        (_, values, log_ratios, *_), named, _ = asked[-1]
        np.testing.assert_allclose(log_ratios, 0, atol=1e-5)
        trace = open_trace(found.directory)
        recorded = RecordedRollouts(trace, found.learner.shape)
        for lane in range(3):
            for episode, at, first, count in recorded._runs(found.origins[index], lane):
                notes = trace[episode].annotations["value"][first : first + count]
                np.testing.assert_allclose(values[lane, at : at + count], notes, atol=1e-5)
        where, finals = rollout.bootstrapped()
        if rnn is None:  # the value of the last observation, where an episode was truncated
            model = ActorCritic(leaves_of(VECTOR), ActionForm(SPACES["discrete"][1]), fresh.settings)
            model.load_state_dict(found.learner.model.state_dict())
            with torch.no_grad():
                expected = model.value(model([torch.from_numpy(finals[0])], torch.zeros(len(finals[0]), 0))[1])
            np.testing.assert_allclose(named["next_values"].T[where], expected, atol=1e-5)


def test_termination_ends_what_is_to_come_and_truncation_does_not(tmp_path: Path, asked: list[Any]) -> None:
    found = collected(tmp_path / "t", *SPACES["discrete"], gamma=0.99, lam=0.95)
    rollout = found.rollouts[0]
    found.learner.learn([rollout])
    (rewards, values, log_ratios, *_), named, (targets, _) = asked[0]
    ratios = np.minimum(np.exp(log_ratios), 1.0)
    expected = np.zeros_like(targets)
    for lane in range(3):
        excess = 0.0
        for t in reversed(range(11)):
            ends, cut = rollout.terminations[t, lane], rollout.truncations[t, lane]
            behind = 0.0 if ends else 0.99 * named["next_values"][lane, t]
            goes_on = 0.0 if ends or cut else 0.99 * 0.95
            delta = ratios[lane, t] * (rewards[lane, t] + behind - values[lane, t])
            excess = delta + goes_on * ratios[lane, t] * excess
            expected[lane, t] = values[lane, t] + excess
    np.testing.assert_allclose(targets, expected, atol=1e-9)


# -- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value_clip", [None, 0.01])
@pytest.mark.parametrize("exploration", ["entropy", "symmetric_kl"])
def test_losses_are_those_written_out(
    tmp_path: Path, value_clip: float | None, exploration: str, asked: list[Any]
) -> None:
    given: dict[str, Any] = {"value_clip": value_clip, "exploration": exploration, "normalize_observations": False}
    given |= {"learning_rate": 0.05, "normalize_returns": False, "exploration_coefficient": 0.3}
    one, two = (collected(tmp_path / str(n), *SPACES["discrete"], epochs=n, **given) for n in (1, 2))
    rollout = one.rollouts[0]
    rollout.logprob[...] += np.random.default_rng(0).normal(
        scale=0.4, size=rollout.logprob.shape
    )  # as of other weights
    two.rollouts[0].logprob[...] = rollout.logprob

    first = one.learner.learn([rollout])
    both = two.learner.learn([two.rollouts[0]])
    second = {name: 2 * both[name] - first[name] for name in first}
    (_, old_values, *_), _, (targets, advantages) = asked[0]

    with torch.no_grad():  # change the weights between both steps
        seen = torch.from_numpy(rollout.observations[0][:-1].reshape(33, 3))
        distribution, values, _ = one.learner.model([seen], torch.zeros(33, 0))
    logs, values = distribution.logs[0].double().numpy(), values.double().numpy()
    actions = rollout.actions.reshape(33).astype(int)
    ratio = np.exp(logs[np.arange(33), actions] - rollout.logprob.reshape(33))
    wanted = advantages.T.reshape(33)
    wanted = (wanted - wanted.mean()) / (wanted.std() + 1e-8)
    clipped_ratio = np.clip(ratio, 1 / 1.2, 1.2)
    assert (ratio != clipped_ratio).any()
    target, before = targets.T.reshape(33), old_values[:, :-1].T.reshape(33)
    errors = (values - target) ** 2
    if value_clip is not None:
        errors = np.maximum(errors, (before + np.clip(values - before, -value_clip, value_clip) - target) ** 2)
    assert second["policy_loss"] == pytest.approx(-np.minimum(wanted * ratio, wanted * clipped_ratio).mean(), abs=1e-5)
    assert second["value_loss"] == pytest.approx(0.5 * errors.mean(), abs=1e-4)
    assert second["entropy"] == pytest.approx(-(np.exp(logs) * logs).sum(1).mean(), abs=1e-5)
    assert second["clipped"] == pytest.approx((ratio != clipped_ratio).mean(), abs=1e-5)
    assert second["kl"] == pytest.approx((ratio - 1 - np.log(ratio)).mean(), abs=1e-5)


def test_divergence_from_uniform_is_the_mean_of_both_ways() -> None:
    parameters = torch.from_numpy(np.random.default_rng(1).normal(size=(4, 5)))
    distribution = Distribution(ActionForm(spaces.MultiDiscrete([2, 3])), parameters, None)
    expected = np.zeros(4)
    for part, size in ((parameters[:, :2].numpy(), 2), (parameters[:, 2:].numpy(), 3)):
        p = np.exp(part) / np.exp(part).sum(1, keepdims=True)
        expected -= 0.5 * ((p * np.log(p * size)).sum(1) + (np.log(1 / size / p) / size).sum(1))
    np.testing.assert_allclose(distribution.symmetric_kl(), expected, atol=1e-9)


def test_densities_of_actions_are_those_of_pytorch() -> None:
    random = np.random.default_rng(2)
    parameters, log_std = torch.from_numpy(random.normal(size=(6, 5))), torch.from_numpy(random.normal(size=2))
    form = ActionForm(spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,))]))
    mine = Distribution(form, parameters, log_std)
    actions = mine.sample(torch.Generator().manual_seed(0)).double()
    choice = torch.distributions.Categorical(logits=parameters[:, :3])
    normal = torch.distributions.Normal(parameters[:, 3:], log_std.exp())
    expected = choice.log_prob(actions[:, 0]) + normal.log_prob(actions[:, 1:]).sum(1)
    torch.testing.assert_close(mine.log_prob(actions), expected)
    torch.testing.assert_close(mine.entropy(), choice.entropy() + normal.entropy().sum(1))


def test_actions_are_sampled_by_probability_and_never_where_masked() -> None:
    form, settings = ActionForm(spaces.Discrete(3)), Settings()
    logits = torch.tensor([0.0, 1.0, -1.0]).repeat(20_000, 1)
    drawn = Distribution(form, logits, None).sample(torch.Generator().manual_seed(0)).long().flatten()
    np.testing.assert_allclose(drawn.bincount() / 20_000, logits[0].softmax(0), atol=0.02)
    model = ActorCritic(leaves_of(MASKED), form, settings)
    mask = torch.eye(3, dtype=torch.int8)[torch.arange(20_000) % 3]
    distribution, _, _ = model([mask, torch.zeros(20_000, 3, dtype=torch.float64)], torch.zeros(20_000, 0))
    assert distribution.sample(torch.Generator().manual_seed(0))[:, 0].long().eq(mask.argmax(1)).all()
    assert distribution.mode()[:, 0].long().eq(mask.argmax(1)).all()
    assert torch.isfinite(distribution.log_prob(mask.argmax(1, keepdim=True).float())).all()
    assert torch.isfinite(distribution.entropy()).all()
    assert torch.isfinite(distribution.symmetric_kl()).all()


def test_statistics_of_returns_change_no_value_that_the_network_tells() -> None:
    model = ActorCritic(leaves_of(VECTOR), ActionForm(spaces.Discrete(2)), Settings())
    seen = torch.randn(50, 3, generator=torch.Generator().manual_seed(1))
    for scale in (1.0, 300.0, 0.01):
        with torch.no_grad():
            before = model.value(model([seen], torch.zeros(50, 0))[1])
            model.see_returns(torch.randn(200, dtype=torch.float64) * scale + scale)
            after = model.value(model([seen], torch.zeros(50, 0))[1])
        torch.testing.assert_close(before, after, rtol=1e-4, atol=1e-6 * float(model.returns.std))


def test_statistics_merged_batch_by_batch_are_those_of_all_rows() -> None:
    running, rows = (
        learning.ActorCritic(leaves_of(VECTOR), ActionForm(spaces.Discrete(2)), Settings()).encoder.running,
        (torch.randn(300, 3, dtype=torch.float64) * 7 + 3),
    )
    for part in rows.split([1, 99, 200]):
        running.add(part)
    torch.testing.assert_close(running.mean, rows.mean(0))
    torch.testing.assert_close(running.variance, rows.var(0, unbiased=False))


def test_masks_that_leave_nothing_to_draw_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidOption, match=r"its shape is \(3,\), and there are 4 actions"):
        ActorCritic(leaves_of(MASKED), ActionForm(spaces.Discrete(4)), Settings())
    with pytest.raises(InvalidOption, match="empty except for masks"):
        ActorCritic(
            leaves_of(spaces.Dict(action_mask=MASKED["action_mask"])), ActionForm(spaces.Discrete(3)), Settings()
        )
    monkeypatch.setattr(Sampled, "mask", [0, 0, 0])
    with pytest.raises(TrainingFailed, match="action_mask allows no action"):
        collected(tmp_path / "t", MASKED, spaces.Discrete(3))


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e308])
@pytest.mark.parametrize("where", ["rewards", "observations"])
def test_infinite_or_nan_experience_raises(tmp_path: Path, where: str, value: float) -> None:
    found = collected(tmp_path / "t", *SPACES["discrete"])
    array = found.rollouts[0].rewards if where == "rewards" else found.rollouts[0].observations[0]
    array[3, 1] = value
    said = "finite" if np.isfinite(value) else f"{where.removesuffix('s')} is not finite"
    with pytest.raises(TrainingFailed, match=said):
        found.learner.learn(found.rollouts[:1])


@pytest.mark.parametrize("name", SPACES)
def test_a_network_on_another_device_mixes_no_tensors(name: str) -> None:
    leaves, form = leaves_of(SPACES[name][0]), ActionForm(SPACES[name][1])
    model = ActorCritic(leaves, form, Settings())
    rows = []
    for leaf in leaves:
        leaf.space.seed(1)
        rows.append(np.array([leaf.space.sample() for _ in range(5)]))
    distribution, values, _ = model(tensors(rows), torch.zeros(5, 0))
    with torch.no_grad(), SecondDevice():
        found, there, _ = model.to(NAME)(tensors(rows, NAME), torch.zeros(5, 0, device=NAME))
        assert there.device.type == NAME
        actions = distribution.mode()
        assert torch.equal(there.cpu(), values)
        assert torch.equal(found.log_prob(actions.to(NAME)).cpu(), distribution.log_prob(actions))
