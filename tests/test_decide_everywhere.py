"""Decisions on every kind of output and network: pixels, values, yes or no; slim, exported, distilled; all methods."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.decide import calibrate as calibrate_module
from bayeslim.decide import conformal as conformal_module
from bayeslim.decide.acquire import batch_bald_of_values
from bayeslim.decide.alarms import FeatureDensity
from bayeslim.decide.selective_outputs import thresholds

VOID = -100
PIXELS = bl.likelihoods.Categorical(class_dim=1)
VALUES = bl.likelihoods.Gaussian(noise=0.3)


def images(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw images whose pixels are classes with noise, some without a label."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, 5, 6, generator=generator)
    y = (x[:, 0] + 0.5 * torch.randn(count, 5, 6, generator=generator) > 0).long() + (x[:, 1] > 1).long()
    y[torch.rand(y.shape, generator=generator) < 0.1] = VOID
    return x, y


@pytest.fixture(scope="module")
def dense() -> bl.Bayesian:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 3, 1))
    bnn = bl.bayesianize(model, bl.Variational(), likelihood=PIXELS)
    bnn.fit(bl.data.Loader(*images(60), batch_size=20), epochs=20, lr=0.02, seed=0, progress=False)
    return bnn.eval()


def batches(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(part.split(16) for part in images(count, seed)), strict=True))


@pytest.mark.parametrize("score", ["lac", "aps", "raps"])
@pytest.mark.parametrize("per_class", [False, True])
def test_pixels_are_covered(dense: bl.Bayesian, score: str, per_class: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformal_module, "MAX_OUTPUTS_PER_EXAMPLE", 12)  # of 30: a random choice stands for all
    generator = torch.Generator().manual_seed(0)
    made = bl.conformal(
        dense.mean_network(), batches(300, 1), 0.8, score=score, per_class=per_class, likelihood=PIXELS,
        generator=generator,
    )  # fmt: skip
    x, y = images(300, 2)
    covers = made(x, generator).covers(y)
    assert float(covers[y != VOID].double().mean()) == pytest.approx(0.8, abs=0.03)
    if per_class:
        for c in range(3):
            own = y == c
            share = ((covers & own).sum((1, 2)) / own.sum((1, 2)))[own.any(2).any(1)]
            assert float(share.mean()) == pytest.approx(0.8, abs=0.05)


def test_pixels_are_calibrated_answered_and_alarmed(dense: bl.Bayesian, monkeypatch: pytest.MonkeyPatch) -> None:
    held_out = batches(64, 3)
    whole = bl.calibrate(dense, held_out, samples=4, generator=torch.Generator().manual_seed(0))
    assert whole.after["nll"] <= whole.before["nll"] + 1e-6
    monkeypatch.setattr(calibrate_module, "MAX_ROWS", 300)
    part = bl.calibrate(dense, held_out, samples=4, generator=torch.Generator().manual_seed(0))
    assert float(part.temperature) == pytest.approx(float(whole.temperature), rel=0.5)
    x, y = images(40, 4)
    assert part(x).probs.shape == (40, 5, 6, 3)
    made = bl.selective(dense, held_out, coverage=0.5)
    assert made.curve.risk[-1] == pytest.approx(float(dense_classes(dense, held_out)), abs=0.03)
    answers = made(x)
    assert set(answers.classes[~answers.answered].flatten().tolist()) == {-1}
    table = bl.alarms(dense, held_out, [3 * x + 4], train=held_out)
    assert set(table.rows) == {"entropy", "mutual information", "output variance", "energy", "density"}
    assert table.rows["density"]["auroc"] > 0.9
    moved = bl.fgsm(dense, x, y, 0.3)
    log_prob = dense.likelihood.log_prob
    with torch.no_grad():
        assert float(log_prob(dense(moved), y).mean()) < float(log_prob(dense(x), y).mean())
    for rule in ("bald", "entropy", "random"):
        assert len(set(bl.acquire(dense, x, 5, rule, samples=4).tolist())) == 5
    with pytest.raises(bl.errors.BayeslimError, match='Use "bald" for pixels'):
        bl.acquire(dense, x, 5, "batch-bald", samples=4)


def test_the_risk_of_answered_pixels_is_bounded() -> None:
    generator, trials, delta, broken, share = torch.Generator().manual_seed(0), 30, 0.1, 0, 0.0

    def draw(count: int) -> tuple[Tensor, Tensor]:
        hard = torch.rand(count, 1, 1, 1, generator=generator)  # pixels of an image are alike
        logits = 5 * torch.randn(count, 3, 4, 4, generator=generator)
        return logits, (logits + 4 * hard * torch.randn(logits.shape, generator=generator)).argmax(1)

    logits, labels = draw(4000)
    sure, wrong = logits.softmax(1).amax(1), logits.argmax(1) != labels
    for _ in range(trials):
        rows = torch.randint(len(labels), (300,), generator=generator)
        made = bl.selective(
            nn.Identity(), [(logits[rows], labels[rows])], 0.1, 1 - delta, per_output=True, likelihood=PIXELS
        )
        chosen = sure > made.threshold
        broken += bool(chosen.any()) and float(wrong[chosen].double().mean()) > 0.1
        share += made.coverage / trials
    assert broken <= 9  # the binomial quantile at 1 - 1e-3
    assert share > 0.2
    assert made.risk <= made.risk_bound <= 0.1 + 1e-6
    assert 0 < made.curve.aurc < made.curve.risk[-1]


def test_single_pixels_and_values_are_answered(dense: bl.Bayesian) -> None:
    made = bl.selective(dense.mean_network(), batches(64, 3), coverage=0.6, per_output=True, likelihood=PIXELS)
    answers = made(images(20, 5)[0])
    assert answers.answered.shape == (20, 5, 6)
    assert float(answers.answered.double().mean()) == pytest.approx(0.6, abs=0.1)
    assert bool((answers.classes[~answers.answered] == -1).all())
    x = torch.randn(200, 4)
    spread = torch.cat([x, x], 1)  # means, and log variances that tell how wrong they are
    y = x + (x / 2).exp() * torch.randn(200, 4)
    likelihood = bl.likelihoods.Gaussian("heteroscedastic")
    pairs = list(zip(spread.split(50), y.split(50), strict=True))
    values = bl.selective(nn.Identity(), pairs, coverage=0.5, tolerance=1.0, per_output=True, likelihood=likelihood)
    assert values.coverage == pytest.approx(0.5, abs=0.1)
    assert values.risk < values.curve.risk[-1]
    with pytest.raises(bl.errors.BayeslimError, match="at least two batches"):
        bl.selective(nn.Identity(), pairs[:1], 0.1, tolerance=1.0, per_output=True, likelihood=likelihood)


def test_thresholds_for_many_pixels_are_their_spreads() -> None:
    """A batch of large images has more pixels than `torch.quantile` takes."""
    std = torch.arange(2**24 + 1, dtype=torch.float32)[None]
    grid = thresholds(SimpleNamespace(kind="values", std=std))
    assert float(grid[0]) == 0
    assert float(grid[-1]) == -math.inf
    steps = torch.full((198,), -(2**24) / 199, dtype=torch.float64)
    torch.testing.assert_close(grid[:-1].diff(), steps, rtol=1e-4, atol=0)


def dense_classes(bnn: bl.Bayesian, held_out: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Compute the mean over images of the fraction of wrong pixels."""
    wrong = []
    for x, y in held_out:
        off = (bl.predict(bnn, x).classes != y) & (y != VOID)
        wrong.append(off.sum((1, 2)) / (y != VOID).sum((1, 2)))
    return torch.cat(wrong).mean()


