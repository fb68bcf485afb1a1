"""Promises of every kind of gate: starts, scores, precisions, and finite gradients."""

from __future__ import annotations

import dataclasses
import itertools

import gate_oracles as oracles
import pytest
import torch

from bayeslim import gates
from bayeslim.io.registry import all_registered
from bayeslim.priors import Normal

EVERY = [
    gates.NormalJeffreys(),
    gates.NormalJeffreys(centred=True),
    gates.HalfCauchy(),
    gates.HalfCauchy(centred=True),
    gates.TruncatedLogNormal(),
    gates.HardConcrete(),
    gates.InformationBottleneck(),
    gates.Bernoulli(rate=0.2),
    gates.Bernoulli(rate=0.2, learn="concrete"),
    gates.Bernoulli(rate=0.2, learn="reinforce"),
]
ANY = pytest.mark.parametrize("gate", EVERY, ids=lambda gate: repr(gate).partition(", initial")[0])


def test_the_table_has_every_gate_once():
    assert {type(gate) for gate in EVERY} == set(all_registered("gate").values())
    assert all(gate.name == name for name, gate in all_registered("gate").items())


@ANY
def test_settings_are_plain_and_frozen(gate):
    assert type(gate)(**dataclasses.asdict(gate)) == gate
    with pytest.raises(dataclasses.FrozenInstanceError):
        gate.threshold = 2.0


@ANY
def test_starts_open_and_close_to_one(gate):
    own = gate.start(7)
    for name, value in own.items():
        assert value.dtype == torch.float32
        assert value.shape == ((1,) if name in gate.shared else (7,))
    assert gate.opened(own).all()
    assert gate.opened(own).dtype == torch.bool
    for values in (gate.mean(own), gate.variance(own), gate.score(own), gate.fixed(own)):
        assert values.shape == (7,)
    torch.testing.assert_close(gate.fixed(own), torch.ones(7), atol=0.05, rtol=0)
    assert gate.kl(own).shape == ()


EXTREMES = {
    "mean": [-1e6, -1.0, 0.0, 1e-30, 1.0, 1e6],
    "log_mean": [-1e3, -20.0, -1.0, 0.0, 2.0, 1e3],
    "log_std": [-30.0, -5.0, 0.0, 5.0, 30.0],
    "log_alpha": [-60.0, -5.0, 0.0, 5.0, 60.0],
    "logit": [-90.0, -5.0, 0.0, 5.0, 90.0],
}


def extremes(gate):
    """Everything that is far out, in all combinations; of the half-Cauchy's eight parameters, a few at a time."""
    start = {name: value[0].item() for name, value in gate.start(1).items()}
    if len(start) <= 2:
        yield from (dict(zip(start, at, strict=True)) for at in itertools.product(*(EXTREMES[name] for name in start)))
        return
    for mean, log_std in itertools.product([-80.0, -5.0, 0.0, 80.0], [-30.0, 0.0, 3.0, 30.0]):
        for moved in ("a", "b", "layer_a", "layer_b"):
            yield start | {f"{moved}_mean": mean, f"{moved}_log_std": log_std}


@ANY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite_at_the_extremes(gate, dtype):
    for at in extremes(gate):
        own = oracles.parameters(gate, at, 3, dtype)
        z = gate.draw(own, (50,))
        losses = z.sum(-1)
        mean, std, groups = torch.ones(3, 2, dtype=dtype), torch.ones(3, 2, dtype=dtype), torch.arange(3)[:, None]
        of_weights = gate.weight_kl(own, mean, std, groups, Normal(1.0))
        terms = {
            "draw": z.mean(),
            "kl": gate.kl(own),
            "surrogate": gate.surrogate(own, z, losses),
            "weights": of_weights,
        }
        for name, term in terms.items():
            if term is not None:
                gradients = torch.autograd.grad(term, list(own.values()), retain_graph=True, allow_unused=True)
                assert torch.isfinite(term), (name, at)
                assert all(g is None or torch.isfinite(g).all() for g in gradients), (name, at)
        assert not torch.isnan(gate.score(own)).any()
        for moments in (gate.mean(own), gate.variance(own), gate.fixed(own)):
            assert torch.isfinite(moments).all(), at
        assert (gate.variance(own) >= 0).all()


