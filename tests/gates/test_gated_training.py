"""Gates learn what a network needs, whichever way they are drawn."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import bayeslim as bl
from bayeslim import families, gates, likelihoods
from bayeslim.gates import Gate

CASES: dict[str, Gate] = {
    "normal_jeffreys": gates.NormalJeffreys(),
    "half_cauchy": gates.HalfCauchy(),
    "half_cauchy, centred": gates.HalfCauchy(centred=True),
    "truncated_log_normal": gates.TruncatedLogNormal(),
    "hard_concrete": gates.HardConcrete(cost=10.0),
    "information_bottleneck": gates.InformationBottleneck(),
    "concrete": gates.Bernoulli(0.2, learn="concrete"),
    "reinforce": gates.Bernoulli(0.2, learn="reinforce"),
}
X = torch.randn(200, 6, generator=torch.Generator().manual_seed(1))
Y = 2 * X[:, :1] - 1.5 * X[:, 1:2] + 0.1 * torch.randn(200, 1, generator=torch.Generator().manual_seed(2))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))


def gated(model: nn.Module, gate: Gate, family=None, **settings) -> bl.Bayesian:
    method = bl.Variational(family or families.Point(), gates=gate, **settings)
    return bl.bayesianize(model, method, likelihood=likelihoods.Gaussian(0.3), num_data=len(X))


@pytest.mark.parametrize("gate", CASES.values(), ids=CASES.keys())
def test_inputs_that_matter_stay_and_others_go(gate):
    torch.manual_seed(0)
    bnn = gated(nn.Linear(6, 1), gate)
    optimizer = bnn.optimizer(lr=5e-2)
    for _ in range(200):
        bnn.loss((X, Y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    scales = bnn.posterior_.scales[0]
    scores = gate.score(scales.own)
    assert scores[:2].min() > scores[2:].max()
    assert not scales.closed[:2].any()
    if gate.name != "bernoulli":  # without weight decay, the gate of a useless input stays a fair coin
        assert scales.closed.sum() >= 2
    torch.testing.assert_close(bnn.posterior_.mean["weight"][0, :2], torch.tensor([2.0, -1.5]), rtol=0.1, atol=0.0)
    assert bnn.posterior_.mean["weight"][0, 2:].abs().max() < 0.1


@pytest.mark.parametrize(
    ("gate", "family"),
    [
        (gates.NormalJeffreys(0.3), families.DiagonalGaussian(0.1)),
        (gates.HardConcrete(), families.Point()),
        (gates.Bernoulli(0.3), families.DiagonalGaussian(0.1)),
    ],
)
def test_noise_for_every_example_and_in_whole_weights_cost_the_same(gate, family):
    """The expected loss of both estimators, on a network where local noise has the right marginals."""
    torch.manual_seed(0)
    model, batch = nn.Linear(6, 1), (X, Y)
    losses = []
    for estimator in ("local", "shared"):
        bnn = gated(model, gate, family, estimator=estimator)
        torch.manual_seed(5)
        with torch.no_grad():
            losses.append(torch.stack([bnn.loss(batch) for _ in range(200)]))
    local, shared = losses
    error = (local.var() / 200 + shared.var() / 200).sqrt()
    assert abs(local.mean() - shared.mean()) <= 5 * error
    assert local.var() < shared.var() / 4


class Seen(nn.Module):
    """A layer that keeps its input."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1, bias=False)
        self.fc = nn.Linear(channels, channels, bias=False)
        self.last = nn.Linear(channels, 1)
        for layer in (self.conv, self.fc):
            nn.init.eye_(layer.weight.data.view(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        self.image = self.conv(x)
        self.positions = self.fc(self.image.flatten(2).transpose(1, 2))
        return self.last(self.positions.mean(1))


def test_one_draw_an_example_for_all_positions():
    gate = gates.NormalJeffreys(initial_std=0.5)
    bnn = gated(Seen(3), gate)
    bnn.train()
    bnn(torch.ones(7, 3, 4, 4))
    image, positions = bnn.model.image, bnn.model.positions
    assert (image == image[:, :, :1, :1]).all()
    assert len(image[:, 0, 0, 0].unique()) == 7
    torch.testing.assert_close(positions, positions[:, :1].expand_as(positions))
    again = positions.detach().clone()
    bnn(torch.ones(7, 3, 4, 4))
    assert not torch.equal(again, bnn.model.positions)


def test_inputs_without_a_dimension_of_examples():
    bnn = gated(Seen(3), gates.NormalJeffreys(initial_std=0.5))
    bnn(torch.ones(2, 3, 4, 4))
    hooked = bnn.model
    assert hooked.conv(torch.ones(3, 4, 4)).shape == (3, 4, 4)
    assert hooked.fc(torch.ones(3)).shape == (3,)
    assert hooked.fc(input=torch.ones(2, 3)).shape == (2, 3)


def test_evaluation_is_the_mean_network_with_closed_gates_at_zero():
    bnn = gated(mlp(), gates.NormalJeffreys(), families.SparseGaussian())
    with torch.no_grad():
        bnn.model[2].inputs_gate_mean[:2] = torch.tensor([0.0, 0.5])
    bnn.eval()
    weight = bnn.posterior_.mean["2.weight"]
    assert not weight[:, 0].any()
    torch.testing.assert_close(weight[:, 1], 0.5 * bnn.model[2].weight[:, 1])
    torch.testing.assert_close(bnn(X), bnn.mean_network().eval()(X))
    torch.testing.assert_close(bnn(X), bl.predict(bnn, X, how="mean").samples[0])
    bnn.loss((X, Y))
    torch.testing.assert_close(bnn(X), bnn.mean_network().eval()(X))
    assert not any(hooks for m in bnn.mean_network().modules() for hooks in (m._forward_hooks, m._forward_pre_hooks))


def test_training_at_the_means_has_no_noise_of_gates():
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 1))
    x = torch.randn(5, 1, 4, 4)
    for family in (families.Point(), families.SparseGaussian()):
        bnn = gated(model, gates.NormalJeffreys(initial_std=0.5), family)
        bnn.loss((x, Y[:5]))  # from now on gates draw at their layers
        bnn.method = replace(bnn.method, estimator="mean")
        assert torch.equal(bnn(x), bnn(x))
        losses = [bnn.loss((x, Y[:5])) for _ in range(2)]
        assert losses[0] == losses[1]
        losses[0].backward()
        assert all(torch.isfinite(p.grad).all() for p in bnn.model[3].parameters() if p.grad is not None)


