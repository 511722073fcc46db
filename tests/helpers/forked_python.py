"""Start Python processes quickly: fork them from a server that has imported what tests use.

Popen and run replace those of subprocess for `python [-W error] -c CODE …` and `python FILE …`; each process has its
own __main__ and exit. Use subprocess itself for tests that depend on imports, memory or settings of a process.
"""

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import io
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import warnings
from pathlib import Path
from types import CodeType
from typing import Any

HELPERS = str(Path(__file__).parent)
_SERVER = """
import forked_python
code = forked_python.serve()
del forked_python
try:
    exec(code)
finally:
    __import__("sys").modules["forked_python"].end()
"""


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """Request a process from the server instead of starting one; the server reports its exit status."""

    def _execute_child(self, args: Any, *given: Any) -> None:
        cwd, environ, session, pipes = given[4], given[5], given[20], given[9:15]
        asked = {
            "words": [os.fspath(word) for word in args[1:]],
            "cwd": os.path.abspath(cwd or "."),
            "environ": dict(os.environ if environ is None else environ),
            "session": bool(session),
        }
        streams = [own if fd == -1 else fd for own, fd in enumerate((pipes[0], pipes[3], pipes[5]))]
        self._keeper, theirs = _pair()
        with theirs:
            socket.send_fds(_server(os.getpid(), os.fspath(args[0])), [b"."], [theirs.fileno(), *streams])
        self._keeper.send(json.dumps(asked).encode())
        self.pid = int(self._keeper.recv(99))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def __exit__(self, kind: Any, *raised: Any) -> None:
        if kind is not None:  # do not wait for a process that a failed test has left
            self.kill()
        super().__exit__(kind, *raised)

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if flags and not select.select([self._keeper], [], [], 0)[0]:
            return 0, 0
        with self._keeper:
            return self.pid, int(self._keeper.recv(99))

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and (told := self._try_wait(os.WNOHANG))[0]:
            self._handle_exitstatus(told[1])  # type: ignore[attr-defined]
        return self.returncode


if not sys.platform.startswith("linux"):
    Popen = subprocess.Popen  # type: ignore[misc, assignment]


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(type=socket.SOCK_SEQPACKET)


def run(
    command: Any, *, capture_output: bool = False, timeout: float = 100, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[Any]:
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        finally:
            process.kill()
    done = subprocess.CompletedProcess(command, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


@functools.lru_cache(2)
def _server(_: int, python: str) -> socket.socket:
    """Return the socket of this process's server for an interpreter; the server ends when the socket is closed."""
    ours, theirs = _pair()
    path = os.pathsep.join([HELPERS, *filter(None, [os.environ.get("PYTHONPATH")])])
    with theirs:
        server = subprocess.Popen(
            [python, "-c", _SERVER, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": path},
            cwd="/",
        )

    def end() -> None:
        ours.close()
        server.wait()

    atexit.register(end)
    return ours


# -- in the server ----------------------------------------------------------------------------------------------------


def serve() -> CodeType:
    """Fork a process per request. Returns only in these processes, with the code to execute."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _import_all()
    gc.freeze()
    asking = socket.socket(fileno=int(sys.argv[1]))
    while True:
        told, fds, *_ = socket.recv_fds(asking, 1, 4)
        if not told:
            os._exit(0)
        if not os.fork():
            break
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    asking.close()
    with socket.socket(fileno=fds[0]) as keeper:
        asked = json.loads(keeper.recv(1 << 20))
        if child := os.fork():
            _keep(child, keeper, fds[1:])
    for own, fd in enumerate(fds[1:]):
        os.dup2(fd, own)
        os.close(fd)
    return _born(**asked)


def _import_all() -> None:
    """Import packages; skip those that are missing or too old."""
    from gym_trace_cli import progress
    from gym_trace_cli.main import COMMANDS

    import gym_trace

    commands = [f"gym_trace_cli.{module}" for module, *_ in COMMANDS.values()]
    for module in (
        "hypothesis",
        "pytest",
        "scripted_env",
        "gymnasium.wrappers",
        "gymnasium.envs.classic_control",
        "gym_trace.tools.viewer.server",
        *commands,
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    progress._PLAIN_SECONDS = math.inf  # on a busy machine any command may take long enough to print its progress
    for name in set(gym_trace.__all__) - {
        "play",
        "plot_episodes",
        "plot_runs",
        "query",
        "train",
    }:  # it starts threads, which a fork must not inherit
        with contextlib.suppress(ImportError):
            getattr(gym_trace, name)
    sys.path.remove(HELPERS)


def _keep(child: int, keeper: socket.socket, fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    keeper.send(b"%d" % child)
    status = os.waitpid(child, 0)[1]
    with contextlib.suppress(OSError):  # the client is gone
        keeper.send(b"%d" % status)
    os._exit(0)


def _born(words: list[str], cwd: str, environ: dict[str, str], session: bool) -> CodeType:
    """Set this process up like a newly started one."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if session:
        os.setsid()
        if os.isatty(0):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    encoding = environ.get("PYTHONIOENCODING", "utf-8")
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding)
    output = io.BufferedWriter(io.FileIO(1, "w", closefd=False))
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(output, encoding, line_buffering=os.isatty(1))
    while words[0] == "-W":
        warnings.simplefilter(words[1])  # type: ignore[arg-type]
        sys.warnoptions.append(words[1])
        words = words[2:]
    sys.path[1:1] = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        return compile(words[1], "<string>", "exec")
    sys.argv = words
    sys.path[0] = os.path.dirname(words[0])
    sys.modules["__main__"].__file__ = words[0]
    return compile(Path(words[0]).read_bytes(), words[0], "exec")


def end() -> None:
    """End this process as Python does, except that modules are not cleared: that takes 80 ms.

    Returns if an exception other than SystemExit is raised: Python prints it.
    """
    raised = sys.exc_info()[1]
    if not isinstance(raised, (SystemExit, type(None))):
        return
    status = raised.code if raised else 0
    if not isinstance(status, (int, type(None))):
        print(status, file=sys.stderr)
        status = 1
    raised = None
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    vars(sys.modules["__main__"]).clear()
    gc.collect()  # warns of files that are still open
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((status or 0) & 255)
