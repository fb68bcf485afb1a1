"""The factors of the layers of one block, measured on the calibration batches.

Local curvature takes one forward pass of the block. Kronecker curvature takes, for each batch, a pass from the block to
the end of the network and back, in which the later blocks run forward twice: with L blocks that is L (L + 1) / 2
passes through a block forward and back, and as many again forward. The gradients are those of the network as it is
then, with the blocks before this one cut.

Layers that read the same tensor (the projections to queries, keys and values) share one input factor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayeslim.curvature.capture import Capture
from bayeslim.curvature.columns import Columns, output_columns
from bayeslim.curvature.layers import EmbeddingLayer, MatrixLayer, matrix_layer
from bayeslim.curvature.moments import InputMoment, add_outer_products, symmetric
from bayeslim.curvature.sweep import sum_over_processes, with_gradients
from bayeslim.errors import UnsupportedModel
from bayeslim.likelihoods import Likelihood
from bayeslim.posteriors.layer_matrix import LayerMatrix
from bayeslim.prune.streaming.block_run import BlockRun
from bayeslim.prune.streaming.layer_curvature import LayerCurvature
from bayeslim.prune.streaming.restored import Targets, Watched

SEED_STRIDE = 1_000_003
"""Seeds of different batches are this far apart."""


@dataclass(frozen=True, eq=False)
class LocalSettings:
    """The layer's own output error.

    Attributes:
        damping: δ as a fraction of the mean diagonal of A.
        weights: D by layer, (groups, outputs); None for the identity.
        steps: how often survivors are solved for while a layer is cut; None cuts at once, without a dense network to
            follow.
    """

    damping: float
    weights: Mapping[str, Tensor] | None = None
    steps: int | None = None


@dataclass(frozen=True, eq=False)
class KroneckerSettings:
    """Curvature of the network's loss.

    Attributes:
        likelihood: of the network's outputs.
        targets: of every batch of this process.
        places: the place of each of these batches among those of all processes.
        prior_precision: δ.
        columns: see `bayeslim.curvature.columns`.
    """

    likelihood: Likelihood
    targets: Sequence[Tensor]
    places: Sequence[int]
    prior_precision: float
    columns: Columns


class _Layer:
    """The running sums of one layer."""

    def __init__(self, name: str, view: MatrixLayer, bias: str | None):
        shape, groups, inputs_first = view.layer.shape, view.groups, view.inputs_first
        self.view = view
        self.layer = LayerMatrix(f"{name}.weight", bias, shape, groups, inputs_first)
        self.moment: InputMoment | None = None
        self.batch_moment: InputMoment | None = None
        self.reads_with: str | None = None
        self.G: Tensor | None = None

    def add_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        size = (self.view.groups, self.view.rows, self.view.rows)
        for g in gradients:
            if g is not None:
                rows = self.view.gradients(g).to(torch.float64)
                if self.G is None:
                    self.G = torch.zeros(size, dtype=torch.float64, device=g.device)
                add_outer_products(self.G, rows.reshape(-1, *rows.shape[-2:]))


class BlockFactors:
    """The sums of all layers of one block.

    Args:
        run: stands before the block.
        skip: reasons to leave weights alone, by name.
        quick: whether the sums of one batch are in float32, and only the sums of batches in float64: exact enough for a
            curvature that is damped by a fraction of itself. Inputs in float64 are never rounded.
        only: the layers to measure; by default all.

    Attributes:
        layers: the sums, by the layer's name.
        modules: the layers' modules.
        left: why weights are left alone.
        order: the layers in the order of their first calls.
    """

    def __init__(self, run: BlockRun, skip: Mapping[str, str], quick: bool, only: Collection[str] | None = None):
        self.run, self.quick = run, quick
        name = run.names[run.done]
        self.order: list[str] = []
        self.layers: dict[str, _Layer] = {}
        self.modules: dict[str, nn.Module] = {}
        self.left: dict[str, str] = {}
        for path, module in run.block.named_modules():
            full = f"{name}.{path}" if path else name
            view = matrix_layer(module)
            weight = f"{full}.weight"
            if only is not None and full not in only:
                continue
            if view is None or isinstance(view, EmbeddingLayer):
                matrices = [leaf for leaf, p in module._parameters.items() if p is not None and p.ndim > 1]
                kind = type(module).__name__
                why = f"{kind} may not be linear in it" if view is None else "is an embedding"
                self.left |= {f"{full}.{leaf}": why for leaf in matrices}
            elif weight in skip:
                self.left[weight] = skip[weight]
            else:
                has_bias = module._parameters.get("bias") is not None and f"{full}.bias" not in skip
                self.layers[full] = _Layer(full, view, f"{full}.bias" if has_bias else None)
                self.modules[full] = module
        self._last: dict[str, tuple[Tensor, int]] = {}

    def add_input(self, name: str, x: Tensor, output_shape: torch.Size) -> None:
        """Add the input of a layer, unless another layer has added the same tensor."""
        layer = self.layers[name]
        leader = self._leader(layer, x)
        first = layer.moment is None and layer.reads_with is None
        if first:
            self.order.append(name)
            layer.reads_with = leader
        if layer.reads_with is not None:
            if leader != layer.reads_with:
                raise UnsupportedModel(
                    f'"{name}" and "{layer.reads_with}" read the same tensor in one batch and different ones in '
                    "another. Protect one of them: Budget(..., protect=[...])."
                )
            return
        if layer.moment is None:
            # with the constant 1 always, so that a layer without a bias can share it
            layer.moment = InputMoment(layer.view, bias=True, dtype=torch.float64)
            if self.quick and x.dtype != torch.float64:
                layer.batch_moment = InputMoment(layer.view, bias=True, dtype=torch.float32)
        self._last[name] = (x, x._version)
        (layer.batch_moment or layer.moment).add(x, output_shape, self.run.real)

    def _leader(self, layer: _Layer, x: Tensor) -> str | None:
        """Find another layer of the same kind that has just read the same tensor."""
        for name, (seen, version) in self._last.items():
            other = self.layers[name]
            same = seen.data_ptr() == x.data_ptr() and seen.shape == x.shape and seen.stride() == x.stride()
            alike = type(other.view) is MatrixLayer and type(layer.view) is MatrixLayer
            if other is not layer and x.numel() and same and version == seen._version == x._version and alike:
                return name
        return None

    def finish_batch(self) -> None:
        """Let go of the tensors of a batch, and add its sums to those of all batches."""
        self._last.clear()
        for layer in self.layers.values():
            if layer.batch_moment is not None and layer.moment is not None:
                parts = zip(layer.moment.tensors(), layer.batch_moment.tensors(), strict=True)
                for total, part in parts:
                    total += part
                    part.zero_()

    def finish(self, settings: LocalSettings | KroneckerSettings) -> dict[str, LayerCurvature]:
        """Add the sums of all processes, and make the curvature of each layer that ran."""
        self._share_sums(isinstance(settings, KroneckerSettings))
        found: dict[str, LayerCurvature] = {}
        moments: dict[tuple[str, bool], Tensor] = {}
        for name, layer in self.layers.items():
            owner = layer.reads_with or name
            moment = self.layers[owner].moment
            if moment is None or not moment.count:
                self.left[layer.layer.weight] = "its layer never ran: another module may read its weight"
                continue
            key = owner, layer.layer.bias is not None
            if key not in moments:
                mean = moment.mean()
                moments[key] = mean if key[1] else mean[:, :-1, :-1].contiguous()
            A = moments[key]
            if isinstance(settings, LocalSettings):
                weights = None if settings.weights is None else settings.weights[name]
                found[name] = LayerCurvature.local(layer.layer, A, settings.damping, weights)
            elif layer.G is None:
                self.left[layer.layer.weight] = "the network's outputs do not depend on it"
            else:
                found[name] = LayerCurvature(layer.layer, A, symmetric(layer.G), settings.prior_precision)
        for curvature in found.values():
            curvature.check()
        return found

    def _share_sums(self, with_gradients: bool) -> None:
        """Add over processes. A process without a batch takes part with zeros."""
        for layer in self.layers.values():
            if layer.reads_with is None:
                moment = layer.moment or InputMoment(layer.view, bias=True, dtype=torch.float64)
                sum_over_processes(*moment.tensors())
                layer.moment = moment
            if with_gradients:
                size = (layer.view.groups, layer.view.rows, layer.view.rows)
                if layer.G is None:
                    layer.G = torch.zeros(size, dtype=torch.float64, device=layer.view.module.weight.device)
                sum_over_processes(layer.G)


def measure(
    run: BlockRun, skip: Mapping[str, str], settings: LocalSettings | KroneckerSettings
) -> tuple[dict[str, LayerCurvature], dict[str, str]]:
    """Measure the curvature of the next block's layers.

    Args:
        run: stands before the block.
        skip: reasons to leave weights alone, by name.
        settings: of the curvature.

    Returns:
        the curvature by the layers' names, and the reasons for weights without one.
    """
    factors = BlockFactors(run, skip, isinstance(settings, LocalSettings))
    if isinstance(settings, LocalSettings):
        with _input_hooks(factors.modules, factors.add_input):
            for _ in run.pass_block():
                factors.finish_batch()
    else:
        _backward_passes(run, factors, settings)
    return factors.finish(settings), factors.left


def measure_group(
    run: BlockRun, dense: BlockRun, only: Collection[str], settings: LocalSettings
) -> tuple[dict[str, LayerCurvature], dict[str, Tensor]]:
    """Measure layers of the next block, and what they should return.

    Args:
        run: the cut network, before the block.
        dense: the dense network, before the same block.
        only: the names of layers that read the same tensor.
        settings: of the curvature.

    Returns:
        the curvature by the layers' names, and B as `restored.Targets` defines it.
    """
    factors = BlockFactors(run, {}, True, only)
    targets = Targets({n: layer.view for n, layer in factors.layers.items()})
    theirs = {n: dense.twin.get_submodule(n) for n in factors.modules}
    with (
        _input_hooks(factors.modules, factors.add_input),
        Watched(factors.modules) as cut,
        Watched(theirs) as original,
    ):
        for _ in zip(dense.pass_block(), run.pass_block(), strict=True):
            factors.finish_batch()
            targets.add(original, cut, run.real)
            original.clear()
            cut.clear()
    return factors.finish(settings), targets.means()


def layer_groups(run: BlockRun, skip: Mapping[str, str]) -> tuple[list[list[str]], dict[str, str]]:
    """Group the layers of the next block by their inputs, in the order they run.

    Returns:
        the groups, and the reasons for weights that are in none.
    """
    factors = BlockFactors(run, skip, True)
    with _input_hooks(factors.modules, factors.add_input):
        next(run.pass_block())
    groups: dict[str, list[str]] = {}
    for name in factors.order:
        groups.setdefault(factors.layers[name].reads_with or name, []).append(name)
    silent = {
        layer.layer.weight: "its layer never ran: another module may read its weight"
        for name, layer in factors.layers.items()
        if name not in factors.order
    }
    return list(groups.values()), factors.left | silent


def output_weights(run: BlockRun, settings: KroneckerSettings) -> dict[str, Tensor]:
    """Sum the squared gradients at the outputs of all layers of all blocks.

    It takes one pass through the network and back for every batch; later blocks are checkpointed. The sums are
    (groups, outputs) by layer.
    """
    views: dict[str, MatrixLayer] = {}
    for name in run.names:
        for path, module in run.twin.get_submodule(name).named_modules():
            view = matrix_layer(module)
            if view is not None and not isinstance(view, EmbeddingLayer):
                views[f"{name}.{path}" if path else name] = view
    sums = {
        name: torch.zeros((view.groups, view.rows), dtype=torch.float64, device=view.module.weight.device)
        for name, view in views.items()
    }

    def add(name: str, gradients: Sequence[Tensor | None]) -> None:
        for g in gradients:
            if g is not None:
                sums[name] += views[name].gradients(g).double().square().sum((0, 1))

    _each_gradient(
        run, {name: view.module for name, view in views.items()}, lambda *_: None, lambda: None, add, settings
    )
    for total in sums.values():
        sum_over_processes(total)
    return sums


@contextmanager
def _input_hooks(
    modules: Mapping[str, nn.Module], on_input: Callable[[str, Tensor, torch.Size], None]
) -> Iterator[None]:
    def noted(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            on_input(name, args[0] if args else next(iter(kwargs.values())), output.shape)

        return hook

    # first of all hooks: the block itself may be a layer, and its own hook ends the pass
    handles = [m.register_forward_hook(noted(n), prepend=True, with_kwargs=True) for n, m in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _backward_passes(run: BlockRun, factors: BlockFactors, settings: KroneckerSettings) -> None:
    def add(name: str, gradients: Sequence[Tensor | None]) -> None:
        factors.layers[name].add_gradients(gradients)

    _each_gradient(run, factors.modules, factors.add_input, factors.finish_batch, add, settings)


def _each_gradient(
    run: BlockRun,
    modules: Mapping[str, nn.Module],
    on_input: Callable[[str, Tensor, torch.Size], None],
    after_forward: Callable[[], None],
    on_gradients: Callable[[str, Sequence[Tensor | None]], None],
    settings: KroneckerSettings,
) -> None:
    """Run every batch to the end of the network and back to some layers."""
    with with_gradients(), run.rest_of_network() as prepared, Capture(modules, on_input) as capture:
        for place, targets in enumerate(settings.targets):
            twin, inputs = prepared(place)
            outputs = capture.forward(twin, inputs)
            after_forward()
            generator = torch.Generator().manual_seed(SEED_STRIDE * settings.places[place])
            targets = targets.to(outputs.device)
            for column in output_columns(settings.likelihood, outputs, targets, settings.columns, generator):
                for name, gradients in capture.backward(outputs, column).items():
                    on_gradients(name, gradients)
                    del gradients
            del outputs, column  # the graph of a batch must be gone before the next one is made
