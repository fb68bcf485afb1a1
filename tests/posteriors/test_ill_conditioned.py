"""Cuts of Kronecker layers with any finite curvature, against dense solves in float64.

Factors are rank-deficient, have scales over twelve decades or repeated eigenvalues, and priors are weak or strong. A
Gauss-Newton matrix plus a positive prior is positive definite: nothing here may fail, and no cut may end with a loss
above the best one.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bayeslim.errors import BayeslimWarning
from bayeslim.posteriors import Kronecker, KroneckerFactors, group_saliency, kept, saliency
from bayeslim.posteriors.cholesky import cholesky

KINDS = ("rank-deficient", "twelve decades", "repeated", "zero", "scaled coordinates")


def factor(kind: str, size: int, generator: torch.Generator) -> torch.Tensor:
    """A positive semi-definite matrix of one kind."""
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    if kind == "rank-deficient":
        root = torch.randn(size, max(1, size // 3), generator=generator, dtype=torch.float64)
        return root @ root.mT
    if kind == "zero":
        return torch.zeros(size, size, dtype=torch.float64)
    if kind == "scaled coordinates":  # inputs in very different units
        rows = torch.randn(4 * size, size, generator=generator, dtype=torch.float64)
        rows = rows * torch.logspace(-6, 6, size, dtype=torch.float64)
        return rows.mT @ rows / len(rows)
    values = torch.logspace(-6, 6, size, dtype=torch.float64)
    if kind == "repeated":
        values = torch.where(torch.arange(size) < size // 2, 1e-3, 1e3).double()
    return (basis * values) @ basis.mT


def layer(kinds: tuple[str, str], std: float, seed: int, dtype: torch.dtype = torch.float64, size=(6, 7)):
    """A layer of outputs × inputs with such factors, and masks of a cut."""
    generator = torch.Generator().manual_seed(seed)
    outputs, inputs = (factor(kind, n, generator).to(dtype) for kind, n in zip(kinds, size, strict=True))
    mean = {"w": torch.randn(*size, generator=generator, dtype=dtype)}
    masks = {"w": torch.rand(*size, generator=generator) < 0.4}
    masks["w"][0, 0] = True
    return Kronecker(mean, [KroneckerFactors.of("w", outputs=outputs, inputs=inputs)], std**-2), masks


def loss(posterior: Kronecker, params: torch.Tensor) -> float:
    """½ (w − μ)ᵀ P (w − μ) as a sum of squares in the eigenbasis, which loses no digits."""
    (block,) = posterior.blocks
    off = params.double() - posterior.mean["w"].double()
    turned = block.outputs.vectors[0].mT @ off @ block.inputs.vectors[0]
    return float((block.eigenvalues[0] * turned.square()).sum()) / 2


def best_by_least_squares(posterior: Kronecker, kept_mask: torch.Tensor) -> torch.Tensor:
    """The oracle: minimise ‖√Λ Qᵀ (w − μ)‖² over the kept weights by QR, which squares no condition number."""
    (block,) = posterior.blocks
    basis = torch.kron(block.outputs.vectors[0], block.inputs.vectors[0])
    root = block.eigenvalues.flatten().sqrt()[:, None] * basis.mT
    places = kept_mask.flatten()
    target = root @ posterior.mean["w"].double().flatten()
    columns = root[:, places]
    scale = columns.norm(dim=0).clamp(min=1e-300)
    found = torch.zeros_like(target)
    found[places] = torch.linalg.lstsq(columns / scale, target[:, None], driver="gelsd").solution[:, 0] / scale
    return found.view(kept_mask.shape)


kinds = st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS))
stds = st.sampled_from([0.03, 0.3, 1.0, 10.0, 1e3])


@given(kinds, stds, st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_no_cut_ends_above_the_best_loss(kinds, std, seed):
    posterior, masks = layer(kinds, std, seed)
    cut = posterior.condition(masks)
    assert bool(torch.isfinite(cut.mean["w"]).all())
    assert not bool(cut.mean["w"][~masks["w"]].any())
    stay = loss(posterior, posterior.mean["w"] * masks["w"])
    best = loss(posterior, best_by_least_squares(posterior, masks["w"]))
    assert loss(posterior, cut.mean["w"]) <= best * (1 + 1e-4) + 1e-9 * stay


@given(kinds, stds, st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_iterations_alone_never_lose_to_rows_or_to_staying(kinds, std, seed):
    posterior, masks = layer(kinds, std, seed)
    previous = kept.MAX_EXACT_WEIGHTS
    kept.MAX_EXACT_WEIGHTS = 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BayeslimWarning)
            cut, rows = posterior.condition(masks), posterior.condition(masks, how="row")
    finally:
        kept.MAX_EXACT_WEIGHTS = previous
    stay = loss(posterior, posterior.mean["w"] * masks["w"])
    assert loss(posterior, cut.mean["w"]) <= stay * (1 + 1e-9)
    if cut.solves["w"].converged:
        best = loss(posterior, best_by_least_squares(posterior, masks["w"]))
        assert loss(posterior, cut.mean["w"]) <= best * (1 + 1e-3) + 1e-8 * stay
    else:
        assert loss(posterior, cut.mean["w"]) <= loss(posterior, rows.mean["w"]) * (1 + 1e-6) + 1e-9 * stay


@given(kinds, stds, st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_scores_and_variances_stay_positive_and_finite(kinds, std, seed):
    posterior, masks = layer(kinds, std, seed)
    cut = posterior.condition(masks)
    for one in (posterior, cut):
        variance = one.variance["w"]
        assert bool(torch.isfinite(variance).all())
        assert bool((variance[one.support["w"]] > 0).all())
        assert bool((variance <= std**2 * (1 + 1e-6)).all())  # data never widen the prior
        assert bool((saliency(one)["w"] >= 0).all())
    row = {"w": torch.arange(7)}
    assert float(group_saliency(posterior, [row])[0]) >= 0
    assert torch.isfinite(cut.log_det_precision())
    draws = cut.sample(3, generator=torch.Generator().manual_seed(0))["w"]
    assert bool(torch.isfinite(draws).all())


@given(kinds, stds, st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_float32_factors_are_solved_in_float64(kinds, std, seed):
    posterior, masks = layer(kinds, std, seed, torch.float32)
    (block,) = posterior.blocks
    assert block.eigenvalues.dtype == torch.float64
    cut = posterior.condition(masks)
    assert cut.mean["w"].dtype == torch.float32
    stay = loss(posterior, posterior.mean["w"] * masks["w"])
    assert loss(posterior, cut.mean["w"]) <= stay * (1 + 1e-6)


def test_variances_given_zeros_equal_the_dense_ones():
    posterior, masks = layer(("repeated", "rank-deficient"), 10.0, 0)
    (block,) = posterior.blocks
    dense = torch.kron(block.outputs.matrix[0], block.inputs.matrix[0]) + block.prior * torch.eye(42).double()
    places = masks["w"].flatten()
    wanted = torch.linalg.inv(dense[places][:, places]).diagonal()
    torch.testing.assert_close(posterior.condition(masks).variance["w"][masks["w"]], wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("std", [0.03, 1.0, 10.0])
def test_priors_that_differ_over_decades_within_a_layer(std):
    posterior, masks = layer(("twelve decades", "scaled coordinates"), 1.0, 3)
    prior = torch.logspace(-6, 6, 7, dtype=torch.float64).expand(6, 7) / std**2
    other = posterior.with_prior_precision({"w": prior})
    cut = other.condition(masks)
    assert bool(torch.isfinite(cut.mean["w"]).all())
    assert other.quadratic(cut.mean) <= other.quadratic({"w": other.mean["w"] * masks["w"]}) * (1 + 1e-9)


def test_cholesky_of_scales_over_decades_is_silent():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(30, 4, generator=generator, dtype=torch.float64) * torch.logspace(-9, 9, 30).double()[:, None]
    matrix = root @ root.mT + 1e-12 * torch.eye(30).double()
    found, jitter = cholesky(matrix)
    assert jitter <= 1e-12
    scale = matrix.diagonal().sqrt()
    torch.testing.assert_close(
        found @ found.mT / scale / scale[:, None], matrix / scale / scale[:, None], rtol=0, atol=1e-11
    )
