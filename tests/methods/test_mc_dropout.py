"""Dropout at test time: closed forms, which dropouts are found, one mask for all inputs or one for each."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.errors import UnsupportedModel
from bayeslim.methods.mc_dropout import Probe, Shared

X = torch.randn(7, 4, generator=torch.Generator().manual_seed(1))
SEQUENCES = torch.randn(7, 5, 8, generator=torch.Generator().manual_seed(2))
IMAGES = torch.randn(7, 4, 3, 3, generator=torch.Generator().manual_seed(3))
P = 0.3


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.dropout(x, P, self.training))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]):
        super().__init__()
        self.rnn = kind(8, 6, num_layers=2, dropout=P, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0][:, -1]


class Attention(nn.Module):
    def __init__(self, need_weights: bool):
        super().__init__()
        self.attention, self.need_weights = nn.MultiheadAttention(8, 2, dropout=P, batch_first=True), need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.need_weights)[0].mean(1)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=P, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten())


NETWORKS = {
    "dropout": (lambda: nn.Sequential(nn.Dropout(P), nn.Linear(4, 2)), X),
    "alpha": (lambda: nn.Sequential(nn.AlphaDropout(P), nn.Linear(4, 2)), X),
    "channels": (lambda: nn.Sequential(nn.Dropout2d(P), nn.Flatten(), nn.Linear(36, 2)), IMAGES),
    "feature-alpha": (lambda: nn.Sequential(nn.FeatureAlphaDropout(P), nn.Flatten(), nn.Linear(36, 2)), IMAGES),
    "functional": (Functional, X),
    "lstm": (lambda: Recurrent(nn.LSTM), SEQUENCES),
    "gru": (lambda: Recurrent(nn.GRU), SEQUENCES),
    "attention": (lambda: Attention(False), SEQUENCES),
    "attention-weights": (lambda: Attention(True), SEQUENCES),
    "transformer": (encoder, SEQUENCES),
}


def bayesian(model: nn.Module) -> bl.Bayesian:
    return bl.bayesianize(model, bl.MCDropout(), likelihood=bl.likelihoods.Gaussian(1.0), num_data=10)


def outputs(bnn: bl.Bayesian, x, n: int, how: str = "sample", seed: int = 0) -> Tensor:
    return bl.predict(bnn, x, samples=n, how=how, generator=torch.Generator().manual_seed(seed)).samples


@pytest.mark.parametrize("how", ["sample", "local"])
def test_a_linear_network_has_the_variance_of_the_closed_form(how):
    """Cov(f(x), f(x')) = p / (1 − p) Σ w² x x' with one mask for both, and zero with one for each."""
    model = nn.Sequential(nn.Dropout(P), nn.Linear(4, 2)).double()
    x, weight = X.double(), model[1].weight
    draws = outputs(bayesian(model), x, 3000, how)
    torch.testing.assert_close(draws.mean(0), model.eval()(x), atol=0.08, rtol=0)
    for output in range(2):
        expected = P / (1 - P) * (weight[output].square() * x) @ x.T
        found = draws[..., output].T.cov()
        if how == "local":
            expected = expected.diag().diag()
        assert (found - expected).abs().max() < 0.12 * expected.diag().max()


@pytest.mark.parametrize("name", NETWORKS)
def test_one_mask_is_shared_by_all_inputs_whatever_the_batches(name):
    build, x = NETWORKS[name]
    bnn = bayesian(build())
    same = x[:1].expand_as(x).contiguous()
    draws = outputs(bnn, same, 5)
    torch.testing.assert_close(draws, draws[:, :1].expand_as(draws))
    assert not torch.allclose(draws[0], draws[1])
    loaded = [(x[:4], None), (x[4:], None)]
    torch.testing.assert_close(outputs(bnn, iter(loaded), 3), outputs(bnn, x, 3))
    assert torch.equal(outputs(bnn, x, 3), outputs(bnn, x, 3))
    assert not torch.equal(outputs(bnn, x, 3), outputs(bnn, x, 3, seed=1))


@pytest.mark.parametrize("name", NETWORKS)
def test_locally_every_example_has_a_mask_of_its_own_as_in_training(name):
    build, x = NETWORKS[name]
    model = build()
    same = x[:1].expand_as(x).contiguous()
    bnn = bayesian(model)
    draws = outputs(bnn, same, 2, "local")
    assert not torch.allclose(draws[0, 0], draws[0, 1])
    assert not torch.allclose(draws[0], draws[1])


@pytest.mark.parametrize(("name", "how"), list(zip(NETWORKS, itertools.cycle(["sample", "local"]), strict=False)))
def test_the_spread_is_that_of_training_mode(name, how):
    build, x = NETWORKS[name]
    torch.manual_seed(1)
    model = build()
    many = x[:1].repeat(4000, *[1] * (x.ndim - 1))
    with torch.no_grad():
        expected = model.train()(many).std(0)
    found = outputs(bayesian(model), x[:1], 150, how).std(0)[0]  # to 6 %, one standard error
    torch.testing.assert_close(found, expected, rtol=0.25, atol=0.01)


def test_all_else_is_in_evaluation_mode_and_stays_so():
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(P), nn.Linear(5, 2))
    bnn = bayesian(model)
    bnn.fit(bl.data.Loader(X, torch.randn(7, 2), batch_size=7), epochs=3, progress=False)
    before = {name: value.clone() for name, value in bnn.model.named_buffers()}
    bnn.eval()
    modes = [module.training for module in bnn.modules()]
    draws = outputs(bnn, X, 1000)
    assert [module.training for module in bnn.modules()] == modes
    assert all(torch.equal(before[name], value) for name, value in bnn.model.named_buffers())
    # the last layer is linear in the mask, so the mean of draws is the network without dropout
    torch.testing.assert_close(draws.mean(0), bnn(X), atol=0.1, rtol=0)
    assert torch.equal(bl.predict(bnn, X, how="mean").samples[0], bnn(X))


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(4, 2),
        nn.Sequential(nn.Dropout(0.0), nn.Linear(4, 2)),
        nn.LSTM(8, 6, num_layers=2),
        nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0),
    ],
)
def test_a_network_without_dropout_is_refused(model):
    with pytest.raises(UnsupportedModel, match="needs a network with dropout"):
        bayesian(model)


def test_a_functional_dropout_that_never_runs_is_refused_at_prediction():
    class Never(Functional):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x if x.ndim else F.dropout(x))

    with pytest.raises(UnsupportedModel, match="needs a network with dropout"):
        bl.predict(bayesian(Never()), X)


def test_a_pruned_network_still_drops_out():
    bnn = bayesian(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(P), nn.Linear(8, 2)))
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.5), criterion="magnitude")
    draws = outputs(pruned, X, 10)
    assert draws.std(0).max() > 0.01
    assert int((pruned.model[0].weight == 0).sum() + (pruned.model[3].weight == 0).sum()) >= 24


@pytest.mark.parametrize("examples", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", ["lstm", "gru", "attention", "attention-weights", "transformer"])
def test_positions_are_not_taken_for_examples(name, examples):
    """Sequences of length 5 and width 8, of which 5 or 8 look like any other dimension."""
    bnn = bayesian(NETWORKS[name][0]())
    same = SEQUENCES[:1].expand(examples, -1, -1).contiguous()
    draws = outputs(bnn, same, 4)
    torch.testing.assert_close(draws, draws[:, :1].expand_as(draws))
    torch.testing.assert_close(draws[:, :1], outputs(bnn, SEQUENCES[:1], 4))


class DroppedWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout, self.weight = nn.Dropout(0.5), nn.Parameter(torch.randn(64, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.dropout(self.weight).mean(0)[:, None]


def test_the_mask_of_a_weight_is_the_same_for_any_number_of_examples():
    bnn = bayesian(DroppedWeight())
    x = torch.ones(64, 4)
    torch.testing.assert_close(outputs(bnn, x, 5)[:, :32], outputs(bnn, x[:32], 5))
    torch.testing.assert_close(outputs(bnn, x, 5)[:, :63], outputs(bnn, x[:63], 5))


class Graph(nn.Module):
    """Takes features and adjacency of all its nodes, no fewer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return adjacency @ self.layer(F.dropout(x, P, self.training))


def test_a_graph_is_one_example():
    inputs = (torch.ones(7, 4), torch.eye(7))
    draws = outputs(bayesian(Graph()), inputs, 3)
    assert not torch.allclose(draws[:, 0], draws[:, 1])
    assert not torch.allclose(draws[0], draws[1])


def test_the_fused_kernel_of_gpus_shares_its_masks_too():
    x = torch.ones(6, 5)
    probe = Probe(examples=7)
    with probe, torch.no_grad():
        assert torch.equal(torch.native_dropout(torch.ones(7, 5), P, True)[1], torch.ones(7, 5).bool())
    with Shared(3, probe), torch.no_grad():
        fused, mask = torch.native_dropout(x, P, True)
    with Shared(3, probe), torch.no_grad():
        plain = F.dropout(x, P)
    torch.testing.assert_close(fused, plain)
    assert torch.equal(fused, fused[:1].expand_as(fused))
    assert torch.equal(mask, fused > 0)
