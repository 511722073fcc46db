"""Workers that are started, heard, watched and restarted."""

import os
import signal
import time
from typing import Any

import pytest

from gym_trace.errors import InvalidOption
from gym_trace.recording.processes.fleet import Fleet, Job, Key, Lost, Member, Meter
from gym_trace.recording.processes.local import LocalProcesses, portable

JOB = Job("any", print, ())


class Script:
    """Backend that returns given messages and starts nothing."""

    def __init__(self) -> None:
        self.messages: list[tuple[Key, Any]] = []
        self.killed: list[Key] = []

    def start(self, key: Key, job: Job) -> None:
        pass

    def send(self, key: Key, message: Any) -> None:
        pass

    def poll(self, seconds: float) -> list[tuple[Key, Any]]:
        messages, self.messages = self.messages, []
        return messages

    def kill(self, key: Key, is_last: bool = False) -> None:
        self.killed.append(key)


def fleet_of(count: int, **options: Any) -> tuple[Script, Fleet, dict[Key, Member]]:
    backend, members = Script(), {number: Member() for number in range(count)}
    options = {"stall_timeout": 60.0, "max_restarts": 9, "max_failures": 9, **options}
    fleet = Fleet(backend, members, **options)
    for number in members:
        fleet.start(number, JOB)
    return backend, fleet, dict(members)


def test_failures_in_a_row_are_limited_until_the_owner_resets_them() -> None:
    _, fleet, members = fleet_of(1, max_failures=2)
    assert [fleet.retry(0) for _ in range(2)] == ["", ""]
    assert "it failed 3 times" in fleet.retry(0)
    members[0].failures = 0
    assert fleet.retry(0) == ""


def test_all_workers_share_one_budget_of_restarts() -> None:
    _, fleet, _ = fleet_of(2, max_restarts=1)
    assert fleet.retry(0) == ""
    assert fleet.retry(1) == "max_restarts=1 allows no more restarts"


def test_a_lost_worker_is_due_after_its_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_trace.recording.processes.fleet._FIRST_BACKOFF", 60.0)
    _, fleet, members = fleet_of(2)
    fleet.retry(1)
    assert fleet.due() == []
    assert members[1].state == "restarting"
    members[1].due = time.monotonic()
    assert fleet.due() == [1]
    fleet.start(1, JOB)
    assert fleet.due() == []


def test_silence_kills_watched_workers_only() -> None:
    backend, fleet, members = fleet_of(3, stall_timeout=0.0, start_timeout=60.0)
    members[1].state = members[2].state = "running"
    members[2].is_watched = False
    time.sleep(0.001)
    assert list(fleet.poll(0)) == [(1, Lost("no heartbeat for 0 s (stall_timeout)"))]
    assert backend.killed == [1]
    assert [member.is_alive for member in members.values()] == [True, False, True]


def test_messages_of_a_life_that_has_ended_are_dropped() -> None:
    backend, fleet, _ = fleet_of(2)
    backend.messages = [(0, Lost("gone")), (1, "old")]
    heard = []
    for key, message in fleet.poll(0):
        heard.append((key, message))
        fleet.close()
        fleet.start(1, JOB)
    assert heard == [(0, Lost("gone"))]


def test_throughput_counts_from_the_start_of_the_meter() -> None:
    meter = Meter()
    time.sleep(0.01)
    assert all(0 < speed <= 10_000 for speed in meter.speeds(100))
    meter.restart()
    assert meter.seconds < 60
    assert meter.speeds(0) == (0.0, 0.0, 0.0)


def echoing(connection: Any, word: str) -> None:
    connection.send((word, os.environ["OMP_NUM_THREADS"]))
    order = connection.recv()
    if order == "raise":
        raise InvalidOption("out of\nluck")
    if order == "exit":
        raise SystemExit(4)
    if order == "die":
        os.kill(os.getpid(), signal.SIGKILL)


def heard_from(backend: LocalProcesses, count: int) -> list[tuple[Key, Any]]:
    heard: list[tuple[Key, Any]] = []
    deadline = time.monotonic() + 60
    while len(heard) < count and time.monotonic() < deadline:
        heard += backend.poll(1.0)
    return heard


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_process_reports_what_it_did_and_why_it_ended(method: str) -> None:
    backend = LocalProcesses(method)
    orders: dict[Key, str] = {0: "raise", 1: "exit", "two": "die", 3: "end", 4: "hang"}
    for key in orders:
        backend.start(key, Job(str(key), echoing, (f"hello {key}",)))
    assert sorted(heard_from(backend, 5), key=str) == sorted(((key, (f"hello {key}", "1")) for key in orders), key=str)
    backend.kill(4)
    for key, order in orders.items():
        backend.send(key, order)
    lost = dict(heard_from(backend, 4))
    assert (lost[0].reason, lost[0].kind) == ("out of luck", InvalidOption)
    assert "in echoing" in lost[0].traceback
    assert lost[1].reason == "SystemExit: 4"
    assert lost["two"] == Lost("its process ended with exit code -9 (SIGKILL)")
    assert lost[3] == Lost("its process ended with exit code 0")
    assert backend.poll(0.0) == []


def test_a_callable_that_pickle_rejects_travels_as_a_stand_in() -> None:
    assert portable("make_env", lambda: 7)() == 7
