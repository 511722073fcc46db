"""The house rules that imports and sources can show: who knows whom, and what is never used."""

import ast
import functools
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import gym_trace

NAME = re.compile(r"gym_trace(\.\w+)+")
HOUSE = Path(gym_trace.__file__).parent
COMMANDS = HOUSE.parent / "cli" / "gym_trace_cli"

# From the bottom up: a package imports from those before its own, and from itself without a circle.
PACKAGES = [
    {"printable", "errors", "on_first_use", "plugins"},
    {"data"},
    {"storage"},
    {"format"},
    {"envs"},
    {"playback"},
    {"recording"},
    {"tools"},
    {"training"},
    {"exchange"},
    {  # public paths
        *("dm_env", "edit", "formats", "linting", "pettingzoo", "proof", "pytest_plugin", "replay", "replay_env"),
        *("results", "targets", "testing", "viewer", "wrappers"),
    },
]
EXCHANGING = "storage.exchange"  # which asks the C library for what Python does not offer
PACKING = {"format.wire", "format.ring.memory", "format.ring.log", "format.ring.row_slab"}
NEVER_LOADED = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "ctypes"}
BEHIND_STORAGE = {"format", "playback", "integrity", "statistics"}
FILE_CALLS, PATH_CALLS = {"open", "os.open", "os.rename"}, {"exists", "is_file", "iterdir", "scandir", "stat", "unlink"}
NEVER_CALLED = {"eval", "exec", "compile", "__import__", "breakpoint", "print"}


@functools.cache
def sources() -> list[Path]:
    return sorted(HOUSE.rglob("*.py"))


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))))


