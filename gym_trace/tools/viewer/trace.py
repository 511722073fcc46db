"""One trace for the viewer: its facts, and its episodes as a table to search, sort and count."""

from __future__ import annotations

import copy
import json
import math
import shlex
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from gym_trace.data.showing.text import number
from gym_trace.data.values import Array
from gym_trace.data.vocabulary import OUTCOMES
from gym_trace.errors import CorruptTrace, InvalidOption
from gym_trace.format.batch_reader import Damage
from gym_trace.format.directory import sizes_of
from gym_trace.format.facts import FLAGS, changed_facts, with_flag
from gym_trace.playback.agent_returns import agent_returns
from gym_trace.playback.episode_columns import episodes_where
from gym_trace.playback.episode_index import index_of, whole_of
from gym_trace.playback.episode_table import outcome_codes
from gym_trace.playback.opened import ChunkCache
from gym_trace.playback.step_columns import values_of_steps
from gym_trace.playback.trace import Trace, storage_of, writable_storage_of
from gym_trace.printable import printable
from gym_trace.storage.protocol import ReadStorage
from gym_trace.tools.integrity.scan import CheckReport, LostSteps, Progress, examinations
from gym_trace.tools.statistics.summary import histogram
from gym_trace.tools.viewer.bins import CurveStore, heat
from gym_trace.tools.viewer.container import packed
from gym_trace.tools.viewer.episode import Opinions, ViewedEpisode, name_of
from gym_trace.tools.viewer.learning import History
from gym_trace.tools.viewer.marks import Key, Proof
from gym_trace.tools.viewer.microscope import VALUE_ERROR, VERSION, Figures, available
from gym_trace.tools.viewer.values import to_json

MOST_ROWS = 2000  # rows of the table of episodes in one answer
_SELECTIONS = 8  # number of cached selections
_MOST_NOTES = 20  # on damage
_MOST_CHARACTERS = 2000  # limit of a fact
_MOST_CHECKED = 4 << 30  # bytes; damage is not searched for in larger traces
_MOST_AGENTS, _READ_AT_ONCE = 8, 1000  # agents with a column of the list, and episodes that are read for them
_MOST_WORDS = 256  # distinct values of a text column in an answer
_MOST_PAIRS, _MOST_READ = 1_000_000, 20_000_000  # steps of a heat map that are counted, and that are read
_NO_SEED, _LARGEST = -1, np.iinfo(np.int64).max - 1
_OF_EPISODES = "lint", "check", "verify", "steps"  # tools with findings in episodes
_VERDICTS = ["", "identical", "close", "differs", "unverifiable", "damaged"]


class Edited(Exception):
    """The trace was edited in place, and an episode is no longer the one that the page shows."""


