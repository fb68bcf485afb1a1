"""The prior of samplers is `bnn.log_prior()`, value and gradient."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.methods.shared.normal_prior import weight_decay
from bayeslim.priors import Laplace, Normal

PRIORS = {
    "one": Normal(0.7),
    "two": {"0": Normal(2.0, mean=0.5), "all": Normal(0.3)},
    "tensor": Normal(torch.tensor(0.5)),
    "another": {"0": Laplace(1.0), "all": Normal(0.3)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", PRIORS)
def test_value_and_gradient(kind, dtype):
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)
    bnn = bl.bayesianize(model, bl.SGLD(), likelihood=bl.likelihoods.Categorical(), prior=PRIORS[kind], num_data=9)
    values, gradients = [], []
    elementwise = sum(bnn.priors[name].log_prob(p).sum() for name, p in bnn.model.named_parameters())
    for prior in (bnn.log_prior(), elementwise):
        values.append(prior.detach())
        gradients.append(torch.autograd.grad(2.5 * prior, list(bnn.model.parameters())))
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*gradients)


def test_the_loss_is_the_negative_log_posterior():
    model = nn.Linear(5, 3)
    bnn = bl.bayesianize(model, bl.SGLD(), likelihood=bl.likelihoods.Categorical(), num_data=9)
    x, y = torch.randn(4, 5), torch.arange(4) % 3
    expected = nn.functional.cross_entropy(bnn.model(x), y) - bnn.log_prior() / 9
    torch.testing.assert_close(bnn.loss((x, y)), expected)


def test_the_prior_as_weight_decay():
    x, y = torch.randn(4, 5), torch.arange(4) % 3
    networks = []
    for decays in (False, True):
        torch.manual_seed(0)
        bnn = bl.bayesianize(
            nn.Linear(5, 3).double(), bl.SGHMC(), likelihood=bl.likelihoods.Categorical(), prior=Normal(0.5), num_data=9
        )
        sampler = bnn.optimizer(0.1)
        if decays:
            sampler.param_groups[0]["weight_decay"] = weight_decay(bnn)
            assert weight_decay(bnn) == pytest.approx(1 / (0.25 * 9))
        for _ in range(5):
            sampler.zero_grad()
            bnn.loss((x.double(), y), kl_weight=0.0 if decays else None).backward()
            assert float(bnn.terms.kl) == pytest.approx(-bnn.log_prior().item())
            sampler.step()
        networks.append(bnn)
    torch.testing.assert_close(networks[0].state_dict(), networks[1].state_dict())


def test_a_network_with_terms_of_its_last_batch_is_copied_and_freed():
    bnn = bl.bayesianize(nn.Linear(5, 3), bl.SGLD(), likelihood=bl.likelihoods.Categorical(), num_data=9)
    bnn.loss((torch.randn(4, 5), torch.arange(4) % 3), kl_weight=0.0)
    other = pickle.loads(pickle.dumps(copy.deepcopy(bnn)))
    assert other.terms.kl == bnn.terms.kl
    gone = weakref.ref(bnn)
    gc.disable()
    try:
        del bnn
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["two", "tensor", "another"])
def test_other_priors_are_no_weight_decay(kind):
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    bnn = bl.bayesianize(model, bl.SGLD(), likelihood=bl.likelihoods.Categorical(), prior=PRIORS[kind], num_data=9)
    assert weight_decay(bnn) is None


@pytest.mark.parametrize("method", [bl.SGLD(), bl.SGHMC(), bl.SGNHT(), bl.PSGLD(), bl.SGHMC(adapt=True)])
def test_fit_is_the_same_chain_whichever_way_the_prior_goes(method, monkeypatch):
    """By weight decay, or in the gradients: the same networks, and the same loss is reported."""
    torch.manual_seed(0)
    data = torch.randn(30, 5).double(), torch.randint(0, 3, (30,))
    start = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    found = []
    for quick in (True, False):
        if not quick:
            monkeypatch.setattr("bayeslim.methods.shared.chain_method.weight_decay", lambda bnn: None)
        bnn = bl.bayesianize(start, method, likelihood=bl.likelihoods.Categorical(), prior=Normal(0.3))
        loader = bl.data.Loader(*data, 10)
        fit = bnn.fit(loader, epochs=30, lr=0.01, seed=1, progress=False, accumulate=2)
        found.append((bnn.posterior_.values, fit.history[-1]))
    torch.testing.assert_close(found[0][0], found[1][0])
    for key, value in found[0][1].items():
        assert value == pytest.approx(found[1][1][key])


def test_the_loss_without_its_prior_compiles():
    bnn = bl.bayesianize(nn.Linear(5, 3), bl.SGLD(), likelihood=bl.likelihoods.Categorical(), num_data=9)
    batch = torch.randn(4, 5), torch.arange(4) % 3
    compiled = torch.compile(bnn.objective, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(batch, kl_weight=0.0), bnn.loss(batch, kl_weight=0.0))


def test_in_fit_the_loss_is_all_of_it_and_its_gradient_the_data_term():
    seen = []

    def look(epoch):
        x, y = torch.ones(4, 5), torch.arange(4) % 3
        loss = epoch.bnn.loss((x, y))
        nll = nn.functional.cross_entropy(epoch.bnn.model(x), y)
        torch.testing.assert_close(loss, nll - epoch.bnn.log_prior() / 12)
        gradients = [torch.autograd.grad(value, epoch.bnn.model.weight)[0] for value in (loss, nll)]
        torch.testing.assert_close(*gradients)
        seen.append(epoch.number)

    bnn = bl.bayesianize(nn.Linear(5, 3), bl.SGLD(samples=2), likelihood=bl.likelihoods.Categorical())
    data = bl.data.Loader(torch.randn(12, 5), torch.arange(12) % 3, 4)
    bnn.fit(data, epochs=3, callbacks=[look], progress=False)
    assert seen == [1, 2, 3]
