"""Networks as other people write them, each with inputs: one line adds one.

`local_exact` and `flipout_exact` say where an estimator has the marginal variances of whole weight samples: local noise
does not where positions that share a weight meet again later, and neither does where examples are mixed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import bayeslim as bl


class First(nn.Module):
    """The first of a module's several outputs."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: PackedSequence) -> Tensor:
        _, (h, _) = self.rnn(x)
        return self.head(h[-1])


class Cells(nn.Module):
    """A cell in a loop: its weights are used at every time step."""

    def __init__(self, cell: type[nn.Module] = nn.GRUCell):
        super().__init__()
        self.cell = cell(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 4)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return h


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class CrossAttention(nn.Module):
    """Queries, keys and values of different sizes: separate projections in the module."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, kdim=4, vdim=6, batch_first=True)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attention(query, key, value, need_weights=False)[0]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.encoder(x, src_key_padding_mask=padding)


class TiedLanguageModel(nn.Module):
    """The output layer's weight is the embedding's."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.mix = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.embed(tokens)))).mean(1)


class TiedBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.bias = self.a.bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.a(x), self.b(x)], -1)


class UsedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class TwoNames(nn.Module):
    """One module under two names."""

    def __init__(self):
        super().__init__()
        self.first = self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class ReadByParent(nn.Module):
    """Never calls its layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight, self.layer.bias)


class RunAndRead(nn.Module):
    """Calls its layer, and also reads its weight: a tied autoencoder."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        assert self.layer.weight.shape == (3, 4)  # reading a property is no use of the weight
        return F.linear(torch.tanh(self.layer(x)), self.layer.weight.t())


class DifferentInTraining(nn.Module):
    """Calls its layer in evaluation mode and reads its weight in training mode."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight) if self.training else self.layer(x)


class AuxiliaryHead(nn.Module):
    """A head that only runs in training mode."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.auxiliary = nn.Linear(4, 5), nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        return torch.cat([self.head(h), self.auxiliary(h)], -1) if self.training else self.head(h)


class Standardised(nn.Linear):
    """A subclass with a forward of its own, not linear in the weight."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight / self.weight.norm(dim=1, keepdim=True)
        return F.linear(input, weight, self.bias)


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(4, 4) / 2 for _ in range(2)])
        self.more = nn.ParameterDict({"first": torch.randn(4, 3), "last": torch.randn(2, 4)})
        self.loose = nn.Parameter(torch.randn(4, 4) / 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.more["first"].t()
        for weight in self.weights:
            h = torch.tanh(h @ weight)
        return h @ self.loose @ self.more["last"].t()


class Upsampled(nn.Module):
    """A transposed convolution that is told the size of its output by keyword."""

    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x, output_size=(2 * x.shape[-2], 2 * x.shape[-1]))


class Several(nn.Module):
    """Several inputs, by position or by keyword."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(4, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.left(a) * self.right(b)


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens).mean(1))


class Recomputed(nn.Module):
    """Activation checkpointing."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5)), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False))


def check_recomputed_gradients(method, monkeypatch):
    """Layers that run again in the backward pass have the gradients of those that do not."""
    bnn = bl.bayesianize(Recomputed().double(), method, likelihood=bl.likelihoods.Gaussian(1.0), num_data=3)
    batch = torch.randn(3, 4).double(), torch.randn(3, 2).double()
    gradients = []
    for _ in range(2):
        torch.manual_seed(5)
        bnn.zero_grad()
        bnn.loss(batch).backward()
        gradients.append([p.grad.clone() for p in bnn.parameters()])
        monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", lambda run, *args, **_: run(*args))
    torch.testing.assert_close(gradients[0], gradients[1])


def frozen_body() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    return model


def packed() -> PackedSequence:
    return pack_padded_sequence(torch.randn(3, 5, 3), torch.tensor([5, 3, 2]), batch_first=True)


def padding() -> Tensor:
    return torch.tensor([[False] * 4, [False, False, True, True]])


@dataclass(frozen=True)
class Case:
    """A network, inputs for it, and what may be expected of the estimators."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    local_exact: bool = True
    flipout_exact: bool = True
    sites: str | None = None


