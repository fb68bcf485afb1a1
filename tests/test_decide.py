"""Decisions keep their promises: coverage, risk and calibration, by simulation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import bayeslim as bl
from bayeslim.decide import conformal as conformal_module
from bayeslim.decide.selective import p_value

CATEGORICAL = bl.likelihoods.Categorical()
GAUSSIAN = bl.likelihoods.Gaussian(noise=0.5)


def logits_and_labels(
    n: int, classes: int, generator: torch.Generator, sharp: float = 1.0, spread: float = 2.0
) -> tuple[Tensor, Tensor]:
    """Draw logits, and labels from their softmax; `sharp` misstates the logits."""
    logits = spread * torch.randn(n, classes, generator=generator)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    return sharp * logits, labels


def within_binomial_band(covered: int, trials: int, least: float, most: float) -> bool:
    low = stats.binom.ppf(1e-4, trials, least)
    high = stats.binom.ppf(1 - 1e-4, trials, min(1.0, most))
    return bool(low <= covered <= high)


@pytest.mark.parametrize("sharp", [1.0, 5.0])  # 5: a posterior that is far too sure
@pytest.mark.parametrize("score", ["lac", "aps", "raps"])
def test_sets_cover_over_a_thousand_splits(score: str, sharp: float) -> None:
    generator, n, splits = torch.Generator().manual_seed(0), 19, 1000
    logits, labels = logits_and_labels(splits * (n + 1), 8, generator, sharp)
    covered = 0
    for x, y in zip(logits.split(n + 1), labels.split(n + 1), strict=True):
        made = bl.conformal(
            nn.Identity(), [(x[:-1], y[:-1])], 0.9, score=score, likelihood=CATEGORICAL, generator=generator
        )
        covered += int(made(x[-1:], generator).covers(y[-1:]))
    assert within_binomial_band(covered, splits, 0.9, 0.9)  # 18 of 20 ranks: exactly, as there are no ties


@pytest.mark.parametrize("score", ["absolute", "scaled", "cqr"])
def test_intervals_cover_over_a_thousand_splits(score: str) -> None:
    generator, n, splits = torch.Generator().manual_seed(1), 19, 1000
    x = torch.randn(splits * (n + 1), 1, generator=generator)
    y = x + 3 * x.abs() * torch.randn(x.shape, generator=generator)  # the likelihood says 0.5: misspecified
    covered = 0
    for xs, ys in zip(x.split(n + 1), y.split(n + 1), strict=True):
        made = bl.conformal(nn.Identity(), [(xs[:-1], ys[:-1])], 0.8, score=score, likelihood=GAUSSIAN)
        covered += int(made(xs[-1:]).covers(ys[-1:]))
    assert within_binomial_band(covered, splits, 0.8, 0.8)  # 16 of 20 ranks


@pytest.mark.parametrize("score", ["absolute", "cqr"])
def test_intervals_of_a_drawn_network_cover(score: str) -> None:
    """One network is drawn from a wide posterior: held-out data and new inputs must get the same one."""
    torch.manual_seed(0)
    bnn = bl.bayesianize(nn.Linear(1, 1, bias=False), bl.Variational(), likelihood=GAUSSIAN)
    with torch.no_grad():
        bnn.model.weight.zero_()
        bnn.model.weight_log_std.zero_()
    n, splits, covered = 19, 400, 0
    x = torch.randn(splits, n + 1, 1)
    for xs in x:
        made = bl.conformal(bnn, [(xs[:-1], torch.zeros(n, 1))], 0.8, score=score, samples=1, how="sample")
        covered += int(made(xs[-1:]).covers(torch.zeros(1, 1)))
    assert within_binomial_band(covered, splits, 0.8, 0.8 + 1 / (n + 1))


def test_every_class_is_covered() -> None:
    generator = torch.Generator().manual_seed(2)
    logits, labels = logits_and_labels(40_000, 4, generator)
    logits[:, 0] -= 2  # the network hardly believes in class 0
    half = len(labels) // 2
    made = bl.conformal(nn.Identity(), [(logits[:half], labels[:half])], 0.9, per_class=True, likelihood=CATEGORICAL)
    covers = made(logits[half:]).covers(labels[half:])
    for c in range(4):
        assert float(covers[labels[half:] == c].double().mean()) == pytest.approx(0.9, abs=0.015)


def test_the_expected_fraction_of_pixels_is_covered() -> None:
    generator, n = torch.Generator().manual_seed(3), 20
    losses = []
    for _ in range(300):
        hard = torch.rand(n + 1, 1, 1, 1, generator=generator)  # pixels of an image are alike
        logits = 3 * torch.randn(n + 1, 3, 4, 4, generator=generator)
        labels = (logits + 6 * hard * torch.randn(logits.shape, generator=generator)).argmax(1)
        made = bl.conformal(
            nn.Identity(),
            [(logits[:10], labels[:10]), (logits[10:-1], labels[10:-1])],
            0.8,
            likelihood=bl.likelihoods.Categorical(class_dim=1),
        )
        losses.append(1 - float(made(logits[-1:]).covers(labels[-1:]).double().mean()))
    mean = sum(losses) / len(losses)
    error = torch.tensor(losses).std() / math.sqrt(len(losses))
    assert mean <= 0.2 + 3 * float(error)
    assert mean >= 0.1


def test_the_threshold_is_the_conformal_quantile() -> None:
    scores = torch.rand(19, dtype=torch.float64)
    found = conformal_module._threshold(scores, torch.ones_like(scores), 0.1, 19)
    assert found == scores.sort().values[math.ceil(20 * 0.9) - 1]
    assert conformal_module._threshold(scores[:5], torch.ones(5), 0.1, 5) == math.inf


@pytest.mark.parametrize(("n", "coverage"), [(9, 0.9), (4, 0.8), (3, 0.75), (49, 0.98), (999, 0.999)])
def test_the_fewest_examples_that_suffice_give_the_largest_score(n: int, coverage: float) -> None:
    y = torch.arange(float(n))[:, None]
    made = bl.conformal(nn.Identity(), [(torch.zeros(n, 1), y)], coverage, score="absolute", likelihood=GAUSSIAN)
    assert float(made.threshold) == n - 1
    fewer = bl.conformal(nn.Identity(), [(torch.zeros(n - 1, 1), y[1:])], coverage, likelihood=GAUSSIAN)
    assert float(fewer.threshold) == math.inf


@pytest.mark.parametrize("max_risk", [0.02, 0.1])
def test_the_risk_of_answers_is_bounded(max_risk: float) -> None:
    generator, trials, delta, broken, answered = torch.Generator().manual_seed(4), 80, 0.1, 0, 0.0
    population, truth = logits_and_labels(50_000, 5, generator, spread=5.0)
    wrong = population.argmax(1) != truth
    sure = population.softmax(-1).amax(1)
    for _ in range(trials):
        rows = torch.randint(len(truth), (1000,), generator=generator)
        made = bl.selective(
            nn.Identity(), [(population[rows], truth[rows])], max_risk, 1 - delta, likelihood=CATEGORICAL
        )
        chosen = sure > made.threshold
        answered += made.coverage / trials
        broken += bool(chosen.any()) and float(wrong[chosen].double().mean()) > max_risk
    assert broken <= stats.binom.ppf(1 - 1e-4, trials, delta)
    assert answered > 0.05  # it does not keep its promise by silence


def test_label_noise_does_not_silence_a_safe_predictor() -> None:
    generator, n, answered = torch.Generator().manual_seed(0), 5000, []
    for _ in range(12):
        gaps = 2 + 4 * torch.rand(n, generator=generator)
        wrong = torch.rand(n, generator=generator) < 0.003  # however sure the network is
        logits = torch.stack([gaps, torch.zeros(n)], 1)
        made = bl.selective(nn.Identity(), [(logits, wrong.long())], 0.01, likelihood=CATEGORICAL)
        assert made.risk <= made.risk_bound <= 0.01 + 1e-6
        answered.append(made.coverage)
    assert answered == [1.0] * 12


def test_the_fewest_examples_without_an_error_are_enough() -> None:
    """At 5 % and a confidence of 95 % they are 59, of which 0.95^59 < 0.05 is left."""
    for n, coverage in ((58, 0.0), (59, 1.0)):
        logits = torch.stack([torch.linspace(1, 4, n), torch.zeros(n)], 1)
        held_out = [(logits, torch.zeros(n, dtype=torch.long))]
        assert bl.selective(nn.Identity(), held_out, 0.05, likelihood=CATEGORICAL).coverage == coverage


def test_equal_confidences_are_answered_together() -> None:
    logits = torch.cat([torch.tensor([[40.0, 0.0]]).expand(95, 2), torch.tensor([[1.0, 0.0]]).expand(5, 2)])
    held_out = [(logits, torch.zeros(100, dtype=torch.long))]
    for coverage, expected in ((0.5, 0.95), (0.9, 0.95), (0.95, 0.95), (0.96, 1.0)):
        made = bl.selective(nn.Identity(), held_out, coverage=coverage, likelihood=CATEGORICAL)
        assert made.coverage == expected
        assert float(made(logits).answered.double().mean()) == pytest.approx(expected)
    assert bl.selective(nn.Identity(), held_out, 0.1, likelihood=CATEGORICAL).coverage == 1.0


def test_the_bound_of_a_risk_is_the_exact_binomial_one() -> None:
    loss = torch.tensor([1.0] * 3 + [0.0] * 97, dtype=torch.float64)
    assert p_value(loss, 0.1) == pytest.approx(stats.binom.cdf(3, 100, 0.1), rel=1e-9)
    between = torch.full((100,), 0.03, dtype=torch.float64)
    assert p_value(between, 0.1) < 0.2


def test_answers_and_silence() -> None:
    generator = torch.Generator().manual_seed(5)
    logits, labels = logits_and_labels(2000, 3, generator)
    made = bl.selective(nn.Identity(), [(logits, labels)], coverage=0.7, likelihood=CATEGORICAL)
    assert made.coverage == pytest.approx(0.7, abs=0.01)
    assert made.risk < made.curve.risk[-1]
    assert made.risk < made.risk_bound < 1
    assert 0 < made.curve.aurc < made.curve.risk[-1]
    answers = made(logits[:50])
    assert bool((answers.classes[~answers.answered] == -1).all())
    assert bool((answers.classes[answers.answered] == answers.prediction.classes[answers.answered]).all())
    none = bl.selective(nn.Identity(), [(logits[:20], labels[:20])], 0.001, likelihood=CATEGORICAL)
    assert none.threshold == math.inf
    assert not bool(none(logits).answered.any())


def test_temperature_mends_overconfidence() -> None:
    generator = torch.Generator().manual_seed(6)
    logits, labels = logits_and_labels(20_000, 5, generator, sharp=4.0)
    made = bl.calibrate(nn.Identity(), [(logits, labels)], likelihood=CATEGORICAL)
    assert float(made.temperature) == pytest.approx(4.0, rel=0.05)
    assert made.after["nll"] < made.before["nll"]
    assert made.after["ece"] < 0.02 < made.before["ece"]
    assert made.after["error"] == made.before["error"]
    torch.testing.assert_close(made(logits[:10]).probs, (logits[:10] / made.temperature.float()).softmax(-1))
    assert "temperature 4" in repr(made) or "temperature 3.9" in repr(made)


def test_data_without_an_error_do_not_make_a_network_certain() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(50, 3, generator=generator)
    made = bl.calibrate(nn.Identity(), [(logits, logits.argmax(1))], likelihood=CATEGORICAL)
    assert 0.05 < float(made.temperature) < 1
    probs = made(torch.randn(4, 3, generator=generator)).probs
    assert bool(((probs > 0) & (probs < 1)).all())


@pytest.mark.parametrize(("n", "tolerance"), [(300, 0.02), (3000, 0.002)])
def test_the_prior_of_a_temperature_vanishes_with_many_data(n: int, tolerance: float) -> None:
    logits, labels = logits_and_labels(n, 5, torch.Generator().manual_seed(9), sharp=2.0)
    made = bl.calibrate(nn.Identity(), [(logits, labels)], likelihood=CATEGORICAL)
    grid = torch.linspace(1.0, 4.0, 3001, dtype=torch.float64)
    each = torch.stack([nn.functional.cross_entropy(logits.double() / t, labels) for t in grid])
    assert float(made.temperature) == pytest.approx(float(grid[each.argmin()]), rel=tolerance)


def test_a_class_without_held_out_examples_keeps_its_temperature() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(200, 4, generator=generator)
    labels = torch.distributions.Categorical(logits=logits[:, :2]).sample()
    with pytest.warns(bl.errors.BayeslimWarning, match="No held-out example is of class 2, 3, whose temperature"):
        made = bl.calibrate(nn.Identity(), [(logits, labels)], "class temperatures", likelihood=CATEGORICAL)
    assert made.temperature[2:].tolist() == [1.0, 1.0]
    assert bool((made.temperature[:2] != 1).all())
    assert float(made(torch.tensor([[0.0, 0.0, 3.0, 0.0]])).probs[0, 2]) > 0.3


def test_class_temperatures_do_at_least_as_well() -> None:
    generator = torch.Generator().manual_seed(7)
    logits, labels = logits_and_labels(5000, 4, generator)
    logits = logits * torch.tensor([3.0, 1.0, 2.0, 1.0])
    one = bl.calibrate(nn.Identity(), [(logits, labels)], likelihood=CATEGORICAL)
    each = bl.calibrate(nn.Identity(), [(logits, labels)], "class temperatures", likelihood=CATEGORICAL)
    assert each.temperature.shape == (4,)
    assert each.after["nll"] <= one.after["nll"] + 1e-6


def test_the_scale_of_values_is_the_mean_square() -> None:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(20_000, 1, generator=generator)
    y = x + 1.5 * torch.randn(x.shape, generator=generator)
    made = bl.calibrate(nn.Identity(), [(x, y)], likelihood=GAUSSIAN)
    assert float(made.temperature) == pytest.approx(9.0, rel=0.05)
    assert made.after["coverage"] == pytest.approx(0.9, abs=0.01)
    low, high = made(x).interval(0.9)
    assert float(((low <= y) & (y <= high)).double().mean()) == pytest.approx(0.9, abs=0.01)


@pytest.fixture(scope="module")
def fitted() -> tuple[Any, Any, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(400, 2)
    y = (x[:, 0] + 0.5 * torch.randn(400) > 0).long()
    bnn = bl.bayesianize(
        nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)), bl.Laplace(), likelihood=CATEGORICAL
    )
    loader = bl.data.Loader(x[:200], y[:200], batch_size=50)
    bnn.fit(loader, epochs=20, lr=1e-2, progress=False)
    return bnn, bl.data.Loader(x[200:], y[200:], batch_size=64, shuffle=False), x[200:], y[200:]


def test_bayesian_networks_and_what_is_left_of_them(fitted: Any) -> None:
    bnn, held_out, x, y = fitted
    slim = bnn.mean_network()
    for predictor, likelihood in ((bnn, None), (slim, CATEGORICAL), (lambda x: slim(x).detach().numpy(), CATEGORICAL)):
        sets = bl.conformal(predictor, held_out, 0.9, likelihood=likelihood)(x)
        assert float(sets.covers(y).double().mean()) >= 0.9
        assert bl.selective(predictor, held_out, coverage=0.8, likelihood=likelihood)(x).answered.any()
        assert bl.calibrate(predictor, held_out, likelihood=likelihood)(x).probs is not None


@pytest.mark.filterwarnings("ignore:Of all prior precisions:bayeslim.errors.BayeslimWarning")
def test_the_prior_of_laplace_is_tuned_in_a_copy(fitted: Any) -> None:
    bnn, held_out, x, _ = fitted
    before = bl.predict(bnn, x).probs
    made = bl.calibrate(bnn, held_out, "prior")
    assert made.after["nll"] <= made.before["nll"] + 1e-6
    torch.testing.assert_close(bl.predict(bnn, x).probs, before)
    assert bl.calibrate(bnn, iter(held_out), "prior").after == made.after


def test_bad_requests_say_what_is_needed(fitted: Any) -> None:
    bnn, held_out, x, _ = fitted
    with pytest.raises(TypeError, match="likelihood="):
        bl.conformal(nn.Identity(), held_out)
    with pytest.raises(ValueError, match="coverage must be a finite number above 0"):
        bl.conformal(bnn, held_out, 1.5)
    with pytest.raises(ValueError, match="score of classes is one of lac"):
        bl.conformal(bnn, held_out, score="cqr")
    with pytest.raises(ValueError, match="either max_risk"):
        bl.selective(bnn, held_out)
    with pytest.raises(ValueError, match="tolerance"):
        bl.selective(nn.Identity(), [(x[:, :1], x[:, :1])], 0.1, likelihood=GAUSSIAN)
    with pytest.raises(bl.errors.BayeslimError, match="no batches"):
        bl.conformal(bnn, [])
    with pytest.raises(TypeError, match='what="prior" tunes'):
        bl.calibrate(bnn.mean_network(), held_out, "prior", likelihood=CATEGORICAL)


def test_rates_of_alarms() -> None:
    inside, outside = torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([2.5, 4.0, 5.0])
    assert bl.metrics.aupr(inside, outside) == pytest.approx((1 + 1 + 3 / 4) / 3)
    assert bl.metrics.fpr_at_95(inside, outside) == 0.25
    assert bl.metrics.aupr(inside, inside + 10) == 1.0


def test_alarms_tell_far_inputs_from_near_ones(fitted: Any) -> None:
    bnn, held_out, x, y = fitted
    train = bl.data.Loader(x, y, batch_size=50)
    far = [8 * torch.randn(100, 2)]
    table = bl.alarms(bnn, held_out, far, train=train, how="joint", samples=50)
    assert set(table.rows) == {"entropy", "mutual information", "output variance", "energy", "density"}
    assert table.rows["output variance"]["auroc"] > 0.7
    assert table.rows["density"]["auroc"] > 0.7
    assert table.best in repr(table)
    plain = bl.alarms(bnn.mean_network(), held_out, far, likelihood=CATEGORICAL)
    assert set(plain.rows) == {"entropy", "energy"}


def test_the_density_is_a_mahalanobis_distance(fitted: Any) -> None:
    from bayeslim.decide.alarms import RIDGE, FeatureDensity

    bnn, _, x, y = fitted
    network, x = bnn.mean_network().eval().double(), x.double()  # float32 features depend on the size of a batch
    density = FeatureDensity(network, [(x[:70], y[:70]), (x[70:], y[70:])])
    h = network[:2](x).detach()
    means = torch.stack([h[y == c].mean(0) for c in (0, 1)])
    centred = h - means[y]
    covariance = centred.T @ centred / len(h)
    covariance += RIDGE * covariance.diagonal().mean() * torch.eye(8)
    off = h[:5, None] - means
    expected = torch.einsum("bcd,de,bce->bc", off, covariance.inverse(), off).amin(1)
    torch.testing.assert_close(density.score(x[:5]), expected)


def test_attacks_raise_the_loss_within_their_distance(fitted: Any) -> None:
    bnn, _, x, y = fitted

    def loss(at: Tensor) -> float:
        with torch.no_grad():
            return float(-bnn.likelihood.log_prob(bnn.eval()(at), y).mean())

    once = bl.fgsm(bnn, x, y, 0.1)
    often = bl.pgd(bnn, x, y, 0.1, (-1.0, 1.0), generator=torch.Generator().manual_seed(0))
    assert loss(once) > loss(x)
    assert loss(often) > loss(x.clamp(-1, 1))
    torch.testing.assert_close((once - x).abs(), torch.full_like(x, 0.1))
    assert float((often - x.clamp(-1, 1)).abs().max()) <= 0.1 + 1e-6
    assert float(often.abs().max()) <= 1


def test_batch_bald_is_the_joint_mutual_information() -> None:
    from bayeslim.decide.acquire import batch_bald

    torch.manual_seed(0)
    probs = torch.randn(6, 7, 3, dtype=torch.float64).mul(2).softmax(-1)
    probs[:, 1] = probs[:, 0]  # a copy tells nothing new
    chosen = batch_bald(probs, 3).tolist()

    def information(batch: list[int]) -> float:
        joint = probs[:, batch[0]]
        for place in batch[1:]:
            joint = (joint[:, :, None] * probs[:, place, None, :]).flatten(1)
        mean = torch.special.entr(joint.mean(0)).sum()
        return float(mean - torch.special.entr(joint).sum(1).mean())

    greedy: list[int] = []
    for _ in range(3):
        greedy.append(max((i for i in range(7) if i not in greedy), key=lambda i: information([*greedy, i])))
    assert chosen == greedy


def test_sampled_combinations_estimate_the_joint_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    from bayeslim.decide import acquire

    torch.manual_seed(1)
    probs = torch.randn(5, 6, 4, dtype=torch.float64).softmax(-1)
    joint = probs.new_ones(5, 1)
    for place in range(3):
        joint = (joint[:, :, None] * probs[:, place, None, :]).flatten(1)
    exact = acquire._next_entropy(joint / joint.sum(0), joint.mean(0), probs)
    sampled = acquire._next_entropy(*acquire._sampled(probs[:, :3], torch.Generator().manual_seed(0)), probs)
    torch.testing.assert_close(sampled, exact, rtol=0.03, atol=0.0)


@pytest.mark.parametrize("rule", ["bald", "batch-bald", "entropy", "random"])
def test_inputs_are_chosen_from_a_pool(fitted: Any, rule: Any) -> None:
    bnn, _, x, _ = fitted
    chosen = bl.acquire(bnn, x, 5, rule, how="joint", samples=20, generator=torch.Generator().manual_seed(0))
    assert len(set(chosen.tolist())) == 5
    if rule == "entropy":
        prediction = bl.predict(bnn, x, 20, "joint", generator=torch.Generator().manual_seed(0))
        assert float(prediction.entropy[chosen].min()) >= float(prediction.entropy.median())
    with pytest.raises(ValueError, match="from 1 to the size of the pool"):
        bl.acquire(bnn, x, 1000)
