"""A learned noise of several networks is the average of theirs, whatever way they were found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.likelihoods import Gaussian
from bayeslim.methods.shared.learned_noise import average_noise_, noise_of

X = torch.randn(40, 2, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True) + 0.3 * torch.randn(40, 1, generator=torch.Generator().manual_seed(2))
METHODS = {
    "chains": bl.SGLD(samples=2, chains=3),
    "multi-swag": bl.MultiSWAG(members=3, every=1, samples=2),
    "deep-ensemble": bl.DeepEnsemble(members=3),
    "snapshot": bl.Snapshot(cycles=3),
}


def fit(kind: str, **options) -> tuple[bl.Bayesian, list[float]]:
    """The network, and the log noise at the end of every member, chain or cycle."""
    torch.manual_seed(0)
    bnn = bl.bayesianize(nn.Linear(2, 1), METHODS[kind], likelihood=Gaussian("learned", initial_noise=1.0))
    seen: list[float] = []

    def watch(epoch):
        if epoch.number % (2 if kind == "snapshot" else 6) == 0:
            seen.append(float(epoch.bnn.likelihood.log_noise.detach()))

    rate = 1e-2 if kind == "chains" else 0.1
    bnn.fit(bl.data.Loader(X, Y, batch_size=20), epochs=6, lr=rate, seed=3, callbacks=[watch], **options)
    return bnn, seen


@pytest.mark.parametrize("kind", METHODS)
def test_it_is_the_average(kind, monkeypatch):
    of_members: list[float] = []
    if kind == "multi-swag":  # whose members have the mean of their own trajectory
        from bayeslim.methods import multi_swag

        def recorded(likelihood):
            of_members.append(float(likelihood.log_noise.detach()))
            return noise_of(likelihood)

        monkeypatch.setattr(multi_swag, "noise_of", recorded)
    bnn, seen = fit(kind)
    noises = of_members or seen
    assert len(noises) == 3
    assert max(noises) - min(noises) > 1e-3
    assert float(bnn.likelihood.log_noise.detach()) == pytest.approx(sum(noises) / 3, rel=1e-5)


def test_snapshots_that_are_resumed_have_the_same(tmp_path):
    whole, _ = fit("snapshot")

    class Interrupting:
        """Validation data that are not there after three epochs."""

        passes = 0

        def __iter__(self):
            self.passes += 1
            if self.passes == 4:
                raise KeyboardInterrupt
            return iter([(X, Y)])

    with pytest.raises(KeyboardInterrupt):
        fit("snapshot", checkpoint=tmp_path / "run", validate=Interrupting())
    resumed, _ = fit("snapshot", checkpoint=tmp_path / "run")
    assert torch.equal(resumed.likelihood.log_noise, whole.likelihood.log_noise)


def test_a_fixed_noise_stays():
    likelihood = Gaussian(0.3)
    average_noise_(likelihood, [noise_of(likelihood)] * 2, between_ranks=True)
    assert likelihood.noise == pytest.approx(0.3)