def test_the_density_is_summed_batch_by_batch() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(90, 3), torch.randint(2, (90,))
    one, many = (
        FeatureDensity(network, [(x, y)]),
        FeatureDensity(network, list(zip(x.split(7), y.split(7), strict=True))),
    )
    torch.testing.assert_close(one.score(x), many.score(x))
    values = FeatureDensity(network, [(x, torch.randn(90, 2))])
    assert len(values.means) == 1  # values have no classes
    assert float(values.score(5 * x).mean()) > float(values.score(x).mean())


def test_networks_may_disagree_about_some_batches_alone() -> None:
    def exported(x: Tensor) -> list[Tensor]:
        return [torch.full((3, 2), 0.5), torch.zeros(3, 2), x, x, x]

    table = bl.alarms(exported, [torch.zeros(3)], [torch.ones(3)], likelihood=bl.likelihoods.Categorical())
    assert table.rows["mutual information"]["auroc"] == 1.0


def test_features_of_a_class_may_be_equal() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7))
    x = torch.randint(7, (30, 6))
    density = FeatureDensity(network, [(x, x)])
    assert float(density.score(x).max()) < 1e-3
    near = density.score(x)
    with torch.no_grad():
        density.network[0].weight.add_(1.0)
    assert float(density.score(x).min()) > float(near.max())


