"""Every decision, on every kind of output, with every kind of network: a small device runs the same decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayeslim as bl

pytestmark = pytest.mark.filterwarnings("ignore::bayeslim.errors.BayeslimWarning")


@dataclass(frozen=True)
class Problem:
    """Inputs, targets, a network and the meaning of its outputs."""

    network: Callable[[], nn.Module]
    likelihood: bl.likelihoods.Likelihood
    x: Tensor
    y: Tensor
    method: Callable[[], bl.Method] = bl.Variational

    @property
    def held_out(self) -> list[tuple[Tensor, Tensor]]:
        """The second half, in batches of different sizes."""
        sizes = [50, 30, 20]
        return list(zip(self.x[100:].split(sizes), self.y[100:].split(sizes), strict=True))


def mlp(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, outputs))


def cnn(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, outputs, 1))


def problems() -> dict[str, Problem]:
    """Draw small problems: classes, yes or no, values, noise by input, pixels of classes and pixels of values."""
    torch.manual_seed(0)
    x, images = torch.randn(200, 3), torch.randn(200, 2, 5, 6)
    gap, pixel = x[:, 0] + 0.5 * torch.randn(200), images[:, 0] + 0.5 * torch.randn(200, 5, 6)
    categorical, gaussian = bl.likelihoods.Categorical, bl.likelihoods.Gaussian
    return {
        "classes": Problem(lambda: mlp(3), categorical(), x, (gap > 0).long() + (gap > 1).long(), bl.Laplace),
        "yes or no": Problem(lambda: mlp(1), bl.likelihoods.Bernoulli(), x, (gap > 0).float()[:, None]),
        "values": Problem(lambda: mlp(2), gaussian(0.5), x, torch.stack([gap, -gap], 1), bl.Laplace),
        "noise by input": Problem(lambda: mlp(2), gaussian("heteroscedastic"), x, gap[:, None]),
        "pixels of classes": Problem(
            lambda: cnn(3), categorical(class_dim=1), images, (pixel > 0).long() + (pixel > 1).long()
        ),
        "pixels of values": Problem(lambda: cnn(1), gaussian(0.5), images, pixel[:, None]),
    }


PROBLEMS = problems()
PREDICTORS = ("bayesian", "pruned", "slim", "student", "onnx", "c", "posterior in onnx")
EXPORTED = ("classes", "values", "pixels of classes")
"""The problems whose networks are exported too, which takes longer than all decisions together."""


@pytest.fixture(scope="module", params=PROBLEMS)
def trained(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Train one network, and make every other predictor from it."""
    problem, folder = PROBLEMS[request.param], Path(tmp_path_factory.mktemp("networks"))
    torch.manual_seed(0)
    bnn = bl.bayesianize(problem.network(), problem.method(), likelihood=problem.likelihood)
    train = bl.data.Loader(problem.x[:100], problem.y[:100], batch_size=25)
    bnn.fit(train, epochs=30, lr=0.02, seed=0, progress=False)
    example = problem.x[:2]
    pruned = bl.prune(bnn.eval(), bl.Budget(sparsity=0.3), granularity="unit", example=example)
    slim = bl.compact(pruned, example=example)
    student = bl.distill(bnn, train, epochs=2, seed=0, progress=False)
    made = {"bayesian": bnn, "pruned": pruned, "slim": slim, "student": student}
    if request.param not in EXPORTED:
        return request.param, made
    for file in ("slim.onnx", "slim.c"):
        bl.export(slim, folder / file, example=example)
    bl.export(bnn, folder / "posterior.onnx", example=example, samples=4)
    files = {"onnx": "slim.onnx", "posterior in onnx": "posterior.onnx"}
    functions = {kind: in_onnxruntime(folder / file) for kind, file in files.items()}
    return request.param, made | functions | {"c": bl.load_c(folder / "slim.c")}


