"""Chains as methods: what is kept and where, resumed exactly, several modes, subsets."""

from __future__ import annotations

import pytest
import torch
from interruptions import Stop, cut_short
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayeslim as bl
from bayeslim.errors import BayeslimError, BayeslimWarning, CorruptFile, NoSiteMatched, UnsupportedModel
from bayeslim.methods.hmc import Journal
from bayeslim.methods.shared.full_batch import FullBatch
from bayeslim.methods.shared.moving import moving_weights
from bayeslim.methods.shared.sampling_schedule import SamplingSchedule
from bayeslim.samplers import Langevin, StochasticHamiltonian, read

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(24) % 3
METHODS = {
    "sgld": bl.SGLD(samples=4),
    "psgld-polynomial": bl.PSGLD(samples=4, schedule="polynomial"),
    "sghmc-chains": bl.SGHMC(samples=3, adapt=True, chains=2),
    "sgnht-cyclical": bl.SGNHT(samples=4, schedule="cyclical", cycles=2),
    "subnetwork": bl.SGHMC(samples=4, subset=bl.Subnetwork(7)),
}


def network(norm: bool = True) -> nn.Module:
    torch.manual_seed(3)
    middle = nn.BatchNorm1d(5) if norm else nn.Identity()
    return nn.Sequential(nn.Linear(4, 5), middle, nn.Tanh(), nn.Linear(5, 3))


def bayesian(method: bl.Method, model: nn.Module | None = None, **options) -> bl.Bayesian:
    options = {"likelihood": bl.likelihoods.Categorical()} | options
    return bl.bayesianize(network() if model is None else model, method, **options)


def loader() -> bl.data.Loader:
    return bl.data.Loader(X, Y, batch_size=8)


def fitted(method: bl.Method, model: nn.Module | None = None, **options) -> bl.Bayesian:
    bnn = bayesian(method, model)
    bnn.fit(loader(), **{"epochs": 4, "lr": 1e-2, "seed": 5} | options)
    return bnn


def assert_same(a: bl.posteriors.Particles, b: bl.posteriors.Particles) -> None:
    first, second = a.tensors(), b.tensors()
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def stop_in(number: int):
    def stop(epoch):
        if epoch.number == number:
            raise Stop

    return stop


@pytest.mark.parametrize("kind", METHODS)
def test_a_run_that_was_cut_short_goes_on_exactly(kind, tmp_path):
    method = METHODS[kind]
    whole = fitted(method)
    for epoch in (2, 3):
        with pytest.raises(Stop):
            fitted(method, checkpoint=tmp_path, callbacks=[stop_in(epoch)])
    resumed = bayesian(method)
    result = resumed.fit(loader(), epochs=4, lr=1e-2, seed=5, checkpoint=tmp_path)
    assert result.resumed_from > 0
    assert_same(whole.posterior_, resumed.posterior_)
    assert_same(whole.posterior_, read(tmp_path))
    assert whole.posterior_.chains == resumed.posterior_.chains == read(tmp_path).chains == method.chains


@pytest.mark.parametrize(("owner", "name", "calls"), [(FullBatch, "__call__", 40), (Journal, "write", 17)])
def test_hamiltonian_monte_carlo_goes_on_exactly(owner, name, calls, tmp_path, monkeypatch):
    """Cut short within trajectories; and in windows of the warm-up of both chains, and before the state of a draw."""
    method = bl.HMC(samples=6, warmup=22, leapfrog=4, chains=2)

    def run(**options):
        bnn = bayesian(method)
        return bnn, bnn.fit(loader(), epochs=2, lr=1e-2, seed=5, progress=False, **options)

    whole, result = run()
    for _ in range(3):
        with monkeypatch.context() as patch:
            cut_short(patch, owner, name, calls)
            with pytest.raises(Stop):
                run(checkpoint=tmp_path)
    resumed, again = run(checkpoint=tmp_path)
    assert_same(whole.posterior_, resumed.posterior_)
    assert_same(whole.posterior_, read(tmp_path))
    for key in ("acceptance", "divergences", "step_size", "energies"):
        assert result.details[key] == again.details[key]
    assert whole.step == resumed.step
    with pytest.raises(BayeslimError, match="another run"):
        bayesian(bl.HMC(samples=7, warmup=22, leapfrog=4)).fit(loader(), seed=5, checkpoint=tmp_path)
    file = next((tmp_path / "chain-001").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CorruptFile):
        run(checkpoint=tmp_path)


