"""Directory of a run, which is untrusted: trace, settings, environment, log of updates, checkpoints."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gym_trace.envs.consent import asked_of_argument, called, named, together, whole
from gym_trace.envs.seeding import EPISODES
from gym_trace.errors import CorruptRun, CorruptTrace, InvalidOption, TraceNotFound
from gym_trace.playback.trace import Trace, open_trace
from gym_trace.storage.local import open_regular, refuse_url
from gym_trace.storage.staging import new_file
from gym_trace.training.proof.chain import END, START, UPDATE, Chain, ChainWriter, LogEntry
from gym_trace.training.rollouts import Origin, RecordedRollouts, Shape
from gym_trace.training.settings import Settings, settings_from

WORKER, DROPPED = "worker", "dropped"  # kinds of entries; proof.chain has those of every log
MEAN = "mean_return"  # result of an update: mean return of the last 100 episodes
TOO_OLD = "more than max_lag={} versions old"
OF_ANOTHER = "of the policy before it took over another one"
_PUT_BACK = "put back a copy, or train again: events.jsonl has the settings, seed and steps, too"


@dataclass(frozen=True)
class Update:
    """One update, which makes a version.

    Attributes:
        rollouts: its experience, in order. steps: total of all updates so far. digest: see Learner.digest().
        results: losses and other facts. changed: what it took over instead of learning, see Learner.adopt().
    """

    version: int
    rollouts: tuple[Origin, ...]
    steps: int
    digest: str
    results: dict[str, float] = field(default_factory=dict)
    changed: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> list[Any]:
        """Return the content of its entry in the log."""
        return [self.version, list(map(list, self.rollouts)), self.steps, self.digest, self.results, self.changed]

    @classmethod
    def of(cls, content: Any) -> Update:
        """Return the update of an entry. Raises ValueError, TypeError, OverflowError."""
        version, rollouts, steps, digest, results, changed = content
        if not isinstance(results, dict) or not isinstance(changed, dict) or not _is_limit(changed.get("steps")):
            raise ValueError("no entry")
        takeovers = [name for name in ("checkpoint", "settings", "steps") if name in changed]
        if bool(rollouts) + bool(takeovers) != bool(version) or (changed and not takeovers):
            raise ValueError(f"version {version} has {len(rollouts)} rollouts, and takes over {len(takeovers)} things")
        return cls(int(version), tuple(map(origin_of, rollouts)), int(steps), str(digest), results, changed)


def origin_of(plain: Any) -> Origin:
    """Return the origin of a rollout. Raises ValueError, TypeError, OverflowError."""
    writer, first, version = plain
    return Origin(str(writer), int(first), int(version))


@dataclass
class Log:
    """Entries of the log of a run, by kind.

    Attributes:
        starts: facts of each start of the learner. seeds: of the generator that draws the actions of each writer.
        dropped: rollouts that were not learned from, the reason, and the version of the run at that time.
        end: facts of the end; None if the last entry is another one.
        chained: whether each entry has the digest of the one before; False: an older release wrote some entries.
    """

    updates: list[Update] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    seeds: dict[str, int] = field(default_factory=dict)
    dropped: list[tuple[Origin, str, int]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    chained: bool = True

    def add(self, entry: LogEntry) -> None:
        """Add an entry. Raises ValueError, TypeError, OverflowError."""
        content = entry.content
        self.end = None
        if entry.kind in (UPDATE, ""):
            update = Update.of(content)
            if update.version != len(self.updates):
                raise ValueError(f"version {update.version} follows version {len(self.updates) - 1}")
            self.updates.append(update)
            self.chained = self.chained and entry.kind == UPDATE
        elif entry.kind == WORKER:
            writer, seed = content
            if type(seed) is not int or not 0 <= seed < 1 << 32 or str(writer) in self.seeds:
                raise ValueError(f"invalid seed of writer {writer}")
            self.seeds[str(writer)] = seed
        elif entry.kind == DROPPED:
            version = len(self.updates) - 1
            self.dropped += [(origin_of(plain), str(reason), version) for *plain, reason in content]
        elif entry.kind == START:
            self.starts.append(dict(content))
        elif entry.kind == END:
            self.end = dict(content)


class Run:
    """A directory with trace/, run.json, updates.msgpack, checkpoints/, events.jsonl, and done after the end.

    Attributes:
        path: pathlib.Path.
        chain: the log as bytes.

    Examples:
        >>> run = gym_trace.training.Run("runs/one")
        >>> run.exists
        False
    """

    def __init__(self, path: str | os.PathLike[str]):
        if not os.path.isdir(path):
            refuse_url(path)
        self.path = Path(path).absolute()
        self.trace = self.path / "trace"
        self.checkpoints = self.path / "checkpoints"
        self._about = self.path / "run.json"
        self.chain = Chain(self._about, lambda: f"restore a copy, or {restart_advice(self)}")
        self._done = self.path / "done"

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    # -- settings -----------------------------------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        return self._about.is_file()

    def create(self, settings: Settings, seed: int, **about: Any) -> None:
        """Create the directory. Raises InvalidOption if it is not empty."""
        is_used = self.path.exists() and any(self.path.iterdir())
        try:
            if not is_used:
                self.trace.mkdir(parents=True)
        except FileExistsError:  # another process has just created it
            is_used = True
        if is_used:
            if not self.exists:
                raise InvalidOption(f"{self.path}: not empty; pass another directory")
            ways = "resume it (resume=True, or gym-trace train --resume), or pass another directory"
            raise InvalidOption(f"{self.path}: already has a run; {ways}")
        self.checkpoints.mkdir()
        with new_file(self._about) as staged:
            staged.write_text(json.dumps({"settings": settings.plain(), "seed": seed, **about}, indent=1) + "\n")

    @property
    def about(self) -> dict[str, Any]:
        """Contents of run.json. Raises TraceNotFound, and CorruptTrace, also for links in the run."""
        try:
            about = self.chain.facts()
        except FileNotFoundError:
            raise TraceNotFound(f"{self.path}: no training run here") from None
        except (OSError, ValueError) as error:
            raise CorruptRun(f"cannot be read: {error}", self._about, _PUT_BACK) from error
        for path in (self.trace, self.checkpoints, self._done):
            if path.is_symlink():
                raise _link_error(path)
        seed, steps = about.get("seed"), about.get("steps")
        fits = type(seed) is int and 0 <= seed < EPISODES and isinstance(about.get("settings"), dict)
        if not fits or not _is_limit(steps):
            raise CorruptRun("invalid run settings", self._about, _PUT_BACK)
        return about

    @property
    def settings(self) -> Settings:
        try:
            return settings_from(self.about["settings"])
        except InvalidOption as error:
            raise CorruptRun(f"invalid run settings: {error}", self._about, _PUT_BACK) from error

    def trusted_settings(self, trust: bool) -> Settings:
        """Return the settings. Raises InvalidOption if they name a model to import and the run is not trusted."""
        settings = self.settings
        if settings.model is not None and not trust:
            raise InvalidOption(
                f"{self.path}: the run names its model, {settings.model}, which would be imported: pass --trust, or "
                "trust=True, if you trust it"
            )
        return settings

    def to_resume(self, environment: dict[str, Any] | None, trust: bool) -> tuple[dict[str, Any], Settings]:
        """Return run.json and the settings of a run to resume. Raises InvalidOption, also for another environment."""
        about = self.about
        if not about.get("learn", True):
            raise InvalidOption(f"{self.path}: nothing learned in this run; start another one")
        if environment not in (None, about.get("environment")):
            raise InvalidOption(f"{self.path}: the run trains in {about.get('environment')}, not in {environment}")
        return about, self.trusted_settings(trust)

    # -- updates ------------------------------------------------------------------------------------------------------

    @property
    def log(self) -> Log:
        """All entries of the log. Raises CorruptTrace for a damaged or missing one."""
        found = Log()
        for entry in self.chain.entries():
            try:
                found.add(entry)
            except (ValueError, TypeError, OverflowError) as error:
                raise self.chain.damaged(f"{error}, in the entry at byte {entry.at}") from error
        return found

    def updates(self) -> list[Update]:
        """Return the updates from version 0, which the seed determines. An unfinished last one is skipped.

        Raises CorruptTrace for a damaged or missing one.
        """
        return self.log.updates

    def episodes(self, versions: int | slice | None = None, *, collected: bool = False) -> Trace:
        """Return the episodes that these versions were learned from, as a view of the trace; None: all versions.

        collected: return the episodes that these versions played instead. Only experience that was learned from counts;
        the annotation "version" of each step has the rest.

        Raises TraceNotFound, CorruptTrace.
        """
        trace, settings = open_trace(self.trace), self.settings
        shape = Shape.of(trace.observation_space, trace.action_space, settings.rollout, settings.num_envs, 0)
        recorded, episodes = RecordedRollouts(trace, shape), set[int]()
        log = self.updates()
        wanted = slice(None) if versions is None else versions
        chosen = range(len(log))[wanted] if isinstance(wanted, slice) else [range(len(log))[wanted]]
        wanted_versions = set(chosen)
        for update in log if collected else (log[version] for version in chosen):
            for origin in update.rollouts:
                if not collected or origin.version in wanted_versions:
                    episodes.update(recorded.episodes_of(origin))
        return trace[sorted(episodes)]

    def open_log(self, patience: float | None = None) -> ChainWriter:
        """Open the log to append entries, and cut off an unfinished one.

        Waits for the previous learner, which may still save. Raises OSError, CorruptTrace, InvalidOption.
        """
        log = self.chain.open(patience)
        try:
            newest = max(self.saved(), default=0)
            if newest >= max(log.kinds[UPDATE] + log.kinds[""], 1):
                raise CorruptRun(
                    f"ends before version {newest}, which has a checkpoint",
                    self.chain.path,
                    "restore a copy, or remove the checkpoint to continue from here",
                )
        except BaseException:
            log.close()
            raise
        return log

    def checkpoint(self, version: int) -> Path:
        return self.checkpoints / f"{version:09d}.safetensors"

    def saved(self) -> list[int]:
        """Return the versions that have checkpoints, in order."""
        found = [re.fullmatch(r"(\d{9})\.safetensors", path.name) for path in self.checkpoints.glob("*.safetensors")]
        return sorted(int(match[1]) for match in found if match)

    @property
    def is_done(self) -> bool:
        return self._done.exists()

    def set_done(self, done: bool) -> None:
        if done:
            os.close(open_regular(self._done, os.O_WRONLY | os.O_CREAT))
        else:
            self._done.unlink(missing_ok=True)


def new_runs(directory: str | os.PathLike[str], count: int) -> list[Run]:
    """Return the runs of `count` policies: one in the directory itself, several in policy-0, policy-1 … of it."""
    path = Path(directory)
    if count == 1:
        return [Run(path)]
    if path.exists() and any(path.iterdir()):
        raise InvalidOption(f"{path}: not empty; pass another directory, or resume its run")
    return [Run(path / f"policy-{number}") for number in range(count)]


def runs_in(directory: str | os.PathLike[str]) -> list[Run]:
    """Return the runs in a directory, in the order of the policies. Raises CorruptTrace for links.

    Examples:
        >>> [run.path.name for run in gym_trace.training.runs_in("runs")]  # doctest: +SKIP
    """
    path = Path(directory)
    found = [Run(path / f"policy-{number}") for number in range(sum(1 for _ in path.glob("policy-*")))]
    for run in found:
        if run.path.is_symlink():
            raise _link_error(run.path)
    own = Run(path)
    return found if found and not own.exists and all(run.exists for run in found) else [own]


def _link_error(path: Path) -> CorruptRun:
    """Return the error for a link in a run: writing would change its target."""
    return CorruptRun("is a link; links are not followed", path, "replace it with its target")


def restart_advice(run: Run) -> str:
    """Return the advice for a run that cannot continue."""
    saved = run.saved()
    if not saved:
        return "train again in another directory"
    return f"begin another run with the newest checkpoint: 'gym-trace train ... --weights {run.path}@{saved[-1]}'"


def _is_limit(steps: Any) -> bool:
    return steps is None or (type(steps) is int and 0 < steps < 1 << 62)


def steps_now(run: Run) -> int | None:
    """Return the limit of a run: that of run.json, or of its last extension."""
    changes = [update.changed["steps"] for update in run.updates() if "steps" in update.changed]
    return changes[-1] if changes else run.about.get("steps")


def settings_now(run: Run) -> Settings:
    """Return the settings of the last version: in a population they change."""
    changes = [update.changed["settings"] for update in run.updates() if "settings" in update.changed]
    return settings_from(changes[-1]) if changes else run.settings


_TYPES: dict[str, Any] = {
    "id": (str, type(None)),
    "make": (str, type(None)),
    "kwargs": dict,
    "imports": list,
    "wrappers": list,
    "max_episode_steps": (int, type(None)),
}


def described_environment(directory: str | os.PathLike[str], trust: bool = False) -> dict[str, Any]:
    """Return the description of a run's environment, as passed to train(describe=).

    Returns:
        id or make (MODULE:FUNCTION), kwargs, imports, wrappers (MODULE:CALLABLE) and max_episode_steps, where given.

    Raises:
        InvalidOption: it would import or call names that only the run contains, without trust; or the run was
            started from Python, without a description.
        TraceNotFound, CorruptTrace

    Examples:
        >>> described = gym_trace.training.described_environment("runs/cartpole")  # doctest: +SKIP
        >>> gym_trace.training.needs_trust(described)  # doctest: +SKIP
    """
    about = runs_in(directory)[0].about.get("environment")
    if about is None:
        place = os.fspath(directory)
        raise InvalidOption(
            f"{place}: started from Python; resume it there: gym_trace.train(make_env, {place!r}, resume=True)"
        )
    fields: dict[str, Any] = {"id": None, "make": None, "kwargs": {}, "imports": [], "wrappers": []}
    fields |= {"max_episode_steps": None, **(about if isinstance(about, dict) else {"id": 0})}
    is_valid = set(fields) == set(_TYPES) and all(isinstance(fields[name], kind) for name, kind in _TYPES.items())
    if not is_valid or not all(isinstance(name, str) for name in (*fields["imports"], *fields["wrappers"])):
        raise CorruptTrace(f"{os.fspath(directory)}: invalid environment in run.json")
    actions = together(_trusted_actions(fields))
    if actions and not trust:
        raise InvalidOption(f"{os.fspath(directory)}: the run would {actions}; pass --trust if you trust it")
    return dict(about)


def needs_trust(described: Mapping[str, Any]) -> bool:
    """Return True if a run in this environment can be resumed only with trust.

    Examples:
        >>> described = gym_trace.training.described_environment("runs/cartpole")  # doctest: +SKIP
        >>> gym_trace.training.needs_trust(described)  # doctest: +SKIP
    """
    return bool(_trusted_actions({"id": None, "make": None, "kwargs": {}, "imports": (), "wrappers": (), **described}))


def _trusted_actions(fields: Mapping[str, Any]) -> list[str]:
    """Return the actions for which a run must be trusted, in words."""
    actions = [f"import {named(module)}" for module in fields["imports"]]
    if fields["id"] and ":" in fields["id"]:
        actions.append(f"import {named(fields['id'].partition(':')[0])}")
    kwargs = fields["kwargs"]
    if fields["make"]:
        arguments = {name: ["value", value] for name, value in kwargs.items()}
        actions.append(f"call {called(fields['make'], arguments)}")
    actions += [f"call {named(name)}" for name in fields["wrappers"] if name]
    risks = {name: asked_of_argument(name, value) for name, value in kwargs.items()}
    return actions + [f"pass {named(name)}={whole(kwargs[name])}, which {why}" for name, why in risks.items() if why]
