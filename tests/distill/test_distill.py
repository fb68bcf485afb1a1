"""Distillation: students whose best is known, taught by posteriors whose predictions are known."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayeslim as bl
from bayeslim import likelihoods
from bayeslim.distill import divergences as imitation
from bayeslim.distill.student import Student
from bayeslim.errors import BayeslimError, BayeslimWarning, NotFitted, ShapeMismatch, UnsupportedModel
from bayeslim.methods.shared.particle_method import ParticleMethod
from bayeslim.posteriors import Particles
from bayeslim.types import inputs_of

ROWS = torch.eye(5)
"""One input a row: a linear student without a bias has its own outputs for each, and can say anything."""


@dataclass(frozen=True)
class Given(ParticleMethod):
    """Particles that are given, not fitted."""

    name: ClassVar[str] = "given"


def given(outputs: torch.Tensor, likelihood: bl.likelihoods.Likelihood) -> bl.Bayesian:
    """A teacher whose particle s says outputs[s] (S, 5, C) of the five rows."""
    model = nn.Linear(5, outputs.shape[-1], bias=False)
    bnn = bl.bayesianize(model, Given(), likelihood=likelihood, num_data=5)
    bnn.method.keep(bnn, Particles({"weight": outputs.transpose(1, 2).contiguous()}))
    return bnn


def logits(classes: int = 3, particles: int = 7) -> torch.Tensor:
    g = torch.Generator().manual_seed(3)
    return 2 * torch.randn(5, classes, generator=g) + torch.randn(particles, 5, classes, generator=g)


def free(classes: int = 3) -> nn.Module:
    student = nn.Linear(5, classes, bias=False)
    nn.init.zeros_(student.weight)
    return student


LOADER = [(ROWS, None)] * 20
QUICK = {"lr": 0.1, "lr_schedule": "cosine", "seed": 0, "progress": False}


@pytest.mark.parametrize(
    ("likelihood", "temperature"),
    [
        (likelihoods.Categorical(), 3.0),
        (likelihoods.Bernoulli(), 1.0),
        (likelihoods.Poisson(), 1.0),
        (likelihoods.Poisson(), 3.0),
    ],
)
def test_a_student_that_can_say_anything_says_what_the_teacher_says(likelihood, temperature):
    outputs = logits()
    teacher = given(outputs, likelihood)
    if likelihood.name == "poisson" and temperature != 1:
        with pytest.raises(ValueError, match="temperature softens probabilities"):
            bl.distill(teacher, LOADER, free(), temperature=temperature)
        return
    student = bl.distill(teacher, LOADER, free(), temperature=temperature, epochs=30, **QUICK)
    links = {"categorical": lambda f: f.softmax(-1), "bernoulli": torch.sigmoid, "poisson": torch.exp}
    link = links[likelihood.name]
    assert torch.allclose(link(student(ROWS)), link(outputs).mean(0), rtol=5e-3, atol=5e-3)
    assert not torch.allclose(link(student(ROWS)), link(outputs.mean(0)), rtol=2e-2, atol=2e-2)


def test_online_draws_lead_to_the_same_student():
    outputs = logits(particles=4)
    student = bl.distill(given(outputs, likelihoods.Categorical()), LOADER, free(), how="online", epochs=60, **QUICK)
    assert torch.allclose(student(ROWS).softmax(-1), outputs.softmax(-1).mean(0), atol=0.03)


def test_the_divergence_falls_to_the_floor_of_a_student_that_cannot_say_everything():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.logits = nn.Parameter(torch.tensor([1.0, -1.0, 2.0]))

        def forward(self, x):
            return self.logits.expand(len(x), 3)

    outputs, seen = logits(), []
    bl.distill(
        given(outputs, likelihoods.Categorical()), LOADER, Constant(), epochs=40,
        callbacks=[lambda epoch: seen.append(epoch.metrics["nll"])], **QUICK,
    )  # fmt: skip
    p = outputs.softmax(-1).mean(0)
    floor = (p * (p / p.mean(0)).log()).sum(-1).mean().item()
    assert seen[0] > 1.5 * floor
    assert seen[-1] == pytest.approx(floor, abs=1e-5)


@pytest.mark.parametrize(
    ("likelihood", "distribution"),
    [
        (likelihoods.Categorical(), lambda f: torch.distributions.Categorical(logits=f)),
        (likelihoods.Bernoulli(), lambda f: torch.distributions.Bernoulli(logits=f)),
        (likelihoods.Poisson(), lambda f: torch.distributions.Poisson(f.exp())),
        (
            likelihoods.Gaussian("heteroscedastic"),
            lambda f: torch.distributions.Normal(f.chunk(2, -1)[0], (f.chunk(2, -1)[1] / 2).exp()),
        ),
    ],
)
def test_divergences_are_those_of_torch(likelihood, distribution):
    teacher, student = torch.randn(2, 6, 4, dtype=torch.float64)
    each = torch.distributions.kl_divergence(distribution(teacher), distribution(student))
    told = imitation.targets_of(likelihood.predict(teacher[None]))
    found = imitation.divergence(likelihood, student, told)
    assert torch.allclose(found, each if each.ndim == 1 else each.sum(-1), rtol=1e-10)


def test_classes_may_be_in_any_dimension():
    teacher, student = torch.randn(2, 4, 3, 5, 2)  # (B, C, H, W)
    images, last = likelihoods.Categorical(class_dim=1), likelihoods.Categorical()
    told = imitation.targets_of(images.predict(teacher[None]))
    there = imitation.divergence(images, student, told)
    assert torch.allclose(there, imitation.divergence(last, student.movedim(1, -1), told))
    draws = torch.stack([teacher, student])
    mean_logs = imitation.dirichlet_targets(images, draws)
    assert torch.allclose(mean_logs, draws.log_softmax(2).mean(0).movedim(1, -1), atol=0.05)
    assert imitation.dirichlet_divergence(images, student, mean_logs).shape == (4,)


class Spread(nn.Module):
    """Mean W x and log variance log(noise² + |L x|²): all that linear regression can say."""

    def __init__(self, start: float = 0.5):
        super().__init__()
        self.mean = nn.Linear(3, 1, bias=False)
        self.root = nn.Parameter(start * torch.eye(3))
        self.noise = nn.Parameter(torch.tensor(0.0))

    def forward(self, x):
        variance = self.noise.exp() + (x @ self.root).square().sum(-1, keepdim=True)
        return torch.cat([self.mean(x), variance.log()], -1)


def linear_regression() -> tuple[bl.Bayesian, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A Laplace posterior that is exact, its mean and covariance, and inputs."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(12, 3, generator=g)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.5 * torch.randn(12, 1, generator=g)
    covariance = torch.linalg.inv(x.T @ x / 0.25 + torch.eye(3))
    mean = covariance @ x.T @ y / 0.25
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(mean.T)
    bnn = bl.bayesianize(model, bl.Laplace("full", curvature="exact"), likelihood=likelihoods.Gaussian(0.5))
    bnn.fit([(x, y)], progress=False)
    return bnn, mean, covariance, 2 * torch.randn(256, 3, generator=g)


@pytest.mark.parametrize(("how", "epochs", "tolerance"), [("probs", 25, 1e-3), ("online", 15, 4e-2)])
def test_means_and_variances_of_linear_regression_are_learned(how, epochs, tolerance):
    teacher, mean, covariance, x = linear_regression()
    student = bl.distill(teacher, [(x, None)] * 20, Spread(), how=how, epochs=epochs, **(QUICK | {"lr": 0.05}))
    assert torch.allclose(student.mean.weight.T, mean, atol=tolerance)
    assert torch.allclose(student.root @ student.root.T, covariance, atol=tolerance)
    assert student.noise.exp().item() == pytest.approx(0.25, abs=2 * tolerance)


def test_a_student_with_as_many_outputs_as_means_learns_the_means():
    teacher, mean, _, x = linear_regression()
    student = bl.distill(teacher, [(x, None)] * 20, nn.Linear(3, 1, bias=False), epochs=20, **QUICK)
    assert torch.allclose(student.weight.T, mean, atol=1e-3)
    with pytest.raises(ShapeMismatch, match=r"means of shape \(256, 1\).*Got \(256, 3\)"):
        bl.distill(teacher, [(x, None)], nn.Linear(3, 3), progress=False)


def maximum_likelihood(mean_log: torch.Tensor) -> torch.Tensor:
    """α of the Dirichlet with these E[log p], (C,), by Minka's fixed point."""
    alpha = 10 * mean_log.softmax(-1)
    for _ in range(5_000):
        target = torch.digamma(alpha.sum()) + mean_log
        root = torch.where(target > -2.22, target.exp() + 0.5, -1 / (target + 0.5772))
        for _ in range(5):
            root = root - (torch.digamma(root) - target) / torch.polygamma(1, root)
        if (root - alpha).abs().max() < 1e-6:
            break
        alpha = root
    return alpha


