"""Every way to falsify a training run that we know of is found, also where the forger makes all checksums valid."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch_forgery import STORED, replace_batch, taken_apart
from shell import ok, run

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import gym_trace
from gym_trace.errors import ReplayDiverged
from gym_trace.format.columns import ColumnEncoder, Workspace, decode, parse_column
from gym_trace.training import Run, verify_run
from gym_trace.training.proof.anchors import write_anchor
from gym_trace.training.proof.trace_checks import files_of
from gym_trace.training.step_account import unlearned_steps

Entries = list[list[Any]]  # kind and content


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight versions with checkpoints of most of them. It is not to be changed."""
    directory = tmp_path_factory.mktemp("runs") / "cp"
    sizes = ["--num-envs", 4, "--workers", 2, "--set", "rollout=64", "--set", "hidden=16", "--seed", 1]
    kept = ["--keep", 99, "--checkpoint-seconds", 0.001, "--quiet"]
    ok("train", "CartPole-v1", "-o", directory, "--steps", 4096, *sizes, *kept)
    return directory


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "copy")


@contextmanager
def rewritten(directory: Path) -> Iterator[Entries]:
    """Give the entries of the log to change, and then write it with digests, account and files that fit."""
    run = Run(directory)
    entries = [[entry.kind, entry.content] for entry in run.chain.entries()]
    yield entries
    _write(run, entries)
    log, settings = run.log, run.settings
    with suppress(ReplayDiverged):  # a duplicated rollout
        if entries[-1][0] != "end":
            return
        left = unlearned_steps(log, gym_trace.open_trace(run.trace), settings)
        entries[-1][1] |= {"left": list(map(list, left)), "files": files_of(run.trace)}
        _write(run, entries)


def _write(run: Run, entries: Entries) -> None:
    run.chain.path.unlink()
    with run.chain.open() as log:
        for kind, content in entries:
            log.append(kind, content)


def updates(entries: Entries) -> list[Any]:
    return [content for kind, content in entries if kind == "update"]


def change_column(
    directory: Path, path: tuple[str, ...], change: Callable[[Any], Any], writer: str = "a0-", chunks: slice = slice(1)
) -> None:
    """Change a column in chunks of a writer, with valid checksums."""
    file = sorted((directory / "trace").glob(f"{writer}*.gtb"))[0]
    forgery = taken_apart(file)
    for forged in forgery.chunks[chunks]:
        place = forged.columns[path]
        rows = decode(parse_column(forged.metadata["columns"][place]), forged.blobs[place]).copy()
        column, forged.blobs[place] = ColumnEncoder(path, Workspace(1)).encode(np.ascontiguousarray(change(rows)))
        by = column.stored - forged.metadata["columns"][place][STORED]
        forged.metadata["columns"][place] = column.descriptor()
        for total in forgery.index.metadata["totals"]:
            if tuple(total[0]) == path:
                total[2] += by
    replace_batch(file, forgery)


def plus(number: float, at: int = 0) -> Callable[[Any], Any]:
    """Return a function that adds a number to one row."""

    def changed(rows: Any) -> Any:
        rows[at] += np.asarray(number, rows.dtype)
        return rows

    return changed


# -- what is changed, with valid digests ------------------------------------------------------------------------------


def another_acting_version(copy: Path) -> None:
    with rewritten(copy) as entries:
        updates(entries)[5][1][0][2] += 1


def another_acting_version_in_the_trace_too(copy: Path) -> None:
    writer, _, version = updates([[e.kind, e.content] for e in Run(copy).chain.entries()])[5][1][0]

    def changed(rows: Any) -> Any:
        rows[rows == version] = version + 1
        return rows

    change_column(copy, ("annotations", "version"), changed, writer, slice(None))
    with rewritten(copy) as entries:
        for update in updates(entries):
            for rollout in update[1]:
                if rollout[0] == writer and rollout[2] == version:
                    rollout[2] += 1


def cut_log_and_checkpoints(copy: Path) -> None:
    with rewritten(copy) as entries:
        last = entries.index(next(entry for entry in entries if entry[0] == "update" and entry[1][0] == 4))
        del entries[last + 1 : -1]
        entries[-1][1]["stopped"] = "interrupted"
        for path in (copy / "checkpoints").iterdir():
            if path.name == "best.safetensors" or int(path.stem) > 4:
                path.unlink()


def cut_log_whose_end_says_done(copy: Path) -> None:
    cut_log_and_checkpoints(copy)
    with rewritten(copy) as entries:
        entries[-1][1]["stopped"] = "done"
    trace = gym_trace.open_trace(copy / "trace")
    kept = [int(i) for i in range(len(trace)) if max(trace[int(i)].annotations["version"]) <= 4]
    assert kept


def no_end(copy: Path) -> None:
    with rewritten(copy) as entries:
        del entries[-1]


