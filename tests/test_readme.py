"""What the README shows works as it stands there."""

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
HAS_VECTORS = hasattr(gymnasium.vector, "AutoresetMode")
PYTHON = [text for text in re.findall(r"```python\n(.*?)```", README, re.S) if HAS_VECTORS or "Vector" not in text]
COMMANDS = [line.strip() for line in README.splitlines() if line.startswith("    gym-trace ")]

GYM_TRACE = str(Path(sys.executable).with_name("gym-trace"))

OLD_RECORDING = Path(__file__).parent.parent / "sample_traces" / "legacy" / "gym_recording-json" / "CartPole-v0"
MODULES = {
    "my_agent.py": "def act(observation):\n    return 0\n",
    "my_analysis.py": "def on_episode(observations, actions, rewards):\n    print(len(rewards))\n",
}


def run(command: list[str], folder: Path) -> str:
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, f"{command}: {ran.stdout}{ran.stderr}"
    return ran.stdout


def test_the_commands_run_one_after_the_other(tmp_path: Path) -> None:
    assert len(COMMANDS) >= 8
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text)
    shutil.copytree(OLD_RECORDING, tmp_path / "old" / "recording")
    for command in COMMANDS:
        if ("ale_py" in command or "pong" in command) and importlib.util.find_spec("ale_py") is None:
            continue
        if " render " in command and importlib.util.find_spec("av") is None:
            continue
        if "--num-envs" in command and not HAS_VECTORS:
            continue
        quick = command.replace("--steps 10000", "--steps 50")
        printed = run([GYM_TRACE, *shlex.split(quick)[1:]], tmp_path)
        assert printed


def test_the_python_runs_as_one_program(tmp_path: Path) -> None:
    program = "import gym_trace\n" + "\n".join(PYTHON)
    (tmp_path / "program.py").write_text(program.replace("\n    ...", "\n    pass"))
    printed = run([sys.executable, "-W", "error", "program.py"], tmp_path)
    assert len(printed.splitlines()) > 20  # a line an episode


@pytest.mark.parametrize("target", re.findall(r"^    make (\w+)", README, re.M))
def test_every_make_target_it_names_is_there(target: str) -> None:
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    assert re.search(rf"^{target}:", makefile, re.M)


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http)([^)]+)\)", README))
def test_every_file_it_links_to_is_there(link: str) -> None:
    assert (Path(__file__).parent.parent / link).exists()
