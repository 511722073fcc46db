"""Lets everything that reads traces loose on the forgeries, each in a process of its own, and measures what it takes.

    python tests/helpers/hostile_run.py [WORD …]

prints a table: the forgeries whose names have these words, bytes on the disk, what came of it, seconds, memory.
"""

import collections
import contextlib
import functools
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import command_lines
import fuzz_reader
import gymnasium  # noqa: F401 - once, for all
import hostile_files  # noqa: F401 - more forgeries
from click.testing import CliRunner
from gym_trace_cli.main import COMMANDS, cli
from hostile_forgeries import FORGERIES, Place, outside_of, sound_trace

from gym_trace import import_trace, open_trace, verify_trace
from gym_trace.data import packing
from gym_trace.errors import MissingExtra, TraceError
from gym_trace.exchange.formats.registry import importer_named, importers
from gym_trace.format import columns as decoding
from gym_trace.format import manifest, wire

MEMORY, SECONDS = 3 << 30, 20  # limits: memory of a process, processor time for one action
EXIT_CODES = (0, 1, 3, 4, 5)
# It is wrong usage to ask for one of these.
NOTHING_THERE = ("the trace has 0 episodes", "no episode to save", "has no infos", "has 0 steps", "has ended there")
COMMAND_LINES = (
    *(tuple(one.words("TRACE", "SOUND", "REPAIRED")) for one in command_lines.LINES if one.reads),
    ("info", "TRACE", "--json"),
    ("stats", "TRACE", "--columns"),
    ("verify", "TRACE"),
    ("diff", "SOUND", "TRACE", "--json"),
    ("edit", "filter", "TRACE", "-o", "REPAIRED", "--episodes", "::2"),
    ("edit", "split", "TRACE", "-o", "REPAIRED", "--by", "writer"),
    ("edit", "compact", "TRACE", "-o", "REPAIRED"),
    ("edit", "drop", "TRACE", "-o", "REPAIRED", "--columns", "infos"),
    ("edit", "add", "TRACE", "-o", "REPAIRED", "x=operator:attrgetter"),
    ("ls", "TRACE", "--where", "return > 1 or steps > 2"),
    ("cat", "TRACE"),
    ("sql", "TRACE", "SELECT outcome, sum(reward) FROM steps JOIN episodes USING (episode) GROUP BY ALL"),
)


class Result(NamedTuple):
    """Result of reading a forgery.

    said: outcomes with how often, or what went wrong. acted: what has changed that was not to.
    """

    name: str
    bytes: int
    said: dict[str, int]
    failures: list[str]
    acted: list[str]
    seconds: float
    peak: int


@functools.cache
def import_all() -> None:
    """Import once what commands and importers need, and not in the process of every forgery."""
    for module, *_ in COMMANDS.values():
        importlib.import_module(f"gym_trace_cli.{module}")
    for name in importers():
        with contextlib.suppress(MissingExtra):
            importer_named(name, {})


def run(names: list[str], scratch: Path, lines: tuple[tuple[str, ...], ...] = COMMAND_LINES) -> Iterator[Result]:
    """lines: the commands that read each."""
    import_all()
    sound = scratch / "sound"
    sound_trace(sound)
    outside_of(Place(sound, scratch / "outside"))
    for name in names:
        place = Place(scratch / name / "trace", scratch / name / "outside")
        (scratch / name / "here").mkdir(parents=True)
        shutil.copytree(sound, place.trace)
        shutil.copytree(scratch / "outside", place.outside)
        forged, _ = _in_a_process(lambda place=place, name=name: FORGERIES[name](place) and None)
        assert forged is None, f"{name} was not forged: {forged}"
        yield _measured(name, place, sound, lines)
        shutil.rmtree(scratch / name)


def _measured(name: str, place: Place, sound: Path, lines: tuple[tuple[str, ...], ...]) -> Result:
    before = {**_seen(place.trace), **_seen(place.outside)}
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told, usage = _in_a_process(lambda: _read(place, sound, lines))
    after = {**_seen(place.trace), **_seen(place.outside)}
    acted = sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
    acted += [str(path) for path in (place.trace.parent / "here").iterdir()]
    failures, said = told if isinstance(told, list) else ([f"ended: {told}"], {})
    seconds = usage.ru_utime + usage.ru_stime
    return Result(name, on_disk(place.trace), said, failures, acted, seconds, max(0, usage.ru_maxrss - base) << 10)


