"""Run the examples of a page in order, in one directory, and compare what they print with what the page shows.

    python tests/helpers/snippets.py PAGE ...

A page has fenced blocks:

- ```bash: each command runs by itself. One that ends in `# exit code N` must exit with N, others with 0.
- ```python: a program of its own; warnings are errors, unless it needs a package.
- ```text after one of these: its output, stdout and stderr together. `…` stands for any text.
- A block with `title="NAME"`: a file of that name, which is written and not run.

A comment before a block, `<!-- needs: torch, gymnasium>=1.1 -->`, skips it (and its output) where one of these packages
is not installed. `<!-- not run: REASON -->` skips it always. Other languages are not run.
"""

import functools
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import forked_python
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_traces"
_COMMANDS = {  # how an interpreter runs them
    "gym-trace": ("-c", "from gym_trace_cli.main import cli; cli(prog_name='gym-trace')"),
    "pytest": ("-c", "import pytest; raise SystemExit(pytest.main())"),
    "python": (),
}
_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>needs|not run): (?P<about>[^\n]*) -->\n\n?)?"
    r"(?P<indent> *)```(?P<language>bash|python|text|toml|json)(?: +title=\"(?P<title>[^\"]+)\")?[^\n]*\n"
    r"(?P<code>.*?)^(?P=indent)```$",
    re.M | re.S,
)
_SHELL = re.compile(r"[|&;<>$`*?~]")
# Kills as the command does, but sooner, and not before something is recorded, which takes longer on a busy machine.
_TIMEOUT = """
timeout() {
  touch .began
  local seconds=$3
  shift 3
  "$@" &
  while kill -0 $! && [ -z "$(find . -name '*.manifest.jsonl' -newer .began)" ]; do sleep 0.1; done 2>/dev/null
  sleep "0.$seconds"
  kill -KILL $!
  wait $! 2>/dev/null
}
"""
_CODE = re.compile(r"\s+# exit code (\d+)$")


class Block(NamedTuple):
    """A fenced block. line: from 1. needs: requirements of packages; None: never run."""

    line: int
    language: str
    title: str | None
    code: str
    needs: tuple[str, ...] | None = ()

    @property
    def is_runnable(self) -> bool:
        return self.needs is not None and all(map(is_installed, self.needs))


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a Markdown text."""
    for found in _BLOCK.finditer(page):
        needs: tuple[str, ...] | None = ()
        if found["mark"]:
            needs = tuple(one.strip() for one in found["about"].split(",")) if found["mark"] == "needs" else None
        line = page.count("\n", 0, found.start("code"))
        yield Block(line, found["language"], found["title"], textwrap.dedent(found["code"]), needs)


@functools.cache
def is_installed(requirement: str) -> bool:
    wanted = Requirement(requirement)
    try:
        return wanted.specifier.contains(importlib.metadata.version(wanted.name), prereleases=True)
    except importlib.metadata.PackageNotFoundError:
        return False


def run_page(path: Path, directory: Path, python: str = sys.executable) -> int:
    """Run the examples of a page in a directory; return the number of blocks that ran. Raises AssertionError.

    python: the interpreter, which has gym-trace beside it.
    """
    if not (directory / SAMPLES.name).exists():
        (directory / SAMPLES.name).symlink_to(SAMPLES)  # as in a clone
    ran, printed = 0, None
    for block in blocks(path.read_text(encoding="utf-8")):
        where = f"{path.name}:{block.line}"
        if block.title is not None:
            if block.needs is not None:
                (directory / block.title).parent.mkdir(parents=True, exist_ok=True)
                (directory / block.title).write_text(block.code, encoding="utf-8")
        elif block.language == "text":
            if printed is not None:
                assert matches(printed, block.code), f"{where}: expected\n{block.code}\nprinted\n{printed}"
            printed = None
        elif block.language in ("bash", "python"):
            printed = None
            if block.is_runnable:
                if block.language == "python":
                    printed = _python(block, directory, where, python)
                else:
                    printed = _bash(block.code, directory, where, python)
                ran += 1
    return ran


def matches(printed: str, expected: str) -> bool:
    """Compare texts without spaces at the ends of lines; `…` in the expected one stands for any text."""
    parts = [re.escape(part) for part in _trimmed(expected).split("…")]
    return re.fullmatch(".*?".join(parts), _trimmed(printed), re.S) is not None


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def _bash(code: str, directory: Path, where: str, python: str) -> str:
    return "".join(_command(line, directory, where, python) for line in commands(code))


def commands(code: str) -> Iterator[str]:
    for line in re.sub(r"\\\n\s*", "", code).splitlines():
        if line.strip() and not line.startswith("#"):
            yield line


def _command(line: str, directory: Path, where: str, python: str) -> str:
    ended = _CODE.search(line)
    line = _CODE.sub("", line)
    simple = shlex.split(line, comments=True)
    if simple[0] in _COMMANDS and not _SHELL.search(re.sub(r"'[^']*'", "", line)):
        return _ran([python, *_COMMANDS[simple[0]], *simple[1:]], python, directory, f"{where}: {line}", ended)
    prelude = _TIMEOUT if line.startswith("timeout -s KILL ") else ""
    return _ran(["bash", "-c", prelude + line], python, directory, f"{where}: {line}", ended)


def _python(block: Block, directory: Path, where: str, python: str) -> str:
    (directory / "program.py").write_text(block.code.replace("\n    ...", "\n    pass"), encoding="utf-8")
    warnings = "ignore" if block.needs else "error"  # packages warn of each other
    command = [python, "-W", warnings, "program.py"]
    return _ran(command, python, directory, where, None, starts_processes="__main__" in block.code)  # they import it


def _ran(
    words: list[str],
    python: str,
    directory: Path,
    where: str,
    ended: re.Match[str] | None,
    starts_processes: bool = False,
) -> str:
    run = forked_python.run if words[0] == python and not starts_processes else subprocess.run
    done = run(
        words,
        cwd=directory,
        env=_environment(directory, python),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    expected = int(ended[1]) if ended else 0
    code = done.returncode if done.returncode >= 0 else 128 - done.returncode  # as in a shell
    assert code == expected, f"{where}: exit code {code}, not {expected}\n{done.stdout}"
    return str(done.stdout)


def _environment(directory: Path, python: str) -> dict[str, str]:
    tools = os.path.dirname(python)
    environ = {
        **os.environ,
        "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}",
        "GYM_TRACE_CACHE": str(directory / ".cache"),
        "MINARI_DATASETS_PATH": str(directory / "datasets"),
        "COLUMNS": "100",
        "NO_COLOR": "1",
    }
    environ.pop("PYTHONPATH", None)
    return environ


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as scratch:
            print(f"{name}: {run_page(Path(name), Path(scratch))} blocks ran")
