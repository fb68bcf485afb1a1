"""CPU seconds of `compact`, `save` and `export`, beside those of one forward pass.

    python benchmarks/compaction_times.py

The network is like a voice encoder: an LSTM of three layers with 256 units reads 160 frames, and a linear layer makes
an embedding of unit length from the last state (1.4 M weights). A fifth of its units is cut at random. Every action
runs once before it is measured, so that imports do not count; the fastest of three runs is kept. One thread.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from environment import save
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.compact import units

RUNS = 3
CUT_FRACTION = 0.2


class VoiceEncoder(nn.Module):
    """An LSTM over frames, and a linear layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, frames: Tensor) -> Tensor:
        """Embed sequences of frames."""
        _, (last, _) = self.lstm(frames)
        return nn.functional.normalize(self.linear(last[-1]).relu(), dim=1)


def seconds(action: Callable[[], object]) -> float:
    """Measure the CPU seconds of an action, the fastest of several runs."""
    action()
    times = []
    for _ in range(RUNS):
        started = time.process_time()
        action()
        times.append(time.process_time() - started)
    return min(times)


def main() -> None:
    """Print the times and save them."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network, example = VoiceEncoder().eval(), torch.randn(4, 160, 40)
    found = units(network, example)
    count = round(CUT_FRACTION * len(found.units))
    masks = found.masks(torch.randperm(len(found.units))[:count].tolist())
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter *= masks.get(name, 1)
    slim = bl.compact(network, example=example)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        results = {
            "forward": seconds(lambda: network(example)),
            "compact": seconds(lambda: bl.compact(network, example=example)),
            "save": seconds(lambda: bl.save(slim, Path(folder) / "slim", example=example)),
            "export": seconds(lambda: bl.export(slim, Path(folder) / "slim.onnx", example=example)),
        }
    for name, value in results.items():
        print(f"{name:8} {value:6.2f} s")
    print(save("compaction_times", {"cpu_seconds": results}))


if __name__ == "__main__":
    main()
