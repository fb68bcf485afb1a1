"""One layer of a Kronecker posterior: V = [W, b] (outputs × inputs) with precision P = G ⊗ A + δ I.

    P v = G V A + δ V        P = (Q_G ⊗ Q_A) diag(λ_o μ_i + δ) (Q_G ⊗ Q_A)ᵀ

The prior is exact in the eigenbasis, and everything goes through the two small eigendecompositions: the layer's
covariance is never formed. `corrected` eigenvalues E (outputs × inputs) replace λ_o μ_i (EKFAC: George et al. 2018,
arXiv:1806.03884).

A prior precision that differs between weights is exact as long as it is an outer product δ_oi = r_o c_i (one precision
for the weight and one for the bias, one an output, one an input): with S = diag(√δ), P = S (G' ⊗ A' + I) S with the
factors rescaled by r and c.

`damping="sqrt"` puts the prior into the factors instead, (G + √δ/π I) ⊗ (A + π√δ I) with π² the ratio of the factors'
mean eigenvalues, A's to G's (Martens & Grosse 2015, arXiv:1503.05671). It overstates every eigenvalue of the precision,
by exactly π√δ λ_o + √δ/π μ_i.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from bayeslim.errors import NotPositiveDefinite, ShapeMismatch
from bayeslim.posteriors.factor import Factor
from bayeslim.posteriors.functional import gradient_covariance, positions
from bayeslim.posteriors.layer_matrix import LayerMatrix

Damping = Literal["exact", "sqrt"]
DAMPING_BISECTIONS = 50


@dataclass(frozen=True, eq=False)
class KroneckerFactors:
    """The curvature of one layer, summed over the data, without a prior.

    Attributes:
        weight: name of the layer's weight.
        outputs: G, the factor of the outputs.
        inputs: A, the factor of the inputs, the bias's 1 last (`LayerMatrix` documents the order).
        bias: name of the layer's bias, if A has a column for it.
        corrected: eigenvalues that replace the products of the factors', (groups, outputs, inputs); they belong to the
            eigenvectors they were measured in, so give those as `Factor(values, vectors)`.
        transposed: whether the weight has inputs before outputs (transposed convolutions, embeddings).
    """

    weight: str
    outputs: Factor
    inputs: Factor
    bias: str | None = None
    corrected: Tensor | None = None
    transposed: bool = False

    @classmethod
    def of(
        cls,
        weight: str,
        *,
        outputs: Tensor,
        inputs: Tensor,
        bias: str | None = None,
        transposed: bool = False,
    ) -> KroneckerFactors:
        """Decompose plain matrices G (O, O) and A (I, I).

        With groups they are (groups, ·, ·); one dimension stands for a diagonal.
        """
        g = Factor.of(outputs, f'output factor of "{weight}"')
        a = Factor.of(inputs, f'input factor of "{weight}"')
        return cls(weight, g, a, bias, transposed=transposed)

    def layer(self, shape: torch.Size) -> LayerMatrix:
        """Lay out the layer, for a weight of this shape.

        Raises:
            ShapeMismatch: if the factors do not fit the weight.
        """
        groups = self.outputs.groups
        layer = LayerMatrix(self.weight, self.bias, tuple(shape), groups, self.transposed)
        whole = len(shape) >= 2 and shape[0] % groups == 0 and self.inputs.groups == groups
        got = (groups, self.outputs.size, self.inputs.size)
        if not whole or layer.size != got:
            raise ShapeMismatch(
                f'The factors of "{self.weight}" must fit (groups, outputs, inputs) = '
                f"{layer.size if whole else tuple(shape)}, inputs with the bias's 1 if it has one. Got {got}."
            )
        if self.corrected is not None and tuple(self.corrected.shape) != got:
            raise ShapeMismatch(
                f'The corrected eigenvalues of "{self.weight}" must be {got}. Got {tuple(self.corrected.shape)}.'
            )
        return layer


@dataclass(frozen=True, eq=False)
class KroneckerBlock:
    """The Gaussian N(0, P⁻¹) over one layer's matrix V, (groups, outputs, inputs), in float64.

    Leading dimensions are samples.

    Attributes:
        layer: how the layer's parameters make V.
        outputs: G, rescaled by the prior where that is not one number.
        inputs: A, likewise.
        prior: δ, a scalar; 1 where the prior is in `scale`, 0 where it is in the factors.
        corrected: eigenvalues that replace the products of the factors'.
        scales: √r (groups, outputs) and √c (groups, inputs), where the prior is not one number.
    """

    layer: LayerMatrix
    outputs: Factor
    inputs: Factor
    prior: Tensor
    corrected: Tensor | None = None
    scales: tuple[Tensor, Tensor] | None = None

    @classmethod
    def under(
        cls, factors: KroneckerFactors, layer: LayerMatrix, prior: Tensor, damping: Damping = "exact"
    ) -> KroneckerBlock:
        """Add a prior precision to a layer's curvature: a scalar, or an outer product."""
        outputs, inputs = factors.outputs, factors.inputs
        prior = prior.to(outputs.values)
        scales = None
        if prior.numel() == 1:
            delta = prior.reshape(())
        else:
            row, column = _outer_product(prior, layer)
            if factors.corrected is not None:
                raise ValueError(
                    f'Corrected eigenvalues need one prior precision for all of "{layer.weight}" and its bias. '
                    "Give the layer one number, or leave the correction out."
                )
            scales = row.sqrt(), column.sqrt()
            outputs, inputs = outputs.rescaled(scales[0]), inputs.rescaled(scales[1])
            delta = prior.new_ones(())
        if damping == "sqrt":
            if factors.corrected is not None:
                raise ValueError('Corrected eigenvalues take the prior exactly: use damping="exact".')
            means = inputs.values.mean(1, keepdim=True), outputs.values.mean(1, keepdim=True)
            ratio = (means[0] / means[1]).sqrt()
            ratio = torch.where(torch.isfinite(ratio) & (ratio > 0), ratio, 1.0)
            outputs, inputs = outputs.shifted(delta.sqrt() / ratio), inputs.shifted(delta.sqrt() * ratio)
            delta = torch.zeros_like(delta)
        corrected = None if factors.corrected is None else factors.corrected.to(delta).clamp(min=0)
        block = cls(layer, outputs, inputs, delta, corrected, scales)
        if not bool((block.eigenvalues > 0).all()):
            raise NotPositiveDefinite(
                f'The precision of "{layer.weight}" is singular: its curvature is rank-deficient, the prior precision '
                f"{float(delta):g}. Use a prior precision above zero."
            )
        return block

    @cached_property
    def eigenvalues(self) -> Tensor:
        """λ_o μ_i + δ, (groups, outputs, inputs)."""
        curvature = self.corrected
        if curvature is None:
            curvature = self.outputs.values[:, :, None] * self.inputs.values[:, None, :]
        return curvature + self.prior

    @cached_property
    def scale(self) -> Tensor | None:
        """√δ of every weight, (groups, outputs, inputs); None for one number."""
        return None if self.scales is None else self.scales[0][:, :, None] * self.scales[1][:, None, :]

    def precision_product(self, v: Tensor) -> Tensor:
        """Compute P v."""
        if self.scale is not None:
            v = v * self.scale
        if self.corrected is None:
            image = self.outputs.times(self.inputs.times(v.mT).mT) + self.prior * v
        else:
            image = self._rotate_back(self.eigenvalues * self._rotate(v))
        return image if self.scale is None else image * self.scale

    def covariance_product(self, v: Tensor) -> Tensor:
        """Compute P⁻¹ v."""
        v = v if self.scale is None else v / self.scale
        image = self._rotate_back(self._rotate(v) / self.eigenvalues)
        return image if self.scale is None else image / self.scale

    def loss(self, v: Tensor) -> float:
        """Compute ½ vᵀ P v of one matrix, as a sum of squares."""
        v = v if self.scale is None else v * self.scale
        return float((self.eigenvalues * self._rotate(v).square()).sum()) / 2

    def noise(self, n: int | None, generator: torch.Generator | None, dtype: torch.dtype) -> Tensor:
        """Draw once, or n times, from N(0, P⁻¹), in float32 or float64."""
        lead = () if n is None else (n,)
        basis = self._basis(dtype)
        draw = basis.variance.new_empty((*lead, *basis.variance.shape)).normal_(generator=generator)
        draw = draw * basis.variance.sqrt()
        draw = draw if basis.inputs is None else draw @ basis.inputs.mT
        draw = draw if basis.outputs is None else basis.outputs @ draw
        return draw if self.scale is None else draw / self.scale.to(dtype)

    @cached_property
    def variance(self) -> Tensor:
        """The diagonal of P⁻¹: (Q_G ∘ Q_G) (λμᵀ + δ)⁻¹ (Q_A ∘ Q_A)ᵀ."""
        return self._spread(self.eigenvalues.reciprocal()) / self._scale_squared()

    @cached_property
    def precision_diagonal(self) -> Tensor:
        """The diagonal of P."""
        return self._spread(self.eigenvalues) * self._scale_squared()

    def log_det(self) -> Tensor:
        """Compute log|P|, differentiable in the prior precision."""
        total = self.eigenvalues.double().log().sum()
        return total if self.scale is None else total + 2 * self.scale.double().log().sum()

    @cached_property
    def rowwise(self) -> KroneckerBlock:
        """The block without correlations between outputs: row o has G_oo A + δ I."""
        corrected = None if self.corrected is None else self.outputs.spread(self.corrected)
        return replace(self, outputs=Factor(self.outputs.diagonal, None), corrected=corrected)

    def variance_at(self, density: float) -> Tensor:
        """Estimate the variances of weights after a random cut to a density.

        A random principal submatrix of P is inverted as P with more damping, K (K P K)⁻¹ K ≈ (P + κ I)⁻¹, with κ such
        that tr P (P + κ I)⁻¹ = density · n (LeJeune et al. 2022, arXiv:2211.03751).

        Args:
            density: the fraction of the weights that is kept, above 0.

        Returns:
            the variance of each weight if it is among those kept, (groups, outputs, inputs).
        """
        if density >= 1:
            return self.variance
        odds = (1 - density) / density
        low, high = (self.eigenvalues.min() * odds).log(), (self.eigenvalues.max() * odds).log()
        for _ in range(DAMPING_BISECTIONS):
            middle = (low + high) / 2
            kept = (self.eigenvalues / (self.eigenvalues + middle.exp())).mean()
            low, high = torch.where(kept > density, middle, low), torch.where(kept > density, high, middle)
        inverse = self._spread((self.eigenvalues + low.exp()).reciprocal())
        return inverse / density / self._scale_squared()

    def functional_covariance(self, inputs: Tensor, gradients: Tensor) -> Tensor:
        """Compute J P⁻¹ Jᵀ, the linearised output covariance due to this layer, without J.

        With ã = Q_Aᵀ a, g̃ = Q_Gᵀ g and one position, Σ_o (Σ_i ã_i² / (λ_o μ_i + δ)) g̃_co g̃_c'o. Layers that use their
        weights at T positions sum their gradients Σ_t g̃_t ã_tᵀ first, in chunks of examples of bounded memory.

        Args:
            inputs: a, the layer's input features at every position, (B, T, groups · inputs), without the bias's 1.
            gradients: gradients of each network output with respect to the layer's, (C, B, T, groups · outputs).

        Returns:
            (B, C, C).
        """
        # A sum of positive terms: in float32 it is as accurate as its inputs.
        basis = self._basis(torch.float64 if inputs.dtype == torch.float64 else torch.float32)
        a, g = positions(self.layer, inputs.to(basis.variance), gradients.to(basis.variance))
        if self.scales is not None:
            g, a = g / self.scales[0].to(g), a / self.scales[1].to(a)
        return gradient_covariance(basis.variance, a, g, basis.rotate_inputs, basis.rotate_outputs)

    @cached_property
    def _single(self) -> Eigenbasis:
        return Eigenbasis.of(self, torch.float32)

    def _basis(self, dtype: torch.dtype) -> Eigenbasis:
        return self._single if dtype == torch.float32 else Eigenbasis.of(self, dtype)

    def _rotate(self, v: Tensor) -> Tensor:
        return self.outputs.rotate(self.inputs.rotate(v.mT).mT)

    def _rotate_back(self, v: Tensor) -> Tensor:
        return self.outputs.rotate_back(self.inputs.rotate_back(v.mT).mT)

    def _spread(self, v: Tensor) -> Tensor:
        return self.outputs.spread(self.inputs.spread(v.mT).mT)

    def _scale_squared(self) -> Tensor | float:
        return 1.0 if self.scale is None else self.scale.square()


