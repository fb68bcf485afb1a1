"""Dropout: its noise, and the rate learned by the score function and by relaxation."""

from __future__ import annotations

import itertools

import pytest
import torch

from bayeslim import gates
from bayeslim.noise import standard_normal

LOGIT = torch.tensor([-0.8, 0.3, 1.1], dtype=torch.float64)


def loss(z):
    """Of one example, not additive in the gates."""
    a, b, c = z.unbind(-1)
    return (1 + a - 0.5 * b * c) ** 2 + torch.sin(a * c) + 3


def exact_gradient():
    """Of the expected loss, over all eight masks."""
    logit = LOGIT.clone().requires_grad_()
    drop = torch.sigmoid(logit)
    total = torch.zeros((), dtype=torch.float64)
    for mask in itertools.product([0.0, 1.0], repeat=3):
        m = torch.tensor(mask, dtype=torch.float64)
        total = total + torch.where(m > 0, 1 - drop, drop).prod() * loss(m / (1 - drop))
    return torch.autograd.grad(total, logit)[0]


def estimates(gate, draws: int, repeats: int, offset: float = 0.0):
    def once(logit):
        own = {"logit": logit}
        z = gate.draw(own, (draws,))
        losses = loss(z) + offset
        return losses.mean() + gate.surrogate(own, z, losses)

    return torch.vmap(torch.func.grad(once), randomness="different")(LOGIT.expand(repeats, 3))


@pytest.mark.parametrize("draws", [1, 2, 16])
def test_reinforce_is_unbiased(draws):
    repeats = 100_000 // draws
    found = estimates(gates.Bernoulli(learn="reinforce"), draws, repeats)
    error = found.std(0) / repeats**0.5
    assert ((found.mean(0) - exact_gradient()).abs() < 4 * error).all()
    assert (error < 0.02 * exact_gradient().abs().max()).all()


def test_a_baseline_makes_up_for_the_level_of_the_loss():
    gate = gates.Bernoulli(learn="reinforce")
    alone, together = (estimates(gate, draws, 8_000, offset=30.0).var(0) for draws in (1, 16))
    assert (16 * together < 0.25 * alone).all()


def test_the_surrogate_has_the_value_zero():
    gate = gates.Bernoulli(learn="reinforce")
    own = {"logit": LOGIT.clone().requires_grad_()}
    z = gate.draw(own, (4,))
    assert gate.surrogate(own, z, loss(z)).item() == 0


def test_without_the_surrogate_the_gradient_is_wrong():
    gate = gates.Bernoulli(learn="reinforce")
    own = {"logit": LOGIT.clone().requires_grad_()}
    through_draws = torch.autograd.grad(loss(gate.draw(own, (100_000,))).mean(), own["logit"])[0]
    assert ((through_draws - exact_gradient()).abs() > 0.1).any()
    assert gate.has_surrogate


def test_the_relaxation_comes_close_to_the_same_gradient():
    gate = gates.Bernoulli(learn="concrete", temperature=0.1)
    own = {"logit": LOGIT.clone().requires_grad_()}
    assert gate.surrogate(own, gate.draw(own, (2,)), torch.ones(2)) is None
    relaxed = torch.autograd.grad(loss(gate.draw(own, (400_000,))).mean(), own["logit"])[0]
    torch.testing.assert_close(relaxed, exact_gradient(), atol=0.25, rtol=0.1)


@pytest.mark.parametrize("drop", [0.05, 0.3, 0.5, 0.8])
def test_binary_and_gaussian_noise_have_the_variance_alpha(drop):
    """α = p/(1 − p), with p the probability of dropping."""
    alpha = drop / (1 - drop)
    gate = gates.Bernoulli(rate=drop)
    own = {name: value.double() for name, value in gate.start(1).items()}
    assert gate.variance(own).item() == pytest.approx(alpha)
    binary = gate.draw(own, (200_000,))
    gaussian = 1 + alpha**0.5 * standard_normal((200_000,), dtype=torch.float64)
    for noise in (binary, gaussian):
        assert noise.mean().item() == pytest.approx(1, abs=5 * (alpha / 200_000) ** 0.5)
        assert noise.var().item() == pytest.approx(alpha, rel=0.05)
    assert binary.unique().tolist() == [0.0, pytest.approx(1 / (1 - drop))]
    assert (binary == 0).double().mean().item() == pytest.approx(drop, abs=0.01)


def test_a_fixed_rate_stays_and_closes_nothing():
    gate = gates.Bernoulli(rate=0.99)
    own = {name: value.requires_grad_() for name, value in gate.start(4).items()}
    gradient = torch.autograd.grad(gate.kl(own) + gate.draw(own, (9,)).sum(), own["logit"])[0]
    assert torch.equal(gradient, torch.zeros(4))
    assert gate.opened(own).all()
    assert not gates.Bernoulli(rate=0.99, learn="concrete").opened(own).any()
