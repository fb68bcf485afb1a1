"""Gradients of single examples, from each layer's inputs and output gradients.

Each example's gradient is the outer product of a layer's input and output gradient (elementwise for a normalisation),
so that the network need not be run again. Parameters whose gradients hooks miss go through the whole network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import torch
from torch import Tensor, nn

from bayeslim.curvature.capture import Capture
from bayeslim.curvature.layers import MatrixLayer, ScaleLayer, matrix_layer, scale_layer
from bayeslim.curvature.probe import Probe, probe
from bayeslim.curvature.sweep import chosen_parameters, examples, examples_at_once
from bayeslim.curvature.whole_network import WholeNetwork
from bayeslim.errors import ShapeMismatch
from bayeslim.types import Inputs, Params

Chosen: TypeAlias = Iterable[str] | Mapping[str, Tensor | None] | None
"""Weights by parameter name: names alone, or names with flat indices into each (None for all); None for everything."""

COLUMNS_AT_ONCE = 32
"""Columns that are sent backwards before their gradients are used."""


def chosen_weights(model: nn.Module, chosen: Chosen) -> dict[str, Tensor | None]:
    """Check chosen weights and order them as the model's parameters."""
    params = chosen_parameters(model, chosen)
    if not isinstance(chosen, Mapping):
        return dict.fromkeys(params)
    weights: dict[str, Tensor | None] = {}
    for name, p in params.items():
        index = chosen[name]
        if index is None:
            weights[name] = None
            continue
        if index.ndim != 1 or index.is_floating_point() or index.dtype == torch.bool or not len(index):
            raise ShapeMismatch(
                f'The indices of "{name}" must be a vector of integers into the flattened parameter. '
                f"Got {index.dtype} of shape {tuple(index.shape)}. Use mask.flatten().nonzero().flatten() for a mask."
            )
        if int(index.min()) < 0 or int(index.max()) >= p.numel() or len(index.unique()) < len(index):
            raise ShapeMismatch(
                f'The indices of "{name}" must be different numbers from 0 to {p.numel() - 1}. '
                f"Got {len(index)} from {int(index.min())} to {int(index.max())}, {len(index.unique())} different."
            )
        weights[name] = index.to(p.device, torch.long)
    return weights


