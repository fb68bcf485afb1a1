"""Mistakes that Bayesian neural network code is known to make, one test each."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import distributions, nn
from torch.func import functional_call

import bayeslim as bl
from bayeslim import likelihoods, priors, stochastic
from bayeslim.methods import variational

ESTIMATORS = ["local", "shared", "flipout"]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def make(model: nn.Module | None = None, estimator: str = "auto", std: float = 0.1, **options) -> bl.Bayesian:
    method = bl.Variational(family=bl.families.DiagonalGaussian(initial_std=std), estimator=estimator)
    options = {"likelihood": likelihoods.Gaussian(1.0), "num_data": 50} | options
    return bl.bayesianize(model if model is not None else mlp(), method, **options)


def kl_of(bnn: bl.Bayesian, prior_std: float = 1.0) -> float:
    """The sum over every weight of every layer, from torch.distributions."""
    q = bnn.posterior_
    p = distributions.Normal(0.0, prior_std)
    return sum(distributions.kl_divergence(distributions.Normal(q.mean[n], q.std[n]), p).sum().item() for n in q.names)


def test_kl_is_summed_over_weights_and_layers():
    """The KL averaged over a layer's weights, or over layers, instead of summed."""
    bnn = make()
    bnn.loss((torch.randn(4, 3), torch.randn(4, 2)))
    assert bnn.terms.kl.item() == pytest.approx(kl_of(bnn), rel=1e-5)


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_kl_is_divided_by_the_size_of_the_data(batch):
    """The KL divided by the size of the batch."""
    bnn = make(num_data=50)
    loss = bnn.loss((torch.randn(batch, 3), torch.randn(batch, 2)))
    assert loss.item() - bnn.terms.nll.item() == pytest.approx(kl_of(bnn) / 50, rel=1e-4)


def test_the_data_term_is_a_mean_over_examples_and_a_sum_over_their_targets():
    """A data term averaged over targets as well, which weighs it against the KL by another factor."""
    bnn = make(std=1e-6)
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    bnn.loss((x, y))
    expected = -distributions.Normal(bnn.mean_network()(x), 1.0).log_prob(y).sum() / 6
    assert bnn.terms.nll.item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("std", [0.1, 3.0])
def test_the_priors_std_is_a_standard_deviation(std):
    """A prior's variance used as its standard deviation, or the other way round."""
    bnn = make(prior=priors.Normal(std))
    bnn.loss((torch.randn(4, 3), torch.randn(4, 2)))
    assert bnn.terms.kl.item() == pytest.approx(kl_of(bnn, std), rel=1e-5)
    assert priors.Normal(std).sample((20_000,)).std().item() == pytest.approx(std, rel=0.05)


def test_the_posteriors_std_is_a_standard_deviation():
    """A log-variance, or the raw parameter of the spread, taken for the standard deviation."""
    q = make(std=0.2).posterior_
    draws = q.sample(4000)
    for name in q.names:
        assert torch.allclose(q.std[name], torch.full_like(q.std[name], 0.2))
        assert torch.allclose(q.variance[name], torch.full_like(q.std[name], 0.04))
        assert draws[name].std(0).mean().item() == pytest.approx(0.2, rel=0.03)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_noise_adds_the_perturbation_alone(estimator):
    """The whole sampled weight added to the mean's output, instead of its deviation from the mean."""
    bnn, x = make(estimator=estimator, std=1e-6), torch.randn(16, 3)
    assert torch.allclose(bnn(x), bnn.mean_network()(x), atol=1e-4)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self, recurrent: nn.Module):
        super().__init__()
        self.recurrent = recurrent

    def forward(self, x):
        return self.recurrent(x)[0].mean(1)


EVERY_MODULE = {
    "bare linear": (lambda: nn.Linear(4, 3), (4,)),
    "gru": (lambda: Recurrent(nn.GRU(4, 3, batch_first=True)), (5, 4)),
    "two-layer lstm": (lambda: Recurrent(nn.LSTM(4, 3, num_layers=2, batch_first=True)), (5, 4)),
    "bidirectional lstm": (lambda: Recurrent(nn.LSTM(4, 3, bidirectional=True, batch_first=True)), (5, 4)),
    "padding mode": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 4, 4)),
    "dilation and groups": (lambda: nn.Conv2d(4, 4, 2, dilation=3, groups=2), (4, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 4, 2, groups=2, output_padding=1, stride=2), (4, 3, 3)),
    "attention": (Attention, (5, 4)),
    "several layers": (mlp, (3,)),
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(("build", "shape"), EVERY_MODULE.values(), ids=EVERY_MODULE.keys())
def test_conversion_keeps_the_layer_and_makes_it_random(build, shape, estimator):
    """Conversion that silently does nothing, or drops a layer's padding mode, depth, dilation or groups."""
    model, x = build(), torch.randn(6, *shape)
    bnn = make(model, estimator, sites="all")
    assert torch.allclose(bnn.eval()(x), model(x), atol=1e-6)
    bnn.train()
    one, other = bnn(x), bnn(x)
    assert one.shape == other.shape == model(x).shape
    # every output of every example is random
    assert (one - other).abs().min() > 0
    gradients = torch.autograd.grad(bnn.loss((x, torch.zeros_like(one)), kl_weight=0.0), list(bnn.model.parameters()))
    # by parameter, not by weight: the bias of attention's keys cancels in the softmax
    assert all(g.abs().max() > 0 for g in gradients)


