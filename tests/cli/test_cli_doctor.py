"""gym-trace doctor finds what is planted: broken packages, a full disk, file systems without rings, missing extras."""

import errno
import getpass
import importlib
import importlib.metadata
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gym_trace_cli import doctor
from gymnasium.envs.classic_control import CartPoleEnv
from packaging.requirements import Requirement
from shell import ok, run, strict_json

from gym_trace.storage import local


def findings(directory: Path, code: int = 0, section: str = "findings") -> dict[str, Any]:
    result = run("doctor", directory, "--json")
    assert result.exit_code == code, result.output
    found = strict_json(result.stdout)
    assert found["works"] is (code == 0)
    return {finding["name"]: finding for finding in found[section]}


def without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a package look as if it were not installed."""
    version = importlib.metadata.version

    def fails(asked: str) -> str:
        if asked == name:
            raise importlib.metadata.PackageNotFoundError(asked)
        return version(asked)

    monkeypatch.setattr(importlib.metadata, "version", fails)


def test_a_working_place_is_reported_without_private_names(tmp_path: Path) -> None:
    output = ok("doctor", tmp_path).output
    assert "\nok     recording " in output
    assert output.endswith("\nrecording works here\n")
    assert max(map(len, output.splitlines())) < 200
    assert len(output.splitlines()) <= 40
    for private in (str(tmp_path), socket.gethostname(), os.getcwd()):
        assert private not in output
    assert getpass.getuser() not in output.split()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["nfs4", ""])
def test_a_file_system_without_rings_is_named(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_file_system", lambda _: kind)
    found = findings(tmp_path)
    assert found["recording"]["state"] == "ok"
    assert found["ring"]["state"] == "no"
    assert found["ring"]["found"] == f"no safe memory-mapped files on {kind or 'an unknown file system'}"
    assert "record into a local directory" in found["ring"]["advice"]


def test_a_platform_without_rings_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    assert findings(tmp_path)["ring"]["found"].endswith("cannot reserve disk space for a file")


def test_a_full_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    found = findings(tmp_path, code=1)
    assert found["recording"]["state"] == "broken"
    assert "No space left on device" in found["recording"]["found"]
    assert str(tmp_path) not in str(found)
    assert list(tmp_path.iterdir()) == []


def test_a_simulator_that_replays_differently_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reset, generator = CartPoleEnv.reset, np.random.default_rng(1)

    def unseeded(self: CartPoleEnv, **options: Any) -> Any:
        reset(self, **options)
        self.state = generator.uniform(-0.01, 0.01, 4)
        return np.array(self.state, np.float32), {}

    monkeypatch.setattr(CartPoleEnv, "reset", unseeded)
    assert findings(tmp_path, code=1)["recording"]["state"] == "broken"


def test_a_package_that_cannot_be_imported_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_module = importlib.import_module

    def broken(name: str) -> Any:
        if name == "msgpack":
            raise ImportError("undefined symbol: PyFloat_Pack8")
        return import_module(name)

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    found = findings(tmp_path, code=1)
    assert "ImportError: undefined symbol: PyFloat_Pack8" in found["packages"]["found"]
    assert found["packages"]["advice"] == "pip install --upgrade --force-reinstall msgpack"
    assert found["recording"]["state"] == "broken"


def test_a_package_that_is_too_old_or_missing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without("rich", monkeypatch)
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.9.5" if name == "numpy" else version(name))
    found = findings(tmp_path, code=1)["packages"]
    assert found["found"] == "needs numpy 1.24 (found 1.9.5), rich"
    assert found["advice"].endswith(" numpy rich")


def test_a_missing_extra_has_its_install_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without("pyarrow", monkeypatch)
    found = findings(tmp_path, section="extras")["parquet"]
    assert (found["state"], found["found"]) == ("no", "needs pyarrow")
    assert found["advice"] == "pip install 'gym-trace[parquet]'"


def test_extras_and_their_packages_are_those_of_the_metadata(tmp_path: Path) -> None:
    wanted = {
        (extra, one.name)
        for one in map(Requirement, importlib.metadata.requires("gym-trace") or ())
        for extra in ["", *(importlib.metadata.metadata("gym-trace").get_all("Provides-Extra") or ())]
        if (one.marker.evaluate({"extra": extra}) if one.marker else extra == "")
        and not (extra and one.marker and one.marker.evaluate({"extra": ""}))
    }
    assert {(extra, name) for extra, name, _ in doctor._requirements()} == wanted
    assert {"sql", "train", "view"} < findings(tmp_path, section="extras").keys()
    assert "dev" not in findings(tmp_path, section="extras")


def test_missing_git_says_what_traces_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = findings(tmp_path)["git"]
    assert (found["state"], found["found"]) == ("no", "not found")
    assert found["advice"].endswith("install git")


def test_a_directory_outside_of_repositories_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(doctor, "_recording", lambda _: (doctor.Finding("recording", "ok", ""), True, None))
    found = findings(tmp_path)["git"]
    assert found["state"] == "no"
    assert found["found"].endswith("no commit here")


def test_credentials_are_named_and_their_values_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("hidden")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "hidden")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    output = ok("doctor", tmp_path).output
    assert "credentials in AWS_ACCESS_KEY_ID, ~/.aws/credentials\n" in output
    assert "hidden" not in output


def test_a_gpu_that_a_library_does_not_see_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_GPU_FILES", (str(tmp_path),))
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9" if name == "jax" else version(name))
    monkeypatch.setitem(doctor._GPU_LIBRARIES, "jax", "print(False)")
    found = findings(tmp_path)["GPU"]
    assert found["found"].startswith("not seen by jax")
    monkeypatch.setitem(doctor._GPU_LIBRARIES, "jax", "print(True)")
    monkeypatch.delitem(doctor._GPU_LIBRARIES, "torch")
    assert findings(tmp_path)["GPU"]["state"] == "ok"


@pytest.mark.parametrize(("shell", "state"), [("/bin/zsh", "ok"), ("/bin/tcsh", "no"), ("", "no")])
def test_the_line_for_completion_is_that_of_the_shell(
    shell: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHELL", shell)
    found = findings(tmp_path)["shell"]
    assert found["state"] == state
    assert ("_GYM_TRACE_COMPLETE=zsh_source" in found["found"]) is (state == "ok")


def test_little_space_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_FREE", 1 << 80)
    assert findings(tmp_path)["disk"]["advice"] == "make space, or record elsewhere"


def test_a_directory_that_does_not_exist_is_wrong_usage(tmp_path: Path) -> None:
    result = run("doctor", tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "nowhere: no such directory" in result.stderr
