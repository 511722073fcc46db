"""The list of formats, of gym-trace and of other packages.

A package adds a format with an entry point of the group gym_trace.exporters or gym_trace.importers. It has the name
of the format, and points to an exporter or importer class (see contract.py):

    [project.entry-points."gym_trace.exporters"]
    tables = "my_package.tables:TablesExporter"
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from gym_trace.errors import InvalidOption, MissingExtra, TraceNotFound
from gym_trace.exchange.formats.contract import Exporter, Importer
from gym_trace.format.directory import find_writers
from gym_trace.plugins import entry_points
from gym_trace.printable import error_text, printable
from gym_trace.storage.local import LocalStorage


class FormatEntry(NamedTuple):
    """A format. where: "module:Class". extra: the extra of gym-trace that it needs. what: one line of description.

    Examples:
        >>> gym_trace.formats.exporters()["parquet"].extra
        'parquet'
    """

    where: str
    extra: str
    what: str


def _ours(where: str, extra: str, what: str) -> FormatEntry:
    return FormatEntry(f"{__package__}.{where}", extra, what)


_EXPORTERS: dict[str, FormatEntry] = {
    "csv": _ours("steps.exporters:CsvExporter", "", "CSV, one line per step"),
    "d4rl": _ours("hdf5.d4rl:D4RLExporter", "hdf5", "HDF5 file in the layout of D4RL"),
    "jsonl": _ours("steps.exporters:JsonLinesExporter", "", "JSON lines, lossless: docs/reference/steps.md"),
    "lance": _ours("lance_tables:LanceExporter", "lance", "Lance, for stable-worldmodel and LanceDB"),
    "lerobot": _ours("lerobot.exporter:LeRobotExporter", "lerobot", "LeRobot dataset, version 3"),
    "maniskill": _ours("simulators.maniskill:ManiSkillExporter", "hdf5", "ManiSkill: trajectory.h5 and .json"),
    "mcap": _ours("viewing.mcap_out:McapExporter", "mcap", "MCAP, for Foxglove"),
    "minari": _ours("minari.dataset:MinariExporter", "minari", "Minari dataset: hdf5 (default), arrow or parquet"),
    "npz": _ours("steps.exporters:NpzExporter", "", ".npz file for numpy.load"),
    "parquet": _ours("parquet.traces:ParquetExporter", "parquet", "Parquet, a table of steps and one of episodes"),
    "rerun": _ours("viewing.rerun_out:RerunExporter", "rerun", "Rerun, an .rrd file for its viewer"),
    "robomimic": _ours("simulators.robomimic:RobomimicExporter", "hdf5", "HDF5 file in the layout of robomimic"),
    "rlds": _ours("rlds.exporter:RldsExporter", "rlds", "RLDS, for TensorFlow Datasets"),
}
_IMPORTERS: dict[str, FormatEntry] = {
    "d4rl": _ours("hdf5.d4rl:D4RLImporter", "hdf5", "HDF5 file in the layout of D4RL"),
    "gym": _ours("legacy.importing:GymImporter", "", "recordings of gym_recording and OpenAI Gym's Monitor"),
    "jsonl": _ours("steps.jsonl_importer:JsonLinesImporter", "", "JSON lines, lossless: docs/reference/steps.md"),
    "lance": _ours("lance_tables:LanceImporter", "lance", "Lance of gym-trace, stable-worldmodel and others"),
    "lerobot": _ours("lerobot.importer:LeRobotImporter", "lerobot", "LeRobot dataset, version 3"),
    "maniskill": _ours("simulators.maniskill:ManiSkillImporter", "hdf5", "ManiSkill: an .h5 file and its .json"),
    "minari": _ours("minari.dataset:MinariImporter", "minari", "Minari dataset: hdf5, arrow or parquet"),
    "parquet": _ours("parquet.traces:ParquetImporter", "parquet", "Parquet exported by gym-trace"),
    "rlds": _ours("rlds.importer:RldsImporter", "rlds", "RLDS, for TensorFlow Datasets"),
    "robomimic": _ours("simulators.robomimic:RobomimicImporter", "hdf5", "HDF5 of robomimic, robosuite, Isaac Lab"),
    "table": _ours("parquet.table_importer:TableImporter", "parquet", "one Parquet table, one row per step"),
}
# Errors of importing a package that is damaged, or whose version does not fit the others.
_UNUSABLE = (ImportError, AttributeError, OSError, RuntimeError, TypeError, ValueError)
# Formats that are detected last: "table" accepts any Parquet file; pylance takes half a second to import.
_DETECTED_LAST = {"table": 1, "lance": 2}


# The export format by the ending of the file, if the user names none.
ENDINGS = {
    ".csv": "csv",
    ".hdf5": "d4rl",
    ".jsonl": "jsonl",
    ".mcap": "mcap",
    ".npz": "npz",
    ".parquet": "parquet",
    ".rrd": "rerun",
}


def format_for(out: Path) -> str:
    """Return the format for the ending of a file name. Raises InvalidOption.

    Examples:
        >>> from pathlib import Path
        >>> gym_trace.formats.format_for(Path("steps.csv"))
        'csv'
    """
    if (name := ENDINGS.get(out.suffix.lower())) is None:
        ending = f"unknown ending {out.suffix!r}" if out.suffix else "no ending"
        known = ", ".join(f"{known} ({name})" for known, name in ENDINGS.items())
        raise InvalidOption(f"{printable(out)}: {ending}; pass --to FORMAT (format=) or use one of {known}")
    return name


def exporters() -> dict[str, FormatEntry]:
    """Return the export formats by name.

    Examples:
        >>> "parquet" in gym_trace.formats.exporters()
        True
    """
    return {**_EXPORTERS, **_third_party("gym_trace.exporters", _EXPORTERS)}


def importers() -> dict[str, FormatEntry]:
    """Return the import formats by name.

    Examples:
        >>> sorted(gym_trace.formats.importers())[:3]
        ['d4rl', 'gym', 'jsonl']
    """
    return {**_IMPORTERS, **_third_party("gym_trace.importers", _IMPORTERS)}


def exporter_named(name: str, options: Mapping[str, Any]) -> Exporter:
    """Return an exporter with these options. Raises InvalidOption, MissingExtra."""
    return cast(Exporter, _configured(name, _loaded(name, exporters(), "export to"), options))


def importer_named(name: str, options: Mapping[str, Any]) -> Importer:
    """Return an importer with these options. Raises InvalidOption, MissingExtra."""
    return cast(Importer, _configured(name, _loaded(name, importers(), "import from"), options))


def _configured(name: str, format_class: Any, options: Mapping[str, Any]) -> Any:
    known = _options(format_class)
    if unknown := [option for option in options if option not in known]:
        hint = f"choose from {', '.join(known)}" if known else "it takes no options"
        raise InvalidOption(f"{name} has no option {unknown[0]!r}; {hint}")
    return format_class(**options)


def _options(format_class: Any) -> list[str]:
    is_dataclass = dataclasses.is_dataclass(format_class)
    return [field.name for field in dataclasses.fields(format_class)] if is_dataclass else []


def importer_for(path: Path, options: Mapping[str, Any]) -> Importer:
    """Return the importer whose format path looks like; among several, one that has these options.

    Raises TraceNotFound, MissingExtra, InvalidOption.
    """
    missing: dict[str, MissingExtra] = {}
    without_options = {}
    if not path.exists():
        raise TraceNotFound(f"{path}: not found")
    for name in sorted(importers(), key=lambda name: _DETECTED_LAST.get(name, 0)):
        try:
            importer_class = _loaded(name, importers(), "import from")
        except MissingExtra as error:
            missing[name] = error
            continue
        if not set(options) <= set(_options(importer_class)):
            without_options[name] = importer_class
            continue
        importer = cast(Importer, importer_class(**options))
        if importer.recognises(path):
            return importer
    for name, importer_class in without_options.items():
        if importer_class().recognises(path):
            _configured(name, importer_class, options)  # raises for the unknown option
    if path.is_dir() and find_writers(LocalStorage(path)):
        raise TraceNotFound(f"{path}: already a trace; open it directly")
    export_only = ", ".join(sorted(set(_EXPORTERS) - set(_IMPORTERS)))
    raise TraceNotFound(
        f"{path}: unknown format{_unchecked(missing)}; pass --from FORMAT (format=), one of "
        f"{', '.join(importers())}. Exports as {export_only} cannot be imported"
    )


def _unchecked(missing: Mapping[str, MissingExtra]) -> str:
    """Return text about formats that could not be tried, and what to install for them."""
    if not missing:
        return ""
    absent = [name for name, error in missing.items() if isinstance(error.__cause__, ModuleNotFoundError)]
    extras = dict.fromkeys(importers()[name].extra for name in absent if importers()[name].extra)
    hints = [f"pip install 'gym-trace[{','.join(extras)}]'"] if extras else []
    hints += [str(error) for name, error in missing.items() if importers()[name].extra not in extras]
    return f"; formats not checked, as their packages are missing: {', '.join(missing)}: {'; '.join(hints)}"


def _third_party(group: str, ours: Mapping[str, FormatEntry]) -> dict[str, FormatEntry]:
    points = {point.name: point for point in entry_points(group) if point.name not in ours}
    packages = {name: "another package" if point.dist is None else point.dist.name for name, point in points.items()}
    return {name: FormatEntry(point.value, "", f"of {printable(packages[name])}") for name, point in points.items()}


def _loaded(name: str, entries: Mapping[str, FormatEntry], doing: str) -> Any:
    if name not in entries:
        if doing == "import from" and name in exporters():
            raise InvalidOption(f"{name!r}: export only; importable formats are {', '.join(entries)}")
        near = difflib.get_close_matches(name, entries, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(entries)}"
        raise InvalidOption(f"{name!r}: unknown format to {doing}; {hint}")
    entry = entries[name]
    module, _, class_name = entry.where.partition(":")
    try:
        return getattr(importlib.import_module(module), class_name)
    except _UNUSABLE as error:
        root = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
        if root == "gym_trace" or (not entry.extra and module.partition(".")[0] == "gym_trace"):
            raise
        if not entry.extra:
            missing = f"to {doing} {name}, {entry.what}: cannot be imported ({error_text(error)}); install it again"
        elif isinstance(error, ModuleNotFoundError):
            missing = f"to {doing} {name} needs {error.name}: pip install 'gym-trace[{entry.extra}]'"
        else:
            missing = (
                f"to {doing} {name} needs {root or 'packages'} that cannot be imported here ({error_text(error)}): "
                f"pip install --force-reinstall 'gym-trace[{entry.extra}]'"
            )
        raise MissingExtra(missing) from error


def listed(entries: Mapping[str, FormatEntry]) -> Iterator[tuple[str, str]]:
    """Yield each format and its description.

    Examples:
        >>> dict(gym_trace.formats.listed(gym_trace.formats.exporters()))["csv"]
        'CSV, one line per step'
    """
    for name, entry in entries.items():
        yield name, entry.what + (f" (pip install 'gym-trace[{entry.extra}]')" if entry.extra else "")
