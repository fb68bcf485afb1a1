"""Time of `import bayeslim`, beside `import torch`.

    python benchmarks/import_time.py

Each import runs in a fresh process, with compiled bytecode, in turns. The medians are in seconds.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time

from environment import save

MODULES = ("torch", "bayeslim")


def seconds(module: str, bytecode: str) -> float:
    """Time the import of a module in a fresh process, without the start of Python."""
    script = f"import time; a = time.perf_counter(); import {module}; print(time.perf_counter() - a)"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = bytecode
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout)


def main(rounds: int = 11) -> None:
    """Measure and save."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as bytecode:
        for module in MODULES:
            seconds(module, bytecode)
        found = [{module: seconds(module, bytecode) for module in MODULES} for _ in range(rounds)]
    medians = {module: round(statistics.median(one[module] for one in found), 3) for module in MODULES}
    more = round(statistics.median(one["bayeslim"] - one["torch"] for one in found), 3)
    print(f"torch {medians['torch']} s, bayeslim {medians['bayeslim']} s, {more} s more")
    save("import_time", {"seconds": medians, "more": more, "rounds": rounds, "took": round(time.monotonic() - started)})


if __name__ == "__main__":
    main()
