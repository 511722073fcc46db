"""Compare the trace of a dead recording with the diary of its victim: no step is lost or wrong."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from crash_victims import LANES, canonical, logged_calls
from numbered_lanes import rows_of

from gym_trace import Episode, Trace, check_trace, open_trace, repair_trace
from gym_trace.data.episode import infos_of
from gym_trace.playback.episode_index import index_of


@dataclasses.dataclass
class LoggedEpisode:
    """An episode as the victim knew it. Lists have one item per step."""

    observations: list[Any] = dataclasses.field(default_factory=list)
    steps: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)  # results of steps
    actions: list[Any] = dataclasses.field(default_factory=list)
    notes: list[Any] = dataclasses.field(default_factory=list)
    seed: int | None = None
    inside: int = 0  # steps that reached the environment itself
    alarmed: bool = False  # interrupted by an exception, perhaps between a step and its note in the diary

    @property
    def is_over(self) -> bool:
        return bool(self.steps) and any(flag == canonical(True) for flag in self.steps[-1][1:3])


def logged_episodes(path: Path) -> list[LoggedEpisode]:
    """Return the episodes in the diary of a single environment."""
    found: list[LoggedEpisode] = []
    for name, *values in logged_calls(path):
        if name == "reset":
            found.append(LoggedEpisode(seed=values[0]))
        elif name == "began":
            found[-1].observations.append(values[0])
        elif name == "ask":
            found[-1].actions.append(values[0])
            found[-1].notes.append(values[1])
        elif name == "inside":
            found[-1].inside += 1
        elif name == "alarm":
            if found:
                found[-1].alarmed = True
        else:
            found[-1].observations.append(values[0])
            found[-1].steps.append(tuple(values[1:]))
    return found


@dataclasses.dataclass
class StepCounts:
    """Counts of recovered, lost and wrong steps."""

    recovered: int = 0
    lost: int = 0
    wrong: int = 0
    pending: int = 0  # crashes in a step whose action is known
    unknown: int = 0  # crashes in a step whose action is unknown

    def __add__(self, other: StepCounts) -> StepCounts:
        return StepCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)))

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.wrong or self.unknown)


def compare_episodes(trace: Trace, parts: Iterable[Episode], told: list[LoggedEpisode]) -> StepCounts:
    """Compare the episodes of one writer with its diary."""
    verdict = StepCounts()
    parts = list(parts)
    unanswered = {life.seed for life in told if not life.observations}  # resets
    assert all(not len(part) for part in parts if part.seed in unanswered)
    parts = [part for part in parts if part.seed not in unanswered]
    told = [life for life in told if life.observations]
    for number, life in enumerate(told):
        if number >= len(parts):
            verdict.lost += len(life.steps) + 1
            continue
        verdict += compare_episode(trace, parts[number], life, number == len(told) - 1)
    verdict.wrong += len(parts) > len(told)
    return verdict


def compare_episode(trace: Trace, part: Episode, life: LoggedEpisode, is_last: bool) -> StepCounts:
    answered, steps = len(life.steps), len(part)
    verdict = StepCounts(recovered=min(answered, steps), lost=max(0, answered - steps))
    if steps > answered + ((is_last or life.alarmed) and len(life.actions) > answered):
        verdict.wrong += 1
    assert part.first_step == 0
    columns = [
        [canonical(row) for row in rows_of(trace.observation_space, part.observations, steps + 1)],
        [canonical(row) for row in rows_of(trace.action_space, part.actions, steps)],
        [_number(canonical(row)) for row in part.rewards],
        [canonical(bool(row)) for row in part.terminations],
        [canonical(bool(row)) for row in part.truncations],
    ]
    real = [life.observations, life.actions, *([step[i] for step in life.steps] for i in range(3))]
    real[2] = list(map(_number, real[2]))
    for mine, theirs in zip(columns, real):
        common = min(len(mine), len(theirs))
        verdict.wrong += sum(a != b for a, b in zip(mine[:common], theirs[:common]))
    verdict.wrong += _notes(part, life)
    if steps and infos_of(part) is not None:
        infos = [canonical(info) for info in part.infos]
        verdict.wrong += sum(info != step[3] for info, step in zip(infos, life.steps))
    if life.seed is not None:
        verdict.wrong += part.seed != life.seed
    verdict.wrong += life.is_over and part.outcome not in ("terminated", "truncated")
    if not (is_last and life.alarmed):  # the following reset may have cut it
        verdict.wrong += (part.outcome in ("lost", "closed")) != (is_last and not _ends(part))
    if is_last and not life.alarmed and life.inside > answered and steps == answered:
        action = part.pending_action
        known = action is not None and canonical(action) == life.actions[answered]
        verdict.pending, verdict.unknown = int(known), int(not known)
    return verdict


def _number(packed: Any) -> float:
    """A reward: rewards of several types are read as float64."""
    _, dtype, _, raw = packed
    return float(np.frombuffer(raw, dtype)[0])


def _ends(part: Episode) -> bool:
    return bool(len(part)) and bool(part.terminations[-1] or part.truncations[-1])


def _notes(part: Episode, life: LoggedEpisode) -> int:
    wrong = 0
    names = sorted({key for note in life.notes if note is not None for key, _ in note[1]})
    for name in names:
        rows = part.annotations.get(name, [None] * len(part))
        for row, note in zip(list(rows)[: len(life.steps)], life.notes):
            wanted = None if note is None else dict(note[1])[name]
            wrong += (None if row is None else canonical(row)) != wanted
    return wrong


# -- lanes ------------------------------------------------------------------------------------------------------------


def logged_lanes(path: Path, mode: str) -> tuple[list[list[LoggedEpisode]], int]:
    """Return the episodes of each lane in the diary of a vector environment, and the number of unanswered steps."""
    found: list[list[LoggedEpisode]] = [[] for _ in range(LANES)]
    over = np.zeros(LANES, bool)
    asked: list[Any] = []
    unanswered, mask = 0, []
    for name, *values in logged_calls(path):
        if name == "began":
            for lane, row in enumerate(_rows(values[0])):
                found[lane].append(LoggedEpisode(observations=[row]))
        elif name == "ask":
            asked = _rows(values[0])
        elif name == "inside":
            unanswered += 1
        elif name == "mask":
            mask = values[0]
        elif name == "masked":
            for lane in mask:
                found[lane].append(LoggedEpisode(observations=[_rows(values[0])[lane]]))
        elif name == "lanes":
            unanswered = 0
            observations, rewards, terminations, truncations = map(_rows, values[:4])
            for lane, episodes in enumerate(found):
                if mode == "NextStep" and over[lane]:
                    over[lane] = False
                    episodes.append(LoggedEpisode(observations=[observations[lane]]))
                    continue
                ends = terminations[lane], truncations[lane]
                over[lane] = any(end == canonical(np.True_) for end in ends)
                at_once = mode == "SameStep" and over[lane]
                episodes[-1].actions.append(asked[lane])
                episodes[-1].steps.append((rewards[lane], *ends))
                episodes[-1].observations.append(values[4][lane] if at_once else observations[lane])
                if at_once:
                    episodes.append(LoggedEpisode(observations=[observations[lane]]))
    return found, unanswered


def _rows(packed: tuple[Any, ...]) -> list[Any]:
    """Return the rows of an array in the form of canonical()."""
    _, dtype, shape, raw = packed
    return [canonical(row) for row in np.frombuffer(raw, dtype).reshape(shape)]


def compare_lanes(trace: Trace, path: Path, mode: str) -> StepCounts:
    """Compare the episodes of lanes with the diary."""
    told, unanswered = logged_lanes(path, mode)
    verdict = StepCounts()
    parts: list[list[Episode]] = [[] for _ in range(LANES)]
    for part in trace:
        parts[part.lane].append(part)
    extra: Counter[int] = Counter()
    for mine, lane in zip(parts, told):
        mine.sort(key=lambda part: part.episode_id)
        for part, life in zip(mine, lane):
            steps, answered = len(part), len(life.steps)
            verdict.recovered += min(steps, answered)
            verdict.lost += max(0, answered - steps)
            is_last = life is lane[-1]
            extra[max(0, steps - answered)] += 1
            verdict.wrong += steps > answered + (is_last and unanswered)
            columns = part.observations, part.actions, part.rewards, part.terminations, part.truncations
            real = life.observations, life.actions, *([step[i] for step in life.steps] for i in range(3))
            for rows, wanted in zip(columns, real):
                verdict.wrong += sum(canonical(row) != other for row, other in zip(rows, wanted))
        verdict.lost += sum(len(life.steps) + 1 for life in lane[len(mine) :])
        verdict.wrong += len(mine) > len(lane) + 1
    if unanswered and not extra[1]:
        verdict += _pending_lanes(trace, path, mode, parts)
    return verdict


def _pending_lanes(trace: Trace, path: Path, mode: str, parts: list[list[Episode]]) -> StepCounts:
    asked = [event for event in logged_calls(path) if event[0] == "ask"][-1]
    wanted = _rows(asked[1])
    known = []
    for lane, mine in enumerate(parts):
        if not mine or _ends(mine[-1]):
            continue  # this call is an autoreset, not a step
        action = mine[-1].pending_action
        known.append(action is not None and canonical(action) == wanted[lane])
    return StepCounts(pending=int(all(known)), unknown=int(not all(known)))


# -- a trace, before and after it is repaired -------------------------------------------------------------------------


def examine_crash(directory: Path, diaries: dict[str, Path], kind: str, spare: Path) -> StepCounts:
    """Read the trace of crashed recordings in every way. diaries: as in judged()."""
    report = check_trace(directory)
    assert report.damages == []
    trace = open_trace(directory)
    verdict = compare_trace(trace, diaries, kind)
    scanned = [(e.episode_id, e.lane, len(e), e.rewards.tolist()) for e in trace.scan()]
    assert scanned == [(e.episode_id, e.lane, len(e), e.rewards.tolist()) for e in trace]
    repaired = repair_trace(directory, spare)
    assert (repaired.losses, repaired.steps, report.steps) == ([], report.steps, sum(map(len, trace)))
    if not len(trace):
        assert not spare.exists()
        return verdict
    after = check_trace(spare)
    assert (after.damages, after.remarks, after.steps) == ([], [], report.steps)
    assert compare_trace(open_trace(spare), diaries, kind) == verdict
    assert compare_trace(open_trace(directory), diaries, kind) == verdict
    return verdict


UNLOGGED_WRITER = "other"  # id of a writer


def compare_trace(trace: Trace, diaries: dict[str, Path], kind: str) -> StepCounts:
    """Compare a trace with diaries, by writer id; the diary of a forked child has the key "child"."""
    verdict = StepCounts()
    trace = trace[[i for i in range(len(trace)) if index_of(trace).locate(i)[0].writer != UNLOGGED_WRITER]]
    if kind.startswith("lanes-"):
        path = diaries["w"]
        return compare_lanes(trace, path, kind.removeprefix("lanes-"))
    by_writer: dict[str, list[Episode]] = {writer: [] for writer in diaries if writer != "child"}
    for index, part in enumerate(trace):
        by_writer.setdefault(index_of(trace).locate(index)[0].writer, []).append(part)
    for writer, parts in by_writer.items():
        diary = diaries.get(writer) or diaries["child"]
        verdict += compare_episodes(trace, parts, logged_episodes(diary))
    if by_writer.keys() <= diaries.keys() and "child" in diaries:
        verdict += compare_episodes(trace, [], logged_episodes(diaries["child"]))
    return verdict
