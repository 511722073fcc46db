"""TraceWriter.rollouts: arrays of many steps, compared with the same run recorded by the vector wrapper."""

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import forked_python
import gymnasium
import numpy as np
import pytest
from forked_python import HELPERS
from gymnasium import spaces, vector
from raising_signals import InterruptsAt

from gym_trace import Episode, TraceWriter, check_trace, open_trace
from gym_trace.data.episode import infos_of
from gym_trace.errors import InvalidOption
from gym_trace.recording.vector.rollouts import RolloutRecorder

if not hasattr(vector, "AutoresetMode"):
    pytest.skip("needs gymnasium 1.1", allow_module_level=True)

from gym_trace import TraceRecordingVectorWrapper

MODES = ["NextStep", "SameStep", "Disabled"]
LANES = 5
Arrays = dict[str, Any]


class Walk(gymnasium.Env[Any, Any]):
    """Episodes of 1 to 9 steps, some terminated, some truncated, some both."""

    observation_space = spaces.Dict(
        at=spaces.Box(-np.inf, np.inf, (3,), np.float32), pair=spaces.Tuple([spaces.Discrete(9), spaces.MultiBinary(2)])
    )
    action_space = spaces.Box(-1, 1, (2,), np.float64)

    def __init__(self, lane: int):
        self._random, self._episode = np.random.default_rng(lane), lane

    def _seen(self) -> Any:
        number, bits = np.int64(self._random.integers(9)), self._random.integers(0, 2, 2).astype(np.int8)
        return {"at": self._random.normal(size=3).astype(np.float32), "pair": (number, bits)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._left, self._episode = int(self._random.integers(1, 10)), self._episode + 1
        return self._seen(), {"left": self._left}

    def step(self, action: Any) -> Any:
        self._left -= 1
        over = self._left == 0
        ends = over and self._episode % 3 != 0, over and self._episode % 3 != 1
        return self._seen(), float(action[0]), *ends, {"left": self._left}


def stacked(values: list[Any]) -> Any:
    """Stack the batches of several steps."""
    if isinstance(values[0], dict):
        return {key: stacked([value[key] for value in values]) for key in values[0]}
    if isinstance(values[0], tuple):
        return tuple(stacked(list(part)) for part in zip(*values))
    return np.stack(values)


def filled(finals: Any, like: Any) -> Any:
    """Turn the object array of last observations into a batch; other lanes get the observations of `like`."""
    rows = [
        {**lane_of(like, lane)} if finals is None or finals[lane] is None else finals[lane] for lane in range(LANES)
    ]
    return stacked(rows)


def lane_of(batch: Any, lane: int) -> Any:
    if isinstance(batch, dict):
        return {key: lane_of(value, lane) for key, value in batch.items()}
    return tuple(lane_of(value, lane) for value in batch) if isinstance(batch, tuple) else batch[lane]


def run(directory: Path, mode: str, lengths: list[int], **options: Any) -> list[Arrays]:
    """Record a run with the vector wrapper; return its rollouts. Without autoreset, resets come between these."""
    makers = [lambda lane=lane: Walk(lane) for lane in range(LANES)]
    inner = vector.SyncVectorEnv(makers, autoreset_mode=vector.AutoresetMode(mode))
    envs = TraceRecordingVectorWrapper(inner, directory, **options)
    envs.action_space.seed(1)
    random = np.random.default_rng(2)
    observations, _ = envs.reset()
    found, over = [], np.zeros(LANES, np.bool_)
    for length in lengths:
        if mode == "Disabled" and over.any():
            observations, _ = envs.reset(options={"reset_mask": over})
            over[:] = False
        steps: list[Any] = []
        seen = [observations]
        for _ in range(length):
            if mode == "Disabled":
                inner._autoreset_envs[:] = False  # lanes may go on after the end
            actions, value = envs.action_space.sample(), random.normal(size=LANES)
            envs.annotate(value=value, pair=np.stack([value, value], 1))
            observations, rewards, terminated, truncated, infos = envs.step(actions)
            over |= terminated | truncated
            final = filled(infos.get("final_obs"), observations)
            last = infos.get("final_info", {"left": np.zeros(LANES, int), "_left": np.zeros(LANES, bool)})
            kept = {"left": infos["left"], "_left": infos["_left"]} | (
                {"final_info": last} if mode == "SameStep" else {}
            )
            steps.append((actions, rewards, terminated, truncated, value, final, kept))
            seen.append(observations)
        names = ("actions", "rewards", "terminations", "truncations", "value", "finals", "infos")
        found.append({"observations": stacked(seen), **dict(zip(names, map(stacked, zip(*steps))))})
    envs.close()
    return found


def tell(writer: TraceWriter, arrays: Arrays, mode: str, **changed: Any) -> None:
    given = {name: arrays[name] for name in ("observations", "actions", "rewards", "terminations", "truncations")}
    value = arrays["value"]
    given |= {"annotations": {"value": value, "pair": np.stack([value, value], 2)}, "infos": arrays["infos"]}
    finals = {"final_observations": arrays["finals"]} if mode == "SameStep" else {}
    writer.rollouts(**(given | finals | {"autoreset": mode} | changed))


def content(episode: Episode) -> list[Any]:
    """The content of an episode, in a form that compares bits."""

    def raw(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: raw(item) for key, item in value.items()}
        if isinstance(value, tuple):
            return tuple(map(raw, value))
        return value.dtype.str, value.shape, value.tobytes()

    columns = [getattr(episode, name) for name in ("observations", "actions", "rewards", "terminations", "truncations")]
    infos = list(map(str, infos_of(episode) or []))
    return [episode.lane, episode.episode_id, episode.first_step, episode.outcome, *map(raw, columns),
            raw(dict(episode.annotations)), infos]  # fmt: skip


def same(mine: Path, theirs: Path, has_reset_infos: bool = True) -> int:
    """Compare two traces row by row; return the number of steps.

    has_reset_infos: False if no reset happened within a rollout, which would have had an info.
    """
    one, other = open_trace(mine), open_trace(theirs)
    assert len(one) == len(other)
    for a, b in zip(one, other):
        assert content(a) == content(b)
        if a.episode_id >= LANES and has_reset_infos:
            assert a.reset_info == b.reset_info
    assert not check_trace(mine).damages
    return sum(map(len, one))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"record_infos": True},
    {"record_infos": ["left"], "episode_filter": lambda i: i % 3 != 1},
    {"frame_filter": lambda i: i % 4 != 2},
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "infos", "episodes", "frames"])
def test_rollouts_equal_the_run_that_the_wrapper_records(tmp_path: Path, mode: str, options: dict[str, Any]) -> None:
    rollouts = run(tmp_path / "wrapper", mode, [1, 7, 30, 2, 20], **options)
    given = {"observation_space": Walk.observation_space, "action_space": Walk.action_space}
    with TraceWriter(tmp_path / "writer", **options, **given) as writer:
        for arrays in rollouts:
            tell(writer, arrays, mode)
    assert same(tmp_path / "writer", tmp_path / "wrapper", mode != "Disabled") > 50


