"""Gradients of single examples for chosen weights, without ever holding those of a whole batch.

For a layer y_t = W a_t the gradient of one example at W[o, i] is Σ_t g_t[o] a_t[i]: with the layer's inputs and
output gradients in hand, only the chosen entries are formed. Normalisation layers are alike, and everything else goes
through the whole network. `rows` yields them in chunks of examples of bounded memory.
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
from bayeslim.curvature.probe import Probe, examples, probe
from bayeslim.curvature.sweep import chosen_parameters, examples_at_once
from bayeslim.curvature.whole_network import WholeNetwork
from bayeslim.errors import ShapeMismatch
from bayeslim.types import Inputs

Chosen: TypeAlias = Iterable[str] | Mapping[str, Tensor | None] | None
"""Weights by parameter name: names alone, or names with flat indices into each (None for all); None for everything."""

COLUMNS_AT_ONCE = 32


def chosen_weights(model: nn.Module, chosen: Chosen) -> dict[str, Tensor | None]:
    """The chosen weights in the model's order of parameters, with indices checked and on the parameters' devices."""
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
        """Features (b, T, groups, I) and gradients (K, b, T, groups, O) of some examples, calls one after another."""
        view = self.view
        assert isinstance(view, MatrixLayer)
        if not self.calls:
            return None
        features = [view.features(x[start:stop], shape).to(dtype) for x, shape, _ in self.calls]
        gradients = [
            torch.stack([view.gradients(column) for column in g[:, start:stop]]).to(dtype) for _, _, g in self.calls
        ]
        if len(features) == 1:
            return features[0], gradients[0]
        return torch.cat(features, 1), torch.cat(gradients, 2)

    def scales(self, leaf: str, start: int, stop: int, dtype: torch.dtype) -> Tensor | None:
        """Gradients (K, b, numel) of an elementwise parameter."""
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
        layers: what each layer saw, by the module's name.
    """

    inputs: Inputs
    columns: Tensor
    layers: dict[str, LayerPass]

    @property
    def examples(self) -> int:
        """How many examples."""
        return self.columns.shape[1]