def test_predictions_are_draws_of_the_gates():
    torch.manual_seed(0)
    bnn = gated(nn.Linear(6, 1), gates.NormalJeffreys(initial_std=0.3))
    sampled, local = (bl.predict(bnn, X, samples=2000, how=how) for how in ("auto", "local"))
    expected = (X.square() @ (0.3 * bnn.model.weight.detach()[0]).square())[:, None]
    torch.testing.assert_close(sampled.samples.var(0), expected, rtol=0.2, atol=1e-3)
    torch.testing.assert_close(local.samples.var(0), expected, rtol=0.25, atol=1e-3)
    with pytest.raises(bl.errors.UnsupportedModel, match="gated"):
        bl.predict(bnn, X, how="moments")


@pytest.mark.parametrize("gate", [gates.HalfCauchy(), gates.Bernoulli(learn="reinforce")], ids=lambda g: g.name)
def test_a_stopped_run_goes_on_exactly(gate, tmp_path):
    class Stop(BaseException):
        pass

    def fit(folder, stop_in: int | None = None) -> bl.Bayesian:
        def stop(epoch) -> None:
            if epoch.number == stop_in:
                raise Stop

        torch.manual_seed(0)
        bnn = gated(mlp(), gate, families.DiagonalGaussian())
        loader = bl.data.Loader(X, Y, batch_size=50, shuffle=True, seed=1)
        bnn.fit(loader, epochs=4, lr=1e-2, seed=3, checkpoint=folder, callbacks=[stop])
        return bnn

    whole = fit(None)
    with pytest.raises(Stop):
        fit(tmp_path / "run", stop_in=3)
    resumed = fit(tmp_path / "run")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_reinforce_has_the_gradient_of_the_expected_loss():
    """Of four gates, by all sixteen settings of them."""
    torch.manual_seed(0)
    gate = gates.Bernoulli(0.4, learn="reinforce")
    x, y = X[:8, :4].double().repeat(16, 1), Y[:8].double().repeat(16, 1)
    bnn = gated(nn.Linear(4, 1).double(), gate)
    logit = bnn.model.inputs_gate_logit
    p = logit.detach().clone().requires_grad_()
    expected = torch.zeros((), dtype=torch.float64)
    for number in range(16):
        kept = torch.tensor([number >> bit & 1 for bit in range(4)], dtype=torch.float64)
        probability = (kept * torch.sigmoid(-p) + (1 - kept) * torch.sigmoid(p)).prod()
        outputs = (x * kept * (1 + p.exp())) @ bnn.model.weight.detach().T + bnn.model.bias.detach()
        expected = expected - probability * bnn.likelihood.log_prob(outputs, y).mean()
    expected.backward()
    gradients = []
    for _ in range(300):
        logit.grad = None
        bnn.loss((x, y), kl_weight=0.0).backward()
        gradients.append(logit.grad.clone())
    found = torch.stack(gradients)
    assert ((found.mean(0) - p.grad).abs() <= 4.5 * found.std(0) / len(found) ** 0.5).all()


