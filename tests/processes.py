"""Processes that work together, as the ranks of a job do."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing

METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
PRELOADED = ["bayeslim.app.compress", "bayeslim.samplers", "bayeslim.methods.deep_ensemble"]


def in_processes(work: Callable[..., None], count: int, *args: Any) -> None:
    """Call `work(rank, *args)` in each of several fresh processes, and wait for them.

    They are copies of one process that has imported the library and done nothing else: importing takes longer than most
    of what they do.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    torch.multiprocessing.start_processes(work, args, count, start_method=METHOD)


def started(work: Callable[..., Any], *args: Any) -> multiprocessing.process.BaseProcess:
    """Start such a process, which calls `work(*args)`."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    process = multiprocessing.get_context(METHOD).Process(target=work, args=args)
    process.start()
    return process


def exit_code_of(work: Callable[..., Any], *args: Any) -> int | None:
    """Call `work(*args)` in such a process; return its exit code, which is minus the signal that killed it."""
    process = started(work, *args)
    process.join(timeout=120)
    return process.exitcode
