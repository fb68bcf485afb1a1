"""Small networks for export and storage, the ways people write them, and the table of architectures of compaction."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def architectures() -> Any:
    """The module with the networks that compaction has to get right."""
    place = Path(__file__).parent.parent / "compact" / "networks.py"
    spec = importlib.util.spec_from_file_location("compacted_networks", place)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Convolutional(nn.Module):
    """A class with a head count of its own, and a size hidden in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.fc1, self.fc2 = nn.Linear(6 * 9, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class Heads(nn.Module):
    """Attention that remembers its number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, 2).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(b, t, -1))


class Length(nn.Module):
    """Takes the batch size from len(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.out = nn.Parameter(torch.randn(1, 4)), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([self.start.expand(len(x), -1), x], 1))


class FixedBatch(nn.Module):
    """Works on batches of four only."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.view(4, 4))


class TwoInputs(nn.Module):
    """Several inputs, one by keyword, and a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(5, 4)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        both = self.a(left) * self.b(right)
        return {"both": both, "sum": both.sum(-1)}


class Branching(nn.Module):
    """A network whose control flow depends on values, so that it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) if x.sum() > 0 else self.out(-x)


class Tied(nn.Module):
    """An embedding that is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(40, 30), nn.Linear(30, 40, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embed(x).tanh())


def mlp(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


def with_zeros(network: nn.Module, density: float) -> nn.Module:
    """The same network with only this part of its weights not zero, in place."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(torch.rand_like(parameter) < density)
    return network
