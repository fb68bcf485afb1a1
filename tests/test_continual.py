"""Learning on, against Bayesian linear regression, where two halves of the data make the whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim import continual
from bayeslim.errors import BayeslimError

NOISE = 0.3


def regression(seed: int, n: int = 60, inputs: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    mixing = torch.eye(inputs, dtype=torch.float64) + 0.5  # correlated inputs, well enough conditioned to train on
    x = torch.randn(n, inputs, generator=g, dtype=torch.float64) @ mixing
    y = x @ torch.arange(1.0, inputs + 1, dtype=torch.float64)[:, None]
    return x, y + NOISE * torch.randn(n, 1, generator=g, dtype=torch.float64)


def exact(x: torch.Tensor, y: torch.Tensor, std: float) -> tuple[torch.Tensor, torch.Tensor]:
    precision = x.T @ x / NOISE**2 + torch.eye(x.shape[1], dtype=x.dtype) / std**2
    return torch.linalg.solve(precision, x.T @ y / NOISE**2)[:, 0], precision


def bayesian(method: bl.Method, std: float = 2.0) -> bl.Bayesian:
    model = nn.Linear(4, 1, bias=False).double()
    likelihood = bl.likelihoods.Gaussian(NOISE)
    return bl.bayesianize(model, method, likelihood=likelihood, prior=bl.priors.Normal(std))


def loader(x: torch.Tensor, y: torch.Tensor) -> bl.data.Loader:
    return bl.data.Loader(x, y, batch_size=len(x), shuffle=False)


def at_optimum(bnn: bl.Bayesian, mean: torch.Tensor) -> None:
    with torch.no_grad():
        bnn.model.weight.copy_(mean[None])


TRAINING = {"epochs": 200, "lr": 0.1, "lr_schedule": "cosine", "progress": False}


@pytest.mark.parametrize("structure", ["kron", "full"])
def test_two_halves_of_linear_regression_make_the_whole(structure):
    (x1, y1), (x2, y2) = regression(0), regression(1, n=40)
    bnn = bayesian(bl.Laplace(structure=structure, curvature="exact"))
    at_optimum(bnn, exact(x1, y1, 2.0)[0])
    bnn.fit(loader(x1, y1), dtype=torch.float64, progress=False)
    bnn = continual.update(bnn, loader(x2, y2), **TRAINING)
    mean, precision = exact(torch.cat([x1, x2]), torch.cat([y1, y2]), 2.0)
    assert torch.allclose(bnn.posterior_.mean["weight"][0], mean, atol=1e-4)
    identity = {"weight": torch.eye(4, dtype=torch.float64).reshape(4, 1, 4)}
    assert torch.allclose(bnn.posterior_.precision_product(identity)["weight"][:, 0], precision, rtol=1e-6)
    assert bnn.num_data == 100


def test_a_diagonal_memory_forgets_correlations_and_a_full_one_does_not():
    (x1, y1), (x2, y2) = regression(0), regression(1)
    x2, y2 = x2 * torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64), y2 + 1.0
    mean, _ = exact(torch.cat([x1, x2]), torch.cat([y1, y2]), 2.0)
    off = {}
    for structure in ("diag", "full"):
        bnn = bayesian(bl.Laplace(structure=structure, curvature="exact"))
        at_optimum(bnn, exact(x1, y1, 2.0)[0])
        bnn.fit(loader(x1, y1), progress=False)
        bnn = continual.update(bnn, loader(x2, y2), **TRAINING | {"epochs": 500})
        off[structure] = float((bnn.posterior_.mean["weight"][0] - mean).norm())
    assert off["full"] < 0.005 < 0.02 < off["diag"]


def test_the_product_of_all_tasks_is_one_gaussian_around_its_own_centre():
    tasks = [regression(seed) for seed in (0, 1, 2)]
    bnn = bayesian(bl.Laplace(structure="diag", curvature="exact"))
    at_optimum(bnn, exact(*tasks[0], 2.0)[0])
    bnn.fit(loader(*tasks[0]), progress=False)
    means, curvatures = [bnn.posterior_.mean["weight"].clone()], [tasks[0][0].square().sum(0) / NOISE**2]
    for task in tasks[1:]:
        bnn = continual.update(bnn, loader(*task), centre="product", **TRAINING)
        means.append(bnn.posterior_.mean["weight"].clone())
        curvatures.append(task[0].square().sum(0) / NOISE**2)
    total = sum(curvatures) + 0.25
    # The first task's Gaussian has the prior in it: its optimum is that of likelihood and prior together.
    pull = (curvatures[0] + 0.25) * means[0] + curvatures[1] * means[1] + curvatures[2] * means[2]
    assert torch.allclose(bnn.state["anchor"].mean["weight"], pull / total, rtol=1e-5)
    assert not torch.allclose(bnn.state["anchor"].mean["weight"], bnn.posterior_.mean["weight"], rtol=1e-3)


def test_variational_learning_on_is_one_pass_of_bayes_rule():
    (x1, y1), (x2, y2) = regression(0), regression(1)
    bnn = bayesian(bl.Variational(estimator="shared", samples=8, antithetic=True))
    bnn.fit(loader(x1, y1), seed=0, **TRAINING)
    first = bnn.posterior_
    updated = continual.update(bnn, loader(x2, y2), seed=0, **TRAINING)
    p1 = torch.diag(first.variance["weight"][0].reciprocal())
    p2 = x2.T @ x2 / NOISE**2
    mean = torch.linalg.solve(p1 + p2, p1 @ first.mean["weight"][0] + (x2.T @ y2)[:, 0] / NOISE**2)
    assert torch.allclose(updated.posterior_.mean["weight"][0], mean, atol=2e-3)
    assert torch.allclose(updated.posterior_.variance["weight"][0], (p1 + p2).diagonal().reciprocal(), rtol=0.25)
    assert torch.equal(bnn.posterior_.mean["weight"], first.mean["weight"])
    assert updated.num_data == 120


def test_it_goes_on_from_a_file(tmp_path):
    (x1, y1), (x2, y2) = regression(0), regression(1)
    bnn = bayesian(bl.Laplace(curvature="exact"))
    at_optimum(bnn, exact(x1, y1, 2.0)[0])
    bnn.fit(loader(x1, y1), progress=False)
    bl.save(bnn, tmp_path / "yesterday")
    restored = bl.load(tmp_path / "yesterday", model=nn.Linear(4, 1, bias=False).double())
    options = {**TRAINING, "epochs": 50}
    now, then = continual.update(bnn, loader(x2, y2), **options), continual.update(restored, loader(x2, y2), **options)
    assert torch.equal(now.posterior_.mean["weight"], then.posterior_.mean["weight"])


def test_pruned_networks_learn_on_with_their_zeros():
    x, y = regression(0)
    bnn = bayesian(bl.Laplace(curvature="exact"))
    at_optimum(bnn, exact(x, y, 2.0)[0])
    bnn.fit(loader(x, y), progress=False)
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.5))
    updated = continual.update(pruned, loader(*regression(1)), **{**TRAINING, "epochs": 50})
    assert torch.equal(updated.model.weight == 0, ~pruned.masks["weight"])
    assert torch.equal(updated.posterior_.variance["weight"] == 0, ~pruned.masks["weight"])


def test_bad_requests_say_what_to_do():
    bnn = bayesian(bl.Laplace())
    with pytest.raises(BayeslimError, match=r"call bnn\.fit"):
        continual.update(bnn, loader(*regression(0)))
    bnn.num_data = 10
    with pytest.raises(ValueError, match="strength must be positive"):
        continual.update(bnn, loader(*regression(0)), strength=0)
    with pytest.raises(ValueError, match="centre must be"):
        continual.update(bnn, loader(*regression(0)), centre="middle")
    low = bayesian(bl.Laplace(structure="lowrank", rank=2))
    low.fit(loader(*regression(0)), progress=False)
    with pytest.raises(BayeslimError, match="cannot be pooled"):
        continual.update(low, loader(*regression(1)), epochs=1, progress=False)


def test_variational_networks_learn_a_second_task_after_short_training():
    """Standard deviations that start at 0.01 would hold the second task at 15 %."""
    data = bl.data.load("digits")
    orders = [torch.arange(64), torch.randperm(64, generator=torch.Generator().manual_seed(0))]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    bnn = bl.bayesianize(model, bl.Variational(), likelihood=bl.likelihoods.Categorical())
    options = {"epochs": 15, "lr": 1e-3, "seed": 0, "progress": False}
    first, second = (bl.data.Loader(data.train_x.flatten(1)[:, order], data.train_y, batch_size=64) for order in orders)
    bnn.fit(first, **options)
    bnn = continual.update(bnn, second, **options)
    seen = [bl.predict(bnn, data.test_x.flatten(1)[:, order]).probs.argmax(1) for order in orders]
    accuracies = [float((found == data.test_y).float().mean()) for found in seen]
    assert accuracies[0] > 0.75
    assert accuracies[1] > 0.5


def test_a_pruned_network_learns_on_and_keeps_its_zeros():
    x, y = regression(0)
    bnn = bayesian(bl.Variational(), 2.0)
    bnn.fit(loader(x, y), epochs=20, seed=0, progress=False)
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.5))
    after = continual.update(pruned, loader(*regression(1)), epochs=5, progress=False)
    mask = pruned.masks["weight"]
    assert (after.posterior_.mean["weight"][~mask] == 0).all()
    assert (after.posterior_.mean["weight"][mask] != pruned.posterior_.mean["weight"][mask]).all()


def test_points_have_nothing_to_learn_from():
    x, y = regression(0)
    bnn = bayesian(bl.Variational(bl.families.Point()))
    bnn.fit(loader(x, y), epochs=1, progress=False)
    with pytest.raises(BayeslimError, match="Weights that are points have no posterior to learn from"):
        continual.update(bnn, loader(x, y), epochs=1)
