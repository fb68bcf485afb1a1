"""SWA, SWAG and MultiSWAG against their definitions on a recorded trajectory; batch norms, resume, schedules."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayeslim as bl
from bayeslim.errors import BayeslimError, NotFitted
from bayeslim.methods.shared.averaging import Averaging
from bayeslim.posteriors import Diagonal, LowRankCovariance, Particles

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()


def network(norm: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5) if norm else nn.Identity(), nn.Tanh(), nn.Linear(5, 2))


def bayesian(method: bl.Method, norm: bool = False, **options) -> bl.Bayesian:
    torch.manual_seed(0)
    return bl.bayesianize(network(norm), method, likelihood=bl.likelihoods.Categorical(), **options)


def loader() -> bl.data.Loader:
    return bl.data.Loader(X, Y, batch_size=20)


def recorded(method: bl.Method, epochs: int, **options) -> tuple[bl.Bayesian, list[torch.Tensor], list[float]]:
    """A fitted network, the weights after each of its steps as vectors, and the learning rates."""
    bnn, seen, rates = bayesian(method, **options), [], []
    optimizer = torch.optim.SGD(bnn.parameters(), lr=0.5)

    def after(o, *_):
        seen.append(torch.cat([bnn.model.get_parameter(n).detach().flatten() for n in bnn.sites.names]).double())
        rates.append(o.param_groups[0]["lr"])

    optimizer.register_step_post_hook(after)
    bnn.fit(loader(), epochs=epochs, optimizer=optimizer, progress=False)
    return bnn, seen, rates


def flat(params) -> torch.Tensor:
    return torch.cat([value.double().flatten() for value in params.values()])


@pytest.mark.parametrize(("every", "rank"), [("epoch", 20), (2, 4), (1, 20)])
def test_moments_are_those_of_the_recorded_trajectory(every, rank):
    bnn, seen, _ = recorded(bl.SWAG(rank=rank, start=0.5, every=every), epochs=8)
    stride = 3 if every == "epoch" else every
    taken = torch.stack([seen[step - 1] for step in range(1, 25) if step > 12 and step % stride == 0])
    q = bnn.posterior_
    assert isinstance(q, LowRankCovariance)
    torch.testing.assert_close(flat(q.mean), taken.mean(0), atol=1e-6, rtol=1e-5)
    variance = taken.square().mean(0) - taken.mean(0).square()
    torch.testing.assert_close(flat(q.own_std).square(), 0.5 * variance, atol=1e-8, rtol=1e-4)
    deviations = torch.stack([taken[i] - taken[: i + 1].mean(0) for i in range(len(taken))])[-rank:]
    expected = (0.5 / (len(deviations) - 1)) ** 0.5 * deviations
    torch.testing.assert_close(q.directions, expected, atol=1e-6, rtol=1e-4)
    for name, value in q.mean.items():
        assert torch.equal(bnn.model.get_parameter(name), value)


def test_draws_have_the_papers_covariance():
    """½ (Σ_diag + D Dᵀ / (K − 1)), from the equation for a draw; a variance in place of a deviation would fail."""
    bnn, seen, _ = recorded(bl.SWAG(rank=3, start=0.0, every=1), epochs=2, sites="3.weight")
    taken = torch.stack(seen)
    deviations = torch.stack([taken[i] - taken[: i + 1].mean(0) for i in range(len(taken))])[-3:]
    covariance = 0.5 * (taken.var(0, correction=0).diag() + deviations.T @ deviations / 2)
    draws = flat_draws(bnn.posterior_.sample(200_000, generator=torch.Generator().manual_seed(0)))
    error = draws.T.cov() - covariance
    spread = covariance.diag().sqrt()
    assert (error / spread.outer(spread)).abs().max() < 0.015


def flat_draws(params) -> torch.Tensor:
    return torch.cat([value.double().flatten(1) for value in params.values()], 1)


def test_rank_zero_is_the_diagonal_alone():
    bnn, seen, _ = recorded(bl.SWAG(rank=0, start=0.5, every=1, scale=1.0), epochs=4)
    q, taken = bnn.posterior_, torch.stack(seen[6:])
    assert isinstance(q, Diagonal)
    torch.testing.assert_close(flat(q.variance), taken.var(0, correction=0), atol=1e-8, rtol=1e-4)


def test_swa_is_the_mean_and_trains_points_along():
    bnn, seen, _ = recorded(bl.SWA(start=0.5), epochs=6, sites="weights")
    expected = torch.stack([seen[step - 1] for step in (12, 15, 18)]).mean(0)
    torch.testing.assert_close(flat(bnn.posterior_.mean), expected, atol=1e-6, rtol=1e-5)
    assert bnn.posterior_.count == 1
    assert bl.predict(bnn, X).samples.shape[0] == 1


def test_batch_norms_are_measured_for_the_weights_they_stand_among():
    bnn = bayesian(bl.SWAG(start=0.0, every=1, samples=4), norm=True)
    data = DataLoader(TensorDataset(X, Y), batch_size=20)
    bnn.fit(data, epochs=4, lr=0.05, seed=0, progress=False)
    networks = bnn.state["networks"]
    assert networks.count == 4

    def statistics(params) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = [nn.functional.linear(x, params["0.weight"], params["0.bias"]) for x, _ in data]
        return torch.stack([h.mean(0) for h in hidden]).mean(0), torch.stack([h.var(0) for h in hidden]).mean(0)

    for k in range(4):
        mean, variance = statistics(networks.particle(k))
        buffers = networks.buffers_of(k)
        torch.testing.assert_close(buffers["1.running_mean"], mean, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(buffers["1.running_var"], variance, atol=1e-6, rtol=1e-4)
    mean, _ = statistics(bnn.posterior_.mean)
    torch.testing.assert_close(bnn.model[1].running_mean, mean, atol=1e-6, rtol=1e-4)
    assert bnn.model[1].momentum == 0.1
    assert bnn.model[1].training
    samples = bl.predict(bnn, X).samples
    assert samples.shape[0] == 4
    own = nn.Sequential(*network(norm=True)).eval()
    own.load_state_dict(networks.particle(2) | networks.buffers_of(2))
    torch.testing.assert_close(samples[2], own(X))


def test_networks_without_norms_are_drawn_anew():
    bnn, _, _ = recorded(bl.SWAG(start=0.0, every=1), epochs=2)
    first, second = (bl.predict(bnn, X, samples=3, generator=torch.Generator().manual_seed(s)).samples for s in (0, 1))
    assert "networks" not in bnn.state
    assert first.shape[0] == 3
    assert not torch.equal(first, second)


@pytest.mark.parametrize("norm", [False, True])
def test_a_pruned_network_predicts_trains_and_keeps_its_zeros(norm):
    bnn = bayesian(bl.SWAG(start=0.0, every=1, samples=2), norm=norm)
    bnn.fit(loader(), epochs=3, lr=0.05, seed=0, progress=False)
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.5))
    assert "networks" not in pruned.state
    assert ("networks" in bnn.state) == norm
    zeros = {name: ~mask for name, mask in pruned.masks.items()}
    assert all((pruned.posterior_.sample()[name][zero] == 0).all() for name, zero in zeros.items())
    pruned.fit(loader(), epochs=2, lr=0.05, progress=False)
    assert all((pruned.posterior_.sample()[name][zero] == 0).all() for name, zero in zeros.items())
    if norm:
        assert all((pruned.state["networks"].particle(0)[name][zero] == 0).all() for name, zero in zeros.items())
    assert torch.isfinite(bl.predict(pruned, X, samples=2).mean).all()


@pytest.mark.parametrize("method", [bl.SWAG(start=0.3, every=2, rank=3, samples=2), bl.SWA(start=0.3)])
@pytest.mark.parametrize("stop_after", [1, 3, 4])
def test_resume_is_exact(method, stop_after, tmp_path):
    options = {"epochs": 5, "lr": 0.05, "seed": 2, "progress": False}
    whole = bayesian(method, norm=True)
    whole.fit(loader(), **options)

    class Stop(Exception):
        pass

    def stop(epoch):
        if epoch.number > stop_after:
            raise Stop

    with pytest.raises(Stop):
        bayesian(method, norm=True).fit(loader(), checkpoint=tmp_path, callbacks=[stop], **options)
    for _ in range(2):  # from the middle, then from the end
        again = bayesian(method, norm=True)
        again.fit(loader(), checkpoint=tmp_path, **options)
        for key, posterior in whole.state.items():
            tensors = again.state[key].tensors()
            assert all(torch.equal(tensors[name], value) for name, value in posterior.tensors().items())


@pytest.mark.parametrize(
    "method",
    [
        bl.SWA(start=0.3),
        bl.SWAG(start=0.3, every=2, rank=3, samples=2),
        bl.MultiSWAG(members=2, start=0.3, every=2, samples=2),
    ],
    ids=lambda method: method.name,
)
@pytest.mark.parametrize("batches", [4, 12])  # within an epoch, and where one ends, at the step of its checkpoint
@pytest.mark.parametrize("fitted_before", [False, True])
def test_the_same_network_goes_on_where_it_was_interrupted(method, batches, fitted_before, tmp_path):
    options = {"epochs": 5, "lr": 0.05, "seed": 2, "progress": False}
    whole, cut = bayesian(method, norm=True), bayesian(method, norm=True)
    if fitted_before:
        for bnn in (whole, cut):
            bnn.fit(loader(), **options)
    whole.fit(loader(), **options)
    seen = []

    class Ending(bl.data.Loader):
        def _batches(self, epoch):
            for batch in super()._batches(epoch):
                if len(seen) == batches:
                    raise KeyboardInterrupt
                seen.append(batch)
                yield batch

    with pytest.raises(KeyboardInterrupt):
        cut.fit(Ending(X, Y, batch_size=20), checkpoint=tmp_path, **options)
    result = cut.fit(loader(), checkpoint=tmp_path, **options)
    assert result.resumed_from == batches // 3
    for key, posterior in whole.state.items():
        tensors = cut.state[key].tensors()
        assert all(torch.equal(tensors[name], value) for name, value in posterior.tensors().items())


def test_members_of_multi_swag_are_apart_and_resume(tmp_path):
    method = bl.MultiSWAG(members=2, samples=3, start=0.5, every=1)
    options = {"epochs": 4, "seed": 1, "progress": False}
    bnn = bayesian(method, norm=True)
    result = bnn.fit(loader(), optimizer=lambda p: torch.optim.SGD(p, 0.1), **options)
    q = bnn.posterior_
    assert isinstance(q, Particles)
    assert q.count == 6
    assert [epoch["member"] for epoch in result.history] == [1] * 4 + [2] * 4
    points = flat_draws(q.values)
    between = (points[:3].mean(0) - points[3:].mean(0)).norm()
    within = max((part - part.mean(0)).norm(dim=1).max() for part in (points[:3], points[3:]))
    assert between > 3 * within
    for _ in range(2):
        again = bayesian(method, norm=True)
        again.fit(loader(), optimizer=lambda p: torch.optim.SGD(p, 0.1), checkpoint=tmp_path, **options)
        assert all(torch.equal(again.posterior_.values[name], value) for name, value in q.values.items())


def test_the_learning_rate_comes_down_and_stays_high():
    _, _, rates = recorded(bl.SWA(start=0.5, rate=0.2), epochs=8)
    expected = [0.5 * (1 - 0.8 * min(1, max(0, (t / 12 - 0.5) / 0.4))) if t < 12 else 0.1 for t in range(24)]
    assert rates == pytest.approx(expected)


def test_cycles_end_low_where_networks_are_taken():
    method = bl.SWA(start=0.5, rate=1.0, schedule="cyclical")
    bnn, seen, rates = recorded(method, epochs=4)
    assert rates[6:] == pytest.approx([0.5 * (1 - 0.99 * phase / 3) for phase in (0, 1, 2)] * 2)
    torch.testing.assert_close(flat(bnn.posterior_.mean), (seen[8] + seen[11]) / 2, atol=1e-6, rtol=1e-5)


def test_no_spread_of_one_network_and_no_mean_of_none():
    with pytest.raises(BayeslimError, match="needs at least 2"):
        bayesian(bl.SWAG()).fit(loader(), epochs=1, progress=False)
    with pytest.raises(BayeslimError, match="needs at least 1"):
        bayesian(bl.SWA(every=1000)).fit(loader(), epochs=1, progress=False)


def test_a_failed_fit_leaves_the_posterior_that_was_there():
    bnn, _, _ = recorded(bl.SWAG(start=0.0, every=1), epochs=1)
    before = bnn.posterior_

    def fail(epoch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bnn.fit(loader(), epochs=1, callbacks=[fail], progress=False)
    assert bnn.posterior_ is before
    assert set(bnn.state) == {"posterior"}


def test_before_fit_there_is_none():
    with pytest.raises(NotFitted):
        bayesian(bl.SWAG()).posterior_  # noqa: B018


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start": 1.0}, "start is a fraction"),
        ({"every": 0}, "every must be"),
        ({"rate": 0.0}, "rate is a fraction"),
        ({"schedule": "wild"}, "schedule must be"),
        ({"rank": 1}, "rank must be 0"),
        ({"scale": 0.0}, "scale must be positive"),
        ({"samples": 0}, "samples must be"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        bl.SWAG(**settings)


@pytest.mark.parametrize("option", ["lr_schedule", "patience"])
def test_options_that_settings_decide_are_refused(option):
    with pytest.raises(ValueError, match=f"SWAG takes no {option}"):
        bayesian(bl.SWAG()).fit(loader(), **{option: 1})


def test_multi_swag_needs_an_optimizer_for_each_member():
    bnn = bayesian(bl.MultiSWAG())
    with pytest.raises(TypeError, match="its own optimizer"):
        bnn.fit(loader(), optimizer=torch.optim.SGD(bnn.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="members must be"):
        bl.MultiSWAG(members=0)


def test_settings_alone_do_not_make_a_method():
    assert not isinstance(Averaging(), bl.Method)