def _in_a_process(work: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the result of work in a forked process, or how it ended without one, and its resource usage."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(reading)
            with open(writing, "w") as pipe:
                json.dump(work(), pipe)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with open(reading) as pipe:
        text = pipe.read()
    _, status, usage = os.wait4(child, 0)
    return (json.loads(text) if text else f"status {os.waitstatus_to_exitcode(status)}"), usage


def _read(place: Place, sound: Path, lines: tuple[tuple[str, ...], ...]) -> list[Any]:
    """Failures, and what came of all that reads the trace."""
    os.chdir(place.trace.parent / "here")
    sys.path.insert(0, str(place.trace))  # where a module waits to be imported
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGPROF, _too_slow)
    # A million episodes, or lists, take their time, honest or not: limits are a fraction here, and so is the time.
    wire.TABLE_ROWS >>= 4
    for module in (decoding, manifest, packing):
        module.MAX_CONTAINERS >>= 6  # type: ignore[attr-defined]
    sys.stdin = open(os.devnull)  # noqa: SIM115
    failures: list[str] = []
    said: collections.Counter[str] = collections.Counter()
    repaired = place.trace.parent / "repaired"

    def attempt(what: str, call: Callable[[], Any]) -> None:
        begin = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            said.update(call() or ())
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            where = "; ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
            failures.append(f"{what}: {error!r:.300} ({where})")
        if os.environ.get("HOSTILE_VERBOSE"):
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            print(f"  {what}: {time.process_time() - begin:.2f} s, {peak} MB so far", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        attempt("read", lambda: fuzz_reader.read_everything(place.trace, repaired, sound))
        attempt("verify", lambda: _or_error("verify", lambda: list(verify_trace(place.trace))))
        attempt("make", lambda: _or_error("make", lambda: open_trace(place.trace).make_env().close()))
        attempt("import", lambda: _or_error("import", lambda: import_trace(place.trace, repaired)))
        shutil.rmtree(repaired, ignore_errors=True)
        for line in lines:
            if line[0] in COMMANDS:
                attempt(" ".join(line), lambda line=line: _command(line, place.trace, sound, repaired))
    signal.setitimer(signal.ITIMER_PROF, 0)
    return [failures, said]


def _or_error(name: str, call: Callable[[], Any]) -> dict[str, int]:
    try:
        call()
    except TraceError as error:
        if not is_printable(str(error)):
            raise AssertionError(f"prints {error!r:.200}") from error
        return {f"{name}: {type(error).__name__}": 1}
    return {f"{name}: fine": 1}


def _command(line: tuple[str, ...], trace: Path, sound: Path, repaired: Path) -> dict[str, int]:
    names = {"TRACE": str(trace), "SOUND": str(sound), "REPAIRED": str(repaired)}
    words = [
        word.replace("REPAIRED", names["REPAIRED"]) if "REPAIRED" in word else names.get(word, word) for word in line
    ]
    found = CliRunner().invoke(cli, words)
    shutil.rmtree(repaired, ignore_errors=True)
    nothing = found.exit_code == 2 and any(words in found.output for words in NOTHING_THERE)
    assert nothing or found.exit_code in EXIT_CODES, f"exit code {found.exit_code}: {found.output[-300:]!r}"
    assert "--debug shows the traceback" not in found.output, found.output[-300:]
    assert is_printable(found.output), f"prints {[c for c in found.output if not c.isprintable() and c != chr(10)][:5]}"
    return {f"{line[0]}: exit code {found.exit_code}": 1}


def is_printable(text: str) -> bool:
    return all(part.isprintable() for part in text.split("\n"))


def on_disk(directory: Path) -> int:
    """Bytes that the files of a directory take, at least one block each."""
    return sum(max(512, path.lstat().st_blocks * 512) for path in directory.rglob("*"))


def _seen(directory: Path) -> dict[str, Any]:
    def of(path: Path) -> Any:
        status = path.lstat()
        return status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino

    return {str(path): of(path) for path in [directory, *directory.rglob("*")]}


def _too_slow(*_: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def main() -> None:
    names = [name for name in FORGERIES if not sys.argv[1:] or any(word in name for word in sys.argv[1:])]
    with tempfile.TemporaryDirectory(prefix="hostile-") as scratch:
        print(f"{'forgery':75} {'kB':>8} {'s':>6} {'MB':>6}  outcome", flush=True)
        for result in run(names, Path(scratch)):
            errors = sorted({what.rpartition(": ")[2] for what in result.said} - {"fine"})
            outcome = "; ".join([*result.failures, *(f"ACTED on {path}" for path in result.acted)]) or ", ".join(errors)
            figures = f"{result.bytes // 1000:8} {result.seconds:6.1f} {result.peak >> 20:6}"
            print(f"{result.name.replace('_', ' '):75} {figures}  {outcome}", flush=True)


if __name__ == "__main__":
    main()
