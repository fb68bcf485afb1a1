import copy

import pytest
import torch
from curved_networks import CASES, make
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bayeslim as bl
import oracles
from bayeslim.curvature import ggn, jacobian, jacobians, kfac, lowrank
from bayeslim.errors import NoSiteMatched, ShapeMismatch
from bayeslim.likelihoods import Categorical, Gaussian


def some_of_each(model, fraction=0.4):
    """Random indices into every parameter, and where they are in the flat vector of all."""
    chosen, flat, start = {}, [], 0
    for name, p in model.named_parameters():
        index = torch.randperm(p.numel())[: max(1, int(fraction * p.numel()))]
        chosen[name] = index
        flat.append(start + index)
        start += p.numel()
    return chosen, torch.cat(flat)


@pytest.mark.parametrize("name", CASES)
def test_is_the_ggn(name):
    case = make(name)
    truth = oracles.ggn(case.model, case.batches(), case.likelihood)
    found = ggn(case.model, case.batches(), case.likelihood)
    assert found.num_data == 5
    torch.testing.assert_close(found.matrix, truth, rtol=1e-9, atol=1e-11)
    chosen, flat = some_of_each(case.model)
    part = ggn(case.model, case.batches(), case.likelihood, chosen).matrix
    torch.testing.assert_close(part, truth[flat][:, flat], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_jacobians(name):
    case = make(name)
    truth = oracles.jacobian(case.model, case.x)
    torch.testing.assert_close(jacobian(case.model, case.x), truth, rtol=1e-9, atol=1e-11)
    chosen, flat = some_of_each(case.model)
    parts = list(jacobians(case.model, case.x, chosen, at_once=2))
    assert [len(J) for _, J in parts] == [2, 2, 1]
    torch.testing.assert_close(torch.cat([J for _, J in parts]), truth[..., flat], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(torch.cat([f for f, _ in parts]), case.model.eval()(case.x).detach())


def test_the_model_is_the_callers_between_jacobians():
    case = make("convolutions and norms")
    case.model.train()
    for _ in jacobians(case.model, case.x, at_once=1):
        assert all(module.training for module in case.model.modules())
        assert not any(module._forward_hooks for module in case.model.modules())


def test_large_blocks_are_symmetric_and_right():
    """More weights than a block of the symmetric product, over several blocks."""
    torch.manual_seed(1)
    model = torch.nn.Linear(300, 2)
    x, y = torch.randn(6, 300), torch.randn(6, 2)
    found = ggn(model, [(x, y)], Gaussian(1.0), ["weight"]).matrix
    expected = torch.block_diag(x.T @ x, x.T @ x).to(found)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found, found.T)


def test_signs_are_unbiased():
    case = make("mlp")
    truth = oracles.ggn(case.model, case.batches(), case.likelihood)
    draws = torch.stack(
        [ggn(case.model, case.batches(), case.likelihood, columns="signs", seed=s).matrix for s in range(150)]
    )
    error = (draws.mean(0) - truth) / (draws.std(0) / 150**0.5 + 1e-9)
    assert error.abs().max() < 5.5


@pytest.mark.parametrize("name", ["mlp", "recurrent", "convolutions and norms"])
def test_lowrank_finds_the_leading_eigenpairs(name):
    case = make(name)
    truth = oracles.ggn(case.model, case.batches(), case.likelihood)
    found = lowrank(case.model, case.batches(), case.likelihood, 3, oversampling=8)
    values, vectors = torch.linalg.eigh(truth)
    torch.testing.assert_close(found.eigenvalues, values.flip(0)[:3], rtol=1e-6, atol=1e-9)
    overlap = (vectors.flip(1)[:, :3].T @ found.vectors).diagonal().abs()
    torch.testing.assert_close(overlap, torch.ones_like(overlap), rtol=1e-4, atol=0)
    assert (found.vectors.T @ found.vectors - torch.eye(3)).abs().max() < 1e-9


def test_lowrank_of_full_rank_is_the_ggn():
    case = make("twice")
    truth = oracles.ggn(case.model, case.batches(), case.likelihood)
    found = lowrank(case.model, case.batches(), case.likelihood, truth.shape[0], passes=2)
    rebuilt = found.vectors @ torch.diag(found.eigenvalues) @ found.vectors.T
    torch.testing.assert_close(rebuilt, truth, rtol=1e-9, atol=1e-10)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_indices_in_any_order(data):
    torch.manual_seed(0)
    case = make("convolutions and norms")
    truth = oracles.jacobian(case.model, case.x[:2])
    starts, start = {}, 0
    for name, p in case.model.named_parameters():
        starts[name] = start
        start += p.numel()
    names = data.draw(st.lists(st.sampled_from(sorted(starts)), min_size=1, unique=True))
    params = dict(case.model.named_parameters())
    chosen = {
        name: torch.tensor(
            data.draw(st.lists(st.integers(0, params[name].numel() - 1), min_size=1, max_size=6, unique=True))
        )
        for name in names
    }
    flat = torch.cat([starts[name] + chosen[name] for name in starts if name in chosen])
    torch.testing.assert_close(jacobian(case.model, case.x[:2], chosen), truth[..., flat], rtol=1e-9, atol=1e-11)


def test_bad_selections():
    case = make("mlp")
    run = lambda chosen: ggn(case.model, case.batches(), case.likelihood, chosen)  # noqa: E731
    with pytest.raises(NoSiteMatched, match="is no parameter"):
        run({"nothing": None})
    with pytest.raises(ShapeMismatch, match=r"different numbers from 0 to 19. Got 2 from 0 to 20"):
        run({"0.weight": torch.tensor([0, 20])})
    with pytest.raises(ShapeMismatch, match="1 different"):
        run({"0.weight": torch.tensor([3, 3])})
    with pytest.raises(ShapeMismatch, match=r"vector of integers .* mask"):
        run({"0.weight": torch.ones(5, 4, dtype=torch.bool)})
    with pytest.raises(ValueError, match="rank must be from 1 to the number of weights, 43"):
        lowrank(case.model, case.batches(), case.likelihood, 44)
    with pytest.raises(ValueError, match="passes ≥ 2"):
        lowrank(case.model, case.batches(), case.likelihood, 4, passes=1)


def test_packed_sequences_have_factors_but_no_single_examples():
    class Packed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = torch.nn.LSTM(2, 3), torch.nn.Linear(3, 2)

        def forward(self, x):
            return self.head(self.lstm(x)[1][0][0])

    packed = torch.nn.utils.rnn.pack_sequence([torch.randn(3, 2), torch.randn(2, 2)])
    y = torch.tensor([0, 1])
    names = {"lstm.weight_ih_l0", "lstm.weight_hh_l0", "head.weight"}
    assert set(kfac(Packed(), [(packed, y)], Categorical()).layers) == names
    with pytest.raises(TypeError, match="PackedSequence cannot be split"):
        ggn(Packed(), [(packed, y)], Categorical(), ["lstm.bias_ih_l0"])


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(8), nn.LayerNorm(8)], ids=["batch", "layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_of_other_dtypes_have_the_curvature_of_float64(norm, dtype):
    """Statistics of a batch norm stay in the network's dtype, and curvature is summed in a larger one."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), copy.deepcopy(norm), nn.Tanh(), nn.Linear(8, 3)).to(dtype).eval()
    batches = [(torch.randn(16, 6).to(dtype), torch.randint(0, 3, (16,)))]
    found = []
    for own in (network, copy.deepcopy(network).double()):
        bnn = bl.bayesianize(own, bl.Laplace("full"), likelihood=bl.likelihoods.Categorical())
        x, y = batches[0]
        bnn.fit([(x.to(next(own.parameters()).dtype), y)], progress=False)
        found.append(bnn.posterior_.precision)
    torch.testing.assert_close(found[0].double(), found[1], rtol=1e-4 if dtype == torch.float32 else 0.3, atol=0.1)
