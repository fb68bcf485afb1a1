"""Kronecker factors: what `kfac` and `kfra` return, and their eigenvalue-corrected form.

For a layer with weight W, as a matrix (rows = outputs, columns = inputs, the bias as one more column), the generalised
Gauss-Newton *summed over all data* is approximated by

    GGN(vec W) ≈ G ⊗ A          vec row by row, so that (G ⊗ A) vec V = vec(G V A)

A is a mean (over examples and positions) and G a sum (over examples, positions and columns): G carries the size of
the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bayeslim.curvature.layers import Layout


@dataclass(frozen=True)
class LayerFactors:
    """Kronecker factors of one layer.

    Attributes:
        weight: the weight's name.
        bias: the bias's name, where it is the last column of the matrix.
        layout: how the weight is a stack of matrices: `layout.to_matrix(weight, bias)`, `layout.from_matrix(matrix)`.
        A: second moment of the inputs, (groups, I, I) with the bias's constant 1 as the last input; its diagonal (1, I)
            for an embedding.
        G: second moment of the output gradients, (groups, O, O).
    """

    weight: str
    bias: str | None
    layout: Layout
    A: Tensor
    G: Tensor

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters in it."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def diagonal_inputs(self) -> bool:
        """Whether A holds a diagonal only."""
        return self.A.ndim == 2

    def diagonal(self) -> dict[str, Tensor]:
        """The diagonal of G ⊗ A by parameter, each of its parameter's shape."""
        inputs = self.A if self.diagonal_inputs else self.A.diagonal(dim1=1, dim2=2)
        return self.parameters(self.G.diagonal(dim1=1, dim2=2).unsqueeze(-1) * inputs.unsqueeze(1))

    def parameters(self, matrix: Tensor) -> dict[str, Tensor]:
        """A stack of matrices (groups, O, I) as tensors of the parameters' shapes."""
        weight, bias = self.layout.from_matrix(matrix)
        return {self.weight: weight} if self.bias is None or bias is None else {self.weight: weight, self.bias: bias}

    def eigh(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Eigenvalues and eigenvectors of A, then of G, rounding below zero clamped away.

        Those of a diagonal A are its entries, with the identity left out: an empty tensor.
        """
        if self.diagonal_inputs:
            values, vectors = self.A, self.A.new_empty(0)
        else:
            values, vectors = torch.linalg.eigh(self.A)
        outputs, basis = torch.linalg.eigh(self.G)
        return values.clamp_min(0), vectors, outputs.clamp_min(0), basis


@dataclass(frozen=True)
class Factors:
    """Kronecker factors of a network.

    Attributes:
        layers: by the weight's name.
        unsupported: parameters that were asked for and are not in it, with the reason; `diag` has them.
        num_data: how many examples they sum.
    """

    layers: Mapping[str, LayerFactors]
    unsupported: Mapping[str, str] = field(default_factory=dict)
    num_data: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that have factors."""
        return tuple(name for layer in self.layers.values() for name in layer.names)

    def diagonal(self) -> dict[str, Tensor]:
        """The diagonal of the approximated GGN by parameter."""
        return {name: value for layer in self.layers.values() for name, value in layer.diagonal().items()}

    def __repr__(self) -> str:
        lines = [f"Factors of {len(self.layers)} layers from {self.num_data:,} examples"]
        for name, layer in self.layers.items():
            groups = f"{layer.A.shape[0]} × " if layer.A.shape[0] > 1 else ""
            size = f"{layer.G.shape[-1]} ⊗ {layer.A.shape[-1]}"
            lines.append(f"  {name}: {groups}{size}{' with its bias' if layer.bias else ''}")
        lines += [f"  without {name}: {reason}" for name, reason in self.unsupported.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class EigenFactors:
    """Eigenvalue-corrected Kronecker factors of one layer: GGN ≈ (Q_G ⊗ Q_A) diag(eigenvalues) (Q_G ⊗ Q_A)ᵀ.

    Attributes:
        layer: the factors whose eigenvectors these are.
        input_basis: Q_A, (groups, I, I); empty for the identity.
        output_basis: Q_G, (groups, O, O).
        eigenvalues: (groups, O, I).
    """

    layer: LayerFactors
    input_basis: Tensor
    output_basis: Tensor
    eigenvalues: Tensor
