"""mjlab, stepped by Warp on the CPU: traces equal an independent log, and recorded states replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("mjlab")

from mjlab.envs import ManagerBasedRlEnv  # noqa: E402
from mjlab.managers.recorder_manager import RecorderTerm, RecorderTermCfg  # noqa: E402
from mjlab.tasks.registry import load_env_cfg  # noqa: E402

from gym_trace import check_trace, open_trace  # noqa: E402
from gym_trace.errors import InvalidOption  # noqa: E402
from gym_trace.exchange import mjlab  # noqa: E402

LANES, CHOSEN = 12, [0, 4, 8]
Log = list[dict[str, Any]]


def made(tmp_path: Path, steps: int = 7, **options: Any) -> ManagerBasedRlEnv:
    """Return an environment whose episodes have some steps, recorded to a trace."""
    cfg = load_env_cfg("Mjlab-Cartpole-Balance")
    cfg.scene.num_envs, cfg.seed, cfg.auto_reset = LANES, 3, options.pop("auto_reset", True)
    cfg.episode_length_s = steps * cfg.sim.mujoco.timestep * cfg.decimation
    cfg.recorders["trace"] = mjlab.recorder(tmp_path / "trace", **{"lanes": CHOSEN, **options})
    return ManagerBasedRlEnv(cfg, device="cpu")


def plain(tree: Any) -> Any:
    return {k: plain(v) for k, v in tree.items()} if isinstance(tree, dict) else tree.clone().numpy()


def stepped(env: ManagerBasedRlEnv, steps: int, seed: int = 0) -> tuple[Any, Log]:
    """Reset and step an environment; return what reset() returned, and a log of what step() did."""
    random = torch.Generator().manual_seed(seed)
    first, log = plain(env.reset()[0]), []
    for _ in range(steps):
        actions = torch.rand(LANES, env.action_manager.total_action_dim, generator=random) * 2 - 1
        observation, reward, terminated, truncated, _ = env.step(actions)
        step = {"action": actions, "reward": reward, "terminated": terminated, "truncated": truncated}
        log.append({**plain(step), "observation": plain(observation)})
        ended = (terminated | truncated).nonzero().flatten()
        if not env.cfg.auto_reset and len(ended):
            log[-1]["reset"] = plain(env.reset(env_ids=ended)[0])
    return first, log


def compared(trace: Any, first: Any, log: Log, has_finals: bool) -> int:
    """Compare the episodes of each lane with the log; return their number."""
    episodes = 0
    for lane in CHOSEN:
        mine = sorted((one for one in trace if one.lane == lane), key=lambda one: one.episode_id)
        at, current = 0, first
        for episode in mine:
            rows = log[at : at + len(episode)]
            assert episode.has_final_observation == (has_finals or not over(rows, lane))
            for group, observations in episode.observations.items():
                expected = np.array([current[group][lane], *(step["observation"][group][lane] for step in rows)])
                if over(rows, lane) and not has_finals:
                    expected[-1] = np.nan
                assert observations.tobytes() == expected.tobytes()
            assert episode.actions.tobytes() == np.array([step["action"][lane] for step in rows]).tobytes()
            assert (episode.rewards == np.array([step["reward"][lane] for step in rows])).all()
            assert episode.truncations.tolist() == [step["truncated"][lane] for step in rows]
            assert episode.terminations.tolist() == [step["terminated"][lane] for step in rows]
            at, episodes = at + len(episode), episodes + 1
            current = rows[-1].get("reset", rows[-1]["observation"]) if rows else current
        assert at == len(log)
    return episodes


def over(rows: Log, lane: int) -> bool:
    return bool(rows) and bool(rows[-1]["terminated"][lane] or rows[-1]["truncated"][lane])


@pytest.mark.parametrize("auto_reset", [True, False])
def test_chosen_lanes_are_recorded_as_they_were(tmp_path: Path, auto_reset: bool) -> None:
    env = made(tmp_path, auto_reset=auto_reset)
    first, log = stepped(env, 30)
    env.close()
    trace = open_trace(tmp_path / "trace")
    assert compared(trace, first, log, has_finals=not auto_reset) == len(trace) == 15
    assert not check_trace(tmp_path / "trace").damages


def test_observations_after_a_recorded_state_are_the_recorded_ones(tmp_path: Path) -> None:
    env = made(tmp_path, steps=20, auto_reset=False, states=True)
    stepped(env, 20)
    env.recorder_manager.get_term("trace").wrapper.flush()
    for episode in open_trace(tmp_path / "trace")[:3]:
        for step in (0, 7, 19):
            env.reset()
            mjlab.restore(env, episode, step)
            env.step(torch.as_tensor(episode.actions[step]).expand(LANES, -1))
            clean = env.obs_buf["critic"]  # the actor's has noise
            assert (clean == torch.as_tensor(episode.observations["critic"][step + 1])).all()
    env.close()


def bytes_of(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: bytes_of(part) for name, part in tree.items()}
    return list(map(bytes_of, tree)) if isinstance(tree, list) else tree.tobytes()


def test_recording_changes_nothing(tmp_path: Path) -> None:
    def results(records: bool) -> Log:
        env = made(tmp_path / str(records), states=True)
        if not records:
            env.recorder_manager._terms.clear()
        first, log = stepped(env, 20)
        env.close()
        return [first, *log]

    assert bytes_of(results(False)) == bytes_of(results(True))


def test_a_reset_of_some_environments_keeps_their_episodes_as_cut(tmp_path: Path) -> None:
    env = made(tmp_path, steps=50, auto_reset=False)
    stepped(env, 5)
    env.reset(env_ids=torch.tensor([4, 5]))
    env.step(torch.zeros(LANES, 1))
    env.close()
    found = [(one.lane, len(one), one.outcome) for one in open_trace(tmp_path / "trace")]
    assert sorted(found) == [(0, 6, "closed"), (4, 1, "closed"), (4, 5, "cut"), (8, 6, "closed")]


def test_an_error_within_a_step_loses_only_that_step(tmp_path: Path) -> None:
    class Failing(RecorderTerm):
        fails = False

        def record_post_reset(self, env_ids: Any) -> None:
            if Failing.fails:
                raise OSError("no space")

    env = made(tmp_path, steps=4)
    first = {"failing": Failing(RecorderTermCfg(func=Failing), env)}
    env.recorder_manager._terms = first | env.recorder_manager._terms
    stepped(env, 3)
    Failing.fails = True
    with pytest.raises(OSError, match="no space"):
        env.step(torch.zeros(LANES, 1))
    Failing.fails = False
    stepped(env, 2)
    env.close()
    found = sorted((one.lane, len(one), one.outcome) for one in open_trace(tmp_path / "trace"))
    assert found == sorted((lane, steps, outcome) for lane in CHOSEN for steps, outcome in ((3, "cut"), (2, "closed")))


def test_unknown_fields_of_a_state_raise(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="no field qposs"):
        made(tmp_path, states=["qposs"])
    env = made(tmp_path)
    stepped(env, 3)
    with pytest.raises(InvalidOption, match="has no states"):
        mjlab.restore(env, open_trace(tmp_path / "trace")[0], 0)
    env.close()
