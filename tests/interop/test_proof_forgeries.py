"""Forged logs of UpdateLog and of training runs, with valid digests: none is taken for a whole proof.

A forgery is found if the proof differs, is rejected with a TraceError, or has a line `not proved`.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import gymnasium
import numpy as np
import pytest
from batch_forgery import replace_batch, taken_apart
from long_tests import LONG
from shell import ok, run

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch
from safetensors.torch import save_file

import gym_trace
from gym_trace.errors import InvalidOption, TraceError
from gym_trace.proof import Steps, UpdateLog, verify
from gym_trace.training import Run, verify_run
from gym_trace.training.network.learning import read_checkpoint
from gym_trace.training.processes import actor
from gym_trace.training.proof.chain import chain_in
from gym_trace.training.proof.state import digest_of, packed, state_of, unpacked
from gym_trace.training.proof.trace_checks import files_of
from gym_trace.training.step_account import unlearned_steps

Entries = list[list[Any]]  # kind and content
Forge = Callable[[Path, Entries], None]
LENGTH, ROLLOUTS = 16, 6
LONG_NUMBER = (1 << 64) - 1
HOSTILE: list[Any] = [
    None,
    -1,
    10**9,
    LONG_NUMBER,
    1e308,
    math.nan,
    "x",
    b"",
    b"\xc1",
    [],
    {},
    [[[]]],
    {"": None},
    True,
]


def deep() -> Any:
    value: Any = []
    for _ in range(400):
        value = [value]
    return value


# -- logs of UpdateLog ------------------------------------------------------------------------------------------------


def made(seed: int = 0) -> Any:
    """Return parts and learn."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 1)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)}, learn


