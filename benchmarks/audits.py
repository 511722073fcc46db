"""Audit environments of other packages, and write AUDITS.md.

Usage: python benchmarks/audits.py [WORD ...]    with words: only lines of ENVIRONMENTS with one of them

Each is audited by the command line in a process of its own. Results are kept in audits.json, so that packages that do
not go together can be audited one after the other:
pip install "gymnasium[box2d,mujoco,jax]" ale-py minigrid "pettingzoo[butterfly,classic]" envpool
pip install dm_control "mujoco<4"
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gym_trace.tools.audit.report import CLAIMS

RESULTS = Path(__file__).with_name("audits.json")
PAGE = Path(__file__).with_name("AUDITS.md")
HEAD = """# Audits

Written by `python benchmarks/audits.py`. [The guide](../docs/guides/audit.md) explains the claims; – is "not tried".
"""
MOST_TEXTS = 12  # listed for one claim; above it, only names
SECONDS = 1800  # most of an audit
MARKS = {"yes": "yes", "no": "**no**", "not tried": "–"}
MUJOCO = (
    *("Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum", "InvertedPendulum"),
    *("Pusher", "Reacher", "Swimmer", "Walker2d"),
)
CONTROL = (
    "domain_name=cartpole --env-arg task_name=swingup",
    "domain_name=cheetah --env-arg task_name=run",
    "domain_name=finger --env-arg task_name=turn_easy",
    "domain_name=humanoid --env-arg task_name=walk",
    "domain_name=reacher --env-arg task_name=easy",
)
MINIGRID = (
    "MiniGrid-Empty-8x8",
    "MiniGrid-DoorKey-8x8",
    "MiniGrid-FourRooms",
    "MiniGrid-Dynamic-Obstacles-6x6",
    "BabyAI-GoToObj",
)
ENVIRONMENTS = f"""
Acrobot-v1, CartPole-v1, MountainCar-v0, MountainCarContinuous-v0, Pendulum-v1
Blackjack-v1, CliffWalking-v1, CliffWalkingSlippery-v1, FrozenLake-v1, FrozenLake8x8-v1, Taxi-v4
BipedalWalker-v3, BipedalWalkerHardcore-v3, LunarLander-v3, LunarLanderContinuous-v3
CarRacing-v3 --episodes 2 --steps 30
{", ".join(f"{name}-v5" for name in MUJOCO)}
phys2d/CartPole-v1, phys2d/Pendulum-v0, tabular/Blackjack-v0, tabular/CliffWalking-v0
{", ".join(f"ALE/{name}-v5 --import ale_py" for name in ("Pong", "Breakout", "MontezumaRevenge", "SpaceInvaders"))}
{", ".join(f"{name}-v0 --import minigrid" for name in MINIGRID)}
{", ".join(f"--make dm_control.suite:load --env-arg {arguments}" for arguments in CONTROL)}
--make pettingzoo.butterfly.pistonball_v6:parallel_env --episodes 3 --steps 40
--make pettingzoo.butterfly.knights_archers_zombies_v11:parallel_env --episodes 3 --steps 60
--make pettingzoo.butterfly.cooperative_pong_v6:parallel_env --episodes 3 --steps 40
--make pettingzoo.classic.tictactoe_v3:env, --make pettingzoo.classic.connect_four_v3:env
--make pettingzoo.classic.rps_v2:env, --make pettingzoo.classic.leduc_holdem_v4:env
--make pettingzoo.classic.texas_holdem_v4:env, --make pettingzoo.classic.chess_v6:env --episodes 4 --steps 60
--make envpool:make_gymnasium --env-arg task_id=CartPole-v1 --env-arg num_envs=3
--make envpool:make_gymnasium --env-arg task_id=Pendulum-v1 --env-arg num_envs=3
--make envpool:make_gymnasium --env-arg task_id=Blackjack-v1 --env-arg num_envs=3
--make envpool:make_gymnasium --env-arg task_id=HalfCheetah-v4 --env-arg num_envs=3
--make envpool:make_gymnasium --env-arg task_id=Pong-v5 --env-arg num_envs=3
"""


def audited(line: str) -> tuple[dict[str, Any] | None, str]:
    """Return the report; or None, and the error."""
    command = [str(Path(sys.executable).with_name("gym-trace")), "audit", *shlex.split(line), "--json"]
    if line.startswith("ALE/"):
        command += ["--episodes", "4", "--steps", "100"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **SETTINGS})
    except subprocess.TimeoutExpired:
        return None, f"took more than {SECONDS} s"
    if done.returncode:
        return None, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return json.loads(done.stdout), ""


SETTINGS = {"MUJOCO_GL": os.environ.get("MUJOCO_GL", "egl"), "SDL_VIDEODRIVER": "dummy", "PYTHONWARNINGS": "ignore"}


def name_of(line: str) -> str:
    """Return the id, or the factory with its arguments."""
    words = shlex.split(line)
    if words[0] != "--make":
        return words[0]
    package, _, function = words[1].partition(":")
    values = [word.partition("=")[2] for word in words if "=" in word and not word.startswith("num_envs")]
    return f"{package.partition('.')[0]} {' '.join(values) or package.rpartition('.')[2]} ({function})"


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the table in Markdown; below it the versions, and what does not hold."""
    versions: dict[str, dict[str, None]] = {}  # sets that keep their order
    failed: dict[str, dict[str, str]] = {}  # text by claim and name
    lines = [f"| | {' | '.join(f'`{claim}`' for claim in CLAIMS)} | audited |", "|---" * (2 + len(CLAIMS)) + "|"]
    for name, report in results.items():
        for package, version in report["versions"].items():
            versions.setdefault(package, {})[version] = None
        claims = {claim["name"]: claim for claim in report["claims"]}
        lines.append(f"| {name} | {' | '.join(MARKS[claims[one]['verdict']] for one in CLAIMS)} | {report['date']} |")
        for claim in claims.values():
            if claim["verdict"] == "no":
                failed.setdefault(claim["name"], {})[name] = claim["text"]
    used = ", ".join(f"{package} {' and '.join(found)}" for package, found in versions.items())
    lines += ["", f"With {used}. What does not hold:", ""]
    for claim, texts in failed.items():
        if len(texts) > MOST_TEXTS:
            lines.append(f"- `{claim}`: {', '.join(texts)}")
        else:
            lines += [f"- `{claim}`, {name}: {text}" for name, text in texts.items()]
    return "\n".join(lines)


def main(wanted: list[str]) -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    lines = [each.strip() for each in ENVIRONMENTS.replace("\n", ",").split(",") if each.strip()]
    for line in lines:
        if wanted and not any(word in line for word in wanted):
            continue
        begin = time.monotonic()
        report, error = audited(line)
        print(f"{name_of(line):60} {time.monotonic() - begin:6.1f} s  {error}", flush=True)
        for claim in report["claims"] if report else []:
            if claim["verdict"] != "yes":
                print(f"    {claim['name']:18} {claim['verdict']}: {claim['text']}", flush=True)
        if report is not None:
            claims = [{key: claim[key] for key in ("name", "verdict", "text")} for claim in report["claims"]]
            results[name_of(line)] = {"date": report["date"], "versions": report["versions"], "claims": claims}
            order = {name: results[name] for name in map(name_of, lines) if name in results}
            RESULTS.write_text(json.dumps(order, indent=1) + "\n", encoding="utf-8")
            PAGE.write_text(f"{HEAD}\n{table(order)}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
