"""The Laplace method on the spine: fitting, predicting, saving, pruning, and refusing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayeslim as bl
from bayeslim.errors import BayeslimError, NoSiteMatched, NotFitted, ShapeMismatch, UnsupportedModel
from bayeslim.likelihoods import Categorical, Gaussian
from bayeslim.methods import laplace
from bayeslim.methods.shared import curvature_posterior
from bayeslim.posteriors import Conditioned, Dense, Kronecker, LowRank
from bayeslim.predict import linearised

X = torch.randn(24, 1, 6, 6, generator=torch.Generator().manual_seed(1)).double()
Y = torch.arange(24) % 3


class Net(nn.Module):
    """Convolution, norms, and a head that is not the last to be defined."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.body = nn.Linear(32, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.conv(x))).flatten(1)
        return self.head(self.scale * torch.tanh(self.body(h)))


def network() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(X[:10], Y[:10]), (X[10:], Y[10:])]


def bayesian(method: bl.Laplace | None = None, **options) -> bl.Bayesian:
    return bl.bayesianize(network(), method or bl.Laplace(), likelihood=Categorical(), **options)


def fitted(method: bl.Laplace | None = None, **options) -> bl.Bayesian:
    bnn = bayesian(method)
    bnn.fit(batches(), progress=False, **options)
    return bnn


METHODS = {
    "kron": bl.Laplace(),
    "ekfac": bl.Laplace(corrected=True),
    "point": bl.Laplace(unsupported="point"),
    "diag": bl.Laplace("diag"),
    "full": bl.Laplace("full"),
    "lowrank": bl.Laplace("lowrank", rank=7),
    "last-layer": bl.Laplace("full", "last-layer"),
    "subnetwork": bl.Laplace(subset=bl.Subnetwork(20, "snr")),
    "names": bl.Laplace("diag", ("head", "conv.weight")),
    "hutchinson": bl.Laplace("diag", curvature="hutchinson"),
    "sampled": bl.Laplace(curvature="sampled"),
    "empirical": bl.Laplace("full", "head", curvature="empirical"),
}


@pytest.fixture(params=METHODS)
def method(request) -> bl.Laplace:
    return METHODS[request.param]


@pytest.fixture(params=["kron", "ekfac", "diag", "full", "lowrank", "subnetwork"])
def structured(request) -> bl.Laplace:
    """One setting for each kind of posterior."""
    return METHODS[request.param]


def test_three_lines_make_a_trained_network_bayesian():
    bnn = bl.bayesianize(network(), bl.Laplace(), likelihood=Categorical())
    bnn.fit(DataLoader(TensorDataset(X, Y), batch_size=8))
    prediction = bl.predict(bnn, X)
    assert bnn.num_data == 24
    torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(24).double())
    assert isinstance(bnn.posterior_, Kronecker)
    assert {f.weight for f in bnn.posterior_.factors} == {"conv.weight", "body.weight", "head.weight"}
    assert set(bnn.posterior_.rest) == {"norm.weight", "norm.bias", "scale"}


def test_everything_works_for_every_setting(method, tmp_path):
    bnn = fitted(method)
    before = {name: p.detach().clone() for name, p in bnn.model.named_parameters()}
    for how in ("auto", "glm", "probit", "extended-probit", "bridge", "joint", "sample", "mean", "map"):
        prediction = bl.predict(bnn, X[:5], samples=4, how=how)
        assert prediction.samples.shape == (1 if how in ("mean", "map") else 4, 5, 3)
        assert torch.isfinite(prediction.entropy).all()
        assert (prediction.epistemic >= 0).all()
    evidence = bl.log_evidence(bnn, batches())
    bl.save(bnn, tmp_path / "bnn")
    again = bl.load(tmp_path / "bnn", model=network())
    assert again.method == bnn.method
    assert type(again.posterior_) is type(bnn.posterior_)
    assert list(again.posterior_.mean) == list(bnn.posterior_.mean)
    assert bl.log_evidence(again, batches()).value == pytest.approx(evidence.value, rel=1e-12)
    for how in ("auto", "joint", "sample"):
        seeds = [torch.Generator().manual_seed(3) for _ in range(2)]
        torch.testing.assert_close(
            bl.predict(bnn, X, 4, how, generator=seeds[0]).mean, bl.predict(again, X, 4, how, generator=seeds[1]).mean
        )
    assert all(torch.equal(before[name], p) for name, p in bnn.model.named_parameters())


