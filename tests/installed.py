"""Try an installed wheel from outside the repository: what works without any extra, and which extra is asked for.

python tests/installed.py build/clean       the environment, which has the wheel and what it needs alone
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

USE = """
import torch, bayeslim as bl
digits = bl.data.load("digits")
bnn = bl.bayesianize(bl.zoo.lenet_300_100(inputs=64), bl.Laplace(), likelihood=bl.likelihoods.Categorical())
bnn.fit(bl.data.Loader(digits.train_x, digits.train_y, batch_size=64), epochs=1, lr=1e-3, progress=False)
pruned = bl.prune(bnn, bl.Budget(sparsity=0.5), granularity="unit", example=digits.test_x, progress=False)
bl.save(bl.compact(pruned, example=digits.test_x), "slim")
print(bl.load("slim")(digits.test_x).shape)
"""


def main(environment: Path) -> None:
    """Import, use, and call the command line."""
    binaries = environment.resolve() / ("Scripts" if sys.platform == "win32" else "bin")

    def said(*command: str) -> tuple[int, str]:
        with tempfile.TemporaryDirectory() as elsewhere:
            done = subprocess.run([binaries / command[0], *command[1:]], cwd=elsewhere, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    version = said("bayeslim", "--version")
    assert version[0] == 0, version
    code, words = said("bayeslim", "--help")
    assert code == 1, words
    assert "pip install 'bayeslim[cli]'" in words, words
    code, words = said("python", "-W", "error", "-c", USE)
    assert code == 0, words
    assert "torch.Size" in words, words
    print(f"bayeslim {version[1].strip()} works without extras, and its command line names the extra to install.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