@dataclass(frozen=True, eq=False)
class Eigenbasis:
    """The eigenvectors of a layer's factors and the variances along them, in one dtype.

    Attributes:
        inputs: Q_A, (groups, inputs, inputs); None for the identity.
        outputs: Q_G, likewise.
        variance: 1 / (λ_o μ_i + δ), (groups, outputs, inputs).
    """

    inputs: Tensor | None
    outputs: Tensor | None
    variance: Tensor

    @classmethod
    def of(cls, block: KroneckerBlock, dtype: torch.dtype) -> Eigenbasis:
        """Convert a layer's eigendecomposition."""
        inputs, outputs = (None if f.vectors is None else f.vectors.to(dtype) for f in (block.inputs, block.outputs))
        return cls(inputs, outputs, block.eigenvalues.reciprocal().to(dtype))

    def rotate_inputs(self, x: Tensor) -> Tensor:
        """Rotate vectors (..., groups, inputs) into the eigenbasis."""
        return x if self.inputs is None else torch.einsum("...gi,gij->...gj", x, self.inputs)

    def rotate_outputs(self, x: Tensor) -> Tensor:
        """Rotate vectors (..., groups, outputs) into the eigenbasis."""
        return x if self.outputs is None else torch.einsum("...gi,gij->...gj", x, self.outputs)


def _outer_product(prior: Tensor, layer: LayerMatrix) -> tuple[Tensor, Tensor]:
    """Split δ_oi = r_o c_i into r (groups, outputs) and c (groups, inputs)."""
    if not bool((prior > 0).all()):
        raise ValueError(f'The prior precisions of "{layer.weight}" must be above zero where they differ.')
    row = prior[:, :, 0]
    column = prior[:, 0, :] / prior[:, 0, :1]
    if not torch.allclose(row[:, :, None] * column[:, None, :], prior, rtol=1e-5, atol=0.0):
        raise ValueError(
            f'The prior precision of "{layer.weight}" has values for single weights that are no outer product of '
            "outputs and inputs, which a Kronecker posterior cannot hold exactly. Give one number, one a row or one "
            "a column, or use a diagonal, dense or low-rank posterior."
        )
    return row, column