def learn(model: Any, optimizer: Any, steps: Any, rate: float) -> dict[str, float]:
    optimizer.param_groups[0]["lr"] = rate
    loss = (model(steps["observations"])[:, 0] - steps["rewards"]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {"loss": loss.item()}


def log_of(
    trace: Path,
    order: Sequence[int] = range(ROLLOUTS),
    as_arrays: bool = False,
    where: Callable[[range], Any] = lambda rows: rows,
) -> Path:
    """Record rollouts, and learn from them in an order; return the directory of the log."""
    parts, function = made(1)
    env = gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), trace)
    log = UpdateLog(env, parts, function, overhead=100.0)
    observations, rewards = torch.zeros(ROLLOUTS * LENGTH, 4), torch.zeros(ROLLOUTS * LENGTH)
    seen, _ = env.reset(seed=1)
    for step in range(len(rewards)):
        observations[step] = torch.as_tensor(seen)
        seen, reward, terminated, truncated, _ = env.step(step // 3 % 2)
        rewards[step] = float(reward)
        if terminated or truncated:
            seen, _ = env.reset()
    for rollout in order:
        rows = where(range(rollout * LENGTH, (rollout + 1) * LENGTH))
        arrays = {"observations": observations[list(rows)], "rewards": rewards[list(rows)]}
        log.update(steps=arrays if as_arrays else Steps(rows, **arrays), rate=0.1)
    env.close()
    log.close()
    return log.directory


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An honest log, trace.proof beside its trace. It is not to be changed."""
    directory = tmp_path_factory.mktemp("whole")
    log_of(directory / "trace")
    return directory


def of_kind(entries: Entries, kind: str = "update") -> list[Any]:
    return [content for found, content in entries if found == kind]


def entries_of(directory: Path) -> Entries:
    return [[entry.kind, entry.content] for entry in chain_in(directory).entries()]


def write(directory: Path, entries: Entries) -> None:
    """Write a log with valid digests."""
    chain = chain_in(directory)
    chain.path.unlink()
    with chain.open() as log:
        for kind, content in entries:
            log.append(kind, content)


def outcome(prove: Callable[[], Any]) -> str:
    """Return "" for a whole proof, or all that a user gets to see. Any other error than a TraceError fails the test."""
    try:
        proof = prove()
    except TraceError as error:
        return f"error: {error}"
    gaps = [f"not proved: {line}" for line in proof.unproved if "--no-replay" not in line]
    return f"differs: {proof.differs}" if proof.differs else "\n".join(gaps)


def without_checks(entries: Entries) -> None:
    """Remove digests, results and the end."""
    for content in of_kind(entries):
        content.pop("digest")
        content["result"] = None
    entries[:] = [entry for entry in entries if entry[0] != "end"]


def with_any_end(entries: Entries) -> None:
    """Remove digests and results; all of the last state changed outside."""
    state = of_kind(entries, "start")[0]["state"]
    files = of_kind(entries, "end")[0]["files"]
    without_checks(entries)
    entries.append(["end", {"state": state, "outside": ["model", "optimizer"], "files": files}])


def changed(name: str, value: Any, kind: str = "update", number: int = 2) -> Forge:
    """Return a forgery that sets one value of an entry. value: a function is called with the old one."""

    def forge(_: Path, entries: Entries) -> None:
        content = of_kind(entries, kind)[number if kind == "update" else 0]
        content[name] = value(content[name]) if callable(value) else value

    return forge


def reference(where: Any = (0, LENGTH), columns: Any = None) -> Forge:
    """Return a forgery of which steps an update has. columns: changes the list of columns."""

    def forge(directory: Path, entries: Entries) -> None:
        content = of_kind(entries)[0]
        old_where, old_columns = unpacked(content["steps"]["steps"])
        new = old_where if where is None else where
        content["steps"]["steps"] = packed([new, old_columns if columns is None else columns(old_columns)], "steps")

    return forge


def then(*forgeries: Any) -> Forge:
    def forge(directory: Path, entries: Entries) -> None:
        for one in forgeries:
            one(directory, entries) if one not in (without_checks, with_any_end) else one(entries)

    return forge


def about(text: str) -> Forge:
    def forge(directory: Path, entries: Entries) -> None:
        (directory / "proof.json").write_text(text)

    return forge


def invented(entries: Entries, honest: bool = True) -> None:
    """Replace all steps by arrays."""
    for content in of_kind(entries):
        arrays = {"observations": torch.ones(LENGTH, 4), "rewards": torch.full((LENGTH,), 500.0)}
        content["inputs"]["steps"], content["steps"] = packed(arrays, "steps"), {}


def in_first_state(change: Callable[[Any], Any]) -> Forge:
    """Return a forgery of the first state, without all that it would differ from."""

    def forge(directory: Path, entries: Entries) -> None:
        state = unpacked(of_kind(entries, "start")[0]["state"])
        change(state)
        of_kind(entries, "start")[0]["state"] = packed(state, "")
        with_any_end(entries)

    return forge


def learned_otherwise(order: Sequence[int], as_arrays: bool = False) -> Forge:
    """Return a log of another training on the same steps, in which all digests are right."""

    def forge(directory: Path, entries: Entries) -> None:
        shutil.rmtree(directory)
        shutil.rmtree(directory.parent / "trace")
        log_of(directory.parent / "trace", order, as_arrays)
        entries[:] = entries_of(directory)

    return forge


def another_trace(directory: Path, entries: Entries) -> None:
    learned_otherwise(range(ROLLOUTS), as_arrays=True)(directory, entries)
    (directory / "proof.json").write_text(json.dumps({"trace": None}))


def recast(dtype: str, shape: Any = (LENGTH, 4)) -> Forge:
    """Return a forgery whose observations have another dtype or shape, with the digest of that."""

    def forge(directory: Path, entries: Entries) -> None:
        trace = gym_trace.open_trace(directory.parent / "trace")
        rows = np.concatenate([episode.observations[:-1] for episode in trace])[:LENGTH].astype(dtype).reshape(shape)
        column = ["observations", True, dtype, list(shape), digest_of(rows)]
        reference(None, lambda old: [column, old[1]])(directory, entries)
        without_checks(entries)

    return forge


LOGS: dict[str, tuple[Forge, str]] = {
    "no digests, results and end": (then(without_checks), "6 of 6 updates: no digest of the state follows them"),
    "any last state, called outside": (then(with_any_end), "what changed model after the last update"),
    "updates deleted": (then(with_any_end, lambda _, entries: entries.__delitem__(slice(2, 4))), "6 of|4 of 4 updates"),
    "an update repeated": (then(with_any_end, lambda _, entries: entries.insert(3, entries[2])), "7 of 7 updates"),
    "an update deleted, with digests": (lambda _, entries: entries.__delitem__(3), "differs: update 2"),
    "updates in another order": (lambda _, entries: entries.insert(2, entries.pop(4)), "differs: update"),
    "last updates deleted, with their end": (
        lambda _, entries: entries.__delitem__(slice(4, None)),
        "48 of 96 recorded steps: no update learned from them\n.*the end: the log was not closed",
    ),
    "steps replaced by invented arrays": (
        then(with_any_end, lambda _, entries: invented(entries)),
        "where steps of 6 updates came from: arrays",
    ),
    "learned from arrays, digests right": (learned_otherwise(range(ROLLOUTS), True), "96 of 96 recorded steps: no"),
    "one rollout six times": (learned_otherwise([0] * 6), "80 of 96 recorded steps: no update learned from them"),
    "two rollouts never": (learned_otherwise([0, 1, 2, 3]), "32 of 96 recorded steps"),
    "no trace": (another_trace, "where steps of 6 updates came from: the log has no trace"),
    "trace removed from proof.json": (about('{"trace": null}'), "the log has no trace"),
    "no end": (lambda _, entries: entries.pop(), "the end: the log was not closed"),
    "files removed from the end": (
        changed("files", None, "end"),
        "2 of 2 files of the trace: the log was closed before",
    ),
    "one file removed from the end": (changed("files", lambda files: dict([*files.items()][:1]), "end"), "was added"),
    "no files at the end": (changed("files", {}, "end"), "was added after the end"),
    "parts removed from the last state": (
        changed("state", lambda state: packed({"model": unpacked(state)["model"]}, ""), "end"),
        "the last state is of other parts",
    ),
    "another last state": (
        changed("state", lambda state: state_of(made(5)[0]), "end"),
        "differs: the last state: /model/weight is another array in the log",
    ),
    "one part called outside": (changed("outside", ["optimizer"], "end"), "1 of 2 parts of the last state: changed"),
    "results removed": (
        lambda _, entries: [c.update(result=None) for c in of_kind(entries)],
        "6 of 6 results of updates",
    ),
    "one result removed": (changed("result", None), "1 of 6 results of updates: the log has none"),
    "another result": (changed("result", packed({"loss": 0.0}, "")), "differs: update 2: the result/loss"),
    "a result of another kind": (changed("result", packed([1], "")), "differs: update 2: the result"),
    "another digest": (changed("digest", "0" * 32), "differs: update 2: the state differs"),
    "no last digest, and the last state outside": (
        then(
            changed("digest", None, "update", 5),
            lambda _, e: of_kind(e)[5].pop("digest"),
            changed("outside", ["model"], "end"),
        ),
        "1 of 6 updates: no digest",
    ),
    "no start": (lambda _, entries: entries.pop(0), "follows no start"),
    "entries after the end": (lambda _, entries: entries.append(entries[2]), "follows no start"),
    "two ends": (lambda _, entries: entries.append(entries[-1]), "follows no start"),
    "a second start with another state": (
        lambda _, entries: entries.insert(4, ["start", {**entries[0][1], "state": state_of(made(7)[0])}]),
        "where the state before update 3 came from|differs: update 3",
    ),
    "a second start, with checks removed": (
        then(
            without_checks,
            lambda _, entries: entries.insert(4, ["start", {**entries[0][1], "state": state_of(made(7)[0])}]),
        ),
        "where the state before update 3 came from",
    ),
    "another first state": (changed("state", state_of(made(7)[0]), "start"), "differs: update 0"),
    "a part set from outside": (
        changed("outside", packed({"model": unpacked(state_of(made(7)[0]))["model"]}, "")),
        "differs: update 2",
    ),
    "another rate in the first state": (
        in_first_state(lambda state: state["optimizer"]["param_groups"][0].update(momentum=0.0)),
        "where the first state came from: optimizer/param_groups/0/momentum is 0.0 in the log, and 0.9|differs: update",
    ),
    "an unknown generator": (changed("generators", {"other": b"x"}), "invalid state of the generator other"),
    "an unknown kind": (
        lambda _, entries: entries.insert(3, ["note", {}]),
        "1 entries of the log: of the unknown kind 'note'",
    ),
    "an update of an unknown kind": (lambda _, e: e[-2].__setitem__(0, "Update"), "unknown kind|differs"),
    "another rate": (changed("inputs", {"rate": packed(0.2, "")}), "differs: update 2"),
    "another writer": (changed("writer", "other", "start"), "lacks observations, rewards of steps 0 to 16"),
    "steps of another rollout": (reference([3, 3 + LENGTH]), "observations of steps 3 to 19 are not those"),
    "negative steps": (reference({"rows": np.arange(-LENGTH, 0)}), "lacks observations, rewards of steps"),
    "steps of a lane that is not there": (
        reference({"rows": np.arange(LENGTH), "lanes": np.ones(LENGTH, np.int64)}),
        "lacks observations, rewards of steps",
    ),
    "very many steps": (reference([0, 10**15]), "lacks observations, rewards of steps 0 to 1000000000000000"),
    "steps as floats": (reference({"rows": np.arange(LENGTH) + 0.5}), "lacks observations"),
    "steps without columns": (reference([0, LENGTH], lambda _: []), "differs: update 0: learn raised KeyError"),
    "an unknown column": (reference([0, LENGTH], lambda old: [["cheese", *old[0][1:]]]), "cheese: no column"),
    "observations as truth values": (recast("|b1"), "observations of steps 0 to 16 are not those"),
    "observations as integers": (recast("<i4"), "observations of steps 0 to 16 are not those"),
    "observations in another order": (recast("<f4", (4, LENGTH)), "observations of steps 0 to 16 are not those"),
    "observations as text": (recast("<U9"), "are not those|invalid"),
    "learn raises": (lambda _, e: of_kind(e)[1]["inputs"].clear(), "differs: update 1: learn raised TypeError"),
    "an argument twice": (lambda _, e: of_kind(e)[1]["inputs"].update(model=packed(1, "")), "learn raised|TypeError"),
    "too many threads": (changed("threads", 10**9, "start"), "threads=1000000000"),
    "no threads": (changed("threads", 0, "start"), "threads=0"),
    "threads as text": (changed("threads", "9", "start"), "threads='9'"),
    "generators of another kind": (
        changed("generators", {"torch": b"x", "numpy": [1], "random": 5}),
        "generator torch",
    ),
    "a state that is too deep": (changed("state", deep(), "start"), "error|differs"),
    "proof.json is not JSON": (about("{"), "proof.json beside it cannot be read"),
    "proof.json is nested too deep": (about("[" * 100_000), "proof.json beside it cannot be read"),
    "proof.json is a list": (about("[1]"), "the log has no trace"),
    "proof.json names another trace": (about('{"trace": "../nowhere"}'), "nowhere"),
    "proof.json names no path": (about('{"trace": {"a": 1}}'), "error"),
}


@pytest.fixture
def forged(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "forged")
    return tmp_path / "forged" / "trace.proof"


def prove_log(directory: Path, replays: bool = True) -> str:
    threads = torch.get_num_threads()
    try:
        return outcome(lambda: verify(directory, *made(9), replays=replays))
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)


def test_an_honest_log_is_proved_as_a_whole_with_counts(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prove_log(whole / "trace.proof") == ""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    told = ok("proof", "verify", whole / "trace.proof", "--make", "test_proof_forgeries:made").output
    for line in (
        "proved: 6 of 6 updates learned again, bit for bit; the state compared after 6; rate=0.1",
        "proved: 6 of 6 results of updates equal",
        "proved: 96 of 96 recorded steps learned from, each once",
        "proved: 2 of 2 parts of the last state equal",
        "proved: 2 of 2 files of the trace did not change after the end",
        "episodes played again in CartPole-v1, bit for bit",
        "cannot be proved: who made the run",
    ):
        assert line in told


@pytest.mark.parametrize("name", LOGS)
def test_a_forged_log_differs_or_has_a_gap(forged: Path, name: str) -> None:
    forge, expected = LOGS[name]
    entries = entries_of(forged)
    forge(forged, entries)
    with suppress(TraceError):  # proof.json is forged
        write(forged, entries)
    told = prove_log(forged)
    assert re.search(expected, told, re.DOTALL), told


def test_a_log_beside_a_trace_that_names_another_one_raises(forged: Path) -> None:
    shutil.copytree(forged.parent / "trace", forged.parent / "other")
    entries = entries_of(forged)
    (forged / "proof.json").write_text('{"trace": "../other"}')
    write(forged, entries)
    with pytest.raises(InvalidOption, match=r"is of .*other, not of .*trace"):
        verify(forged.parent / "trace", *made())
    assert prove_log(forged) == ""


def test_a_step_that_is_learned_from_twice_in_an_update_counts_twice(tmp_path: Path) -> None:
    log_of(tmp_path / "trace", [0], where=lambda rows: np.array([*rows, *rows[:2]]))
    proof = verify(tmp_path / "trace", *made())
    assert not proof.differs
    assert "16 of 96 recorded steps learned from, each 1 to 2 times" in proof.proved


def test_states_of_generators_are_named_as_given(tmp_path: Path) -> None:
    def drawing(model: Any, optimizer: Any, x: Any) -> float:
        return float(torch.rand(1))

    with UpdateLog(tmp_path / "log", made()[0], drawing) as log:
        for _ in range(3):
            torch.manual_seed(5)
            log.update(x=1)
    limits = verify(tmp_path / "log", made()[0], drawing).limits
    assert any(
        "where the first state, and the states of generators before 3 updates came from" in one for one in limits
    )


def test_a_gap_in_a_proof_has_an_exit_code(forged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    entries = entries_of(forged)
    entries.pop()
    write(forged, entries)
    command = ("proof", "verify", forged, "--make", "test_proof_forgeries:made")
    told = run(*command)
    assert (told.exit_code, "not proved: the end: the log was not closed" in told.output) == (5, True)
    assert run(*command, "--quiet").exit_code == 5


# -- random forgeries -------------------------------------------------------------------------------------------------

# Not compared: times, what explains a difference, what cannot change a result here.
FREE = {"time", "writer", "norms", "seconds", "PyTorch", "processor", "threads", "deterministic", "save_best"}


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values below plain data."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [path] if path else []
    for key, item in inner:
        if key not in FREE:
            found += places_in(item, (*path, key))
    return found


def forge_at_random(entries: Entries, chance: random.Random) -> str:
    """Make one random change; return what it was."""
    kind = chance.randrange(8)
    at = chance.randrange(len(entries))
    if kind == 0:
        return f"deleted {entries.pop(at)[0]} {at}"
    if kind == 1:
        entries.insert(chance.randrange(len(entries) + 1), entries[at])
        return f"repeated {entries[at][0]} {at}"
    if kind == 2:
        other = chance.randrange(len(entries))
        entries[at], entries[other] = entries[other], entries[at]
        return f"swapped {at} and {other}"
    path = chance.choice(places_in(entries[at][1]) or [()])
    holder = entries[at]
    *above, last = (1, *path)
    for key in above:
        holder = holder[key]
    if kind == 3 and isinstance(holder, dict) and last != "digest":
        del holder[last]
        return f"removed {path} of {entries[at][0]} {at}"
    old = holder[last]
    if kind in (4, 5) and isinstance(old, (int, float)) and not isinstance(old, bool):
        holder[last] = old + chance.choice([1, -1, 1e-9 if isinstance(old, float) else 7])
    elif kind in (4, 5) and isinstance(old, bytes) and old:
        flipped = bytearray(old)
        flipped[chance.randrange(len(old))] ^= 1 << chance.randrange(8)
        holder[last] = bytes(flipped)
    else:
        holder[last] = chance.choice(HOSTILE)
    return f"changed {path} of {entries[at][0]} {at} to {str(holder[last])[:60]}"


def same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)


@pytest.mark.parametrize("seed", range(400 if LONG else 60))
def test_a_random_change_of_a_log_is_found(forged: Path, seed: int) -> None:
    honest, entries = entries_of(forged), entries_of(forged)
    what = forge_at_random(entries, random.Random(seed))
    write(forged, entries)
    told = prove_log(forged, replays=False)
    without_effect = what.startswith("changed ('state',) of start 0")  # the first rate has none: learn() sets it
    assert told or same(honest, entries) or without_effect, what


# -- training runs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An honest run of seven versions with short episodes. It is not to be changed."""
    directory = tmp_path_factory.mktemp("runs") / "cp"
    sizes = [
        "--num-envs",
        8,
        "--workers",
        1,
        "--set",
        "rollout=32",
        "--set",
        "hidden=8",
        "--set",
        "epochs=1",
        "--seed",
        1,
    ]
    kept = ["--keep", 99, "--checkpoint-seconds", 0.001, "--quiet"]
    ok("train", "CartPole-v1", "-o", directory, "--steps", 1536, "--max-episode-steps", 10, *sizes, *kept)
    return directory


@pytest.fixture
def run_to_forge(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def write_run(directory: Path, entries: Entries, fits: bool = True) -> None:
    """Write the log of a run with valid digests. fits: with the account and the files that it has now."""
    write(directory, entries)
    if fits and entries and entries[-1][0] == "end" and isinstance(entries[-1][1], dict):
        found = Run(directory)
        left = unlearned_steps(found.log, gym_trace.open_trace(found.trace), found.settings)
        entries[-1][1] |= {"left": list(map(list, left)), "files": files_of(found.trace)}
        write(directory, entries)


def prove_run(directory: Path, replays: bool = False) -> str:
    threads = torch.get_num_threads()
    try:
        return outcome(lambda: verify_run(directory, replays=replays))
    finally:
        torch.set_num_threads(threads)


def in_run_json(change: Callable[[dict[str, Any]], Any]) -> Forge:
    def forge(directory: Path, entries: Entries) -> None:
        found = json.loads((directory / "run.json").read_text())
        change(found)
        (directory / "run.json").write_text(json.dumps(found))

    return forge


def environment(**facts: Any) -> Forge:
    return in_run_json(lambda found: found["environment"].update(facts))


def without_checkpoints(directory: Path, _: Entries) -> None:
    shutil.rmtree(directory / "checkpoints")


def limit(steps: int | None) -> Forge:
    return then(without_checkpoints, in_run_json(lambda found: found.update(steps=steps)))


def settings(**facts: Any) -> Forge:
    """Return a forgery of settings, without checkpoints, which have them, too."""

    def forge(directory: Path, entries: Entries) -> None:
        in_run_json(lambda found: found["settings"].update(facts))(directory, entries)
        without_checkpoints(directory, entries)

    return forge


def in_trace(**facts: Any) -> Forge:
    """Return a forgery of what the trace says of its environment."""

    def forge(directory: Path, entries: Entries) -> None:
        for path in sorted((directory / "trace").glob("*.gtb")):
            batch = taken_apart(path)
            environment = batch.records[0].metadata["environment"]
            for name, value in facts.items():
                value(environment[name]) if callable(value) else environment.update({name: value})
            replace_batch(path, batch)

    return forge


def in_checkpoint(**facts: Any) -> Forge:
    def forge(directory: Path, _: Entries) -> None:
        path = directory / "checkpoints" / "000000003.safetensors"
        about, found = read_checkpoint(path)
        save_file(found, path, {"gym_trace": json.dumps({**about, **facts})})

    return forge


def of_another_seed(directory: Path, entries: Entries) -> None:
    """Train with the workers of another seed, and say that the run has its own."""
    shutil.rmtree(directory)
    with pytest.MonkeyPatch.context() as patch:
        roots = actor.worker_roots
        patch.setattr(actor, "worker_roots", lambda seed, *place: roots(seed + 1, *place))
        sizes: Any = {"num_envs": 8, "rollout": 32, "hidden": (8,), "epochs": 1, "workers": 0}
        gym_trace.train(partial(gymnasium.make, "CartPole-v1"), directory, steps=512, seed=1, **sizes)
    entries[:] = entries_of(directory)


def at_end(**facts: Any) -> Forge:
    return lambda _, entries: entries[-1][1].update(facts)


def seeds(change: Callable[[list[Any]], Any]) -> Forge:
    return lambda _, entries: [change(content) for content in of_kind(entries, "worker")]


def update(number: int, at: int, value: Any) -> Forge:
    return lambda _, entries: of_kind(entries)[number].__setitem__(at, value)


def taken_over(changed: Any) -> Forge:
    """Return a forgery that puts a version that was taken over, and not learned, behind the last one."""

    def forge(directory: Path, entries: Entries) -> None:
        version, _, steps, digest, *_ = of_kind(entries)[-1]
        entries.insert(len(entries) - 1, ["update", [version + 1, [], steps, digest, {}, changed]])

    return forge


def cut(directory: Path, entries: Entries) -> None:
    """Cut the log, and let the steps after it say that the last version acted in them."""
    from test_train_proof import change_column

    def changed(rows: Any) -> Any:
        rows[rows > 2] = 2
        return rows

    change_column(directory, ("annotations", "version"), changed, chunks=slice(None))
    last = entries.index(next(entry for entry in entries if entry[0] == "update" and entry[1][0] == 3))
    entries[-1][1] |= {"stopped": "interrupted"}
    del entries[last:-1]
    (directory / "done").unlink()
    for path in (directory / "checkpoints").iterdir():
        if path.name == "best.safetensors" or int(path.stem) > 2:
            path.unlink()


def dropped(directory: Path, entries: Entries) -> None:
    """Let the log say that steps that were left over are a rollout that was too old."""
    writer, begin, *_ = entries[-1][1]["left"][0]
    entries.insert(len(entries) - 1, ["dropped", [[writer, begin, 5, "more than max_lag=8 versions old"]]])


def unchained(directory: Path, entries: Entries) -> None:
    """Write the log as releases before the chain did."""
    import msgpack

    from gym_trace.training.proof.chain import frame

    bodies = [msgpack.packb(content) for content in of_kind(entries)]
    data = b"".join(frame(len(body), crc32(body)) + body for body in bodies)
    (directory / "updates.msgpack").write_bytes(data)
    entries.clear()


RUNS: dict[str, tuple[Forge, str]] = {
    "reached its return": (at_end(stopped="return"), "None|its return of None"),
    "reached a return in run.json": (
        then(at_end(stopped="return", until_return=400.0), in_run_json(lambda found: found.update(until_return=400.0))),
        "that the run reached its return of 400.0: of the means of 100 episodes .*, the largest is 9",
    ),
    "reached a lower return": (at_end(stopped="return", until_return=5.0), "run.json ends at a mean return of None"),
    "done without a limit": (limit(None), "ended as done after 1,536 of 0"),
    "done before the limit": (limit(4096), "done after 1,536 of 4,096"),
    "beyond its limit": (limit(512), "went on to 1,536 steps|differs when re"),
    "stopped, and done": (at_end(stopped="seconds"), "the run is done, and its log says that it was stopped"),
    "seeds of -1": (seeds(lambda content: content.__setitem__(1, -1)), "invalid seed of writer"),
    "a seed too large": (seeds(lambda content: content.__setitem__(1, LONG_NUMBER)), "invalid seed|error"),
    "another seed": (seeds(lambda content: content.__setitem__(1, content[1] ^ 1)), "action differs by 1"),
    "seeds of other writers": (
        seeds(lambda content: content.__setitem__(0, "a9-0-0-00000000")),
        r"([\d,]+) of \1 actions: the log lacks the seeds of their generators",
    ),
    "no seeds": (
        lambda _, entries: [entries.remove(entry) for entry in entries[:] if entry[0] == "worker"],
        r"([\d,]+) of \1 actions: the log lacks",
    ),
    "seeds twice": (lambda _, entries: entries.insert(3, ["worker", of_kind(entries, "worker")[0]]), "invalid seed"),
    "another version of PyTorch": (
        lambda _, entries: of_kind(entries, "start")[0].update(PyTorch="9.9"),
        r"([\d,]+) of \1 actions: a server, or other kernels, drew them",
    ),
    "drawn by a server": (
        settings(inference="server"),
        r"([\d,]+) of \1 actions: a server, or other kernels, drew them",
    ),
    "versions without rollouts": (update(6, 1, []), "version 6 has 0 rollouts"),
    "a version that takes over nothing": (taken_over({}), "version 7 has 0 rollouts"),
    "a version that takes over what is unknown": (
        taken_over({"x": 1}),
        "version 7 has 0 rollouts, and takes over 0 things",
    ),
    "rollouts of a version that takes over": (update(6, 5, {"steps": 1536}), "version 6 has 1 rollouts, and takes"),
    "other settings in between": (
        lambda directory, entries: taken_over({"settings": Run(directory).settings.plain()})(directory, entries),
        "why version 7 has other settings",
    ),
    "settings of another network": (
        lambda directory, entries: taken_over({"settings": {"hidden": [9]}})(directory, entries),
        "version 7 took over .*: the run has",
    ),
    "a checkpoint from elsewhere": (
        taken_over({"checkpoint": "000000002.safetensors"}),
        "version 7 differs|another run",
    ),
    "wrappers in run.json": (
        environment(wrappers=["nowhere:Scaled"]),
        r"its wrappers, \['nowhere:Scaled'\] there and \[\]",
    ),
    "another limit of episodes": (environment(max_episode_steps=500), "its limit, .*500.* there and .*10"),
    "no limit of episodes": (environment(max_episode_steps=None), "its limit, .*500.* there and .*10"),
    "arguments in run.json": (environment(kwargs={"sutton_barto_reward": True}), "has sutton_barto_reward=True"),
    "another environment": (environment(id="CartPole-v0"), "the environment is CartPole-v0"),
    "an environment of another type": (environment(wrappers=5, kwargs=7), "differs|error|not proved"),
    "a log that was cut, and the trace with it": (cut, "differs by .* from what version 2, which is said"),
    "a rollout that was dropped": (dropped, "which does not hold"),
    "no best checkpoint": (
        lambda directory, _: (directory / "checkpoints" / "best.safetensors").unlink(),
        "best.safetensors: is missing; version . has the largest mean",
    ),
    "no end": (
        lambda directory, entries: ((directory / "done").unlink(), entries.pop()),
        "the end: the log has none, because the run was killed",
    ),
    "an unknown kind": (lambda _, entries: entries.insert(3, ["note", 5]), "1 entries of the log: of the unknown kind"),
    "no start": (lambda _, entries: entries.pop(0), "follows no start"),
    "entries after the end": (lambda _, entries: entries.append(["worker", ["w", 1]]), "follows no start"),
    "no chain": (unchained, "order and end of the log"),
    "acted before it was learned": (
        lambda _, entries: of_kind(entries)[2][1][0].__setitem__(2, 2),
        "the log says that version 2|is said to have acted",
    ),
    "arguments only in the trace": (
        in_trace(made=lambda made: made.update(kwargs={"sutton_barto_reward": ["value", False]})),
        "its arguments, {} there and {'sutton_barto_reward': False} in the trace",
    ),
    "another id beside the recipe": (
        then(in_trace(id="MountainCar-v0"), environment(id="MountainCar-v0")),
        "is MountainCar-v0, and the trace was recorded in CartPole-v1",
    ),
    "a wrapper with the name of one of Gymnasium's": (
        in_trace(made=lambda made: made["wrappers"].append(["nowhere:OrderEnforcing", {}])),
        r"its wrappers, \[\] there and \['nowhere:OrderEnforcing'\] in the trace",
    ),
    "another lag": (settings(lag=0), "version 2 was learned from steps in which version 0 acted: more than 0 versions"),
    "staggered": (settings(stagger=True), "the first steps of writer .* and with stagger they are random"),
    "shaped rewards": (settings(reward_shaping={"goal": 1.0}), "the options of the reset of episode 0 are None"),
    "weights of another run": (
        in_run_json(lambda found: found.update(begins_with="runs/other@9")),
        "the run began with runs/other@9, and its log with None",
    ),
    "a checkpoint with another rate": (in_checkpoint(rate=1.0), "000000003.safetensors: rate is 1.0, and 0.001 when"),
    "a checkpoint of more steps": (in_checkpoint(steps=10**9), "000000003.safetensors: steps is 1000000000, and 768"),
    "a checkpoint of another limit": (
        in_run_json(lambda found: found.update(steps=4096)),
        r"updates is \[1, 6\], and \[1, 16\] when relearned",
    ),
    "a checkpoint of another name": (
        lambda directory, _: shutil.copy(directory / "checkpoints/000000003.safetensors", directory / "checkpoints/x"),
        "checkpoints/x: no version of the run has this name",
    ),
    "seeds of another run": (of_another_seed, "[0-9]+ of [0-9]+ episodes and their actions: they are not those of the"),
    "too many threads": (in_run_json(lambda found: found["settings"].update(learner_threads=10**9)), "learner_threads"),
    "a start of another type": (lambda _, entries: entries[0].__setitem__(1, 5), "error"),
    "facts of another type": (lambda _, entries: of_kind(entries, "start")[0].update(PyTorch=[]), "not proved|error"),
    "a seed of another type": (in_run_json(lambda found: found.update(seed="1")), "invalid run settings"),
}


def test_an_honest_run_is_proved_as_a_whole_with_counts(trained: Path) -> None:
    assert prove_run(trained, replays=True) == ""
    told = ok("train", "--verify", trained).output
    for line in (
        "7 versions and 7 checkpoints: 6 learned again, bit for bit",
        r"([\d,]+) of \1 steps: logprob and value",
        r"([\d,]+) of \1 actions as the generator",
        "2 of 2 files of the trace",
        r"again in CartPole-v1 with gymnasium.wrappers.common:TimeLimit\(max_episode_steps=10\), bit for bit",
    ):
        assert re.search(line, told), told
    assert run("train", "--verify", trained, "--no-replay", "--quiet").exit_code == 5


@pytest.mark.parametrize("name", RUNS)
def test_a_forged_run_differs_or_has_a_gap(run_to_forge: Path, name: str) -> None:
    forge, expected = RUNS[name]
    entries = entries_of(run_to_forge)
    forge(run_to_forge, entries)
    if entries:
        with suppress(TraceError):  # too badly forged to be read
            write_run(run_to_forge, entries)
    told = prove_run(run_to_forge)
    assert re.search(expected, told, re.DOTALL), told


def test_links_pipes_and_odd_names_in_a_trace_do_not_end_a_proof(run_to_forge: Path) -> None:
    trace = run_to_forge / "trace"
    (trace / "link").symlink_to("/etc/passwd")
    os.mkfifo(trace / "pipe")
    (trace / "directory").mkdir()
    assert prove_run(run_to_forge) == ""
    open(os.fsencode(trace) + b"/\xff", "w").close()
    assert prove_run(run_to_forge).startswith("differs: ")
    write_run(run_to_forge, entries_of(run_to_forge))
    assert prove_run(run_to_forge) == ""


def test_a_run_inside_another_one_is_not_taken_for_it(run_to_forge: Path) -> None:
    shutil.copytree(run_to_forge, run_to_forge / "policy-0")
    proof = verify_run(run_to_forge, replays=False)
    assert not any("policy-0" in line for line in proof.proved)


@pytest.mark.parametrize("seed", range(300 if LONG else 60))
def test_a_random_change_of_a_run_is_found(run_to_forge: Path, seed: int) -> None:
    honest, entries = entries_of(run_to_forge), entries_of(run_to_forge)
    what = forge_at_random(entries, random.Random(seed))
    write_run(run_to_forge, entries, fits=False)
    started_again = what.startswith("repeated start")  # a learner may be, and its facts are compared with nothing
    assert prove_run(run_to_forge) or same(honest, entries) or started_again, what
