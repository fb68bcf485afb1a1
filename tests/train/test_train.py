"""The fit loop: what it promises to a training run."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

import bayeslim as bl
from bayeslim.errors import BayeslimError, MissingDataSize, NonFiniteLoss
from bayeslim.families import DiagonalGaussian
from bayeslim.train.fit import measure
from bayeslim.train.schedules import Blundell

G = torch.Generator().manual_seed(4)
X = torch.randn(32, 4, generator=G)
Y = X @ torch.randn(4, 1, generator=G) + 0.1 * torch.randn(32, 1, generator=G)
CLASSES = (Y[:, 0] > 0).long()


def regression(std: float = 0.05, dtype: torch.dtype = torch.float32, dropout: float = 0.0, **options) -> bl.Bayesian:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1)).to(dtype)
    method = bl.Variational(family=DiagonalGaussian(initial_std=std), **options)
    return bl.bayesianize(model, method, likelihood=bl.likelihoods.Gaussian(0.5))


def loader(batch_size: int = 8, shuffle: bool = True, n: int = 32) -> DataLoader:
    return DataLoader(TensorDataset(X[:n], Y[:n]), batch_size=batch_size, shuffle=shuffle)


def weights(bnn: bl.Bayesian) -> dict[str, torch.Tensor]:
    return copy.deepcopy(bnn.state_dict())


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_it_learns_and_says_what_it_did():
    bnn = regression()
    fit = bnn.fit(loader(), epochs=15, lr=1e-2, seed=0)
    assert len(fit.history) == 15
    assert [h["epoch"] for h in fit.history] == list(range(1, 16))
    first, last = fit.history[0], fit.history[-1]
    assert last["nll"] < first["nll"] / 2
    assert first["kl"] > 0
    assert last["loss"] == pytest.approx(last["nll"] + last["kl"] / 32, rel=1e-4)
    assert fit.stopped == "epochs"
    assert bnn.num_data == 32
    assert bnn.step == 15 * 4
    assert bnn.steps_per_epoch == 4
    assert "15 epochs" in repr(fit)


def test_callbacks_see_add_and_stop():
    seen = []

    def watch(epoch):
        seen.append((epoch.number, epoch.metrics["nll"]))
        epoch.metrics["mine"] = epoch.number * 2.0

    def enough(epoch):
        if epoch.number == 3:
            epoch.stop = "three is enough"

    fit = regression().fit(loader(), epochs=10, callbacks=[watch, enough])
    assert [number for number, _ in seen] == [1, 2, 3]
    assert fit.stopped == "three is enough"
    assert fit.history[-1]["mine"] == 6.0


def test_validation_measures_the_mean_network():
    bnn = regression()
    fit = bnn.fit(loader(), epochs=2, validate=loader(batch_size=5, shuffle=False))
    mean = bnn.mean_network().eval()(X)
    nll = -bnn.likelihood.log_prob(mean, Y).mean().item()
    assert fit.history[-1]["val_nll"] == pytest.approx(nll, rel=1e-5)
    assert fit.history[-1]["val_rmse"] == pytest.approx((mean - Y).square().mean().sqrt().item(), rel=1e-4)
    model = nn.Linear(4, 2)
    bnn = bl.bayesianize(model, bl.Variational(), likelihood=bl.likelihoods.Categorical(), num_data=32)
    wrong = (model(X).argmax(-1) != CLASSES).float().mean().item()
    assert measure(bnn, [(X, CLASSES)])["val_error"] == pytest.approx(wrong)


def test_early_stopping_goes_back_to_the_best_epoch():
    bnn, kept, scores = regression(), {}, [5.0, 3.0, 4.0, 3.5, 1.0]

    def score(epoch):
        epoch.metrics["score"] = scores[epoch.number - 1]
        kept[epoch.number] = weights(epoch.bnn)

    fit = bnn.fit(loader(), epochs=5, lr=1e-2, validate=loader(), monitor="score", patience=2, callbacks=[score])
    assert fit.stopped == "early stopping"
    assert fit.best_epoch == 2
    assert len(fit.history) == 4
    assert_equal(weights(bnn), kept[2])
    with pytest.raises(AssertionError):
        assert_equal(kept[2], kept[4])


def test_without_patience_the_last_epoch_stays():
    bnn, last = regression(), {}
    fit = bnn.fit(loader(), epochs=3, validate=loader(), callbacks=[lambda e: last.update(weights(e.bnn))])
    assert fit.best_epoch in (1, 2, 3)
    assert_equal(weights(bnn), last)


def test_an_unknown_monitor_is_named():
    with pytest.raises(ValueError, match=r"monitor='val_eror' is not measured\. Measured: .*val_nll"):
        regression().fit(loader(), epochs=1, validate=loader(), monitor="val_eror")


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulated_batches_are_one_large_batch(accumulate):
    """With next to no noise the gradients are those of one batch of all the examples."""
    runs = []
    for size, steps in ((32, 1), (32 // accumulate, accumulate)):
        bnn = regression(std=1e-9, dtype=torch.float64)
        data = DataLoader(TensorDataset(X.double(), Y.double()), batch_size=size)
        optimizer = torch.optim.SGD(bnn.parameters(), lr=1e-2)
        bnn.fit(data, epochs=3, optimizer=optimizer, accumulate=steps)
        assert bnn.step == 3
        assert bnn.steps_per_epoch == 1
        runs.append(weights(bnn))
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-6, atol=1e-8)


def test_accumulation_steps_on_what_is_left_at_the_end():
    bnn = regression()
    bnn.fit(loader(batch_size=8), epochs=2, accumulate=3)
    assert bnn.step == 2 * 2


def test_clipping_bounds_the_step():
    bnn = regression()
    before = torch.cat([p.detach().clone().flatten() for p in bnn.parameters()])
    bnn.fit(loader(batch_size=32), epochs=1, clip=1e-3, optimizer=torch.optim.SGD(bnn.parameters(), lr=1.0))
    moved = torch.cat([p.detach().flatten() for p in bnn.parameters()]) - before
    assert moved.norm().item() == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1, 1, 1, 1]),
        ("linear", [1, 0.75, 0.5, 0.25]),
        ("cosine", [1, 0.5 + 0.5 * math.cos(math.pi / 4), 0.5, 0.5 - 0.5 * math.cos(math.pi / 4)]),
        ("half-then-linear", [1, 1, 1, 0.5]),
        (lambda done: 1 + done, [1, 1.25, 1.5, 1.75]),
    ],
)
def test_learning_rate_schedules(schedule, expected):
    bnn, rates = regression(), []
    optimizer = torch.optim.SGD(bnn.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda opt, *_: rates.append(opt.param_groups[0]["lr"]))
    bnn.fit(loader(batch_size=16), epochs=2, optimizer=optimizer, lr_schedule=schedule)
    assert rates == pytest.approx([0.01 * factor for factor in expected])


def test_an_optimizer_used_again_counts_its_steps_once():
    bnn = regression()
    optimizer = bnn.optimizer(1e-3)
    bnn.fit(loader(), epochs=1, optimizer=optimizer)
    bnn.fit(loader(), epochs=1, optimizer=optimizer)
    assert bnn.step == 8


def test_an_optimizer_keeps_its_learning_rates():
    bnn, rates = regression(), []
    parameters = list(bnn.parameters())
    optimizer = torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.02}], lr=0.01)
    optimizer.register_step_pre_hook(lambda opt, *_: rates.append([group["lr"] for group in opt.param_groups]))
    options = {"epochs": 1, "optimizer": optimizer, "lr_schedule": "linear"}
    bnn.fit(loader(), **options)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
    optimizer.param_groups[0]["lr"] = 0.001  # set between two runs
    bnn.fit(loader(), **options)
    assert rates[0] == [0.01, 0.02]
    assert rates[len(rates) // 2] == [0.001, 0.02]
    with pytest.raises(InterruptedError):
        bnn.fit(loader(), callbacks=[interrupt], **options)
    assert [group["lr"] for group in optimizer.param_groups] == [0.001, 0.02]
    assert all("initial_lr" not in group for group in optimizer.param_groups)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    bnn.fit(loader(), **options)
    scheduler.step()
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.001, 0.02]
    assert [group["lr"] for group in optimizer.param_groups] == [0.0005, 0.01]


def interrupt(epoch):
    raise InterruptedError


def test_kl_schedules_see_every_step_of_fit():
    bnn, kls = regression(kl_schedule=Blundell()), []
    optimizer = bnn.optimizer()
    optimizer.register_step_pre_hook(lambda *_: kls.append(bnn.terms.kl_weight))
    bnn.fit(loader(), epochs=2, optimizer=optimizer)
    assert kls == pytest.approx(2 * [4 * 2 ** (4 - i) / 15 for i in (1, 2, 3, 4)])


def test_gradients_from_before_do_not_enter():
    clean, dirty = regression(), regression()
    for p in dirty.parameters():
        p.grad = torch.full_like(p, math.nan)
    for bnn in (clean, dirty):
        bnn.fit(loader(), epochs=1, seed=0)
    assert_equal(weights(clean), weights(dirty))
    assert all(p.grad is None for p in dirty.parameters())


def test_the_same_seed_repeats_and_another_does_not():
    runs = [regression(dropout=0.3) for _ in range(3)]
    for bnn, seed in zip(runs, (1, 1, 2), strict=True):
        torch.rand(3)  # a global state of any kind
        bnn.fit(loader(), epochs=2, seed=seed)
    assert_equal(weights(runs[0]), weights(runs[1]))
    assert not torch.equal(runs[0].model[0].weight, runs[2].model[0].weight)


def test_every_module_gets_its_mode_back():
    bnn = regression()
    bnn.eval()
    bnn.model[2].train()
    modes = [m.training for m in bnn.modules()]
    bnn.fit(loader(), epochs=1, validate=loader())
    assert [m.training for m in bnn.modules()] == modes


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"data"}, r"its data term \(NLL\) is not finite"),
        ({"kl"}, "its KL is not finite"),
        ({"data", "kl"}, r"its data term \(NLL\) and its KL is not finite"),
    ],
    ids=["data", "kl", "both"],
)
def test_a_loss_that_is_not_finite_is_explained(terms, words):
    bnn, x = regression(), X.clone()
    if "data" in terms:
        x[3] = math.nan
    if "kl" in terms:
        with torch.no_grad():
            bnn.model[0].weight_log_std.fill_(-math.inf)
    before = weights(bnn)
    with pytest.raises(NonFiniteLoss, match=f"epoch 1, batch 1: {words}.*Try"):
        bnn.fit(DataLoader(TensorDataset(x, Y), batch_size=32), epochs=2)
    assert_equal(before, weights(bnn))
    assert all(p.grad is None for p in bnn.parameters())


def test_training_goes_on_after_bad_data_was_mended():
    bnn = regression()
    with pytest.raises(NonFiniteLoss):
        bnn.fit(DataLoader(TensorDataset(X / 0, Y), batch_size=32), epochs=1)
    bnn.fit(loader(), epochs=1)
    assert all(torch.isfinite(p).all() for p in bnn.parameters())


def test_batches_as_dicts_and_several_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, left, right):
            return (self.a(left) * self.b(right)).sum(-1, keepdim=True)

    likelihood = bl.likelihoods.Gaussian(0.5)
    for batches in (
        [{"left": X[:16], "labels": Y[:16], "right": X[16:]}],
        [(X[:16], X[16:], Y[:16])],
        [((X[:16], X[16:]), Y[:16])],
        bl.data.Loader({"left": X[:16], "right": X[16:]}, Y[:16], batch_size=4),
    ):
        bnn = bl.bayesianize(Two(), bl.Variational(), likelihood=likelihood, num_data=16)
        fit = bnn.fit(batches, epochs=2, validate=batches)
        assert math.isfinite(fit.history[-1]["val_nll"])


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(X, Y, strict=True)


class Bare:
    """Batches and how many there are, and no word of their data."""

    def __iter__(self):
        return iter([(X, Y)])

    def __len__(self):
        return 1


class Liar(list):
    def __len__(self):
        return 1


@pytest.mark.parametrize(
    ("batches", "count"),
    [
        (loader(), 32),
        ([(X[:8], Y[:8]), (X[8:11], Y[8:11])], 11),
        (DataLoader(TensorDataset(X, Y), batch_size=8, sampler=SubsetRandomSampler(range(12))), 12),
        (DataLoader(TensorDataset(X, Y), batch_sampler=BatchSampler(SubsetRandomSampler(range(12)), 5, False)), 12),
        (DataLoader(TensorDataset(X, Y), batch_size=8, sampler=RandomSampler(X, num_samples=16)), 32),
    ],
)
@pytest.mark.parametrize("method", [bl.Variational(), bl.Laplace(), bl.SGLD(samples=1)])
def test_the_size_of_the_data_is_that_of_what_is_gone_over(batches, count, method):
    """Part of a data set is all the data there is; one that is drawn anew in every epoch is all of the data set."""
    bnn = bl.bayesianize(nn.Linear(4, 1), method, likelihood=bl.likelihoods.Gaussian(0.5))
    bnn.fit(batches, progress=False, **({} if method.name == "laplace" else {"epochs": 1}))
    assert bnn.num_data == count


@pytest.mark.parametrize(
    ("batches", "options", "error", "words"),
    [
        (DataLoader(Stream(), batch_size=8), {}, BayeslimError, "a loader with a length"),
        (iter([(X, Y)]), {}, BayeslimError, "a loader with a length"),
        (Bare(), {}, MissingDataSize, r"bayesianize\(\.\.\., num_data="),
        ([], {}, BayeslimError, "no batches"),
        (DataLoader(TensorDataset(X[:0], Y[:0]), batch_size=8), {}, BayeslimError, "no batches"),
        (DataLoader(TensorDataset(X[:4], Y[:4]), batch_size=8, drop_last=True), {}, BayeslimError, "no batches"),
        (loader(), {"epochs": 0}, ValueError, "at least 1. Got 0"),
        (loader(), {"accumulate": 0}, ValueError, "at least 1. Got 0"),
        (loader(), {"epochs": "3"}, ValueError, "whole number, at least 1. Got '3'"),
        (loader(), {"device": "gpu"}, ValueError, 'such as "cpu" or "cuda:0". Got \'gpu\''),
        (loader(), {"patience": 2}, ValueError, "patience needs validate"),
        (loader(), {"lr_schedule": "lineal"}, ValueError, "one of constant, linear.*'lineal'"),
        (loader(), {"lrr": 1}, TypeError, "lrr"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_before_anything_changes(batches, options, error, words):
    bnn = regression()
    before = weights(bnn)
    with pytest.raises(error, match=words):
        bnn.fit(batches, **options)
    assert_equal(before, weights(bnn))
    assert (bnn.num_data, bnn.steps_per_epoch, bnn.step) == (None, None, 0)


def test_a_loader_longer_than_it_says_is_refused():
    bnn = regression()
    bnn.num_data = 32
    with pytest.raises(BayeslimError, match="more batches than its length, 1"):
        bnn.fit(Liar([(X, Y), (X, Y)]), epochs=1)


def test_an_empty_validation_loader_is_refused():
    with pytest.raises(BayeslimError, match="validation loader gave no batches"):
        regression().fit(loader(), epochs=1, validate=[])


def test_progress_shows_the_terms_apart(monkeypatch, capsys):
    monkeypatch.setenv("BAYESLIM_PROGRESS", "1")
    regression().fit(loader(), epochs=1, validate=loader())
    shown = capsys.readouterr().err
    assert "nll" in shown
    assert "kl" in shown
    assert "val_nll" in shown
    regression().fit(loader(), epochs=1, progress=False)
    assert capsys.readouterr().err == ""


def test_a_foreign_loop_reaches_what_fit_reaches():
    inside, outside = regression(), regression()
    inside.fit(loader(shuffle=False), epochs=2, lr=1e-2, seed=3)
    outside.num_data = 32
    torch.manual_seed(3)
    optimizer = outside.optimizer(lr=1e-2, steps_per_epoch=4)
    for _ in range(2):
        for batch in loader(shuffle=False):
            loss = outside.loss(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(weights(inside), weights(outside))
    assert outside.step == inside.step