def test_a_pruned_posterior_predicts_saves_and_refits(structured, tmp_path):
    bnn = fitted(structured)
    masks = {"head.weight": torch.rand(3, 8) > 0.5, "conv.bias": torch.tensor([True, False])}
    bnn.method.condition(bnn, masks)
    bnn.masks = masks
    for _ in range(2):
        assert isinstance(bnn.posterior_, Conditioned) or "head.weight" not in bnn.posterior_.mean
        assert (bnn.model.head.weight[~masks["head.weight"]] == 0).all()
        assert bnn.model.conv.bias[1] == 0
        prediction = bl.predict(bnn, X, samples=8)
        assert torch.isfinite(prediction.probs).all()
        assert torch.isfinite(torch.tensor(bl.log_evidence(bnn, batches()).value))
        draw = bnn.posterior_.sample()
        assert (draw.get("head.weight", torch.zeros(3, 8))[~masks["head.weight"]] == 0).all()
        bl.save(bnn, tmp_path / "pruned")
        again = bl.load(tmp_path / "pruned", model=network())
        assert bl.log_evidence(again, batches()).value == pytest.approx(bl.log_evidence(bnn, batches()).value)
        bnn.fit(DataLoader(TensorDataset(X, Y), batch_size=8), epochs=1, seed=0, progress=False)
    assert (bnn.mean_network().head.weight[~masks["head.weight"]] == 0).all()


def test_nothing_is_dirtied(method):
    bnn = bayesian(method).train()
    bnn.model.norm.eval()
    bnn.model.head.weight.grad = torch.ones_like(bnn.model.head.weight)
    modes = [m.training for m in bnn.modules()]
    state, random = copy.deepcopy(bnn.state_dict()), torch.get_rng_state()
    bnn.fit(batches(), progress=False)
    generator = torch.Generator().manual_seed(0)
    for how in ("auto", "joint", "mean"):
        bl.predict(bnn, X, how=how, generator=generator)
    bl.log_evidence(bnn, batches())
    assert torch.equal(torch.get_rng_state(), random)
    assert [m.training for m in bnn.modules()] == modes
    assert all(torch.equal(state[name], value) for name, value in bnn.state_dict().items())
    assert all(p.requires_grad for p in bnn.model.parameters())
    assert all(p.grad is None for name, p in bnn.model.named_parameters() if name != "head.weight")
    assert torch.equal(bnn.model.head.weight.grad, torch.ones(3, 8).double())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in bnn.model.modules())


def test_subsets():
    assert set(fitted(bl.Laplace(subset="last-layer")).posterior_.mean) == {"head.weight", "head.bias"}
    assert set(fitted(bl.Laplace(subset="body")).posterior_.mean) == {"body.weight", "body.bias"}
    assert set(fitted(bl.Laplace("diag", ("norm", "scale"))).posterior_.mean) == {"norm.weight", "norm.bias", "scale"}
    points = bl.Laplace(unsupported="point")
    bnn = bayesian(points)
    reasons = bnn.fit(batches(), progress=False).details["points"]
    assert reasons.keys() == {"norm.weight", "norm.bias", "scale"}
    assert not reasons.keys() & bnn.posterior_.mean.keys()
    with pytest.raises(NoSiteMatched, match="subset='tail' matched none of the 9 random parameters"):
        fitted(bl.Laplace(subset="tail"))


