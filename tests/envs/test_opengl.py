"""Rendering with MuJoCo where there is no display."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gym_trace.envs import opengl
from gym_trace.envs.opengl import choose_opengl, log_mujoco_warnings, opengl_hint

NO_PLATFORM = "mujoco.FatalError: an OpenGL platform library has not been loaded into this process"


@pytest.fixture(autouse=True)
def headless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux with MuJoCo, without a display."""
    monkeypatch.setattr(opengl, "find_spec", lambda name: name == "mujoco" or None)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("MUJOCO_GL", "")  # remembered, so that what is set is taken back
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"):
        monkeypatch.delenv(name, raising=False)


def test_egl_is_taken_where_it_works_and_osmesa_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opengl, "_works", lambda backend: True)
    choose_opengl()
    assert os.environ["MUJOCO_GL"] == "egl"
    monkeypatch.delenv("MUJOCO_GL")
    monkeypatch.setattr(opengl, "_works", lambda backend: backend == "osmesa")
    choose_opengl()
    assert os.environ["MUJOCO_GL"] == "osmesa"


@pytest.mark.parametrize(("name", "value"), [("DISPLAY", ":0"), ("MUJOCO_GL", "glfw")])
def test_a_display_and_a_choice_of_the_user_stay_in_use(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setattr(opengl, "_works", lambda backend: True)
    monkeypatch.setenv(name, value)
    choose_opengl()
    assert os.environ.get("MUJOCO_GL") == (value if name == "MUJOCO_GL" else None)


def test_without_any_library_the_error_says_what_to_install_and_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opengl, "_works", lambda backend: False)
    choose_opengl()
    assert "MUJOCO_GL" not in os.environ
    assert opengl_hint(RuntimeError(NO_PLATFORM)) == (
        "; there is neither a display nor EGL nor OSMesa: "
        "install libegl1 and set MUJOCO_GL=egl, or install libosmesa6 and set MUJOCO_GL=osmesa"
    )
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    error = AttributeError("'NoneType' object has no attribute 'glGetError'")
    assert "MUJOCO_GL=osmesa does not work here" in opengl_hint(error)
    assert opengl_hint(ValueError("a single global angle")) == ""


def test_a_backend_is_tried_without_modules_of_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mujoco.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    opengl._works.cache_clear()
    opengl._works("egl")
    assert not (tmp_path / "ran").exists()


def test_mujoco_is_rendered_without_a_display_or_raises_with_advice(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    environment = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "MUJOCO_GL")}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gym_trace", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    assert run("record", "InvertedPendulum-v5", "-o", "it", "--steps", "2", "--seed", "0").returncode == 0
    rendered = run("render", "it", "-o", "it.gif")
    if opengl._works("egl") or opengl._works("osmesa"):
        assert (rendered.returncode, (tmp_path / "it.gif").exists()) == (0, True), rendered.stderr
    else:
        assert "MUJOCO_GL" in rendered.stderr


def test_warnings_of_mujoco_are_logged_unless_the_user_handles_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handlers: list[Any] = []
    fake = SimpleNamespace(
        get_mju_user_warning=lambda: handlers[-1] if handlers else None, set_mju_user_warning=handlers.append
    )
    monkeypatch.setitem(sys.modules, "mujoco", fake)
    log_mujoco_warnings()
    handlers[0](b"Nan in QPOS")
    handlers[0](b"Nan in QPOS")
    assert caplog.messages == ["MuJoCo: Nan in QPOS"]
    log_mujoco_warnings()
    assert len(handlers) == 1


def test_a_model_that_warns_when_it_is_made_writes_no_file(tmp_path: Path) -> None:
    """As with the import of MuJoCo by the module of an environment, which then compiles a model."""
    (tmp_path / "mujoco.py").write_text(
        "own = [None]\ndef get_mju_user_warning(): return own[-1]\nset_mju_user_warning = own.append\n"
    )
    (tmp_path / "robot.py").write_text(
        "import gymnasium\n\n\ndef make():\n    import mujoco\n    mujoco.own[-1](b'deprecated')\n"
        "    return gymnasium.make('CartPole-v1')\n"
    )
    script = (
        "from importlib.util import find_spec; from gym_trace_cli.environments import NamedEnvironment\n"
        "NamedEnvironment('CartPole-v1', None, {})()\nassert find_spec('mujoco')\n"
        "NamedEnvironment(None, 'robot:make', {})()"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "MuJoCo: deprecated\n")


def test_an_unstable_simulation_writes_no_file_into_the_current_directory(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    script = (
        "import mujoco; from gym_trace_cli.environments import NamedEnvironment\n"
        "env = NamedEnvironment('InvertedPendulum-v5', None, {})().unwrapped\n"
        "env.data.qpos[:] = 1e20\n"
        "mujoco.mj_step(env.model, env.data)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "")
    assert "MuJoCo: Nan, Inf or huge value in QPOS" in done.stderr
    assert list(tmp_path.iterdir()) == []
