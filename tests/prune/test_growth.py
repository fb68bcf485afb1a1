"""Layers are compared by their saliencies in the middle of a cut."""

from __future__ import annotations

import pytest
import torch
from given_posteriors import given
from torch import nn

import bayeslim as bl
from bayeslim.posteriors import Kronecker, KroneckerFactors
from bayeslim.prune.growth import saliency_growth

SIZE = 16


def correlated(correlation: float) -> torch.Tensor:
    """A matrix with ones on its diagonal and one correlation elsewhere."""
    eye = torch.eye(SIZE, dtype=torch.float64)
    return (1 - correlation) * eye + correlation * torch.ones_like(eye)


def two_layers(correlation: float = 0.99):
    """Two layers of equal saliencies; the weights of the first are strongly correlated, those of the second are not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False), nn.Linear(SIZE, SIZE, bias=False))
    eye = torch.eye(SIZE, dtype=torch.float64)
    inverse = torch.linalg.inv(correlated(correlation)).diagonal()
    factors = [
        KroneckerFactors.of("0.weight", outputs=eye, inputs=correlated(correlation)),
        KroneckerFactors.of("1.weight", outputs=eye, inputs=eye / inverse),
    ]
    with torch.no_grad():
        model[1].weight.copy_(model[0].weight)
    mean = {name: p.detach().double() for name, p in model.named_parameters()}
    return model, Kronecker(mean, factors, 1e-9)


def test_saliencies_of_correlated_weights_grow_and_of_others_do_not():
    _, posterior = two_layers()
    growth = saliency_growth(posterior, {}, 0.25)
    assert growth["1.weight"] == pytest.approx(1.0, abs=1e-6)
    assert growth["0.weight"] > 1.0
    assert saliency_growth(posterior, {}, 0.04)["0.weight"] > growth["0.weight"]
    masks = {"0.weight": torch.rand(SIZE, SIZE, generator=torch.Generator().manual_seed(0)) < 0.5}
    later = saliency_growth(posterior.condition(masks), masks, 0.25)
    assert later["0.weight"] > 1.0


def test_other_posteriors_have_no_growth():
    _, posterior = two_layers()
    variance = {name: torch.ones_like(value) for name, value in posterior.mean.items()}
    assert saliency_growth(bl.posteriors.Diagonal(posterior.mean, variance), {}, 0.25) == {}


def test_a_global_cut_spares_the_layer_whose_saliencies_grow():
    model, posterior = two_layers()
    bnn = given(model, posterior)
    plan = bl.plan(bnn, bl.Budget(sparsity=0.75))
    kept = {name: int(mask.sum()) for name, mask in plan.masks.items()}
    assert sum(kept.values()) == SIZE * SIZE // 2
    assert kept["0.weight"] > kept["1.weight"]
    by_threshold = bl.plan(bnn, bl.Budget(threshold=plan.thresholds["1.weight"]), criterion="curvature")
    same = by_threshold.masks  # thresholds are of the plain scores, which both layers share
    assert torch.equal(same["0.weight"], same["1.weight"])
