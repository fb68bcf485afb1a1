"""Eigenvalue-corrected Kronecker factors (EKFAC).

G ⊗ A has the eigenvectors Q_G ⊗ Q_A with products of eigenvalues λ_o μ_i. Keeping the basis, the best eigenvalues (in
the Frobenius norm) are the second moments of the gradients in that basis:

    E[o, i] = Σ_n Σ_k (Q_Gᵀ ∇W Q_A)²[o, i]

a second pass over the data. The trace of each layer's block is then that of the GGN, weight sharing included.

George et al. 2018, arXiv:1806.03884
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bayeslim.curvature.columns import Columns, check_columns, output_columns
from bayeslim.curvature.diag import chunks_of, embedding_squares, squared_sum
from bayeslim.curvature.example_gradients import ExampleGradients, LayerPass
from bayeslim.curvature.factors import Factors, LayerFactors
from bayeslim.curvature.layers import EmbeddingLayer, MatrixLayer
from bayeslim.curvature.sweep import data_pass, seeded, sum_over_processes
from bayeslim.errors import ShapeMismatch
from bayeslim.likelihoods import Likelihood
from bayeslim.posteriors.factor import Factor
from bayeslim.posteriors.kronecker_block import KroneckerFactors
from bayeslim.types import Batch, Params


@torch.inference_mode(False)
def ekfac(
    model: nn.Module,
    loader: Iterable[Batch],
    likelihood: Likelihood,
    factors: Factors,
    *,
    columns: Columns = "signs",
    seed: int = 0,
    progress: bool = False,
) -> dict[str, KroneckerFactors]:
    """Eigendecompose Kronecker factors and correct their eigenvalues.

    Args:
        model: whose factors they are; it is not changed.
        loader: batches of inputs and targets.
        likelihood: of the model's outputs.
        factors: from `kfac` or `kfra`.
        columns: the kind of output columns, see `bayeslim.curvature.columns`.
        seed: of the random signs or samples.
        progress: whether to show a progress bar.

    Returns:
        the decomposed factors by the weights' names, in the dtype of `factors`.
    """
    check_columns(columns)
    if not factors.layers:
        raise ShapeMismatch("ekfac corrects the eigenvalues of Kronecker factors, and there is no layer with factors.")
    sums = {name: _Rotated.of(layer) for name, layer in factors.layers.items()}
    generator = seeded(seed)
    with (
        data_pass(model, loader, "eigenvalues", progress) as (twin, data),
        ExampleGradients(twin, factors.names) as gradients,
    ):
        for inputs, targets in data:
            outputs = gradients.forward(inputs)
            sent = output_columns(likelihood, outputs, targets, columns, generator)
            for backward in gradients.backward(inputs, outputs, sent):
                for name, rotated in sums.items():
                    if name in gradients.direct:
                        rotated.add_layer(backward.layers[gradients.direct[name][0]])
                for found in gradients.through_the_network(backward):
                    for name in sums.keys() & found.keys():
                        sums[name].add_parameters(found)
    sum_over_processes(*(rotated.squares for rotated in sums.values()))
    return {name: replace(rotated.factors, corrected=rotated.squares) for name, rotated in sums.items()}


@dataclass
class _Rotated:
    """Squares of one layer's gradients in the factors' eigenbasis."""

    layer: LayerFactors
    factors: KroneckerFactors
    squares: Tensor

    @classmethod
    def of(cls, layer: LayerFactors) -> _Rotated:
        return cls(layer, layer.decompose(), torch.zeros(layer.layer.size, dtype=layer.G.dtype, device=layer.G.device))

    def add_layer(self, seen: LayerPass) -> None:
        """Add the gradients that follow from a layer's inputs and output gradients."""
        view, dtype = seen.view, self.squares.dtype
        assert isinstance(view, MatrixLayer)
        for start, stop in chunks_of(seen, view):
            if isinstance(view, EmbeddingLayer):
                turned = [
                    (x, shape, _turned(self.factors.outputs, g.to(dtype).unsqueeze(-2)).squeeze(-2))
                    for x, shape, g in seen.calls
                ]
                self.squares += embedding_squares(replace(seen, calls=turned), view, start, stop, dtype).T
                continue
            matrices = seen.matrices(start, stop, dtype)
            if matrices is not None:
                a, g = matrices
                a = a if view.order is None else a[..., view.order]
                if self.layer.bias is not None:
                    a = torch.cat([a, torch.ones_like(a[..., :1])], -1)
                self.squares += squared_sum(_turned(self.factors.inputs, a), _turned(self.factors.outputs, g))

    def add_parameters(self, grads: Params) -> None:
        """Add gradients of single examples, (K, b, *shape) by name."""
        matrices = self.layer.layer.matrix({name: grads[name].flatten(0, 1) for name in self.layer.names})
        turned = self.factors.outputs.rotate(matrices.to(self.squares.dtype))
        self.squares += self.factors.inputs.rotate(turned.mT).mT.square().sum(0)


def _turned(factor: Factor, x: Tensor) -> Tensor:
    """Turn vectors (..., groups, n) into the eigenbasis of a factor."""
    return x if factor.vectors is None else torch.einsum("...gi,gij->...gj", x, factor.vectors)
