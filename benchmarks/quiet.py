"""Timing on a shared machine: measurements that others disturb are repeated.

Two threads that synchronise wait for the busier core. So a process on one core can make a step on both cores many times
slower, and not all steps equally. Linux reports how long all cores were busy, and Python how much of that was this
process; the rest was other processes. On other systems no disturbance is detected.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

STAT = Path("/proc/stat")
MAX_CORES_OF_OTHERS = 0.1
"""The average number of cores that others may use without a disturbance."""


def others() -> float:
    """Return the CPU seconds that other processes or other guests have used so far."""
    if not STAT.exists():
        return 0.0
    user, nice, system, _, _, interrupt, soft_interrupt, steal, *_ = map(
        int, STAT.read_text().splitlines()[0].split()[1:]
    )
    busy = (user + nice + system + interrupt + soft_interrupt + steal) / os.sysconf("SC_CLK_TCK")
    return busy - time.process_time()


class Patience:
    """A time budget for repeating disturbed measurements.

    Args:
        seconds: the total time that may go into measurements that are discarded.
    """

    def __init__(self, seconds: float):
        self.left = seconds

    def undisturbed(self, measure: Callable[[], float]) -> tuple[float, float]:
        """Repeat `measure` until it is undisturbed or the budget is spent.

        Returns:
            its value, and the average number of cores that others used meanwhile.
        """
        while True:
            start, before = time.perf_counter(), others()
            value = measure()
            elapsed = time.perf_counter() - start
            used = max(0.0, others() - before) / elapsed
            if used <= MAX_CORES_OF_OTHERS or self.left <= 0:
                return value, used
            time.sleep(0.2)
            self.left -= time.perf_counter() - start
