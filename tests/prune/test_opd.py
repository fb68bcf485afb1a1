"""Optimal posterior damage, against the loss in log-density by brute force."""

from __future__ import annotations

import pytest
import torch
from given_posteriors import FAMILIES, given, mean_of, two_layers

import bayeslim as bl
from bayeslim.posteriors import Dense, LowRank, Particles
from bayeslim.prune import CRITERIA


def lowrank(model):
    generator = torch.Generator().manual_seed(1)
    size = sum(p.numel() for p in model.parameters())
    return LowRank(mean_of(model), torch.randn(size, 4, generator=generator).double(), torch.rand(4).double(), 0.7)


KINDS = FAMILIES | {
    "low rank": lowrank,
    "unequal priors": lambda model: FAMILIES["kronecker"](model, prior={"0.weight": 0.3, "0.bias": 2.0, "2": 0.9}),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_score_is_what_log_density_loses(kind: str) -> None:
    model = two_layers()
    posterior = KINDS[kind](model)
    scores = CRITERIA["opd"].weights(posterior, {})
    top = posterior.log_prob(posterior.mean)
    for name, index in (("0.weight", 7), ("0.bias", 2), ("2.weight", 11)):
        moved = {n: value.clone() for n, value in posterior.mean.items()}
        moved[name].view(-1)[index] = 0.0
        lost = float(top - posterior.log_prob(moved))
        assert float(scores[name].flatten()[index]) == pytest.approx(lost, rel=1e-6)


def test_a_low_rank_posterior_scores_as_the_dense_one_of_its_precision() -> None:
    model = two_layers()
    posterior = lowrank(model)
    dense = Dense(posterior.mean, posterior.factor @ posterior.eigenvalues.diag() @ posterior.factor.T, 0.7)
    scores, wanted = (CRITERIA["opd"].weights(one, {}) for one in (posterior, dense))
    assert scores.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(scores[name].double(), value.double(), rtol=1e-6, atol=1e-9)


def test_units_sum_their_weights_and_points_cannot_go() -> None:
    model = two_layers()
    posterior = FAMILIES["diagonal"](model)
    plan = bl.plan(given(model, posterior), bl.Budget(sparsity=0.5), criterion="opd", granularity="unit",
                   example=torch.randn(2, 5).double())  # fmt: skip
    assert plan.criterion == "opd"
    group = {"0.weight": torch.tensor([0, 3]), "2.bias": torch.tensor([1])}
    single = CRITERIA["opd"].weights(posterior, {})
    wanted = single["0.weight"].flatten()[[0, 3]].sum() + single["2.bias"][1]
    assert CRITERIA["opd"].units is not None
    torch.testing.assert_close(CRITERIA["opd"].units(posterior, {}, [group]), wanted[None])
    part = Dense({"w": torch.ones(3).double()}, torch.eye(2).double(), 1.0, indices={"w": torch.tensor([0, 2])})
    assert CRITERIA["opd"].weights(part, {})["w"].tolist() == [1.0, torch.inf, 1.0]


def test_cut_weights_score_zero_and_particles_are_refused() -> None:
    model = two_layers()
    mask = torch.arange(30).reshape(6, 5) % 4 != 0
    cut = FAMILIES["kronecker"](model).condition({"0.weight": mask})
    scores = CRITERIA["opd"].weights(cut, {})["0.weight"]
    assert not scores[~mask].any()
    assert scores[mask].min() > 0
    with pytest.raises(TypeError, match="opd ranks"):
        CRITERIA["opd"].weights(Particles({"w": torch.randn(3, 4)}), {})