class ExampleGradients:
    """Send columns backwards to the layers of chosen parameters.

    Args:
        model: the network, left as it is.
        names: the parameters.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]):
        self.model = model
        self.views: dict[str, MatrixLayer | ScaleLayer] = {}
        self.places: dict[str, tuple[str, str]] = {}
        known = {id(p): name for name, p in chosen_parameters(model, names).items()}
        self.names = tuple(known.values())
        for path, module in model.named_modules():
            leaves = {leaf: known[id(p)] for leaf, p in module._parameters.items() if p is not None and id(p) in known}
            view = matrix_layer(module) or scale_layer(module)
            if leaves and view is not None:
                self.views[path] = view
                self.places |= {name: (path, leaf) for leaf, name in leaves.items() if leaf in ("weight", "bias")}
        self._probe: Probe | None = None
        self._whole: WholeNetwork | None = None
        self._capture = Capture({path: view.module for path, view in self.views.items()})

    def __enter__(self) -> ExampleGradients:
        self._capture.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._capture.__exit__(None, None, None)

    @property
    def direct(self) -> dict[str, tuple[str, str]]:
        """The layer and its attribute for each parameter that hooks can tell; known after the first forward."""
        return self.places

    @property
    def whole(self) -> WholeNetwork | None:
        """The rest, through the whole network; known after the first forward."""
        return self._whole

    def forward(self, inputs: Inputs) -> Tensor:
        """Call the model, after finding out with one example which layers can be read (once)."""
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
        paths = {path for path, _ in self.places.values()}
        while some := list(islice(remaining, COLUMNS_AT_ONCE)):
            found = [self._capture.backward(outputs, column) for column in some]
            layers = {}
            for path in paths:
                calls = []
                for n, use in enumerate(self._capture.uses[path]):
                    grads = [gradients[path][n] for gradients in found]
                    if all(g is not None for g in grads):
                        calls.append((use.input, use.output_shape, torch.stack([g for g in grads if g is not None])))
                layers[path] = LayerPass(self.views[path], calls)
            yield Backward(inputs, torch.stack(some), layers)

    def _settle(self, seen: Probe) -> None:
        self._probe = seen
        hidden = {name for name in self.places if name in seen.hidden}
        self.places = {name: place for name, place in self.places.items() if name not in hidden}
        self._rest()
        self._drop(seen.ran - seen.examples_first)

    def _drop(self, paths: Iterable[str]) -> None:
        """Leave all parameters of some layers to the whole network from now on."""
        dropped = set(paths)
        if dropped:
            self.places = {name: place for name, place in self.places.items() if place[0] not in dropped}
            self._rest()

    def _rest(self) -> None:
        rest = [name for name in self.names if name not in self.places]
        if rest and (self._whole is None or list(self._whole.params) != rest):
            self._whole = WholeNetwork(self.model, rest)


def rows(
    gradients: ExampleGradients, backward: Backward, weights: Mapping[str, Tensor | None], dtype: torch.dtype
) -> Iterator[tuple[int, Tensor]]:
    """Gradients of the chosen weights, (K, b, S), in chunks of examples; yields the number of the first with each."""
    params = dict(gradients.model.named_parameters())
    sizes = {name: params[name].numel() if index is None else len(index) for name, index in weights.items()}
    columns = backward.columns.shape[0]
    largest = max(_scratch(gradients, backward, name, weights[name]) for name in weights)
    step = examples_at_once(columns * dtype.itemsize * (sum(sizes.values()) + largest), backward.columns.device)
    for start in range(0, backward.examples, step):
        stop = min(start + step, backward.examples)
        whole = (
            gradients.whole.gradients(
                examples(backward.inputs, start, stop, backward.examples), backward.columns[:, start:stop]
            )
            if gradients.whole is not None
            else {}
        )
        prepared: dict[str, tuple[Tensor, Tensor] | None] = {}
        parts = []
        for name, index in weights.items():
            part: Tensor | None
            if name in whole:
                part = _pick(whole[name].flatten(2).to(dtype), index)
            else:
                path, leaf = gradients.direct[name]
                layer = backward.layers[path]
                if isinstance(layer.view, ScaleLayer):
                    part = layer.scales(leaf, start, stop, dtype)
                    part = None if part is None else _pick(part, index)
                else:
                    if path not in prepared:
                        prepared[path] = layer.matrices(start, stop, dtype)
                    part = _entries(layer.view, leaf, prepared[path], index)
            zero = (columns, stop - start, sizes[name])
            parts.append(backward.columns.new_zeros(zero, dtype=dtype) if part is None else part)
        yield start, torch.cat(parts, -1)


def _pick(values: Tensor, index: Tensor | None) -> Tensor:
    return values if index is None else values[..., index]


def _entries(
    view: MatrixLayer, leaf: str, matrices: tuple[Tensor, Tensor] | None, index: Tensor | None
) -> Tensor | None:
    """Entries of Σ_t g_t a_tᵀ, (K, b, S), from features (b, T, groups, I) and gradients (K, b, T, groups, O)."""
    if matrices is None:
        return None
    a, g = matrices
    if leaf == "bias":
        return _pick(g.sum(2).flatten(2), index)
    if index is None:
        full = torch.einsum("btgi,kbtgo->kbgoi", a, g)
        index = torch.arange(full[0, 0].numel(), device=a.device)
        outputs, inputs = view.locate(index)
        return full.flatten(2)[..., outputs * view.columns + inputs % view.columns]
    outputs, inputs = view.locate(index)
    a, g = a.flatten(2), g.flatten(3)
    if a.shape[1] == 1:
        return g[:, :, 0][..., outputs] * a[:, 0][..., inputs]
    # one product over the positions for the rows and columns that occur, then the entries
    used_inputs, at_input = inputs.unique(return_inverse=True)
    used_outputs, at_output = outputs.unique(return_inverse=True)
    block = torch.einsum("bti,kbto->kboi", a[..., used_inputs], g[..., used_outputs])
    return block[:, :, at_output, at_input]


def _scratch(gradients: ExampleGradients, backward: Backward, name: str, index: Tensor | None) -> int:
    """About how many numbers a column of one example needs besides the result."""
    if name not in gradients.direct:
        return dict(gradients.model.named_parameters())[name].numel()
    layer = backward.layers[gradients.direct[name][0]]
    if not isinstance(layer.view, MatrixLayer):
        return max((x[0].numel() for x, _, _ in layer.calls), default=0)
    features = max((layer.view.feature_bytes(x, shape) // 4 for x, shape, _ in layer.calls), default=0)
    return features + (layer.view.module.weight.numel() if features > layer.view.columns or index is None else 0)