@ANY
def test_half_precision_is_computed_in_single(gate):
    own = {name: value.to(torch.bfloat16) for name, value in gate.start(5).items()}
    single = {name: value.float() for name, value in own.items()}
    for ask in (gate.mean, gate.variance, gate.score, gate.fixed, gate.kl):
        assert ask(own).dtype == torch.float32
        torch.testing.assert_close(ask(own), ask(single))
    torch.manual_seed(3)
    draws = gate.draw(own, (4,))
    torch.manual_seed(3)
    assert torch.equal(draws, gate.draw(single, (4,)))
    assert draws.dtype == torch.float32
    leaves = {name: value.requires_grad_() for name, value in own.items()}
    gradients = torch.autograd.grad(gate.kl(leaves) + gate.draw(leaves, (4,)).sum(), list(leaves.values()))
    assert all(g.dtype == torch.bfloat16 and torch.isfinite(g).all() for g in gradients)


@ANY
def test_single_precision_is_close_to_double(gate):
    for at in ({name: value[0].item() + 0.1 for name, value in gate.start(1).items()}, *extremes(gate)):
        if any(abs(value) > 25 for value in at.values()):
            continue
        single, double = (oracles.parameters(gate, at, 2, dtype) for dtype in (torch.float32, torch.float64))
        torch.testing.assert_close(gate.kl(single).double(), gate.kl(double), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gate.mean(single).double(), gate.mean(double), rtol=1e-4, atol=1e-6)
        for own in (single, double):
            assert (
                gate.mean(own).dtype == gate.kl(own).dtype == gate.draw(own, (2,)).dtype == own[next(iter(own))].dtype
            )


@ANY
def test_some_gates_of_many(gate):
    own = {
        n: v + (0 if n in gate.shared else 1) * torch.linspace(-0.5, 0.5, v.numel()) for n, v in gate.start(6).items()
    }
    kept = torch.tensor([True, False, True, True, False, False])
    few = gate.pick(own, kept)
    assert torch.equal(gate.mean(few), gate.mean(own)[kept])
    assert torch.equal(gate.score(few), gate.score(own)[kept])
    rest, none = gate.kl(gate.pick(own, ~kept)), gate.kl(gate.pick(own, torch.zeros(6, dtype=torch.bool)))
    torch.testing.assert_close(gate.kl(few) + rest - none, gate.kl(own))


CLOSING = [
    (gates.NormalJeffreys(), {"mean": torch.tensor([1.0, 0.1, 0.0]), "log_std": torch.tensor([-4.0, -4.0, -1.0])}),
    (
        gates.InformationBottleneck(),
        {"mean": torch.tensor([1.0, -0.1, 0.1]), "log_std": torch.tensor([-1.0, -3.0, 0.0])},
    ),
    (
        gates.TruncatedLogNormal(),
        {"log_mean": torch.tensor([0.0, -5.0, -3.0]), "log_std": torch.tensor([-5.0, -5.0, 2.0])},
    ),
    (gates.HardConcrete(), {"log_alpha": torch.tensor([3.0, -2.0, -2.5])}),
    (gates.Bernoulli(learn="concrete"), {"logit": torch.tensor([-1.0, 2.5, 3.5])}),
]


@pytest.mark.parametrize(("gate", "own"), CLOSING, ids=[type(gate).__name__ for gate, _ in CLOSING])
def test_gates_close_at_their_threshold(gate, own):
    """The last of the three is beyond it."""
    assert gate.opened(own).tolist() == [True, True, False]
    assert gate.fixed(own)[2] == 0
    assert (gate.fixed(own)[:2] > 0).tolist() == (gate.mean(own)[:2] > 0).tolist()
    score = gate.score(own)
    strict = dataclasses.replace(gate, threshold=score.max().item())
    assert not strict.opened(own).any()
    assert dataclasses.replace(gate, threshold=score.min().item() - 0.01).opened(own).all()


