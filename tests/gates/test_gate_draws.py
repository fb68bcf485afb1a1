"""Draws follow the distribution they are said to, and carry the gradients of expectations."""

from __future__ import annotations

import gate_oracles as oracles
import numpy as np
import pytest
import torch
from scipy import stats

from bayeslim import gates

CASES = pytest.mark.parametrize(("gate", "at"), oracles.ORDINARY, ids=oracles.NAMES)


@CASES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_follow_their_distribution(gate, at, dtype):
    with torch.no_grad():
        z = gate.draw(oracles.parameters(gate, at, 2, dtype), (20_000,))
    assert z.shape == (20_000, 2)
    assert z.dtype == dtype
    reference = oracles.quantile(gate, at, oracles.GRID)
    for column in z.double().numpy().T:
        rounded = (np.round(values, 5) for values in (column, reference))  # atoms of 0 and 1 are equal in both
        assert stats.ks_2samp(*rounded, method="asymp").pvalue > 1e-3


@CASES
def test_means_and_variances(gate, at):
    if gate == gates.Bernoulli(learn="concrete"):
        gate = gates.Bernoulli(learn="reinforce")  # of which the other is a relaxation
    own = oracles.parameters(gate, at)
    mean = oracles.expectation(lambda z: z, gate, at)
    variance = oracles.expectation(lambda z: (z - mean) ** 2, gate, at)
    assert gate.mean(own).item() == pytest.approx(mean, rel=1e-4)
    assert gate.variance(own).item() == pytest.approx(variance, rel=1e-3)


def test_a_relaxed_draw_is_close_to_binary():
    gate, at = gates.Bernoulli(learn="concrete", temperature=0.02), {"logit": -1.0}
    own = oracles.parameters(gate, at)
    z = gate.draw(own, (50_000,)).detach()
    assert z.mean().item() == pytest.approx(1, abs=0.02)
    assert z.var().item() == pytest.approx(gate.variance(own).item(), rel=0.04)


def some_loss(z):
    """Neither monotone nor even."""
    xp = torch if isinstance(z, torch.Tensor) else np
    return xp.sin(2 * z) + z**2


@CASES
def test_gradients_of_expectations_against_finite_differences(gate, at):
    batches, size = 24, 4_000
    jumps = gate.has_surrogate or isinstance(gate, gates.HardConcrete)  # in the quantile function, or its slope
    step, accuracy = (0.05, 0.01) if jumps else (1e-4, 1e-3)
    own = oracles.parameters(gate, at)
    gradients = {name: [] for name in at}
    for _ in range(batches):
        z = gate.draw(own, (size,))
        losses = some_loss(z).squeeze(-1)
        loss = losses.mean()
        if gate.has_surrogate:
            loss = loss + gate.surrogate(own, z, losses)
        found = torch.autograd.grad(loss, list(own.values()))
        for name, gradient in zip(own, found, strict=True):
            gradients[name].append(gradient.item())
    for name, values in gradients.items():
        low, high = (oracles.expectation(some_loss, gate, at | {name: at[name] + d}) for d in (-step, step))
        error = np.std(values) / np.sqrt(batches)
        wanted = (high - low) / (2 * step)
        assert np.mean(values) == pytest.approx(wanted, abs=4 * error + accuracy * abs(wanted))


def test_gates_of_a_layer_share_its_scale():
    gate = gates.HalfCauchy()
    own = oracles.parameters(gate, oracles.half_cauchy(0, 0, 0, 0, -1.0, -1.0, -0.5, -0.7), 2)
    logs = gate.draw(own, (50_000,)).detach().log()
    layer, each = np.exp(-1.0) + np.exp(-1.4), 2 * np.exp(-2.0)
    assert np.corrcoef(logs.numpy().T)[0, 1] == pytest.approx(layer / (layer + each), abs=0.01)


@CASES
def test_draws_repeat_and_differ(gate, at):
    own = oracles.parameters(gate, at, 300)
    first = gate.draw(own, (2, 3))
    torch.manual_seed(0)
    again = gate.draw(own, (2, 3))
    assert first.shape == (2, 3, 300)
    assert torch.equal(first, again) == (torch.initial_seed() == 0)
    assert not torch.equal(first[0, 0], first[1, 0])
    assert not torch.equal(first[0, 0], first[0, 1])
    assert gate.draw(own, ()).shape == (300,)