def test_conversion_makes_embeddings_random():
    """An embedding passed over in silence."""
    model = nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(6, 2))
    assert "0.weight" not in make(model).sites.names
    assert "embedding, trained as a point" in repr(make(model).sites)
    bnn, tokens = make(model, sites="weights"), torch.randint(7, (4, 2))
    assert bnn.sites.names == ("0.weight", "2.weight")
    loss = bnn.loss((tokens, torch.randn(4, 2)), kl_weight=0.0)
    (gradient,) = torch.autograd.grad(loss, [bnn.method.family.log_std(bnn.model, "0.weight")])
    seen = torch.zeros(7, dtype=torch.bool).index_fill(0, tokens.flatten(), True)
    assert gradient[seen].abs().min() > 0
    assert gradient[~seen].abs().sum() == 0


def test_the_mean_network_follows_training_through_a_move():
    """A frozen or MAP network that holds the weights from before training, after a move to a device or dtype."""
    bnn = make().to(torch.float64)
    optimizer = bnn.optimizer(lr=0.1)
    x, y = torch.randn(8, 3).double(), torch.randn(8, 2).double()
    before = bl.predict(bnn, x, how="map").mean
    for _ in range(5):
        optimizer.zero_grad()
        bnn.loss((x, y)).backward()
        optimizer.step()
    trained = {n: p.detach() for n, p in bnn.model.named_parameters() if "std" not in n}
    expected = functional_call(mlp().double(), trained, x)
    assert (expected - before).abs().max() > 0.05
    for outputs in (bl.predict(bnn, x, how="map").mean, bnn.eval()(x), bnn.mean_network()(x)):
        assert torch.allclose(outputs, expected)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_deepcopy_after_a_forward_pass(estimator):
    """Deep copies that fail once a layer holds a sampled tensor with a gradient."""
    bnn, x = make(estimator=estimator), torch.randn(4, 3)
    bnn.loss((x, torch.randn(4, 2))).backward()
    bnn(x)
    twin = copy.deepcopy(bnn)
    assert torch.equal(twin.eval()(x), bnn.eval()(x))
    next(twin.parameters()).data.zero_()
    assert not torch.equal(twin(x), bnn(x))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_evaluation_mode_is_not_random(estimator):
    """A network that still draws weights after eval()."""
    bnn, x = make(estimator=estimator), torch.randn(4, 3)
    assert not torch.equal(bnn(x), bnn(x))
    bnn.eval()
    assert torch.equal(bnn(x), bnn(x))
    assert torch.equal(bnn(x), bnn.mean_network()(x))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_recurrent_weights_are_drawn_once_a_sequence(estimator, monkeypatch):
    """Weights of a recurrent layer drawn anew at every time step."""
    drawn = []

    def recording(like):
        drawn.append(torch.randn_like(like))
        return drawn[-1]

    model, x = Recurrent(nn.LSTM(2, 3, num_layers=2, batch_first=True)), torch.randn(4, 9, 2)
    bnn = make(model, estimator, std=0.5)
    q = bnn.posterior_
    monkeypatch.setattr(variational, "standard_normal_like", recording)
    outputs = bnn(x)
    assert len(drawn) == len(q.names) == 4
    weights = {n: q.mean[n] + q.std[n] * noise for n, noise in zip(q.names, drawn, strict=True)}
    assert torch.allclose(outputs, functional_call(model, weights, x), atol=1e-6)


def test_steps_are_counted_once_a_step():
    """A counter (of a warm-up or burn-in) that advances for every tensor instead of every step."""
    bnn = make()
    optimizer = bnn.optimizer(lr=1e-3)
    for _ in range(3):
        bnn.loss((torch.randn(4, 3), torch.randn(4, 2))).backward()
        optimizer.step()
    assert bnn.step == 3


