"""The Kronecker-factored Gaussian: independent layers, each with precision G ⊗ A + δ I, and a diagonal for the rest.

Each layer's weight and bias are one matrix with a matrix normal distribution (Ritter, Botev & Barber 2018). Parameters
that are no layer's weight or bias (norms, embeddings of positions) have a diagonal precision, so one object covers a
whole network. The prior mean does not enter the covariance: the mean given is the posterior's.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from bayeslim.errors import BayeslimWarning, NotPositiveDefinite, ShapeMismatch
from bayeslim.io.registry import register
from bayeslim.posteriors import prior_precision as priors
from bayeslim.posteriors.base import keyed, like_means, unkeyed
from bayeslim.posteriors.conjugate import Solve, Solver
from bayeslim.posteriors.factor import Factor
from bayeslim.posteriors.gaussian import Gaussian, Restriction
from bayeslim.posteriors.kept import KeptBlock, rowwise_survivors
from bayeslim.posteriors.kronecker_block import Damping, KroneckerBlock, KroneckerFactors
from bayeslim.posteriors.layer_matrix import LayerMatrix
from bayeslim.posteriors.prior_precision import PriorPrecision
from bayeslim.types import Params


@register("posterior")
class Kronecker(Gaussian):
    """A Gaussian with Kronecker-factored layers.

    Args:
        mean: μ by name; half precision is computed with in the factors' dtype.
        factors: the curvature of each layer, summed over the data.
        prior_precision: δ: one number, or by parameter or layer name. Within a layer it may differ between weight and
            bias, between outputs and between inputs; a value for each weight that is no outer product is refused.
        rest: diagonal curvature by name, for parameters that no layer holds.
        damping: "exact" adds δ in the eigenbasis; "sqrt" puts √δ into the factors, which overstates the precision.
    """

    kind: ClassVar[str] = "kronecker"

    def __init__(
        self,
        mean: Mapping[str, Tensor],
        factors: Sequence[KroneckerFactors],
        prior_precision: PriorPrecision = 1.0,
        *,
        rest: Mapping[str, Tensor] | None = None,
        damping: Damping = "exact",
    ):
        if damping not in ("exact", "sqrt"):
            raise ValueError(f'damping must be "exact" or "sqrt". Got {damping!r}.')
        self._mean = dict(mean)
        self.rest_curvature = dict(rest or {})
        self.factors = tuple(factors)
        self.prior_precision = prior_precision
        self.damping: Damping = damping
        layers = _layers(self._mean, self.factors, self.rest_curvature)
        resolved = priors.resolve(prior_precision, self._mean)
        self.blocks = tuple(
            KroneckerBlock.under(f, layer, _layer_prior(layer, resolved, self._mean, f.inputs.values), damping)
            for f, layer in zip(self.factors, layers, strict=True)
        )
        self.rest = {name: _total(name, self._mean[name], c, resolved[name]) for name, c in self.rest_curvature.items()}

    @property
    def variance(self) -> Params:
        """The diagonals of P⁻¹."""
        found = self.ordered(
            [b.layer.params(b.variance) for b in self.blocks], {name: p.reciprocal() for name, p in self.rest.items()}
        )
        return like_means(found, self._mean)

    def precision_product(self, params: Mapping[str, Tensor]) -> Params:
        """Compute P v: G V A + δ V for each layer."""
        return self.ordered(
            [b.layer.params(b.precision_product(_matrix(b, params))) for b in self.blocks],
            {name: p * params[name].to(p) for name, p in self.rest.items()},
        )

    def covariance_product(self, params: Mapping[str, Tensor]) -> Params:
        """Compute P⁻¹ v, in the eigenbasis of each layer."""
        return self.ordered(
            [b.layer.params(b.covariance_product(_matrix(b, params))) for b in self.blocks],
            {name: params[name].to(p) / p for name, p in self.rest.items()},
        )

    def log_det_precision(self) -> Tensor:
        """Sum log(λ_o μ_i + δ) over layers, and the logarithms of the rest."""
        logs = [b.log_det() for b in self.blocks] + [p.double().log().sum() for p in self.rest.values()]
        return torch.stack([log.cpu() for log in logs]).sum()

    def noise(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Params:
        """Draw Q_G ((λμᵀ + δ)^(-1/2) ∘ ε) Q_Aᵀ for each layer."""
        lead = () if n is None else (n,)
        wide = any(mean.dtype == torch.float64 for mean in self._mean.values())
        dtype = torch.float64 if wide else torch.float32
        return self.ordered(
            [b.layer.params(b.noise(n, generator, dtype)) for b in self.blocks],
            {
                name: p.new_empty((*lead, *p.shape)).normal_(generator=generator) * p.rsqrt()
                for name, p in self.rest.items()
            },
        )

    def restrict(self, kept: Mapping[str, Tensor], solver: Solver) -> KeptLayers:
        """Restrict P to the kept weights, layer by layer."""
        return KeptLayers(self, kept, solver)

    def conditional_mean(self, kept: Mapping[str, Tensor], solver: Solver) -> tuple[Params, dict[str, Solve]]:
        """Compute T(μ) layer by layer, and tell how each layer with a cut was solved for.

        A layer whose joint solve did not converge gets its row-wise mean if that is the more probable of the two.
        """
        moved, solves = [], {}
        for block in self.blocks:
            mask, mean = block.layer.matrix(kept), _matrix(block, self._mean)
            if bool(mask.all()):
                moved.append(block.layer.params(mean))
                continue
            shift, solve = KeptBlock(block, mask, solver).solution(block.precision_product(mean * ~mask))
            new = (mean + shift) * mask
            if not solve.converged:
                rows = rowwise_survivors(block, mask, mean)
                if block.loss(rows - mean) < block.loss(new - mean):
                    new, solve = rows, replace(solve, how="row")
                chosen = "row-wise mean" if solve.how == "row" else "last iterate"
                _warn(block, solve, f"The {chosen} is used, the more probable of row-wise mean and last iterate.")
            moved.append(block.layer.params(new))
            solves[block.layer.weight] = solve
        rest = {name: self._mean[name].to(p) * kept[name] for name, p in self.rest.items()}
        return self.ordered(moved, rest), solves

    def rowwise_mean(self, kept: Mapping[str, Tensor]) -> Params:
        """Compute the conditional mean as if outputs were independent, row by row."""
        return self.ordered(
            [b.layer.params(rowwise_survivors(b, b.layer.matrix(kept), _matrix(b, self._mean))) for b in self.blocks],
            {name: self._mean[name].to(p) * kept[name] for name, p in self.rest.items()},
        )

    def with_prior_precision(self, prior_precision: PriorPrecision) -> Kronecker:
        """Change the prior precision; one number a layer needs no decomposition."""
        return Kronecker(self._mean, self.factors, prior_precision, rest=self.rest_curvature, damping=self.damping)

    def config(self) -> dict[str, Any]:
        """Describe the layers' layouts and the damping."""
        return {
            "damping": self.damping,
            "layers": [{"weight": f.weight, "bias": f.bias, "transposed": f.transposed} for f in self.factors],
        }

    def tensors(self) -> Params:
        """Collect means, eigendecompositions, the rest's curvature and prior precision."""
        groups: dict[str, Params] = {"mean": self._mean, "rest": self.rest_curvature}
        for side in ("outputs", "inputs"):
            factors = {f.weight: getattr(f, side) for f in self.factors}
            groups[f"{side}.values"] = {name: factor.values for name, factor in factors.items()}
            groups[f"{side}.vectors"] = {
                n: factor.vectors for n, factor in factors.items() if factor.vectors is not None
            }
        groups["corrected"] = {f.weight: f.corrected for f in self.factors if f.corrected is not None}
        return keyed(**groups) | priors.to_tensors(self.prior_precision)

    @classmethod
    def restore(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """Build it again from `config()` and `tensors()`."""
        factors = []
        for layer in config["layers"]:
            weight = layer["weight"]
            outputs, inputs = (
                Factor.restore(tensors[f"{side}.values:{weight}"], tensors.get(f"{side}.vectors:{weight}"))
                for side in ("outputs", "inputs")
            )
            corrected = tensors.get(f"corrected:{weight}")
            factors.append(KroneckerFactors(weight, outputs, inputs, layer["bias"], corrected, layer["transposed"]))
        return cls(
            unkeyed(tensors, "mean"),
            factors,
            priors.from_tensors(tensors),
            rest=unkeyed(tensors, "rest"),
            damping=config["damping"],
        )

    def ordered(self, layers: Sequence[Params], rest: Params) -> Params:
        """Join the parameters of layers and of the rest, in the mean's order."""
        found = dict(rest)
        for layer in layers:
            found |= layer
        return {name: found[name] for name in self._mean}


class KeptLayers(Restriction):
    """P_RR of a Kronecker posterior: every layer by itself."""

    def __init__(self, base: Kronecker, kept: Mapping[str, Tensor], solver: Solver):
        self.base = base
        self.kept = kept
        self.blocks = tuple(KeptBlock(b, b.layer.matrix(kept), solver) for b in base.blocks)

    def solve(self, params: Mapping[str, Tensor]) -> Params:
        """Compute P_RR⁻¹ v_R by conjugate gradients."""
        moved = []
        for k in self.blocks:
            value, solve = k.solution(_matrix(k.block, params))
            moved.append(k.block.layer.params(value))
            if not solve.converged:
                _warn(k.block, solve, "The last iterate is used.")
        return self.base.ordered(
            moved,
            {name: params[name].to(p) * self.kept[name] / p for name, p in self.base.rest.items()},
        )

    def log_det(self) -> Tensor:
        """Compute log|P_RR|: exact for small layers, estimated for large ones."""
        logs = [k.log_det() for k in self.blocks]
        logs += [p[self.kept[name]].double().log().sum() for name, p in self.base.rest.items()]
        return torch.stack([log.cpu() for log in logs]).sum()

    def variance(self) -> Params:
        """Compute the diagonal of P_RR⁻¹: exact for small layers, else estimated."""
        return self.base.ordered(
            [k.block.layer.params(k.variance()) for k in self.blocks],
            {name: self.kept[name] / p for name, p in self.base.rest.items()},
        )


def _warn(block: KroneckerBlock, solve: Solve, action: str) -> None:
    warnings.warn(
        f'The joint solve for the kept weights of "{block.layer.weight}" stopped after {solve.iterations} iterations '
        f"with a relative residual of {solve.residual:.2g}. {action} Raise max_iterations, or use a narrower prior.",
        BayeslimWarning,
        stacklevel=2,
    )


def _matrix(block: KroneckerBlock, params: Mapping[str, Tensor]) -> Tensor:
    return block.layer.matrix({name: params[name].to(block.eigenvalues) for name in block.layer.names})


def _layers(
    mean: Mapping[str, Tensor], factors: Sequence[KroneckerFactors], rest: Mapping[str, Tensor]
) -> list[LayerMatrix]:
    """Lay out the layers; every parameter must have exactly one precision."""
    claimed = [name for f in factors for name in ((f.weight,) if f.bias is None else (f.weight, f.bias))] + list(rest)
    twice = {name for name in claimed if claimed.count(name) > 1}
    if twice or set(claimed) != set(mean):
        missing, foreign = set(mean) - set(claimed), set(claimed) - set(mean)
        raise ShapeMismatch(
            "Every parameter needs one curvature, from a layer's factors or from the rest. "
            f"Without: {sorted(missing) or 'none'}; twice: {sorted(twice) or 'none'}; "
            f"without a mean: {sorted(foreign) or 'none'}."
        )
    layers = [f.layer(mean[f.weight].shape) for f in factors]
    for layer in layers:
        if layer.bias is not None and mean[layer.bias].shape != (layer.size[0] * layer.size[1],):
            raise ShapeMismatch(
                f'The bias "{layer.bias}" must have {layer.size[0] * layer.size[1]} entries. '
                f"Got shape {tuple(mean[layer.bias].shape)}."
            )
    return layers


def _layer_prior(layer: LayerMatrix, resolved: Params, mean: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """Find a layer's prior precision: a scalar if shared, else one for each weight."""
    first, *others = (resolved[name] for name in layer.names)
    plain = not any(d.requires_grad for d in (first, *others))
    if first.numel() == 1 and all(d is first or (plain and d.numel() == 1 and bool(d == first)) for d in others):
        return first
    full = layer.matrix(priors.diagonal(resolved, {name: mean[name] for name in layer.names}, like))
    constant = plain and bool((full == full.flatten()[0]).all())
    return full.flatten()[0] if constant else full


def _total(name: str, mean: Tensor, curvature: Tensor, prior: Tensor) -> Tensor:
    """Add curvature and prior of a parameter outside the layers."""
    if curvature.shape != mean.shape:
        raise ShapeMismatch(f'The curvature of "{name}" must be {tuple(mean.shape)}. Got {tuple(curvature.shape)}.')
    wide = curvature if curvature.dtype == torch.float64 else curvature.float()
    total = wide.clamp(min=0) + priors.diagonal({name: prior}, {name: mean}, wide)[name]
    if not bool((total > 0).all()) or not bool(torch.isfinite(total).all()):
        raise NotPositiveDefinite(
            f'The diagonal precision of "{name}" must be finite and above zero. Use a prior precision above zero.'
        )
    return total