def test_the_last_layer_of_a_bare_layer_is_itself():
    bnn = bl.bayesianize(nn.Linear(3, 2), bl.Laplace("full", "last-layer"), likelihood=Categorical())
    bnn.fit([(torch.randn(5, 3), torch.arange(5) % 2)], progress=False)
    assert set(bnn.posterior_.mean) == {"weight", "bias"}


def test_structures():
    kinds = {name: type(fitted(METHODS[name]).posterior_) for name in ("kron", "diag", "full", "lowrank")}
    assert kinds == {"kron": Kronecker, "diag": Kronecker, "full": Dense, "lowrank": LowRank}
    assert not fitted(METHODS["diag"]).posterior_.factors
    assert fitted(METHODS["ekfac"]).posterior_.factors[0].corrected is not None


def test_training_then_curvature():
    bnn = bayesian()
    loader = DataLoader(TensorDataset(X, Y), batch_size=8)
    fit = bnn.fit(loader, epochs=3, lr=1e-2, validate=loader, seed=0, progress=False)
    assert len(fit.history) == 3
    assert "val_nll" in fit.history[0]
    assert all(torch.equal(bnn.posterior_.mean[n], p) for n, p in bnn.model.named_parameters())
    again = bayesian()
    again.fit(loader, epochs=3, lr=1e-2, seed=0, progress=False)
    assert all(torch.equal(again.posterior_.variance[n], v) for n, v in bnn.posterior_.variance.items())


def test_float64_accumulation_on_request():
    bnn = bl.bayesianize(network().float(), bl.Laplace("full", "head"), likelihood=Categorical())
    bnn.fit([(x.float(), y) for x, y in batches()], dtype=torch.float64, progress=False)
    assert bnn.posterior_.precision.dtype == torch.float64


def test_a_copy_has_a_posterior_of_its_own():
    bnn = fitted()
    twin = copy.deepcopy(bnn)
    assert twin.posterior_ is not bnn.posterior_
    torch.testing.assert_close(bl.predict(twin, X).probs, bl.predict(bnn, X).probs)


def test_how_predictions_relate():
    bnn = fitted(bl.Laplace(curvature="exact"))
    closed = bl.predict(bnn, X, how="extended-probit").probs
    joint = bl.predict(bnn, X, samples=4000, how="joint").probs
    assert (closed - joint).abs().max() < 0.08
    assert (bl.predict(bnn, X).probs - joint).abs().max() < 0.02
    mean = bl.predict(bnn, X, how="mean")
    torch.testing.assert_close(mean.probs, bnn.model.eval()(X).softmax(-1).detach())
    assert bl.predict(bnn, X, how="probit").entropy.mean() > mean.entropy.mean()
    assert torch.equal(bl.predict(bnn, X, how="glm").probs, bl.predict(bnn, X, how="auto").probs)


def test_predictions_of_a_loader_are_those_of_its_inputs():
    bnn = fitted()
    loader = DataLoader(TensorDataset(X, Y), batch_size=7)
    torch.testing.assert_close(bl.predict(bnn, loader).probs, bl.predict(bnn, X).probs)
    torch.testing.assert_close(bl.predict(bnn, X[:1]).probs, bl.predict(bnn, X).probs[:1])


def test_many_outputs_are_sampled(monkeypatch):
    bnn = fitted(bl.Laplace(curvature="exact"))
    exact = torch.cat([c for _, c in linearised.output_gaussians(bnn.replica(X).model, bnn.posterior_, [X])])
    monkeypatch.setattr(laplace, "MAX_SOLVED_OUTPUTS", 2)
    prediction = bl.predict(bnn, X, samples=300)
    torch.testing.assert_close(prediction.samples.mean(0), bnn.model.eval()(X).detach())
    ratio = prediction.samples.var(0, correction=0) / exact.diagonal(dim1=1, dim2=2)
    assert (ratio.mean() - 1).abs() < 0.15


