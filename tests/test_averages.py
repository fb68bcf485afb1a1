"""Averages over draws: what suits a GPU and what suits a CPU are the same numbers."""

from __future__ import annotations

import pytest
import torch

from bayeslim import averages


def all_averages(logits):
    mean, uncertainty = averages.class_averages(logits, lambda: logits)
    return mean, *uncertainty()


@pytest.mark.parametrize("shape", [(5, 7, 4), (3, 2, 6, 3), (1, 4, 2)])
@pytest.mark.parametrize("wide", [0, 100])
def test_all_ways_to_average_classes_agree(shape, wide, monkeypatch):
    logits = 4 * torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits.view(-1)[0] = -torch.inf
    logits[-1, 0, ..., 0] = 2e4  # as sure as can be
    of_few = all_averages(logits)
    monkeypatch.setattr(averages, "FEW", 0)
    monkeypatch.setattr(averages, "SOME", 0)
    monkeypatch.setattr(averages, "MANY", 0)
    monkeypatch.setattr(averages, "KEPT", 0)
    monkeypatch.setattr(averages, "WIDE", wide)
    for one, other in zip(of_few, all_averages(logits), strict=True):
        torch.testing.assert_close(one, other)
        assert one.is_contiguous()
        assert other.is_contiguous()


def test_moments_in_one_call_and_in_passes_agree():
    values = torch.randn(6, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    few = averages.moments_over_draws(values[:, :10])
    many = averages.moments_over_draws(values)
    assert values[:, :10].numel() <= averages.FEW < values.numel()
    for one, all_of_them in zip(few, many, strict=True):
        torch.testing.assert_close(one, all_of_them[:10])
    torch.testing.assert_close(many[1], values.var(0, correction=0))


@pytest.mark.parametrize("shape", [(5, 7, 4), (3, 2, 6, 40), (2, 1, 3), (2, 3, 1)])
@pytest.mark.parametrize("products", [0, 1_000])
def test_examples_that_lie_along_memory_are_averaged_as_others_are(shape, products, monkeypatch):
    monkeypatch.setattr(averages, "PRODUCTS", products)
    monkeypatch.setattr(averages, "MORE", products)
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    lying_so = logits.mT.contiguous().mT
    for one, other in zip(all_averages(logits), all_averages(lying_so), strict=True):
        torch.testing.assert_close(one, other)
        assert other.is_contiguous()


def test_networks_that_lie_beside_each_other_are_averaged_as_others_are():
    logits = torch.randn(5, 7, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    beside = logits.transpose(0, 1).contiguous().transpose(0, 1)
    for one, other in zip(all_averages(logits), all_averages(beside), strict=True):
        torch.testing.assert_close(one, other)
        assert other.is_contiguous()


def test_a_mean_as_a_product_is_exact_and_can_be_differentiated():
    averages._shares.cache_clear()
    logits = torch.randn(5, 3, 100, generator=torch.Generator().manual_seed(0)).mT
    with torch.inference_mode():
        averages.class_averages(logits, lambda: logits)  # shares are made here, and used below
    assert averages._shares.cache_info().currsize == 1
    expected = logits.softmax(-1).mean(0)
    logits.requires_grad_(True)
    with torch.autocast("cpu"):
        narrow, _ = averages.class_averages(logits, lambda: logits)
    assert averages._shares.cache_info().hits == 0
    mean, _ = averages.class_averages(logits, lambda: logits)
    assert averages._shares.cache_info().hits == 1
    for found in (mean, narrow):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    mean.square().sum().backward()
    again = logits.detach().clone().requires_grad_(True)
    again.softmax(-1).mean(0).square().sum().backward()
    torch.testing.assert_close(logits.grad, again.grad)


def test_a_mean_of_probabilities_with_nothing_in_it_is_not_a_number_there_alone():
    logits = torch.zeros(2, 3, 4).mT.clone(memory_format=torch.preserve_format)
    logits[0, 1] = torch.nan
    mean, _ = averages.class_averages(logits, lambda: logits)
    assert mean.isnan().any(-1).tolist() == [False, True, False, False]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
@pytest.mark.parametrize("beside", [False, True])
def test_very_many_values_are_averaged_as_others_are(beside, monkeypatch):
    logits = 4 * torch.randn(5, 7, 40, generator=torch.Generator().manual_seed(0))
    logits[0, 0, :3], logits[1, 1, 0] = -torch.inf, 2e4
    if beside:
        logits = logits.transpose(0, 1).contiguous().transpose(0, 1)
    expected = all_averages(logits)
    monkeypatch.setattr(averages, "VERY_MANY", 0)
    for one, other in zip(expected, all_averages(logits), strict=True):
        torch.testing.assert_close(one, other)
    logits.requires_grad_()
    averages.class_averages(logits, lambda: logits)[0][..., 0].sum().backward()
    assert logits.grad.isfinite().all()