def dirichlet_teacher(particles: int = 4000) -> tuple[bl.Bayesian, torch.Tensor, torch.Tensor]:
    """Particles whose probabilities come from known Dirichlets, one for each row."""
    g = torch.Generator().manual_seed(8)
    alpha = torch.tensor([[2.0, 3, 5], [1, 1, 1], [20, 1.5, 1.5], [4, 0.8, 2], [30, 40, 50]])
    shape = alpha.expand(particles, 5, 3)
    gammas = torch._standard_gamma(shape.double(), generator=g)
    probs = (gammas / gammas.sum(-1, keepdim=True)).clamp_min(1e-9)
    return given(probs.log().float(), likelihoods.Categorical()), alpha, probs


def test_a_dirichlet_student_finds_the_dirichlet():
    teacher, alpha, probs = dirichlet_teacher()
    student = bl.distill(teacher, LOADER, free(), how="dirichlet", epochs=60, **(QUICK | {"lr": 0.2}))
    found = student(ROWS).exp().double()
    smoothed = (1 - imitation.SMOOTHING) * probs + imitation.SMOOTHING / 3
    best = torch.stack([maximum_likelihood(row) for row in smoothed.log().mean(0)])
    assert torch.allclose(found, best, rtol=2e-3)
    assert torch.allclose(found, alpha.double(), rtol=0.1)

    prediction, truth = bl.predict(student, ROWS), bl.predict(teacher, ROWS)
    assert torch.allclose(prediction.probs, truth.probs, atol=5e-3)
    assert torch.allclose(prediction.aleatoric, truth.aleatoric, atol=0.02)
    assert torch.allclose(prediction.epistemic, truth.epistemic, atol=0.02)
    assert prediction.epistemic.max() > 5 * prediction.epistemic.min()


