"""The generalised Gauss-Newton as a dense matrix, over any weights.

    GGN = Σ_n Σ_k r_nk r_nkᵀ          r_nk = Jₙᵀ s_k, the chosen entries of one example's gradient along column k

The chosen weights may be whole parameters, or single weights given by their indices (a subnetwork): then only those
entries of each gradient are ever formed, g[o] · a[i] for a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayeslim.curvature.columns import Columns, check_columns, output_columns
from bayeslim.curvature.example_gradients import Chosen, ExampleGradients, chosen_weights
from bayeslim.curvature.moments import add_outer_products, symmetric
from bayeslim.curvature.rows import GradientRows
from bayeslim.curvature.sweep import accumulation_dtype, data_pass, seeded, sum_over_processes
from bayeslim.likelihoods import Likelihood
from bayeslim.types import Batch


@dataclass(frozen=True)
class DenseCurvature:
    """A dense curvature matrix over chosen weights.

    Attributes:
        matrix: (S, S), summed over the data.
        weights: for each parameter, in the matrix's order, the flat indices of its weights, or None for all of them.
        num_data: how many examples it sums.
    """

    matrix: Tensor
    weights: dict[str, Tensor | None]
    num_data: int

    def __repr__(self) -> str:
        size, count = self.matrix.shape[0], len(self.weights)
        return f"DenseCurvature of {size:,} weights in {count} parameters from {self.num_data:,} examples"


@torch.inference_mode(False)
def ggn(
    model: nn.Module,
    loader: Iterable[Batch],
    likelihood: Likelihood,
    selection: Chosen = None,
    *,
    columns: Columns = "exact",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool = False,
) -> DenseCurvature:
    """Compute the generalised Gauss-Newton of chosen weights, summed over all data.

    Args:
        model: in any mode; it is not changed.
        loader: batches of inputs and targets.
        likelihood: of the model's outputs.
        selection: parameter names, or flat indices by parameter name (None for all of a parameter); by default every
            trainable parameter. The matrix is in the model's order of parameters, and in the order of given indices.
        columns: the kind of output columns, see `bayeslim.curvature.columns`.
        dtype: to accumulate in, float64 by default.
        seed: of the random signs or samples.
        progress: whether to show a progress bar.
    """
    check_columns(columns)
    weights = chosen_weights(model, selection)
    params = dict(model.named_parameters())
    size = sum(params[name].numel() if index is None else len(index) for name, index in weights.items())
    dtype = accumulation_dtype(model, dtype or torch.float64)
    device = params[next(iter(weights))].device
    matrix = torch.zeros(size, size, dtype=dtype, device=device)

    def add(rows: Tensor) -> None:
        add_outer_products(matrix.unsqueeze(0), rows.unsqueeze(1))

    count = for_each_row(add, model, loader, likelihood, weights, columns, dtype, seed, progress)
    sum_over_processes(matrix, count)
    return DenseCurvature(symmetric(matrix), weights, int(count))


def for_each_row(
    use: Callable[[Tensor], object],
    model: nn.Module,
    loader: Iterable[Batch],
    likelihood: Likelihood,
    weights: dict[str, Tensor | None],
    columns: Columns,
    dtype: torch.dtype,
    seed: int,
    progress: bool,
) -> Tensor:
    """Pass over the data once and hand `use` the rows r_nk, (n, S), in chunks.

    Returns:
        the number of examples.
    """
    generator = seeded(seed)
    count = torch.zeros((), dtype=torch.float64)
    with data_pass(model, loader, progress=progress) as (twin, data), ExampleGradients(twin, weights) as gradients:
        rows = GradientRows(gradients, weights, dtype)
        for inputs, targets in data:
            outputs = gradients.forward(inputs)
            count += outputs.shape[0]
            sent = output_columns(likelihood, outputs, targets, columns, generator)
            for backward in gradients.backward(inputs, outputs, sent):
                for _, found in rows(backward):
                    use(found.flatten(0, 1))
    return count
