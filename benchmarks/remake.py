"""The cost of gym_trace.remake() beside the script that one would write; the table of benchmarks/MEASUREMENTS.md.

    pip install "gymnasium[mujoco]" "mujoco<3.4" ale-py gymnasium-robotics
    MUJOCO_GL=egl python benchmarks/remake.py

The scripts record the same episodes with the same change, and print where rewards or flags first differ. Times are CPU
time of this process, the least of three runs in turns.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ale_py
import gymnasium
import gymnasium_robotics
from gymnasium.wrappers import AddRenderObservation

from gym_trace import TraceRecordingWrapper, open_trace, record_episodes, remake

gymnasium.register_envs(ale_py)
gymnasium.register_envs(gymnasium_robotics)
CAMERA = {"render_mode": "rgb_array", "width": 84, "height": 84, "camera_name": "track"}


def camera(source: Path, target: Path) -> None:
    env = AddRenderObservation(gymnasium.make("HalfCheetah-v5", max_episode_steps=100, **CAMERA))
    with TraceRecordingWrapper(env, target) as recorder:
        for episode in open_trace(source):
            recorder.reset(seed=episode.seed, options=episode.options)
            for step, action in enumerate(episode.actions):
                _, reward, terminated, truncated, _ = recorder.step(action)
                recorded = episode.rewards[step], episode.terminations[step], episode.truncations[step]
                if recorded != (reward, terminated, truncated):
                    print(f"episode {episode.index} differs at step {step}: {recorded}, now {reward}")
                    break


def frameskip(source: Path, target: Path) -> None:
    with TraceRecordingWrapper(gymnasium.make("ALE/Pong-v5", frameskip=2), target) as recorder:
        for episode in open_trace(source):
            recorder.reset(seed=episode.seed, options=episode.options)
            is_same = True
            for step, action in enumerate(episode.actions):
                _, reward, terminated, truncated, _ = recorder.step(action)
                recorded = episode.rewards[step], episode.terminations[step], episode.truncations[step]
                if is_same and recorded != (reward, terminated, truncated):
                    print(f"episode {episode.index} differs at step {step}: {recorded}, now {reward}")
                    is_same = False
                if terminated or truncated:
                    break


def reward(source: Path, target: Path) -> None:
    with TraceRecordingWrapper(gymnasium.make("FetchReach-v4", reward_type="dense"), target) as recorder:
        for episode in open_trace(source):
            recorder.reset(seed=episode.seed, options=episode.options)
            for step, action in enumerate(episode.actions):
                observation, _, terminated, truncated, _ = recorder.step(action)
                recorded = episode.terminations[step], episode.truncations[step]
                for name, rows in episode.observations.items():
                    if not (rows[step + 1] == observation[name]).all() or recorded != (terminated, truncated):
                        print(f"episode {episode.index} differs at step {step}: {name}, {recorded}")


# The script; environment, its arguments, and episodes to record; arguments of remake().
TASKS: list[tuple[Callable[[Path, Path], None], str, dict[str, Any], int, dict[str, Any]]] = [
    (
        camera,
        "HalfCheetah-v5",
        {"max_episode_steps": 100},
        4,
        {"env_kwargs": CAMERA, "wrappers": [AddRenderObservation]},
    ),
    (frameskip, "ALE/Pong-v5", {}, 3, {"env_kwargs": {"frameskip": 2}, "ignore": ["observations"]}),
    (reward, "FetchReach-v4", {}, 20, {"env_kwargs": {"reward_type": "dense"}, "ignore": ["rewards"]}),
]


def seconds(work: Callable[[], Any]) -> float:
    gc.collect()  # see gym_trace.envs.opengl.free_contexts()
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    print("| environment | change | steps | script | lines | remake | remake says |\n" + "|---" * 7 + "|")
    for script, env_id, arguments, episodes, changes in TASKS:
        with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(None):
            source, new = Path(scratch) / "source", (Path(scratch) / f"{number}" for number in range(9))
            with TraceRecordingWrapper(gymnasium.make(env_id, **arguments), source) as recorder:
                record_episodes(recorder, episodes=episodes, seed=0)
            steps = int(open_trace(source).episodes["steps"].sum())
            works = partial(script, source), partial(remake, source, **changes)
            times = [[seconds(partial(work, next(new))) for work in works] for _ in range(3)]
            report = remake(source, next(new), **changes)
        written, remade = (f"{min(column):.1f} s" for column in zip(*times))
        lines = len(inspect.getsource(script).splitlines())
        says = f"{report.same} same; {report.episodes[0]}"
        print(f"| {env_id} | {script.__name__} | {steps:,} | {written} | {lines} | {remade} | {says} |")


if __name__ == "__main__":
    main()