@pytest.fixture(scope="module")
def values() -> tuple[bl.Bayesian, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(200, 2)
    y = x[:, :1] ** 2 + 0.3 * torch.randn(200, 1)
    bnn = bl.bayesianize(nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 1)), bl.Laplace(), likelihood=VALUES)
    bnn.fit(bl.data.Loader(x[:100], y[:100], batch_size=50), epochs=40, lr=0.03, seed=0, progress=False)
    return bnn, x[100:], y[100:]


def test_values_are_decided_about(values: tuple[bl.Bayesian, Tensor, Tensor]) -> None:
    bnn, x, y = values
    held_out = [(x[:50], y[:50]), (x[50:], y[50:])]
    assert bl.selective(bnn, held_out, coverage=0.5, tolerance=0.5)(x).answered.any()
    table = bl.alarms(bnn, held_out, [x + 6], train=held_out, how="joint", samples=20)
    assert {"variance", "epistemic variance", "density"} <= set(table.rows)
    assert table.rows["epistemic variance"]["auroc"] > 0.9
    assert bool(((bl.pgd(bnn, x, y, 0.1) - x).abs() <= 0.1 + 1e-6).all())
    for rule in ("bald", "entropy", "random", "batch-bald"):
        chosen = bl.acquire(bnn, bl.data.Loader(x, y, 30, shuffle=False), 4, rule, how="joint", samples=50)
        assert len(set(chosen.tolist())) == 4
    best = bl.acquire(bnn, x, 1)
    assert int(best) == int(bl.predict(bnn, x).epistemic.argmax())  # the noise is the same for all
    with pytest.raises(bl.errors.BayeslimError, match='how="joint"'):
        bl.acquire(bnn, x, 2, "batch-bald", how="mean")


def test_values_without_a_dimension_of_outputs_are_chosen() -> None:
    network = nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))
    bnn = bl.bayesianize(network, bl.Variational(), likelihood=VALUES)
    assert len(set(bl.acquire(bnn, torch.randn(9, 2), 3, "batch-bald").tolist())) == 3


def test_batch_bald_of_values_is_a_determinant() -> None:
    torch.manual_seed(0)
    means, noise = torch.randn(6, 8, 1, dtype=torch.float64), torch.rand(8, 1, dtype=torch.float64) + 0.2
    means[:, 1] = means[:, 0]  # a copy tells little that is new
    A = ((means - means.mean(0)) / (6 * noise).sqrt())[..., 0]
    K = A.mT @ A

    def information(batch: list[int]) -> float:
        return float(torch.logdet(torch.eye(len(batch)) + K[batch][:, batch]))

    greedy: list[int] = []
    for _ in range(4):
        greedy.append(max((i for i in range(8) if i not in greedy), key=lambda i: information([*greedy, i])))
    assert batch_bald_of_values(means, noise, 4).tolist() == greedy


