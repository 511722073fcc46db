"""Old recordings: those in sample_traces, and such as tests write."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from gym_trace import check_trace, import_trace, load_results, scan_recorded_traces

LEGACY = Path(__file__).parents[2] / "sample_traces" / "legacy"
RECORDINGS = ["gym_recording-json/CartPole-v0", "gym_recording-json/Pixels", "gym_recording-npy/CartPole-v0"]
MONITOR = LEGACY / "monitor-0.9.7"
Episodes = list[tuple[Any, Any, Any]]


def import_episodes(path: Path, target: Path) -> Episodes:
    """Import a recording, check the trace, and return the arrays of its episodes."""
    import_trace(path, target)
    assert check_trace(target).damages == []
    episodes: Episodes = []
    scan_recorded_traces(target, lambda *arrays: episodes.append(arrays))
    return episodes


def copy_of(name: str, path: Path) -> Path:
    shutil.copytree(LEGACY / name, path)
    return path


class LegacyRecorder:
    """Writes what gym_recording wrote, of any era: "bare" arrays with order and size, or whole records of np.save."""

    def __init__(self, path: Path, era: str = "bare"):
        self.path, self.era = path, era
        self.batches: list[dict[str, Any]] = []
        path.mkdir()

    def batch(self, *episodes: dict[str, Any], **said: Any) -> Path:
        name = f"openaigym.trace.0.7.ep{len(self.batches):09}"
        with open(self.path / f"{name}.bin", "wb") as file:

            def encode(array: Any) -> dict[str, Any]:
                offset = file.tell()
                reference = {"__type": "ndarray", "shape": array.shape, "dtype": str(array.dtype)}
                reference |= {"npyfile": f"{name}.bin", "npyoff": offset}
                if self.era == "npy":
                    np.save(file, array)
                    return reference
                file.write(array.tobytes())
                return reference | ({"order": "C", "size": file.tell() - offset} if self.era == "bare" else {})

            text = json.dumps({"episodes": episodes}, default=encode)
        (self.path / f"{name}.json").write_text(text)
        self.batches.append({"fn": f"{name}.json", **said})
        (self.path / "openaigym.trace.0.7.manifest.json").write_text(json.dumps({"batches": self.batches}))
        return self.path / f"{name}.json"


def rows(observations: Any, steps: int | None = None) -> dict[str, Any]:
    """An episode of such observations, whose actions and rewards do not matter."""
    steps = len(observations) - 1 if steps is None else steps
    return {"observations": observations, "actions": np.arange(steps), "rewards": np.ones(steps)}


def results(directory: Path) -> dict[str, Any]:
    """Return the result of load_results without the list of files."""
    found = load_results(directory)
    assert all(Path(path).parent == directory for path in found["manifests"])
    return {key: value for key, value in found.items() if key != "manifests"}


def write_monitor(directory: Path, infix: str = "0.7", **stats: Any) -> None:
    manifest = {key: stats.pop(key) for key in ("env_info", "videos") if key in stats}
    directory.mkdir(exist_ok=True)
    name = f"openaigym.episode_batch.{infix}.stats.json"
    (directory / name).write_text(json.dumps(stats))
    (directory / f"openaigym.manifest.{infix}.manifest.json").write_text(json.dumps({"stats": name, **manifest}))
