"""Prove a run: relearn every version, and recompute every step with the version that acted. Needs PyTorch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from gym_trace.data.showing.text import count
from gym_trace.data.values import Array
from gym_trace.envs.recipe import recorded_recipe
from gym_trace.errors import CorruptRun, CorruptTrace, ReplayDiverged
from gym_trace.playback.trace import open_trace
from gym_trace.training.network.learning import REMOVE, Learner, read_checkpoint
from gym_trace.training.network.model import ActorCritic, set_weights, source_of, tensors
from gym_trace.training.proof.anchors import check_anchor
from gym_trace.training.proof.chain import END, START, UPDATE, count_entries
from gym_trace.training.proof.result import Proof, ReportProgress, first_difference, progress_reporter, tally
from gym_trace.training.proof.state import distance, notes_on
from gym_trace.training.proof.trace_checks import TIME_LIMIT, beyond_id, check_bytes, check_files, kind_of, replay
from gym_trace.training.rollouts import MeanReturn, Origin, RecordedRollouts
from gym_trace.training.run import DROPPED, MEAN, OF_ANOTHER, TOO_OLD, WORKER, Log, Run, Update, runs_in, steps_now
from gym_trace.training.settings import ANY
from gym_trace.training.step_account import STAGGER, UNUSED, UnlearnedSteps, count_seeded, rollouts_of, unlearned_steps
from gym_trace.training.versions import BEST, checkpoint_files, initial_learner, relearn

_TOLERANCE = 1e-4  # absolute and relative, for logprob and value computed by other kernels or batches
_NOT_COMPUTED = {"seconds", MEAN}  # results in the log that an update does not compute


def verify_run(
    directory: str | os.PathLike[str],
    on_progress: Callable[[Proof], Any] | None = None,
    *,
    trust: bool = False,
    replays: bool = True,
    make_env: Callable[[], Any] | None = None,
    anchor: str | None = None,
) -> Proof:
    """Prove that the weights of a run follow from its trace, and the trace from the weights.

    Relearns all versions, and compares them, their losses and the checkpoints; recomputes logprob and value of each
    recorded step with the version that acted; accounts for every step of the trace; replays the episodes in their
    environment. Verifies the policies of a population in turn.

    Args:
        on_progress: called after each version and episode; a truthy result ends the proof.
        trust: allow imports and calls of names that only the run contains.
        replays: whether to replay the episodes. make_env: makes their environment; None: the recorded one.
        anchor: file with the head of the log, or "git-note"; see write_anchor().

    Raises:
        TraceNotFound, CorruptTrace: the run is missing or damaged.
        InvalidOption: the run names a model, and is not trusted.

    Examples:
        >>> proof = gym_trace.training.verify_run("runs/cartpole")  # doctest: +SKIP
        >>> proof.differs  # doctest: +SKIP
    """
    proof = Proof()
    report = progress_reporter(proof, on_progress)
    for run in runs_in(directory):
        prover = _RunProof(run, proof, report, trust)
        check_bytes(run.trace, proof)
        with first_difference(proof):
            prover.make(anchor)
            replay(prover.trace, proof, replays, make_env, trust, report)
        if proof.differs:
            break
    return proof


class _RunProof:
    """Proves one run, and adds the results to a Proof."""

    def __init__(self, run: Run, proof: Proof, report: ReportProgress, trust: bool):
        self._run, self._proof, self._report = run, proof, report
        self._about, self._settings, self._log = run.about, run.trusted_settings(trust), run.log
        self._updates = self._log.updates
        if not self._updates:
            raise CorruptRun("has no versions", run.path, "learning has not started; run 'gym-trace train --resume'")
        self.trace = open_trace(run.trace)
        if not len(self.trace):
            raise CorruptTrace("has no episodes", run.trace)
        self._learner = initial_learner(run, trust, device=None)
        self._recorded = RecordedRollouts(self.trace, self._learner.shape)

    def make(self, anchor: str | None) -> None:
        run, proof, log = self._run, self._proof, self._log
        proof.of += len(self._updates)
        proof.doing, proof.done, proof.out_of = "version", 0, len(self._updates)
        notes = notes_on([self._about.get("made_with"), *log.starts])
        model = self._settings.model
        changed = [] if source_of(model) == self._about.get("model_source") else [f"the source of {model} has changed"]
        proof.notes = list(dict.fromkeys([*proof.notes, *notes, *changed]))
        if log.chained:
            count_entries(run.chain.kinds(), (START, UPDATE, WORKER, DROPPED, END), "run.json", proof)
        else:
            proof.unproved.append("order and end of the log, best, discarded rollouts: an older release wrote it")
        if anchor is not None:
            check_anchor(run.chain, anchor, proof)
        self._check_environment()
        saved = checkpoint_files(run)
        known = {*(path.name for path in saved), *(update.changed.get("checkpoint") for update in self._updates)}
        others = sorted(path.name for path in run.checkpoints.glob("[!.]*") if path.name not in known)
        proof.unproved += [f"{run.checkpoints / name}: no version of the run has this name" for name in others]
        later = [version for version in saved.values() if version >= len(self._updates)]
        if later:
            raise CorruptTrace(f"{run.path}: the log ends before version {min(later)}, which has a checkpoint")
        self._check_begin()
        left = self._account()
        self._check_end(self._check_versions(saved, left, exact=not notes))

    def _check_environment(self) -> None:
        """Compare the environment in run.json with the recorded one."""
        described, spec = self._about.get("environment"), self.trace.env_spec
        if described is None:  # the run was started from Python
            return
        described = described if isinstance(described, dict) else {}
        where = f"{self._run.path / 'run.json'}: the environment"
        recipe = recorded_recipe(spec)
        recorded_id = spec.get("id") if recipe is None else recipe.id
        if described.get("id") and str(described["id"]).rpartition(":")[2] != recorded_id:
            raise ReplayDiverged(f"{where} is {described['id']}, and the trace was recorded in {recorded_id}")
        kwargs, wrappers = described.get("kwargs") or {}, described.get("wrappers") or []
        if not isinstance(kwargs, dict) or not isinstance(wrappers, list):
            raise CorruptTrace(f"{where} is malformed")
        if recipe is None or not described.get("id") or described.get("make") or spec.get("lanes"):
            self._proof.unproved.append(f"{where}, its arguments and wrappers: the trace has no single id for it")
            return
        for name, value in kwargs.items():
            if recipe.kwargs.get(name) != ["value", value]:
                raise ReplayDiverged(f"{where} has {name}={value!r}, and the trace {recipe.kwargs.get(name)}")
        steps = described.get("max_episode_steps")
        if steps is None:
            steps = getattr(gymnasium.registry.get(recipe.id), "max_episode_steps", None)
        limits = [
            (args or {}).get("max_episode_steps") for name, args in recipe.wrappers if kind_of(name) == TIME_LIMIT
        ]
        kwargs_added, wrapped = beyond_id(recipe)
        wrappers_added = [kind for name, _ in wrapped if (kind := kind_of(name)) != TIME_LIMIT]
        for what, then, now in (
            ("arguments", {}, {name: stored[-1] for name, stored in kwargs_added.items() if name not in kwargs}),
            ("limit", [] if steps in (None, -1) else [["value", steps]], limits),
            ("wrappers", [kind_of(str(name)) for name in wrappers], wrappers_added),
        ):
            if then != now:
                self._proof.unproved.append(f"{where}: its {what}, {then} there and {now} in the trace")
        self._proof.proved.append(f"{where} is that of the trace: {recipe.id}")

    def _check_begin(self) -> None:
        """Compare seeds, reward shaping and the first weights of other runs with run.json."""
        run, proof, about, trace = self._run, self._proof, self._about, self.trace
        found = count_seeded(self._log, trace, self._settings, about["seed"])
        why = f"they are not those of the run's seed, {about['seed']}"
        tally(proof, found, len(trace), "episodes and their actions", f"have seeds of the run's, {about['seed']}", why)
        takeovers = [update.changed["settings"] for update in self._updates if "settings" in update.changed]
        all_settings = [self._about["settings"], *(own for own in takeovers if isinstance(own, dict))]
        shaping = [
            {"reward_shaping": weights} if (weights := own.get("reward_shaping")) else None for own in all_settings
        ]
        for number in range(len(trace)):
            if (options := trace[number].options) not in shaping:
                raise ReplayDiverged(f"{run.trace}: the options of the reset of episode {number} are {options!r:.200}, "
                                     f"and by the settings {shaping[0]}")  # fmt: skip
        begins = about.get("begins") or {}
        second = self._updates[1].changed if len(self._updates) > 1 else {}
        if bool(about.get("begins_with")) != bool(begins) or (begins and len(self._updates) > 1 and second != begins):
            raise ReplayDiverged(f"{run.path / 'run.json'}: the run began with {about.get('begins_with')}, and its log "
                                 f"with {second.get('checkpoint')}")  # fmt: skip

    # -- versions -----------------------------------------------------------------------------------------------------

    def _check_versions(self, saved: dict[Path, int], left: list[UnlearnedSteps], exact: bool) -> float | None:
        """Relearn and compare all versions; return the largest mean return of 100 episodes, None without one."""
        run, proof, log, learner = self._run, self._proof, self._log, self._learner
        settings = self._settings
        acting = _ActedStepsCheck(log, self._recorded, learner, left, exact and settings.inference == "actor")
        best = _BestVersionCheck(self._recorded, log.chained)
        steps = 0
        for update, losses in relearn(run, learner, self._updates):
            steps += settings.batch_steps if update.rollouts else 0
            self._compare(update, losses, steps)
            best.add(update)
            for path in [path for path, version in saved.items() if version == update.version]:
                _compare_checkpoint(path, learner, update.steps)
                proof.checkpoints += 1
            acting.check(update.version, learner)
            proof.versions, proof.done = proof.versions + 1, proof.done + 1
            self._report()
        acting.finish()
        learnt = sum(bool(update.rollouts) for update in self._updates)
        takeovers = [update for update in self._updates if update.changed]
        takeover_text = f", {len(takeovers):,} taken over" if takeovers else ""
        checked = f"{count(len(self._updates), 'version')} and {count(len(saved), 'checkpoint')}"
        proof.proved.append(f"{checked}: {learnt:,} learned again{takeover_text}, bit for bit; losses and steps, too")
        total = int(self.trace.episodes["steps"].sum(dtype=np.int64))
        acting.add_to(proof, total)
        best.check(saved.get(run.checkpoints / BEST), proof, log)
        begun = [update.changed["checkpoint"] for update in takeovers if "checkpoint" in update.changed]
        proof.unproved += [f"how the weights of {name} were learned: another run" for name in dict.fromkeys(begun)]
        for update in takeovers:
            if "settings" in update.changed and update.changed != self._about.get("begins"):
                proof.unproved.append(f"why version {update.version} has other settings")
        return best.mean

    def _compare(self, update: Update, losses: dict[str, float] | None, steps: int) -> None:
        """Compare the steps and the results of an update with the log."""
        where = f"{self._run.path}: version {update.version}"
        if update.steps != steps:
            raise ReplayDiverged(f"{where}: the log says {update.steps:,} steps, and the updates so far have {steps:,}")
        if losses is None:
            return
        names = losses.keys() | (update.results.keys() - _NOT_COMPUTED if self._log.chained else set())
        for name in sorted(names):
            if (then := update.results.get(name)) != (now := losses.get(name)) and (
                self._log.chained or then is not None
            ):
                raise ReplayDiverged(f"{where}: {name} is {then} in the log, and {now} when learned again")

    # -- account and end ----------------------------------------------------------------------------------------------

    def _account(self) -> list[UnlearnedSteps]:
        """Check that each step of the trace was learned from at most once; return the steps that were not."""
        log, settings = self._log, self._settings
        found = unlearned_steps(log, self.trace, settings)
        last = len(self._updates) - 1
        for left in found:
            acted = self._recorded.last_version(left.writer, left.begin, left.end)
            if acted > last:
                raise ReplayDiverged(f"{self._run.trace}: version {acted} acted in steps {left.begin} to {left.end} of "
                                     f"writer {left.writer}, and the log ends with version {last}")  # fmt: skip
        if log.end is not None and [list(left) for left in found] != log.end.get("left"):
            raise ReplayDiverged(f"{self._run.trace}: the steps that were not learned from are not those that the log "
                                 "names; episodes are missing")  # fmt: skip
        self._check_dropped()
        lanes = settings.num_envs
        learnt = sum(len(update.rollouts) for update in self._updates) * settings.rollout_steps
        reasons = Counter[str]()
        for left in found:
            reasons[left.reason] += (left.end - left.begin) * lanes
        for _, reason, _ in log.dropped:
            reasons[reason] += settings.rollout_steps
        not_learnt = "".join(f"; {steps:,} not: {reason}" for reason, steps in reasons.items())
        self._proof.proved.append(f"{count(learnt, 'step')} learned from once{not_learnt}")
        return found

    def _check_dropped(self) -> None:
        """Check the reasons why rollouts were discarded, and the age of the others."""
        settings, log = self._settings, self._log
        begun = [update.version for update in self._updates if update.changed]
        for origin, reason, version in log.dropped:
            least = max((taken_over for taken_over in begun if taken_over <= version), default=0)
            too_old = settings.lag == ANY and origin.version < version - settings.max_lag
            is_other = reason == OF_ANOTHER and origin.version < least
            if not is_other and not (reason == TOO_OLD.format(settings.max_lag) and too_old):
                steps = f"steps from {origin.first_step} on of writer {origin.writer}"
                raise ReplayDiverged(f"{self._run.path}: {steps} were not learned from: the log says {reason}, which "
                                     "does not hold")  # fmt: skip
        ages = [0]
        most = settings.max_lag if settings.lag == ANY else int(settings.lag)
        for update in self._updates:
            for origin in update.rollouts:
                ages.append(update.version - 1 - origin.version)
                if ages[-1] > most:
                    raise ReplayDiverged(f"{self._run.path}: version {update.version} was learned from steps in which "
                                         f"version {origin.version} acted: more than {most} versions old")  # fmt: skip
                if origin.version >= update.version:
                    raise ReplayDiverged(f"{self._run.path}: version {origin.version} is said to have acted before "
                                         f"version {update.version} was learned")  # fmt: skip

        self._proof.proved.append(f"lag {settings.lag}: no step was more than {count(max(ages), 'version')} old")

    def _check_end(self, best: float | None) -> None:
        """Check why and when the run ended. best: largest mean return of 100 episodes."""
        run, log, proof = self._run, self._log, self._proof
        limit, steps, last = steps_now(run), self._updates[-1].steps, len(self._updates) - 1
        if limit is not None and steps - self._settings.batch_steps >= limit:
            raise ReplayDiverged(f"{run.path}: the run went on to {steps:,} steps, and its limit is {limit:,}")
        if log.end is None:
            if log.chained and run.is_done:
                raise ReplayDiverged(f"{run.path}: the run is done, and its log has no end: it was cut")
            if log.chained:
                proof.unproved.append(
                    f"the end: the log has none, because the run was killed, or still runs; what followed version "
                    f"{last} may be missing"
                )
            return
        check_files(run.trace, log.end.get("files"), proof)
        stopped = log.end.get("stopped")
        if stopped == "done" and (limit is None or steps < limit):
            raise ReplayDiverged(f"{run.path}: the run ended as done after {steps:,} of {limit or 0:,} steps")
        wanted = log.end.get("until_return", self._about.get("until_return"))
        if len(log.starts) == 1 and wanted != self._about.get("until_return"):
            raise ReplayDiverged(f"{run.path}: run.json ends at a mean return of "
                                 f"{self._about.get('until_return')}, and the log at {wanted}")  # fmt: skip
        why = "done"
        if stopped == "return":
            why = f"reached its return of {wanted}"
            if best is None or not isinstance(wanted, (int, float)) or not best >= wanted:
                best_so_far = "nothing is known" if best is None else f"the largest is {best:.6g}"
                proof.unproved.append(
                    f"that the run {why}: of the means of 100 episodes that it learned from, {best_so_far}"
                )
        elif stopped != "done":
            if run.is_done:
                raise ReplayDiverged(f"{run.path}: the run is done, and its log says that it was stopped")
            why = {"seconds": "reached its time"}.get(str(stopped), "stopped")
            proof.limits.append(f"why the run ended after {count(steps, 'step')}: it says {stopped}")
        proof.proved.append(f"the end: {why} after {count(steps, 'step')}, with version {last}")


class _ActedStepsCheck:
    """Recomputes logprob and value of recorded steps, with the version that acted according to log and trace.

    left: steps that were not learned from; the trace has their versions.
    exact: compare bit for bit, and compare actions with samples from the worker's generator.
    """

    def __init__(self, log: Log, recorded: RecordedRollouts, learner: Learner, left: list[UnlearnedSteps], exact: bool):
        self._recorded, self._settings, self._exact = recorded, learner.settings, exact
        self._device = "cpu" if self._settings.inference == "actor" else self._settings.device
        shape = learner.shape
        self._model = ActorCritic(shape.leaves, shape.actions, self._settings).to(self._device)
        self._generators = {writer: torch.Generator().manual_seed(seed) for writer, seed in log.seeds.items() if exact}
        self._states: dict[tuple[str, int], Array] = {}  # recurrent state before a step, by writer and step
        self._waiting: dict[int, list[tuple[Origin, RecordedRollouts, range]]] = {}  # steps in which each version acted
        self._steps = self._drawn = 0
        length = self._settings.rollout
        runs = [(origin, length) for origin, _ in rollouts_of(log)]
        for part in left:
            for begin in range(part.begin, part.end, length) if part.reason == UNUSED else ():
                steps = min(length, part.end - begin)
                versions = recorded.of_length(steps).annotated(Origin(part.writer, begin, 0), "version")
                runs.append((Origin(part.writer, begin, int(versions[0, 0])), steps))
        for origin, steps in sorted(runs):
            rollouts = recorded.of_length(steps)
            for version, run_steps in self._runs(origin, rollouts):
                self._waiting.setdefault(version, []).append((origin, rollouts, run_steps))

    def _runs(self, origin: Origin, recorded: RecordedRollouts) -> Iterator[tuple[int, range]]:
        """Yield each version that acted in a rollout according to the trace, with its steps."""
        versions = recorded.annotated(origin, "version").astype(np.int64)
        first = versions[:, 0]
        wrong = (versions != first[:, None]).any() or (self._settings.inference == "actor" and len(set(first)) > 1)
        if first[0] != origin.version or wrong:
            recorded_versions = ", ".join(map(str, sorted(set(versions.ravel().tolist()))))
            raise ReplayDiverged(
                f"steps {origin.first_step} to {origin.first_step + len(versions)} of writer {origin.writer}: the log "
                f"says that version {origin.version} acted, and the trace says {recorded_versions}"
            )
        bounds = [0, *(np.flatnonzero(np.diff(first)) + 1).tolist(), len(first)]
        for begin, end in pairwise(bounds):
            yield int(first[begin]), range(begin, end)

    def check(self, version: int, learner: Learner) -> None:
        """Check the steps in which this version, which the learner has, acted. Raises ReplayDiverged."""
        if version in self._waiting:
            set_weights(self._model, learner.weights())
        with _one_thread(), torch.inference_mode():
            for run in self._waiting.pop(version, []):
                self._check(*run)

    def _check(self, origin: Origin, recorded: RecordedRollouts, steps: range) -> None:
        rollout = recorded.read(origin)
        values = recorded.annotated(origin, "value").astype(np.float32)
        model, device, generator = self._model, self._device, self._generators.get(origin.writer)
        key = origin.writer, origin.first_step + steps.start
        state = self._states.pop(key, rollout.state)
        if not steps.start and state.tobytes() != rollout.state.tobytes() and self._exact:
            raise ReplayDiverged(f"{self._named(origin, 0)}: state differs when computed again")
        for step in steps:
            observed = tensors([column[step] for column in rollout.observations], device)
            distribution, value, after = model(observed, torch.from_numpy(state).to(device))
            if generator is not None:
                drawn = distribution.sample(generator).numpy()
                self._compare(origin, step, "action", rollout.actions[step], drawn)
                self._drawn += len(drawn)
            actions = torch.from_numpy(rollout.actions[step]).to(device)
            self._compare(origin, step, "logprob", rollout.logprob[step], distribution.log_prob(actions).cpu().numpy())
            self._compare(origin, step, "value", values[step], model.value(value).cpu().numpy())
            state = after.cpu().numpy().copy()
            state[rollout.terminations[step] | rollout.truncations[step]] = 0.0
            self._steps += len(values[step])
        if state.size:
            self._states[origin.writer, origin.first_step + steps.stop] = state

    def _compare(self, origin: Origin, step: int, name: str, recorded: Array, now: Array) -> None:
        is_same = recorded.tobytes() == now.tobytes() or np.array_equal(recorded, now)
        if not is_same and not (not self._exact and np.allclose(now, recorded, _TOLERANCE, _TOLERANCE)):
            by = float(np.abs(recorded.astype(float) - now).max())
            raise ReplayDiverged(f"{self._named(origin, step)}: {name} differs by {by:.3g} from what version "
                                 f"{origin.version}, which is said to have acted, computes")  # fmt: skip

    def _named(self, origin: Origin, step: int) -> str:
        return f"step {origin.first_step + step} of writer {origin.writer}"

    def finish(self) -> None:
        """Raise ReplayDiverged if a version acted that is not in the log."""
        for version, rollouts in self._waiting.items():
            raise ReplayDiverged(f"{self._named(rollouts[0][0], 0)}: version {version} acted, which the log lacks")

    def add_to(self, proof: Proof, total: int) -> None:
        """Add the results to the proof. total: number of recorded steps."""
        how = "bit for bit" if self._exact else f"within {_TOLERANCE:g}"
        tally(
            proof,
            self._steps,
            total,
            "steps: logprob and value",
            f"as the version that acted computes them, {how}",
            STAGGER,
        )
        why = "the log lacks the seeds of their generators" if self._exact else "a server, or other kernels, drew them"
        tally(proof, self._drawn, self._steps, "actions", "as the generator of their worker drew them", why)


class _BestVersionCheck:
    """Recomputes the mean returns of the last 100 episodes, and the best version."""

    def __init__(self, recorded: RecordedRollouts, chained: bool):
        self._recorded, self._mean, self._chained = recorded, MeanReturn(), chained
        self._best: tuple[float, int] | None = None
        self._second: tuple[float, int] | None = None  # the best one before
        self._last = 0

    def add(self, update: Update) -> None:
        """Add an update. Raises ReplayDiverged if the log has another mean."""
        self._last = update.version
        if "checkpoint" in update.changed:
            self._mean = MeanReturn()
        mean = self._mean.add(self._recorded.returns(origin) for origin in update.rollouts)
        mean = mean if update.rollouts else None
        then = update.results.get(MEAN)
        if then != mean and (then is not None or self._chained):
            raise ReplayDiverged(f"version {update.version}: {MEAN} is {then} in the log, and {mean} in the trace")
        if MEAN in update.results and mean is not None and (self._best is None or mean > self._best[0]):
            self._best, self._second = (mean, update.version), self._best

    @property
    def mean(self) -> float | None:
        return None if self._best is None else self._best[0]

    def check(self, saved: int | None, proof: Proof, log: Log) -> None:
        """Check the version of the best checkpoint."""
        if self._best is None:
            if saved is not None:
                proof.unproved.append(f"that {BEST} is the best version: the log has no mean returns")
            return
        mean, version = self._best
        if saved is None:
            if any(start.get("save_best", True) for start in log.starts):
                proof.unproved.append(f"{BEST}: is missing; version {version} has the largest mean return, {mean:.6g}")
            return
        # A killed run may not have saved its last best version.
        is_late = log.end is None and version == self._last and self._second is not None and saved == self._second[1]
        if saved != version and not is_late:
            raise ReplayDiverged(
                f"{BEST}: is version {saved}; version {version} has the largest mean return, {mean:.6g}"
            )
        proof.proved.append(f"{BEST}: version {saved}, with the largest mean return of 100 episodes, {mean:.6g}")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute in one thread, as workers do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _compare_checkpoint(path: Path, learner: Learner, steps: int) -> None:
    """Raise CorruptTrace for a checkpoint with other tensors or facts."""
    about, found = read_checkpoint(path)
    now = {**learner.facts(), "steps": steps}
    settings = about.get("settings")
    for then, facts in ((about, now), (settings if isinstance(settings, dict) else {}, now.pop("settings"))):
        for name, fact in facts.items():
            if then.get(name) != fact:
                raise CorruptRun(f"{name} is {then.get(name)!r:.99}, and {fact!r:.99} when relearned", path, REMOVE)
    mine = learner.tensors()
    for name in sorted({*mine, *found}):
        if name not in mine or name not in found or mine[name].shape != found[name].shape:
            raise CorruptRun(f"{name} differs when relearned", path, REMOVE)
        relearned = mine[name].cpu()
        if not torch.equal(relearned, found[name]):
            problem = f"is {distance(found[name], relearned)}" if relearned.is_floating_point() else "differs"
            raise CorruptRun(f"{name} {problem} when relearned", path, REMOVE)
