"""The benchmark of sparse posteriors: splits, augmentation, and weight decay as a prior."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn

import bayeslim as bl

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("sparse_posteriors")


@pytest.mark.parametrize("which", ["fresh", "unseen"])
def test_a_split_of_its_own_tests_on_images_that_were_for_training(benchmark, monkeypatch, which):
    monkeypatch.setattr(benchmark, "VALIDATION_IMAGES", 100)
    official, fresh = (benchmark.split("digits", name) for name in ("official", which))

    def images(x):
        return {image.numpy().tobytes() for image in x}

    assert torch.equal(official.valid_x, fresh.valid_x)
    assert [len(part) for part in (fresh.train_x, fresh.test_x)] == [len(official.train_x), len(official.test_x)]
    assert images(fresh.test_x) <= images(official.train_x)
    assert images(official.test_x) <= images(fresh.train_x)
    assert not images(fresh.test_x) & (images(fresh.train_x) | images(fresh.valid_x))
    known = {image.numpy().tobytes(): int(y) for image, y in zip(official.train_x, official.train_y, strict=True)}
    assert all(known[x.numpy().tobytes()] == int(y) for x, y in zip(fresh.test_x, fresh.test_y, strict=True))


def test_a_teacher_says_what_it_thinks_of_the_image_that_is_shown(benchmark):
    torch.manual_seed(0)
    x, y = torch.rand(30, 1, 6, 6), torch.randint(0, 4, (30,))
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(36, 4))
    seen, targets = benchmark.shown(x, y, by=1, teacher=teacher)
    assert not torch.equal(seen, x)
    torch.testing.assert_close(targets[:, :-1], teacher(seen).softmax(1).detach())
    assert torch.equal(targets[:, -1].long(), y)
    assert not targets.requires_grad
    padded = nn.functional.pad(x, [1] * 4)
    windows = [padded[:, :, down : down + 6, right : right + 6] for down in range(3) for right in range(3)]
    assert all(any(torch.equal(image, window[k]) for window in windows) for k, image in enumerate(seen))


def test_weight_decay_has_the_priors_gradient(benchmark):
    captured = importlib.import_module("captured")
    torch.manual_seed(0)
    x, y = torch.randn(20, 5), torch.randint(0, 3, (20,))
    bnn = benchmark.plain(nn.Linear(5, 3), prior_std=0.3)
    bnn.num_data = 200
    weight = bnn.model.weight
    (whole,) = torch.autograd.grad(bnn.loss((x, y), kl_weight=1.0), weight)
    (data,) = torch.autograd.grad(bnn.likelihood.mean_nll(bnn.model(x), y), weight)
    torch.testing.assert_close(whole, data + captured.weight_decay(bnn) * weight)
    recipe = bl.recipes.sparse_vd()
    sparse = bl.bayesianize(nn.Linear(5, 3), likelihood=bl.likelihoods.Categorical(), **recipe)
    assert captured.weight_decay(sparse) is None


def test_runs_are_on_all_splits_where_a_rule_says_so(benchmark):
    found = [(job["split"], job["seed"]) for job in benchmark.jobs_of("weights, augmented", "lenet5", 5)]
    seeds = {"official": 5, "fresh": 3, "unseen": 5}
    assert found == [(split, seed) for split, count in seeds.items() for seed in range(count)]
    prices = [(job["split"], job["strength"]) for job in benchmark.jobs_of("units, augmented", "lenet5", 1)]
    assert prices == [("official", price) for price in (0.4, 0.5, 0.6, 0.7)] + [
        ("fresh", 0.5), ("fresh", 0.7), ("unseen", 0.5)
    ]  # fmt: skip
    assert all("split" not in job for job in benchmark.jobs_of("weights", "lenet5", 5))
    assert {job["split"] for job in benchmark.jobs_of("units, gentle", "lenet5", 5)} == {"unseen"}


def test_splits_have_test_images_of_their_own(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "VALIDATION_IMAGES", 100)
    one, other = (benchmark.split("digits", name) for name in ("fresh", "unseen"))
    assert not {x.numpy().tobytes() for x in one.test_x} & {x.numpy().tobytes() for x in other.test_x}
