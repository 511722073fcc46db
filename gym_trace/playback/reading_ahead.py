"""Chunks read from the disk ahead of whoever decodes them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from gym_trace.format.batch_reader import Chunk
from gym_trace.format.buffers import common
from gym_trace.model.values import Array

Read = Callable[[int, Callable[[int], Array] | None], Chunk]


def decoded_in_turn(read: Read, numbers: list[int]) -> Iterator[tuple[int, Chunk]]:
    """Each number with its chunk, the columns decoded, in memory that is used again once nobody holds arrays in it.

    A thread reads and checks the next chunk meanwhile, which needs little of the interpreter. To decode in threads,
    too, gains nothing: NumPy keeps the interpreter lock while it undoes filters.

    Args:
        read: gives the chunk of a number, with what gives it memory.

    Raises what read and decoding raise, in turn.
    """
    buffers, process = common(), os.getpid()
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: common().rest())  # in a forked child, whose these are not, its own
        reader = stack.enter_context(ThreadPoolExecutor(1, "gym-trace reader"))

        def asked(numbers: list[int]) -> Future[Chunk] | None:
            if not numbers or os.getpid() != process:
                return None
            try:
                return reader.submit(read, numbers[0], buffers.take)
            except RuntimeError:  # the interpreter is shutting down, and starts no more threads
                return None

        coming = asked(numbers[:1])
        for i, number in enumerate(numbers):
            if coming is None or os.getpid() != process:  # a child, forked while this went on, has no such thread
                chunk, room = read(number, None), None
            else:
                chunk, room = coming.result(), buffers.take
                coming = asked(numbers[i + 1 : i + 2])
            chunk.decode(room)
            yield number, chunk
            del chunk
