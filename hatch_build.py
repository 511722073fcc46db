"""Compiles the C core where that is possible. Where it is not the wheel is pure Python, and does the same, slower.

python hatch_build.py FOLDER compiles it for this interpreter and puts it there, with what CFLAGS and LDFLAGS say.
"""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
HOME = ROOT / "gym_trace" / "recording"
SOURCE = HOME / "c_core" / "core.c"
FILE = "_core" + (sysconfig.get_config_var("EXT_SUFFIX") or ".so")

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by itself
    BuildHookInterface = object


class CoreBuildHook(BuildHookInterface):
    """Adds the compiled core to a wheel, or puts it beside its source for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        in_place = HOME / FILE
        if version == "editable":
            in_place.unlink(missing_ok=True)
        try:
            built = compiled(tempfile.mkdtemp(prefix="gym-trace-core-"))
        except Unavailable as reason:
            self.app.display_warning(f"gym-trace: no C core ({reason}); pure Python does the same, slower")
            return
        if version == "editable":
            os.replace(_beside(built, in_place), in_place)  # a process may be using the one of before
        else:
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
            build_data["force_include"][str(built)] = f"gym_trace/recording/{FILE}"


class Unavailable(Exception):
    """Why there is no C core."""


def compiled(folder: str) -> Path:
    """The shared library, compiled into a folder. Raises Unavailable."""
    if os.environ.get("GYM_TRACE_PURE", "0") not in ("", "0"):
        raise Unavailable("GYM_TRACE_PURE is set")
    if platform.python_implementation() != "CPython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise Unavailable("it is for CPython with its lock")
    if sys.byteorder != "little" or os.name != "posix":
        raise Unavailable("it is for little-endian POSIX systems")
    try:
        import numpy
        from setuptools import Distribution, Extension
    except ImportError as error:
        raise Unavailable(str(error)) from error
    if int(numpy.__version__.partition(".")[0]) < 2:
        raise Unavailable("the headers of NumPy 2 are needed; they serve all versions from 1.24 on")
    extension = Extension(
        "_core", [str(SOURCE)], include_dirs=[numpy.get_include()], extra_compile_args=["-fvisibility=hidden", "-g0"]
    )
    build = Distribution({"name": "gym-trace-core", "ext_modules": [extension]}).get_command_obj("build_ext")
    build.build_lib, build.build_temp = folder, os.path.join(folder, "objects")
    try:
        build.ensure_finalized()
        build.run()
    except (Exception, SystemExit) as error:  # of any kind, such as that there is no compiler
        raise Unavailable(" ".join(str(error).split()) or type(error).__name__) from error
    return Path(folder, FILE)


def _beside(built: Path, target: Path) -> Path:
    """A copy of a file in the folder of another one, from where it can be renamed."""
    copy = target.with_name(f".{target.name}.{os.getpid()}")
    copy.write_bytes(built.read_bytes())
    copy.chmod(0o755)
    return copy


if __name__ == "__main__":
    try:
        print(compiled(os.path.abspath(sys.argv[1])))
    except Unavailable as reason:
        sys.exit(f"no C core: {reason}")