def test_before_fit():
    bnn = bayesian()
    with pytest.raises(NotFitted, match=r"call bnn.fit\(loader\) on the trained network"):
        _ = bnn.posterior_
    with pytest.raises(NotFitted):
        bl.predict(bnn, X)
    assert bl.predict(bnn, X, how="mean").probs.shape == (24, 3)
    assert torch.equal(bnn.train()(X), network()(X))
    bnn.fit(batches(), progress=False)
    assert not torch.equal(bnn(X), bnn(X))


def test_a_posterior_of_other_weights_is_refused():
    bnn = fitted()
    with torch.no_grad():
        bnn.model.body.weight += 0.1
    with pytest.raises(NotFitted, match=r'"body.weight" has changed since the posterior was measured'):
        bl.predict(bnn, X)
    with pytest.raises(NotFitted, match="fit"):
        bl.log_evidence(bnn, batches())
    bnn.fit(batches(), progress=False)
    bl.predict(bnn, X)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"structure": "banded"}, "structure must be one of"),
        ({"curvature": "hessian"}, "curvature must be one of"),
        ({"structure": "full", "curvature": "kfra"}, 'is for structure="kron"'),
        ({"curvature": "hutchinson"}, 'is for structure="diag"'),
        ({"unsupported": "drop"}, "unsupported must be one of diagonal, point"),
        ({"rank": 0}, "rank must be at least 1"),
        ({"sharing": "mean"}, "sharing must be"),
        ({"damping": "none"}, "damping must be"),
    ],
    ids=str,
)
def test_settings_are_checked_at_once(options, words):
    with pytest.raises(ValueError, match=words):
        bl.Laplace(**options)


def test_other_mistakes_are_named():
    with pytest.raises(TypeError, match="subset must be"):
        bl.Laplace(subset=3)
    bnn = bayesian()
    with pytest.raises(TypeError, match=r"lr are options of training"):
        bnn.fit(batches(), lr=0.1)
    with pytest.raises(ValueError, match="tune must be one of"):
        bnn.fit(batches(), tune="guess")
    with pytest.raises(ValueError, match="pass epochs"):
        bnn.fit(batches(), tune="online")
    with pytest.raises(ValueError, match="A checkpoint does not hold the prior"):
        bnn.fit(batches(), tune="online", epochs=2, checkpoint="folder")
    with pytest.raises(ValueError, match="pass validate"):
        bnn.fit(batches(), tune="grid")
    with pytest.raises(ShapeMismatch, match="yielded no batch"):
        bnn.fit([], progress=False)
    bnn.fit(batches(), progress=False)
    with pytest.raises(ValueError, match=r"how must be one of .* for laplace"):
        bl.predict(bnn, X, how="local")
    assert "posterior" not in bayesian().state


def test_priors_other_than_normal_are_refused():
    class Other(bl.priors.Prior):
        name = "other"

    with pytest.raises(UnsupportedModel, match="Laplace needs a Normal prior"):
        bl.bayesianize(network(), bl.Laplace(), likelihood=Categorical(), prior=Other())


def test_a_full_covariance_that_cannot_fit_in_memory_is_refused():
    bnn = bl.bayesianize(nn.Linear(300, 200), bl.Laplace("full"), likelihood=Categorical())
    with pytest.raises(BayeslimError, match=r"The full covariance of 60,200 weights takes 14 GB"):
        bnn.fit([(torch.randn(2, 300), torch.zeros(2, dtype=torch.long))], progress=False)


def test_only_unsupported_parameters_and_none_of_them_random():
    method = bl.Laplace(unsupported="point", subset="norm")
    with pytest.raises(UnsupportedModel, match="nothing would be random"):
        fitted(method)


