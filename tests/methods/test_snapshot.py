"""Snapshot ensembles: the schedule, when networks are kept, exact resume."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.errors import BayeslimError

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def bayesian(method: bl.Method) -> bl.Bayesian:
    torch.manual_seed(0)
    return bl.bayesianize(network(), method, likelihood=bl.likelihoods.Categorical())


def loader() -> bl.data.Loader:
    return bl.data.Loader(X, Y, batch_size=20)


def test_the_schedule_is_the_papers():
    method, steps = bl.Snapshot(cycles=7), 7 * 12
    for t in range(steps):
        expected = 0.5 * (math.cos(math.pi * (t % 12) / 12) + 1)
        assert method.factor(t / steps) == pytest.approx(expected, abs=1e-7)
    assert bl.Snapshot(cycles=49).factor(1 / 49) == 1


def test_a_network_is_kept_at_the_end_of_each_cycle():
    bnn, seen, rates = bayesian(bl.Snapshot(cycles=3, burn_in=1)), {}, []
    optimizer = torch.optim.SGD(bnn.parameters(), lr=0.2)
    optimizer.register_step_pre_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))

    def watch(epoch):
        seen[epoch.number] = {name: value.clone() for name, value in epoch.bnn.model.state_dict().items()}

    bnn.fit(loader(), epochs=6, optimizer=optimizer, callbacks=[watch], progress=False)
    q = bnn.posterior_
    assert q.count == 2
    for particle, epoch in ((0, 4), (1, 6)):
        tensors = q.particle(particle) | q.buffers_of(particle)
        assert tensors.keys() == seen[epoch].keys()
        assert all(torch.equal(tensors[name], seen[epoch][name]) for name in tensors)
    assert rates == pytest.approx([0.2 * 0.5 * (1 + math.cos(math.pi * (t % 6) / 6)) for t in range(18)], abs=1e-7)
    assert all(torch.equal(seen[6][name], value) for name, value in bnn.model.state_dict().items())


@pytest.mark.parametrize("stop_after", [1, 2, 3, 5])
def test_resume_is_exact(stop_after, tmp_path):
    options = {"epochs": 6, "lr": 0.05, "seed": 2, "progress": False}
    whole = bayesian(bl.Snapshot(cycles=3))
    whole.fit(loader(), **options)

    class Stop(Exception):
        pass

    def stop(epoch):
        if epoch.number > stop_after:
            raise Stop

    with pytest.raises(Stop):
        bayesian(bl.Snapshot(cycles=3)).fit(loader(), checkpoint=tmp_path, callbacks=[stop], **options)
    again = bayesian(bl.Snapshot(cycles=3))
    result = again.fit(loader(), checkpoint=tmp_path, **options)
    assert result.resumed_from == stop_after
    first, second = whole.posterior_.tensors(), again.posterior_.tensors()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    finished = bayesian(bl.Snapshot(cycles=3))
    finished.fit(loader(), checkpoint=tmp_path, **options)
    assert all(torch.equal(first[name], t) for name, t in finished.posterior_.tensors().items())


def test_stopped_before_the_first_cycle_there_is_nothing():
    def stop(epoch):
        epoch.stop = "enough"

    bnn = bayesian(bl.Snapshot(cycles=2))
    with pytest.raises(BayeslimError, match=r"stopped \(enough\) before the end of the first"):
        bnn.fit(loader(), epochs=4, callbacks=[stop], progress=False)
    assert "posterior" not in bnn.state


def test_one_epoch_a_cycle_if_not_said():
    bnn = bayesian(bl.Snapshot(cycles=3))
    assert len(bnn.fit(loader(), progress=False).history) == 3
    assert bnn.posterior_.count == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 4}, "a multiple of 3 epochs. Got epochs=4"),
        ({"epochs": 0}, "at least 1"),
        ({"lr_schedule": "cosine"}, "takes no lr_schedule"),
        ({"patience": 2}, "takes no patience"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        bayesian(bl.Snapshot(cycles=3)).fit(loader(), **options)


@pytest.mark.parametrize(("cycles", "burn_in"), [(0, 0), (3, 3), (3, -1), (1.5, 0)])
def test_bad_settings_are_refused(cycles, burn_in):
    with pytest.raises(ValueError, match=r"cycles"):
        bl.Snapshot(cycles, burn_in)
