"""Copies of a trace in an object store: push and pull."""

from __future__ import annotations

import os

from gym_trace.recording.publishing.transfer import WORKERS, Progress, Transfer, TransferReport
from gym_trace.tools.statistics.card import dataset_card

__all__ = ["TransferReport", "pull", "push"]


def push(
    directory: str | os.PathLike[str],
    url: str,
    *,
    workers: int = WORKERS,
    dry_run: bool = False,
    on_progress: Progress | None = None,
) -> TransferReport:
    """Copy a trace to a URL. Existing files stay, so an interrupted push can be resumed.

    The rings of dead writers are written into their batches first. If a writer is still recording, only its sealed
    batches are copied.

    Args:
        directory: directory of the trace.
        url: directory in an object store, or dataset "hf://datasets/USER/NAME", which gets a card.
        workers: files copied at the same time.
        dry_run: only report what would be copied.
        on_progress: called with bytes done and in total.

    Raises:
        TraceNotFound, InvalidOption, MissingExtra.
        CorruptTrace: a batch lacks the checksum that the manifest lists.
        TraceExists: the URL has a file of the same name with other content.
        RemoteError: the store did not respond, or rejected a request.

    Examples:
        >>> report = gym_trace.push("traces/cartpole", "s3://bucket/cartpole")  # doctest: +SKIP
    """
    return Transfer(directory, url, "push", dry_run, card=dataset_card).run(workers, on_progress)


def pull(
    url: str,
    directory: str | os.PathLike[str],
    *,
    dry_run: bool = False,
    on_progress: Progress | None = None,
) -> TransferReport:
    """Copy a trace from a URL to a directory. Existing files stay, so an interrupted pull can be resumed.

    Arguments and errors are those of push().

    Examples:
        >>> report = gym_trace.pull("s3://bucket/cartpole", "traces/cartpole")  # doctest: +SKIP
    """
    return Transfer(directory, url, "pull", dry_run).run(on_progress=on_progress)