def test_another_run_does_not_go_on_from_it(tmp_path):
    fitted(bl.SGLD(samples=4), checkpoint=tmp_path)
    with pytest.raises(BayeslimError, match="another run"):
        fitted(bl.SGLD(samples=4, temperature=0.5), checkpoint=tmp_path)


def test_networks_are_there_as_soon_as_they_are_kept(tmp_path):
    with pytest.raises(Stop):
        fitted(bl.SGLD(samples=12, burn_in=0.0), checkpoint=tmp_path, callbacks=[stop_in(2)])
    found = read(tmp_path)
    whole = fitted(bl.SGLD(samples=12, burn_in=0.0))
    assert found.count == 6
    assert torch.equal(found.values["0.weight"], whole.posterior_.values["0.weight"][:6])
    file = next(tmp_path.glob("chain-001/samples/000000003/*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CorruptFile):
        read(tmp_path)
    with pytest.raises(FileNotFoundError, match="no networks"):
        read(tmp_path / "elsewhere")


def test_only_the_chosen_steps_are_kept_with_their_buffers():
    method = bl.SGLD(samples=3, burn_in=0.5)
    bnn, seen = bayesian(method), {}
    kept = method.time.kept(12, 3)

    def look(epoch):
        seen[bnn.step] = {name: value.clone() for name, value in bnn.model.state_dict().items()}

    bnn.fit(loader(), epochs=4, lr=1e-2, seed=5, callbacks=[look])
    assert kept == (8, 10, 12)
    last = bnn.posterior_.particle(2) | bnn.posterior_.buffers_of(2)
    assert last.keys() == bnn.model.state_dict().keys()
    assert all(torch.equal(value, seen[12][name]) for name, value in last.items())
    assert not torch.equal(bnn.posterior_.values["0.weight"][0], bnn.posterior_.values["0.weight"][1])
    assert "1.running_mean" in bnn.posterior_.buffers


def test_networks_are_kept_in_the_chosen_dtype_and_fill_no_more():
    bnn = fitted(bl.SGLD(samples=6), network(norm=False), dtype=torch.bfloat16)
    values = bnn.posterior_.values
    assert {value.dtype for value in values.values()} == {torch.bfloat16}
    size = sum(p.numel() for p in bnn.model.parameters())
    assert sum(value.untyped_storage().nbytes() for value in values.values()) == 2 * 6 * size
    assert bnn.model[0].weight.dtype == torch.float32
    assert torch.isfinite(bl.predict(bnn, X).mean).all()


class Squared(nn.Module):
    """w² is known, and w is one of two."""

    def __init__(self, start: Tensor):
        super().__init__()
        self.weight = nn.Parameter(start.clone())

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, -3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.square()


def modes(method: bl.Method, lr: float, count: int, epochs: int = 300) -> Tensor:
    """Return the last weights of a chain that started at one of the modes."""
    model = Squared(torch.full((count,), 2.0))
    bnn = bayesian(method, model, likelihood=bl.likelihoods.Gaussian(2.0))
    data = bl.data.Loader(torch.ones(10, 1), torch.full((10, count), 4.0), batch_size=10)
    bnn.fit(data, epochs=epochs, lr=lr, seed=2)
    return bnn.posterior_.values["weight"]


def test_one_chain_stays_in_its_mode():
    found = modes(bl.SGLD(samples=1), 0.01, 100)
    assert (found > 0).all()
    assert found.mean().item() == pytest.approx(2, abs=0.15)


def test_cycles_find_both_modes():
    method = bl.SGLD(samples=20, schedule="cyclical", cycles=10, burn_in=0.9)
    found = modes(method, 0.9, 100)[-1]
    assert 25 <= int((found > 0).sum()) <= 75
    assert found.abs().mean().item() == pytest.approx(2, abs=0.15)


def test_chains_find_both_modes():
    found = modes(bl.SGLD(samples=2, chains=10), 0.04, 1, epochs=60).view(10, 2)
    assert found[0, 0] > 0  # the first starts where the network was
    assert 1 <= int((found[:, 1] > 0).sum()) <= 9
    assert (found.sign() == found[:, :1].sign()).all()
    assert found.abs().mean().item() == pytest.approx(2, abs=0.25)


def test_a_cycle_explores_without_noise():
    ends = []
    for seed in (1, 2):
        bnn = bayesian(bl.SGLD(samples=1, schedule="cyclical", cycles=1, burn_in=0.75), network(norm=False))
        path = []
        data = bl.data.Loader(X, Y, batch_size=24, shuffle=False)
        bnn.fit(
            data, epochs=8, lr=0.1, seed=seed, callbacks=[lambda e, p=path: p.append(e.bnn.model[0].weight.clone())]
        )
        ends.append(path)
    alike = [torch.allclose(a, b) for a, b in zip(*ends, strict=True)]
    assert alike == [True] * 6 + [False] * 2


def test_a_subnetwork_moves_and_the_rest_stays():
    bnn = fitted(bl.SGHMC(samples=4, subset=bl.Subnetwork(7)))
    moved = sum(int((value.var(0) > 0).sum()) for value in bnn.posterior_.values.values())
    assert moved == 7
    assert not bnn.posterior_.buffers
    before = network()
    changed = sum(int((a != b).sum()) for a, b in zip(before.parameters(), bnn.model.parameters(), strict=True))
    assert changed == 7
    assert torch.equal(bnn.model[1].running_mean, before[1].running_mean)
    assert all(p.requires_grad for p in bnn.model.parameters())
    assert not bnn.training or bnn.model[1].training == bnn.training


@pytest.mark.parametrize("subset", ["last-layer", ("0",), bl.Subnetwork(3, by="random")])
def test_hmc_and_samplers_take_the_same_subsets(subset):
    names = [
        fitted(bl.SGLD(samples=1, subset=subset)).posterior_.names,
        _hmc(bl.HMC(samples=2, warmup=2, leapfrog=2, subset=subset)).posterior_.names,
    ]
    assert names[0] == names[1]
    if subset == "last-layer":
        assert names[0] == ("3.weight", "3.bias")


def _hmc(method: bl.Method) -> bl.Bayesian:
    bnn = bayesian(method)
    bnn.fit(loader(), seed=1)
    return bnn


def test_chains_of_hmc_leave_what_is_not_sampled():
    """Only what is random starts anew: the draws of every chain belong to the features that there are."""
    model = network(norm=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bnn = bayesian(bl.HMC(samples=2, warmup=2, leapfrog=2, chains=2), model, sites=["3.weight", "3.bias"])
    bnn.fit(loader(), seed=1)
    now = bnn.model.state_dict()
    assert all(torch.equal(now[name], before[name]) for name in ("0.weight", "0.bias"))
    assert all(p.requires_grad for p in bnn.model.parameters())
    assert not torch.equal(bnn.posterior_.values["3.weight"][0], bnn.posterior_.values["3.weight"][2])


@pytest.mark.parametrize("subset", [bl.Subnetwork(7), bl.Subnetwork(7, by="random")])
@pytest.mark.parametrize("seed", [0, None])
def test_a_run_that_goes_on_moves_the_same_weights(subset, seed):
    """The state of the global generators, and so the order of a shuffled loader, does not matter."""
    bnn = bayesian(bl.SGLD(subset=subset))
    bnn.num_data = len(X)
    data = DataLoader(TensorDataset(X, Y), batch_size=5, shuffle=True)
    found = []
    for state in range(4):
        torch.manual_seed(state)
        found.append(moving_weights(bnn, bnn.method, data, seed).masks)
        assert torch.initial_seed() == state
    assert sum(int(mask.sum()) for mask in found[0].values()) == 7
    for other in found[1:]:
        assert found[0].keys() == other.keys()
        assert all(torch.equal(found[0][name], other[name]) for name in other)


@pytest.mark.parametrize("method", [bl.PSGLD, lambda **of: bl.SGHMC(adapt=True, **of)])
def test_scales_of_cyclical_runs_are_measured_with_noise(method):
    """From the optimum, on all the data, gradients without noise vanish: scales of those would end in infinity."""
    torch.manual_seed(0)
    x = torch.randn(100, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.5 * torch.randn(100, 1)
    precision = x.T @ x / 0.25 + torch.eye(3)
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_((precision.inverse() @ x.T @ y / 0.25).T)
    exact = model.weight.detach().clone()
    bnn = bayesian(method(samples=80, schedule="cyclical"), model, likelihood=bl.likelihoods.Gaussian(0.5))
    bnn.fit([(x, y)], epochs=1000, seed=0, progress=False)
    away = (bnn.posterior_.values["weight"] - exact).flatten(1) / precision.inverse().diagonal().sqrt()
    assert float(away.abs().max()) < 5
    assert 0.3 < float(away.square().mean()) < 2


def test_another_seed_does_not_go_on_from_it(tmp_path):
    first = fitted(METHODS["sgld"], checkpoint=tmp_path)
    with pytest.raises(BayeslimError, match="its seed differs"):
        fitted(METHODS["sgld"], checkpoint=tmp_path, seed=6)
    assert_same(fitted(METHODS["sgld"], checkpoint=tmp_path).posterior_, first.posterior_)


def test_chains_of_hmc_have_norms_of_their_own():
    model = network()
    model.train()(X)  # statistics that a fresh start does not have
    bnn = bayesian(bl.HMC(samples=2, warmup=2, leapfrog=2, chains=2), model)
    bnn.fit(loader(), seed=1)
    means = bnn.posterior_.buffers["1.running_mean"]
    assert torch.equal(means[0], model[1].running_mean)
    assert torch.equal(means[2], torch.zeros(5))
    torch.testing.assert_close(bl.predict(bnn, X).samples[-1], bnn.eval()(X))


def test_a_subnetwork_by_variance_needs_a_normal_prior():
    bnn = bayesian(bl.SGLD(subset=bl.Subnetwork(3)), prior=bl.priors.StudentT(3.0))
    with pytest.raises(UnsupportedModel, match="Normal prior"):
        bnn.fit(loader(), epochs=1)


def test_points_are_optimised_along():
    """Parameters that are not random, and the noise of the likelihood, follow gradient descent."""
    method = bl.SGLD(samples=2)
    targets = torch.randn(24, 3, generator=torch.Generator().manual_seed(2))
    bnn = bayesian(method, network(norm=False), likelihood=bl.likelihoods.Gaussian("learned"), sites="weights")
    before = [p.clone() for p in bnn.likelihood.parameters()]
    bnn.fit(bl.data.Loader(X, targets, batch_size=8), epochs=2, lr=1e-2, seed=1)
    assert bnn.posterior_.names == ("0.weight", "3.weight")
    assert set(bnn.posterior_.buffers) == {"0.bias", "3.bias"}
    assert all((a != b).all() for a, b in zip(before, bnn.likelihood.parameters(), strict=True))


def test_a_pruned_network_is_sampled_where_it_is_left():
    bnn = fitted(bl.SGLD(samples=4), network(norm=False))
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.5), criterion="magnitude")
    pruned.fit(loader(), epochs=3, lr=1e-2, seed=1)
    mask = pruned.masks["0.weight"]
    values = pruned.posterior_.values["0.weight"]
    assert (values[:, ~mask] == 0).all()
    assert (values[:, mask].var(0) > 0).all()


def test_an_own_loop_samples():
    bnn = bayesian(bl.SGHMC(), num_data=24)
    sampler = bnn.optimizer(lr=1e-2)
    assert isinstance(sampler, StochasticHamiltonian)
    before = bnn.model[0].weight.clone()
    bnn.loss((X, Y)).backward()
    sampler.step()
    assert bnn.step == 1
    assert (bnn.model[0].weight != before).all()
    assert isinstance(bayesian(bl.SGLD(), num_data=24).optimizer(), Langevin)
    with pytest.raises(NoSiteMatched, match="chosen from the data"):
        bayesian(bl.SGLD(subset="last-layer"), num_data=24).optimizer()


def test_a_failed_run_leaves_the_posterior_there_was():
    bnn = fitted(bl.SGLD(samples=2))
    before = bnn.posterior_
    with pytest.raises(Stop):
        bnn.fit(loader(), epochs=2, callbacks=[stop_in(1)])
    assert bnn.posterior_ is before
    assert "course" not in bnn.state


def test_validation_and_options_of_training():
    bnn = bayesian(bl.SGLD(samples=2))
    data = bl.data.Loader(X, Y, batch_size=8)
    result = bnn.fit(data, epochs=2, validate=data, accumulate=2, clip=1.0, seed=1)
    assert all(epoch["val_nll"] > 0 for epoch in result.history)
    assert bnn.step == 4
    for option in ({"lr_schedule": "cosine"}, {"patience": 2}):
        with pytest.raises(TypeError, match="takes no"):
            bnn.fit(data, epochs=1, **option)
    with pytest.raises(TypeError, match="Pass epochs"):
        bayesian(bl.HMC(samples=1, warmup=1)).fit(data, lr=0.1)


def test_a_run_stopped_before_anything_was_kept_says_so():
    def stop(epoch):
        epoch.stop = "enough"

    with pytest.raises(BayeslimError, match="No network was kept"):
        fitted(bl.SGLD(samples=2, burn_in=0.5), epochs=4, callbacks=[stop])


@pytest.mark.parametrize(
    ("build", "settings", "message"),
    [
        (bl.SGLD, {"samples": 0}, "samples"),
        (bl.SGLD, {"chains": 0}, "chains"),
        (bl.SGLD, {"burn_in": 1.0}, "burn_in"),
        (bl.SGLD, {"thinning": 0}, "thinning"),
        (bl.SGLD, {"temperature": 0.0}, "temperature"),
        (bl.SGLD, {"schedule": "linear"}, "schedule"),
        (bl.SGLD, {"schedule": "cyclical", "samples": 3}, "cycles"),
        (bl.PSGLD, {"decay": 1.0}, "decay"),
        (bl.SGHMC, {"friction": 0.0}, "friction"),
        (bl.SGNHT, {"coupling": 1.0}, "coupling"),
        (bl.HMC, {"leapfrog": 0}, "leapfrog"),
        (bl.HMC, {"target_acceptance": 1.0}, "target_acceptance"),
        (bl.Subspace, {"rank": 20}, "snapshots"),
    ],
)
def test_bad_settings_are_refused(build, settings, message):
    with pytest.raises(ValueError, match=message):
        build(**settings)


def test_steps_are_kept_at_equal_times():
    schedule = SamplingSchedule("polynomial", burn_in=0.2)
    kept = schedule.kept(5000, 20)
    times = [sum(schedule.factor((s - 1) / 5000) for s in range(a + 1, b + 1)) for a, b in zip((1000, *kept), kept)]  # noqa: B905
    assert len(kept) == 20
    assert max(times) / min(times) < 1.05
    assert kept[-1] - kept[-2] > 1.2 * (kept[0] - 1000)
    assert schedule.kept(100, 4, thinning=10) == (70, 80, 90, 100)
    with pytest.raises(ValueError, match="at least as many steps"):
        SamplingSchedule("cyclical", cycles=4).kept(3, 4)


def test_fewer_networks_than_asked_for_are_announced():
    with pytest.warns(BayeslimWarning, match="Of 12 steps 6 networks are kept, not 1000"):
        bnn = fitted(bl.SGLD(samples=1000))
    assert bnn.posterior_.count == 6


def test_a_chain_that_runs_away_is_announced():
    torch.manual_seed(0)
    x = torch.randn(100, 1)
    bnn = bayesian(bl.SGHMC(samples=5), nn.Linear(1, 1), likelihood=bl.likelihoods.Gaussian(1.0))
    with pytest.warns(BayeslimWarning, match="left the posterior: its kinetic temperature is .* Use a smaller lr"):
        bnn.fit([(x, x)], epochs=20, lr=8.0, progress=False)
