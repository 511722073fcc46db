"""The wheel, as a user gets it."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_installs_two_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        top = {name.partition("/")[0] for name in archive.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"gym_trace", "gym_trace_cli"}


def test_the_installed_command_runs_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    # The dependencies are the ones that are here: what is tested is what the wheel itself installs.
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)],
        check=True,
        capture_output=True,
    )
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    environ = {**os.environ, "PYTHONPATH": packages}
    command = environment / "bin" / "gym-trace"
    ran = subprocess.run([command, "--version"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    assert "0.1.0" in ran.stdout
    where = "import gym_trace, gym_trace_cli; print(gym_trace.__file__, gym_trace_cli.__file__)"
    ran = subprocess.run([python, "-c", where], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    assert all(str(environment) in place for place in ran.stdout.split())


def test_the_declared_dependencies_are_the_six_we_promise() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    block = text[text.index("\ndependencies = [") : text.index("[project.optional-dependencies]")]
    names = {line.strip().strip('",').partition(">")[0] for line in block.splitlines() if line.startswith("    ")}
    assert names == {"click", "gymnasium", "msgpack", "numpy", "rich", "zstandard"}
