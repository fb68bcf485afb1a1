"""`torch.compile(fullgraph=True)` of the objective gives the loss and gradients of the plain call.

Recurrent layers are left out: Dynamo itself does not trace them.
"""

from __future__ import annotations

import pytest
import torch
from foreign_networks import CASES
from method_table import A_THIRD, METHODS
from torch._dynamo.testing import CompileCounter

import bayeslim as bl
from bayeslim.train.schedules import Blundell, Cyclic, Position, Uniform, Warmup

# Dynamo makes an object of every autograd function that it traces, and warns of that itself.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

NETWORKS = ("batchnorm", "embedding", "cells", "cross-attention", "transformer", "tied", "run-and-read", "weight-norm",
            "dict")  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def problem(network: str, method: bl.Method) -> tuple[bl.Bayesian, tuple]:
    case = CASES[network]
    likelihood = bl.likelihoods.Gaussian(1.0)
    bnn = bl.bayesianize(case.build(), method, likelihood=likelihood, sites=case.sites, num_data=10)
    inputs = case.inputs()
    return bnn, (inputs, torch.randn_like(bnn(inputs)))


def loss_and_gradients(objective, bnn: bl.Bayesian, batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    bnn.zero_grad()
    torch.manual_seed(11)
    loss = objective(batch)
    loss.backward()
    return loss.detach(), [p.grad for p in bnn.parameters()]


def assert_compiled_agrees(objective, bnn: bl.Bayesian, batch) -> None:
    compiled = loss_and_gradients(objective, bnn, batch)
    terms = bnn.terms
    torch.testing.assert_close(compiled, loss_and_gradients(bnn.objective, bnn, batch))
    torch.testing.assert_close(terms.nll + terms.kl / 10, compiled[0])


@pytest.mark.parametrize("network", NETWORKS)
def test_networks(network):
    bnn, batch = problem(network, bl.Variational())
    assert_compiled_agrees(torch.compile(bnn.objective, fullgraph=True, backend="eager"), bnn, batch)


def weights_of_steps(objective, bnn: bl.Bayesian, batch, steps: int) -> list[float]:
    """Train for a few steps; return the KL's weight in each."""
    optimizer = bnn.optimizer(lr=1e-3, steps_per_epoch=4)
    weights = []
    for _ in range(steps):
        optimizer.zero_grad()
        objective(batch).backward()
        weights.append(float(bnn.terms.kl_weight))
        optimizer.step()
    return weights


@pytest.mark.parametrize("method", A_THIRD)
def test_methods_agree_and_are_compiled_once_for_all_steps(method):
    """Once more for what a method finds out in its first step; not for every step, which would be refused soon."""
    bnn, batch = problem("mlp-all", METHODS[method]())
    counter = CompileCounter()
    objective = torch.compile(bnn.objective, fullgraph=True, backend=counter)
    assert_compiled_agrees(objective, bnn, batch)
    weights_of_steps(objective, bnn, batch, torch._dynamo.config.recompile_limit + 2)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("schedule", [Uniform(), Blundell(), Warmup(2.0), Cyclic(1.0)], ids=lambda s: type(s).__name__)
def test_a_compiled_loss_follows_its_schedule(schedule):
    bnn, batch = problem("mlp", bl.Variational(kl_schedule=schedule))
    counter = CompileCounter()
    objective = torch.compile(bnn.objective, fullgraph=True, backend=counter)
    weights = weights_of_steps(objective, bnn, batch, 10)
    assert counter.frame_count == 1
    assert weights == [schedule.weight(Position(step, 4)) for step in range(10)]


def test_compiling_before_the_first_call_draws_whole_weights_until_then():
    case = CASES["mlp"]
    bnn = bl.bayesianize(case.build(), bl.Variational(), likelihood=bl.likelihoods.Gaussian(1.0), num_data=10)
    batch = case.inputs(), torch.randn(2, 3)
    objective = torch.compile(bnn.objective, fullgraph=True, backend="eager")
    loss, gradients = loss_and_gradients(objective, bnn, batch)
    assert torch.isfinite(loss)
    assert all(g.abs().sum() > 0 for g in gradients)
    plain = loss_and_gradients(bnn.objective, bnn, batch)
    assert bnn.state["noisy"] == ["0", "2"]
    torch.testing.assert_close(loss_and_gradients(objective, bnn, batch), plain)


def test_a_traced_backward_pass():
    """As inductor makes it; it draws other random numbers than a plain call."""
    bnn, batch = problem("mlp", bl.Variational())
    objective = torch.compile(bnn.objective, fullgraph=True, backend="aot_eager")
    loss, gradients = loss_and_gradients(objective, bnn, batch)
    assert torch.isfinite(loss)
    assert all(torch.isfinite(g).all() and g.abs().sum() > 0 for g in gradients)
