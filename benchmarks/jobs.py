"""Training runs of a benchmark, in parallel, each kept as soon as it ends.

A job is a dictionary of settings; its result is the same dictionary with measurements added. A job that has a result is
not run again. A result belongs to a job if all settings agree, except the device and the folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.multiprocessing as mp

Job = dict[str, Any]


def finished(
    work: Callable[[Job], Job],
    jobs: Sequence[Job],
    done: list[Job],
    workers: int,
    each: Callable[[Job], None],
    minutes: float | None = None,
) -> list[Job]:
    """Run the jobs that have no result; return all results so far in the order of jobs.

    Args:
        work: runs a job, in a process of its own.
        jobs: their settings.
        done: results so far; new ones are added.
        workers: the number of processes.
        each: called with every new result, to save and to print.
        minutes: start no job after this time; the next call goes on with the others.
    """
    waiting = [job for job in jobs if result_of(job, done) is None]
    if waiting:
        with mp.get_context("spawn").Pool(min(workers, len(waiting))) as pool:
            late = None if minutes is None else time.time() + 60 * minutes
            for result in pool.imap_unordered(partial(_in_time, work, late), waiting):
                if result is not None:
                    done.append(result)
                    each(result)
    return [result for job in jobs if (result := result_of(job, done)) is not None]


def _in_time(work: Callable[[Job], Job], late: float | None, job: Job) -> Job | None:
    """Run a job, unless it is late."""
    return None if late is not None and time.time() > late else work(job)


def result_of(job: Job, done: Sequence[Job]) -> Job | None:
    """Find the result of a job; None if there is none."""
    return next((d for d in done if all(d.get(k) == v for k, v in job.items() if k not in ("device", "runs"))), None)
