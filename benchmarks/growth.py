"""Cost of sealing a batch over the number of batches."""

from __future__ import annotations

import os
import time
from typing import Any
from unittest import mock

import workloads
from contestants import Contestant

from gym_trace.format import batch_files as writer
from gym_trace.format.batch_files import BatchFiles

FRAGMENTS = 500  # per batch: few, so that there are many batches


def batches(contestant: Contestant, task: dict[str, Any]) -> dict[str, Any]:
    """Record short episodes in small batches.

    Returns:
        The seconds of sealing each batch, and of recording between two seals.
    """
    sealing: list[float] = []
    between: list[float] = []
    seal, last_seal = BatchFiles.seal, time.perf_counter()

    def timed_seal(self: BatchFiles) -> None:
        nonlocal last_seal
        begin = time.perf_counter()
        seal(self)
        between.append(begin - last_seal)
        last_seal = time.perf_counter()
        sealing.append(last_seal - begin)

    workload = workloads.BLINK
    with mock.patch.object(writer, "BATCH_FRAGMENTS", FRAGMENTS), mock.patch.object(BatchFiles, "seal", timed_seal):
        env = contestant.wrap(workload.make(), os.path.join(task["directory"], "recording"))
        contestant.start(env)
        contestant.run(workload, env, contestant.actions(workload, env, task["episodes"] * 3 // 2))
        contestant.finish(env)
    return {"sealing": sealing, "between": between}
