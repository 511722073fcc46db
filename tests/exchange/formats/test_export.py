"""export() and import_trace(): what holds for every format, whatever it writes."""

import contextlib
import importlib
import json
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import forked_python
import numpy as np
import pytest
from damage import flip
from forked_python import HELPERS
from legacy_recordings import write_monitor
from long_tests import LONG
from plain_format import Forgetful, PlainExporter, PlainImporter
from runs import chunks_of, record_lengths
from scripted_env import CountingEnv
from shell import ok, run

from gym_trace import TraceRecordingWrapper, check_trace, export, import_trace, open_trace
from gym_trace.errors import (
    InvalidOption,
    MissingExtra,
    RecordingError,
    TraceError,
    TraceExists,
    TraceNotFound,
    UnreadableRecording,
)
from gym_trace.exchange.formats import registry
from gym_trace.exchange.formats.conformance import difference, loaded_from, make_zoo
from gym_trace.exchange.formats.contract import ExportPlan, Loss, Target
from gym_trace.exchange.formats.source import ExportSource
from gym_trace.storage import staging


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_zoo(tmp_path_factory.mktemp("zoo"), ["vectors", "ends", "infos", "parts", "seeds", "flags-within"])


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed distribution with the formats "plain" and "broken", and with one that is called like one of ours."""
    place = tmp_path / "site"
    info = place / "another-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: another\x1b[31m\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[gym_trace.exporters]\nplain = plain_format:PlainExporter\nbroken = no_such_module:Exporter\n"
        "minari = plain_format:PlainExporter\n[gym_trace.importers]\nplain = plain_format:PlainImporter\n"
    )
    monkeypatch.syspath_prepend(place)
    return place


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != "site")


# -- formats ----------------------------------------------------------------------------------------------------------


def test_the_format_of_another_package_is_found_by_its_entry_point(
    traces: dict[str, Path], third_party: Path, tmp_path: Path
) -> None:
    report = export(traces["vectors"], tmp_path / "out", "plain", digits=3)
    assert (report.format, report.episodes, left_in(report.path)[0]) == ("plain", 6, "000.json")
    back = import_trace(report.path, tmp_path / "back")
    assert (back.format, back.episodes, back.steps) == ("plain", 6, report.steps)
    listed = ok("export", "--list").stdout
    assert "\x1b" not in listed
    assert "plain" in listed
    assert "plain" in ok("import", "--list").stdout


def test_no_package_takes_the_name_of_one_of_our_formats(third_party: Path) -> None:
    assert registry.exporters()["minari"].where.startswith("gym_trace.")


def test_a_format_of_another_package_that_cannot_be_loaded_says_why(third_party: Path, traces: dict[str, Path]) -> None:
    with pytest.raises(ImportError, match="no_such_module"):
        export(traces["vectors"], third_party / "out", "broken")


@pytest.mark.parametrize("entries", [registry.exporters, registry.importers])
def test_every_format_loads_or_names_the_package_to_install(entries: Any) -> None:
    make: Any = registry.exporter_named if entries is registry.exporters else registry.importer_named
    for name, entry in entries().items():
        found = f"pip install 'gym-trace[{entry.extra}]'"
        try:
            assert make(name, {}).name == name
        except MissingExtra as missing:
            found = str(missing)
        assert found.endswith(f"pip install 'gym-trace[{entry.extra}]'")


def test_a_missing_package_names_its_pip_command(
    traces: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "needs_package.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    entry = registry.FormatEntry("needs_package:Exporter", "tables", "tables")
    monkeypatch.setattr(registry, "_EXPORTERS", {"tables": entry})
    with pytest.raises(MissingExtra, match=r"needs no_such_package: pip install 'gym-trace\[tables\]'"):
        export(traces["vectors"], tmp_path / "out", "tables")


@pytest.mark.parametrize(
    "problem",
    ["ImportError('libarrow.so: cannot open shared object file')", "ValueError('numpy.dtype size changed')",
     "AttributeError('_ARRAY_API not found')", "ImportError('no lib', name='pyarrow.lib')"],
)  # fmt: skip
def test_an_import_passes_over_a_package_that_cannot_be_used(
    traces: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, problem: str
) -> None:
    (tmp_path / "broken_package.py").write_text(f"raise {problem}\n")
    monkeypatch.syspath_prepend(tmp_path)
    ours = registry._IMPORTERS
    monkeypatch.setattr(registry, "_IMPORTERS", {"odd": registry.FormatEntry("broken_package:X", "hdf5", ""), **ours})
    export(traces["vectors"], tmp_path / "steps.jsonl", "jsonl")
    assert import_trace(tmp_path / "steps.jsonl", tmp_path / "again").format == "jsonl"
    with pytest.raises(MissingExtra, match=r"cannot be imported here .*force-reinstall 'gym-trace\[hdf5\]'"):
        import_trace(tmp_path / "steps.jsonl", tmp_path / "other", "odd")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        TraceNotFound, match=r"not checked, as their packages are missing: odd.*cannot be imported here"
    ):
        import_trace(tmp_path / "empty", tmp_path / "other")


def test_detecting_another_format_does_not_import_pylance(
    traces: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    export(traces["vectors"], tmp_path / "out.npz", "jsonl")
    loaded, load = [], registry._loaded
    monkeypatch.setattr(registry, "_loaded", lambda name, *rest: loaded.append(name) or load(name, *rest))
    assert import_trace(tmp_path / "out.npz", tmp_path / "back").format == "jsonl"
    assert "lance" not in loaded


def test_an_unknown_format_names_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "needs_package.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    entries = {
        name: registry.FormatEntry("needs_package:X", extra, "")
        for name, extra in {"a": "x", "b": "y", "c": "x"}.items()
    }
    monkeypatch.setattr(registry, "_IMPORTERS", entries)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceNotFound) as caught:
        import_trace(tmp_path / "empty", tmp_path / "other")
    assert "not checked, as their packages are missing: a, b, c: pip install 'gym-trace[x,y]';" in str(caught.value)


@pytest.mark.parametrize(
    ("form", "options", "told"),
    [
        ("plian", {}, "did you mean 'plain'"),
        ("xxx", {}, "choose from .*plain"),
        ("plain", {"digit": 3}, "no option 'digit'; choose from digits"),
        (PlainExporter(), {"digits": 3}, "configure the exporter itself"),
    ],
)
def test_unknown_formats_and_options_raise_before_anything_is_written(
    traces: dict[str, Path], third_party: Path, tmp_path: Path, form: Any, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidOption, match=told):
        export(traces["vectors"], tmp_path / "out", form, **options)
    assert left_in(tmp_path) == []


def test_importing_an_export_only_format_raises(tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text("episode,step\n")
    for name in ("csv", "rerun"):
        with pytest.raises(InvalidOption, match=f"'{name}': export only; importable formats are .*minari"):
            import_trace(tmp_path / "steps.csv", tmp_path / "out", name)


# -- where it is written ----------------------------------------------------------------------------------------------


def test_existing_files_are_never_overwritten(
    traces: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        with pytest.raises(TraceExists):
            export(traces["vectors"], tmp_path / name, PlainExporter())
    assert left_in(tmp_path) == ["file", "full"]
    assert (tmp_path / "file").read_text() == (tmp_path / "full" / "mine").read_text() == "mine"
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "out")
    for makes in ("directory", "file"):
        exporter = PlainExporter()
        monkeypatch.setattr(PlainExporter, "makes", makes)
        with pytest.raises(TraceExists, match=r"link: is a link to .*, a broken link"):
            export(traces["vectors"], tmp_path / "link", exporter)
    monkeypatch.undo()
    assert left_in(tmp_path) == ["file", "full", "link"]
    (tmp_path / "empty").mkdir()
    assert export(traces["vectors"], tmp_path / "empty", PlainExporter()).path == tmp_path / "empty"


def test_nothing_is_written_into_the_trace(traces: dict[str, Path]) -> None:
    before = left_in(traces["vectors"])
    for out in (traces["vectors"], traces["vectors"] / "deeper" / "out"):
        with pytest.raises(TraceError):
            export(traces["vectors"], out, PlainExporter())
    assert left_in(traces["vectors"]) == before


def test_files_that_appear_during_an_export_are_not_overwritten(traces: dict[str, Path], tmp_path: Path) -> None:
    def put(done: int, total: int) -> None:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "mine").write_text("mine")

    with pytest.raises(TraceExists, match="created by another process"):
        export(traces["vectors"], tmp_path / "out", PlainExporter(), on_progress=put)
    assert left_in(tmp_path) == ["out"]
    assert left_in(tmp_path / "out") == ["mine"]


def test_an_exporter_that_fails_leaves_nothing(traces: dict[str, Path], tmp_path: Path) -> None:
    class Failing(PlainExporter):
        def how_to_load(self, path: Path) -> str:
            return ""

        def write(self, source: ExportSource, target: Target) -> None:
            (target.staged / "some").write_text("some")
            raise OSError("the disk is gone")

    with pytest.raises(RecordingError, match=r"out: write failed: the disk is gone"):
        export(traces["vectors"], tmp_path / "out", Failing())
    assert left_in(tmp_path) == []


# -- reports ----------------------------------------------------------------------------------------------------------


def test_strict_refuses_what_would_be_lost_and_writes_nothing(traces: dict[str, Path], tmp_path: Path) -> None:
    class Losing(Forgetful):
        def plan(self, source: ExportSource) -> ExportPlan:
            lost = [Loss("final_observation", "the final observation of each episode is not kept")]
            return super().plan(source)._replace(losses=lost)

    assert [loss.what for loss in export(traces["vectors"], tmp_path / "out", Losing()).lost] == ["final_observation"]
    with pytest.raises(InvalidOption, match="the final observation of each episode is not kept; nothing written"):
        export(traces["vectors"], tmp_path / "strict", Losing(), strict=True)
    assert left_in(tmp_path) == ["out"]


def test_progress_ends_with_all_steps_and_skipped_episodes_are_counted(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=5), tmp_path / "trace")
    for _ in range(3):
        env.reset()
        for _ in range(5):
            env.step(1)
    env.reset()
    env.step(1)
    told: list[tuple[int, int]] = []
    report = export(tmp_path / "trace", tmp_path / "out", PlainExporter(), on_progress=lambda *said: told.append(said))
    env.close()
    assert (report.episodes, report.steps, report.running) == (3, 15, 1)
    assert told == [(5, 15), (10, 15), (15, 15)]


def test_a_trace_without_an_episode_that_is_over_is_refused(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(), tmp_path / "trace")
    env.reset()
    env.step(1)
    with pytest.raises(InvalidOption, match="no episodes to export"):
        export(tmp_path / "trace", tmp_path / "out", PlainExporter())
    env.close()
    with pytest.raises(TraceNotFound):
        export(tmp_path / "missing", tmp_path / "out", PlainExporter())


def test_episodes_of_several_spaces_need_a_selection(tmp_path: Path) -> None:
    for shape in ((2,), (3,)):
        env = TraceRecordingWrapper(CountingEnv(2, shape), tmp_path / "trace", on_exist="append")
        env.reset()
        env.step(1)
        env.close()
    trace = open_trace(tmp_path / "trace")
    with pytest.raises(InvalidOption, match="choose episodes with the same spaces"):
        export(trace, tmp_path / "out", PlainExporter())
    assert export(trace[:1], tmp_path / "out", PlainExporter()).episodes == 1


def test_a_damaged_trace_is_not_exported_in_part(traces: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(traces["vectors"], tmp_path / "trace")
    (batch,) = (tmp_path / "trace").glob("*.gtb")
    flip(batch, sum(chunks_of(batch)[0]) // 2)
    with pytest.raises(TraceError):
        export(tmp_path / "trace", tmp_path / "out", PlainExporter())
    assert left_in(tmp_path) == ["trace"]


def test_the_command_tells_the_same(traces: dict[str, Path], third_party: Path, tmp_path: Path) -> None:
    said = ok("export", traces["vectors"], "--to", "plain", "-o", tmp_path / "out", "--where", "steps > 5").stdout
    assert "4 episodes, 48 steps exported to" in said
    assert "to load it:" in said
    found = json.loads(ok("export", traces["vectors"], "--to", "plain", "-o", tmp_path / "two", "--json").stdout)
    assert (found["episodes"], found["steps"], found["lost"], found["format"]) == (6, 54, [], "plain")
    back = json.loads(ok("import", tmp_path / "two", "-o", tmp_path / "back", "--json").stdout)
    assert (back["episodes"], back["format"], back["kinds"]) == (6, "plain", ["plain"])
    for words in (("--to", "plian"), ("--to", "plain", "--set", "digit=3"), ("--to", "plain", "--where", "step > 1")):
        refused = run("export", traces["vectors"], "-o", tmp_path / "new", *words)
        assert refused.exit_code in (1, 2)
        assert "error: " in refused.stderr.lower()
    assert run("export", traces["vectors"], "--to", "plain", "-o", tmp_path / "out").exit_code == 1
    assert left_in(tmp_path) == ["back", "out", "two"]


def test_quiet_exports_and_imports_print_nothing(traces: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "steps.jsonl"
    assert ok("export", traces["vectors"], "-o", out, "--quiet").output == ""
    told = json.loads(ok("export", traces["vectors"], "-o", tmp_path / "again.jsonl", "--json").stdout)
    assert told["bytes"] == out.stat().st_size
    assert told["seconds"] > 0
    assert ok("import", out, "-o", tmp_path / "back", "--quiet").output == ""
    refused = run("export", traces["vectors"], "-o", out, "--quiet")
    assert refused.exit_code == 1
    assert "error" in refused.stderr.lower()


@pytest.mark.parametrize("name", ["steps.jsonl", "steps.CSV", "steps.npz"])
def test_the_ending_of_the_output_says_the_format(traces: dict[str, Path], tmp_path: Path, name: str) -> None:
    form = name.lower().partition(".")[2]
    said = ok("export", traces["vectors"], "-o", tmp_path / name).stdout
    assert f"exported to {tmp_path / name} as {form}" in said
    assert f"format {form}, by the ending of OUT" in said
    assert export(traces["vectors"], tmp_path / "again" / name).format == form


def test_an_ending_of_no_format_is_refused_with_those_there_are(traces: dict[str, Path], tmp_path: Path) -> None:
    for name in ("steps", "steps.dat"):
        refused = run("export", traces["vectors"], "-o", tmp_path / name)
        assert refused.exit_code == 2
        assert ".jsonl (jsonl)" in refused.stderr
    with pytest.raises(InvalidOption, match="pass --to"):
        export(traces["vectors"], tmp_path / "steps.dat")
    assert left_in(tmp_path) == []


# -- processes that end -----------------------------------------------------------------------------------------------

SLOW = """
    import sys, time
    sys.path[:0] = [{tests!r}]
    from plain_format import PlainExporter
    from gym_trace import export
    def wait(done, total):
        if done > 20:
            print("half", flush=True)
            time.sleep({seconds})
    export({trace!r}, {out!r}, PlainExporter(), on_progress=wait)