def test_samples_are_separate_draws():
    """A list of n references to one sample taken for n samples."""
    bnn = make()
    draws = bnn.posterior_.sample(5)["0.weight"]
    outputs = bl.predict(bnn, torch.randn(4, 3), samples=5).samples
    for values in (draws, outputs):
        assert len({tuple(v.flatten().tolist()) for v in values}) == 5


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradients_pass_through_the_sampled_weights(estimator):
    """Sampled weights wrapped as fresh parameters, which cuts the gradient to their mean and spread."""
    bnn = make(nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(6, 2)), estimator, sites="all")
    bnn.loss((torch.randn(4, 2, 4), torch.randn(4, 2)), kl_weight=0.0).backward()
    assert len(list(bnn.parameters())) == 8
    assert all(p.grad.abs().min() > 0 for p in bnn.parameters())


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.alias = self.layer
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.layer.weight

    def forward(self, x):
        return self.tied(self.alias(self.layer(x)))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_shared_layers_count_once(estimator):
    """A layer that is used twice, or tied weights, counted twice in the KL or drawn twice in a pass."""
    model, x = Twice(), torch.randn(4, 3)
    bnn = make(model, estimator, std=0.3)
    bnn.loss((x, torch.randn(4, 3)))
    assert bnn.sites.names == ("layer.weight",)
    assert bnn.terms.kl.item() == pytest.approx(kl_of(bnn), rel=1e-5)
    torch.manual_seed(1)
    outputs = bnn(x)
    torch.manual_seed(1)
    weight = bnn.posterior_.sample()["layer.weight"]
    assert torch.allclose(outputs, functional_call(model, {"layer.weight": weight}, x), atol=1e-5)


@pytest.mark.parametrize("bias", [0.0, 1e3])
def test_the_variance_branch_does_not_see_the_bias(bias, monkeypatch):
    """The bias added to the variance of the pre-activations."""
    layer = nn.Linear(4, 3)
    nn.init.constant_(layer.bias, bias)
    bnn, x = make(layer.double(), "local", std=0.5), torch.randn(6, 4).double()
    monkeypatch.setattr(stochastic, "standard_normal_like", lambda like, **_: torch.ones_like(like))
    noise = bnn(x) - bnn.eval()(x)
    assert torch.allclose(noise, 0.5 * x.norm(dim=1, keepdim=True).expand(6, 3))


def test_evidence_draws_whole_weights(monkeypatch):
    """A bound reported from noise drawn at every position, which is not the bound of any shared weight."""
    model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1))
    bnn, batch = make(model, "local"), (torch.randn(5, 1, 6), torch.randn(5, 1))
    bnn.loss(batch)
    assert any(stochastic.is_noisy(m) for m in bnn.modules())
    torch.manual_seed(2)
    found = bl.log_evidence(bnn, [batch], samples=4).value
    torch.manual_seed(2)
    draws = [bnn.posterior_.sample() for _ in range(4)]
    plain = bnn.mean_network()
    log_likelihood = [bnn.likelihood.log_prob(functional_call(plain, w, batch[0]), batch[1]).sum() for w in draws]
    assert found == pytest.approx(torch.stack(log_likelihood).mean().item() - kl_of(bnn), rel=1e-5)


@pytest.mark.parametrize("drop", [0.1, 0.5, 0.9])
def test_a_dropout_rate_is_the_probability_of_a_drop(drop):
    """α = p/(1 − p) taken with p the probability to keep, or used as a standard deviation."""
    torch.manual_seed(0)
    family = bl.families.DropoutGaussian(rate=drop, learn=False)
    bnn = bl.bayesianize(mlp(), bl.Variational(family), likelihood=likelihoods.Gaussian(1.0), num_data=50)
    weight = bnn.model[0].weight.detach()
    dropped = nn.functional.dropout(torch.ones(40_000, 1, 1), drop) * weight
    q = bnn.posterior_
    assert torch.allclose(q.mean["0.weight"], dropped.mean(0), atol=0.05)
    assert torch.allclose(q.variance["0.weight"], dropped.var(0), rtol=0.1)
    assert torch.allclose(q.sample(40_000)["0.weight"].var(0), dropped.var(0), rtol=0.1)


@pytest.mark.parametrize(
    "prior", [priors.LogUniform(), priors.LogUniform("approximate"), priors.RelevanceDetermination()]
)
def test_alpha_is_a_ratio_of_variances(prior):
    """Log σ taken for log σ², or σ/|μ| for α, in the divergence of a sparsity prior or in the score to prune by."""
    bnn = make(prior=prior, std=0.1)
    bnn.loss((torch.randn(4, 3), torch.randn(4, 2)))
    q = bnn.posterior_
    alpha = torch.cat([(q.variance[n] / q.mean[n].square()).flatten() for n in q.names]).double()
    least = 0.5 * alpha.reciprocal().log1p().sum().item()
    assert least * (1 - 1e-5) <= bnn.terms.kl.item() <= least + 0.6358 * len(alpha)
    by_alpha = bl.plan(bnn, bl.Budget(threshold=-2.0), criterion="log_alpha").masks
    for name in q.names:
        assert torch.equal(by_alpha[name], -(q.variance[name] / q.mean[name].square()).log() >= -2.0)