def another_loss(copy: Path) -> None:
    with rewritten(copy) as entries:
        updates(entries)[3][4]["kl"] += 1e-12


def an_invented_fact(copy: Path) -> None:
    with rewritten(copy) as entries:
        updates(entries)[3][4]["accuracy"] = 1.0


def more_steps(copy: Path) -> None:
    with rewritten(copy) as entries:
        for update in updates(entries)[4:]:
            update[2] += 1 << 20


def an_older_checkpoint_as_best(copy: Path) -> None:
    shutil.copy(copy / "checkpoints" / "000000002.safetensors", copy / "checkpoints" / "best.safetensors")


def a_better_mean_of_an_older_checkpoint(copy: Path) -> None:
    an_older_checkpoint_as_best(copy)
    with rewritten(copy) as entries:
        updates(entries)[2][4]["mean_return"] = 500.0


def change_about(copy: Path, change: Callable[[dict[str, Any]], None]) -> None:
    with rewritten(copy):
        about = json.loads((copy / "run.json").read_text())
        change(about)
        (copy / "run.json").write_text(json.dumps(about))


def another_environment(copy: Path) -> None:
    change_about(copy, lambda about: about["environment"].update(id="CartPole-v0"))


def another_environment_in_the_trace_too(copy: Path) -> None:
    for path in (copy / "trace").iterdir():  # the schema is in the manifest, and in each batch
        path.write_text(path.read_text().replace("CartPole-v1", "CartPole-v0")) if path.suffix == ".jsonl" else None
    another_environment(copy)


def another_seed(copy: Path) -> None:
    change_about(copy, lambda about: about.update(seed=2))


def another_reward(copy: Path) -> None:
    change_column(copy, ("rewards",), plus(1.0, 10))
    with rewritten(copy):
        pass


def another_reward_that_was_not_learned_from(copy: Path) -> None:
    change_column(copy, ("rewards",), plus(1.0, -1), chunks=slice(-1, None))
    with rewritten(copy):
        pass


def another_action(copy: Path) -> None:
    change_column(copy, ("actions",), lambda rows: np.concatenate([1 - rows[:1], rows[1:]]))
    with rewritten(copy):
        pass


def another_logprob(copy: Path) -> None:
    change_column(copy, ("annotations", "logprob"), plus(1e-6))
    with rewritten(copy):
        pass


def another_value(copy: Path) -> None:
    change_column(copy, ("annotations", "value"), plus(1e-6, 3))
    with rewritten(copy):
        pass


def another_generator(copy: Path) -> None:
    with rewritten(copy) as entries:
        next(content for kind, content in entries if kind == "worker")[1] += 1


def without_episodes(copy: Path, condition: str) -> None:
    ok("edit", "filter", copy / "trace", "--where", condition, "--in-place")
    with rewritten(copy):
        pass


def a_dropped_episode(copy: Path) -> None:
    without_episodes(copy, "episode_id != 3")


def an_update_twice(copy: Path) -> None:
    with rewritten(copy) as entries:
        updates(entries)[6][1][0] = updates(entries)[5][1][0]


FORGERIES: dict[Callable[[Path], None], str] = {
    another_acting_version: "the log says that version",
    another_acting_version_in_the_trace_too: "differs by .* from what version .*, which is said to have acted",
    cut_log_and_checkpoints: "version [5-8] acted in steps .*, and the log ends with version 4",
    cut_log_whose_end_says_done: "version [5-8] acted|ended as done after 2,048 of 4,096 steps",
    no_end: "the run is done, and its log has no end",
    another_loss: "version 3: kl is .* in the log, and .* when learned again",
    an_invented_fact: "version 3: accuracy is 1.0 in the log, and None",
    more_steps: "version 4: the log says 1,050,624 steps, and the updates so far have 2,048",
    an_older_checkpoint_as_best: "best.safetensors: is version 2; version [0-9] has the largest mean",
    a_better_mean_of_an_older_checkpoint: "version 2: mean_return is 500.0 in the log",
    another_environment: "the environment is CartPole-v0, and the trace was recorded in CartPole-v1",
    another_environment_in_the_trace_too: "differs in its environment|damage|does not match",
    another_seed: "version 0 differs when relearned",
    another_reward: "version 1 differs when relearned",
    another_reward_that_was_not_learned_from: "episode .* differs in its environment: .*reward",
    another_action: "step 0 of writer .*: action differs by 1",
    another_logprob: "step 0 of writer .*: logprob differs by .* from what version 0, which is said to have acted",
    another_value: "step 3 of writer .*: value differs by .* from what version 0, which is said to have acted",
    another_generator: "action differs by 1",
    a_dropped_episode: "the log says that version . acted|the trace has .* of steps",
    an_update_twice: "are in version 5 and in version 6",
}


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_a_forgery_with_valid_checksums_and_digests_is_found_and_named(
    copy: Path, forge: Callable[[Path], None]
) -> None:
    forge(copy)
    told = run("train", "--verify", copy)
    assert told.exit_code in (3, 5), told.output
    assert re.search(FORGERIES[forge], told.output), told.output