@pytest.mark.parametrize("mode", MODES[:2])
def test_the_next_rollout_completes_one_without_final_observations(tmp_path: Path, mode: str) -> None:
    rollouts = run(tmp_path / "wrapper", mode, [6, 1, 9, 5], record_infos=True)
    with TraceWriter(tmp_path / "writer", record_infos=True) as writer:
        for number, arrays in enumerate(rollouts):
            changed = {} if number == 3 else {"observations": cut(arrays["observations"])}
            tell(writer, arrays, mode, **changed)
            for leaf in (arrays["rewards"], arrays["value"], arrays["infos"]["left"]):
                leaf[...] = 7  # the caller may use its buffers again
    assert same(tmp_path / "writer", tmp_path / "wrapper") > 50


def cut(tree: Any) -> Any:
    """Leave out the last row of all arrays."""
    if isinstance(tree, dict):
        return {key: cut(value) for key, value in tree.items()}
    return tuple(map(cut, tree)) if isinstance(tree, tuple) else tree[:-1]


def arrays_of(times: int, first: float = 0.0, lanes: int = 3) -> Arrays:
    """A rollout of lanes whose observations count, without ends."""
    count = first + np.arange(times + 1, dtype=np.float32)[:, None] + 100 * np.arange(lanes, dtype=np.float32)
    zeros = np.zeros((times, lanes))
    return {"observations": count[..., None], "actions": zeros.astype(int), "rewards": zeros,
            "terminations": zeros > 0, "truncations": zeros > 0}  # fmt: skip


def test_the_last_step_is_left_out_with_a_warning_if_nothing_completes_it(tmp_path: Path) -> None:
    arrays, writer = arrays_of(5), TraceWriter(tmp_path)
    writer.rollouts(**arrays | {"observations": arrays["observations"][:-1]})
    with pytest.warns(UserWarning, match="the last step of the rollouts is not recorded"):
        writer.close()
    assert [(e.outcome, len(e)) for e in open_trace(tmp_path)] == [("closed", 4)] * 3


def test_end_ends_all_lanes_and_the_next_call_begins_new_episodes(tmp_path: Path) -> None:
    with TraceWriter(tmp_path) as writer:
        writer.rollouts(**arrays_of(4))
        writer.end("truncated")
        writer.rollouts(**arrays_of(3, first=50))
    assert [(e.outcome, len(e), e.observations[0, 0]) for e in open_trace(tmp_path)] == [
        *[("truncated", 4, 100.0 * lane) for lane in range(3)],
        *[("closed", 3, 50 + 100.0 * lane) for lane in range(3)],
    ]