@dataclass
class LayerPass:
    """Inputs and output gradients of one layer in one batch.

    Attributes:
        view: the layer.
        calls: for each call its input (B, ...), its output's shape and the gradients (K, B, ...).
    """

    view: MatrixLayer | ScaleLayer
    calls: list[tuple[Tensor, torch.Size, Tensor]]

    def matrices(self, start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Compute features and output gradients of some examples, calls one after another.

        Returns:
            features (b, T, groups, I) and gradients (K, b, T, groups, O), or None if the layer was not called.
        """
        view = self.view
        assert isinstance(view, MatrixLayer)
        if not self.calls:
            return None
        features = [view.features(x[start:stop], shape).to(dtype) for x, shape, _ in self.calls]
        flat = [(len(g), g[:, start:stop].flatten(0, 1)) for _, _, g in self.calls]
        gradients = [view.gradients(g).unflatten(0, (columns, -1)).to(dtype) for columns, g in flat]
        if len(features) == 1:
            return features[0], gradients[0]
        return torch.cat(features, 1), torch.cat(gradients, 2)

    def scales(self, leaf: str, start: int, stop: int, dtype: torch.dtype) -> Tensor | None:
        """Compute gradients (K, b, numel) of an elementwise parameter."""
        assert isinstance(self.view, ScaleLayer)
        parts = [
            self.view.example_gradients(leaf, x[start:stop].to(dtype), g[:, start:stop].to(dtype))
            for x, _, g in self.calls
        ]
        return torch.stack(parts).sum(0) if parts else None


@dataclass
class Backward:
    """Some columns of one batch, sent backwards.

    Attributes:
        inputs: of the batch.
        columns: (K, B, ...).
        layers: inputs and output gradients of each layer, by the module's name.
    """

    inputs: Inputs
    columns: Tensor
    layers: dict[str, LayerPass]

    @property
    def examples(self) -> int:
        """The number of examples."""
        return self.columns.shape[1]


class ExampleGradients:
    """Send columns backwards to the layers of chosen parameters of a replica.

    Attributes:
        direct: layer and attribute of each parameter read through hooks, known after the first forward.
        whole: gradients of all other parameters, likewise.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]):
        self.model = model
        self.views: dict[str, MatrixLayer | ScaleLayer] = {}
        self.direct: dict[str, tuple[str, str]] = {}
        self.whole: WholeNetwork | None = None
        known = {id(p): name for name, p in chosen_parameters(model, names).items()}
        self.names = tuple(known.values())
        for path, module in model.named_modules():
            leaves = {leaf: known[id(p)] for leaf, p in module._parameters.items() if p is not None and id(p) in known}
            view = matrix_layer(module) or scale_layer(module)
            if leaves and view is not None:
                self.views[path] = view
                self.direct |= {name: (path, leaf) for leaf, name in leaves.items() if leaf in ("weight", "bias")}
        self._probe: Probe | None = None
        self._capture = Capture({path: view.module for path, view in self.views.items()})

    def __enter__(self) -> ExampleGradients:
        self._capture.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._capture.__exit__(None, None, None)

    def forward(self, inputs: Inputs) -> Tensor:
        """Call the model; the first time, probe which layers can be read through hooks."""
        if self._probe is None:
            self._settle(probe(self.model, inputs, self._capture.modules))
        outputs = self._capture.forward(self.model, inputs)
        late = {
            path
            for path, uses in self._capture.uses.items()
            if any(not self.views[path].batched(use.input) or use.input.shape[0] != outputs.shape[0] for use in uses)
        }
        self._drop(late)
        return outputs

    def backward(self, inputs: Inputs, outputs: Tensor, columns: Iterable[Tensor]) -> Iterator[Backward]:
        """Send columns backwards, a few at a time."""
        remaining = iter(columns)
        paths = {path for path, _ in self.direct.values()}
        while some := list(islice(remaining, COLUMNS_AT_ONCE)):
            together = torch.stack(some)
            found = self._capture.backwards(outputs, together)
            layers = {}
            for path in paths:
                uses = zip(self._capture.uses[path], found[path], strict=True)
                calls = [(use.input, use.output_shape, g) for use, g in uses if g is not None]
                layers[path] = LayerPass(self.views[path], calls)
            yield Backward(inputs, together, layers)

    def through_the_network(self, backward: Backward) -> Iterator[Params]:
        """Yield gradients (K, b, *shape) of the other parameters, by a few examples."""
        if self.whole is None:
            return
        size = sum(p.numel() for p in self.whole.params.values())
        step = examples_at_once(8 * backward.columns.shape[0] * size, backward.columns.device)
        for start in range(0, backward.examples, step):
            stop = min(start + step, backward.examples)
            some = examples(backward.inputs, start, stop, backward.examples)
            yield self.whole.gradients(some, backward.columns[:, start:stop])

    def _settle(self, seen: Probe) -> None:
        self._probe = seen
        hidden = {name for name in self.direct if name in seen.hidden}
        self.direct = {name: place for name, place in self.direct.items() if name not in hidden}
        self._rest()
        self._drop(seen.ran - seen.examples_first)

    def _drop(self, paths: Iterable[str]) -> None:
        """Compute all parameters of some layers through the whole network from now on."""
        dropped = set(paths)
        if dropped:
            self.direct = {name: place for name, place in self.direct.items() if place[0] not in dropped}
            self._rest()

    def _rest(self) -> None:
        rest = [name for name in self.names if name not in self.direct]
        if rest and (self.whole is None or list(self.whole.params) != rest):
            self.whole = WholeNetwork(self.model, rest)