def in_onnxruntime(path: Path) -> Callable[[Tensor], Any]:
    """Return a function from inputs to all outputs of a file."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    name = session.get_inputs()[0].name
    return lambda x: session.run(None, {name: x.numpy()})


@pytest.mark.parametrize("kind", PREDICTORS)
def test_every_decision(trained: tuple[str, dict[str, Any]], kind: str) -> None:
    name, predictors = trained
    if kind not in predictors:
        pytest.skip("exported for the other problems")
    problem, predictor = PROBLEMS[name], predictors[kind]
    x, y, held_out = problem.x[100:], problem.y[100:], problem.held_out
    is_bayesian = isinstance(predictor, bl.Bayesian)
    needs: dict[str, Any] = {} if is_bayesian else {"likelihood": problem.likelihood}
    has_classes = not isinstance(problem.likelihood, bl.likelihoods.Gaussian)
    is_dense, has_posterior = x.ndim > 2, kind in ("bayesian", "pruned", "posterior in onnx")

    torch.manual_seed(0)
    calibrated = bl.calibrate(predictor, held_out, **needs)
    assert calibrated.after["nll"] <= calibrated.before["nll"] + 1e-6
    assert calibrated(x[:7]).mean.shape[0] == 7
    if has_classes:
        torch.manual_seed(0)  # the same draws of the posterior
        each = bl.calibrate(predictor, held_out, "class temperatures", **needs)
        assert each.after["nll"] <= calibrated.after["nll"] + 1e-4

    for score in ("lac", "aps", "raps") if has_classes else ("absolute", "scaled", "cqr"):
        made = bl.conformal(predictor, held_out, 0.8, score=score, **needs)
        # the thresholds were chosen on these data
        assert float(made(x).covers(y).double().mean()) == pytest.approx(0.8, abs=0.1 if "aps" in score else 0.025)
    if has_classes:
        bl.conformal(predictor, held_out, 0.8, per_class=True, **needs)

    options: dict[str, Any] = needs if has_classes else needs | {"tolerance": 0.8}
    answers = bl.selective(predictor, held_out, coverage=0.7, **options)
    if name == "noise by input" or has_classes or has_posterior:  # otherwise all are equally sure
        assert answers.coverage == pytest.approx(0.7, abs=0.02)
    bounded = bl.selective(predictor, held_out, 0.4, **options)
    assert bounded.risk <= bounded.risk_bound <= 0.4 + 1e-6
    if is_dense:
        single = bl.selective(predictor, held_out, 0.4, per_output=True, **options)
        assert single(x).answered.shape == y.shape

    table = bl.alarms(predictor, held_out, [4 * x + 6], **needs)
    wanted = {"entropy"} if has_classes else {"variance"}
    if has_posterior:
        wanted |= {"mutual information" if has_classes else "epistemic variance"}
    assert wanted <= set(table.rows)
    if has_classes:
        assert ("energy" in table.rows) == (kind != "posterior in onnx")  # a file of probabilities has no logits
    if isinstance(predictor, nn.Module):
        assert "density" in bl.alarms(predictor, held_out, [x + 9], train=held_out, **needs).rows
        for attack in (bl.fgsm, bl.pgd):
            moved = attack(predictor, x, y, 0.2, **needs)
            with torch.no_grad():
                network = predictor.eval()
                before, after = (problem.likelihood.log_prob(network(at), y).mean() for at in (x, moved))
            assert float(after) < float(before)

    for rule in ("entropy", "random", "bald"):
        if rule == "bald" and not has_posterior:
            with pytest.raises(bl.errors.BayeslimError, match='Use rule="entropy"'):
                bl.acquire(predictor, x, 4, rule, **needs)
            continue
        assert len(set(bl.acquire(predictor, x, 4, rule, **needs).tolist())) == 4
    if is_bayesian and has_posterior and not is_dense and name != "yes or no":
        assert len(set(bl.acquire(predictor, x, 4, "batch-bald").tolist())) == 4


def test_a_generator_repeats_decisions() -> None:
    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(1)

    torch.manual_seed(0)
    x, y = torch.randn(30, 2), torch.arange(30) % 2
    bnn = bl.bayesianize(nn.Linear(2, 2), bl.Variational(), likelihood=bl.likelihoods.Categorical())
    for score in ("lac", "aps"):
        one, two = (bl.conformal(bnn, [(x, y)], score=score, generator=generator()) for _ in range(2))
        assert one.threshold == two.threshold
    one, two = (
        bl.acquire(bnn.mean_network(), x, 3, "entropy", likelihood=bnn.likelihood, generator=generator()).tolist()
        for _ in range(2)
    )
    assert one == two


@pytest.mark.parametrize("shape", [(40,), (40, 1)])
def test_decisions_on_one_yes_or_no_have_the_shape_of_the_targets(shape: tuple[int, ...]) -> None:
    x, needs = torch.randn(40, 2), {"likelihood": bl.likelihoods.Bernoulli()}
    network, held_out = nn.Linear(2, 1), [(x, (x[:, 0] > 0).long().view(shape))]
    sets = bl.conformal(network, held_out, 0.8, **needs)(x)
    assert sets.sizes.shape == sets.covers(held_out[0][1]).shape == shape
    assert bl.selective(network, held_out, coverage=0.5, **needs)(x).classes.shape == shape
    calibrated = bl.calibrate(network, held_out, **needs)(x)
    assert calibrated.classes.shape == shape
    assert calibrated.probs is not None
    assert calibrated.probs.shape == (*shape, 2)
