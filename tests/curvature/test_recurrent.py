"""Recurrent layers unrolled over time compute the same, and have the curvature of their weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import bayeslim as bl
import oracles
from bayeslim.curvature import ekfac, kfac
from bayeslim.curvature.recurrent import is_unrolled, unroll_
from bayeslim.likelihoods import Categorical
from bayeslim.replica import replicate

LAYERS = {
    "lstm": lambda: nn.LSTM(3, 4, batch_first=True),
    "gru": lambda: nn.GRU(3, 4),
    "rnn": lambda: nn.RNN(3, 4, nonlinearity="relu", bias=False),
    "both ways": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True),
    "projected": lambda: nn.LSTM(3, 4, num_layers=2, proj_size=2),
    "deep gru": lambda: nn.GRU(3, 4, num_layers=2, bidirectional=True, dropout=0.3, batch_first=True),
}


def flat(value) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, nn.utils.rnn.PackedSequence):
        return [value.data]
    return [tensor for part in value for tensor in flat(part)]


def assert_same(one, other):
    for a, b in zip(flat(one), flat(other), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", LAYERS)
def test_unrolled_layers_compute_the_same(name):
    torch.manual_seed(0)
    layer = LAYERS[name]().double().eval()
    before = copy.deepcopy(layer.state_dict())
    twin = unroll_(replicate(layer))
    assert is_unrolled(twin)
    assert not is_unrolled(layer)
    x = torch.randn(5, 7, 3).double()
    outputs, hidden = layer(x)
    assert_same(twin(x), (outputs, hidden))
    assert_same(twin(x, hidden), layer(x, hidden))
    assert_same(twin(x[:, 0]), layer(x[:, 0]))  # one example without a batch dimension
    assert [n for n, _ in twin.named_parameters()] == [n for n, _ in layer.named_parameters()]
    assert layer.state_dict().keys() == before.keys()
    assert not layer._modules


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_packed_sequences_compute_the_same(name, ordered):
    torch.manual_seed(0)
    layer = LAYERS[name]().double().eval()
    twin = unroll_(replicate(layer))
    lengths = torch.tensor([6, 4, 4, 1] if ordered else [4, 1, 6, 4])
    packed = pack_padded_sequence(torch.randn(4, 6, 3).double(), lengths, batch_first=True, enforce_sorted=ordered)
    (found, hidden), (expected, last) = twin(packed), layer(packed)
    assert_same((found, hidden), (expected, last))
    assert_same(twin(packed, hidden), layer(packed, last))
    assert_same(pad_packed_sequence(found), pad_packed_sequence(expected))


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_compute_the_same(kind):
    torch.manual_seed(0)
    cell = kind(3, 4).double()
    twin = unroll_(replicate(cell))
    x = torch.randn(5, 3).double()
    state = cell(x)
    assert_same(twin(x), state)
    assert_same(twin(x, state), cell(x, state))
    assert_same(twin(x[0]), cell(x[0]))


def test_a_layer_with_a_forward_of_its_own_is_left_alone():
    class Own(nn.LSTM):
        def forward(self, x):
            return super().forward(x)[0]

    assert not is_unrolled(unroll_(replicate(Own(2, 3))))


class Reader(nn.Module):
    """The last state of a recurrent layer, to a linear layer."""

    def __init__(self, kind: type[nn.Module] = nn.LSTM):
        super().__init__()
        self.memory, self.head = kind(2, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.memory(x)[0][:, -1])


def case(kind: type[nn.Module], steps: int, examples: int = 6):
    torch.manual_seed(0)
    return Reader(kind).double(), torch.randn(examples, steps, 2).double(), torch.arange(examples) % 3


def manual_factors(model: Reader, x: Tensor, y: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """A and G of an LSTM's two weights by the definition, from gate pre-activations written out by hand."""
    lstm = model.memory
    h = c = torch.zeros(len(x), 3).double()
    bumps = [torch.zeros(len(x), 12).double().requires_grad_() for _ in range(x.shape[1])]  # added to the gates
    inputs, states = [], []
    for t, bump in enumerate(bumps):
        inputs.append(x[:, t])
        states.append(h.detach())
        gate = x[:, t] @ lstm.weight_ih_l0.T + h @ lstm.weight_hh_l0.T + lstm.bias_ih_l0 + lstm.bias_hh_l0 + bump
        i, f, g, o = gate.chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    outputs = model.head(h)
    roots = Categorical().sqrt_hessian(outputs).detach()
    G = torch.zeros(12, 12).double()
    for root in roots:
        for gradient in torch.autograd.grad(outputs, bumps, root, retain_graph=True):
            G += gradient.T @ gradient
    ones = torch.ones(len(x) * len(bumps), 1).double()
    A_inputs, A_states = (torch.cat([torch.cat(part), ones], 1) for part in (inputs, states))
    return {
        "memory.weight_ih_l0": (A_inputs.T @ A_inputs / len(ones), G),
        "memory.weight_hh_l0": (A_states.T @ A_states / len(ones), G),
    }


