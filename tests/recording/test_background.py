"""The thread that writes slabs: how long it lives, what it holds, and what happens without it."""

import contextlib
import ctypes
import gc
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from shell import wait_for

from gym_trace.recording.background import SlabWriter


class Chunks:
    """In place of a ChunkWriter: notes what it is given, and in which thread."""

    writer = None

    def __init__(self) -> None:
        self.written: list[int] = []
        self.threads: list[threading.Thread] = []

    def write_slab(self, sequence: int, segments: list[Any], pending: list[Any]) -> None:
        self.written.append(sequence)
        self.threads.append(threading.current_thread())


def started() -> tuple[SlabWriter, Any]:
    chunks: Any = Chunks()
    return SlabWriter("a writer", chunks, lambda: None), chunks


def nothing() -> list[Any]:
    return []


def test_one_thread_writes_all_slabs_and_ends_at_close() -> None:
    out, chunks = started()
    for sequence in range(1, 6):
        out.submit(sequence, nothing)
        out.wait()
    (thread,) = set(chunks.threads)
    assert chunks.written == [1, 2, 3, 4, 5]
    assert thread is not threading.current_thread()
    assert thread.is_alive()
    assert thread.daemon
    out.close(dict)
    assert not thread.is_alive()
    assert out.is_complete


def test_a_pause_ends_the_thread_and_the_next_slab_starts_another() -> None:
    out, chunks = started()
    out.submit(1, nothing)
    out.pause()
    out.pause()
    assert not chunks.threads[0].is_alive()
    assert out.is_complete
    out.submit(2, nothing)
    out.wait()
    assert chunks.written == [1, 2]
    assert chunks.threads[1] is not chunks.threads[0]
    out.close(dict)


def test_a_waiting_thread_does_not_hold_the_arrays_of_the_last_slab() -> None:
    out, _ = started()
    array = np.zeros(10)
    gone = weakref.ref(array)

    def segments(array: Any = array) -> list[Any]:
        return []

    out.submit(1, segments)
    out.wait()
    del array, segments
    wait_for(lambda: gc.collect() >= 0 and gone() is None)
    out.close(dict)


def test_an_interrupted_pause_leaves_no_slab_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    out, chunks = started()
    may_write = threading.Event()
    rest = SlabWriter._rest

    def interrupted(writer: SlabWriter, thread: threading.Thread) -> None:
        monkeypatch.setattr(SlabWriter, "_rest", rest)
        raise KeyboardInterrupt

    def segments() -> list[Any]:
        may_write.wait()
        return []

    out.submit(1, segments)
    monkeypatch.setattr(SlabWriter, "_rest", interrupted)
    with pytest.raises(KeyboardInterrupt):
        out.pause()
    out.submit(2, nothing)  # behind the word that ends the thread
    may_write.set()
    out.wait()
    assert chunks.written == [1, 2]
    assert out.is_complete
    out.close(dict)


@pytest.mark.parametrize("method", ["is_alive", "join"])
def test_ctrl_c_while_it_waits_for_the_thread_does_not_hang_close(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Up to Python 3.12 a thread counts as dead once Ctrl-C has interrupted is_alive() or join()."""
    out, chunks = started()
    may_write, is_writing, dead = threading.Event(), threading.Event(), set[threading.Thread]()
    whole = {name: getattr(threading.Thread, name) for name in ("is_alive", "join")}

    def is_open_to_signals() -> bool:
        handler = signal.getsignal(signal.SIGINT)
        return threading.current_thread() is threading.main_thread() and handler is signal.default_int_handler

    def interrupted(name: str) -> Callable[..., Any]:
        def call(thread: threading.Thread, *args: Any) -> Any:
            if name == method and not dead and thread.name == "a writer" and is_open_to_signals():
                dead.add(thread)
                raise KeyboardInterrupt
            return (False if name == "is_alive" else None) if thread in dead else whole[name](thread, *args)

        return call

    def segments() -> list[Any]:
        is_writing.set()
        may_write.wait()
        return []

    signal.signal(signal.SIGINT, signal.default_int_handler)
    out.submit(1, segments)
    is_writing.wait()
    for name in whole:
        monkeypatch.setattr(threading.Thread, name, interrupted(name))
    timer = threading.Timer(1.0, may_write.set)  # so that waiting finds the thread at work
    timer.start()
    with contextlib.suppress(KeyboardInterrupt):
        out.pause()
    out.submit(2, nothing)
    closing = threading.Thread(target=out.close, args=[dict], daemon=True)
    closing.start()
    whole["join"](closing, 60)
    assert not whole["is_alive"](closing)
    assert chunks.written == [1, 2]
    assert len({*chunks.threads}) <= 2
    assert out.is_complete


def test_a_recorder_that_its_own_thread_closes_writes_the_slabs_that_wait() -> None:
    out, chunks = started()
    queued = threading.Event()

    def closes() -> list[Any]:
        queued.wait()
        out.close(dict)  # as garbage collection may do
        return []

    out.submit(1, closes)
    out.submit(2, nothing)
    queued.set()
    out.wait()
    chunks.threads[0].join(60)
    assert chunks.written == [1, 2]
    assert not chunks.threads[0].is_alive()


def test_a_thread_may_close_its_recorder_before_its_start_has_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    out, chunks = started()
    closed, start = threading.Event(), threading.Thread.start

    def slow(thread: threading.Thread) -> None:
        start(thread)
        closed.wait(60)

    def closes() -> list[Any]:
        out.close(dict)
        closed.set()
        return []

    monkeypatch.setattr(threading.Thread, "start", slow)
    out.submit(1, closes)
    assert closed.is_set()
    out.wait()
    assert chunks.written == [1]


def test_slabs_are_written_in_order_where_no_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    out, chunks = started()
    monkeypatch.setattr(threading.Thread, "start", refused)
    for sequence in (1, 2, 3):
        out.submit(sequence, nothing)
    assert chunks.written == []
    out.wait(2)
    assert chunks.written == [1, 2, 3]
    assert set(chunks.threads) == {threading.current_thread()}
    out.close(dict)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SystemExit(28), GeneratorExit(28)])
def test_a_failure_is_kept_and_wakes_who_waits(error: BaseException) -> None:
    out, chunks = started()

    def fails() -> list[Any]:
        raise error

    out.submit(1, fails)
    out.submit(2, nothing)
    out.wait()
    assert "28" in str(out.failure)
    assert chunks.written == []
    assert not out.is_complete
    out.close(dict)


def test_a_thread_that_another_one_stops_skips_no_slab() -> None:
    out, chunks = started()
    out.submit(1, nothing)
    out.wait()
    number = ctypes.c_ulong(chunks.threads[0].ident)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(SystemExit)) == 1
    out.submit(2, nothing)
    out.wait()
    out.submit(3, nothing)
    out.wait()
    out.close(dict)
    assert isinstance(out.failure, RuntimeError)
    assert chunks.written == [1]