def test_a_run_is_proved_line_by_line(trained: Path) -> None:
    told = ok("train", "--verify", trained).output
    for line in (
        "every checksum",
        "each with the digest of the one before",
        "9 versions and",
        "steps: logprob and value as the version",
        "actions as the generator of their worker drew them",
        "largest mean return",
        "4,096 steps learned from once",
        "the end: done after 4,096 steps",
        "played again in CartPole-v1, bit for bit",
        "cannot be proved: who made",
    ):
        assert line in told
    assert "not proved" not in told
    told = run("train", "--verify", trained, "--no-replay")
    assert "not proved: the episodes in their environment: --no-replay" in told.output
    assert told.exit_code == 5


def test_a_run_on_another_device_than_its_workers_is_proved(tmp_path: Path) -> None:
    sizes = ["--num-envs", 2, "--workers", 1, "--set", "rollout=16", "--set", "hidden=8", "--seed", 1, "--quiet"]
    device = "cpu:0"  # PyTorch copies what goes there, as to a GPU
    ok("train", "CartPole-v1", "-o", tmp_path / "r", "--steps", 128, *sizes, "--device", device)
    assert "steps: logprob and value" in ok("train", "--verify", tmp_path / "r").output


# -- what is changed without ------------------------------------------------------------------------------------------


def test_every_byte_of_a_manifest_counts(copy: Path) -> None:
    path = next((copy / "trace").glob("*.manifest.jsonl"))
    data = path.read_bytes()
    for at in range(7, len(data), len(data) // 3):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        told = run("train", "--verify", copy, "--no-replay")
        assert told.exit_code in (1, 3, 5), told.output
        assert path.name in told.output


@pytest.mark.parametrize("change", ["run.json", "an entry", "the end", "a file"])
def test_a_change_of_settings_entries_or_files_shows_in_the_chain(copy: Path, change: str) -> None:
    if change == "run.json":
        about = json.loads((copy / "run.json").read_text())
        (copy / "run.json").write_text(json.dumps(about))
        said = "run.json beside it has changed"
    elif change == "a file":
        (copy / "trace" / "more.txt").write_text("more")
        said = "more.txt: was added after the end of the run"
    else:
        from gym_trace.training.proof.chain import frame

        log = Run(copy).chain
        data, entries = bytearray(log.path.read_bytes()), list(log.entries())
        entry = entries[2 if change == "an entry" else -2]
        del data[entry.at - len(frame(0, 0)) : entry.end]
        log.path.write_bytes(data)
        said = "does not follow the one before"
    told = run("train", "--verify", copy, "--no-replay")
    assert told.exit_code in (3, 5), told.output
    assert said in told.output


# -- anchors ----------------------------------------------------------------------------------------------------------


def test_a_run_forged_as_a_whole_does_not_fit_its_anchor(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("init -q", "config user.name a", "config user.email a@b", "commit -q --allow-empty -m x"):
        subprocess.run(["git", *command.split()], check=True)
    anchors = [str(tmp_path / "anchor"), "git-note"]
    for anchor in anchors:
        write_anchor(Run(copy).chain, anchor)
        assert (
            f"entries of the log are those of the anchor of {anchor}"
            in run("train", "--verify", copy, "--anchor", anchor, "--no-replay").output
        )
    with rewritten(copy) as entries:
        entries[-1][1]["stopped"] = "interrupted"
    (copy / "done").unlink()
    assert not verify_run(copy, replays=False).differs
    for anchor in anchors:
        told = run("train", "--verify", copy, "--anchor", anchor)
        assert told.exit_code == 3
        assert "is not the one of the anchor" in told.output
    with rewritten(copy) as entries:
        entries[0][1]["time"] += 1
    assert "has no anchor of" in verify_run(copy, anchor=anchors[0]).differs


def test_a_run_that_goes_on_continues_its_anchor(tmp_path: Path) -> None:
    sizes = ["--num-envs", 4, "--workers", 0, "--set", "rollout=16", "--set", "hidden=8", "--quiet"]
    anchor = tmp_path / "anchor"
    ok(
        "train",
        "CartPole-v1",
        "-o",
        tmp_path / "r",
        "--until-return",
        1e9,
        "--seconds",
        0.5,
        *sizes,
        "--anchor",
        anchor,
    )
    ok("train", "--resume", tmp_path / "r", "--seconds", 0.5, "--quiet", "--anchor", anchor)
    assert len(anchor.read_text().splitlines()) == 2
    told = ok("train", "--verify", tmp_path / "r", "--anchor", anchor).output
    assert "reached its time" in told
    seeds = [episode.seed for episode in gym_trace.open_trace(tmp_path / "r" / "trace")]
    assert len(set(seeds)) == len(seeds)
