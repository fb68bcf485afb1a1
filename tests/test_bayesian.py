"""`bayesianize` and the object it makes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import bayeslim as bl
from bayeslim.errors import MissingDataSize, NoSiteMatched, UnsupportedModel
from bayeslim.families import DiagonalGaussian

X, Y = torch.randn(6, 4), torch.arange(6) % 3
LIKELIHOOD = bl.likelihoods.Categorical()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def bayesian(**options) -> bl.Bayesian:
    return bl.bayesianize(model(), bl.Variational(), likelihood=LIKELIHOOD, num_data=6, **options)


def test_it_says_what_it_is():
    assert repr(bayesian()) == (
        "Bayesian Sequential: variational posterior over 35 of 43 parameters, categorical likelihood"
    )
    assert "posterior over 43 of 43" in repr(bayesian(sites="all"))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model": "net"}, TypeError, r"model must be a torch\.nn\.Module\. Got str"),
        ({"model": nn.Linear}, TypeError, "model must be"),
        ({"method": bl.Variational}, TypeError, r"write Variational\(\), not Variational"),
        ({"method": "variational"}, TypeError, "method must be a bayeslim method"),
        ({"likelihood": bl.likelihoods.Categorical}, TypeError, r"write Categorical\(\), not Categorical"),
        ({"likelihood": nn.CrossEntropyLoss()}, TypeError, r"one of bayeslim\.likelihoods"),
        ({"num_data": 0}, ValueError, "whole number above 0. Got 0"),
        ({"num_data": "100"}, ValueError, "whole number above 0. Got '100'"),
        ({"prior": 1.0}, TypeError, "prior must be one of"),
        ({"prior": {"0": bl.priors.Normal()}}, NoSiteMatched, 'No prior was given for "2.weight"'),
        ({"sites": "encoder"}, NoSiteMatched, "matched none"),
        ({"model": nn.ReLU()}, NoSiteMatched, "no parameters"),
    ],
)
def test_bad_arguments_are_refused(change, error, words):
    given = {"model": model(), "method": bl.Variational(), "likelihood": LIKELIHOOD} | change
    with pytest.raises(error, match=words):
        bl.bayesianize(given.pop("model"), given.pop("method"), **given)


def test_a_refused_model_is_untouched():
    net = model()
    before = dict(net.named_parameters())
    for options in ({"sites": "nowhere"}, {"prior": {"0": bl.priors.Normal()}}, {"num_data": -1}):
        with pytest.raises(ValueError):
            bl.bayesianize_(net, bl.Variational(), likelihood=LIKELIHOOD, **options)
    net[2].weight_log_std = nn.Parameter(torch.zeros(1))  # a name that is taken, in the last layer
    with pytest.raises(UnsupportedModel, match=r'"2\.weight_log_std" already exists'):
        bl.bayesianize_(net, bl.Variational(), likelihood=LIKELIHOOD, sites="weights")
    del net[2].weight_log_std
    after = dict(net.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)


def test_a_bayesian_network_is_not_made_bayesian_again():
    bnn = bayesian()
    with pytest.raises(TypeError, match=r"Bayesian already.*mean_network"):
        bl.bayesianize(bnn, bl.Variational(), likelihood=LIKELIHOOD)
    with pytest.raises(UnsupportedModel, match="already exists in the model"):
        bl.bayesianize(bnn.model, bl.Variational(), likelihood=LIKELIHOOD)
    bl.bayesianize(bnn.mean_network(), bl.Variational(), likelihood=LIKELIHOOD)


def test_two_networks_share_no_likelihood():
    likelihood = bl.likelihoods.Gaussian("learned")
    first, second = (bl.bayesianize(model(), bl.Variational(), likelihood=likelihood, num_data=6) for _ in range(2))
    optimizer = first.optimizer(0.5)
    first.loss((X, torch.randn(6, 3))).backward()
    optimizer.step()
    assert first.likelihood.log_noise != likelihood.log_noise
    assert second.likelihood.log_noise == likelihood.log_noise
    assert bl.bayesianize_(model(), bl.Variational(), likelihood=likelihood).likelihood is likelihood


def test_the_mean_starts_at_the_trained_weights():
    net = model()
    bnn = bl.bayesianize(net, bl.Variational(), likelihood=LIKELIHOOD)
    torch.testing.assert_close(bnn.eval()(X), net(X))
    torch.testing.assert_close(bnn.posterior_.mean["0.weight"], net[0].weight.detach())
    assert bnn.posterior_.names == ("0.weight", "2.weight")


def test_a_posterior_is_data_that_training_does_not_move():
    bnn = bayesian()
    posterior = bnn.posterior_
    mean, std = copy.deepcopy(posterior.mean), copy.deepcopy(posterior.std)
    bnn.fit(bl.data.Loader(X, Y, batch_size=3), epochs=1, lr=0.1)
    torch.testing.assert_close(posterior.mean, mean, rtol=0, atol=0)
    torch.testing.assert_close(posterior.std, std, rtol=0, atol=0)
    assert not torch.equal(bnn.posterior_.mean["0.weight"], mean["0.weight"])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_models_that_cannot_be_converted_are_refused_with_advice():
    with pytest.raises(UnsupportedModel, match="Pass the Python module"):
        bl.bayesianize(torch.jit.script(model()), bl.Variational(), likelihood=LIKELIHOOD)
    with pytest.raises(UnsupportedModel, match=r"model\.module"):
        bl.bayesianize(nn.DataParallel(model()), bl.Variational(), likelihood=LIKELIHOOD)
    net = model()
    prune.l1_unstructured(net[0], "weight", 0.5)
    with pytest.raises(UnsupportedModel, match=r"cannot be copied.*remove these first, or use bayesianize_"):
        bl.bayesianize(net, bl.Variational(), likelihood=LIKELIHOOD)
    bnn = bl.bayesianize_(net, bl.Variational(), likelihood=LIKELIHOOD, num_data=6)
    assert bnn.sites.names == ("0.weight_orig", "2.weight")
    bnn.loss((X, Y), kl_weight=0.0).backward()
    assert bnn.model[0].weight_orig_log_std.grad.abs().sum() > 0


def test_mean_network_is_plain_and_apart():
    bnn = bayesian()
    bnn.loss((X, Y))
    plain = bnn.mean_network()
    assert [type(m) for m in plain.modules()] == [nn.Sequential, nn.Linear, nn.ReLU, nn.Linear]
    assert set(plain.state_dict()) == set(model().state_dict())
    assert not any(m.__class__.__module__.startswith("bayeslim") for m in plain.modules())
    with torch.no_grad():
        plain[0].weight.zero_()
    assert bnn.model[0].weight.abs().sum() > 0
    optimizer = bnn.optimizer()
    bnn.loss((X, Y)).backward()
    optimizer.step()
    assert plain[0].weight.abs().sum() == 0


def test_the_data_size_is_asked_for():
    bnn = bl.bayesianize(model(), bl.Variational(), likelihood=LIKELIHOOD)
    with pytest.raises(MissingDataSize, match=r"num_data=len\(dataset\)"):
        bnn.loss((X, Y))
    bnn(X)
    bnn.num_data = 6
    bnn.loss((X, Y))


def test_steps_are_counted_once_for_each_optimizer():
    bnn = bayesian()
    own, foreign = bnn.optimizer(), torch.optim.SGD(bnn.parameters(), lr=1e-3)
    bnn.count_steps_of(own)
    bnn.count_steps_of(foreign)
    bnn.loss((X, Y)).backward()
    own.step()
    assert bnn.step == 1
    foreign.step()
    assert bnn.step == 2
    twin = copy.deepcopy(bnn)
    own.step()
    assert (bnn.step, twin.step) == (3, 2)


def test_cut_weights_stay_at_zero_in_training():
    bnn = bayesian()
    mask = torch.rand(5, 4) > 0.5
    bnn.method.condition(bnn, {"0.weight": mask})
    bnn.masks = {"0.weight": mask}
    optimizer = bnn.optimizer(0.1)
    for _ in range(3):
        loss = bnn.loss((X, Y))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.isfinite(loss)
    assert (bnn.model[0].weight[~mask] == 0).all()
    assert (bnn.model[0].weight[mask] != 0).all()
    assert (bnn.posterior_.std["0.weight"][~mask] == 0).all()


def test_state_of_a_likelihood_is_loaded_too():
    first, second = (
        bl.bayesianize(
            nn.Linear(4, 1), bl.Variational(), likelihood=bl.likelihoods.Gaussian("learned", initial_noise=s)
        )
        for s in (0.1, 0.9)
    )
    assert "likelihood:log_noise" in first.state_dict()
    second.load_state_dict(first.state_dict())
    assert second.likelihood.noise.item() == pytest.approx(0.1)
    nested = nn.ModuleList([second])
    nested.load_state_dict({f"0.{k}": v + 1 for k, v in first.state_dict().items()})
    assert second.likelihood.log_noise == first.likelihood.log_noise + 1
    with pytest.raises(RuntimeError, match="Missing key"):
        second.load_state_dict({})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        second.load_state_dict(first.state_dict() | {"stranger": torch.zeros(1)})


def test_moving_moves_everything():
    bnn = bayesian().to(torch.float64)
    assert {p.dtype for p in bnn.parameters()} == {torch.float64}
    bnn.loss((X.double(), Y)).backward()
    assert bnn.posterior_.std["0.weight"].dtype == torch.float64


def test_particles_and_masks_move_along():
    bnn = bl.bayesianize(model(), bl.DeepEnsemble(2), likelihood=LIKELIHOOD)
    bnn.fit(bl.data.Loader(X, Y), epochs=1, progress=False)
    bnn.masks = {"0.weight": torch.ones_like(bnn.model[0].weight, dtype=torch.bool)}
    before = bnn.posterior_
    assert bnn.cpu().posterior_ is before
    bnn.model.to("meta")  # a device that is everywhere, which `bnn.to` refuses
    bnn._apply(lambda tensor: tensor)
    assert {t.device.type for t in (*bnn.posterior_.tensors().values(), *bnn.masks.values())} == {"meta"}


def test_several_draws_average_the_data_term():
    method = bl.Variational(samples=400, estimator="shared", family=DiagonalGaussian(initial_std=0.3))
    many = bl.bayesianize(model(), method, likelihood=LIKELIHOOD, num_data=6)
    few = bl.bayesianize(
        many.mean_network(),
        bl.Variational(estimator="shared", family=DiagonalGaussian(initial_std=0.3)),
        likelihood=LIKELIHOOD,
        num_data=6,
    )
    singles = torch.stack([few.loss((X, Y), kl_weight=0.0).detach() for _ in range(400)])
    error = (2 * singles.var() / 400).sqrt()
    assert (many.loss((X, Y), kl_weight=0.0) - singles.mean()).abs() < 5 * error


@pytest.mark.parametrize("view", [lambda w: w[:3, ::2], lambda w: w[::2, :3].T, lambda w: w[:3, :3].contiguous()])
def test_parameters_that_are_views_train_where_they_are(view):
    """Torch's fused Adam writes beside the numbers of a view that is not dense."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(view(torch.randn(6, 6)))
    bnn = bl.bayesianize_(model, bl.Variational(), likelihood=bl.likelihoods.Gaussian(1.0), num_data=10)
    before = model.weight.detach().clone()
    optimizer = bnn.optimizer(lr=0.1)
    bnn.loss((torch.randn(4, 3), torch.randn(4, 3))).backward()
    optimizer.step()
    moved = (bnn.model.weight.detach() - before).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.1), rtol=1e-3, atol=1e-4)
