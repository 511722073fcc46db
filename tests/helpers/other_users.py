"""Other users of the machine: what they do in directories that several may write to."""

import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

MINE, HERS = 12345, 12346
needs_users = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs root, to be two users")


@contextmanager
def everybodys_directory() -> Iterator[Path]:
    """A directory in which every user may make and rename files."""
    directory = Path(tempfile.mkdtemp(prefix="gym-trace-users-"))
    try:
        directory.chmod(0o777)
        yield directory
    finally:
        shutil.rmtree(directory)


def as_user(user: int, act: Callable[[], Any], umask: int = 0o022) -> str:
    """Do something as another user; return what it raised, or "". What it imports must have been imported before."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        said = ""
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            os.umask(umask)
            act()
        except BaseException:
            said = traceback.format_exc()
        finally:
            os.write(write, said[-10_000:].encode())
            os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        said = file.read().decode()
    os.waitpid(child, 0)
    return said
