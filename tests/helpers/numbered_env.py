"""An environment whose values identify their episode and step, a small trace of it, and a check of episodes read."""

import contextlib
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from damage import strip_parity
from gymnasium import spaces

from gym_trace import Episode, TraceRecordingWrapper, open_trace
from gym_trace.errors import CorruptTrace

LENGTHS = (4, 3, 6, 0, 5)  # steps of each episode
OUTCOMES = ("terminated", "truncated", "cut", "cut", "closed")
STEPS = sum(LENGTHS)


class NumberedEnv(gymnasium.Env[Any, Any]):
    """Observation, reward and info are functions of episode number and step number."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(50)

    def __init__(self) -> None:
        self.episode, self.t = -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return observation_at(self.episode, 0), {"reset": self.episode}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        e, t = self.episode, self.t
        over = t == LENGTHS[e % len(LENGTHS)]
        outcome = OUTCOMES[e % len(LENGTHS)]
        ends = over and outcome == "terminated", over and outcome == "truncated"
        return observation_at(e, t), reward_at(e, t - 1), *ends, {"t": t - 1}


def observation_at(episode: int, t: int) -> Any:
    return np.array([episode, t, 31.5 * episode - t], np.float32)


def reward_at(episode: int, step: int) -> float:
    return episode * 100.0 + step


def action_at(episode: int, step: int) -> int:
    return (7 * episode + step) % 50


def play_episodes(env: TraceRecordingWrapper, count: int, flush_every: int = 2, first: int = 0) -> None:
    """Play whole episodes, with periodic flushes, so that there are many chunks."""
    for episode in range(first, first + count):
        options = {"episode": episode} if episode % 2 else None
        env.reset(seed=None if episode % 3 == 2 else episode, options=options)
        for step in range(LENGTHS[episode % len(LENGTHS)]):
            if step % 2:
                env.annotate(note=episode + step / 10)
            env.step(action_at(episode, step))
            if flush_every and step % flush_every == flush_every - 1:
                env.flush()


def record(directory: Path, *, closed: bool = True, parity: bool = False, **options: Any) -> Path:
    """Record one episode of each length in LENGTHS, in several chunks; return the batch file.

    parity: keep the parity of the batch, which restores what a test damages.
    """
    options = {"uid": "w", "record_infos": True, "flush_seconds": 1000.0, **options}
    env = TraceRecordingWrapper(NumberedEnv(), directory, **options)
    play_episodes(env, len(LENGTHS))
    if closed:
        env.close()
    else:
        env.flush()
        leave_open(env, directory)
    batch = next(path for path in sorted(directory.iterdir()) if ".gtb" in path.name)
    if closed and not parity:
        strip_parity(batch)
    return batch


def leave_open(env: TraceRecordingWrapper, directory: Path) -> None:
    """Close the environment, but leave the directory as after a kill of the recording process."""
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    env.close()
    for path in directory.iterdir():
        path.unlink()
    for name, data in files.items():
        (directory / name).write_bytes(data)


def check_episode(episode: Episode, damaged: bool = False) -> None:
    """Check the values of an episode or a part of one.

    Args:
        damaged: the data of its reset may be lost, if reading reports that.
    """
    e, first, steps = episode.episode_id, episode.first_step, len(episode)
    assert first + steps <= LENGTHS[e % len(LENGTHS)]
    seen = [observation_at(e, t) for t in range(first, first + steps + 1)]
    assert episode.observations.dtype == np.float32
    assert episode.observations.tobytes() == np.array(seen).tobytes()
    numbers = range(first, first + steps)
    assert episode.actions.tolist() == [action_at(e, s) for s in numbers]
    assert episode.rewards.tolist() == [reward_at(e, s) for s in numbers]
    assert episode.infos == [{"t": s} for s in numbers]
    notes = episode.annotations.get("note", [None] * steps)
    assert [None if note is None else float(note) for note in notes] == [e + s / 10 if s % 2 else None for s in numbers]
    outcome = OUTCOMES[e % len(LENGTHS)]
    ended = [s + 1 == LENGTHS[e % len(LENGTHS)] for s in numbers]
    assert episode.terminations.tolist() == [outcome == "terminated" and end for end in ended]
    assert episode.truncations.tolist() == [outcome == "truncated" and end for end in ended]
    assert episode.outcome in (outcome, "lost")
    with contextlib.suppress(*([CorruptTrace] if damaged else [])):
        _check_start(episode)
    if not np.isnan(episode.total_reward):
        assert episode.total_reward == sum(reward_at(e, s) for s in numbers)


def _check_start(episode: Episode) -> None:
    e = episode.episode_id
    if episode.start_time is not None:
        assert episode.seed == (None if e % 3 == 2 else e)
        assert episode.options == ({"episode": e} if e % 2 else None)
        assert (episode.rng_state is None) == (e % 3 != 2)
        assert episode.reset_info == {"reset": e}


def steps_of(episodes: Iterable[Episode], damaged: bool = False) -> set[tuple[int, int]]:
    """Check all episodes and return their steps as (episode id, step). No step may occur twice."""
    found: list[tuple[int, int]] = []
    for episode in episodes:
        check_episode(episode, damaged)
        found += [(episode.episode_id, episode.first_step + s) for s in range(len(episode))]
    assert len(found) == len(set(found))
    return set(found)


def all_steps(lengths: Iterable[int] = LENGTHS) -> set[tuple[int, int]]:
    return {(episode, step) for episode, length in enumerate(lengths) for step in range(length)}


def read_undamaged(directory: Path) -> list[Episode]:
    """Read all readable episodes of a damaged trace, with their arrays."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return [_loaded(episode) for episode in open_trace(directory).scan(on_damage="skip")]


def _loaded(episode: Episode) -> Episode:
    for name in ("observations", "actions", "rewards", "terminations", "truncations", "infos", "annotations"):
        getattr(episode, name)
    return episode
