"""Kronecker-factored curvature (KFAC).

The gradient of one example for a layer y_t = W a_t with output gradients g_t is Σ_t g_t a_tᵀ. Taking inputs and output
gradients as independent, the generalised Gauss-Newton summed over N examples becomes

    Σ_n E[vec(∇W) vec(∇W)ᵀ]  ≈  G ⊗ A          A = mean a aᵀ,   G = Σ_n Σ_k g gᵀ   over the columns k of `columns`

With T positions that share the weights:
    expand:  every position counts as an example of its own,    A = 1/(NT) Σ_nt a_t a_tᵀ      G = Σ_nt g_t g_tᵀ
    reduce:  positions are summed before the outer product,     A = 1/N Σ_n ā_n ā_nᵀ          G = Σ_n ĝ_n ĝ_nᵀ
             with ā = 1/T Σ_t a_t and ĝ = Σ_t g_t

A module that is called several times has the positions of all its calls.

Martens & Grosse 2015, arXiv:1503.05671 · Grosse & Martens 2016, arXiv:1602.01407 · Eschenhagen et al. 2023,
arXiv:2311.00636
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch
from torch import Tensor, nn

from bayeslim.curvature.capture import Capture
from bayeslim.curvature.columns import Columns, check_columns, output_columns
from bayeslim.curvature.factors import Factors, LayerFactors
from bayeslim.curvature.layers import EmbeddingLayer, MatrixLayer, matrix_layer, scale_layer
from bayeslim.curvature.moments import InputMoment, add_outer_products, symmetric
from bayeslim.curvature.padding import real_positions
from bayeslim.curvature.probe import Probe, probe
from bayeslim.curvature.recurrent import is_unrolled
from bayeslim.curvature.sweep import (
    accumulation_dtype,
    chosen_parameters,
    data_pass,
    seeded,
    sum_over_processes,
)
from bayeslim.errors import BayeslimWarning
from bayeslim.likelihoods import Likelihood
from bayeslim.posteriors.layer_matrix import LayerMatrix
from bayeslim.types import Batch

MAX_FACTOR_SIDE = 16_384
"""The largest side of a factor by default: it takes 2.1 GB in float64, and several times that to decompose."""


@torch.inference_mode(False)
def kfac(
    model: nn.Module,
    loader: Iterable[Batch],
    likelihood: Likelihood,
    *,
    names: Iterable[str] | None = None,
    columns: Columns = "signs",
    sharing: Literal["expand", "reduce"] = "expand",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool = False,
    max_side: int = MAX_FACTOR_SIDE,
) -> Factors:
    """Compute Kronecker factors of every layer linear in its weights, in one pass.

    Args:
        model: in any mode; it is not changed.
        loader: batches of inputs and targets.
        likelihood: of the model's outputs.
        names: the parameters wanted; by default every trainable one. A bias joins its layer's matrix if the weight is
            wanted too.
        columns: the kind of output columns, see `bayeslim.curvature.columns`.
        sharing: how positions that share weights are counted.
        dtype: to accumulate in, float64 by default: in float32 small eigenvalues of the factors are rounding errors.
        seed: of the random signs or samples.
        progress: whether to show a progress bar.
        max_side: the largest side of a factor; of larger ones only the diagonal is kept, with a warning that names the
            memory that they would take.

    Returns:
        the factors of each layer, and the parameters that have none with the reason.
    """
    check_columns(columns)
    if sharing not in ("expand", "reduce"):
        raise ValueError(f'sharing must be "expand" or "reduce". Got {sharing!r}.')
    wanted = tuple(chosen_parameters(model, names))
    dtype = accumulation_dtype(model, dtype or torch.float64)
    count = torch.zeros((), dtype=torch.float64)
    generator = seeded(seed)
    seen: Probe | None = None
    with data_pass(model, loader, progress=progress) as (twin, data):
        chosen = chosen_parameters(twin, wanted)
        sums, unsupported, diagonal = _plan(twin, chosen, sharing == "reduce", dtype, max_side)
        modules = {key: layer.view.module for key, layer in sums.items()}
        real: Tensor | None = None
        with Capture(modules, lambda key, x, shape: sums[key].add_input(x, shape, real)) as capture:
            for inputs, targets in data:
                real = real_positions(inputs)
                seen = seen or probe(twin, inputs, modules)
                outputs = capture.forward(twin, inputs)
                count += outputs.shape[0]
                for key in modules:
                    sums[key].finish_inputs(outputs.shape[0])
                step = 1 if sharing == "reduce" else capture.columns_at_once(outputs)
                remaining = output_columns(likelihood, outputs, targets, columns, generator)
                while some := list(islice(remaining, step)):
                    together = len(some) > 1
                    sent = (
                        capture.backwards(outputs, torch.stack(some)) if together else capture.backward(outputs, *some)
                    )
                    for key, gradients in sent.items():
                        sums[key].add_gradients(gradients, outputs.shape[0])
    assert seen is not None
    sum_over_processes(count)
    layers = {}
    for key, layer in sums.items():
        absent = layer.reduce_over_processes()
        reason = next((seen.hidden[name] for name in layer.names if name in seen.hidden), absent)
        if reason is None and sharing == "reduce" and key in seen.ran - seen.examples_first:
            reason = "its inputs do not have the examples in their first dimension, which reduce needs"
        if reason is None:
            layers[layer.weight] = layer.factors()
        else:
            unsupported.update(dict.fromkeys(layer.names, reason))
    ordered = {name: unsupported[name] for name in chosen if name in unsupported}
    return Factors(layers, ordered, int(count), {name: why for name, why in diagonal.items() if name in layers})


@dataclass
class _LayerSums:
    """The running sums of one layer."""

    view: MatrixLayer
    weight: str
    bias: str | None
    inputs: InputMoment
    G: Tensor
    reduce: bool

    def __post_init__(self) -> None:
        self._waiting: list[tuple[int | Tensor, Tensor]] = []
        self._misfit = torch.zeros((), dtype=torch.float64)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def add_input(self, x: Tensor, output_shape: torch.Size, real: Tensor | None) -> None:
        if not self.reduce:
            self.inputs.add(x, output_shape, real)
        else:
            self._waiting.append(self.inputs.total_over_positions(x, output_shape, real))

    def finish_inputs(self, examples: int) -> None:
        """Average the features over the positions of all calls in this batch."""
        if self._waiting:
            positions = sum(t for t, _ in self._waiting)
            if all(total.shape[0] == examples for _, total in self._waiting):
                self.inputs.add_rows(torch.stack([total for _, total in self._waiting]).sum(0) / positions)
            else:
                self._misfit += 1
            self._waiting = []

    def add_gradients(self, gradients: list[Tensor | None], examples: int) -> None:
        rows = [self.view.gradients(g).to(self.G.dtype) for g in gradients if g is not None]
        if self.reduce and rows:
            fits = all(g.shape[0] == examples for g in rows)
            rows = [torch.stack([g.sum(1) for g in rows]).sum(0)] if fits else []
        for g in rows:
            each = g.reshape(-1, *g.shape[-2:])
            if self.G.ndim == 2:
                self.G += each.square().sum(0)
            else:
                add_outer_products(self.G, each)

    def reduce_over_processes(self) -> str | None:
        """Add the sums of all processes; return the reason if there are no factors."""
        sum_over_processes(*self.inputs.tensors(), self.G, self._misfit)
        if self._misfit:
            return "its inputs do not have the examples in their first dimension, which reduce needs"
        return None if self.inputs.count else f'its layer "{self.weight.rpartition(".")[0]}" never ran'

    def factors(self) -> LayerFactors:
        shape, groups, transposed = self.view.layer.shape, self.view.groups, self.view.inputs_first
        layer = LayerMatrix(self.weight, self.bias, shape, groups, transposed)
        return LayerFactors(layer, self.inputs.mean(), self.G if self.G.ndim == 2 else symmetric(self.G))


def _plan(
    model: nn.Module, chosen: dict[str, nn.Parameter], reduce: bool, dtype: torch.dtype, max_side: int
) -> tuple[dict[str, _LayerSums], dict[str, str], dict[str, str]]:
    """Make sums for layers with a wanted weight.

    Returns:
        the sums by the modules' paths, the reasons for parameters without any, and for weights with a diagonal factor.
    """
    names = {id(p): name for name, p in chosen.items()}
    owners: dict[int, list[str]] = {}
    owning = [(path, module) for path, module in model.named_modules() if not is_unrolled(module)]
    for path, module in owning:
        for p in module._parameters.values():
            if p is not None:
                owners.setdefault(id(p), []).append(path)
    tied = {
        name: f"is shared by {', '.join(repr(path) for path in owners[id(p)])}"
        for name, p in chosen.items()
        if len(owners[id(p)]) > 1
    }
    sums: dict[str, _LayerSums] = {}
    unsupported, diagonal = dict(tied), dict[str, str]()
    for path, module in owning:
        wanted = {leaf: names[id(p)] for leaf, p in module._parameters.items() if p is not None and id(p) in names}
        wanted = {leaf: name for leaf, name in wanted.items() if name not in tied}
        view = matrix_layer(module)
        weight, bias = wanted.get("weight"), wanted.get("bias")
        if view is None:
            kind = type(module).__name__
            reason = f"{kind} scales elementwise" if scale_layer(module) else f"{kind} may not be linear in it"
            unsupported.update(dict.fromkeys(wanted.values(), reason))
        elif weight is None:
            unsupported.update(dict.fromkeys(wanted.values(), "is a bias without its weight"))
        else:
            inputs = view.columns + (bias is not None)
            many_inputs = inputs > max_side and not isinstance(view, EmbeddingLayer)  # whose factor is diagonal anyway
            many_outputs = view.rows > max_side
            for many, side, size in ((many_inputs, "input", inputs), (many_outputs, "output", view.rows)):
                if many:
                    diagonal[weight] = _too_large(side, size, view.groups, dtype)
                    warnings.warn(f'"{weight}": {diagonal[weight]}.', BayeslimWarning, stacklevel=4)
            shape = (view.groups, view.rows) if many_outputs else (view.groups, view.rows, view.rows)
            G = torch.zeros(shape, dtype=dtype, device=chosen[weight].device)
            moment = InputMoment(view, bias is not None, dtype, many_inputs)
            sums[path] = _LayerSums(view, weight, bias, moment, G, reduce)
    return sums, unsupported, diagonal


def _too_large(side: str, size: int, groups: int, dtype: torch.dtype) -> str:
    memory = groups * size**2 * dtype.itemsize / 1e9
    times = f"{groups} × " if groups > 1 else ""
    return (
        f"its {side} factor of {times}{size:,} × {size:,} would take {memory:,.1f} GB, and several times that to "
        "decompose, so that only its diagonal is kept. Set max_side to change that"
    )
