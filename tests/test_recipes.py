"""Recipes: what they are made of, and that they do what they say."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim import recipes
from bayeslim.app.compress import pipeline


def data(rows: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    """Make data whose class depends on two of twenty inputs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 20, generator=generator)
    return x, (x[:, 0] + x[:, 1] > 0).long()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 2))


def loader() -> bl.data.Loader:
    return bl.data.Loader(*data(), batch_size=50)


@pytest.mark.parametrize("name", sorted(recipes.RECIPES))
def test_every_recipe_makes_a_network_that_trains(name: str) -> None:
    recipe = recipes.RECIPES[name](epochs=1)
    assert recipe.name == name
    assert name in repr(recipe)
    assert repr(recipe.method) in repr(recipe)
    assert dict(recipe) == {"method": recipe.method, "prior": recipe.prior}
    bnn = bl.bayesianize(model(), likelihood=bl.likelihoods.Categorical(), **recipe)
    fitted = bnn.fit(loader(), progress=False, seed=0, **recipe.fit)
    assert fitted.history[-1]["nll"] < 5


def test_sparse_variational_dropout_finds_the_inputs_that_matter() -> None:
    recipe = recipes.sparse_vd(epochs=150)
    bnn = bl.bayesianize(model(), likelihood=bl.likelihoods.Categorical(), **recipe)
    bnn.fit(loader(), progress=False, seed=0, **{**recipe.fit, "lr": 1e-2})
    assert recipe.budget is not None
    pruned = bl.prune(bnn, recipe.budget, **recipe.cut)
    tuned = bl.fine_tune(pruned, loader(), progress=False, seed=0, **recipe.fine_tune)
    x, y = data()
    read = tuned.mean_network().get_parameter("0.weight").ne(0).any(0)
    assert read[:2].all()
    assert not read[2:].any()
    assert (tuned.mean_network()(x).argmax(1) == y).double().mean() > 0.97


def test_compress_takes_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = functools.partial(bl.benchmark, runtimes=["eager"], rounds=2, batch_sizes=(1,))
    monkeypatch.setattr(pipeline, "benchmark", quick)
    recipe = recipes.sparse_vd(epochs=30)
    result = bl.compress(
        model(), loader(), loader(), recipe=recipe, fit={"lr": 2e-2}, out=tmp_path, formats=(), baseline=False
    )
    assert result.pruned.method == recipe.method
    assert result.plan.criterion == "log_alpha"
    assert result.plan.sparsity > 0.5


def test_a_recipe_does_not_go_with_another_method(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="has its method and prior already"):
        bl.compress(model(), loader(), loader(), recipe=recipes.sparse_vd(), method=bl.Laplace(), out=tmp_path)
    with pytest.raises(TypeError, match="must be one of"):
        bl.compress(model(), loader(), loader(), recipe="sparse_vd", out=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="which is weights or gates"):
        bl.compress(model(), loader(), loader(), recipe=recipes.sparse_vd(), granularity="unit", out=tmp_path)
    with pytest.raises(ValueError, match=r"recipes.sparse_vd\(epochs=5\)"):
        bl.compress(model(), loader(), loader(), recipe=recipes.sparse_vd(), fit={"epochs": 5}, out=tmp_path)
    with pytest.raises(TypeError, match="compress needs a budget"):
        bl.compress(model(), loader(), loader(), recipe=recipes.gaussian_dropout(), out=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", sorted(recipes.RECIPES))
@pytest.mark.parametrize("epochs", [0, 2.5])
def test_epochs_must_be_positive(name: str, epochs: float) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        recipes.RECIPES[name](epochs=epochs)


def test_sparse_vd_takes_a_temperature() -> None:
    recipe = recipes.sparse_vd(temperature=0.1)
    assert recipe.method.temperature == 0.1
    assert "temperature=0.1" in repr(recipe)


def test_the_kl_of_gaussian_dropout_does_not_know_the_weights() -> None:
    bnn = bl.bayesianize(model(), likelihood=bl.likelihoods.Categorical(), **recipes.gaussian_dropout())
    kls = []
    for factor in (1.0, 0.01):
        with torch.no_grad():
            bnn.model.get_parameter("0.weight").mul_(factor)
        kls.append(bnn.method.kl(bnn).item())
    assert kls[0] == pytest.approx(kls[1], rel=1e-6)
