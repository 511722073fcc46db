"""The directory of a run: trace, settings, the log of its updates, checkpoints. Anybody may have written one."""

from __future__ import annotations

import errno
import json
import os
import re
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

from gym_trace.envs.seeding import EPISODES
from gym_trace.errors import CorruptRun, CorruptTrace, InvalidOption, RecordingError, TraceNotFound
from gym_trace.format.manifest import json_of
from gym_trace.model.packing import unpack
from gym_trace.playback.trace import Trace, open_trace
from gym_trace.storage.local import lock, open_regular, refuse_url, size_on_disk
from gym_trace.storage.staging import new_file
from gym_trace.training.rollouts import Origin, RecordedRollouts, Shape
from gym_trace.training.settings import Settings, settings_from

_MOST_ENTRY = 64 << 20  # bytes
_HEAD = 16
_PATIENCE = 60.0  # seconds that a learner has to end after its driver
_MOST_JSON = 16 << 20
_PUT_BACK = "put back a copy, or train anew: events.jsonl has the settings, seed and steps, too"


@dataclass(frozen=True)
class Update:
    """One update: the version that came of it, and what it was made of.

    Attributes:
        rollouts: what was learnt from, in this order. steps: of all updates so far. digest: see Learner.digest().
        told: losses and the like. changed: what the version took over instead of learning, see Learner.adopt().
    """

    version: int
    rollouts: tuple[Origin, ...]
    steps: int
    digest: str
    told: dict[str, float] = field(default_factory=dict)
    changed: dict[str, Any] = field(default_factory=dict)

    def packed(self) -> bytes:
        body = msgpack.packb(
            [self.version, list(map(list, self.rollouts)), self.steps, self.digest, self.told, self.changed]
        )
        framed: bytes = _head(len(body), zlib.crc32(body)) + body
        return framed

    @classmethod
    def unpacked(cls, body: bytes) -> Update:
        """Raises ValueError, TypeError, OverflowError, CorruptTrace."""
        version, rollouts, steps, digest, told, changed = unpack(body)
        origins = tuple(Origin(str(writer), int(first), int(acted)) for writer, first, acted in rollouts)
        if not isinstance(told, dict) or not isinstance(changed, dict):
            raise ValueError("no entry")
        return cls(int(version), origins, int(steps), str(digest), told, changed)


def _head(size: int, checksum: int) -> bytes:
    """Of a body of so many bytes: with it, an array of its size, its checksum and the body, as MessagePack has one.

    That the size is there twice tells an entry that was being written at the end from one whose size was changed.
    """
    return b"\x93\xce%b\xce%b\xc6%b" % tuple(number.to_bytes(4, "big") for number in (size, checksum, size))


