"""Effective sample sizes and R-hat, against chains whose answers are known and against ArviZ's numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bayeslim.diagnostics import autocorrelation, e_bfmi, ess, estimators, r_hat
from bayeslim.errors import ShapeMismatch

G = torch.Generator().manual_seed(0)


def autoregressive(phi: torch.Tensor, chains: int, draws: int, seed: int = 0) -> torch.Tensor:
    """Stationary AR(1) chains with these correlations, (chains, draws, K)."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(draws, chains, len(phi), generator=g, dtype=torch.float64)
    values = [noise[0]]
    for now in noise[1:]:
        values.append(phi * values[-1] + (1 - phi**2).sqrt() * now)
    return torch.stack(values, 1)


def test_sample_sizes_of_autoregressive_chains():
    phi = torch.tensor([-0.5, 0.0, 0.5, 0.9], dtype=torch.float64)
    values = autoregressive(phi, chains=4, draws=20_000)
    exact = 80_000 * (1 - phi) / (1 + phi)
    assert torch.allclose(ess(values, "mean"), exact, rtol=0.1)
    assert torch.allclose(ess(values), exact, rtol=0.1)
    # an indicator forgets sooner than the value itself, and no later than independent draws do
    assert (ess(values, "tail")[2:] > exact[2:]).all()
    assert torch.allclose(ess(values, "tail")[1], exact[1], rtol=0.1)
    for lag in (0, 1, 5):
        assert torch.allclose(autocorrelation(values, lag), phi**lag, atol=0.02)
    assert torch.allclose(r_hat(values), torch.ones(4, dtype=torch.float64), atol=5e-3)


def test_a_sample_size_says_how_far_the_mean_is_off():
    phi = torch.full((400,), 0.8, dtype=torch.float64)
    values = autoregressive(phi, chains=2, draws=500)
    error = values.mean((0, 1)).square().mean()  # of a mean whose true value is 0, over 400 repetitions
    assert (1 / ess(values, "mean")).mean().item() == pytest.approx(error.item(), rel=0.15)


@pytest.mark.parametrize("fault", ["location", "scale", "drift"])
def test_r_hat_sees_chains_that_disagree(fault):
    values = torch.randn(4, 400, 1, generator=G, dtype=torch.float64)
    assert r_hat(values).item() < 1.01
    if fault == "location":
        values[0] += 1
    elif fault == "scale":
        values[0] *= 4
    else:
        values += torch.linspace(-1, 1, 400, dtype=torch.float64)[None, :, None]
    assert r_hat(values).item() > 1.05


def test_heavy_tails_do_no_harm():
    values = torch.empty(4, 1000, 50, dtype=torch.float64).cauchy_(generator=G)
    assert (r_hat(values) < 1.02).all()
    assert (ess(values) > 2500).all()


@given(seed=st.integers(0, 10_000), shift=st.floats(-5, 5), scale=st.floats(0.1, 10))
@settings(max_examples=20, deadline=None)
def test_only_the_order_of_values_matters(seed, shift, scale):
    values = autoregressive(torch.tensor([0.3, 0.7], dtype=torch.float64), 3, 40, seed)
    assert torch.allclose(ess(values), ess((scale * values + shift).exp()), rtol=1e-9)
    # the two values in the middle are equally far from the median, but for rounding
    assert torch.allclose(r_hat(values), r_hat(scale * values + shift), atol=0.02)
    assert torch.allclose(ess(values), ess(values.flip(0)), rtol=1e-9)


def sines(chains: int, draws: int) -> torch.Tensor:
    """Correlated chains that disagree a little, of the same numbers everywhere."""
    t = torch.arange(draws, dtype=torch.float64)[None] + 1
    c = torch.arange(chains, dtype=torch.float64)[:, None]
    noise = 2 * (12.9898 * t * t + 78.233 * c + 0.1 * t * c).sin()
    values = [noise[:, 0]]
    for s in range(1, draws):
        values.append(0.6 * values[-1] + noise[:, s])
    return torch.stack(values, 1) + 0.3 * c


@pytest.mark.parametrize(
    ("chains", "draws", "sizes", "agreement", "energy"),
    [
        (1, 60, [21.913313979030995, 66.31998818141533, 21.723756426232974], None, 0.7103550377157458),
        (3, 41, [29.350351357803103, 24.156336141182983, 28.77977750623628], 1.0815157605303534, 0.669928577139275),
        (4, 200, [150.97388980430827, 511.9093720045406, 189.42925225479073], 1.0549217833747595, 0.7435222880588299),
    ],
)
def test_numbers_are_those_of_arviz(chains, draws, sizes, agreement, energy):
    """References computed with ArviZ 0.23.4."""
    values = sines(chains, draws)
    assert [ess(values, kind).item() for kind in ("bulk", "tail", "mean")] == pytest.approx(sizes, rel=1e-6)
    if agreement is not None:
        assert r_hat(values).item() == pytest.approx(agreement, rel=1e-6)
    assert e_bfmi(values)[0].item() == pytest.approx(energy, rel=1e-9)


def test_constants_have_no_diagnostics_and_ties_share_ranks():
    values = torch.randn(2, 50, 3, generator=G)
    values[..., 1] = 0.25
    values[..., 2] = values[..., 2].round()
    for found in (ess(values), ess(values, "tail"), ess(values, "mean"), r_hat(values), autocorrelation(values)):
        assert found.isnan().tolist() == [False, True, False]
    ranks = estimators._normal_scores(torch.tensor([[[1.0, 2.0], [2.0, 3.0]]], dtype=torch.float64))
    assert ranks[0, 0, 1] == ranks[0, 1, 0] == 0
    assert ranks[0, 0, 0] == pytest.approx(-ranks[0, 1, 1].item())


def test_parts_are_worked_on_alone(monkeypatch):
    values = torch.randn(2, 30, 4, 3, generator=G)
    whole = [ess(values), r_hat(values)]
    assert whole[0].shape == (4, 3)
    monkeypatch.setattr(estimators, "MAX_NUMBERS_PER_CHUNK", 100)
    assert torch.allclose(ess(values), whole[0])
    assert torch.allclose(r_hat(values), whole[1])
    assert ess(values[..., 0, 0]).item() == pytest.approx(whole[0][0, 0].item())


def test_energies_of_independent_and_of_timid_momenta():
    assert e_bfmi(torch.randn(3, 5000, generator=G)).tolist() == pytest.approx([2.0] * 3, rel=0.1)
    assert (e_bfmi(torch.randn(3, 5000, generator=G).cumsum(1)) < 0.05).all()


def test_what_cannot_be_judged_is_said():
    with pytest.raises(ShapeMismatch, match=r"at least 4 draws.*Got \(5, 3\)"):
        ess(torch.randn(5, 3))
    with pytest.raises(ValueError, match='kind must be "bulk", "tail" or "mean"'):
        ess(torch.randn(2, 10), "middle")
    with pytest.raises(ValueError, match="lag must be less than the 10 draws"):
        autocorrelation(torch.randn(2, 10), 10)
    with pytest.raises(ShapeMismatch, match=r"Energies must be \(chains, draws\)"):
        e_bfmi(torch.randn(10))
    assert math.isnan(ess(torch.ones(2, 10)).item())
