"""Contents of a disk at a power loss: copies of an ext4 file system, taken while a recording is writing to it.

Such a copy has what the file system had handed to its device, and nothing of what the kernel still held back.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import forked_python
import pytest
from long_tests import LONG

from gym_trace import check_trace, open_trace, verify_trace
from gym_trace.format.ring import memory

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mounts a file as a disk")

MEGABYTES = 24
# ext4 frees the space of removed rings only later: many copies would fill the disk.
COPIES = {"flush": 50, "close": 10} if LONG else {"flush": 4, "close": 4}
VICTIM = """
import sys
import gymnasium
from gym_trace import TraceRecordingWrapper

directory, way, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])

def wrapped():
    return TraceRecordingWrapper(gymnasium.make("CartPole-v1"), directory, fsync=way == "flush", on_exist="append")

env, steps = wrapped(), 0
env.action_space.seed(0)
env.reset(seed=0)
while True:
    for _ in range(rows):
        *_, terminated, truncated, _ = env.step(env.action_space.sample())
        steps += 1
        if terminated or truncated:
            env.reset()
    if way == "flush":
        env.flush()
    else:
        env.close()
        env = wrapped()
        env.action_space.seed(steps)
        env.reset(seed=steps)
    print(steps, flush=True)
"""


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[Path], Path]]:
    """Mounts the image of a disk."""
    places: list[Path] = []

    def mount(image: Path) -> Path:
        place = tmp_path / f"disk-{len(places)}"
        place.mkdir()
        if subprocess.run(["mount", "-o", "loop", image, place], capture_output=True, check=False).returncode:
            pytest.skip("cannot mount a file")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", place], check=True)


def as_it_is(image: Path, place: Path, to: Path) -> Path:
    """A copy of the disk that is mounted there, made at a moment at which nothing is written to it."""
    (device,) = (line.split()[0] for line in Path("/proc/mounts").read_text().splitlines() if f" {place} " in line)
    told = Path("/sys/block", Path(device).name, "stat")
    while True:
        before = told.read_text()
        shutil.copyfile(image, to)
        if told.read_text() == before:
            return to


@pytest.mark.parametrize("way", COPIES)
def test_flushed_and_closed_steps_survive_a_power_loss(
    way: str, mounted: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("there is no mkfs.ext4")
    image, chance = tmp_path / "disk", random.Random(way)
    image.write_bytes(b"")
    os.truncate(image, MEGABYTES << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    place = mounted(image)
    found = []
    with forked_python.Popen(
        [sys.executable, "-c", VICTIM, place / "t", way, "30"], stdout=subprocess.PIPE, text=True
    ) as victim:
        assert victim.stdout is not None
        try:
            for number in range(COPIES[way]):
                for _ in range(chance.randrange(1, 5)):
                    steps = int(victim.stdout.readline())
                time.sleep(chance.uniform(0, 0.02))
                victim.send_signal(signal.SIGSTOP)
                found.append((steps, as_it_is(image, place, tmp_path / f"copy-{number}")))
                victim.send_signal(signal.SIGCONT)
        finally:
            victim.kill()
    monkeypatch.setattr(memory, "BOOT_ID", bytes(16))  # it is another one when the power is back
    for steps, disk in found:
        directory = mounted(disk) / "t"
        assert check_trace(directory).damages == []
        assert sum(map(len, open_trace(directory))) >= steps
        assert {verdict.verdict for verdict in verify_trace(directory)} == {"identical"}