class Run:
    """A directory with trace/, run.json, updates.msgpack, checkpoints/, events.jsonl, and done when it is over.

    Attributes:
        path: pathlib.Path.
    """

    def __init__(self, path: str | os.PathLike[str]):
        if not os.path.isdir(path):
            refuse_url(path)
        self.path = Path(path).absolute()
        self.trace = self.path / "trace"
        self.checkpoints = self.path / "checkpoints"
        self._log = self.path / "updates.msgpack"
        self._about = self.path / "run.json"
        self._done = self.path / "done"

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    # -- what it was told ---------------------------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        return self._about.is_file()

    def create(self, settings: Settings, seed: int, **about: Any) -> None:
        """Raises InvalidOption if there is a run, or something else."""
        taken = self.path.exists() and any(self.path.iterdir())
        try:
            if not taken:
                self.trace.mkdir(parents=True)
        except FileExistsError:  # another process was as quick
            taken = True
        if taken:
            what = "go on with it (resume=True, or gym-trace train --resume), or train" if self.exists else "train"
            raise InvalidOption(
                f"{self.path}: there is {'a run' if self.exists else 'something'} already; {what} elsewhere"
            )
        self.checkpoints.mkdir()
        with new_file(self._about) as staged:
            staged.write_text(json.dumps({"settings": settings.plain(), "seed": seed, **about}, indent=1) + "\n")

    @property
    def about(self) -> dict[str, Any]:
        """What run.json says. Raises TraceNotFound, and CorruptTrace: also where a place of the run is a link."""
        try:
            with open(open_regular(self._about, os.O_RDONLY), "rb") as file:
                raw = file.read(_MOST_JSON + 1)
            found = json_of(raw) if len(raw) <= _MOST_JSON else None
        except FileNotFoundError:
            raise TraceNotFound(f"{self.path}: there is no training run here") from None
        except (OSError, ValueError, RecursionError) as error:
            raise CorruptRun(f"cannot be read: {error}", self._about, _PUT_BACK) from error
        for place in (self.trace, self.checkpoints, self._done):
            if place.is_symlink():
                raise _link(place)
        about: dict[str, Any] = found if isinstance(found, dict) else {}
        seed, steps = about.get("seed"), about.get("steps")
        fits = (
            type(seed) is int
            and 0 <= seed < EPISODES
            and (steps is None or (type(steps) is int and 0 < steps < 1 << 62))
        )
        if not fits or not isinstance(about.get("settings"), dict):
            raise CorruptRun("is not what a run says of itself", self._about, _PUT_BACK)
        return about

    @property
    def settings(self) -> Settings:
        try:
            return settings_from(self.about["settings"])
        except InvalidOption as error:
            raise CorruptRun(f"is not what a run says of itself: {error}", self._about, _PUT_BACK) from error

    def trusted_settings(self, trust: bool) -> Settings:
        """Raises InvalidOption if they name a model, which would be imported, and the run is not trusted."""
        settings = self.settings
        if settings.model is not None and not trust:
            raise InvalidOption(
                f"{self.path}: the run names its model, {settings.model}, which would be imported: pass --trust, or "
                "trust=True, if you trust it"
            )
        return settings

    def to_resume(self, environment: dict[str, Any] | None, trust: bool) -> tuple[dict[str, Any], Settings]:
        """What there is to go on with, in this environment if it is said. Raises InvalidOption if there is nothing."""
        about = self.about
        if not about.get("learn", True):
            raise InvalidOption(f"{self.path}: nothing was learnt in this run, so that there is nothing to go on with")
        if environment not in (None, about.get("environment")):
            raise InvalidOption(f"{self.path}: this run trains in {about.get('environment')}, not in {environment}")
        return about, self.trusted_settings(trust)

    # -- how far it is ------------------------------------------------------------------------------------------------

    def updates(self) -> Iterator[Update]:
        """In order, the first being version 0, which is of the seed alone; not one that was being written at the end.

        Raises CorruptTrace where one is damaged or missing.
        """
        for expected, (at, body) in enumerate(self._entries()):
            try:
                update = Update.unpacked(body)
            except (ValueError, TypeError, OverflowError, CorruptTrace) as error:
                raise self._damaged(f"{error} at byte {at}, of the update to version {expected}") from error
            if update.version != expected:
                raise self._damaged(f"version {update.version} follows version {expected - 1}")
            yield update

    def _damaged(self, problem: str) -> CorruptRun:
        return CorruptRun(problem, self._log, f"put back a copy, or {anew(self)}")

    def _entries(self) -> Iterator[tuple[int, bytes]]:
        """Where the body of each begins, and it."""
        try:
            fd = open_regular(self._log, os.O_RDONLY)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._damaged(f"cannot be read: {error.strerror}") from error
        with open(fd, "rb") as file:
            whole, at = self._size(fd), 0
            while len(head := file.read(_HEAD)) == _HEAD:
                size, checksum = int.from_bytes(head[2:6], "big"), int.from_bytes(head[7:11], "big")
                at += _HEAD
                if head != _head(size, checksum) or size > _MOST_ENTRY:
                    raise self._damaged(f"there is no entry at byte {at - _HEAD}")
                if at + size > whole:
                    return
                body = file.read(size)
                if zlib.crc32(body) != checksum:
                    raise self._damaged(f"checksum mismatch of the entry at byte {at - _HEAD}")
                yield at, body
                at += size

    def _size(self, fd: int) -> int:
        """Of the log."""
        try:
            return size_on_disk(fd, self._log)
        except CorruptTrace as error:
            raise self._damaged(error.problem) from error

    def episodes(self, versions: int | slice | None = None, *, collected: bool = False) -> Trace:
        """The episodes with steps that these versions were learnt from, as a view of the trace; None: all versions.

        collected: those whose steps these versions drew, instead. Both as the log has it: of what was collected and not
        learnt from, the annotation "version" of each step tells.

        Raises TraceNotFound, CorruptTrace.
        """
        trace, settings = open_trace(self.trace), self.settings
        shape = Shape.of(trace.observation_space, trace.action_space, settings.rollout, settings.num_envs, 0)
        recorded, found = RecordedRollouts(trace, shape), set[int]()
        log = list(self.updates())
        wanted = slice(None) if versions is None else versions
        chosen = range(len(log))[wanted] if isinstance(wanted, slice) else [range(len(log))[wanted]]
        inside = set(chosen)
        for update in log if collected else (log[version] for version in chosen):
            for origin in update.rollouts:
                if not collected or origin.version in inside:
                    found.update(recorded.episodes_of(origin))
        return trace[sorted(found)]

    def open_log(self) -> BinaryIO:
        """The log, for append(), without an entry that was being written when the run was killed.

        Waits for a learner of before that still saves what it has. Raises OSError, CorruptTrace, InvalidOption.
        """
        fd = open_regular(self._log, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        file = open(fd, "ab", buffering=0)  # noqa: SIM115 - open as long as the learner
        try:
            until = time.monotonic() + _PATIENCE
            while not lock(file.fileno()):
                if time.monotonic() > until:
                    raise InvalidOption(f"{self.path}: a learner of before is still there; wait for it to end")
                time.sleep(0.05)
            count = end = 0
            for at, body in self._entries():
                count, end = count + 1, at + len(body)
            newest = max(self.saved(), default=0)
            if newest >= max(count, 1):
                raise CorruptRun(
                    f"ends before version {newest}, of which there is a checkpoint",
                    self._log,
                    "put back a copy, or remove the checkpoint to go on from here",
                )
            os.ftruncate(file.fileno(), end)
        except BaseException:
            file.close()
            raise
        return file

    def checkpoint(self, version: int) -> Path:
        """Where that of a version is, or would be."""
        return self.checkpoints / f"{version:09d}.safetensors"

    def saved(self) -> list[int]:
        """The versions of which there are checkpoints, in order."""
        found = [re.fullmatch(r"(\d{9})\.safetensors", path.name) for path in self.checkpoints.glob("*.safetensors")]
        return sorted(int(match[1]) for match in found if match)

    @property
    def is_done(self) -> bool:
        return self._done.exists()

    def set_done(self, done: bool) -> None:
        if done:
            os.close(open_regular(self._done, os.O_WRONLY | os.O_CREAT))
        else:
            self._done.unlink(missing_ok=True)


def new_runs(directory: str | os.PathLike[str], count: int) -> list[Run]:
    """Where the runs of so many policies are: one in the directory itself, several in directories in it."""
    path = Path(directory)
    if count == 1:
        return [Run(path)]
    if path.exists() and any(path.iterdir()):
        raise InvalidOption(f"{path}: there is something already; train elsewhere, or resume a run that is there")
    return [Run(path / f"policy-{number}") for number in range(count)]


def runs_in(directory: str | os.PathLike[str]) -> list[Run]:
    """Those of a directory, in the order of the policies: of one, or of several. Raises CorruptTrace for links."""
    path = Path(directory)
    found = [Run(path / f"policy-{number}") for number in range(sum(1 for _ in path.glob("policy-*")))]
    for run in found:
        if run.path.is_symlink():
            raise _link(run.path)
    return found if found and all(run.exists for run in found) else [Run(path)]


def _link(place: Path) -> CorruptRun:
    """The error for a link in a run: what it leads to is no part of the run, and would be written to."""
    return CorruptRun("is a link, which is not followed", place, "put what it leads to in its place")


def anew(run: Run) -> str:
    """What can be done if this one cannot go on."""
    saved = run.saved()
    if not saved:
        return "train anew, elsewhere"
    return f"begin another run with the newest checkpoint: 'gym-trace train ... --from {run.path}@{saved[-1]}'"


def settings_now(run: Run) -> Settings:
    """Those that its last version has: in a population they change."""
    changes = [update.changed["settings"] for update in run.updates() if "settings" in update.changed]
    return settings_from(changes[-1]) if changes else run.settings


def append(log: BinaryIO, update: Update) -> None:
    """Adds it to the log, see Run.open_log(). Raises RecordingError, and leaves the log as it was."""
    entry = update.packed()
    end = os.fstat(log.fileno()).st_size
    try:
        if log.write(entry) != len(entry):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        os.ftruncate(log.fileno(), end)
        raise RecordingError(f"the log of updates cannot be written: {error.strerror}") from error
