"""Kronecker factors, the results of `kfac` and `kfra`.

For a layer with weight W, as a matrix (rows = outputs, columns = inputs, the bias as one more column), the generalised
Gauss-Newton *summed over all data* is approximated by

    GGN(vec W) ≈ G ⊗ A          vec row by row, so that (G ⊗ A) vec V = vec(G V A)

A is a mean (over examples and positions) and G a sum (over examples, positions and columns): G carries the size of the
data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from bayeslim.posteriors.factor import Factor
from bayeslim.posteriors.kronecker_block import KroneckerFactors
from bayeslim.posteriors.layer_matrix import LayerMatrix
from bayeslim.types import Params


@dataclass(frozen=True, eq=False)
class LayerFactors:
    """Kronecker factors of one layer.

    Attributes:
        layer: names of weight and bias, and how they are a stack of matrices.
        A: second moment of the inputs, (groups, I, I) with the bias's constant 1 as the last input; only its diagonal,
            (groups, I), for an embedding and for very many inputs.
        G: second moment of the output gradients, (groups, O, O); only its diagonal, (groups, O), for very many outputs.
    """

    layer: LayerMatrix
    A: Tensor
    G: Tensor

    @property
    def weight(self) -> str:
        """The weight's name."""
        return self.layer.weight

    @property
    def bias(self) -> str | None:
        """The bias's name, where it is the last column of the matrix."""
        return self.layer.bias

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters in it."""
        return self.layer.names

    def diagonal(self) -> Params:
        """Compute the diagonal of G ⊗ A by parameter, each of its parameter's shape."""
        return self.layer.params(_diagonal(self.G).unsqueeze(-1) * _diagonal(self.A).unsqueeze(1))

    def decompose(self) -> KroneckerFactors:
        """Eigendecompose the factors, for a Kronecker posterior."""
        outputs = _decomposed(self.G, f'output factor of "{self.weight}"')
        inputs = _decomposed(self.A, f'input factor of "{self.weight}"')
        return KroneckerFactors(self.weight, outputs, inputs, self.bias, transposed=self.layer.transposed)


def _diagonal(matrix: Tensor) -> Tensor:
    return matrix if matrix.ndim == 2 else matrix.diagonal(dim1=1, dim2=2)


def _decomposed(matrix: Tensor, what: str) -> Factor:
    if matrix.ndim == 3:
        return Factor.of(matrix, what)
    flat = Factor.of(matrix.flatten(), what)
    return Factor(flat.values.view(matrix.shape), None)


@dataclass(frozen=True, eq=False)
class Factors:
    """Kronecker factors of a network.

    Attributes:
        layers: by the weight's name.
        unsupported: parameters that were asked for and are not in it, with the reason; `diag` has them.
        num_data: how many examples they sum.
        diagonal_factors: weights with a factor so large that only its diagonal is kept, with the reason.
    """

    layers: Mapping[str, LayerFactors]
    unsupported: Mapping[str, str] = field(default_factory=dict)
    num_data: int = 0
    diagonal_factors: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that have factors."""
        return tuple(name for layer in self.layers.values() for name in layer.names)

    def diagonal(self) -> Params:
        """Compute the diagonal of the approximated GGN by parameter."""
        return {name: value for layer in self.layers.values() for name, value in layer.diagonal().items()}

    def decompose(self) -> dict[str, KroneckerFactors]:
        """Eigendecompose the factors of every layer, by the weight's name."""
        return {name: layer.decompose() for name, layer in self.layers.items()}

    def __repr__(self) -> str:
        lines = [f"Factors of {len(self.layers)} layers from {self.num_data:,} examples"]
        for name, layer in self.layers.items():
            groups, outputs, inputs = layer.layer.size
            times = f"{groups} × " if groups > 1 else ""
            lines.append(f"  {name}: {times}{outputs} ⊗ {inputs}{' with its bias' if layer.bias else ''}")
        lines += [f"  {name}: {reason}" for name, reason in self.diagonal_factors.items()]
        lines += [f"  without {name}: {reason}" for name, reason in self.unsupported.items()]
        return "\n".join(lines)
