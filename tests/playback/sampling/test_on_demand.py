"""The first batches read only what they need, and are those of a trace that is decoded as a whole."""

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from round_trips import RoundTrips

from gym_trace import TraceWriter, open_trace
from gym_trace.playback.sampling.batches import Batches
from gym_trace.storage.protocol import Span

EPISODES, STEPS = 300, 80


class Counting(RoundTrips):
    """A storage whose reads take round trips; it counts bytes, too."""

    fetched = 0

    def expect(self, spans: Iterable[Span], gaps: bool = True) -> None:
        spans = list(spans)
        self.fetched += sum(span.length for span in spans)
        super().expect(spans, gaps)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record two writers with long and short episodes of noise, some of which lack their last observation."""
    directory = tmp_path_factory.mktemp("noise") / "t"
    random = np.random.default_rng(0)
    for name in ("a", "b"):
        with TraceWriter(directory, uid=name, on_exist="append") as trace:
            for number in range(EPISODES):
                rows = random.normal(size=(STEPS - number % 7, 12))
                trace.begin(rows[0])
                for step, row in enumerate(rows[1:]):
                    ends = step == len(rows) - 2 and number % 3 > 0
                    trace.step(int(row[0] > 0), row, float(row[1]), terminated=ends)
                if number % 100 == 50:
                    trace.flush()
    return directory


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one.dtype == other.dtype and np.array_equal(one, other)


def whole(batches: Batches) -> Batches:
    """Return the same batches, which decode all rows at once."""
    batches._item_margins = None
    return batches


KINDS = [
    ("windows", {"length": 5}),
    ("windows", {"length": 5, "span": (False, True), "stride": 3, "columns": ["observations"]}),
    ("windows", {"length": 90, "strict_length": False}),
    ("windows", {"length": 5, "weights": np.arange(2.0 * EPISODES)}),
    ("windows", {"length": 5, "replacement": False}),
    ("transitions", {}),
    ("transitions", {"n_steps": 3, "n_frames": 4}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=repr)
def test_the_first_batches_are_those_of_a_trace_decoded_as_a_whole(
    directory: Path, kind: str, options: dict[str, Any]
) -> None:
    trace = open_trace(directory)
    few, all_rows = (getattr(trace, kind)(**options, batch_size=3, seed=1) for _ in range(2))
    whole(all_rows)
    on_demand = 0
    for _ in range(9):
        assert same(next(few), next(all_rows))
        on_demand += few._on_demand is not None
    assert 0 < on_demand < 9


def test_the_first_batch_reads_a_few_blocks_in_one_round_trip(directory: Path) -> None:
    storage = Counting({path.name: path.read_bytes() for path in directory.iterdir()})
    trace = open_trace(storage)
    batches = trace.windows(5, 3)
    before, waits = storage.fetched, storage.waits
    next(batches)
    total = sum(map(storage.size, storage.names()))
    assert storage.fetched - before < total / 8
    assert storage.waits <= waits + 1


def test_pickled_batches_go_on_with_the_rows_that_they_need(directory: Path) -> None:
    batches = open_trace(directory).windows(5, 3, replacement=False)
    copy = pickle.loads(pickle.dumps(batches))
    assert same(next(copy), next(batches))
    assert copy._on_demand is not None
    assert len(copy) == len(whole(open_trace(directory).windows(5, 3, replacement=False)))


def test_a_refresh_of_the_first_batches_takes_in_new_episodes(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    with TraceWriter(tmp_path / "t") as writer:
        for number in range(2 * EPISODES):
            writer.begin(random.normal(size=12))
            for _ in range(9):
                writer.step(0, random.normal(size=12), 0.0)
            if number == EPISODES:
                writer.flush()
                batches = open_trace(tmp_path / "t").transitions(3)
                next(batches)
                assert batches._on_demand is not None
        writer.flush()
        batches.refresh()
        assert batches.items == 9 * 2 * EPISODES
        assert max(next(batches)["episode"].max() for _ in range(9)) > EPISODES


def test_batches_before_the_start_of_an_episode_decode_all_rows(directory: Path) -> None:
    trace = open_trace(directory)
    few, all_rows = (trace.windows(8, 64, span=True) for _ in range(2))
    assert same(next(few), next(whole(all_rows)))


@pytest.mark.parametrize("kind", ["windows", "transitions"])
def test_the_first_batches_of_a_stream_are_those_of_a_decoded_group(directory: Path, kind: str) -> None:
    trace = open_trace(directory)
    args = (5, 3) if kind == "windows" else (3,)
    few, decoded = (getattr(trace, kind)(*args, cache=None, seed=1) for _ in range(2))
    whole(decoded)
    on_demand = 0
    for _ in range(9):
        assert same(next(few), next(decoded))
        on_demand += few._item_margins is not None
    assert 0 < on_demand < 9
