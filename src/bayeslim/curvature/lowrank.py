"""The leading eigenpairs of the generalised Gauss-Newton, without the matrix.

Randomised subspace iteration: start from a random basis, multiply by the GGN in one pass over the data,
orthonormalise, repeat; then diagonalise within the subspace (Rayleigh-Ritz). A product with all vectors of the basis
needs each example's gradients once:

    GGN V = Σ_nk r_nk (r_nkᵀ V)

The error of the k-th eigenvalue falls by (λ_{k+p+1} / λ_k)² with every pass, p being the oversampling.

Halko, Martinsson & Tropp 2011, arXiv:0909.4061
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayeslim.curvature.columns import Columns, check_columns
from bayeslim.curvature.example_gradients import Chosen, chosen_weights
from bayeslim.curvature.ggn import for_each_row
from bayeslim.curvature.sweep import accumulation_dtype, sum_over_processes
from bayeslim.likelihoods import Likelihood
from bayeslim.types import Batch


@dataclass(frozen=True)
class LowRankCurvature:
    """GGN ≈ vectors · diag(eigenvalues) · vectorsᵀ.

    Attributes:
        vectors: orthonormal columns, (S, k).
        eigenvalues: in descending order, (k,).
        weights: for each parameter, in the rows' order, the flat indices of its weights, or None for all of them.
        num_data: how many examples it sums.
    """

    vectors: Tensor
    eigenvalues: Tensor
    weights: dict[str, Tensor | None]
    num_data: int

    def __repr__(self) -> str:
        size, rank = self.vectors.shape
        return f"LowRankCurvature: {rank} eigenpairs over {size:,} weights from {self.num_data:,} examples"


@torch.inference_mode(False)
def lowrank(
    model: nn.Module,
    loader: Iterable[Batch],
    likelihood: Likelihood,
    rank: int,
    selection: Chosen = None,
    *,
    oversampling: int = 10,
    passes: int = 4,
    columns: Columns = "exact",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool = False,
) -> LowRankCurvature:
    """Compute the leading eigenpairs of the generalised Gauss-Newton.

    Args:
        model: in any mode; it is not changed.
        loader: batches of inputs and targets, passed over `passes` times: it must start anew each time, and with random
            columns it should not be shuffled.
        likelihood: of the model's outputs.
        rank: how many eigenpairs.
        selection: parameter names, or flat indices by parameter name (None for all of a parameter); by default every
            trainable parameter.
        oversampling: how many more vectors are iterated than returned.
        passes: over the data, at least 2; more where the eigenvalues fall slowly.
        columns: the kind of output columns, see `bayeslim.curvature.columns`.
        dtype: to accumulate in; by default the model's, at least float32.
        seed: of the start and of random columns.
        progress: whether to show a progress bar.
    """
    check_columns(columns)
    if passes < 2 or oversampling < 0:
        raise ValueError(f"lowrank needs passes ≥ 2 and oversampling ≥ 0. Got {passes} and {oversampling}.")
    weights = chosen_weights(model, selection)
    params = dict(model.named_parameters())
    size = sum(params[name].numel() if index is None else len(index) for name, index in weights.items())
    if not 1 <= rank <= size:
        raise ValueError(f"rank must be from 1 to the number of weights, {size}. Got {rank}.")
    dtype = accumulation_dtype(model, dtype)
    device = params[next(iter(weights))].device
    width = min(size, rank + oversampling)
    start = torch.randn(size, width, generator=torch.Generator().manual_seed(seed), dtype=dtype).to(device)
    basis = torch.linalg.qr(start).Q
    for _ in range(passes):
        product = torch.zeros_like(basis)

        def multiply(rows: Tensor, basis: Tensor = basis, product: Tensor = product) -> None:
            product.addmm_(rows.T, rows @ basis)

        count = for_each_row(multiply, model, loader, likelihood, weights, columns, dtype, seed, progress)
        sum_over_processes(product, count)
        previous, basis = basis, torch.linalg.qr(product).Q
    # the last product belongs to the basis before it was replaced
    within = previous.T @ product
    values, rotation = torch.linalg.eigh((within + within.T) / 2)
    top = values.argsort(descending=True)[:rank]
    return LowRankCurvature(previous @ rotation[:, top], values[top].clamp_min(0), weights, int(count))
