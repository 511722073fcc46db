"""Traces of real environments for all files, and the table of versions at the end."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from traces import REAL, record_real

sys.path.append(str(Path(__file__).parents[1] / "helpers"))  # for what the other tests share

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
os.environ.setdefault("MUJOCO_GL", "disable")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

# Packages of each file, whose versions are printed; by default the one that the file is named after.
_PACKAGES = {
    "arrow": ["ray", "polars", "pandas", "dask", "daft", "pyspark", "pyarrow"],
    "d4rl": ["h5py"],
    "lance": ["pylance", "lancedb", "stable-worldmodel"],
    "mcap": ["mcap"],
    "parquet": ["duckdb", "polars", "pandas", "pyspark", "pyarrow", "ray"],
    "rerun": ["rerun-sdk"],
    "rldata": ["mcap", "rerun-sdk"],
    "rlds": ["tensorflow-datasets", "tensorflow-cpu"],
    "ray_engine": ["ray"],
    "rllib": ["ray"],
    "sample_factory": ["sample-factory"],
    "sb3": ["stable-baselines3"],
    "simulators_hdf5": ["robosuite", "robomimic", "mani_skill", "sapien", "mujoco"],
    "train_targets": ["rlax", "torchrl"],
    "vector_jax": ["jax"],
}
_ALWAYS = ("gymnasium", "numpy", "h5py", "pyarrow", "torch")


def _formats() -> list[str]:
    return sorted(path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py"))


def pytest_configure(config: pytest.Config) -> None:
    for name in _formats():
        config.addinivalue_line("markers", f"{name}: all tests of test_{name}.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(item.path.stem.removeprefix("test_"))


@pytest.fixture(scope="session")
def record(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """record("Pong") is the directory of the trace traces.REAL["Pong"]. It is not to be changed."""
    made: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in made:
            made[name] = record_real(name, tmp_path_factory.mktemp("real") / name)
        return made[name]

    return directory


@pytest.fixture(params=REAL)
def real(request: pytest.FixtureRequest, record: Callable[[str], Path]) -> Path:
    """The directory of a trace of each of the real environments."""
    return record(request.param)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "–"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    files = {report.nodeid.partition("::")[0] for key in ("passed", "failed", "skipped", "error")
             for report in terminalreporter.getreports(key)}  # fmt: skip
    formats = sorted(file.rpartition("/")[2].removeprefix("test_").removesuffix(".py") for file in files)
    terminalreporter.section("other people's loaders")
    write = terminalreporter.write_line
    write(f"Python {platform.python_version()}, " + ", ".join(f"{name} {_version(name)}" for name in _ALWAYS))
    for name in formats:
        counts = {key: sum(f"test_{name}.py" in report.nodeid for report in terminalreporter.getreports(key))
                  for key in ("passed", "failed", "error", "skipped")}  # fmt: skip
        told = ", ".join(f"{count} {key}" for key, count in counts.items() if count)
        packages = [package for package in _PACKAGES.get(name, [name]) if package != "conformance"]
        versions = ", ".join(f"{package} {_version(package)}" for package in packages)
        write(f"{name:12} {versions}: {told}")
