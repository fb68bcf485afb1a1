"""Inputs and output gradients of chosen layers, by hooks that are gone when the pass is over.

A forward hook keeps each layer's input and the place of its output in the autograd graph. `torch.autograd.grad` up to
those places computes output gradients only: no weight gradient is formed and no `.grad` is written. The place is
taken before anything downstream can change the output in place, and before hooks of the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from bayeslim.curvature.sweep import examples_at_once
from bayeslim.errors import UnsupportedModel
from bayeslim.types import Inputs, call


@dataclass
class Use:
    """One call of a layer.

    Attributes:
        output_shape: of what it returned.
        edge: where its output is in the autograd graph.
    """

    layer: str
    given: Tensor | None
    version: int
    output_shape: torch.Size
    edge: GradientEdge

    @property
    def input(self) -> Tensor:
        """The input of the call."""
        assert self.given is not None
        if self.given._version != self.version:
            raise UnsupportedModel(
                f'The input of "{self.layer}" is changed in place after the layer has read it, so that its curvature '
                "would be wrong. Replace the in-place operation (x += ..., relu_) after it by a plain one."
            )
        return self.given


class Capture:
    """Watch the calls of some layers; a context manager that owns its hooks.

    Args:
        modules: the layers by name.
        on_input: called with each input at once, as `(name, input, output_shape)`; inputs are then not kept.

    Attributes:
        uses: the calls of each layer in the last forward pass, in order.
        together: whether several columns go backwards in one pass, which on a GPU launches far fewer kernels. None: on
            a GPU, and on a CPU through linear layers alone, whose products become larger.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], on_input: Callable[[str, Tensor, torch.Size], None] | None = None
    ):
        self.modules = modules
        self.on_input = on_input
        self.uses: dict[str, list[Use]] = {}
        self.together: bool | None = None
        self.are_linear = all(type(module) is nn.Linear for module in modules.values())
        self._recording = False
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> Self:
        for name, module in self.modules.items():
            hook = self._hook(name)
            self._handles.append(module.register_forward_hook(hook, prepend=True, with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.uses = {}

    def forward(self, model: nn.Module, inputs: Inputs, params: Mapping[str, Tensor] | None = None) -> Tensor:
        """Call the model; afterwards `uses` holds the calls of each layer, in order."""
        self.uses = {name: [] for name in self.modules}
        self._recording = True  # a checkpointed segment runs again in the backward pass, which must not count twice
        try:
            return call(model, inputs, params)
        finally:
            self._recording = False

    def columns_at_once(self, outputs: Tensor) -> int:
        """Count the columns to send backwards in one pass: several through linear layers."""
        if not self.are_linear or self.together is False:
            return 1
        numbers = sum(use.output_shape.numel() for uses in self.uses.values() for use in uses)
        return examples_at_once(outputs.element_size() * numbers, outputs.device)

    def backward(self, outputs: Tensor, column: Tensor) -> dict[str, list[Tensor | None]]:
        """Compute gradients of Σ column · outputs at each call; None where there is none."""
        return self._by_layer(self._gradients(outputs, column))

    def backwards(self, outputs: Tensor, columns: Tensor) -> dict[str, list[Tensor | None]]:
        """Compute the same for several columns, (K, B, ...), as gradients (K, B, ...)."""
        if len(columns) == 1:
            return self._by_layer([None if g is None else g[None] for g in self._gradients(outputs, columns[0])])
        if self.are_linear or outputs.device.type != "cpu" if self.together is None else self.together:
            try:
                return self._by_layer(self._gradients(outputs, columns, together=True))
            except RuntimeError:  # some operation takes one at a time, or memory is short
                self.together = False
        first = self._gradients(outputs, columns[0])
        found = [None if g is None else g.new_empty(len(columns), *g.shape) for g in first]
        there = [all_columns for all_columns in found if all_columns is not None]
        for k, column in enumerate(columns):
            gradients = first if k == 0 else self._gradients(outputs, column)
            if there:
                torch._foreach_copy_([g[k] for g in there], [g for g in gradients if g is not None])
            first = gradients = ()  # frees a column's gradients before the next ones are made
        return self._by_layer(found)

    def _gradients(self, outputs: Tensor, columns: Tensor, together: bool = False) -> Sequence[Tensor | None]:
        """Compute gradients of one column, or `together` of several in one pass."""
        edges = [use.edge for uses in self.uses.values() for use in uses]
        if not edges or not outputs.requires_grad:
            return [None] * len(edges)
        return torch.autograd.grad(
            outputs, edges, columns, retain_graph=True, allow_unused=True, is_grads_batched=together
        )

    def _by_layer(self, gradients: Sequence[Tensor | None]) -> dict[str, list[Tensor | None]]:
        found = iter(gradients)
        return {name: [next(found) for _ in uses] for name, uses in self.uses.items()}

    def _hook(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if not isinstance(output, Tensor):
                return None
            replaced = None
            if not output.requires_grad:
                # everything up to here is frozen: start the graph here, with a copy that may be changed in place
                output = output.detach().requires_grad_()
                replaced = output.clone()
            if not self._recording:  # a checkpointed segment that runs again must have the same graph
                return replaced
            given = (args[0] if args else next(iter(kwargs.values()))).detach()
            edge = get_gradient_edge(output)
            kept = given if self.on_input is None else None
            self.uses[name].append(Use(name, kept, given._version, output.shape, edge))
            if self.on_input is not None:
                self.on_input(name, given, output.shape)
            return replaced

        return hook
