"""A format that can say all of a trace: a JSON file for each episode. And what is wrong with many an exporter."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gym_trace.data.episode import infos_of
from gym_trace.data.json_values import json_text, tagged, untagged
from gym_trace.exchange.formats.conformance import Loaded
from gym_trace.exchange.formats.contract import ExportPlan, Target
from gym_trace.exchange.formats.imported import Imported, NewEpisode, NewSteps, imported, new_schema
from gym_trace.exchange.formats.source import ExportSource


@dataclass(frozen=True)
class PlainExporter:
    """A file of JSON for each episode."""

    name: ClassVar[str] = "plain"
    makes: ClassVar[str] = "directory"
    digits: int = 6

    def plan(self, source: ExportSource) -> ExportPlan:
        return ExportPlan((), partial(self.write, source), self.how_to_load)

    def episode(self, said: dict[str, Any]) -> dict[str, Any]:
        """Return the content of the file of an episode."""
        return said

    def write(self, source: ExportSource, target: Target) -> None:
        target.staged.joinpath("about.txt").write_text(source.about)
        for number, episode in enumerate(source.trace):
            names = ("observations", "actions", "rewards", "terminations", "truncations", "annotations")
            said: dict[str, Any] = {name: getattr(episode, name) for name in names}
            said |= {"infos": infos_of(episode), "identity": source.identity(episode)}
            text = json_text(tagged(self.episode(said)))
            target.staged.joinpath(f"{number:0{self.digits}}.json").write_text(text)
            source.advance(len(episode))

    def how_to_load(self, path: Path) -> str:
        return f"import json, pathlib\nassert list(pathlib.Path({str(path.absolute())!r}).glob('*.json'))"


def read_plain(path: Path) -> Iterator[dict[str, Any]]:
    for file in sorted(path.glob("*.json")):
        yield untagged(json.loads(file.read_text()))


def load_plain(path: Path) -> Iterable[Loaded]:
    return (Loaded(**said) for said in read_plain(path))


class PlainImporter:
    """Directories of PlainExporter."""

    name: ClassVar[str] = "plain"

    def recognises(self, path: Path) -> bool:
        return path.joinpath("about.txt").is_file()

    def about(self, text: str) -> str:
        return text

    def identity(self, text: str) -> str:
        return text

    def read(self, path: Path) -> Imported:
        about = self.about(path.joinpath("about.txt").read_text())
        nothing = {"type": "Tuple", "spaces": []}
        return imported("plain", self._episodes(path), new_schema("plain", nothing, nothing), about)

    def _episodes(self, path: Path) -> Iterator[NewEpisode]:
        for said in read_plain(path):
            identity = self.identity(said.pop("identity"))
            yield NewEpisode(len(said["rewards"]), [NewSteps(**said)], identity=identity)


# -- wrong in one way each --------------------------------------------------------------------------------------------


class Narrow(PlainExporter):
    """float64 becomes float32."""

    def episode(self, said: dict[str, Any]) -> dict[str, Any]:
        return {**said, "rewards": said["rewards"].astype(np.float32)}


class Forgetful(PlainExporter):
    """The last observation is omitted."""

    def episode(self, said: dict[str, Any]) -> dict[str, Any]:
        return {**said, "observations": said["observations"][:-1]}


class OneFlag(PlainExporter):
    """Truncated steps become terminated ones."""

    def episode(self, said: dict[str, Any]) -> dict[str, Any]:
        done = said["terminations"] | said["truncations"]
        return {**said, "terminations": done, "truncations": np.zeros_like(done)}


class Leftover(PlainExporter):
    """Writes next to its place."""

    def write(self, source: ExportSource, target: Target) -> None:
        target.final.with_name("leftover").write_text("x")
        super().write(source, target)


class Silent(PlainExporter):
    """Reports no progress."""

    def write(self, source: ExportSource, target: Target) -> None:
        source.advance = lambda steps: None  # type: ignore[method-assign]
        super().write(source, target)


class Sorting(PlainExporter):
    """Writes in its own order."""

    def write(self, source: ExportSource, target: Target) -> None:
        places = sorted(range(len(source.trace)), key=lambda i: int(source.episodes["episode_id"][i]))
        source.trace = source.trace[places]
        super().write(source, target)
