"""Several columns sent backwards together, as on a GPU, are those sent one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.curvature.capture import Capture


class OneWayOnly(torch.autograd.Function):
    """An operation of somebody's own, which cannot be sent back in many ways at once."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * torch.from_numpy(g.numpy())


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.second(OneWayOnly.apply(self.first(x)))


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.body(x.view(-1, 1, 6).expand(-1, 2, -1)).mean(1))


NETWORKS = {
    "linear": (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(4, 6)),
    "lenet5": (bl.zoo.create("lenet5"), torch.rand(3, 1, 28, 28)),
    "norms": (
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)).eval(),
        torch.randn(3, 2, 5, 5),
    ),
    "attention": (Attentive(), torch.randn(4, 6)),
    "odd": (Odd(), torch.randn(4, 6)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_together_as_one_by_one(name):
    network, x = NETWORKS[name]
    modules = {path: m for path, m in network.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
    found = []
    for together in (False, True):
        with Capture(modules) as capture:
            capture.together = together
            outputs = capture.forward(network, x)
            columns = torch.randn(5, *outputs.shape, generator=torch.Generator().manual_seed(0))
            found.append(capture.backwards(outputs, columns))
            assert capture.together is (together and name != "odd")
    for path in modules:
        for one, other in zip(found[0][path], found[1][path], strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("network", "together"),
    [(nn.Linear(4, 3), True), (nn.Conv1d(2, 3, 1), False)],
    ids=["a linear layer", "a convolution"],
)
def test_on_a_cpu_columns_go_together_through_linear_layers(network, together):
    x = torch.randn(2, 4) if together else torch.randn(2, 2, 4)
    ways = []
    with Capture({"": network}) as capture:
        outputs = capture.forward(network, x)
        send = capture._gradients
        capture._gradients = lambda *args, together=False: ways.append(together) or send(*args, together=together)
        capture.backwards(outputs, torch.zeros(2, *outputs.shape))
        assert set(ways) == {together}
        ways.clear()
        (alone,) = capture.backwards(outputs, torch.ones(1, *outputs.shape))[""]
        assert ways == [False]  # one column is sent by itself, at no such price
        torch.testing.assert_close(alone, torch.ones(1, *outputs.shape))
        assert (capture.columns_at_once(outputs) > 1) == together
    assert capture.together is None
