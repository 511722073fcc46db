"""Compile the C modules where possible. Elsewhere the wheel is pure Python: the same results, slower.

python hatch_build.py FOLDER compiles them for this interpreter into FOLDER, with CFLAGS and LDFLAGS.
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
# Each module, and its source, below gym_trace.
MODULES = {"recording/_core": "recording/c_core/core.c", "format/_kernels": "format/c_kernels/kernels.c"}
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX") or ".so"

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by itself
    BuildHookInterface = object


class CoreBuildHook(BuildHookInterface):
    """Add the compiled modules to a wheel, or put them beside their sources for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        places = {name: f"gym_trace/{name}{SUFFIX}" for name in MODULES}
        if version == "editable":
            for place in places.values():
                (ROOT / place).unlink(missing_ok=True)
        try:
            self.folder = tempfile.TemporaryDirectory(prefix="gym-trace-core-")
            built = compiled(self.folder.name)
        except Unavailable as reason:
            self.app.display_warning(f"gym-trace: no C core ({reason}); pure Python does the same, slower")
            return
        for name, place in places.items():
            if version == "editable":  # a process may be using the old one
                os.replace(_beside(built[name], ROOT / place), ROOT / place)
            else:
                build_data["force_include"][str(built[name])] = place
        if version != "editable":
            build_data["pure_python"] = False
            build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self.folder.cleanup()


class Unavailable(Exception):
    """Why there is no C core."""


def compiled(folder: str) -> dict[str, Path]:
    """Compile the modules into a folder; return the shared library of each. Raises Unavailable."""
    if os.environ.get("GYM_TRACE_PURE", "0") not in ("", "0"):
        raise Unavailable("GYM_TRACE_PURE is set")
    if platform.python_implementation() != "CPython":
        raise Unavailable(platform.python_implementation())
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise Unavailable("free-threaded CPython")
    if sys.byteorder != "little" or os.name != "posix":
        raise Unavailable("it is for little-endian POSIX systems")
    try:
        import numpy
        from setuptools import Distribution, Extension
    except ImportError as error:
        raise Unavailable(str(error)) from error
    if int(numpy.__version__.partition(".")[0]) < 2:
        raise Unavailable("the headers of NumPy 2 are needed; they serve all versions from 1.24 on")
    options = {"include_dirs": [numpy.get_include()], "extra_compile_args": ["-fvisibility=hidden", "-g0", "-O3"]}
    sources = {Path(name).name: str(ROOT / "gym_trace" / source) for name, source in MODULES.items()}
    extensions = [Extension(name, [source], **options) for name, source in sources.items()]
    build = Distribution({"name": "gym-trace-core", "ext_modules": extensions}).get_command_obj("build_ext")
    build.build_lib, build.build_temp = folder, os.path.join(folder, "objects")
    try:
        build.ensure_finalized()
        build.run()
    except (Exception, SystemExit) as error:  # any error, for example without a compiler
        raise Unavailable(" ".join(str(error).split()) or type(error).__name__) from error
    return {name: Path(folder, Path(name).name + SUFFIX) for name in MODULES}


def _beside(built: Path, target: Path) -> Path:
    """A copy of a file in the folder of another one, from where it can be renamed."""
    copy = target.with_name(f".{target.name}.{os.getpid()}")
    copy.write_bytes(built.read_bytes())
    copy.chmod(0o755)
    return copy


if __name__ == "__main__":
    try:
        print(*compiled(os.path.abspath(sys.argv[1])).values(), sep="\n")
    except Unavailable as reason:
        sys.exit(f"no C core: {reason}")
