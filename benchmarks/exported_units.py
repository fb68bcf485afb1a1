"""Size and speed of an exported LeNet-5 without its closed units.

    python benchmarks/sparse_posteriors.py --device cuda --rules units --networks lenet5
    python benchmarks/exported_units.py

Every slim network of the first command is compared with the dense one: parameters, multiplications, bytes of the ONNX
files, and seconds in eager PyTorch and onnxruntime, on one thread. The networks take turns.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from environment import RESULTS, save

import bayeslim as bl

BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/sparse_posteriors"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dense, example = bl.zoo.create("lenet5").eval(), torch.rand(BATCH, 1, 28, 28)
    rows = []
    for folder in sorted(options.runs.glob("lenet5-units-[0-9]")):
        times = bl.benchmark(dense, bl.load(folder).eval(), example=example)
        print(folder.name, times, sep="\n", flush=True)
        found = json.loads(times.to_json())
        rows.append({"network": folder.name, "sizes": found["sizes"], "speedups": found["speedups"]})
    content = {"command": "python benchmarks/exported_units.py", "runs": rows}
    print(save("exported_units", content, folder=options.results))


if __name__ == "__main__":
    main()
