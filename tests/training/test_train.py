"""Settings, actions as rows, the log of updates, shared memory: the parts of training that do not need PyTorch."""

import json
import os
import re
import zlib
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from gym_trace.errors import CorruptTrace, InvalidOption, RecordingError, TraceNotFound
from gym_trace.training.network.forms import ActionForm, leaves_of
from gym_trace.training.processes.shared import Message, RolloutBuffer, Weights, has_more, put, take
from gym_trace.training.proof.chain import UPDATE, frame
from gym_trace.training.rollouts import Origin, Shape
from gym_trace.training.run import Run, Update, runs_in
from gym_trace.training.settings import Settings, settings_from

HUGE = "9" * 400
UPDATES = [Update(0, (), 0, "ab")] + [
    Update(v, (Origin("w", 16 * v, v - 1),), 64 * v, f"{v:x}", {"kl": 0.5 * v}) for v in (1, 2, 3)
]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run whose log has three updates."""
    run = Run(tmp_path / "run")
    run.create(Settings(), 7, steps=640)
    with run.open_log() as log:
        for update in UPDATES:
            log.append(UPDATE, update.plain())
    return run


# -- settings ---------------------------------------------------------------------------------------------------------


def test_settings_of_texts_are_those_of_values() -> None:
    texts = {"lag": "any", "hidden": "32,16", "rnn": "none", "batch": "1024", "stagger": "yes", "clip": "1e-1"}
    texts["reward_shaping"] = "goal=1,step=-1e-2"
    values = {"lag": "any", "hidden": (32, 16), "rnn": None, "batch": 1024, "stagger": True, "clip": 0.1}
    values["reward_shaping"] = {"goal": 1.0, "step": -0.01}
    assert settings_from(texts) == settings_from(values) == Settings(**values)
    assert settings_from(json.loads(json.dumps(Settings(**values).plain()))) == Settings(**values)


@pytest.mark.parametrize(
    "given",
    [
        {"learning_rat": 1},
        *({"lag": value} for value in (2, True, "1.5", [], None)),
        *({"num_envs": value} for value in (0, -1, 1.5, HUGE, "inf", float("nan"), 10**9, None, [], {})),
        *({"learning_rate": value} for value in (-1, "nan", "inf", float("inf"), True, HUGE, 10**400)),
        *({"hidden": value} for value in ("64,", "0", (-1,), (1 << 30,), (8,) * 99, 5.5, ["a"], [None])),
        *({"reward_shaping": value} for value in ("goal", "goal=", "=", 1.5, {"gamma": float("nan")}, {"goal": "x"})),
        *({"initial_std": value} for value in (0, -1)),
        *({"adam_beta1": value} for value in (1, -0.1)),
        {"gamma": 1.5},
        {"batch": 1000},
        {"minibatches": 10**6},
        {"rnn": "gru", "num_envs": 1, "workers": 1, "minibatches": 4},
        {"batch": 1 << 20, "workers": 1000, "num_envs": 1, "rollout": 1, "splits": 64, "lag": "any"},
        {"stagger": "maybe"},
    ],
    ids=lambda given: str(given)[:40],
)
def test_an_invalid_setting_raises(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=f"{next(iter(given))[:8]}|minibatches"):
        settings_from(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lerning_rate": 1}, "did you mean learning_rate?"),
        ({"learning_rate": "fast"}, "pass a number"),
        ({"target_kl": "small"}, "pass a number or None"),
        ({"stagger": 7}, "pass true or false"),
        ({"hidden": "wide"}, "pass numbers such as 64,64"),
        ({"gamma": 2}, "pass 0 to 1"),
        ({"adam_beta1": 1}, "pass 0 to 1, but not 1"),
        ({"initial_std": 0}, "pass 0 or more, but not 0"),
    ],
)
def test_the_error_of_an_invalid_setting_says_what_to_pass(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=re.escape(message) + "$"):
        settings_from(given)


# -- actions ----------------------------------------------------------------------------------------------------------

ACTIONS = {
    "discrete": spaces.Discrete(3, start=-1),
    "multi-discrete": spaces.MultiDiscrete([2, 5], start=[3, -2]),
    "multi-binary": spaces.MultiBinary((2, 2)),
    "box": spaces.Box(-1, 1, (2, 3), np.float32),
    "float64": spaces.Box(-1, 1, (2,), np.float64),
    "tree": spaces.Dict({"b": spaces.Box(-1, 1, (2,)), "a": spaces.Tuple([spaces.Discrete(4), spaces.MultiBinary(2)])}),
}


@pytest.mark.parametrize("space", ACTIONS.values(), ids=list(ACTIONS))
def test_actions_as_rows_and_back_are_the_same(space: Any) -> None:
    batched = batch_space(space, 5)
    batched.seed(3)
    batch, form = batched.sample(), ActionForm(space)
    rows = form.to_rows(batch)
    assert rows.shape == (5, form.columns)
    choices = rows[:, : len(form.choices)]
    assert ((choices >= 0) & (choices < form.choices)).all()
    again = form.to_batch(rows)
    np.testing.assert_array_equal(form.to_rows(again), rows)
    if space is not ACTIONS["float64"]:
        assert again in batched


TEXT, WHOLE = spaces.Text(5), spaces.Box(0, 5, (2,), np.int64)


@pytest.mark.parametrize(
    ("find", "space", "said"),
    [
        (leaves_of, TEXT, "the observation is Text, which is not supported"),
        (leaves_of, spaces.Dict(seen=WHOLE, told=spaces.Tuple([TEXT])), "the observation, told/0, is Text"),
        (ActionForm, TEXT, "the action is Text"),
        (ActionForm, WHOLE, "the action is a Box of int64"),
        (ActionForm, spaces.Sequence(spaces.Discrete(2)), "the action is Sequence"),
    ],
)
def test_an_unsupported_space_raises_with_its_name(find: Any, space: Any, said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        find(space)


# -- the log ----------------------------------------------------------------------------------------------------------


def log_of(run: Run) -> Path:
    return run.path / "updates.msgpack"


def test_a_log_cut_anywhere_has_the_updates_that_were_whole_and_goes_on(run: Run) -> None:
    data, ends = log_of(run).read_bytes(), np.array([entry.end for entry in run.chain.entries()])
    for end in range(len(data)):
        log_of(run).write_bytes(data[:end])
        whole = int((ends <= end).sum())
        assert list(run.updates()) == UPDATES[:whole]
        with run.open_log() as log:
            for update in UPDATES[whole:]:
                log.append(UPDATE, update.plain())
        assert log_of(run).read_bytes() == data


def test_a_flipped_bit_anywhere_in_the_log_is_found(run: Run) -> None:
    data = log_of(run).read_bytes()
    for at in range(len(data)):
        for bit in (0, 7):
            log_of(run).write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
            with pytest.raises(CorruptTrace):
                list(run.updates())


def test_a_log_shorter_than_the_newest_checkpoint_is_not_continued(run: Run) -> None:
    run.checkpoint(3).touch()
    run.open_log().close()
    data, ends = log_of(run).read_bytes(), [entry.end for entry in run.chain.entries()]
    log_of(run).write_bytes(data[: ends[2]])
    with pytest.raises(CorruptTrace, match="ends before version 3"):
        run.open_log()
    for changed in (data[: ends[1]] + data[ends[2] :], data[: ends[1]] + data[ends[0] :], data[ends[0] :]):
        log_of(run).write_bytes(changed)
        with pytest.raises(CorruptTrace, match=r"does not follow the one before|run\.json beside it has changed"):
            run.updates()


def test_a_log_of_before_the_chain_is_read_and_goes_on_as_one(run: Run) -> None:
    with log_of(run).open("wb") as file:
        for update in UPDATES:
            body = msgpack.packb(update.plain())
            file.write(frame(len(body), zlib.crc32(body)) + body)
    assert (run.updates(), run.log.chained) == (UPDATES, False)
    more = Update(4, (Origin("w", 64, 3),), 256, "4")
    with run.open_log() as log:
        log.append(UPDATE, more.plain())
    assert run.updates() == [*UPDATES, more]
    old = run.chain.entries().__next__()
    data = bytearray(log_of(run).read_bytes())
    body = msgpack.packb(Update(0, (), 0, "ac").plain())
    data[: old.end] = frame(len(body), zlib.crc32(body)) + body
    log_of(run).write_bytes(data)
    with pytest.raises(CorruptTrace, match="does not follow the one before"):
        run.updates()


def test_a_log_belongs_to_its_settings(run: Run) -> None:
    about = run.path / "run.json"
    about.write_text(about.read_text().replace('"seed": 7', '"seed": 8'))
    with pytest.raises(CorruptTrace, match=r"run.json beside it has changed, or is of another log; restore a copy"):
        run.updates()


def test_an_update_that_does_not_fit_on_the_disk_leaves_the_log_as_it_was(run: Run) -> None:
    class Full:
        """The disk takes half of it."""

        def __init__(self, file: Any):
            self._file = file
            self.fileno, self.close = file.fileno, file.close

        def write(self, data: bytes) -> int:
            return int(self._file.write(data[: len(data) // 2]))

    data = log_of(run).read_bytes()
    with run.open_log() as log:
        log._file = Full(log._file)  # type: ignore[assignment]
        with pytest.raises(RecordingError, match="No space"):
            log.append(UPDATE, UPDATES[3].plain())
    assert log_of(run).read_bytes() == data


def test_one_learner_at_a_time_writes_to_a_log(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_trace.training.proof.chain._WRITER_SECONDS", 0.1)
    with run.open_log(), pytest.raises(InvalidOption, match="another process still writes to it"):
        run.open_log()
    run.open_log().close()


@pytest.mark.parametrize(
    "about",
    [
        b"",
        b"[" * 100_000,
        b"[]",
        b'{"settings": {}}',
        *(json.dumps({"settings": {}, "seed": seed}).encode() for seed in (-1, "1", 10**40, 1.5, True)),
        *(json.dumps({"settings": {}, "seed": 1, "steps": steps}).encode() for steps in ("1", 0, -5, 1.5, 10**40)),
        b'{"settings": {}, "seed": 1, "steps": NaN}',
        *(json.dumps({"settings": made, "seed": 1}).encode() for made in ({"x": 1}, {"hidden": [10**9]}, [], None)),
    ],
    ids=lambda about: about[:50].decode(),
)
def test_invalid_run_settings_raise(run: Run, about: bytes) -> None:
    (run.path / "run.json").write_bytes(about)
    with pytest.raises(CorruptTrace) as raised:
        run.settings  # noqa: B018
    assert "\n" not in str(raised.value)


def test_a_pipe_in_place_of_a_file_of_a_run_raises(run: Run, tmp_path: Path) -> None:
    for path, read in ((run.path / "run.json", lambda: run.about), (log_of(run), lambda: list(run.updates()))):
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(CorruptTrace):
            read()
    with pytest.raises(TraceNotFound):
        Run(tmp_path / "none").about  # noqa: B018


@pytest.mark.parametrize("place", ["trace", "checkpoints", "done"])
def test_a_link_in_a_run_is_not_followed(run: Run, tmp_path: Path, place: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    if place == "done":
        elsewhere = tmp_path / "missing"
    else:
        (run.path / place).rename(elsewhere)
    (run.path / place).symlink_to(elsewhere)
    with pytest.raises(CorruptTrace, match=f"{place}: is a link; links are not followed"):
        run.to_resume(None, trust=True)
    with pytest.raises(CorruptTrace, match="is a link"):
        run.settings  # noqa: B018
    if place == "done":
        with pytest.raises(OSError, match="a link"):
            run.set_done(True)
        assert not elsewhere.exists()


def test_a_policy_of_a_population_that_is_a_link_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "population").mkdir()
    (tmp_path / "population" / "policy-0").symlink_to(run.path)
    with pytest.raises(CorruptTrace, match="policy-0: is a link"):
        runs_in(tmp_path / "population")


def test_a_log_that_is_mostly_holes_is_not_read(run: Run) -> None:
    size = 24 << 20
    begin = b"\x96\x00\x90\x00\xa0\x81\xa0\xdd" + (size - 13).to_bytes(4, "big")  # losses: a list of zeros
    body = begin + bytes(size - 13) + b"\x80"
    with log_of(run).open("wb") as file:
        file.write(frame(size, zlib.crc32(body)) + begin)
        file.seek(16 + size - 1)
        file.write(body[-1:])
    with pytest.raises(CorruptTrace, match="are on disk"):
        list(run.updates())
    with pytest.raises(CorruptTrace, match="are on disk"):
        run.open_log()


def test_an_update_of_very_many_lists_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_trace.data.packing.MAX_CONTAINERS", 1000)
    body = b"\x96\x00\xdc" + (2000).to_bytes(2, "big") + b"\x90" * 2000 + b"\x00\xa0\x80\x80"
    log_of(run).write_bytes(frame(len(body), zlib.crc32(body)) + body)
    with pytest.raises(CorruptTrace, match="lists and maps"):
        list(run.updates())


def test_a_function_named_by_an_untrusted_run_is_not_called(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.create(Settings(model="os:system"), 0)
    with pytest.raises(InvalidOption, match="os:system"):
        run.trusted_settings(trust=False)
    assert run.trusted_settings(trust=True).model == "os:system"


# -- shared memory ----------------------------------------------------------------------------------------------------


def test_slots_keep_rollouts_apart() -> None:
    space = spaces.Dict({"p": spaces.Box(0, 255, (3, 3, 1), np.uint8), "v": spaces.Box(-1, 1, (2,), np.float64)})
    shape = Shape.of(space, spaces.Discrete(2), 4, 2, 3)
    slots, random = RolloutBuffer(shape, 3), np.random.default_rng(0)

    def arrays(slot: int) -> list[Any]:
        rollout = slots.rollout(slot)
        return [*rollout.observations, *rollout.finals, rollout.actions, rollout.rewards, rollout.state]

    written = []
    for slot in range(3):
        for array in arrays(slot):
            array[...] = random.integers(0, 100, array.shape)
        slots.set_origin(slot, Origin(f"writer-{slot}", slot * 4, slot + 10))
        written.append([array.copy() for array in arrays(slot)])
    for slot, expected in enumerate(written):
        for array, wanted in zip(arrays(slot), expected, strict=True):
            np.testing.assert_array_equal(array, wanted)
        assert slots.origin(slot) == Origin(f"writer-{slot}", slot * 4, slot + 10)


def test_only_the_two_newest_versions_of_weights_are_kept() -> None:
    weights, room = Weights(5), np.empty(5, np.uint8)
    with pytest.raises(LookupError):
        weights.read(room, 0)
    for version in range(4):
        weights.publish(version, np.full(5, version, np.uint8))
        assert (weights.read(room), *room) == (version,) * 6
    assert (weights.read(room, 2), *room) == (2,) * 6
    with pytest.raises(LookupError):
        weights.read(room, 1)


def test_memory_is_there_before_it_is_written_to() -> None:
    weights = Weights(1 << 20)
    assert os.fstat(weights._memory.fd).st_blocks * 512 >= 2 << 20  # else a full /dev/shm would be a SIGBUS


def test_messages_come_out_as_they_were_put_in_and_an_end_is_an_end() -> None:
    reader, writer = Pipe(duplex=False)
    sent = [Message(0, 0, 0), Message(0xFFFF, 3, 7), Message(1, 0xFFFF, 1 << 31)]
    for token in sent:
        put(writer, token)
    assert [take(reader) for _ in sent] == sent
    assert not has_more(reader)
    writer.close()
    assert has_more(reader)
    with pytest.raises(EOFError):
        take(reader)
    reader.close()