def flat(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


CASES: dict[str, Case] = {
    "linear": Case(lambda: nn.Linear(4, 3), flat(2, 4)),
    "linear-no-bias": Case(lambda: nn.Linear(4, 3, bias=False), flat(2, 4)),
    "linear-on-sequences": Case(lambda: nn.Linear(4, 3), flat(2, 3, 4)),
    "mlp": Case(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), flat(2, 4)),
    "mlp-all": Case(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), flat(2, 4), sites="all"),
    "norm-all": Case(lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)), flat(2, 4), sites="all"),
    "batchnorm": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)),
        flat(5, 2, 4, 4),
        local_exact=False,
        flipout_exact=False,
    ),
    "conv1d": Case(lambda: nn.Conv1d(2, 3, 3), flat(2, 2, 6)),
    "conv2d": Case(lambda: nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=1), flat(2, 2, 5, 5)),
    "conv3d": Case(lambda: nn.Conv3d(2, 3, 2), flat(2, 2, 3, 3, 3)),
    "conv2d-all": Case(lambda: nn.Conv2d(2, 3, 3), flat(2, 2, 4, 4), sites="all"),
    "conv-deep": Case(
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2)),
        flat(2, 1, 4, 4),
        local_exact=False,
    ),
    "transposed1d": Case(lambda: nn.ConvTranspose1d(2, 3, 3, stride=2, output_padding=1), flat(2, 2, 4)),
    "transposed2d": Case(lambda: nn.ConvTranspose2d(2, 4, 3, groups=2), flat(2, 2, 3, 3)),
    "transposed3d": Case(lambda: nn.ConvTranspose3d(2, 3, 2), flat(2, 2, 2, 2, 2)),
    "transposed-output-size": Case(Upsampled, flat(2, 2, 3, 3)),
    "grouped": Case(lambda: nn.Conv2d(4, 6, 3, groups=2), flat(2, 4, 4, 4)),
    "depthwise": Case(lambda: nn.Conv2d(3, 3, 3, groups=3, bias=False), flat(2, 3, 4, 4)),
    "dilated": Case(lambda: nn.Conv2d(2, 3, 2, dilation=2), flat(2, 2, 4, 4)),
    "reflect": Case(lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), flat(2, 2, 4, 4)),
    "circular": Case(lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="circular"), flat(2, 2, 5)),
    "same": Case(lambda: nn.Conv2d(2, 3, 4, padding="same", padding_mode="replicate"), flat(2, 2, 5, 5)),
    "embedding": Case(Pooled, lambda: torch.randint(0, 9, (3, 4))),
    "embedding-bag": Case(lambda: nn.EmbeddingBag(9, 4), lambda: torch.randint(0, 9, (3, 4))),
    "lstm": Case(lambda: First(nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True)), flat(2, 4, 3)),
    "lstm-projected": Case(lambda: First(nn.LSTM(3, 4, proj_size=2, batch_first=True)), flat(2, 4, 3)),
    "gru": Case(lambda: First(nn.GRU(3, 4, 2, bidirectional=True, batch_first=True)), flat(2, 4, 3)),
    "rnn": Case(lambda: First(nn.RNN(3, 4, batch_first=True)), flat(2, 4, 3)),
    "packed": Case(Packed, packed),
    "cells": Case(Cells, flat(2, 4, 3)),
    "attention": Case(SelfAttention, flat(2, 4, 8)),
    "cross-attention": Case(CrossAttention, lambda: (torch.randn(2, 3, 8), torch.randn(2, 5, 4), torch.randn(2, 5, 6))),
    "transformer": Case(Encoder, flat(2, 4, 8)),
    "transformer-padded": Case(Encoder, lambda: (torch.randn(2, 4, 8), padding())),
    "tied": Case(TiedLanguageModel, lambda: torch.randint(0, 7, (3, 4)), local_exact=False),
    "tied-bias": Case(TiedBias, flat(2, 3), sites="all"),
    "used-twice": Case(UsedTwice, flat(2, 4)),
    "two-names": Case(TwoNames, flat(2, 4)),
    "read-by-parent": Case(ReadByParent, flat(2, 4)),
    "run-and-read": Case(RunAndRead, flat(2, 4)),
    "different-in-training": Case(DifferentInTraining, flat(2, 4)),
    "auxiliary-head": Case(AuxiliaryHead, flat(2, 4)),
    "subclass": Case(lambda: Standardised(4, 3), flat(2, 4)),
    "bilinear": Case(lambda: nn.Bilinear(3, 4, 2), lambda: (torch.randn(2, 3), torch.randn(2, 4))),
    "frozen-body": Case(frozen_body, flat(2, 4)),
    "tuple": Case(Several, lambda: (torch.randn(2, 3), torch.randn(2, 4))),
    "dict": Case(Several, lambda: {"b": torch.randn(2, 4), "a": torch.randn(2, 3)}),
    "weight-norm": Case(lambda: nn.Sequential(weight_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2)), flat(2, 4)),
    "spectral-norm": Case(lambda: spectral_norm(nn.Linear(4, 3)).eval(), flat(2, 4)),
    "lists": Case(Lists, flat(2, 3)),
}