def module_of(path: Path) -> str:
    parts = path.relative_to(HOUSE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


@functools.cache
def imports_of(path: Path) -> list[str]:
    """The absolute names of all that is imported anywhere in a file: in functions, and by its name in a string."""
    found: list[str] = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are absolute"
            found += (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value):
            found += [node.value]
    return found


@functools.cache
def modules() -> set[str]:
    return {module_of(path) for path in (*sources(), *HOUSE.rglob("*.pyi"))} - {""}  # .pyi: those in C


@functools.cache
def own_imports_of(path: Path) -> set[str]:
    """The modules of the library that a file imports, without the library's name."""
    found = set()
    for name in imports_of(path):
        if name.startswith("gym_trace."):
            inner = name.removeprefix("gym_trace.")
            while inner and inner not in modules():
                inner = inner.rpartition(".")[0]
            found.add(inner)
    return found - {""}


def place_of(module: str) -> int:
    """The number of a module's package."""
    package = module.partition(".")[0]
    found = [number for number, packages in enumerate(PACKAGES) if package in packages]
    assert found, f"gym_trace.{module} is in none of the packages of {Path(__file__).name}"
    return found[0]


def test_packages_import_from_those_to_their_left() -> None:
    for path in sources():
        module = module_of(path)
        if module not in ("", "__main__"):  # the public names, and the command line, are above all
            for imported in own_imports_of(path):
                assert place_of(imported) <= place_of(module), f"{module} must not import {imported}"


def test_no_module_knows_itself_by_a_detour() -> None:
    graph = {module_of(path): own_imports_of(path) - {module_of(path)} for path in sources() if module_of(path)}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def test_the_library_knows_nothing_of_the_command_line_or_of_pickles() -> None:
    for path in sources():
        tops = {name.partition(".")[0] for name in imports_of(path)}
        if path.stem != "__main__":  # which is the command line by another name
            assert not tops & {"click", "rich", "gym_trace_cli"}, path
        assert not tops & NEVER_LOADED - ({"ctypes"} if module_of(path) == EXCHANGING else set()), path
        if module_of(path) not in PACKING:
            assert "struct" not in tops, f"{path}: only {PACKING} pack bytes"


def test_no_source_text_is_run_and_nothing_is_printed() -> None:
    for path in sources():
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in NEVER_CALLED, f"{path}, line {node.lineno}"
            if isinstance(node, ast.keyword):
                assert node.arg != "allow_pickle", f"{path}, line {node.value.lineno}"


def test_files_of_traces_are_touched_by_a_storage_only() -> None:
    for path in (path for path in sources() if path.parent.name in BEHIND_STORAGE):
        for node in nodes_of(path):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in FILE_CALLS, f"{path}, line {node.lineno}"
                assert called.rpartition(".")[2] not in PATH_CALLS, f"{path}, line {node.lineno}"


def test_no_module_is_called_utils() -> None:
    assert not [path for path in [*sources(), *COMMANDS.rglob("*.py")] if path.stem in ("utils", "helpers", "common")]


def modules_after(script: str) -> set[str]:
    shown = f"{script}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True, timeout=60)
    return {part for name in done.stdout.split() for part in (name, name.partition(".")[0])}


def test_importing_the_library_loads_nothing_else() -> None:
    loaded = modules_after("import gym_trace")
    assert not loaded & {"gymnasium", "numpy", "msgpack", "zstandard", "click", "rich", "pygame", "mujoco", "ale_py"}


def test_reading_loads_no_gymnasium() -> None:
    loaded = modules_after("import gym_trace; gym_trace.open_trace, gym_trace.scan_recorded_traces")
    assert "numpy" in loaded
    assert not loaded & {"gymnasium", "click", "rich", "http", "ssl", "fsspec", "pyarrow"}


def test_opening_a_directory_loads_no_modules_of_urls() -> None:
    directory = Path(__file__).parents[1] / "sample_traces/format-1.3/minigrid"
    loaded = modules_after(f"import gym_trace; gym_trace.open_trace({str(directory)!r})")
    assert "gym_trace.storage.protocol" in loaded
    assert not loaded & {"gym_trace.storage.remote.objects", "asyncio", "concurrent", "logging", "multiprocessing"}


def test_classes_of_results_load_no_pyarrow() -> None:
    assert "pyarrow" not in modules_after("import gym_trace.results")


def test_recording_loads_no_optional_package() -> None:
    loaded = modules_after("import gym_trace; gym_trace.TraceRecordingWrapper")
    assert "gymnasium" in loaded
    assert not loaded & {
        "click",
        "rich",
        "pygame",
        "mujoco",
        "ale_py",
        "minigrid",
        "torch",
        "jax",
        "ssl",
        "fsspec",
        "pyarrow",
        "pettingzoo",
        "dm_env",
    }


def test_recording_imports_nothing_within_a_step() -> None:
    """An exception of a signal handler would leave the module half imported."""
    script = """
import sys, tempfile
import gymnasium
from gymnasium import spaces
import gym_trace
class Talking(gymnasium.Env):
    observation_space = spaces.Dict({"said": spaces.Text(8), "at": spaces.Box(-1, 1, (2,))})
    action_space = spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}
    def step(self, action):
        return self.observation_space.sample(), 1.0, False, False, {"a": 1}
env = gym_trace.TraceRecordingWrapper(Talking(), tempfile.mkdtemp(), record_infos=True, flush_seconds=0.01)
env.reset(seed=0)
before = set(sys.modules)
for _ in range(3000):
    env.step(0)
late = {name for name in set(sys.modules) - before if name.partition(".")[0] in ("numpy", "gym_trace", "gymnasium")}
assert not late, late
env.close()
"""
    assert modules_after(script)


@pytest.mark.parametrize("name", sorted({*gym_trace.__all__, "train"}))
def test_public_names_exist_and_are_documented(name: str) -> None:
    thing = getattr(gym_trace, name)
    assert thing.__doc__
    assert name in dir(gym_trace)
    if isinstance(thing, type):
        for member, value in vars(thing).items():
            if not member.startswith("_") and (callable(value) or isinstance(value, property)):
                assert value.__doc__ or member in thing.__doc__, f"{name}.{member} has no docstring"


def test_a_star_import_needs_no_extra() -> None:
    assert "numpy" in modules_after("from gym_trace import *")


def test_the_public_names_are_all_that_is_listed() -> None:
    assert [name for name in dir(gym_trace) if not name.startswith("__")] == sorted([*gym_trace.__all__, "train"])


def test_a_missing_name_raises_the_usual_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = gym_trace.no_such_name  # type: ignore[attr-defined]


def test_every_error_is_a_trace_error_or_a_warning_and_drawn_in_the_tree() -> None:
    for name in gym_trace.errors.__all__:
        error = getattr(gym_trace.errors, name)
        assert issubclass(error, (gym_trace.errors.TraceError, Warning))
        assert error.__doc__
        assert name in str(gym_trace.errors.__doc__)
