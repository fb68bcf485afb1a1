"""Layers and the operations after them: exact where the theory is, else against 100,000 drawn networks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from random_networks import assert_agree, bayesian, carried, drawn
from torch import nn
from torch.func import functional_call, jacrev

from bayeslim.predict.moments import rules
from bayeslim.predict.moments.tensor import Moments

LINEAR = {
    "linear": (nn.Linear(5, 3), (4, 5)),
    "linear on positions": (nn.Linear(5, 3), (2, 4, 5)),
    "no bias": (nn.Linear(5, 3, bias=False), (4, 5)),
    "conv1d": (nn.Conv1d(3, 4, 3, padding=1), (2, 3, 7)),
    "conv2d": (nn.Conv2d(2, 4, 3, stride=2), (2, 2, 7, 7)),
    "groups": (nn.Conv2d(4, 6, 3, groups=2, dilation=2), (2, 4, 7, 7)),
    "circular": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 2, 5, 5)),
    "same": (nn.Conv1d(2, 3, 4, padding="same", padding_mode="reflect"), (2, 2, 6)),
    "conv3d": (nn.Conv3d(1, 2, 2), (2, 1, 3, 3, 3)),
    "transposed1d": (nn.ConvTranspose1d(2, 3, 3, stride=2, output_padding=1), (2, 2, 4)),
    "transposed2d": (nn.ConvTranspose2d(2, 4, 3, groups=2), (2, 2, 4, 4)),
    "transposed3d": (nn.ConvTranspose3d(1, 2, 2), (1, 1, 2, 2, 2)),
    "one example": (nn.Conv2d(2, 4, 3), (2, 5, 5)),
}


def conv2d(*args):
    """Convolve with a rounding error below zero, like convolutions by transforms."""
    return torch.conv2d(*args) - 1e-9


def test_no_variance_is_below_zero(monkeypatch):
    monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)
    weight = Moments.of(torch.rand(2, 1, 2, 2), torch.rand(2, 1, 2, 2), frozenset({"weight"}), None)
    found = rules._layer(conv2d, torch.zeros(1, 1, 3, 3), weight)
    torch.testing.assert_close(found.sigma2, torch.zeros(1, 2, 2, 2), atol=0, rtol=0)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("sites", ["weights", "all"])
@pytest.mark.parametrize("name", LINEAR)
def test_a_layer_on_known_inputs_is_exact(name, sites):
    """Outputs are linear in the weights: Var = Σ (∂y/∂w)² σ²."""
    layer, shape = LINEAR[name]
    bnn = bayesian(layer, sites=sites)
    x = torch.randn(shape).double()
    mean = {n: bnn.model.get_parameter(n).detach() for n in bnn.sites.names}
    jacobian = jacrev(lambda p: functional_call(bnn.model, p, (x,)))(mean)
    variance = bnn.posterior_.variance
    exact = sum(
        (jacobian[n].square() * variance[n]).flatten(len(jacobian[n].shape) - variance[n].ndim).sum(-1) for n in mean
    )
    ours = carried(bnn, x)
    assert torch.allclose(ours.mu, bnn.model(x))
    assert torch.allclose(ours.sigma2, exact)


class Chain(nn.Module):
    """Layers with functions between them."""

    def __init__(self, *parts):
        super().__init__()
        self.layers = nn.ModuleList(p for p in parts if isinstance(p, nn.Module))
        self.parts = parts

    def forward(self, x):
        layers = iter(self.layers)
        for part in self.parts:
            x = next(layers)(x) if isinstance(part, nn.Module) else part(x)
        return x


def normalised() -> nn.BatchNorm1d:
    norm = nn.BatchNorm1d(3)
    with torch.no_grad():
        for tensor in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
            tensor.uniform_(0.5, 2)
    return norm


AFTER = {
    "relu": nn.ReLU(),
    "relu in place": nn.ReLU(inplace=True),
    "leaky relu": nn.LeakyReLU(0.1),
    "relu6": nn.ReLU6(),
    "tanh": nn.Tanh(),
    "sigmoid": nn.Sigmoid(),
    "gelu": nn.GELU(),
    "silu": nn.SiLU(),
    "elu": nn.ELU(),
    "softplus": nn.Softplus(),
    "clamp": lambda z: z.clamp(min=0.1),
    "square": lambda z: z * z,
    "twice": lambda z: z + z,
    "batch norm": normalised(),
    "dropout": nn.Dropout(0.9),
    "constants": lambda z: (2 - z * torch.tensor([1.0, -2.0, 3.0]).double()) / 4 - 1,
    "in place": lambda z: z.mul_(3).add_(1).sub_(torch.ones(3).double()),
    "matmul": lambda z: z @ torch.linspace(-1, 1, 6).view(3, 2).double(),
    "sum of units": lambda z: z.sum(1),
    "mean of units": lambda z: z.mean(-1, keepdim=True),
}


@pytest.mark.parametrize("name", AFTER)
def test_one_random_layer_then_one_operation(name):
    bnn = bayesian(Chain(nn.Linear(4, 3), AFTER[name]), sites=["layers.0"])
    x = torch.randn(5, 4).double()
    assert_agree(carried(bnn, x), drawn(bnn, x))


def test_random_layers_after_an_activation():
    bnn = bayesian(Chain(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), std=0.5)
    x = torch.randn(5, 4).double()
    assert_agree(carried(bnn, x), drawn(bnn, x))


def test_random_scales_and_tables():
    """A batch norm's own weights, and an embedding."""
    bnn = bayesian(Chain(nn.Linear(4, 3), normalised()), sites="all")
    x = torch.randn(5, 4).double()
    assert_agree(carried(bnn, x), drawn(bnn, x))
    table = bayesian(Chain(nn.Embedding(7, 3), lambda z: z.flatten(1)), sites="all")
    tokens = torch.randint(7, (2, 3))
    ours, variance = carried(table, tokens), table.posterior_.variance["layers.0.weight"]
    assert torch.equal(ours.sigma2, variance[tokens].flatten(1))


