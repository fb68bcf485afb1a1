"""Fine-tuning: means are trained, zeros and spreads stay."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim import families, gates


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 6, generator=generator)
    return x, (x[:, :3].sum(1) > 0).long()


def network(method: bl.Method, prior: bl.priors.Prior | None = None) -> bl.Bayesian:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    bnn = bl.bayesianize(model, method, likelihood=bl.likelihoods.Categorical(), prior=prior)
    bnn.fit(bl.data.Loader(*data(), batch_size=50), epochs=3, progress=False, seed=0)
    return bnn


def nll(bnn: bl.Bayesian) -> float:
    x, y = data()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(bnn.mean_network()(x), y))


@pytest.mark.parametrize(
    "method",
    [
        bl.Variational(),
        bl.Variational(families.SparseGaussian()),
        bl.Variational(families.Point(), gates=gates.InformationBottleneck()),
        bl.Variational(families.DropoutGaussian()),
        bl.IVON(),
    ],
    ids=["diagonal", "sparse", "gates", "dropout", "natural gradients"],
)
def test_means_improve_and_everything_else_stays(method: bl.Variational) -> None:
    pruned = bl.prune(network(method), bl.Budget(sparsity=0.5), criterion="magnitude")
    before = copy.deepcopy(pruned.state_dict())
    tuned = bl.fine_tune(pruned, bl.data.Loader(*data(), batch_size=50), epochs=10, lr=1e-2, progress=False, seed=0)
    assert nll(tuned) < nll(pruned) - 0.02
    assert tuned.method == method
    assert all(p.requires_grad for p in tuned.model.parameters())
    means = {name for name, _ in tuned.mean_network().named_parameters()}
    moved = {name for name, value in tuned.state_dict().items() if not torch.equal(value, before[name])}
    assert moved
    assert moved <= means
    for name, mask in tuned.masks.items():
        assert not tuned.mean_network().get_parameter(name)[~mask].any()
    for name, value in pruned.state_dict().items():  # the pruned network itself was not touched
        assert torch.equal(value, before[name])


def test_noise_is_off() -> None:
    bnn = network(bl.Variational(families.DiagonalGaussian(initial_std=5.0), estimator="mean", temperature=0.0))
    x, y = data()
    bnn.train()
    expected = nn.functional.cross_entropy(bnn.mean_network()(x), y)
    torch.testing.assert_close(bnn.loss((x, y)), expected)
    torch.testing.assert_close(bnn(x), bnn.mean_network()(x))


def test_the_mean_alone_can_pay_for_the_kl() -> None:
    bnn = network(bl.Variational(estimator="mean"))
    x, y = data()
    bnn.loss((x, y))
    assert bnn.terms is not None
    torch.testing.assert_close(
        bnn.terms.kl, bnn.priors["0.weight"].kl(*of(bnn, "0")) + bnn.priors["2.weight"].kl(*of(bnn, "2"))
    )


def of(bnn: bl.Bayesian, layer: str) -> tuple[torch.Tensor, torch.Tensor]:
    posterior = bnn.posterior_
    return posterior.mean[f"{layer}.weight"], posterior.std[f"{layer}.weight"]


def test_laplace_is_found_again_where_training_ends() -> None:
    pruned = bl.prune(network(bl.Laplace()), bl.Budget(sparsity=0.5))
    tuned = bl.fine_tune(pruned, bl.data.Loader(*data(), batch_size=50), epochs=10, lr=1e-2, progress=False, seed=0)
    assert nll(tuned) < nll(pruned)
    mean, weight = tuned.posterior_.mean["0.weight"], tuned.model.get_parameter("0.weight")
    torch.testing.assert_close(mean, weight.detach())
    assert not mean[~tuned.masks["0.weight"]].any()


def test_correlated_weights_have_no_mean_to_train_alone() -> None:
    with pytest.raises(ValueError, match='estimator="mean"'):
        bl.Variational(families.LowRankGaussian(), estimator="mean")


def test_a_plain_network_is_refused() -> None:
    with pytest.raises(TypeError, match="fine_tune takes a Bayesian network"):
        bl.fine_tune(nn.Linear(6, 2), bl.data.Loader(*data(), batch_size=50), epochs=1)  # type: ignore[arg-type]


class Checkpointed(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize(
    "method",
    [
        bl.Variational(estimator="local"),
        bl.Variational(estimator="flipout"),
        bl.Variational(bl.families.Point(), gates=bl.gates.InformationBottleneck()),
    ],
)
def test_activation_checkpointing_changes_nothing(method: bl.Variational) -> None:
    tuned = []
    for kind in (nn.Sequential, Checkpointed):
        torch.manual_seed(0)
        model = kind(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
        bnn = bl.bayesianize(model, method, likelihood=bl.likelihoods.Categorical())
        bnn.fit([data()], epochs=1, progress=False, seed=0)
        types = [type(module) for module in bnn.model.modules()]
        pruned = bl.prune(bnn, bl.Budget(sparsity=0.5))
        tuned.append(bl.fine_tune(pruned, [data()], epochs=2, progress=False, seed=0))
        assert [type(module) for module in tuned[-1].model.modules()] == types
    for name, value in tuned[0].state_dict().items():
        torch.testing.assert_close(value, tuned[1].state_dict()[name], rtol=1e-5, atol=1e-6)