def test_batches_of_hundreds_are_chosen_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probability of all their labels together is below the smallest float64."""
    from bayeslim.decide import acquire

    monkeypatch.setattr(acquire, "MAX_COMBINATIONS", 8)
    probs = torch.randn(2, 330, 10, dtype=torch.float64).mul(0.1).softmax(-1)
    assert sorted(acquire.batch_bald(probs, 330, torch.Generator().manual_seed(0)).tolist()) == list(range(330))


def test_yes_and_no_are_two_classes() -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 2)
    y = (x[:, :1] + torch.randn(300, 1) > 0).float()
    bnn = bl.bayesianize(nn.Linear(2, 1), bl.Laplace(), likelihood=bl.likelihoods.Bernoulli())
    bnn.fit(bl.data.Loader(x, y, batch_size=100), epochs=20, lr=0.1, seed=0, progress=False)
    held_out = [(x, y)]
    sets = bl.conformal(bnn, held_out, 0.8)(x)
    assert sets.contains.shape == (300, 1, 2)
    assert float(sets.covers(y.long()).double().mean()) == pytest.approx(0.8, abs=0.03)
    assert bl.calibrate(bnn, held_out).after["nll"] < 0.7
    assert bl.selective(bnn, held_out, coverage=0.5).risk < 0.3
    assert len(bl.acquire(bnn, x, 3)) == 3
    assert len(set(bl.acquire(bnn, x, 3, "batch-bald", how="joint").tolist())) == 3
    assert "entropy" in bl.alarms(bnn, held_out, [x + 5]).rows
    scores = [bl.metrics.Classification() for _ in range(3)]
    scores[0].update(bl.predict(bnn, x).probs, y)
    scores[1].update(bl.conformal(bnn, held_out, 0.8)(x).prediction.probs, y.long())
    scores[2].update(bl.predict(bnn, x).probs, y[:, 0])
    assert {each.compute().error for each in scores} == {float(((bnn.eval()(x) > 0) != y).double().mean())}
    with pytest.raises(TypeError, match=r"inside must give batches.*bl.data.Loader"):
        bl.alarms(bnn, x, x + 5)
    with pytest.raises(TypeError, match="The validation data must give batches"):
        bl.conformal(bnn, (x, y))


def test_too_few_held_out_examples_are_told() -> None:
    logits, labels = torch.tensor([[4.0, 0.0]] * 18), torch.zeros(18, dtype=torch.long)
    classes = {"likelihood": bl.likelihoods.Categorical()}
    sets = bl.conformal(nn.Identity(), [(logits, labels)], 0.95, **classes)
    assert "from 18 examples, too few: below 19, sets and intervals hold everything" in repr(sets)
    assert repr(sets(logits)) == "ConformalSets: 18 sets of 2.00 classes on average"
    enough = bl.conformal(nn.Identity(), [(logits.repeat(2, 1), labels.repeat(2))], 0.95, **classes)
    assert "few" not in repr(enough)
    answers = bl.selective(nn.Identity(), [(logits, labels)], 0.01, **classes)
    assert "answers nothing" in repr(answers)
    assert repr(answers(logits)) == "Answers: 0 of 18"


def test_slim_exported_and_distilled_networks(tmp_path: Path) -> None:
    import onnxruntime

    torch.manual_seed(0)
    x = torch.randn(400, 3)
    y = (x[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
    likelihood = bl.likelihoods.Categorical()
    bnn = bl.bayesianize(model, bl.Laplace(), likelihood=likelihood)
    train = bl.data.Loader(x[:200], y[:200], batch_size=50)
    bnn.fit(train, epochs=10, lr=0.02, seed=0, progress=False)
    pruned = bl.prune(bnn, bl.Budget(sparsity=0.5), granularity="unit", example=x[:2])
    slim = bl.compact(pruned, example=x[:2])
    student = bl.distill(bnn, train, epochs=2, seed=0, progress=False)
    bl.export(slim, tmp_path / "slim.onnx", example=x[:2])
    session = onnxruntime.InferenceSession(tmp_path / "slim.onnx")
    name = session.get_inputs()[0].name

    def exported(inputs: Tensor) -> Any:
        return session.run(None, {name: inputs.numpy()})[0]

    held_out = [(x[200:300], y[200:300]), (x[300:], y[300:])]
    for predictor in (slim, exported, student):
        needs = {} if isinstance(predictor, bl.Bayesian) else {"likelihood": likelihood}
        assert bl.conformal(predictor, held_out, 0.9, **needs)(x[200:]).covers(y[200:]).double().mean() >= 0.9
        assert bl.selective(predictor, held_out, 0.3, **needs).coverage > 0.5
        assert bl.calibrate(predictor, held_out, **needs).after["nll"] < 0.7
        assert "energy" in bl.alarms(predictor, held_out, [x + 9], **needs).rows
    torch.testing.assert_close(
        bl.fgsm(slim, x, y, 0.1, likelihood=likelihood), bl.fgsm(pruned, x, y, 0.1), atol=1e-5, rtol=0
    )
    with pytest.raises(TypeError, match="likelihood="):
        bl.fgsm(slim, x, y, 0.1)


@pytest.mark.parametrize("kind", ["classes", "yes or no", "values", "pixels"])
def test_recalibrated_networks_are_predictors_too(kind: str) -> None:
    torch.manual_seed(0)
    x, options = torch.randn(120, 2), {}
    likelihood: Any = bl.likelihoods.Categorical()
    network: nn.Module = nn.Linear(2, 2)
    y = (x[:, 0] + 0.5 * torch.randn(120) > 0).long()
    if kind == "yes or no":
        likelihood, network, y = bl.likelihoods.Bernoulli(), nn.Linear(2, 1), y[:, None].float()
    elif kind == "values":
        likelihood, network, y, options = VALUES, nn.Linear(2, 1), x[:, :1] + torch.randn(120, 1), {"tolerance": 1.0}
    elif kind == "pixels":
        x, y = images(120)
        likelihood, network = PIXELS, nn.Conv2d(2, 3, 1)
    first, held_out = [(x[:40], y[:40])], [(x[40:80], y[40:80]), (x[80:], y[80:])]
    made = bl.calibrate(network, first, likelihood=likelihood)
    sets = bl.conformal(made, held_out, 0.8)
    assert sets(x).covers(y).double().mean() > 0.6
    assert bl.conformal(made, held_out, 0.8, likelihood=likelihood).threshold == sets.threshold
    assert bl.selective(made, held_out, coverage=0.5, **options).coverage >= 0.5
    assert bl.selective(made, held_out, coverage=0.5, per_output=True, **options).coverage >= 0.5
    assert bl.alarms(made, held_out, [x + 5]).rows
    assert bl.calibrate(made, held_out).after["nll"] <= bl.calibrate(made, held_out).before["nll"] + 1e-6
    assert len(bl.acquire(made, x, 3, "entropy")) == 3


def table_of_methods() -> dict[str, Any]:
    """Load the table of all methods from the contract tests."""
    import importlib.util

    path = Path(__file__).parent / "contract" / "method_table.py"
    spec = importlib.util.spec_from_file_location("method_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.METHODS


@pytest.mark.filterwarnings("ignore::bayeslim.errors.BayeslimWarning")
@pytest.mark.parametrize("name", table_of_methods())
def test_attacks_raise_the_loss_of_every_method(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 3)
    y = (x[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 2))
    bnn = bl.bayesianize(model, table_of_methods()[name](), likelihood=bl.likelihoods.Categorical())
    bnn.fit(bl.data.Loader(x, y, batch_size=32), epochs=2, seed=0, progress=False)
    before = {key: value.clone() for key, value in bnn.state_dict().items()}
    for attack in (bl.fgsm, bl.pgd):
        moved = attack(bnn, x, y, 0.2)
        with torch.no_grad():
            losses = [float(-bnn.likelihood.log_prob(bnn.eval()(at), y).mean()) for at in (x, moved)]
        assert losses[1] > losses[0] or name == "variance-network"  # whose mean network is constant
        assert bool(bl.predict(bnn, moved, 2).entropy.isfinite().all())
    averaged = bl.fgsm(bnn, x, y, 0.2, samples=2, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close((averaged - x).abs().amax(), torch.tensor(0.2))
    assert all(torch.equal(value, before[key]) for key, value in bnn.state_dict().items())


def test_attacks_on_the_average_raise_its_loss() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 3)
    y = (x[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    bnn = bl.bayesianize(model, bl.Variational(), likelihood=bl.likelihoods.Categorical())
    bnn.fit(bl.data.Loader(x, y, batch_size=32), epochs=20, lr=0.03, seed=0, progress=False)
    moved = bl.pgd(bnn, x, y, 0.3, samples=8, generator=torch.Generator().manual_seed(0))
    losses = [bl.metrics.nll(bl.predict(bnn, at, 200).probs, y) for at in (x, moved)]
    assert losses[1] > losses[0] + 0.05


def test_active_learning_goes_round_after_round() -> None:
    torch.manual_seed(0)
    x = torch.randn(80, 2)
    y = (x[:, 0] > 0).long()

    def fit(labelled: Tensor) -> bl.Bayesian:
        torch.manual_seed(0)
        bnn = bl.bayesianize(nn.Linear(2, 2), bl.Laplace(), likelihood=bl.likelihoods.Categorical())
        bnn.fit(bl.data.Loader(x[labelled], y[labelled]), epochs=20, lr=0.1, seed=0, progress=False)
        return bnn

    rounds = list(bl.learn_actively(fit, x, torch.arange(4), 3, 2, "bald", how="joint"))
    assert [len(one.labelled) for one in rounds] == [4, 7, 10]
    assert len(set(rounds[-1].labelled.tolist())) == 10
    assert rounds[0].labelled.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="40 rounds of 2 label 84 inputs, and the pool has 80"):
        next(bl.learn_actively(fit, x, torch.arange(4), 2, 40))