class TestSturdy:
    """Data and networks at the edge."""

    @pytest.mark.parametrize("structure", ["kron", "diag", "full", "lowrank"])
    def test_dead_units_a_missing_class_and_a_single_example(self, structure):
        model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
        with torch.no_grad():
            model[0].bias[:2] = -1e3
        x = torch.rand(6, 4)
        x[:, 1] = 0
        for count in (6, 1):
            bnn = bl.bayesianize(model, bl.Laplace(structure), likelihood=Categorical())
            bnn.fit([(x[:count], torch.zeros(count, dtype=torch.long))], progress=False)
            prediction = bl.predict(bnn, x)
            assert torch.isfinite(prediction.probs).all()
            variance = bnn.posterior_.variance["0.weight"]
            torch.testing.assert_close(variance[:2].float(), torch.ones(2, 4))  # nothing learned: the prior
            evidence = bl.log_evidence(bnn, [(x[:count], torch.zeros(count, dtype=torch.long))]).value
            assert torch.isfinite(torch.tensor(evidence))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("structure", ["kron", "diag", "full", "lowrank"])
    def test_half_precision_weights(self, structure, dtype):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        x, y = torch.randn(20, 4).to(dtype), torch.arange(20) % 3
        found = []
        for precision in (torch.float32, dtype):
            bnn = bl.bayesianize(model.to(precision), bl.Laplace(structure), likelihood=Categorical())
            bnn.fit([(x.to(precision), y)], progress=False)
            found.append(bl.predict(bnn, x.to(precision)).probs)
            assert bnn.posterior_.mean["0.weight"].dtype == precision
            assert bnn.posterior_.sample()["0.weight"].dtype == precision
            assert torch.isfinite(torch.tensor(bl.log_evidence(bnn, [(x.to(precision), y)]).value))
        assert (found[0] - found[1]).abs().max() < 0.05

    def test_batches_as_dicts_and_a_generator_of_them(self):
        class Keyword(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(3, 2)

            def forward(self, pixels: Tensor) -> Tensor:
                return self.layer(pixels)

        x, y = torch.randn(8, 3), torch.arange(8) % 2
        expected = bl.bayesianize(Keyword(), bl.Laplace("lowrank", rank=3), likelihood=Categorical())
        twin = copy.deepcopy(expected)
        expected.fit([{"pixels": x[:5], "labels": y[:5]}, {"pixels": x[5:], "labels": y[5:]}], progress=False)
        twin.fit(({"pixels": x[i], "labels": y[i]} for i in (slice(0, 5), slice(5, 8))), progress=False)
        torch.testing.assert_close(bl.predict(twin, {"pixels": x}).probs, bl.predict(expected, {"pixels": x}).probs)
        assert twin.num_data == expected.num_data == 8

    @pytest.mark.parametrize("structure", ["kron", "diag"])
    def test_a_layer_that_never_ran_keeps_its_prior(self, structure):
        class Spare(nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.spare = nn.Linear(3, 2), nn.Linear(2, 2)

            def forward(self, x: Tensor) -> Tensor:
                return self.used(x)

        bnn = bl.bayesianize(Spare(), bl.Laplace(structure), likelihood=Categorical(), prior=bl.priors.Normal(0.5))
        bnn.fit([(torch.randn(8, 3), torch.arange(8) % 2)], progress=False)
        torch.testing.assert_close(bnn.posterior_.variance["spare.weight"], torch.full((2, 2), 0.25))
        bl.predict(bnn, torch.randn(3, 3))

    def test_outputs_of_one_dimension_and_sequences(self):
        class Flat(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x)[:, 0]

        x = torch.randn(9, 3)
        bnn = bl.bayesianize(Flat(3, 1), bl.Laplace(), likelihood=Gaussian(0.3))
        bnn.fit([(x, torch.randn(9))], progress=False)
        assert bl.predict(bnn, x).variance.shape == (9,)
        tokens = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 3))
        bnn = bl.bayesianize(tokens, bl.Laplace(), likelihood=Categorical())
        words = torch.randint(6, (5, 7))
        bnn.fit([(words, words % 3)], progress=False)
        assert bl.predict(bnn, words).probs.shape == (5, 7, 3)

    def test_tied_weights(self):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
                self.second.weight = self.first.weight

            def forward(self, x: Tensor) -> Tensor:
                return self.second(torch.tanh(self.first(x)))

        torch.manual_seed(0)
        model, x, y = Tied().double(), torch.randn(9, 3).double(), torch.arange(9) % 3
        bnn = bl.bayesianize(model, bl.Laplace(curvature="exact"), likelihood=Categorical())
        bnn.fit([(x, y)], progress=False)
        assert set(bnn.posterior_.rest) >= {"first.weight"}
        assert torch.isfinite(bl.predict(bnn, x).probs).all()


