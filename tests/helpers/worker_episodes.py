"""Queries about runs of several processes."""

from pathlib import Path

from gym_trace import open_trace
from gym_trace.envs.seeding import episode_of


def whole_episodes(directory: Path, root: int) -> dict[int, tuple[bytes, ...]]:
    """By number, the bits of each episode that ended; each is there once."""
    trace = open_trace(directory)
    found: dict[int, tuple[bytes, ...]] = {}
    for episode in trace.scan():
        if episode.outcome in ("terminated", "truncated"):
            assert episode.seed is not None
            number = episode_of(root, episode.seed)
            assert number not in found
            found[number] = tuple(
                array.tobytes() for array in (episode.observations, episode.actions, episode.rewards)
            )  # fmt: skip
    return found


def children(process: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == process:
                found.append(int(entry.name))
    return found
