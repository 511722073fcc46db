"""The wheel, as a user gets it."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from itertools import chain
from pathlib import Path

import c_header
import pytest
from long_tests import LONG
from packaging.requirements import Requirement

import gym_trace
from gym_trace.recording import core

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("wheel")
    compiler = tmp_path_factory.mktemp("bin") / "cc"
    compiler.write_text('#!/bin/sh\nexec cc "$@" -O0\n')  # takes a quarter of the time
    compiler.chmod(0o755)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=ROOT,
        env={**os.environ, "CC": str(compiler)},
        check=True,
        capture_output=True,
    )
    (built,) = out.glob("*.whl")
    return built


def test_the_header_of_the_c_sources_has_the_constants_of_python() -> None:
    written = (ROOT / "gym_trace" / "format" / "c_kernels" / "constants.h").read_text(encoding="utf-8")
    assert written == c_header.header(), "run python tests/helpers/c_header.py > gym_trace/format/c_kernels/constants.h"


def test_the_wheel_installs_two_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        top = {name.partition("/")[0] for name in archive.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"gym_trace", "gym_trace_cli"}


def test_pytest_finds_the_plugin_of_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (entries,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        told = archive.read(entries).decode()
    assert "[pytest11]\ngym_trace = gym_trace.pytest_plugin\n" in told


def built(tmp_path: Path, **environ: str) -> tuple[Path, str]:
    """Build a wheel with other environment variables; return it with the output of the build."""
    pytest.importorskip("hatchling")
    ran = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, **environ},
        check=True,
        capture_output=True,
        text=True,
    )
    (path,) = tmp_path.glob("*.whl")
    return path, ran.stdout + ran.stderr


def libraries_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if name.endswith((".so", ".c", ".h"))]


def test_the_wheel_has_the_core_where_it_can_be_compiled(wheel: Path) -> None:
    libraries = libraries_in(wheel)
    if core.CORE == "compiled":
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        assert sorted(libraries) == [f"gym_trace/{name}{suffix}" for name in ("format/_kernels", "recording/_core")]
        assert f"-cp{sys.version_info[0]}{sys.version_info[1]}-" in wheel.name
    else:
        assert libraries == [] or "-py3-none-any" not in wheel.name


@pytest.mark.parametrize(
    "environ",
    [{"GYM_TRACE_PURE": "1"}, {"CC": "no-such-compiler"}, *([{"CFLAGS": "-nostdinc"}] if LONG else [])],
    ids=["asked", "no-cc", *(["no-headers"] if LONG else [])],
)
def test_without_a_compiler_the_wheel_is_pure_python_and_says_so_in_a_line(
    environ: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "tmp").mkdir()
    wheel, said = built(tmp_path, TMPDIR=str(tmp_path / "tmp"), **environ)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert wheel.name.endswith("-py3-none-any.whl")
    assert libraries_in(wheel) == []
    (line,) = [line for line in said.splitlines() if "no C core" in line]
    assert "pure Python" in line


def test_the_installed_command_runs_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    # The dependencies are the ones that are here: what is tested is what the wheel itself installs.
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            "install",
            "--no-deps",
            "--no-index",
            "--no-compile",
            wheel,
        ],
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


def test_the_declared_dependencies_are_six_and_backports() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    block = text[text.index("\ndependencies = [") : text.index("[project.optional-dependencies]")]
    lines = [line.strip().strip('",') for line in block.splitlines() if line.startswith("    ")]
    assert [line for line in lines if ";" in line] == ["tomli>=2; python_version < '3.11'"]
    names = {line.partition(">")[0] for line in lines if ";" not in line}
    assert names == {"click", "gymnasium", "msgpack", "numpy", "rich", "zstandard"}


def test_extras_need_the_releases_that_the_page_on_security_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted: dict[str, set[str]] = {}
    for line in chain(project["dependencies"], *project["optional-dependencies"].values()):
        one = Requirement(line)
        wanted.setdefault(one.name, set()).update(part.version for part in one.specifier if part.operator == ">=")
    page = (ROOT / "docs" / "reference" / "security.md").read_text(encoding="utf-8")
    table = page[page.index("| oldest release |") : page.index("h5py 3.16 bundles")]
    rows = re.findall(r"^\| `([\w-]+)` \| ([^|]+) \|", table, re.MULTILINE)
    assert len(rows) > 5
    for name, told in rows:
        assert wanted[name] == set(re.findall(r"[\d.]+", re.sub(r"Python [\d.]+", "", told))), name


def test_the_citation_names_the_version_and_licence_of_the_package() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {gym_trace.__version__}\n" in citation
    assert "\nlicense: MIT\n" in citation


def test_the_tests_with_other_packages_find_all_that_they_import() -> None:
    """They run with an ini file of their own, from environments that few have."""
    ini = ROOT / "tests" / "strangers/pytest.ini"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-c", str(ini), str(ini.parent)]
    collected = subprocess.run(command, capture_output=True, text=True)
    assert collected.returncode == 0, collected.stdout


def test_every_fragment_of_the_changelog_has_a_kind() -> None:
    kinds = {
        kind["directory"] for kind in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
    }
    for name in {path.name for path in (ROOT / "changes").iterdir()} - {
        "README.md"
    }:  # towncrier skips other names without a word
        assert (found := re.fullmatch(r"(\d+|\+[\w-]+)\.(\w+)\.md", name)), name
        assert found[2] in kinds, name


def test_workflows_and_contributing_name_targets_that_the_makefile_has() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    workflows = [path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    named = re.findall(r"^ +- run: make ([\w-]+)", "\n".join(workflows), re.M)
    assert len(named) == len(re.findall(r"\brun:", "\n".join(workflows)))  # no step runs anything else
    contributing = re.findall(r"^ {4}make ([\w-]+)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M)
    assert {*named, *contributing} <= targets


READY = {
    "gym_trace/__init__.py": '__version__ = "1.2.3"\n',
    "CITATION.cff": "version: 1.2.3\n",
    "CHANGELOG.md": "## 1.2.3 (2026-01-01)\n",
    "changes/README.md": "hf://datasets/OWNER/NAME\n",
}


@pytest.mark.parametrize(
    ("changed", "tag", "lacks"),
    [
        ({}, "v1.2.3", ""),
        ({}, "", ""),
        ({}, "v1.2.4", "the tag v1.2.4 is not v1.2.3"),
        ({"SECURITY.md": "write to security@OWNER.example\n"}, "", "SECURITY.md:1:write to"),
        ({"README.md": "https://github.com/OWNER/gym-trace\n"}, "", "README.md:1:https"),
        ({"changes/+new.added.md": "It is new.\n"}, "", "changes/ has fragments"),
        ({"CHANGELOG.md": "## 1.2.30 (2026-01-01)\n"}, "", "CHANGELOG.md has no entry of 1.2.3"),
        ({"CITATION.cff": "version: 1.2.2\n"}, "", "CITATION.cff has another version"),
    ],
)
def test_a_release_names_what_it_lacks(changed: dict[str, str], tag: str, lacks: str, tmp_path: Path) -> None:
    for name, text in (READY | changed).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    script = [shutil.which("bash") or "bash", str(ROOT / "tests" / "release.sh")]
    ran = subprocess.run(script, cwd=tmp_path, env={**os.environ, "TAG": tag}, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (1 if lacks else 0, "")
    assert lacks in ran.stdout
    assert lacks or not ran.stdout
