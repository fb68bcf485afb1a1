"""Small networks with every way of using weights, with data, for the curvature's tests; in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayeslim.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson


@dataclass
class Case:
    model: nn.Module
    x: Tensor
    y: Tensor
    likelihood: Likelihood

    def batches(self, *sizes: int) -> list[tuple[Tensor, Tensor]]:
        sizes = sizes or (2, len(self.y) - 2)
        return list(zip(self.x.split(sizes), self.y.split(sizes), strict=True))


class Tied(nn.Module):
    """An embedding whose table is also the head's weight."""

    def __init__(self):
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(torch.tanh(self.inner(self.table(x))).mean(1))


class ReadBehindTheBack(nn.Module):
    """A head that multiplies with the embedding's table without being a module."""

    def __init__(self):
        super().__init__()
        self.table, self.inner = nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 4)

    def forward(self, x):
        return F.linear(torch.tanh(self.inner(self.table(x))).mean(1), self.table.weight)


class Twice(nn.Module):
    """A layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Gated(nn.Module):
    """Gated recurrent units in both directions."""

    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(2, 2, bidirectional=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.gru(x.transpose(0, 1))[0].mean(0))


class Attention(nn.Module):
    """A transformer's encoder layer, examples first or time first."""

    def __init__(self, examples_first: bool):
        super().__init__()
        self.examples_first = examples_first
        self.encoder = nn.TransformerEncoderLayer(4, 2, 5, batch_first=examples_first)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        if self.examples_first:
            return self.head(self.encoder(x).mean(1))
        return self.head(self.encoder(x.transpose(0, 1)).mean(0))


class OwnParameter(nn.Module):
    """A parameter of no known layer, beside a layer that folds positions into the batch."""

    def __init__(self):
        super().__init__()
        self.scale, self.inner, self.head = nn.Parameter(torch.rand(3)), nn.Linear(3, 4), nn.Linear(8, 2)

    def forward(self, x):
        h = torch.tanh(self.inner((x * self.scale.exp()).reshape(-1, 3)))
        return self.head(h.reshape(x.shape[0], -1))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(6, 3, padding_idx=2), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.table(x)).sum(1))


def convolutional() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        nn.BatchNorm2d(2),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(2, 2, 2, stride=2),
        nn.GroupNorm(2, 2),
        nn.Tanh(),
        nn.Conv2d(2, 2, 3, groups=2, stride=2),
        nn.Flatten(),
        nn.LayerNorm(18),
        nn.Linear(18, 3),
    ).double()
    model(torch.randn(9, 1, 4, 4, dtype=torch.float64))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def make(name: str) -> Case:
    """The case called `name`, five examples each."""
    real = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    classes = lambda n, *shape: torch.randint(0, n, shape or (5,))  # noqa: E731
    cases = {
        "mlp": lambda: Case(mlp(), real(5, 4), classes(3), Categorical()),
        "convolutions and norms": lambda: Case(convolutional(), real(5, 1, 4, 4), classes(3), Categorical()),
        "tied": lambda: Case(Tied(), classes(7, 5, 5), classes(7), Categorical()),
        "read behind the back": lambda: Case(ReadBehindTheBack(), classes(7, 5, 5), classes(7), Categorical()),
        "twice": lambda: Case(Twice(), real(5, 3), real(5, 2), Gaussian(0.7)),
        "recurrent": lambda: Case(Recurrent(), real(5, 4, 3), classes(3), Categorical()),
        "gated": lambda: Case(Gated(), real(5, 3, 2), classes(3), Categorical()),
        "attention": lambda: Case(Attention(True), real(5, 5, 4), classes(3), Categorical()),
        "attention, time first": lambda: Case(Attention(False), real(5, 5, 4), classes(3), Categorical()),
        "own parameter": lambda: Case(OwnParameter(), real(5, 2, 3), classes(2, 5, 2).double(), Bernoulli()),
        "words": lambda: Case(Words(), classes(6, 5, 7), classes(4, 5, 2).double(), Poisson()),
        "sequence": lambda: Case(nn.Linear(3, 4), real(5, 3, 3), classes(4, 5, 3), Categorical()),
        "segmentation": lambda: Case(nn.Conv2d(2, 3, 2), real(5, 2, 3, 3), classes(3, 5, 2, 2), Categorical(1)),
        "scalar outputs": lambda: Case(
            nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), real(5, 3), real(5), Gaussian(0.5)
        ),
    }
    case = cases[name]()
    case.model.double()
    return case


CASES = [
    "mlp", "convolutions and norms", "tied", "read behind the back", "twice", "recurrent", "gated", "attention",
    "attention, time first", "own parameter", "words", "sequence", "segmentation", "scalar outputs",
]  # fmt: skip