def test_factors_of_an_lstm_are_those_of_their_definition():
    model, x, y = case(nn.LSTM, 4)
    found = kfac(model, [(x[:4], y[:4]), (x[4:], y[4:])], Categorical(), columns="exact")
    assert not found.unsupported
    for name, (A, G) in manual_factors(model, x, y).items():
        torch.testing.assert_close(found.layers[name].A[0], A)
        torch.testing.assert_close(found.layers[name].G[0], G)
        assert found.layers[name].bias == name.replace("weight", "bias")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_factors_of_one_example_and_one_step_are_the_exact_curvature(kind):
    model, x, y = case(kind, steps=1, examples=1)
    layers = kfac(model, [(x, y)], Categorical(), columns="exact").layers
    names = [name for name, _ in model.named_parameters()]
    exact = oracles.ggn(model, [(x, y)], Categorical(), names)
    start = 0
    for name, p in model.named_parameters():
        if name in ("memory.weight_ih_l0", "head.weight"):
            A, G = layers[name].A[0][:-1, :-1], layers[name].G[0]
            block = exact[start : start + p.numel(), start : start + p.numel()]
            torch.testing.assert_close(torch.kron(G, A), block)
        start += p.numel()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_corrected_eigenvalues_have_the_trace_of_the_exact_curvature(kind):
    model, x, y = case(kind, steps=5, examples=20)
    factors = kfac(model, [(x, y)], Categorical(), columns="exact")
    corrected = ekfac(model, [(x, y)], Categorical(), factors, columns="exact")
    for name, layer in factors.layers.items():
        exact = oracles.ggn(model, [(x, y)], Categorical(), layer.names)
        torch.testing.assert_close(corrected[name].corrected.sum(), exact.trace())


class Rows(nn.Module):
    """Reads the eight rows of a digit one after another."""

    def __init__(self, kind: type[nn.Module]):
        super().__init__()
        self.memory, self.head = kind(8, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.memory(x.squeeze(1))[0][:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_survivors_of_a_recurrent_layer_make_up_for_the_cut(kind):
    """Most weights are cut: with Kronecker factors the others move, with a diagonal they cannot."""
    torch.manual_seed(0)
    data = bl.data.load("digits")
    x, y = data.train_x[:600], data.train_y[:600]
    model = Rows(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(20):
        for chosen in torch.randperm(len(x)).split(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()

    def loss_after(method: bl.Laplace, criterion: str) -> float:
        bnn = bl.bayesianize(model, method, likelihood=Categorical())
        bnn.fit([(x, y)], progress=False)
        plan = bl.plan(bnn, bl.Budget(sparsity=0.7), criterion=criterion)
        network = bl.prune(bnn, plan).mean_network().eval()
        return nn.functional.cross_entropy(network(x), y).item()

    kron = loss_after(bl.Laplace("kron", curvature="signs"), "auto")
    diagonal = loss_after(bl.Laplace("diag", curvature="signs"), "auto")
    magnitude = loss_after(bl.Laplace("diag", curvature="signs"), "magnitude")
    assert kron < 0.9 * diagonal < 0.9 * magnitude, (kron, diagonal, magnitude)