def test_predictions_of_a_generator_of_batches():
    bnn = fitted()
    torch.testing.assert_close(bl.predict(bnn, (batch for batch in batches())).probs, bl.predict(bnn, X).probs)


class TestChoiceOfCurvature:
    """The default is exact for few outputs and data, and the unbiased estimate by random signs for more."""

    def test_few_data_are_exact(self):
        exact, chosen = fitted(bl.Laplace(curvature="exact")), bayesian()
        result = chosen.fit([(X, Y)], progress=False)
        assert result.details["curvature"] == "exact"
        for name, variance in chosen.posterior_.variance.items():
            torch.testing.assert_close(variance, exact.posterior_.variance[name])

    def test_many_data_and_data_of_unknown_size_take_signs(self, monkeypatch):
        class Unsized:
            def __iter__(self):
                return iter([(X, Y)])

        assert bayesian().fit(Unsized(), progress=False).details["curvature"] == "signs"
        monkeypatch.setattr(curvature_posterior, "MAX_EXACT_PASSES", 3 * len(X) - 1)
        assert bayesian().fit([(X, Y)], progress=False).details["curvature"] == "signs"
        monkeypatch.setattr(curvature_posterior, "MAX_EXACT_PASSES", 3 * len(X))
        assert bayesian().fit([(X, Y)], progress=False).details["curvature"] == "exact"

    def test_a_shuffled_loader_is_left_as_it_was(self):
        loader = DataLoader(TensorDataset(X, Y), 5, shuffle=True, generator=torch.Generator().manual_seed(3))
        state = loader.generator.get_state()
        curvature_posterior.chosen_curvature(bayesian(), bl.Laplace(), loader)
        assert torch.equal(loader.generator.get_state(), state)

    def test_signs_follow_from_the_seed_and_have_the_error_of_the_docstring(self):
        torch.manual_seed(0)
        x, outputs = torch.randn(50, 2).double(), 4
        bnn = bl.bayesianize(
            nn.Linear(2, outputs).double(),
            bl.Laplace("full", curvature="signs"),
            likelihood=bl.likelihoods.Gaussian(1.0),
        )

        def estimate(seed: int) -> Tensor:
            bnn.fit([(x, torch.zeros(50, outputs).double())], seed=seed, progress=False)
            return bnn.posterior_.curvature.sum()  # along all ones, which every output moves alike

        assert torch.equal(estimate(1), estimate(1))
        found = torch.stack([estimate(seed) for seed in range(60)])
        each = (x.sum(1) + 1).square() * outputs  # of every example
        exact = each.sum()
        spread = (2 * (1 - 1 / outputs) * each.square().sum()).sqrt()
        assert (found.mean() - exact).abs() < 4 * spread / 60**0.5
        assert found.std() == pytest.approx(float(spread), rel=0.35)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_an_empty_layer_is_named():
    bnn = bl.bayesianize(nn.Sequential(nn.Linear(6, 0), nn.Linear(0, 3)), bl.Laplace(), likelihood=Categorical())
    with pytest.raises(UnsupportedModel, match=r'"0\.weight" is empty'):
        bnn.fit([(torch.randn(4, 6), torch.zeros(4, dtype=torch.long))], progress=False)
