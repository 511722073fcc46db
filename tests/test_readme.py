"""The examples of the README work."""

import importlib.util
import re
import shlex
import shutil
import sys
from pathlib import Path

import cradle
import gymnasium
import pytest
from shell import ok

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
HAS_VECTORS = hasattr(gymnasium.vector, "AutoresetMode")
# Programs and commands, in their order.
SNIPPETS = [
    program or command.strip()
    for program, command in re.findall(r"```python\n(.*?)```|^    (gym-trace .*?)$", README, re.S | re.M)
]

OLD_RECORDING = ROOT / "sample_traces" / "legacy" / "gym_recording-json" / "CartPole-v0"
MODULES = {
    "my_agent.py": "def act(observation):\n    return 0\n",
    "my_analysis.py": "def on_episode(observations, actions, rewards):\n    print(len(rewards))\n",
}


# What takes its time, and shows no more than a shorter one.
SHORTER = {
    "--steps 10000": "--steps 50",  # and 100000: 500
    "--steps 200000": "--steps 1000",
    "--episodes 100": "--episodes 60",
    "--episodes 2000": "--episodes 20",
    "--episodes 3000": "--episodes 30",
    "learn(10_000)": "learn(1)",
}


def can_run(snippet: str) -> bool:
    needs = {
        "ale_py": "ale_py",
        "pong": "ale_py",
        " render ": "av",
        "minari": "h5py",
        "baselines3 import": "stable_baselines3",
    }
    needs |= {" train ": "torch", "policy run:": "torch", "runs/": "torch"}
    missing = any(word in snippet and importlib.util.find_spec(module) is None for word, module in needs.items())
    return not missing and (HAS_VECTORS or ("Vector" not in snippet and "--num-envs" not in snippet))


def test_everything_it_shows_runs_in_its_order_in_one_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(SNIPPETS) >= 30
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)
    shutil.copytree(OLD_RECORDING, tmp_path / "old" / "recording")
    for snippet in filter(can_run, SNIPPETS):
        for long, short in SHORTER.items():
            snippet = snippet.replace(long, short)
        if snippet.startswith("gym-trace "):
            assert ok(*shlex.split(snippet)[1:]).stdout
        else:
            (tmp_path / "program.py").write_text(snippet.replace("\n    ...", "\n    pass"))
            ran = cradle.run([sys.executable, "-W", "error", "program.py"], capture_output=True, text=True, timeout=120)
            assert ran.returncode == 0, f"{snippet}: {ran.stdout}{ran.stderr}"


@pytest.mark.parametrize("target", re.findall(r"^    make (\w+)", README, re.M))
def test_every_make_target_it_names_is_there(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{target}:", makefile, re.M)


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http)([^)#]+)", README))
def test_every_file_it_links_to_is_there(link: str) -> None:
    assert (ROOT / link).exists()