def test_without_last_observations_they_are_unknown_with_a_warning(tmp_path: Path) -> None:
    arrays = arrays_of(3)
    arrays["terminations"][1, 2] = True
    writer = TraceWriter(tmp_path)
    with pytest.warns(UserWarning, match="the last ones of episodes are unknown"):
        writer.rollouts(**arrays, autoreset="same-step")
    for end in (writer.close, writer.close):  # read from the ring, then from a batch
        found = [
            (e.lane, e.has_final_observation, *np.nan_to_num(e.observations[:, 0], nan=-1))
            for e in open_trace(tmp_path)
        ]
        assert sorted(found) == [
            (0, True, 0, 1, 2, 3), (1, True, 100, 101, 102, 103), (2, False, 200, 201, -1), (2, True, 202, 203)
        ]  # fmt: skip
        end()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"rewards": np.zeros(4)}, r"rewards: got shape \(4,\); pass an array of shape \(steps, lanes, ...\)"),
        ({"actions": [[0] * 3] * 4}, r"actions: got a list; pass an array"),
        ({"actions": np.zeros((4, 2))}, r"actions: shape \(4, 2\); expected \(4, 3, ...\)"),
        ({"observations": np.zeros((6, 3, 1))}, r"observations: 6 rows for 4 steps; pass 5"),
        ({"observations": np.zeros((5, 2, 1))}, r"observations: shape \(5, 2, 1\); expected \(5, 3, ...\)"),
        (
            {"observations": {"a": np.zeros((5, 3))}},
            r"observations: \{'a': 'float64\[3\]'\} for a step, and float32\[3, 1\]",
        ),
        ({"rewards": np.zeros((4, 0))}, r"rewards: shape \(4, 0\) has no lanes"),
        ({"observations": {}}, r"an empty dict or tuple"),
        ({"truncations": {"a": np.zeros((4, 3))}}, r"truncations: pass one array of shape \(steps, lanes\)"),
        (
            {"annotations": {"value": np.zeros((4, 2))}},
            r"annotations\['value'\]: shape \(4, 2\); expected \(4, 3, ...\)",
        ),
        ({"infos": {"a": np.zeros((5, 3))}}, r"infos\['a'\]: shape \(5, 3\)"),
        ({"autoreset": "always"}, r"autoreset='always': pass one of NextStep, SameStep, Disabled"),
        ({"autoreset": "SameStep"}, r"autoreset='SameStep': it was NextStep before; use another TraceWriter"),
        ({"final_observations": np.zeros((4, 3, 1))}, r"final_observations: only with autoreset='SameStep'"),
        (arrays_of(4, first=9), r"row 0 of lane 0 is not the last row of the call before; call end\(\) first"),
        (arrays_of(4, first=2, lanes=2), r"rewards: 2 lanes, and 3 before"),
    ],
)
def test_arrays_that_do_not_match_are_refused_before_anything_is_recorded(
    tmp_path: Path, changed: Arrays, says: str
) -> None:
    with TraceWriter(tmp_path) as writer:
        writer.rollouts(**arrays_of(2))
        with pytest.raises(InvalidOption, match=says):
            writer.rollouts(**arrays_of(4, first=2) | changed)
        writer.rollouts(**arrays_of(4, first=2))
    assert [len(e) for e in open_trace(tmp_path)] == [6] * 3


def test_without_autoreset_the_observations_after_the_last_step_are_needed(tmp_path: Path) -> None:
    arrays = arrays_of(2)
    with TraceWriter(tmp_path) as writer, pytest.raises(InvalidOption, match="with autoreset='Disabled' pass one more"):
        writer.rollouts(**arrays | {"observations": arrays["observations"][1:]}, autoreset="Disabled")


def test_a_writer_takes_either_rollouts_or_single_steps(tmp_path: Path) -> None:
    with TraceWriter(tmp_path) as writer:
        writer.rollouts(**arrays_of(2))
        for misuse in (lambda: writer.begin(0), lambda: writer.step(0, 0, 0), lambda: writer.act(0)):
            with pytest.raises(InvalidOption, match="this writer records rollouts; use another TraceWriter, or a lane"):
                misuse()
        single = writer.lane(7)
        single.begin(np.zeros(1, np.float32))
        single.step(np.int64(0), np.ones(1, np.float32), 1.0)
        with pytest.raises(InvalidOption, match=r"rollouts\(\): this writer records single steps"):
            single.rollouts(**arrays_of(2))
    assert sorted((e.lane, len(e)) for e in open_trace(tmp_path)) == [(0, 2), (1, 2), (2, 2), (7, 1)]


