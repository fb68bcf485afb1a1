"""Training runs of a benchmark, several at a time, each one kept as soon as it ends and never repeated.

A job is a dictionary of settings; its result is the same dictionary with measurements added. A result is a job's own if
all settings agree, but for where it ran and where its files are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.multiprocessing as mp

Job = dict[str, Any]


def finished(
    work: Callable[[Job], Job], jobs: Sequence[Job], done: list[Job], workers: int, each: Callable[[Job], None]
) -> list[Job]:
    """The results of all jobs, in their order.

    Args:
        work: runs a job, in a process of its own.
        jobs: their settings.
        done: results so far; new ones are added.
        workers: how many run at once.
        each: called with every new result, to save and to print.
    """
    waiting = [job for job in jobs if result_of(job, done) is None]
    if waiting:
        with mp.get_context("spawn").Pool(min(workers, len(waiting))) as pool:
            for result in pool.imap_unordered(work, waiting):
                done.append(result)
                each(result)
    return [result for job in jobs if (result := result_of(job, done)) is not None]


def result_of(job: Job, done: Sequence[Job]) -> Job | None:
    """The result of a job, if it is among them."""
    return next((d for d in done if all(d.get(k) == v for k, v in job.items() if k not in ("device", "runs"))), None)
