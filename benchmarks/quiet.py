"""Timing on a machine that others use: what they disturb is measured again.

Two threads that wait for each other wait for the busier core, so a neighbour on one core can make a step of both cores
many times slower, and not all steps alike. Linux says how long all cores were busy, and Python how much of that was
this process; the rest was others. Elsewhere nobody is known to disturb.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

STAT = Path("/proc/stat")
TOLERATED = 0.1
"""Cores' worth of others' work that does not count as a disturbance."""


def others() -> float:
    """Processor seconds that other processes, or other machines on the same host, have used so far."""
    if not STAT.exists():
        return 0.0
    user, nice, system, _, _, interrupt, soft_interrupt, steal, *_ = map(
        int, STAT.read_text().splitlines()[0].split()[1:]
    )
    busy = (user + nice + system + interrupt + soft_interrupt + steal) / os.sysconf("SC_CLK_TCK")
    return busy - time.process_time()


class Patience:
    """Repeats what others disturb, for a while in all.

    Args:
        seconds: how much time may be spent on what is then thrown away.
    """

    def __init__(self, seconds: float):
        self.left = seconds

    def undisturbed(self, measure: Callable[[], float]) -> tuple[float, float]:
        """What `measure` gives in a quiet moment, or when patience is at its end, and the cores others used then."""
        while True:
            start, before = time.perf_counter(), others()
            value = measure()
            elapsed = time.perf_counter() - start
            used = max(0.0, others() - before) / elapsed
            if used <= TOLERATED or self.left <= 0:
                return value, used
            time.sleep(0.2)
            self.left -= time.perf_counter() - start
