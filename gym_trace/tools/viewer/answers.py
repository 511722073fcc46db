"""Answers to the requests of the page. A server, a saved page and a notebook give the same answers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gym_trace.errors import CorruptTrace, InvalidOption, TraceError
from gym_trace.playback.opened import ChunkCache
from gym_trace.playback.trace import Trace, open_trace, storage_of
from gym_trace.printable import printable
from gym_trace.tools.integrity.scan import Progress
from gym_trace.tools.replay.diff import compare_episodes
from gym_trace.tools.statistics.comparison import compare
from gym_trace.tools.viewer import container
from gym_trace.tools.viewer.episode import MOST_PIXELS, RENDERED, Difference, ViewedEpisode
from gym_trace.tools.viewer.trace import ViewedTrace
from gym_trace.tools.viewer.values import to_json

if TYPE_CHECKING:  # rendering needs gymnasium
    from gym_trace.tools.viewer.proofs import Proofs
    from gym_trace.tools.viewer.rendering import Rendering, Renderings
    from gym_trace.tools.viewer.whatif import WhatIf

JSON = "application/json"
_CACHE_BYTES = 24 << 20  # decoded chunks of all traces
_CURVE_BYTES = 32 << 20  # bins of long columns of all traces
_MOST_TEXT = 10_000  # characters of a parameter
_MOST_FANNED = 200  # episodes whose plots are one answer
_LARGEST = 1 << 53  # row number beyond all rows, exact in JavaScript


class Refused(Exception):
    """A request that gets an error instead of an answer. more: further keys of the JSON."""

    def __init__(self, status: int, error: str, hint: str = "", **more: Any):
        super().__init__(error)
        self.status, self.error, self.hint, self.more = status, error, hint, more


class Answer(NamedTuple):
    """The body of an answer and its type."""

    body: bytes
    mime: str


class Answers:
    """Answers requests about some traces.

    Attributes:
        traces: the traces by number; those of branches that the page asked for come last.
        renderings: renderings of episodes; None: episodes cannot be rendered.
        proofs: runs lint, check and verify; None: they cannot be run.
        what_if: plans branches; None: they cannot be recorded.

    Args:
        is_shared: omit the directories of the traces, because others get the answers.
        settings: name of the setting of each trace: traces of one name are compared as its seeds. None: each is one.
    """

    def __init__(
        self,
        traces: Sequence[Trace],
        renderings: Renderings | None = None,
        is_shared: bool = False,
        proofs: Proofs | None = None,
        what_if: WhatIf | None = None,
        settings: Sequence[str] | None = None,
    ):
        self.renderings, self.proofs, self.what_if = renderings, proofs, what_if
        self._known_runs: dict[str, tuple[int, dict[str, Any]]] = {}
        self._cache, curve_bytes = ChunkCache(_CACHE_BYTES), _CURVE_BYTES // max(1, len(traces))
        names = [trace.directory.name for trace in traces]
        if not is_shared:
            names = [str(trace.directory) if names.count(name) > 1 else name for trace, name in zip(traces, names)]
        if settings is not None and len(settings) != len(traces):
            raise InvalidOption(f"settings: {len(settings)} for {len(traces)} traces; pass one name for each trace")
        given = list(map(str, range(len(traces)))) if settings is None else list(settings)
        numbers = {setting: number for number, setting in enumerate(dict.fromkeys(given))}
        self.traces = [
            ViewedTrace(number, trace, name, self._cache, curve_bytes, is_shared, numbers[setting])
            for number, (trace, name, setting) in enumerate(zip(traces, names, given))
        ]
        self._settings: list[tuple[str, list[ViewedTrace]]] = []  # the name of each, and its runs
        for setting, number in numbers.items():
            runs = [trace for trace in self.traces if trace.setting == number]
            name = runs[0].name if settings is None else Path(setting).name if is_shared else setting
            self._settings.append((printable(name), runs))
        self._given = len(self.traces)
        self._added: dict[str, ViewedTrace] = {}  # branches by directory

    def add_branches(self, directory: str) -> None:
        """Show the trace of branches once it has an episode, and what is new in it."""
        with contextlib.suppress(TraceError, OSError):  # nothing of it is stored yet
            if directory in self._added:
                self._added[directory].refresh()
            elif len(trace := open_trace(directory)):
                number, name = len(self.traces), trace.directory.name
                viewed = ViewedTrace(number, trace, name, self._cache, _CURVE_BYTES // 8, setting=number)
                self._added[directory] = viewed
                self.traces.append(viewed)

    @property
    def version(self) -> int:
        """Number that grows with each change of a trace."""
        return sum(trace.version for trace in self.traces)

    def look_closely(self, on_progress: Progress | None = None) -> None:
        """Add figures and returns of agents to the lists, and mark damaged episodes; this may take seconds.

        A TraceError of on_progress ends it.
        """
        local = [trace for trace in self.traces if not storage_of(trace.trace).ahead]
        for look in (ViewedTrace.read_figures, ViewedTrace.read_agents, ViewedTrace.look_for_damage):
            for trace in local:
                with contextlib.suppress(TraceError, OSError):  # opening an episode reports it again
                    look(trace, on_progress)

    def get(self, path: str, query: Mapping[str, str]) -> Answer:
        """Answer a request such as ("/api/episode", {"trace": "0", "episode": "7"}). Raises Refused."""
        handler = self._handlers().get(path)
        if handler is None:
            raise Refused(404, f"unknown request: {path:.100}")
        try:
            body = handler(Query(query))
        except (InvalidOption, ValueError) as error:
            raise Refused(400, str(error)) from error
        except LookupError as error:
            raise Refused(404, str(error.args[0]) if error.args else "not found") from error
        except CorruptTrace as error:
            raise Refused(422, error.problem, "gym-trace check lists all damage") from error
        except TraceError as error:
            raise Refused(409, str(error)) from error
        except OSError as error:
            raise Refused(409, f"the trace cannot be read: {error.strerror or error}", "was it moved?") from error
        except MemoryError as error:
            raise Refused(413, "this does not fit in memory", "ask for fewer rows or items") from error
        return Answer(body, container.MIME) if isinstance(body, bytes) else as_json(body)

    def _handlers(self) -> dict[str, Callable[[Query], Any]]:
        return {
            "/api/traces": lambda query: [self._facts(trace) for trace in self.traces],
            "/api/episodes": self._episodes,
            "/api/histograms": lambda query: self.trace(query).histograms(query.text("where"), query.text("search")),
            "/api/learning": self._learning,
            "/api/heat": lambda query: self.trace(query).heat(*map(query.text, ("x", "y", "where", "search"))),
            "/api/runs": self._runs,
            "/api/episode": self._episode_facts,
            "/api/plot": self._plot,
            "/api/frames": self._frames,
            "/api/steps": self._steps,
            "/api/compare": self._compare,
            "/api/proofs": lambda query: {tool: one.plain() for tool, one in list(self.trace(query).proofs.items())},
            "/api/marks": lambda query: self.trace(query).marks(),
            "/api/branches": self._branches,
            "/api/fan": self._fan,
            "/api/filter": lambda query: {"lines": self.trace(query).filter_lines(query.text("where"))},
        }

    def trace(self, query: Query) -> ViewedTrace:
        """Return the trace that a request names. Raises Refused."""
        return self.numbered(query.number("trace", 0))

    def numbered(self, number: int) -> ViewedTrace:
        """Return a trace by its number. Raises Refused."""
        if not 0 <= number < len(self.traces):
            raise Refused(404, f"no trace {number}; there are {len(self.traces)}")
        return self.traces[number]

    def _episode(self, query: Query) -> ViewedEpisode:
        return self.trace(query).episode(query.number("episode"))

    def _named(self, query: Query, name: str) -> ViewedEpisode:
        """Return the episode that a parameter names as TRACE:EPISODE. Raises Refused, IndexError."""
        trace, _, episode = query.text(name).partition(":")
        try:
            numbers = int(trace), int(episode)
        except ValueError:
            raise Refused(400, f"{name}: pass TRACE:EPISODE, such as 0:7") from None
        return self.numbered(numbers[0]).episode(numbers[1])

    def _episode_facts(self, query: Query) -> dict[str, Any]:
        facts = self.trace(query).episode_facts(query.number("episode"))
        rendering = self._rendering(query)
        if rendering is not None:
            facts["frames"].append(RENDERED)
            facts["columns"].append(rendering.column())
            facts["fps"] = rendering.fps or facts["fps"]
            facts["rendering"] = rendering.state == "running"
        return {**facts, "renderable": facts["renderable"] and self.renderings is not None}

    def _rendering(self, query: Query) -> Rendering | None:
        if self.renderings is None:
            return None
        return self.renderings.of(query.number("trace", 0), self._episode(query))

    def _episodes(self, query: Query) -> bytes:
        limit = query.number("limit", 200)
        selected = query.text("where"), query.text("search"), query.text("sort")
        return self.trace(query).episodes(*selected, query.number("offset", 0), limit)

    def _learning(self, query: Query) -> bytes:
        selected = query.text("where"), query.text("search")
        return self.trace(query).learning(*selected, query.text("x"), query.text("y") or "return")

    def _runs(self, query: Query) -> dict[str, Any]:
        """Compare the settings, over an axis. The answer is computed again only when a trace has changed."""
        x, version = query.text("x") or "steps", self.version
        if self._known_runs.get(x, (None,))[0] != version:
            given = {str(number): [one.trace for one in traces] for number, (_, traces) in enumerate(self._settings)}
            runs = compare(given, x=x).to_json()
            for (name, traces), group in zip(self._settings, runs["groups"]):
                del group["directories"], group["curves"]
                group |= {"traces": [one.number for one in traces], "name": name}
                group |= {key: sum(group[key]) for key in ("episodes", "steps")}
                for key in ("lengths", "seconds", "steps_per_second"):
                    known = [value for value in group[key] if value is not None]
                    group[key] = sum(known) / len(known) if known else None
            self._known_runs[x] = version, runs
        return self._known_runs[x][1]

    def _facts(self, viewed: ViewedTrace) -> dict[str, Any]:
        return {**viewed.facts(), "branches": viewed.number >= self._given}

    def _branches(self, query: Query) -> dict[str, Any]:
        if self.what_if is None:
            raise Refused(404, "branches cannot be recorded here")
        return self.what_if.facts(self.trace(query), query.number("episode"), self.traces)

    def _fan(self, query: Query) -> bytes:
        """Return the plots of a column of several episodes of a trace."""
        trace, numbers = self.trace(query), query.text("episodes").split(",")
        if len(numbers) > _MOST_FANNED or not all(part.isascii() and part.isdecimal() for part in numbers):
            raise Refused(400, f"episodes: pass up to {_MOST_FANNED} numbers, such as 0,1,2")
        plots = []
        for number in numbers:
            with contextlib.suppress(LookupError):  # it has no such column
                plots.append((number, self._plotted(trace.episode(int(number)), query)))
        return container.packed({}, plots)

    def _plot(self, query: Query) -> bytes:
        episode = self._episode(query)
        if query.text("minus"):
            episode = Difference(episode, self._named(query, "minus"))
        return self._plotted(episode, query)

    @staticmethod
    def _plotted(episode: ViewedEpisode, query: Query) -> bytes:
        pixels = query.number("pixels", 1200)
        if not 1 <= pixels <= MOST_PIXELS:
            raise Refused(400, f"pixels={pixels}: out of range; pass 1 to {MOST_PIXELS}")
        begin, end = query.number("from", 0), query.number("to", _LARGEST)
        return episode.plot(query.text("column"), begin, end, pixels, query.slice("items"))

    def _frames(self, query: Query) -> bytes:
        scale = query.number("scale", 1)
        if not 1 <= scale <= 64:
            raise Refused(400, f"scale={scale}: out of range; pass 1 to 64")
        start, count = query.number("from", 0), query.number("count", 16)
        if query.text("column") == RENDERED:
            if (rendering := self._rendering(query)) is None:
                raise Refused(404, "this episode was not rendered")
            return rendering.frames(start, count)
        return self._episode(query).frames(query.text("column"), start, count, scale)

    def _steps(self, query: Query) -> dict[str, Any]:
        return self._episode(query).steps(query.number("from", 0), query.number("count", 32))

    def _compare(self, query: Query) -> dict[str, Any]:
        one, other = self._named(query, "a"), self._named(query, "b")
        found = compare_episodes(one.trace, one.index, other.trace, other.index)
        if found is None:
            return {"same": True, "step": None, "column": None, "a": None, "b": None, "note": None}
        texts = [
            value if isinstance(value, str) else json.dumps(to_json(value)) for value in (found.recorded, found.seen)
        ]
        at = f"[{', '.join(map(str, found.at))}]" if found.at else ""
        note = None if found.largest is None else f"largest difference {found.largest:.3g}"
        step = found.step or 0  # on the page, an observation belongs to the position after its step
        position = step + (found.step is not None and found.column.startswith("observations"))
        difference = {"same": False, "step": position, "column": f"{found.column}{at}", "note": note}
        return {**difference, "a": texts[0], "b": texts[1]}


class Query:
    """The untrusted parameters of a request."""

    def __init__(self, parameters: Mapping[str, str]):
        self._parameters = parameters

    def text(self, name: str) -> str:
        """Return a text; "" if it is missing. Raises Refused."""
        value = self._parameters.get(name, "")
        if len(value) > _MOST_TEXT:
            raise Refused(400, f"{name}: {len(value):,} characters; the limit is {_MOST_TEXT:,}")
        return value

    def number(self, name: str, default: int | None = None) -> int:
        """Return a whole number. Raises Refused."""
        text = self._parameters.get(name)
        if text is None and default is not None:
            return default
        if text is None or not (text.isascii() and text.removeprefix("-").isdecimal() and len(text) < 17):
            raise Refused(400, f"{name}: pass a whole number")
        return int(text)

    def slice(self, name: str) -> slice | None:
        """Return A:B; None if it is missing. Raises Refused."""
        if name not in self._parameters:
            return None
        begin, colon, end = self._parameters[name].partition(":")
        if not (colon and all(part.isascii() and part.isdecimal() and len(part) < 10 for part in (begin, end))):
            raise Refused(400, f"{name}: pass A:B, such as 0:16")
        return slice(int(begin), int(end))


def as_json(value: Any) -> Answer:
    return Answer(json.dumps(value, allow_nan=False).encode(), JSON)