def test_draws_that_no_loss_belongs_to_are_refused():
    class Reshaped(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.last = nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.fc(x.reshape(-1, 3)).reshape(len(x), 6))

    gate = gates.Bernoulli(learn="reinforce")
    with pytest.raises(bl.errors.ShapeMismatch, match='estimator="shared"'):
        gated(Reshaped(), gate).loss((X, Y))
    gated(Reshaped(), gate, estimator="shared").loss((X, Y)).backward()
    gated(Reshaped(), gates.Bernoulli(learn="concrete")).loss((X, Y)).backward()


def test_the_kl_is_the_sum_of_those_of_weights_and_gates():
    bnn = gated(mlp(), gates.InformationBottleneck(), families.DiagonalGaussian(0.1))
    bnn.loss((X, Y))
    kl = sum(prior.kl(bnn.posterior_.base.mean[n], bnn.posterior_.base.std[n]) for n, prior in bnn.priors.items())
    for scales in bnn.posterior_.scales:
        kl = kl + scales.gate.kl(scales.own)
    assert bnn.terms.kl.item() == pytest.approx(kl.item(), rel=1e-5)
    points = gated(mlp(), gates.InformationBottleneck())
    points.loss((X, Y))
    kl = -points.log_prior().detach()
    for scales in points.posterior_.scales:
        kl = kl + scales.gate.kl(scales.own)
    assert points.terms.kl.item() == pytest.approx(kl.item(), rel=1e-5)


@pytest.mark.parametrize("family", [families.DiagonalGaussian(0.1), families.Point()], ids=lambda f: f.name)
@pytest.mark.parametrize(
    "gate",
    [gates.HalfCauchy(centred=True), gates.NormalJeffreys(centred=True), gates.Bernoulli(0.3)],
    ids=lambda g: g.name,
)
def test_gates_with_a_say_in_the_weights_kl(gate, family):
    bnn = gated(mlp(), gate, family)
    if gate.name == "normal_jeffreys" and family.name == "point":
        with pytest.raises(bl.errors.UnsupportedModel, match="needs weights with a posterior"):
            bnn.loss((X, Y))
        return
    bnn.loss((X, Y))
    kl, base = 0.0, bnn.posterior_.base
    for scales in bnn.posterior_.scales:
        name = scales.place.parts[0].parameter
        std = base.std[name] if family.name == "diagonal" else None
        groups = torch.arange(scales.place.count).expand_as(base.mean[name])
        kl += scales.gate.kl(scales.own)
        kl += gate.weight_kl(scales.own, base.mean[name], std, groups, bnn.priors[name])
    assert bnn.terms.kl.item() == pytest.approx(kl.item(), rel=1e-5)


def test_inputs_go_where_centred_log_uniform_scales_find_no_signal():
    torch.manual_seed(0)
    gate = gates.NormalJeffreys(centred=True)
    bnn = gated(nn.Linear(6, 1), gate, families.DiagonalGaussian(0.1))
    bnn.fit([(X, Y)], epochs=400, lr=5e-2)
    scales = bnn.posterior_.scales[0]
    assert gate.score(scales.own)[:2].min() > gate.score(scales.own)[2:].max() + 1
    assert scales.closed.tolist() == [False, False, True, True, True, True]
    torch.testing.assert_close(bnn.posterior_.mean["weight"][0, :2], torch.tensor([2.0, -1.5]), rtol=0.1, atol=0.0)


@pytest.mark.parametrize("gate", [gates.InformationBottleneck(per="weight"), gates.HardConcrete(per="weight")])
def test_a_price_for_each_weight_is_that_of_a_gate_times_its_weights(gate):
    bnn = gated(mlp(), gate)
    bnn.loss((X, Y))
    kl = -bnn.log_prior().detach()
    for scales, weights in zip(bnn.posterior_.scales, (5, 6 + 1), strict=True):
        kl = kl + weights * gate.kl(scales.own)
    assert bnn.terms.kl.item() == pytest.approx(kl.item(), rel=1e-5)


@pytest.mark.parametrize("gate", [gates.InformationBottleneck(per="example"), gates.HardConcrete(per="example")])
@pytest.mark.parametrize("num_data", [40, 4000])
def test_a_price_for_each_example_is_shared_by_the_gates_in_proportion_to_their_weights(gate, num_data):
    bnn = gated(mlp(), gate)
    bnn.num_data = num_data
    bnn.loss((X, Y))
    inputs, units = (gate.kl(scales.own) for scales in bnn.posterior_.scales)
    price = (5 * inputs + (6 + 1) * units) / (6 * 5 + 5 * (6 + 1))
    of_gates = (bnn.terms.kl + bnn.log_prior()) / num_data
    assert of_gates.item() == pytest.approx(price.item(), rel=1e-4)