def test_dirichlet_predictions_in_closed_form_are_those_of_draws():
    teacher, *_ = dirichlet_teacher(200)
    student = bl.distill(teacher, LOADER, free(), how="dirichlet", epochs=5, **QUICK)
    g = torch.Generator().manual_seed(0)
    closed = bl.predict(student, ROWS, samples=20_000, generator=g)
    drawn = bl.predict(student, ROWS, samples=20_000, how="sample", generator=g)
    assert closed.samples.shape == (20_000, 5, 3)
    for name in ("probs", "variance", "entropy", "aleatoric", "epistemic"):
        assert torch.allclose(getattr(closed, name), getattr(drawn, name), atol=6e-3), name
    one = bl.predict(student, ROWS, how="mean")
    assert torch.allclose(one.probs, closed.probs, atol=1e-6)
    again = bl.predict(student, ROWS, samples=3, generator=torch.Generator().manual_seed(1)).samples
    assert torch.equal(again, bl.predict(student, ROWS, samples=3, generator=torch.Generator().manual_seed(1)).samples)


def test_a_dirichlet_student_is_saved_and_pruned_as_any_network(tmp_path):
    teacher, *_ = dirichlet_teacher(50)
    student = bl.distill(teacher, LOADER, free(), how="dirichlet", epochs=2, **QUICK)
    bl.save(student, tmp_path / "student")
    again = bl.load(tmp_path / "student", model=free())
    assert again.method == student.method
    assert torch.equal(bl.predict(again, ROWS).epistemic, bl.predict(student, ROWS).epistemic)
    pruned = bl.prune(student, bl.Budget(sparsity=0.4), criterion="magnitude")
    assert int((pruned.mean_network().weight == 0).sum()) == 6
    assert torch.equal(pruned(ROWS) == 0, pruned.model.weight.T == 0)


