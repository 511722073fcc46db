"""An interpreter that has gym-trace and what it depends on, and none of its extras."""

import shlex
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
OURS = {"gym_trace": ROOT / "gym_trace", "gym_trace_cli": ROOT / "cli" / "gym_trace_cli"}
_COMMAND = "from gym_trace_cli.start import main; main('gym-trace')"


def make_bare(directory: Path) -> str:
    """Make the directory with the interpreter, and gym-trace beside it; return the interpreter's path."""
    packages, tools = directory / "packages", directory / "bin"
    packages.mkdir()
    tools.mkdir()
    for package in _needed("gym-trace", {}).values():
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__", *OURS}:
            (packages / top).symlink_to(Path(str(package.locate_file(top))))
    for name, source in OURS.items():
        (packages / name).symlink_to(source)
    path = f"PYTHONPATH={shlex.quote(str(packages))}${{PYTHONPATH:+:$PYTHONPATH}}"
    interpreter = f"{path} exec {shlex.quote(sys.executable)} -S"  # -S: without the packages that are installed here
    for name, arguments in (("python", ""), ("gym-trace", f'-c "{_COMMAND}"')):
        (tools / name).write_text(f'#!/bin/sh\n{interpreter} {arguments} "$@"\n')
        (tools / name).chmod(0o755)
    return str(tools / "python")


def _needed(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """Return a distribution and those that it needs, without extras, by name."""
    if name not in found:
        found[name] = distribution(name)
        for requirement in map(Requirement, found[name].requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                _needed(requirement.name, found)
    return found