@pytest.mark.parametrize("cut", [False, True])
def test_weights_under_two_dropped_sides_cost_the_square_of_both(cut):
    bnn = gated(mlp(), gates.Bernoulli(0.3, learn="concrete"), gate_at={"0": ("inputs", "outputs")})
    if cut:
        bnn = bl.prune(bnn, bl.Budget(sparsity=0.4), criterion="magnitude")
    bnn.loss((X, Y))
    inputs, outputs = (scales.gate.variance(scales.own) for scales in bnn.posterior_.scales)
    both = (1 + inputs) * (1 + outputs[:, None]) - 1
    kl = 0.5 * (both * bnn.model[0].weight.detach().square()).sum()
    for name, prior in bnn.priors.items():
        weight = bnn.model.get_parameter(name).detach()
        kl = kl - prior.log_prob(weight[weight != 0]).sum()
    for scales in bnn.posterior_.scales:
        assert not scales.cut.any()
        kl = kl + scales.gate.kl(scales.own)
    assert bnn.terms.kl.item() == pytest.approx(kl.item(), rel=1e-5)


def test_centred_scales_need_one_random_weight_each():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0]

    with pytest.raises(bl.errors.UnsupportedModel, match="two centred scales"):
        gated(Net(), gates.HalfCauchy(centred=True))
    gated(Net(), gates.HalfCauchy(centred=True), gate_at={"lstm": ("inputs", "hidden")})


def test_points_alone_are_maximum_a_posteriori():
    bnn = bl.bayesianize(mlp(), bl.Variational(families.Point()), likelihood=likelihoods.Gaussian(0.3), num_data=200)
    loss = bnn.loss((X, Y))
    nll = -bnn.likelihood.log_prob(bnn.model(X), Y).mean()
    torch.testing.assert_close(loss, nll - bnn.log_prior() / 200)
    assert not any(std.any() for std in bnn.posterior_.std.values())
    with pytest.raises(bl.errors.BayeslimError, match="no density"):
        bnn.method.family.density(bnn.model, bnn.sites.names, {})
    prior = bl.priors.Normal(1.0, learn=True)
    with pytest.raises(bl.errors.UnsupportedModel, match="does not learn priors"):
        bl.bayesianize(mlp(), bl.Variational(families.Point()), likelihood=likelihoods.Gaussian(0.3), prior=prior)


def test_half_precision_and_user_hooks():
    seen = []
    model = mlp()
    model[0].register_forward_hook(lambda module, args, output: seen.append(output))
    bnn = gated(model.bfloat16(), gates.NormalJeffreys(0.5))
    assert bnn.model[0].inputs_gate_mean.dtype == torch.float32
    bnn.loss((X.bfloat16(), Y.bfloat16())).backward()
    assert all(torch.isfinite(p.grad).all() for p in bnn.model.parameters())
    assert bnn.eval()(X.bfloat16()).dtype == torch.bfloat16
    assert seen
    twin = copy.deepcopy(bnn.train())
    torch.manual_seed(0)
    first = bnn(X.bfloat16())
    torch.manual_seed(0)
    assert torch.equal(first, twin(X.bfloat16()))


@pytest.mark.parametrize("gate", [gates.HalfCauchy(), gates.HalfCauchy(centred=True), gates.TruncatedLogNormal()])
def test_the_evidence_is_bounded_by_what_is_trained(gate):
    torch.manual_seed(0)
    bnn = gated(nn.Linear(6, 1), gate, families.DiagonalGaussian(0.1), estimator="shared")
    bnn.fit([(X, Y)], epochs=20, lr=5e-2)
    found = bl.log_evidence(bnn, [(X[:120], Y[:120]), (X[120:], Y[120:])], samples=150)
    assert found.is_bound
    with torch.no_grad():
        bounds = -len(X) * torch.stack([bnn.loss((X, Y)) for _ in range(150)])
    error = (bounds.double().var() / 150 + found.std_error**2).sqrt()
    assert abs(found.value - bounds.mean()) <= 4 * error


def test_what_is_not_said_of_gated_weights_is_refused():
    bnn = gated(mlp(), gates.HalfCauchy(), families.DiagonalGaussian())
    with pytest.raises(bl.errors.BayeslimError, match="no closed form"):
        bl.log_evidence(bnn, [(X, Y)], renyi=0.5)
    with pytest.raises(bl.errors.ImproperPrior, match="NormalJeffreys"):
        bl.log_evidence(gated(mlp(), gates.NormalJeffreys(), families.DiagonalGaussian()), [(X, Y)])
    with pytest.raises(bl.errors.BayeslimError, match="no distribution"):
        bl.log_evidence(gated(mlp(), gates.HalfCauchy()), [(X, Y)])
    with pytest.raises(bl.errors.BayeslimError, match="gates"):
        bl.continual.update(bnn, [(X, Y)])