def test_a_dirichlet_student_that_is_unlike_its_teacher_warns():
    sure, student = given(logits(particles=1).repeat(2, 1, 1), likelihoods.Categorical()), free()
    before = torch.get_rng_state()
    with pytest.warns(BayeslimWarning, match=r"student's epistemic uncertainty is .* Train for longer"):
        bl.distill(sure, LOADER, student, how="dirichlet", epochs=1, **(QUICK | {"lr": 1e-6}))
    assert torch.equal(torch.get_rng_state(), before)


def test_one_draw_makes_no_dirichlet_and_values_have_none():
    with pytest.raises(BayeslimError, match=r"two draws of the teacher at least\. Got 1"):
        bl.distill(given(logits(particles=1), likelihoods.Categorical()), LOADER, how="dirichlet", progress=False)
    with pytest.raises(UnsupportedModel, match="over classes, and the teacher's likelihood is gaussian"):
        bl.distill(linear_regression()[0], LOADER, how="dirichlet")
    with pytest.raises(UnsupportedModel, match="over classes, and the likelihood is bernoulli"):
        bl.bayesianize(free(), Student("dirichlet"), likelihood=likelihoods.Bernoulli())


G = torch.Generator().manual_seed(2)
X = torch.randn(60, 4, generator=G)
Y = (X[:, 0] + X[:, 1] > 0).long()


def mlp(hidden: int = 12) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.BatchNorm1d(hidden), nn.Linear(hidden, 2))


def data(**options) -> DataLoader:
    return DataLoader(TensorDataset(X, Y), batch_size=20, shuffle=True, **options)


@pytest.fixture(params=["variational", "laplace", "particles"])
def teacher(request) -> bl.Bayesian:
    methods = {"variational": bl.Variational(), "laplace": bl.Laplace("diag"), "particles": Given()}
    prior = bl.priors.Normal(0.3)
    bnn = bl.bayesianize(mlp(), methods[request.param], likelihood=likelihoods.Categorical(), prior=prior)
    bnn.fit(data(), epochs=20, lr=1e-2, seed=0, progress=False)
    if request.param == "particles":
        values = {n: p.detach() * (1 + 0.3 * torch.randn(3, *p.shape)) for n, p in bnn.model.named_parameters()}
        running = {"2.running_mean": bnn.model[2].running_mean + torch.randn(3, 12)}
        bnn.method.keep(bnn, Particles(values, buffers=running))
    return bnn


def kl(teacher: bl.Bayesian, student: nn.Module, x: torch.Tensor = X) -> float:
    with torch.no_grad():
        p = bl.predict(teacher, x, samples=64, generator=torch.Generator().manual_seed(0)).probs
        return float((p * (p.log() - student(x).log_softmax(-1))).sum(-1).mean())


@pytest.mark.filterwarnings("ignore:On the first batch the student")  # which learns for too short a while
@pytest.mark.parametrize("how", ["probs", "online", "dirichlet"])
def test_any_posterior_teaches_and_nothing_else_changes(teacher, how):
    smaller = mlp(hidden=6)
    before, untaught = copy.deepcopy((teacher.state_dict(), smaller.state_dict())), kl(teacher, smaller.eval())
    modes = [module.training for module in (*teacher.modules(), *smaller.modules())]
    state = torch.get_rng_state()
    student = bl.distill(teacher, data(), smaller, how=how, epochs=25, lr=0.03, seed=3, progress=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert kl(teacher, student) < untaught / 2
    assert not student.training
    assert isinstance(student, bl.Bayesian) == (how == "dirichlet")
    for old, new in zip(before, (teacher.state_dict(), smaller.state_dict()), strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)
    assert modes == [module.training for module in (*teacher.modules(), *smaller.modules())]
    again = bl.distill(teacher, data(), smaller, how=how, epochs=25, lr=0.03, seed=3, progress=False)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in student.state_dict().items())