@pytest.mark.parametrize("activation", [nn.Identity(), nn.ReLU()])
@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.AdaptiveMaxPool2d(2)])
def test_pooling_positions_that_move_together_is_exact(pool, activation):
    """On an image without detail all positions see the same patch, so one kernel moves them all alike."""
    bnn = bayesian(nn.Sequential(nn.Conv2d(1, 3, 3), activation, pool))
    x = torch.tensor([0.4, 1.3]).view(2, 1, 1, 1).expand(2, 1, 6, 6).double()
    assert_agree(carried(bnn, x), drawn(bnn, x, 40_000), variance_within=0.05)


def test_the_maximum_is_where_the_mean_is_largest():
    bnn = bayesian(nn.Sequential(nn.Conv2d(1, 2, 1), nn.MaxPool2d(2)), std=0.01)
    bnn.model[0].weight.data.abs_()
    x = torch.rand(3, 1, 4, 4).double()
    ours, whole = carried(bnn, x), carried_before_pooling(bnn, x)
    mean, places = F.max_pool2d(whole.mu, 2, return_indices=True)
    assert torch.equal(ours.mu, mean)
    assert torch.equal(ours.sigma2, whole.sigma2.flatten(2).gather(2, places.flatten(2)).view(mean.shape))


def carried_before_pooling(bnn, x):
    pool, bnn.model[1] = bnn.model[1], nn.Identity()
    whole = carried(bnn, x)
    bnn.model[1] = pool
    return whole


def test_activations_that_rise_wait_for_the_pooling():
    """max(relu(z)) is relu(max(z)), and only the largest need an activation."""
    conv = nn.Conv2d(1, 4, 3)
    first, second = (
        bayesian(nn.Sequential(conv, *rest)) for rest in ((nn.ReLU(), nn.MaxPool2d(2)), (nn.MaxPool2d(2), nn.ReLU()))
    )
    second.model.load_state_dict(first.model.state_dict())
    x = torch.randn(2, 1, 6, 6).double()
    one, other = carried(first, x), carried(second, x)
    assert torch.equal(one.mu, other.mu)
    assert torch.equal(one.sigma2, other.sigma2)


MOVES = [
    lambda z: z.flatten(1),
    lambda z: torch.flatten(z, 2),
    lambda z: z.view(z.size(0), -1),
    lambda z: z.reshape(len(z), z.shape[1], -1).transpose(1, 2),
    lambda z: z.permute(0, 2, 3, 1),
    lambda z: z.unsqueeze(1).squeeze(1),
    lambda z: torch.cat([z, z.flip(1), torch.ones(2, 1, 4, 4).double()], 1),
    lambda z: torch.stack([z, z], 1),
    lambda z: z[:, 1:, ::2, 0],
    lambda z: z.chunk(2, 1)[1],
    lambda z: z.unflatten(1, (2, 2)).mT,
    lambda z: F.pad(z, (1, 1), value=3.0),
    lambda z: F.pixel_shuffle(z, 2),
    lambda z: z.expand(3, 2, 4, 4, 4),
]


@pytest.mark.parametrize("move", MOVES)
def test_moving_elements(move):
    bnn = bayesian(Chain(nn.Conv2d(1, 4, 3), move))
    still = bayesian(Chain(nn.Conv2d(1, 4, 3), lambda z: z))
    still.load_state_dict(bnn.state_dict())
    x = torch.randn(2, 1, 6, 6).double()
    moved, before = carried(bnn, x), carried(still, x)
    known = torch.zeros(()).double()  # constants have no variance
    assert torch.equal(moved.mu, move(before.mu.as_subclass(torch.Tensor)))
    assert torch.allclose(moved.sigma2, _spread_of(move, before.sigma2, known))
    assert moved.shape == moved.mu.shape == moved.sigma2.shape


def _spread_of(move, variance, known):
    """Move variances as a layer moves elements; padded or joined elements have `known`."""
    shifted = move(variance + 100)
    return torch.where(shifted >= 100, shifted - 100, known)


def test_branches():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return torch.cat([self.a(x) + 2 * self.b(x), self.a(x) * self.b(x), self.a(x) - self.b(x)], 1)

    bnn = bayesian(Branches())
    x = torch.randn(5, 4).double()
    assert_agree(carried(bnn, x), drawn(bnn, x))


def test_a_residual_adds_the_variances_of_its_branches():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            h = self.fc(x)
            return h + torch.relu(h)

    bnn, x = bayesian(Residual()), torch.randn(5, 4).double()
    alone = carried(bayesian(nn.Linear(4, 4)), x)
    ours, mean = carried(bnn, x), bnn.model.fc(x)
    assert torch.allclose(ours.mu, drawn(bnn, x, 40_000).mean(0), atol=0.05)
    assert (ours.sigma2 > alone.sigma2 * 0.5).all()
    assert ours.mu.shape == mean.shape