def test_an_interrupted_rollout_is_cut_and_lanes_resume_with_new_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gym_trace.recording.vector.steps import LaneSteps

    record_result, left = LaneSteps.record_result, iter(range(100))

    def interrupted(self: LaneSteps, *given: Any) -> None:
        if next(left) == 2:
            raise KeyboardInterrupt
        record_result(self, *given)

    monkeypatch.setattr(LaneSteps, "record_result", interrupted)
    with TraceWriter(tmp_path, record_infos=True) as writer:
        with pytest.raises(KeyboardInterrupt):
            writer.rollouts(**arrays_of(4))
        arrays = arrays_of(4, first=4)
        arrays["terminations"][1] = True
        with pytest.warns(UserWarning, match=r"rollouts\(\): it was interrupted; each lane is recorded again"):
            writer.rollouts(**arrays)
    assert [(e.outcome, e.observations[:, 0].tolist()) for e in open_trace(tmp_path)] == [
        *[("cut", [0.0 + lane, 1.0 + lane, 2.0 + lane]) for lane in (0, 100, 200)],
        *[("closed", [7.0 + lane, 8.0 + lane]) for lane in (0, 100, 200)],
    ]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("line", range(10))
def test_an_interrupted_end_of_rollouts_can_be_repeated_and_loses_no_step(
    tmp_path: Path, line: int, again: bool
) -> None:
    codes = TraceWriter.end.__code__, RolloutRecorder.end.__code__
    with TraceWriter(tmp_path) as writer:
        writer.rollouts(**arrays_of(4))
        with contextlib.suppress(KeyboardInterrupt), InterruptsAt(line, KeyboardInterrupt, codes.__contains__):
            writer.end()
        if again:
            with contextlib.suppress(InvalidOption):  # it has ended them before it was interrupted
                writer.end()
            writer.rollouts(**arrays_of(3, first=50))
        else:
            writer.rollouts(**arrays_of(3, first=4))  # continued and new episodes, ended or not
    steps = [0, 0, 0]
    for episode in open_trace(tmp_path):
        steps[episode.lane] += len(episode)
    assert steps == [7, 7, 7]


def die_after_rollouts(directory: str) -> None:
    writer = TraceWriter(directory)
    for number in range(5):
        arrays = arrays_of(10, first=10 * number)
        writer.rollouts(**arrays, annotations={"value": arrays["rewards"] + number})
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a ring and signals")
def test_a_rollout_whose_call_has_returned_survives_a_kill(tmp_path: Path) -> None:
    code = "import sys; import test_rollouts; test_rollouts.die_after_rollouts(sys.argv[1])"
    path = os.pathsep.join([HELPERS, str(Path(__file__).parent)])
    killed = forked_python.run([sys.executable, "-c", code, str(tmp_path)], env={**os.environ, "PYTHONPATH": path})
    assert killed.returncode == -signal.SIGKILL
    assert [(e.outcome, len(e), e.observations[-1, 0]) for e in open_trace(tmp_path)] == [
        ("lost", 50, 50 + 100 * lane) for lane in range(3)
    ]


def test_tensors_of_pytorch_are_recorded_as_arrays(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    arrays = {name: torch.from_numpy(value) for name, value in arrays_of(6).items()}
    with TraceWriter(tmp_path / "torch") as writer:
        writer.rollouts(**arrays, annotations={"logprob": torch.zeros(6, 3, requires_grad=True)})
    with TraceWriter(tmp_path / "numpy") as writer:
        writer.rollouts(**arrays_of(6), annotations={"logprob": np.zeros((6, 3), np.float32)})
    same(tmp_path / "torch", tmp_path / "numpy")


def test_tensors_of_a_dtype_that_numpy_lacks_raise(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    actions = torch.zeros(6, 3, dtype=torch.bfloat16)
    with TraceWriter(tmp_path) as writer, pytest.raises(InvalidOption, match=r"^actions: NumPy lacks bfloat16; pass"):
        writer.rollouts(**{**arrays_of(6), "actions": actions})


def test_arrays_that_offer_only_dlpack_are_taken(tmp_path: Path) -> None:
    class Offered:
        def __init__(self, array: Any):
            self._array = array

        def __dlpack__(self, **given: Any) -> Any:
            return self._array.__dlpack__(**given)

        def __dlpack_device__(self) -> Any:
            return self._array.__dlpack_device__()

    with TraceWriter(tmp_path / "offered") as writer:
        writer.rollouts(**{name: Offered(value) for name, value in arrays_of(6).items()})
    with TraceWriter(tmp_path / "numpy") as writer:
        writer.rollouts(**arrays_of(6))
    same(tmp_path / "offered", tmp_path / "numpy")