class ViewedTrace:
    """A trace with the caches of the viewer; thread-safe.

    Attributes:
        number: number of the trace on the page.
        setting: number of the setting that it is a run of.
        trace: current state of the trace; replaced by refresh().
        version: number that grows with each change.
        proofs: the latest run of each tool on the page, by its name, in the order of their starts.
        opinions: of policies, by key of the episode and label of the policy; see opinions.ask().
    """

    def __init__(
        self,
        number: int,
        trace: Trace,
        name: str,
        cache: ChunkCache,
        curve_bytes: int,
        is_shared: bool = False,
        setting: int = 0,
    ):
        self._is_shared = is_shared
        self.number, self.trace, self.version = number, copy.copy(trace), 1
        self.name, self.setting = name, setting
        self._live, self._cache, self._curve_bytes = copy.copy(trace), cache, curve_bytes
        self._curves = CurveStore(curve_bytes)  # one per trace, as copies of a trace have the same writers and episodes
        self._listed: tuple[tuple[str, int], ...] | None = None
        self._selections: OrderedDict[tuple[str, str, str], Array] = OrderedDict()
        self._known_flags: tuple[Trace, int, Array] | None = None
        self._known_history: History | None = None
        self._known_figures: Figures | None = None
        self._known_agents: tuple[Trace, dict[str, Array]] | None = None  # returns by name
        self._damages: list[Damage] = []
        self._damaged: dict[str, dict[int, list[str]]] = {}  # by writer and id of the episode
        self.proofs: dict[str, Proof] = {}
        self.opinions: Opinions = {}
        self._lock, self._refreshing, self._reading = Lock(), Lock(), Lock()

    @property
    def is_live(self) -> bool:
        """True while a process records into the trace."""
        return any(writer.alive for writer in index_of(self.trace).readers)

    def refresh(self) -> bool:
        """Update the trace if its files may have changed. Return True if there is anything new."""
        with self._refreshing:
            listed = self._files()
            if not self.is_live and listed == self._listed:
                return False
            before, was_live = index_of(self.trace).readers, self.is_live
            self._live.refresh()
            self._listed = listed
            if index_of(self._live).readers == before:
                return False
            with self._lock:
                self.trace = copy.copy(self._live)
                if not was_live:  # edited or repaired
                    self._curves = CurveStore(self._curve_bytes)
                    self._damages, self._damaged, self.proofs = [], {}, {}
                self._changed()
            self._cache.drop_gone()
        if self._known_figures is not None:
            self.read_figures()
            self.read_agents()
        return True

    def _files(self) -> tuple[tuple[str, int], ...]:
        """Return the files of the trace and their sizes, because an edit in place keeps the names."""
        return tuple(sorted(sizes_of(storage_of(self._live)).items()))

    def look_for_damage(self, on_progress: Progress | None = None) -> None:
        """Read every byte of a trace of moderate size on this machine, once, and mark damaged episodes in the list."""
        storage = storage_of(self.trace)
        if self.is_live or sum(sizes_of(storage).values()) > _MOST_CHECKED:
            return
        report = CheckReport()
        damaged: dict[str, dict[int, list[str]]] = {}
        for lost, problem in lost_steps(storage, report, on_progress):
            note = f"steps {lost.first_step:,} to {lost.first_step + lost.steps - 1:,}: {problem}"
            damaged.setdefault(lost.writer, {}).setdefault(lost.episode_id, []).append(note)
        if report.damages:
            with self._lock:
                self._damages, self._damaged = report.damages, damaged
                self._changed()

    def read_figures(self, on_progress: Progress | None = None) -> Figures:
        """Return the figures of the episodes. They are read once, and then columns of the list."""
        with self._reading:
            trace, known = self.trace, self._known_figures
            if known is None or known.trace is not trace:
                known = Figures(trace, known, on_progress)
                with self._lock:
                    self._known_figures = known
                    if known.columns and trace is self.trace:
                        self._changed()
            return known

    def read_agents(self, on_progress: Progress | None = None) -> None:
        """Read the returns of the agents, which are then columns of the list. While it is recorded, nothing is read."""
        trace, found = self.trace, dict[str, Array]()
        if self.is_live or not any(reader.about_or_empty.agents for reader in index_of(trace).readers):
            return
        for start in range(0, len(trace), _READ_AT_ONCE):
            if on_progress is not None:
                on_progress(start, len(trace))
            part = trace[start : start + _READ_AT_ONCE]
            names, values = agent_returns(index_of(part), part.scan)
            for name, returns in zip(names, values.T):
                if isinstance(name, str) and (name in found or len(found) < _MOST_AGENTS):
                    found.setdefault(name, np.full(len(trace), np.nan))[start : start + len(part)] = returns
        with self._lock:
            self._known_agents = trace, found
            self._changed()

    @property
    def _figures(self) -> Mapping[str, Array]:
        """The figures, if they were read; see read_figures()."""
        known = self._known_figures
        return known.columns if known is not None and known.trace is self.trace else {}

    def _is_damaged(self, trace: Trace, table: Array) -> Array:
        """Return True for episodes of the table with unreadable steps."""
        found = np.zeros(len(table), bool)
        for place, writer in enumerate(index_of(trace).readers if self._damaged else ()):
            ids = list(self._damaged.get(writer.writer, {}))
            found |= (table["writer"] == place) & np.isin(table["episode_id"], ids)
        return found

    def list_only(self, numbers: list[int]) -> None:
        """List only these episodes from now on, by their numbers in the whole trace."""
        with self._lock:
            self.trace = self.trace[np.isin(index_of(self.trace).whole_indices, numbers)]
            self._changed()

    def has_changed(self) -> None:
        """Have the page ask again."""
        with self._lock:
            self._changed()

    def _changed(self) -> None:
        self.version += 1
        self._selections.clear()

    def episode(self, index: int) -> ViewedEpisode:
        """Return an episode by its number in the whole trace. Raises IndexError."""
        trace = self.trace
        if whole_of(trace) is not trace:
            found = np.flatnonzero(index_of(trace).whole_indices == index)
            if not len(found):
                raise IndexError(f"no episode {index} among the chosen ones")
            index = int(found[0])
        return ViewedEpisode(trace, index, self._cache, self._curves, self.opinions)

    # -- descriptions -------------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return the description of the trace, which the page requests first."""
        trace = self.trace
        table, readers = trace.episodes, index_of(trace).readers
        ids = [writer.about_or_empty.environment.get("id") for writer in readers]
        damages = self._damages or trace.damage
        damage = [f"{Path(one.path).name if self._is_shared else one.path}: {one.problem}" for one in damages]
        lanes = int(table["lane"].max(initial=0)) + 1
        facts = [] if self._is_shared else [("directory", str(trace.directory))]
        facts.append(("writers", f"{len(readers):,}"))
        facts += [(key, str(to_json(value))[:_MOST_CHARACTERS]) for key, value in trace.facts.items() if key != "flags"]
        return {
            "trace": self.number,
            "setting": self.setting,
            "name": printable(self.name),
            "title": None,
            "env_id": next((env_id for env_id in ids if isinstance(env_id, str)), None),
            "episodes": len(table),
            "steps": int(table["steps"].sum()),
            "live": self.is_live,
            "lanes": lanes if lanes > 1 else None,
            "damage": len(damage),
            "damage_notes": [printable(note)[:_MOST_CHARACTERS] for note in damage[:_MOST_NOTES]],
            "version": self.version,
            "renderable": any(isinstance(env_id, str) for env_id in ids),
            "spaces": self._spaces(),
            "facts": facts,
        }

    def _spaces(self) -> dict[str, str]:
        try:
            layouts = index_of(self.trace).readers[0].layouts
        except CorruptTrace:
            return {}
        return {
            name: ", ".join(
                f"{name_of(leaf.path)}: {'any value' if leaf.dtype is None else f'{leaf.dtype} {leaf.shape}'}"
                for leaf in layout.leaves()
            )[:_MOST_CHARACTERS]
            for name, layout in (("observations", layouts.observations), ("actions", layouts.actions))
        }

    def episode_facts(self, index: int) -> dict[str, Any]:
        """Return the description of an episode and of its columns. Raises IndexError."""
        viewed = self.episode(index)
        one, columns = viewed.episode, viewed.columns
        total = one.total_reward
        flag = int(self._flags(viewed.trace)[viewed.index])
        return {
            "trace": self.number,
            "episode": index,
            "identity": viewed.identity,
            "writer": one.writer,
            "branch": viewed.branch,
            "length": len(one),
            "return": total if isinstance(total, float) and math.isfinite(total) else None,
            "outcome": one.outcome,
            "lane": one.lane if bool(viewed.trace.episodes["lane"].any()) else None,
            "seed": self._seed(viewed),
            "flag": FLAGS[flag - 1] if flag else None,
            "live": one.outcome == "running",
            "damage": self._damage_of(viewed),
            "frames": [column.name for column in columns.values() if column.kind == "frames"],
            "renderable": not one.first_step,
            "columns": viewed.plain_columns(),
            "facts": [(label, text[:_MOST_CHARACTERS]) for label, text in viewed.facts()],
            "figures": self._figures_of(viewed),
            "fps": viewed.fps,
            "version": self.version,
        }

    def _figures_of(self, viewed: ViewedEpisode) -> list[tuple[str, str]]:
        """Return the names and texts of the known figures of an episode, if they were read."""
        columns = self._figures if viewed.trace is self.trace else {}
        known = ((name, columns[name][viewed.index]) for name in (VERSION, VALUE_ERROR) if name in columns)
        return [(name, number(float(value))) for name, value in known if np.isfinite(value)]

    @staticmethod
    def _seed(viewed: ViewedEpisode) -> Any:
        try:
            return to_json(viewed.episode.seed)
        except CorruptTrace:
            return None

    def _damage_of(self, viewed: ViewedEpisode) -> list[str]:
        """Return notes on missing data of an episode."""
        one, notes = viewed.episode, []
        if one.first_step:
            notes.append(f"the first {one.first_step:,} steps are not here: filtered out or lost")
        if one.outcome == "lost":
            notes.append("the recording process died before the episode ended")
        if not one.has_final_observation:
            notes.append("the final observation is not known")
        return notes + (self._damaged.get(one.writer, {}).get(one.episode_id) or viewed.damage())

    # -- proofs -------------------------------------------------------------------------------------------------------

    def marks(self) -> list[dict[str, Any]]:
        """Return the findings of all tools, by episode and position; those of the whole trace come first."""
        marks = [(tool, mark) for tool, proof in list(self.proofs.items()) for mark in proof.marks]
        numbers = self._numbers_of({mark.key for _, mark in marks if mark.key is not None})
        shown = [
            {
                "tool": tool,
                "episode": None if mark.key is None else numbers[mark.key],
                "position": mark.position,
                "severity": mark.severity,
                "text": printable(mark.text),
            }
            for tool, mark in marks
            if mark.key is None or mark.key in numbers
        ]
        return sorted(shown, key=lambda mark: [-1 if mark[of] is None else mark[of] for of in ("episode", "position")])

    def _numbers_of(self, keys: Set[Key]) -> dict[Key, int]:
        """Return the numbers of episodes."""
        trace = self.trace
        rows = np.flatnonzero(np.isin(trace.episodes["episode_id"], [number for _, number in keys]))
        return {
            key: int(index_of(trace).whole_indices[row])
            for row, key in zip(rows.tolist(), self._keys(trace, rows))
            if key in keys
        }

    @staticmethod
    def _keys(trace: Trace, rows: Array) -> list[Key]:
        names, table = [reader.writer for reader in index_of(trace).readers], trace.episodes[rows]
        return [(names[writer], number) for writer, number in zip(table["writer"], table["episode_id"].tolist())]

    # -- the table of episodes ----------------------------------------------------------------------------------------

    def _flags(self, trace: Trace) -> Array:
        """Return the flag of each episode: 0 without one, otherwise its index in FLAGS plus 1."""
        known = self._known_flags
        if known is not None and known[0] is trace and known[1] == self.version:
            return known[2]
        version, codes = self.version, np.zeros(len(trace), np.uint8)
        for code, flag in enumerate(FLAGS, 1) if "flags" in trace.facts else ():
            codes[episodes_where(trace, f'flag == "{flag}"')] = code
        self._known_flags = trace, version, codes
        return codes

    def episodes(self, where: str, search: str, sort: str, offset: int, limit: int | None) -> bytes:
        """Return a part of the table of the selected episodes. limit: None: all. Raises InvalidOption."""
        trace = self.trace
        chosen = self._selected(trace, where, search, sort)
        rows = chosen[max(0, offset) :][: len(chosen) if limit is None else max(0, min(limit, MOST_ROWS))]
        numbers = {"episode": index_of(trace).whole_indices[rows].astype(np.int32)}
        table = trace.episodes[rows]
        flags = self._flags(trace)[rows]
        listed = [("episode", "number", "#"), ("length", "number", "steps"), ("return", "number", "return")]
        listed += [("outcome", "text", "outcome"), ("flag", "text", "flag")]
        words: dict[str, tuple[list[str], Array]] = {
            "outcome": (list(OUTCOMES), outcome_codes(table).astype(np.uint8)),
            "flag": (["", *FLAGS], flags.astype(np.uint8)),
            "damage": (["", "damaged"], self._is_damaged(trace, table).astype(np.uint8)),
        }
        numbers |= {"length": table["steps"].astype(np.int32), "return": table["return"].astype(np.float64)}
        if trace.episodes["lane"].any():
            listed.append(("lane", "number", "lane"))
            numbers["lane"] = table["lane"].astype(np.uint32)
        if (trace.episodes["seed"] != _NO_SEED).any():
            listed.append(("seed", "number", "seed"))
            numbers["seed"] = np.where(table["seed"] < 0, np.nan, table["seed"].astype(np.float64))
        known = self._known_agents
        for agent, returns in known[1].items() if known is not None and known[0] is trace else ():
            name = f"return[{json.dumps(agent)}]"  # as in --sort
            listed.append((name, "number", printable(agent)))
            numbers[name] = returns[rows]
        for name, figures in self._figures.items():
            if len(figures) == len(trace) and name in (VERSION, VALUE_ERROR):
                listed.append((name, "number", name))
                numbers[name] = figures[rows]
        if proofs := [one for name in _OF_EPISODES if (one := self.proofs.get(name)) and one.state == "done"]:
            keys = self._keys(trace, rows)
            verdicts = {key: word for proof in proofs for key, word in proof.verdicts.items()}
            found = Counter(mark.key for proof in proofs if proof.tool != "steps" for mark in proof.marks)
            listed += [("verify", "text", "verify")] if verdicts else []
            listed.append(("found", "number", "findings"))
            words["verify"] = _VERDICTS, np.array([_VERDICTS.index(verdicts.get(key, "")) for key in keys], np.uint8)
            numbers["found"] = np.array([found[key] for key in keys], np.int32)
        for name, values in self._texts(trace).items():
            if len(set(values)) > 1 and len(values) <= _MOST_WORDS:
                listed.append((name, "text", name))
                words[name] = values, table["writer"].astype(np.uint16)
        head = {
            "total": len(trace),
            "matched": len(chosen),
            "columns": [{"name": name, "kind": kind, "title": title} for name, kind, title in listed],
            "texts": {
                name: {"words": list(map(printable, names)), "codes": name} for name, (names, _) in words.items()
            },
        }
        return packed(head, [*numbers.items(), *((name, codes) for name, (_, codes) in words.items())])

    @staticmethod
    def _texts(trace: Trace) -> dict[str, list[str]]:
        """Return text columns, with one text per writer."""
        schemas = [writer.about_or_empty for writer in index_of(trace).readers]
        return {
            "split": [schema.split for schema in schemas],
            "environment": [str(schema.environment.get("id") or "") for schema in schemas],
            "writer": trace.writers,
        }

    def _selected(self, trace: Trace, where: str, search: str, sort: str) -> Array:
        key = where.strip(), search.strip(), sort.strip()
        with self._lock:
            if trace is self.trace and key in self._selections:
                self._selections.move_to_end(key)
                return self._selections[key]
        by_start = "start_time" if whole_of(trace) is trace else None  # a view keeps its order
        figure = key[2].removeprefix("-")
        if figure in available(trace):
            chosen = episodes_where(trace, key[0] or None, sort=by_start)
            values = self._figures_for(trace)[figure][chosen]
            chosen = chosen[np.argsort(-values if key[2].startswith("-") else values, kind="stable")]
        else:
            chosen = episodes_where(trace, key[0] or None, sort=_order(key[2]) or by_start)
        if key[1]:
            chosen = chosen[self._matches(trace, key[1])[chosen]]
        with self._lock:
            if trace is self.trace:
                self._selections[key] = chosen
                while len(self._selections) > _SELECTIONS:
                    self._selections.popitem(last=False)
        return chosen

    def _matches(self, trace: Trace, text: str) -> Array:
        """Return True for episodes with this text in a text column, or with this number or seed."""
        wanted, table = text.casefold(), trace.episodes
        found: Array = np.zeros(len(table), bool)
        if text.isascii() and text.isdecimal():  # ids of writers are full of digits
            number = min(int(text[:20]), _LARGEST)
            found |= table["seed"] == number
            found |= index_of(trace).whole_indices == number
            return found
        columns = [(list(OUTCOMES), outcome_codes(table)), (["", *FLAGS], self._flags(trace))]
        columns += [(names, table["writer"]) for names in self._texts(trace).values()]
        for names, codes in columns:
            found |= np.array([wanted in word.casefold() for word in names], bool)[codes]
        return found

    def histograms(self, where: str, search: str) -> dict[str, Any]:
        """Return histograms of returns, lengths, outcomes and flags of the selected episodes. Raises InvalidOption.

        Bins are those of the whole trace.
        """
        trace = self.trace
        chosen = self._selected(trace, where, search, "")
        table, is_all = trace.episodes, len(chosen) == len(trace)
        outcomes, flags = outcome_codes(table), self._flags(trace)
        found: dict[str, Any] = {}
        for name, field in (("return", "return"), ("length", "steps")):
            values = table[field].astype(np.float64)
            found[name] = _histogram_of(values if is_all else values[chosen], values)
        for name, names, codes in (("outcome", list(OUTCOMES), outcomes), ("flag", ["none", *FLAGS], flags)):
            counts = np.bincount(codes[chosen], minlength=len(names)).tolist()
            totals = np.bincount(codes, minlength=len(names)).tolist()
            shown = [i for i, total in enumerate(totals) if total or (name == "flag" and i)]
            found[name] = {"names": [names[i] for i in shown], "counts": [counts[i] for i in shown]}
        terms = {"return": "return", "length": "steps", "outcome": "outcome", "flag": "flag"}
        return {**found, "matched": len(chosen), "total": len(trace), "terms": terms}

    def _figures_for(self, trace: Trace) -> Mapping[str, Array]:
        """Return the figures of this state of the trace."""
        known = self.read_figures()
        return known.columns if known.trace is trace else Figures(trace, known).columns

    def learning(self, where: str, search: str, x: str = "steps", y: str = "return") -> bytes:
        """Return a curve, see learning.py, in which selected episodes are marked. Raises InvalidOption."""
        trace = self.trace
        names = available(trace)
        if y not in ("return", *names):
            raise InvalidOption(f"y={y!r}: pass one of return, {', '.join(names)}")
        figures = self._figures_for(trace) if x == VERSION or y != "return" else self._figures
        with self._lock:
            if self._known_history is None or self._known_history.trace is not trace:
                self._known_history = History(trace)
            history = self._known_history
        selected = np.zeros(len(trace), bool)
        selected[self._selected(trace, where, search, "")] = True
        return history.packed(selected, y, figures, names)

    def heat(self, x: str, y: str, where: str, search: str) -> dict[str, Any]:
        """Return a heat map of two columns of the steps of the selected episodes, see heat() of bins.py.

        x, y: columns of steps or terms of them, as in --steps-where. Damaged steps are skipped. Of very many steps,
        only every n-th is counted; of even more, only those of every n-th episode are read: "every" and "episodes".

        Raises InvalidOption.
        """
        trace = self.trace
        chosen = self._selected(trace, where, search, "")
        sizes = trace.episodes["steps"]
        episodes = chosen[:: 1 + int(sizes[chosen].sum()) // _MOST_READ]
        every = 1 + int(sizes[episodes].sum()) // _MOST_PAIRS
        blocks = values_of_steps(index_of(trace), f"{x}, {y}", episodes, on_damage=lambda damage: None)
        return {**heat(blocks, every), "every": every, "episodes": len(episodes), "of": len(chosen)}

    # -- flags --------------------------------------------------------------------------------------------------------

    def set_flag(self, index: int, identity: str, flag: str | None) -> dict[str, int]:
        """Keep a flag of an episode in the facts of the trace, and return how many episodes have which.

        identity: of the episode that the page shows as this one.

        Raises Edited, IndexError, InvalidOption, CorruptTrace, OSError.
        """
        self.refresh()
        trace = self.trace
        try:
            viewed = self.episode(index)
        except IndexError as error:
            raise Edited(f"the trace was edited, and has no episode {index} now") from error
        if viewed.identity != identity:
            raise Edited(f"the trace was edited, and episode {index} is another one now")
        one = viewed.episode
        with changed_facts(writable_storage_of(trace)) as facts:
            changed = with_flag(facts, one.writer, one.episode_id, flag)
            facts.clear()
            facts |= changed
        with self._lock:
            self._changed()
        counts = np.bincount(self._flags(trace), minlength=len(FLAGS) + 1).tolist()
        return dict(zip(FLAGS, counts[1:]))

    def filter_lines(self, where: str = "") -> list[dict[str, str]]:
        """Return command lines that make a trace of the good episodes, without the bad ones, and of a selection."""
        used = set(np.unique(self._flags(self.trace)).tolist())
        choices = [
            ("keep the good ones", 'flag == "good"', "good", 1),
            ("leave out the bad ones", 'flag != "bad"', "kept", 2),
            ("look again at these", 'flag == "look"', "look", 3),
        ]
        lines = [(title, condition, name) for title, condition, name, code in choices if code in used]
        lines += [("keep the selection", where.strip(), "selected")] if where.strip() else []
        directory = str(self.trace.directory)
        edit = ["gym-trace", "edit", "filter", directory, "--where"]
        return [
            {"title": title, "line": shlex.join([*edit, condition, "-o", f"{directory}-{name}"])}
            for title, condition, name in lines
        ]


def lost_steps(
    storage: ReadStorage, report: CheckReport, on_progress: Progress | None = None
) -> Iterator[tuple[LostSteps, str]]:
    """Read every byte of a trace into a report, and yield the steps that damage has cost, each with the problem."""
    for examination in examinations(storage, report, on_progress):
        for _ in examination.chunks():
            pass
        examination.finish()
        for loss in examination.losses:
            yield from ((lost, loss.damage.problem) for lost in loss.steps)


def _order(sort: str) -> str | None:
    """Translate a sort order of the page into the names of --sort."""
    names = {"episode": "index", "length": "steps", "environment": "writer"}
    keys = []
    for key in filter(None, (part.strip() for part in sort.split(","))):
        minus, name = ("-", key[1:]) if key.startswith("-") else ("", key)
        keys.append(minus + names.get(name, name))
    return ", ".join(keys) or None


def _histogram_of(chosen: Array, values: Array) -> dict[str, Any]:
    """Return a histogram of chosen values, in the bins of all values."""
    good = values[np.isfinite(values)]
    bins = histogram(good) if len(good) else None
    odd = int(np.count_nonzero(~np.isfinite(chosen)))
    if bins is None:
        return {"edges": [], "counts": [], "nan": odd, "ends": None}
    ends = float(good.min()), float(good.max())
    if len(bins["edges"]) == 2 and bins["edges"][0] == bins["edges"][1]:  # one value
        return {"edges": bins["edges"], "counts": [len(chosen) - odd], "nan": odd, "ends": ends}
    edges = np.array(bins["edges"])
    bins_of = np.searchsorted(edges, chosen[np.isfinite(chosen)], side="right") - 1
    counts = np.bincount(np.clip(bins_of, 0, len(edges) - 2), minlength=len(edges) - 1)
    return {"edges": bins["edges"], "counts": counts.tolist(), "nan": odd, "ends": ends}
