"""A recording on a disk that fills up; the run continues after the error.

python full_disks.py KIND DIRECTORY DIARY STEPS FILLER

FILLER: a file that fills the disk after a third of the steps; empty for none.
"""

import contextlib
import json
import os
import sys
from typing import Any

import crash_victims
import numpy as np
from crash_victims import CallLog, canonical

from gym_trace import TraceRecordingWrapper
from gym_trace.errors import RecordingError


def fill(path: str) -> None:
    """Fill a disk completely."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(fd, bytes(1 << 12))


def made(kind: str, directory: str) -> Any:
    options: dict[str, Any] = {"uid": "w", "flush_seconds": 0.2}
    if kind != "lanes":
        return TraceRecordingWrapper(crash_victims.make_env(kind), directory, **options)
    from gymnasium import vector

    from gym_trace import TraceRecordingVectorWrapper

    makers: Any = [lambda lane=lane: crash_victims.LaneEnv(lane) for lane in range(crash_victims.LANES)]
    mode = vector.AutoresetMode.NEXT_STEP
    return TraceRecordingVectorWrapper(vector.SyncVectorEnv(makers, autoreset_mode=mode), directory, **options)


def main(kind: str, directory: str, diary_path: str, steps: str, filler: str) -> None:
    env, diary, after = made(kind, directory), CallLog(diary_path), 0
    errors: list[str] = []
    env.action_space.seed(1)
    over, count = True, 0
    while after < 50 and count < int(steps):
        if count == int(steps) // 3 and filler:
            fill(filler)
            filler = ""
        try:
            if over:
                if not errors:
                    diary.note("reset", count)
                observation, _ = env.reset(seed=count)
                if not errors:
                    diary.note("began", canonical(observation))
            action = env.action_space.sample()
            if not errors:
                diary.note("ask", canonical(action), None)
            count += 1
            *told, _ = env.step(action)
            over = kind != "lanes" and (told[2] or told[3])
            if not errors:
                diary.note(
                    "told" if kind != "lanes" else "lanes", *map(canonical, told), {} if kind != "lanes" else None
                )
            after += bool(errors)
        except RecordingError as error:
            errors.append(str(error))
            over = over and np.ndim(over) == 0
    for _ in range(2):
        try:
            env.close()
        except RecordingError as error:
            errors.append(str(error))
    print(json.dumps({"errors": errors, "after": after, "steps": count}))


if __name__ == "__main__":
    main(*sys.argv[1:])