@pytest.mark.parametrize("how", ["probs", "online"])
def test_batches_that_come_once_are_all_learned_from(how):
    outputs = logits()
    batches = [(rows, None) for rows in ROWS.split(2)]
    source = given(outputs, likelihoods.Categorical())
    once, again = (
        bl.distill(source, batches_, free(), how=how, epochs=2, seed=0, progress=False)
        for batches_ in (iter(batches), batches)
    )
    assert all(map(torch.equal, once.parameters(), again.parameters()))
    assert not torch.equal(next(once.parameters()), next(free().parameters()))


@pytest.mark.parametrize("how", ["probs", "online"])
def test_no_more_inputs_than_those_with_labels(how):
    options = {"how": how, "epochs": 1, "seed": 0, "progress": False}
    source = bl.bayesianize(mlp(), bl.Variational(), likelihood=likelihoods.Categorical(), num_data=len(X))
    student = mlp()
    none, empty = (bl.distill(source, [(X, None)], student, unlabelled=u, **options) for u in (None, X[:0]))
    assert all(map(torch.equal, none.parameters(), empty.parameters()))


def test_without_a_student_the_teachers_own_network_starts_at_its_mean_or_nearest_particle(teacher):
    student = bl.distill(teacher, data(), epochs=1, lr=1e-9, seed=0, progress=False)
    assert type(student) is nn.Sequential
    posterior = teacher.posterior_
    start = posterior.mode if isinstance(posterior, Particles) else posterior.mean
    assert all(torch.allclose(student.get_parameter(name), value, atol=1e-6) for name, value in start.items())


@pytest.mark.parametrize("how", ["probs", "online"])
def test_zeros_of_a_pruned_student_stay_zero(teacher, how):
    pruned = bl.prune(teacher, bl.Budget(sparsity=0.5), criterion="magnitude")
    cut = {name: ~mask for name, mask in pruned.masks.items()}
    before = copy.deepcopy(pruned.state_dict())
    student = bl.distill(
        teacher, data(), pruned, how=how, epochs=40, lr=0.02, lr_schedule="cosine", seed=0, progress=False
    )
    network = student.mean_network() if isinstance(student, bl.Bayesian) else student
    assert sum(int(mask.sum()) for mask in cut.values()) > 10
    for name, where in cut.items():
        weight = network.get_parameter(name)
        assert not weight[where].any()
        assert not torch.equal(weight, before[name])
    assert all(torch.equal(before[name], value) for name, value in pruned.state_dict().items())
    assert kl(teacher, network.eval()) < 0.03
    particles = isinstance(teacher.posterior_, Particles)
    assert isinstance(student, bl.Bayesian) != particles
    slim = bl.compact(student, example=X[:3])
    assert torch.allclose(slim(X), network(X), atol=1e-5)
    if not particles:
        assert student.masks.keys() == pruned.masks.keys()
        assert len(bl.predict(student, X)) == 60  # Laplace refuses a posterior that was measured elsewhere


@pytest.mark.filterwarnings("ignore:On the first batch the student")  # which learns for too short a while
@pytest.mark.parametrize("how", ["probs", "online", "dirichlet"])
def test_a_run_goes_on_exactly_from_its_checkpoint(how, tmp_path):
    bnn = bl.bayesianize(mlp(), bl.Variational(), likelihood=likelihoods.Categorical(), num_data=60)
    more = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))

    def taught(**options) -> dict[str, torch.Tensor]:
        options = {"epochs": 4, "seed": 5, "progress": False, "unlabelled": more, **options}
        loader = data(generator=torch.Generator().manual_seed(9))
        return bl.distill(bnn, loader, mlp(5), how=how, **options).state_dict()

    def stop(epoch):
        if epoch.number == 2:
            raise KeyboardInterrupt

    whole = taught()
    with pytest.raises(KeyboardInterrupt):
        taught(checkpoint=tmp_path, callbacks=[stop])
    resumed = taught(checkpoint=tmp_path)
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