def test_scores_are_in_the_units_of_the_papers():
    gaussian = {"mean": torch.tensor([0.5]), "log_std": torch.tensor([-2.0])}
    log_alpha = -4.0 - torch.tensor(0.25).log()
    for gate in (gates.NormalJeffreys(), gates.InformationBottleneck()):
        torch.testing.assert_close(gate.score(gaussian), -log_alpha[None])
    at = oracles.half_cauchy(0.2, 0.4, -6.0, 0.6, -1.0, -1.0, -2.0, -2.0)
    gate = gates.HalfCauchy()
    own = oracles.parameters(gate, at)
    z = torch.linspace(0.001, 0.5, 200_000, dtype=torch.float64)
    variance = 0.5 * (torch.tensor(-2.0).exp() + torch.tensor(-4.0).exp()).double()
    density = -z.log() - (z.log() + 2.4).square() / (2 * variance)
    assert gate.score(own).item() == pytest.approx(z[density.argmax()].log().item(), abs=1e-3)
    assert not dataclasses.replace(gate, threshold=-2.0).opened(own)
    hard = gates.HardConcrete()
    own = {"log_alpha": torch.tensor([-5.0, 0.0, 5.0])}
    wanted = (torch.sigmoid(own["log_alpha"]) * 1.2 - 0.1).clamp(0, 1)
    torch.testing.assert_close(hard.fixed(own), wanted)
    assert hard.fixed(own)[0] == 0
    assert hard.fixed(own)[2] == 1


def test_centred_scales_do_not_multiply():
    gate = gates.HalfCauchy(centred=True)
    own = gate.start(2)
    own["b_mean"] = own["b_mean"] + torch.tensor([-0.5, -30.0])
    assert not gate.multiplies
    assert gates.HalfCauchy().multiplies
    assert gate.fixed(own).tolist() == [1.0, 0.0]
    assert gate.mean(own)[0] == pytest.approx(0.7788, rel=1e-3)
    flat = gates.NormalJeffreys(centred=True)
    own = flat.start(2)
    own["log_mean"] = own["log_mean"] + torch.tensor([-0.5, -4.0])
    assert not flat.multiplies
    assert gates.NormalJeffreys().multiplies
    assert flat.fixed(own).tolist() == [1.0, 0.0]


def test_thresholds_that_are_not_given_are_those_of_the_score():
    assert gates.NormalJeffreys().threshold == 0.0
    assert gates.NormalJeffreys(centred=True).threshold == -3.0
    assert gates.NormalJeffreys(centred=True, threshold=-1.0).threshold == -1.0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: gates.NormalJeffreys(initial_std=0.0), "initial_std must be a positive number. Got 0.0"),
        (lambda: gates.InformationBottleneck(strength=-1.0), "strength must be a positive number"),
        (lambda: gates.InformationBottleneck(per="unit"), 'per must be "gate", "weight" or "example"'),
        (lambda: gates.HardConcrete(per="layer"), 'per must be "gate", "weight" or "example"'),
        (lambda: gates.HalfCauchy(global_scale=float("inf")), "global_scale must be a finite number"),
        (lambda: gates.TruncatedLogNormal(log_low=1.0), "log_low must be below log_high. Got 1.0 and 0.0"),
        (lambda: gates.HardConcrete(cost=-1.0), "cost must not be negative"),
        (lambda: gates.HardConcrete(low=0.0), "must contain 0 and 1 in its inside"),
        (lambda: gates.HardConcrete(initial_rate=1.0), "initial_rate must be between 0 and 1"),
        (lambda: gates.Bernoulli(rate=0.0), "probability of dropping and must be between 0 and 1. Got 0.0"),
        (lambda: gates.Bernoulli(learn="gumbel"), 'learn must be None, "concrete" or "reinforce"'),
        (lambda: gates.Bernoulli(temperature=0.0), "temperature must be a positive number"),
    ],
)
def test_bad_settings_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
