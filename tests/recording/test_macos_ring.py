"""The ring on macOS, whose system calls are faked by the layouts of its headers; the mapping is that of this system."""

import ctypes
import errno
import logging
import os
import resource
import signal
import struct
import sys
from pathlib import Path

import pytest
from runs import acted
from scripted_env import CountingEnv

from gym_trace import TraceRecordingWrapper, open_trace
from gym_trace.format.ring import memory
from gym_trace.storage import exchange
from gym_trace.storage.local import LocalStorage


class LibSystem:
    """statfs() and sysctlbyname() of macOS, for a file system of a type and a boot."""

    def __init__(self, kind: bytes, boot: str = "6F9619FF-8B86-D011-B42D-00CF4FC964FF"):
        self.kind, self.boot = kind, boot.encode() + b"\0"

    def statfs(self, path: bytes, out: ctypes.Array[ctypes.c_char]) -> int:
        if not os.path.exists(path):
            ctypes.set_errno(errno.ENOENT)
            return -1
        # <sys/mount.h>: sizes, counts, ids, flags, type, mount point, device, reserved
        found = struct.pack(
            "=Ii5Q2i4I16s1024s1024s8I", *range(1, 14), self.kind, b"/Volumes/data", b"/dev/disk3s5", *[9] * 8
        )
        assert len(found) == len(out)
        ctypes.memmove(out, found, len(found))
        return 0

    def sysctlbyname(self, name: bytes, out: ctypes.Array[ctypes.c_char], *_: object) -> int:
        if name != b"kern.bootsessionuuid" or len(out) < len(self.boot):
            ctypes.set_errno(errno.ENOENT)
            return -1
        ctypes.memmove(out, self.boot, len(self.boot))
        return 0


def on_macos(monkeypatch: pytest.MonkeyPatch, system: LibSystem) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    monkeypatch.setattr(exchange, "_libsystem", lambda: system)
    monkeypatch.setattr(memory, "BOOT_ID", memory._boot_id())


@pytest.mark.parametrize("kind", [b"apfs", b"hfs"])
def test_a_killed_process_on_macos_loses_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: bytes) -> None:
    on_macos(monkeypatch, LibSystem(kind))
    if (child := os.fork()) == 0:
        try:
            env = TraceRecordingWrapper(CountingEnv(), tmp_path)
            acted(env, "reset", *[1] * 7)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (ring,) = tmp_path.glob("*.ring")
    assert ring.stat().st_blocks * 512 >= ring.stat().st_size  # no page waits for its block
    assert sum(map(len, open_trace(tmp_path))) == 7

    on_macos(monkeypatch, LibSystem(kind, "11111111-8B86-D011-B42D-00CF4FC964FF"))  # restarted: pages may be lost
    assert sum(map(len, open_trace(tmp_path))) == 0


@pytest.mark.parametrize("system", [LibSystem(b"smbfs"), LibSystem(b"apfs", "")], ids=["share", "no boot id"])
def test_no_ring_where_macos_cannot_keep_or_date_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, system: LibSystem
) -> None:
    on_macos(monkeypatch, system)
    with caplog.at_level(logging.WARNING, "gym_trace"):
        acted(TraceRecordingWrapper(CountingEnv(), tmp_path), "reset", 1, "close")
    assert "can lose the last second" in caplog.text
    assert [len(episode) for episode in open_trace(tmp_path)] == [1]


def test_a_disk_without_space_for_the_ring_raises_on_macos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_macos(monkeypatch, LibSystem(b"apfs"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            memory.Ring(LocalStorage(tmp_path), "w", memory.ROWS, {}, 2, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