"""


def _slow(trace: Path, out: Path, seconds: float = 60) -> subprocess.Popen[str]:
    script = textwrap.dedent(SLOW).format(tests=str(HELPERS), seconds=seconds, trace=str(trace), out=str(out))
    return forked_python.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_killed_export_leaves_no_output_and_can_be_repeated(traces: dict[str, Path], tmp_path: Path) -> None:
    killed = _slow(traces["vectors"], tmp_path / "out")
    assert killed.stdout is not None
    assert killed.stdout.readline() == "half\n"
    killed.kill()
    killed.communicate()
    (part,) = left_in(tmp_path)
    assert part.startswith(".out.")
    assert part.endswith(".part")
    assert export(traces["vectors"], tmp_path / "out", PlainExporter()).episodes == 6


def test_ctrl_c_leaves_nothing(traces: dict[str, Path], tmp_path: Path) -> None:
    stopped = _slow(traces["vectors"], tmp_path / "out")
    assert stopped.stdout is not None
    assert stopped.stdout.readline() == "half\n"
    stopped.send_signal(signal.SIGINT)
    _, said = stopped.communicate(timeout=60)
    assert "KeyboardInterrupt" in said
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("form", ["d4rl", "minari"])
def test_ctrl_c_within_hdf5_leaves_no_file_open_that_crashes_at_the_end(
    traces: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    h5f = pytest.importorskip("h5py").h5f
    writing = importlib.import_module("gym_trace.exchange.formats.hdf5.writing")
    write = writing._FileObject.write

    def interrupted(file: Any, data: Any) -> int:
        signal.raise_signal(signal.SIGINT)
        return write(file, data)

    monkeypatch.setattr(writing._FileObject, "write", interrupted)
    before = h5f.get_obj_count(h5f.OBJ_ALL, h5f.OBJ_FILE)
    with pytest.raises(KeyboardInterrupt):
        export(traces["vectors"], tmp_path / "out", form)
    assert h5f.get_obj_count(h5f.OBJ_ALL, h5f.OBJ_FILE) == before
    assert left_in(tmp_path) == []


def test_a_full_disk_is_an_error_of_one_line_and_leaves_nothing(traces: dict[str, Path], tmp_path: Path) -> None:
    limited = """
        import resource, signal, sys
        sys.path[:0] = [{tests!r}]
        from plain_format import PlainExporter, PlainImporter
        from gym_trace import export, import_trace
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most}))
        try:
            {call}
        except Exception as error:
            print(type(error).__name__, error)
    """
    export(traces["vectors"], tmp_path / "out", PlainExporter())
    calls = {
        f"export({str(traces['vectors'])!r}, {str(tmp_path / 'new')!r}, PlainExporter())": "write failed",
        f"import_trace({str(tmp_path / 'out')!r}, {str(tmp_path / 'new')!r}, PlainImporter())": "could not be written",
    }
    for call, told in calls.items():
        script = textwrap.dedent(limited).format(tests=str(HELPERS), most=1000, call=call)
        done = forked_python.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        assert done.stdout.startswith("RecordingError"), done.stderr
        assert told in done.stdout
        assert len(done.stdout.splitlines()) == 1
        assert left_in(tmp_path) == ["out"]


# -- untrusted files --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(traces: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "out"
    export(traces["infos"], out, PlainExporter())
    return out


def _changed(value: Any, random: np.random.Generator) -> Any:
    """Return the JSON with one value replaced."""
    odd = [None, True, -1, 2**70, 1e400, "", "../../x", "\x1b[31m", "running", [], {}, [[]]]
    odd += [{"$array": ["<f8", [9, 9], []]}, {"$int": "zz"}, {"$masked": [1, 2]}, {"$tuple": 3}, {"$map": [[[], 1]]}]
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = list(value)[random.integers(len(value))]
        if random.random() < 0.15:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: _changed(value[key], random)}
    if isinstance(value, list) and value and random.random() < 0.8:
        place = int(random.integers(len(value)))
        return [*value[:place], _changed(value[place], random), *value[place + 1 :]]
    return odd[random.integers(len(odd))]


@pytest.mark.parametrize("seed", range(30 if LONG else 3))
def test_hostile_metadata_is_refused_or_makes_a_sound_trace(exported: Path, tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)

    class Hostile(PlainImporter):
        def read(self, path: Path) -> Any:
            self.number = int(random.integers(8))
            return super().read(path)

        def about(self, text: str) -> str:
            return json.dumps(_changed(json.loads(text), random)) if self.number > 4 else text

        def identity(self, text: str) -> str:
            return json.dumps(_changed(json.loads(text), random)) if self.number < 6 and random.random() < 0.3 else text

    for number in range(60):
        back = tmp_path / str(number)
        refused = None
        try:
            import_trace(exported, back, Hostile())
        except UnreadableRecording as error:
            refused = str(error)
        if refused is not None:
            assert refused.startswith(str(exported))
            assert refused.isprintable()
            assert not back.exists()
        else:
            assert check_trace(back).damages == []
            for episode in open_trace(back):
                assert len(episode.rewards) == len(episode)
                str(episode), episode.seed, episode.options, episode.reset_info, episode.rng_state
        assert set(left_in(tmp_path)) <= set(map(str, range(60)))


@pytest.mark.parametrize(
    "text", ["", "x", "[]", "{}", '{"version": 99}', "[" * 100_000, '{"writers": 1}', "{" + " " * 99]
)
def test_malformed_metadata_raises(exported: Path, tmp_path: Path, text: str) -> None:
    class OfText(PlainImporter):
        def about(self, _: str) -> str:
            return text

    with pytest.raises(UnreadableRecording):
        import_trace(exported, tmp_path / "back", OfText())
    assert left_in(tmp_path) == []


def test_a_writer_that_is_named_like_a_path_writes_nothing_elsewhere(exported: Path, tmp_path: Path) -> None:
    class Leading(PlainImporter):
        def about(self, text: str) -> str:
            said = json.loads(text)
            (schema,) = said["writers"].values()
            hostile = {**schema, "writer": "../../elsewhere", "format": [99, 0], "created": 5}
            return json.dumps({**said, "writers": {"../../elsewhere": hostile, "fine": hostile}})

        def identity(self, text: str) -> str:
            return json.dumps({**json.loads(text), "writer": "fine"})

    import_trace(exported, tmp_path / "deep" / "back", Leading())
    assert left_in(tmp_path) == ["deep"]
    assert open_trace(tmp_path / "deep" / "back").writers == ["fine"]


def test_writers_of_an_import_that_end_one_after_the_other_may_be_many(tmp_path: Path) -> None:
    for number in range(300):
        write_monitor(tmp_path / "old", f"0.{number}", timestamps=[2.0], episode_lengths=[1], episode_rewards=[1.0])
    report = import_trace(tmp_path / "old", tmp_path / "back")
    assert (len(report.writers), report.episodes) == (300, 300)
    assert len(open_trace(tmp_path / "back").writers) == 300


@pytest.mark.parametrize("kind", ["parts", "ends"])
def test_an_import_of_the_first_episodes_equals_them(kind: str, traces: dict[str, Path], tmp_path: Path) -> None:
    trace = open_trace(traces[kind])
    export(trace, tmp_path / "out.jsonl")
    for limit in (1, 4, len(trace), len(trace) + 1):
        back = open_trace(import_trace(tmp_path / "out.jsonl", tmp_path / str(limit), limit=limit).destination)
        assert not difference(ExportSource(trace[:limit]), loaded_from(back), {"identity"})
    with pytest.raises(InvalidOption, match="limit=0"):
        import_trace(tmp_path / "out.jsonl", tmp_path / "none", limit=0)


def test_parts_of_episodes_are_known_as_such_in_a_view_of_another_order(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=9), tmp_path, frame_filter=lambda step: step < 2 or step > 5)
    for _ in range(2):
        env.reset()
        for _ in range(9):
            env.step(1)
    env.close()
    record_lengths(tmp_path, [4], on_exist="append")
    trace = open_trace(tmp_path)
    for view in (trace, trace.select(sort="-steps"), trace[::-1], trace[[4, 0, 4]]):
        expected = [bool(episode.writer == trace[0].writer) for episode in view]
        assert ExportSource(view).is_part.tolist() == expected


def test_many_files_are_made_durable_at_once_or_not_there_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Any] = []
    for problem in (None, OSError(5, "Input/output error")):

        def sync(directory: Any, problem: OSError | None = problem) -> bool:
            synced.append(directory)
            if problem is not None:
                raise problem
            return True

        monkeypatch.setattr(staging, "sync_file_system", sync)
        monkeypatch.setattr(staging, "_sync_file", lambda file: pytest.fail(f"{file} is waited for by itself"))
        expected = contextlib.nullcontext() if problem is None else pytest.raises(OSError, match="Input/output")
        with expected, staging.new_directory(tmp_path / f"out{len(synced)}") as directory:
            for number in range(101):
                (directory / str(number)).write_bytes(b"")
    assert [path.name for path in tmp_path.iterdir()] == ["out0"]
    assert len(synced) == 2


def test_a_file_that_cannot_come_back_is_said_not_to(tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text("episode,step\n")
    with pytest.raises(TraceNotFound, match=r"Exports as csv, mcap, .* cannot be imported"):
        import_trace(tmp_path / "steps.csv", tmp_path / "trace")
