"""Weights times shared random scales."""

from __future__ import annotations

import pytest
import torch

from bayeslim import gates
from bayeslim.errors import BayeslimError, ShapeMismatch
from bayeslim.gates.placement import Part, Place
from bayeslim.io.registry import all_registered, registered
from bayeslim.io.storage import decode, encode
from bayeslim.posteriors import Diagonal, Gated, Scales

COLUMNS = Place("fc", "inputs", "inputs", (Part("fc.weight", 1),), 4)
ROWS = Place("fc", "outputs", "outputs", (Part("fc.weight", 0), Part("fc.bias", 0)), 3)
HEADS = Place("out", "heads", "heads", (Part("out.weight", 1),), 2, width=3)


def scales(gate: gates.Gate, place: Place, closed: tuple[int, ...] = ()) -> Scales:
    torch.manual_seed(place.count)
    own = {name: value + 0.3 * torch.randn(value.shape) for name, value in gate.start(place.count).items()}
    if isinstance(gate, gates.NormalJeffreys):
        own["log_std"] = torch.full((place.count,), -1.0)
        own["mean"][list(closed)] = 0.0
    return Scales(gate, place, own, torch.zeros(place.count, dtype=torch.bool))


def posterior(closed: tuple[int, ...] = (), gate: gates.Gate | None = None) -> Gated:
    gate = gate or gates.NormalJeffreys()
    torch.manual_seed(1)
    mean = {"fc.weight": torch.randn(3, 4), "fc.bias": torch.randn(3), "out.weight": torch.randn(2, 6)}
    std = {"fc.weight": torch.rand(3, 4), "fc.bias": torch.zeros(3), "out.weight": torch.rand(2, 6)}
    places = scales(gate, COLUMNS, closed), scales(gate, ROWS), scales(gate, HEADS)
    return Gated(Diagonal(mean, std), places)


@pytest.mark.parametrize("gate", [gates.NormalJeffreys(), gates.TruncatedLogNormal(threshold=0.0), gates.Bernoulli()])
def test_moments_are_those_of_draws(gate):
    q = posterior(gate=gate)
    draws = q.sample(200_000, generator=torch.Generator().manual_seed(0))
    for name, mean in q.mean.items():
        assert draws[name].shape == (200_000, *mean.shape)
        spread = draws[name].std(0)
        assert ((draws[name].mean(0) - mean).abs() <= 5 * spread / 200_000**0.5 + 1e-6).all(), name
        torch.testing.assert_close(spread.square(), q.variance[name], rtol=0.08, atol=1e-6)


def test_the_variance_of_hard_concrete_gates_is_that_of_draws_though_their_fixed_scale_is_another():
    q = posterior(gate=gates.HardConcrete(initial_rate=0.4))
    draws = q.sample(200_000, generator=torch.Generator().manual_seed(0))
    for name, variance in q.variance.items():
        torch.testing.assert_close(draws[name].var(0), variance, rtol=0.03, atol=1e-6)
    assert not torch.allclose(draws["fc.weight"].mean(0), q.mean["fc.weight"], rtol=0.03)


def test_weights_that_share_a_scale_go_together():
    draws = posterior().sample(20_000, generator=torch.Generator().manual_seed(0))["out.weight"]
    signs = posterior().mean["out.weight"][0].sign()
    together = torch.corrcoef((draws[:, 0] * signs).T)
    assert together[0, 1] > 0.05
    assert together[0, 3].abs() < 0.05


def test_closed_gates_are_exactly_zero():
    q = posterior(closed=(1, 2))
    assert q.scales[0].closed.tolist() == [False, True, True, False]
    for values in (q.mean, q.variance, q.sample(), q.marginals().std):
        assert not values["fc.weight"][:, [1, 2]].any()
        assert values["fc.weight"][:, [0, 3]].all()
    assert "of 9 gates open" in repr(q)


def test_opened_it_is_as_it_was_trained():
    q = posterior(closed=(1, 2)).condition({"out.weight": torch.arange(12).view(2, 6) % 6 > 2}).opened()
    draws = q.sample(100_000, generator=torch.Generator().manual_seed(0))
    assert q.scales[2].closed.tolist() == [True, False]
    for name, mean in q.mean.items():
        spread = draws[name].std(0)
        assert ((draws[name].mean(0) - mean).abs() <= 5 * spread / 100_000**0.5 + 1e-6).all(), name
        torch.testing.assert_close(spread.square(), q.variance[name], rtol=0.08, atol=1e-6)
    assert q.variance["fc.weight"].all()


def test_centred_scales_do_not_multiply():
    gate = gates.HalfCauchy(centred=True)
    q = posterior(gate=gate)
    torch.testing.assert_close(q.mean, q.base.mean)
    torch.testing.assert_close(q.variance, q.base.variance)
    seed = torch.Generator().manual_seed(3)
    again = torch.Generator().manual_seed(3)
    torch.testing.assert_close(q.sample(generator=seed), q.base.sample(generator=again))


def test_conditioning_masks_weights_and_closes_empty_gates():
    q = posterior()
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[:, 0] = mask[1] = False
    cut = q.condition({"fc.weight": mask})
    assert cut.scales[0].cut.tolist() == [True, False, False, False]
    assert not cut.scales[1].cut.any()  # its bias is left
    assert not cut.mean["fc.weight"][~mask].any()
    torch.testing.assert_close(cut.mean["fc.weight"][mask], q.mean["fc.weight"][mask])
    torch.testing.assert_close(cut.variance["fc.weight"][mask], q.variance["fc.weight"][mask])
    with_bias = q.condition({"fc.weight": mask, "fc.bias": torch.tensor([True, False, True])})
    assert with_bias.scales[1].cut.tolist() == [False, True, False]
    with pytest.raises(ShapeMismatch, match="must have its shape"):
        q.condition({"fc.weight": mask[:2]})


def test_biases_go_with_the_closed_gate_of_all_their_weights():
    q = posterior()
    q.scales[1].own["mean"][1] = 0.0
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[0] = False
    assert q.silenced({"fc.weight": mask}) == {}  # its weights are gone, its gate is open
    mask[1] = False
    assert q.silenced({"fc.weight": mask})["fc.bias"].tolist() == [True, False, True]


def test_it_has_no_density_and_says_so():
    with pytest.raises(BayeslimError, match="no closed form"):
        posterior().log_prob(posterior().mean)


@pytest.mark.parametrize("gate", [one() for one in all_registered("gate").values()], ids=lambda gate: gate.name)
def test_it_is_built_again_from_its_tensors(gate):
    q = posterior(gate=gate).condition({"out.weight": torch.arange(12).view(2, 6) > 7})
    settings: dict[str, torch.Tensor] = {}
    config = decode(encode(q.config(), settings), settings)
    again = registered("posterior", q.kind).restore(config, q.tensors())
    assert isinstance(again, Gated)
    assert again.names == q.names
    draws = [one.sample(2, generator=torch.Generator().manual_seed(0)) for one in (q, again)]
    assert all(torch.equal(draws[0][name], draws[1][name]) for name in q.names)
    torch.testing.assert_close(again.variance, q.variance)
