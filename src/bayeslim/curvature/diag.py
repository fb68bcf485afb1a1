"""The diagonal of the curvature.

    diag GGN = Σ_n Σ_k (∂ s_kᵀ f_n / ∂w)²          over the columns k of the likelihood's curvature

exactly, for every parameter of every module. For a linear layer used at one position the square of the outer product
is the outer product of the squares, so that no gradient of a single example is formed: (g aᵀ)² = g² (a²)ᵀ. Where
positions share the weights, gradients of single examples are formed in chunks that stay in cache.

The Hessian's diagonal is estimated instead, by Hutchinson's estimator E[z ⊙ H z] with random signs z, see `hutchinson`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from bayeslim.curvature.columns import Columns, output_columns
from bayeslim.curvature.example_gradients import Backward, ExampleGradients, LayerPass
from bayeslim.curvature.hutchinson import hutchinson
from bayeslim.curvature.layers import EmbeddingLayer, MatrixLayer
from bayeslim.curvature.sweep import (
    accumulation_dtype,
    chosen_parameters,
    data_pass,
    examples_at_once,
    seeded,
    sum_over_processes,
)
from bayeslim.likelihoods import Likelihood
from bayeslim.types import Batch, Params

Kind: TypeAlias = Literal["ggn", "signs", "fisher", "empirical", "hutchinson"]

COLUMNS: dict[str, Columns] = {"ggn": "exact", "signs": "signs", "fisher": "sampled", "empirical": "empirical"}


@torch.inference_mode(False)
def diag(
    model: nn.Module,
    loader: Iterable[Batch],
    likelihood: Likelihood,
    kind: Kind = "ggn",
    *,
    names: Iterable[str] | None = None,
    probes: int = 1,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Params:
    """Compute the diagonal of the curvature, summed over all data.

    Args:
        model: in any mode; it is not changed.
        loader: batches of inputs and targets.
        likelihood: of the model's outputs.
        kind: "ggn", the exact diagonal of the generalised Gauss-Newton; "signs", an unbiased estimate of it with one
            backward pass; "fisher", one with sampled targets; "empirical", squared gradients of the observed targets;
            "hutchinson", an estimate of the Hessian's diagonal, which may be negative.
        names: the parameters wanted; by default every trainable one.
        probes: how many random vectors "hutchinson" averages over for each batch.
        dtype: to accumulate in; by default the model's, at least float32.
        seed: of the random signs or samples.
        progress: whether to show a progress bar.

    Returns:
        the diagonal by parameter name, each of its parameter's shape.
    """
    chosen = chosen_parameters(model, names)
    dtype = accumulation_dtype(model, dtype)
    if kind == "hutchinson":
        return hutchinson(model, loader, likelihood, chosen, probes=probes, dtype=dtype, seed=seed, progress=progress)
    if kind not in COLUMNS:
        raise ValueError(f"kind must be one of {', '.join([*COLUMNS, 'hutchinson'])}. Got {kind!r}.")
    total = {name: torch.zeros_like(p, dtype=dtype, requires_grad=False) for name, p in chosen.items()}
    generator = seeded(seed)
    with data_pass(model, loader, progress=progress) as (twin, data), ExampleGradients(twin, chosen) as gradients:
        for inputs, targets in data:
            outputs = gradients.forward(inputs)
            columns = output_columns(likelihood, outputs, targets, COLUMNS[kind], generator)
            for backward in gradients.backward(inputs, outputs, columns):
                _add_squares(total, gradients, backward)
    sum_over_processes(*total.values())
    return total


def _add_squares(total: Params, gradients: ExampleGradients, backward: Backward) -> None:
    leaves: dict[str, dict[str, str]] = {}
    for name, (path, leaf) in gradients.direct.items():
        leaves.setdefault(path, {})[leaf] = name
    for path, wanted in leaves.items():
        layer = backward.layers[path]
        if isinstance(layer.view, MatrixLayer):
            _add_matrix_squares(total, layer, layer.view, wanted)
            continue
        for leaf, name in wanted.items():
            found = layer.scales(leaf, 0, backward.examples, total[name].dtype)
            if found is not None:
                total[name] += found.square().sum((0, 1)).view_as(total[name])
    for others in gradients.through_the_network(backward):
        for name, grad in others.items():
            total[name] += grad.to(total[name].dtype).square().sum((0, 1))


def _add_matrix_squares(total: Params, layer: LayerPass, view: MatrixLayer, wanted: dict[str, str]) -> None:
    dtype = next(total[name].dtype for name in wanted.values())
    for start, stop in chunks_of(layer, view):
        if isinstance(view, EmbeddingLayer) and "weight" in wanted:
            total[wanted["weight"]] += embedding_squares(layer, view, start, stop, dtype)
            continue
        matrices = layer.matrices(start, stop, dtype)
        if matrices is None:
            return
        a, g = matrices
        if "weight" in wanted:
            total[wanted["weight"]] += view.weight(squared_sum(a, g))
        if "bias" in wanted:
            total[wanted["bias"]] += g.sum(2).square().sum((0, 1)).flatten()


def chunks_of(layer: LayerPass, view: MatrixLayer) -> list[tuple[int, int]]:
    """List ranges of examples whose features and gradients fit one chunk of memory."""
    if not layer.calls:
        return []
    x, _, g = layer.calls[0]
    features = sum(view.feature_bytes(x, shape) for x, shape, _ in layer.calls)
    gradients = 8 * sum(g[:, 0].numel() for _, _, g in layer.calls)
    plain = len(layer.calls) == 1 and features <= 4 * view.columns * view.groups
    matrix = 0 if plain else 4 * g.shape[0] * view.rows * view.columns * view.groups
    step = examples_at_once(features + gradients + matrix, x.device)
    return [(start, min(start + step, x.shape[0])) for start in range(0, x.shape[0], step)]


def squared_sum(a: Tensor, g: Tensor) -> Tensor:
    """Sum squared gradients, Σ_k Σ_b (Σ_t g_kbt a_btᵀ)², (groups, O, I).

    Args:
        a: features, (b, T, groups, I).
        g: output gradients, (K, b, T, groups, O).
    """
    batch, positions, groups, inputs = a.shape
    columns, outputs = g.shape[0], g.shape[-1]
    if positions == 1:
        squares = g[:, :, 0].square().sum(0)  # (b, groups, O)
        return torch.bmm(squares.permute(1, 2, 0), a[:, 0].square().transpose(0, 1))
    g = g.permute(1, 3, 0, 4, 2).reshape(batch * groups, columns * outputs, positions)
    a = a.transpose(1, 2).reshape(batch * groups, positions, inputs)
    each = torch.bmm(g, a).view(batch, groups, columns, outputs, inputs)
    return each.square_().sum((0, 2))


def embedding_squares(layer: LayerPass, view: EmbeddingLayer, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Sum squared gradients of an embedding's table, (V, D), from the rows looked up."""
    vocabulary, width = view.columns, view.rows
    total = torch.zeros(vocabulary, width, dtype=dtype, device=view.module.weight.device)
    keys, values = [], []
    for x, _, g in layer.calls:
        index = x[start:stop].reshape(stop - start, -1)
        owner = torch.arange(stop - start, device=index.device).unsqueeze(1) * vocabulary
        keys.append((owner + index).flatten())
        values.append(g[:, start:stop].reshape(g.shape[0], -1, width).to(dtype))
    looked_up, place = torch.cat(keys).unique(return_inverse=True)
    sums = torch.zeros(values[0].shape[0], len(looked_up), width, dtype=dtype, device=total.device)
    sums.index_add_(1, place, torch.cat(values, 1))
    total.index_add_(0, looked_up % vocabulary, sums.square().sum(0))
    if view.module.padding_idx is not None:
        total[view.module.padding_idx] = 0
    return total
