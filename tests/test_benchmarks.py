"""The benchmarks measure and report; the tests check no speeds."""

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gymnasium.wrappers.vector")  # vector environments are measured, too

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the modules of benchmarks/ importable for one test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield
    for name in set(sys.modules) - before:
        if BENCHMARKS.as_posix() in Path(getattr(sys.modules[name], "__file__", None) or "").as_posix():
            del sys.modules[name]


def worked(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first line and the answers of a worker for gym-trace."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "worker.py"), "gym-trace"],
        input="".join(json.dumps({"limit": 60, **task}) + "\n" for task in tasks),
        capture_output=True,
        text=True,
        timeout=120,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_worker_records_and_reads_cartpole_and_measures_the_floors(tmp_path: Path) -> None:
    place = {"workload": "cartpole", "directory": str(tmp_path)}
    hello, recorded, read, sizes = worked(
        [
            {"kind": "record", "steps": 200, "seconds": 0.1, "floors": True, "scale": 0.01, **place},
            {"kind": "read", "seconds": 0.1, "repeat": 0, "floors": True, **place},
            {"kind": "sizes", **place},
        ]
    )
    assert "gymnasium" in hello["versions"]
    assert recorded["steps"] == read["steps"] == 200
    assert recorded["bytes"] == sum(path.stat().st_size for path in (tmp_path / "recording").iterdir())
    assert set(recorded["floors"]) == {"empty", "ring", "canned"}
    assert not (tmp_path / "canned").exists()
    episodes = read["episodes"]
    assert 0 < episodes["steps"] <= 200 * episodes["count"]
    row = 4 * 4 + 8 + 8  # bytes of an observation, an action and a reward
    assert episodes["bytes"] == episodes["steps"] * row + episodes["count"] * 16
    assert episodes["seconds"] > 0 < episodes["copied"]
    assert set(read["floors"]) == {"decompress", "decode"}
    assert read["size"] > 200 * 16
    assert 0 < sizes["xz -9"] < recorded["bytes"] / 200


def test_a_worker_counts_readable_steps_of_a_killed_recording(tmp_path: Path) -> None:
    place = {"workload": "cartpole", "directory": str(tmp_path)}
    _, killed, counted = worked([{"kind": "kill", "seconds": 1.0, **place}, {"kind": "count", **place}])
    assert 0 < counted["readable"] <= killed["stepped"] + 1  # the last step may be readable before it is counted


def test_a_worker_continues_after_an_unsupported_task(tmp_path: Path) -> None:
    place = {"workload": "blink", "directory": str(tmp_path), "seconds": 0.1, "floors": False}
    _, failed, recorded = worked([{"kind": "read", "repeat": 0, **place}, {"kind": "record", "steps": 30, **place}])
    assert failed["error"].startswith("TraceNotFound")
    assert recorded["steps"] == 30


LOOP = {"wall": 0.002, "cpu": 0.002, "finish": 0.0001, "peak": 50.0}
RECORDED = {
    "steps": 1000, "raw": {"wall": 0.001, "cpu": 0.001}, "recorded": {**LOOP, "memory": 1.0}, "bytes": 16_000,
    "floors": {"empty": 1e-7, "ring": 5e-7, "canned": 8e-7},
}  # fmt: skip
READ = {
    "open": 0.001, "steps": 1000, "size": 16_000, "first": 0.01, "again": 0.001, "memory": 1.0,
    "floors": {"decompress": 0.0001, "decode": 0.001}, "window": 0.1, "rewards": 0.001,
    "episodes": {"p50": 0.0001, "p99": 0.001, "count": 10, "steps": 500, "bytes": 2_000_000,
                 "seconds": 0.004, "copied": 0.0016},
}  # fmt: skip
RESULTS = {
    "machine": {"cpu": "a processor", "cores": 2, "memory": 8, "system": "Linux"}, "date": "2026-01-01",
    "command": "make bench", "repeats": 1, "scale": 1.0, "seconds": 60, "startup": {"gym-trace --version": 0.05},
    "versions": {"gym-trace": {"Python": "3.11"}, "npz": {"numpy": "2"}, "minari-hdf5": {}},
    "notes": {"gym-trace": "", "npz": "", "minari-hdf5": ""},
    "missing": {"envlogger": "needs another Python"},
    "recording": {"cartpole": {"gym-trace": [RECORDED], "npz": [RECORDED], "minari-hdf5": [{"error": "it broke"}]}},
    "reading": {"cartpole": {"gym-trace": [READ], "npz": [READ], "minari-hdf5": []}},
    "kill": {"gym-trace": [{"stepped": 100, "seconds": 2.0, "readable": 75}],
             "npz": [{"stepped": 100, "seconds": 2.0, "error": "nothing there"}]},
    "opening": {"npz": {"1000": [{"seconds": 0.5, "episodes": 1000}]}},
    "sizes": {"cartpole": {"zstd -19": 15.0, "xz -9": 14.0}},
    "growth": {"runs": {str(n): [{"recorded": RECORDED, "read": READ}] for n in (1000, 10_000)},
               "batches": {"sealing": [0.003] * 20, "between": []}},
}  # fmt: skip


@pytest.mark.usefixtures("benchmarks")
def test_the_report_lists_every_contestant_and_reasons_for_missing_ones(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import report
    from contestants import TITLES

    report.write(copy.deepcopy(RESULTS), tmp_path)
    text = (tmp_path / "RESULTS.md").read_text()
    tables = {part.split("\n", 1)[0]: part for part in text.split("\n## ")}
    for title in TITLES.values():
        assert title in tables["Recording"]
        assert title in tables["Contestants"]
    assert "needs another Python" in text
    assert "failed: it broke" in text
    assert "measured elsewhere" in tables["Recording"]  # gym_recording was not installed
    assert "0.50 (0.50 – 0.50)" in tables["Killed"]
    assert "everything: nothing there" in tables["Killed"]
    assert {"recording.svg", "growth.svg"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.usefixtures("benchmarks")
def test_a_missed_aim_is_reported() -> None:
    from aims import aims
    from figures import Figures

    results = copy.deepcopy(RESULTS)
    results["recording"]["pong"] = {"gym-trace": [{**RECORDED, "bytes": 80_000}]}
    results["reading"]["pong"] = {"gym-trace": [READ]}
    found = {aim.text: aim for aim in aims(Figures(results))}
    assert found["CartPole: at most 0.4 µs added per step"][1:] == ("1.00 µs", "**no**")
    assert found["size: within 1.4 times of xz -9 of the same columns"][1:] == ("cartpole 1.14", "yes")
    repeated = "Pong: at most 1.5 times copying into a ring, both on repeated rows"
    assert found[repeated][1:] == ("1.60", "**no**")
    copied = "a random episode of images: within 2 times of copying its bytes in memory"
    assert found[copied][1:] == ("pong 2.50", "**no**: pong")
    assert found["Pong: at most 90 bytes per frame"][1:] == ("80.0 bytes", "yes")
    assert found["1,024 CartPoles: at most 60 ns added per step of a lane"][1:] == ("not measured", "–")


@pytest.mark.usefixtures("benchmarks")
def test_the_report_shows_random_access_per_step_beside_a_copy_in_memory() -> None:
    from figures import Figures
    from tables import playback

    text = "\n".join(playback(Figures(copy.deepcopy(RESULTS)), "cartpole"))
    head, _, *rows = [line.split(" | ") for line in text.splitlines() if line.startswith("|")]
    assert {len(row) for row in rows} == {len(head)}
    ours = dict(zip(head, rows[0]))
    assert ours["µs per step"] == "8.00"  # mean over all episode lengths
    copied = next(row for row in rows if "copying" in row[0])
    assert (rows[0][7], copied[7]) == ("0.50", "1.25")  # GB/s


@pytest.mark.usefixtures("benchmarks")
def test_results_of_an_earlier_run_can_be_reported() -> None:
    from aims import aims
    from figures import Figures
    from tables import playback, recording

    figures = Figures(json.loads((BENCHMARKS / "results.json").read_text()))
    assert any(aim.holds == "yes" for aim in aims(figures))
    for name in figures.results["recording"]:
        assert "gym-trace" in "".join((*recording(figures, name), *playback(figures, name)))


def test_the_viewer_is_measured(
    benchmarks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("starlette")
    import viewing as measured

    options = ["--only", "episodes", "steps", "memory", "--episodes", "50", "--steps", "2000"]
    options += ["--seconds", "0.2", "--gigabytes", "0.002"]
    monkeypatch.setattr(sys, "argv", ["viewing.py", *options])
    measured.main()
    told = capsys.readouterr().out
    assert "50 episodes: server up after" in told
    assert "1 episode of 2,000 steps" in told
    assert "16 at random" in told


def test_the_memory_of_a_follower_is_measured() -> None:
    options = ["--seconds", "0.5", "--lines", "1", "--only", "lanes"]
    command = [sys.executable, str(BENCHMARKS / "following.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    looks, last = done.stdout.splitlines()
    assert "new process" in looks
    assert last.startswith("lanes: flat")


@pytest.mark.usefixtures("benchmarks")
def test_the_report_of_a_device_has_medians_and_the_name_of_the_card() -> None:
    from device import report

    text = report(
        {
            "card": "NVIDIA H100", "date": "2026-01-01", "machine": {"cpu": "a processor", "cores": 16},
            "versions": {"PyTorch": "2.11"}, "batches": {"windows": 8.04},
            "steps": [{"library": "PyTorch", "step": "light", "lanes": 4096, "recorded": 40,
                       "us": {"bare": [200.0, 210.0, 900.0], "packed": [400.0], "side": [1.0], "recorded": [2.0]}}],
            "rollouts": [{"library": "JAX", "steps": 128, "lanes": 4096, "bytes": 154e6, "sustained": 1.25,
                          "seconds": {"collect": [0.003], "copy": [0.01], "write": [0.1], "close": [0.5]}}],
            "checked": [{"library": "JAX", "episodes": 5224, "wrong": 0}],
        }
    )  # fmt: skip
    assert "NVIDIA H100 with 16 cores (a processor; PyTorch 2.11)" in text
    assert "| PyTorch | light | 40 of 4,096 | 210 | 400 | 1 | 2 | – |" in text
    assert "| JAX, 128 x 4,096 | 154 | 3.0 | 10.0 | 100.0 | 1.25 |" in text
    assert "| windows | 8.0 |" in text
    assert "0 of 5,224 (JAX)" in text


def test_the_script_for_a_device_runs_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    options = ["--device", "cpu", "--output", str(tmp_path)]
    command = [sys.executable, str(BENCHMARKS / "device.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "device.json").read_text())
    assert results["steps"]
    assert not any(row["wrong"] for row in results["checked"])
    assert all(row["episodes"] > 40 for row in results["checked"])  # some ended while they were recorded


def test_the_model_of_scale_predicts_the_requests_of_a_pushed_trace(benchmarks: None) -> None:
    import scale_model

    small = scale_model.Trace(steps=30_000, writers=1000, episode=30, hours=0)
    assert scale_model.predictions(small)["open"].requests == 4  # three pages of the listing, and manifests.index
    large = scale_model.Trace(steps=1e10, writers=1000, episode=500, hours=24)
    assert large.compacted().batches < large.batches / 50
    title, _, *rows = scale_model.table("as recorded", large, 0.03, 1e8).splitlines()
    assert title.startswith("| as recorded: 20,000,000 episodes, 144,000 batches, 160 GB |")
    assert [row.count("|") for row in rows] == [7] * len(scale_model.predictions(large))
