"""Measure one contestant in its own interpreter.

    python benchmarks/worker.py NAME

Prints one line of JSON about itself. Then reads tasks from standard input and answers each, as lines of JSON. A forked
child runs each task: a new process without the cost of imports.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import signal
import sys
import traceback
from importlib import metadata
from typing import Any

import contestants
import measure
import workloads


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def answer(contestant: contestants.Contestant, task: dict[str, Any]) -> dict[str, Any]:
    """Run a task in a child and return its result."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        signal.alarm(task["limit"])
        try:
            result = _done(contestant, task)
            with os.fdopen(writer, "w") as file:
                file.write(json.dumps(result))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    _, status = os.waitpid(pid, 0)
    if text:
        return json.loads(text)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        return {"error": f"timeout after {task['limit']} seconds"}
    return {"error": "the process died"}


def _done(contestant: contestants.Contestant, task: dict[str, Any]) -> dict[str, Any]:
    try:
        return {**measure.TASKS, **contestant.tasks}[task["kind"]](contestant, task)
    except Exception as error:  # an error of a contestant is a result, too
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def main() -> None:
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep the output of libraries out of the answers
    try:
        contestant = contestants.entry(sys.argv[1])
    except ImportError as error:
        print(json.dumps({"error": str(error)}), file=channel, flush=True)
        return
    workloads.preload()
    hello = {"versions": versions(contestant.packages), "note": contestant.note}
    print(json.dumps(hello), file=channel, flush=True)
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(answer(contestant, json.loads(line))), file=channel, flush=True)


if __name__ == "__main__":
    main()