@pytest.mark.parametrize("how", ["probs", "online"])
@pytest.mark.parametrize("form", ["tensor", "loader", "with targets"])
def test_unlabelled_inputs_teach_too(how, form):
    outputs = logits()
    teacher, rest = given(outputs, likelihoods.Categorical()), ROWS[2:]
    unlabelled = {"tensor": rest, "loader": DataLoader(TensorDataset(rest)), "with targets": [(rest, rest)]}[form]
    options = {"how": how, "epochs": 100, "lr": 0.1, "seed": 0, "progress": False}
    student = bl.distill(teacher, [(ROWS[:2], None)], free(), unlabelled=unlabelled, **options)
    assert kl(teacher, student, ROWS) < 0.05
    without = bl.distill(teacher, [(ROWS[:2], None)], free(), **options)
    assert kl(teacher, without, ROWS) > 0.2


@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_inputs_may_be_several(form):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, left, right):
            return self.a(left) + self.b(right)

    left, right = X[:, :2], X[:, 2:]
    batch = {"left": left, "right": right, "labels": Y} if form == "dict" else (left, right, Y)
    inputs = inputs_of(batch)
    bnn = bl.bayesianize(Two(), bl.Variational(), likelihood=likelihoods.Categorical(), num_data=60)
    for how in ("probs", "online"):
        student = bl.distill(bnn, [batch] * 20, Two(), how=how, epochs=10, **QUICK)
        p = bl.predict(bnn, inputs, samples=64).probs
        q = student(**inputs) if form == "dict" else student(*inputs)
        assert torch.allclose(q.softmax(-1), p, atol=0.05)


def test_validation_measures_the_student_on_labels():
    bnn = bl.bayesianize(mlp(), bl.Variational(), likelihood=likelihoods.Categorical(), num_data=60)
    seen = []
    student = bl.distill(
        bnn, data(), mlp(), epochs=2, seed=0, progress=False, validate=[(X, Y)],
        callbacks=[lambda epoch: seen.append(epoch.metrics)],
    )  # fmt: skip
    with torch.no_grad():
        nll = nn.functional.cross_entropy(student(X), Y).item()
    assert seen[-1]["val_nll"] == pytest.approx(nll, rel=1e-5)
    assert seen[-1]["nll"] >= 0
    assert math.isfinite(seen[-1]["val_error"])


def test_what_cannot_be_done_is_said():
    bnn = bl.bayesianize(mlp(), bl.Variational(), likelihood=likelihoods.Categorical(), num_data=60)
    with pytest.raises(TypeError, match="fitted Bayesian network as teacher"):
        bl.distill(mlp(), data())
    with pytest.raises(TypeError, match="student must be a network"):
        bl.distill(bnn, data(), "small")
    with pytest.raises(ValueError, match='how must be "probs", "online" or "dirichlet"'):
        bl.distill(bnn, data(), how="soft")
    with pytest.raises(ValueError, match="leave samples out"):
        bl.distill(bnn, data(), how="online", samples=3)
    with pytest.raises(ValueError, match="temperature must be positive"):
        bl.distill(bnn, data(), temperature=0.0)
    with pytest.raises(ValueError, match="temperature must be 1 with"):
        bl.distill(bnn, data(), how="dirichlet", temperature=2.0)
    with pytest.raises(BayeslimError, match="gave no batches"):
        bl.distill(bnn, [])
    with pytest.raises(ShapeMismatch, match=r"\(20, 3\), do not match its targets, \(20, 2\)"):
        bl.distill(bnn, data(), nn.Linear(4, 3), progress=False)
    with pytest.raises(ShapeMismatch, match="cannot be joined into one tensor"):
        bl.distill(bnn, [(torch.randn(2, 4), None), (torch.randn(2, 5), None)], progress=False)
    with pytest.raises(NotFitted):
        bl.distill(bl.bayesianize(mlp(), bl.Laplace(), likelihood=likelihoods.Categorical()), data())
    with pytest.raises(ShapeMismatch, match="Got labels"):
        bl.bayesianize(mlp(), Student(), likelihood=likelihoods.Categorical(), num_data=60).loss((X, Y))
