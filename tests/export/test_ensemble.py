"""A posterior as one graph: what `predict` says with the same draws."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from small_networks import mlp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayeslim as bl
from bayeslim.errors import BayeslimWarning
from bayeslim.export import ensemble
from bayeslim.export.ensemble import OUTPUTS

ROWS = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
LIKELIHOODS = {
    "classes": bl.likelihoods.Categorical(),
    "binary": bl.likelihoods.Bernoulli(),
    "counts": bl.likelihoods.Poisson(),
    "values": bl.likelihoods.Gaussian("learned", initial_noise=0.3),
}


def uncertain(likelihood, network: nn.Module | None = None) -> bl.Bayesian:
    network = mlp() if network is None else network
    bnn = bl.bayesianize(network, bl.Variational(), likelihood=likelihood, num_data=10)
    with torch.no_grad():
        for name in bnn.sites.names:
            bnn.method.family.log_std(bnn.model, name).fill_(-1.0)
    return bnn


def same(bnn, outputs, samples, generator, x=ROWS) -> None:
    expected = bl.predict(bnn, x, samples=samples, how="sample", generator=generator)
    for name, value in zip(OUTPUTS, outputs, strict=True):
        torch.testing.assert_close(value, getattr(expected, name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["classes", "values"])
def test_the_file_says_what_predict_says(kind, tmp_path):
    bnn = uncertain(LIKELIHOODS[kind])
    path = tmp_path / "ensemble.onnx"
    done = bl.export(bnn, path, example=ROWS[:2], samples=4, generator=torch.Generator().manual_seed(3))
    assert done.batch_is_free
    session = onnxruntime.InferenceSession(path)
    assert [entry.name for entry in session.get_outputs()] == list(OUTPUTS)
    outputs = [torch.from_numpy(value) for value in session.run(None, {"inputs": ROWS.numpy()})]
    same(bnn, outputs, 4, torch.Generator().manual_seed(3))
    assert outputs[4].max() > 0.01  # the networks disagree, so that there is something to get wrong
    certain = session.run(None, {"inputs": 1e6 * ROWS.numpy()})
    assert all(np.isfinite(value).all() for value in certain)  # probabilities of exactly zero, 0 · log 0 = 0
    biases = [t.name for t in onnx.load(path).graph.initializer if "bias" in t.name]
    assert len(biases) == 2  # not random, and so the same in every member


@pytest.mark.parametrize("kind", list(LIKELIHOODS))
def test_every_likelihood(kind):
    bnn = uncertain(LIKELIHOODS[kind])
    torch.manual_seed(5)
    together = ensemble(bnn, 6)
    torch.manual_seed(5)
    same(bnn, together(ROWS), 6, None)


def test_nothing_is_random_any_more_and_nothing_was_changed():
    bnn = uncertain(LIKELIHOODS["classes"]).train()
    before = {name: tensor.clone() for name, tensor in bnn.state_dict().items()}
    together = ensemble(bnn, 3)
    assert all(torch.equal(a, b) for a, b in zip(together(ROWS), together(ROWS), strict=True))
    assert bnn.training
    assert all(torch.equal(before[name], tensor) for name, tensor in bnn.state_dict().items())
    assert len({id(member[0].bias) for member in together.members}) == 1
    assert len({id(member[0].weight) for member in together.members}) == 3


@pytest.mark.parametrize("kind", ["classes", "values"])
def test_programs_take_batches_of_any_size(kind, tmp_path):
    bnn = uncertain(LIKELIHOODS[kind])
    path = tmp_path / "e.pt2"
    done = bl.export(bnn, path, example=ROWS[:2], samples=4, generator=torch.Generator().manual_seed(3))
    assert done.batch_is_free
    program = torch.export.load(path).module()
    for examples in (3, 100, 5_000):
        x = torch.randn(examples, *ROWS.shape[1:])
        same(bnn, program(x), 4, torch.Generator().manual_seed(3), x)


def test_several_inputs_in_a_program(tmp_path):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 3), nn.Linear(2, 3)

        def forward(self, x, y):
            return self.a(x) + self.b(y)

    bnn = uncertain(LIKELIHOODS["classes"], Both())
    x = (ROWS, torch.randn(5, 2))
    bl.export(bnn, tmp_path / "e.pt2", example=x, samples=3, generator=torch.Generator().manual_seed(1))
    again = torch.export.load(tmp_path / "e.pt2").module()
    same(bnn, again(x), 3, torch.Generator().manual_seed(1), x)


def test_a_laplace_posterior_warns_that_draws_are_not_its_way():
    bnn = bl.bayesianize(mlp(), bl.Laplace(structure="diag"), likelihood=LIKELIHOODS["classes"])
    bnn.fit(DataLoader(TensorDataset(ROWS, torch.arange(5) % 3), batch_size=5), progress=False)
    generator = torch.Generator().manual_seed(0)
    with pytest.warns(BayeslimWarning, match="linearised"):
        together = ensemble(bnn, 3, generator)
    same(bnn, together(ROWS), 3, torch.Generator().manual_seed(0))


def slim_members() -> list[nn.Module]:
    """Three networks of other widths, as cuts of the members of an ensemble leave them."""
    members: list[nn.Module] = []
    for seed, sparsity in enumerate((0.3, 0.5, 0.7)):
        torch.manual_seed(seed)
        bnn = bl.bayesianize(mlp(), bl.Variational(), likelihood=LIKELIHOODS["classes"], num_data=10)
        members.append(
            bl.compact(bl.prune(bnn, bl.Budget(sparsity=sparsity), granularity="unit", example=ROWS), example=ROWS)
        )
    return members


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_slim_networks_of_different_shapes_are_one_graph(suffix, tmp_path):
    members, likelihood = slim_members(), LIKELIHOODS["classes"]
    assert len({sum(p.numel() for p in member.parameters()) for member in members}) == 3
    path = tmp_path / f"five.{suffix}"
    done = bl.export(members, path, example=ROWS[:2], likelihood=likelihood)
    assert done.batch_is_free
    expected = likelihood.predict(torch.stack([member(ROWS) for member in members]))
    if suffix == "onnx":
        session = onnxruntime.InferenceSession(path)
        assert [entry.name for entry in session.get_outputs()] == list(OUTPUTS)
        found = [torch.from_numpy(value) for value in session.run(None, {"inputs": ROWS.numpy()})]
    else:
        found = list(torch.export.load(path).module()(ROWS))
    for name, value in zip(OUTPUTS, found, strict=True):
        torch.testing.assert_close(value, getattr(expected, name).detach(), rtol=1e-5, atol=1e-6)
    assert found[4].max() > 1e-4  # the members disagree


def test_several_networks_need_a_likelihood_and_to_be_plain(tmp_path):
    with pytest.raises(ValueError, match="likelihood"):
        bl.export([mlp(), mlp()], tmp_path / "two.onnx", example=ROWS)
    with pytest.raises(TypeError, match="plain"):
        bl.export(
            [uncertain(LIKELIHOODS["classes"])], tmp_path / "one.onnx", example=ROWS, likelihood=LIKELIHOODS["classes"]
        )
    with pytest.raises(ValueError, match="one plain network"):
        bl.export([mlp()], tmp_path / "one.c", example=ROWS, likelihood=LIKELIHOODS["classes"])
    with pytest.raises(ValueError, match="leave it out"):
        bl.export(mlp(), tmp_path / "one.onnx", example=ROWS, likelihood=LIKELIHOODS["classes"])
