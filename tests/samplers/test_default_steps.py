"""Without a learning rate, chains on minibatches have the width of the posterior."""

from __future__ import annotations

import pytest
import torch
from interruptions import Stop
from minibatches import batches, sampled, variance_over_exact

import bayeslim as bl

EPOCHS = 60
METHODS = {"sgld": bl.SGLD(samples=40), "sghmc": bl.SGHMC(samples=40), "sgnht": bl.SGNHT(samples=40)}
USUAL = {"sgld": 0.1, "sghmc": 0.03, "sgnht": 0.03}


@pytest.mark.parametrize(("name", "replacement"), [("sgld", True), ("sghmc", True), ("sgnht", False)])
def test_the_variance_is_that_of_the_posterior(name, replacement):
    """At the usual rates it is 1.5 (sgld) and 2.5 (sghmc) with replacement, 0.67 (sgnht) in shuffled epochs."""
    bnn, result = sampled(METHODS[name], batches(replacement), epochs=EPOCHS)
    assert variance_over_exact(bnn) == pytest.approx(1.0, abs=0.2)
    assert result.details["minibatch_excess"] == [pytest.approx(0.05)]


@pytest.mark.parametrize("name", ["sgld", "sghmc"])
def test_the_excess_of_a_rate_that_is_given_is_foretold(name):
    bnn, result = sampled(METHODS[name], batches(replacement=True), epochs=EPOCHS, lr=USUAL[name])
    (excess,) = result.details["minibatch_excess"]
    assert excess > 0.3
    # all rows see the same batches, so that this is one draw of their noise
    assert variance_over_exact(bnn) == pytest.approx(1 + excess, rel=0.35)


def test_on_all_the_data_the_rate_is_the_usual_one():
    bnn, result = sampled(bl.SGLD(samples=5), [next(iter(batches()))], epochs=40)
    assert result.details["minibatch_excess"][0] < 0.02
    assert bnn.posterior_.count == 5


def test_a_rate_is_not_chosen_where_one_is_given():
    _, result = sampled(bl.SGHMC(samples=2), batches(), epochs=8, lr=0.03)
    assert result.details["minibatch_excess"][0] > 0.5


@pytest.mark.parametrize(("name", "stopped"), [("sgld", 2), ("sghmc", 3), ("sghmc", 5), ("sgnht", 9)])
def test_a_chosen_rate_is_resumed_exactly(name, stopped, tmp_path):
    """Before, in, and after the measurement of gradient noise, which is in epochs 2 to 4 of 12."""

    def stop(epoch):
        if epoch.number == stopped:
            raise Stop

    whole, _ = sampled(METHODS[name], batches(), epochs=12)
    with pytest.raises(Stop):
        sampled(METHODS[name], batches(), epochs=12, checkpoint=tmp_path, callbacks=[stop])
    resumed, _ = sampled(METHODS[name], batches(), epochs=12, checkpoint=tmp_path)
    assert torch.equal(whole.posterior_.values["weight"], resumed.posterior_.values["weight"])
