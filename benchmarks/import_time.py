"""Time of `import bayeslim` and of its first use, beside `import torch`.

    python benchmarks/import_time.py

Each runs in a fresh process, with compiled bytecode, in turns. Most of the library is imported at its first use, so
that is timed too: the names that a Laplace approximation needs, and all public names. Times are CPU seconds, which
other processes disturb least: medians, also of the differences from `import torch` in the same turn.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time

from environment import save

TORCH = "torch"
STATEMENTS = {
    TORCH: "import torch",
    "bayeslim": "import torch, bayeslim",
    "first use": "import torch, bayeslim as bl; bl.bayesianize, bl.Laplace, bl.likelihoods.Categorical, bl.predict",
    "all names": "import torch, bayeslim as bl; [getattr(bl, name) for name in bl.__all__]",
}


def seconds(statement: str, bytecode: str) -> float:
    """Time a statement in a fresh process, without the start of Python."""
    script = f"import time; a = time.process_time(); {statement}; print(time.process_time() - a)"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = bytecode
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout)


def main(rounds: int = 11) -> None:
    """Measure and save."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as bytecode:
        for statement in STATEMENTS.values():
            seconds(statement, bytecode)
        found = [{name: seconds(s, bytecode) for name, s in STATEMENTS.items()} for _ in range(rounds)]
    medians = {name: round(statistics.median(one[name] for one in found), 3) for name in STATEMENTS}
    more = {
        name: round(statistics.median(one[name] - one[TORCH] for one in found), 3)
        for name in STATEMENTS
        if name != TORCH
    }
    print(f"{medians} s, {more} s more than torch alone")
    took = round(time.monotonic() - started)
    save("import_time", {"seconds": medians, "more_than_torch": more, "rounds": rounds, "took": took})


if __name__ == "__main__":
    main()
