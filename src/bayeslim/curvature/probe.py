"""Which layers can be read through their hooks, found out by running one example.

A hook sees a layer's own calls only, and other modules may read its weights: attention takes the weight of its output
projection and never calls it, a language model's head multiplies with the embedding's table, two modules share one
tensor. The probe runs one example and counts, in the autograd graph, how often each parameter was read. Where that is
more often than the layer was called, hooks miss a part of the gradient. The probe also finds out whether a layer's
first dimension is the batch (a transformer may put time first, a vision model may fold windows into the batch).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.autograd.graph import Node

from bayeslim.curvature.capture import Capture
from bayeslim.curvature.layers import matrix_layer, scale_layer
from bayeslim.curvature.sweep import PackedInputs, examples
from bayeslim.types import Inputs, batch_size


@dataclass(frozen=True)
class Probe:
    """How one example used the layers.

    Attributes:
        hidden: parameters that are read elsewhere than by calling the layer that owns them, with the reason in words.
        examples_first: layers whose inputs have the examples in their first dimension, of those that ran.
        ran: layers that were called.
    """

    hidden: dict[str, str]
    examples_first: frozenset[str]
    ran: frozenset[str]


def probe(model: nn.Module, inputs: Inputs, layers: Mapping[str, nn.Module]) -> Probe:
    """Run one example of `inputs` and record how `layers` are used."""
    try:
        one, single = examples(inputs, 0, 1, batch_size(inputs)), True
    except PackedInputs:
        one, single = inputs, False
    params = {name: p.detach().requires_grad_(p.is_floating_point()) for name, p in model.named_parameters()}
    names = {id(p): name for name, p in model.named_parameters()}
    with Capture(layers) as capture:
        outputs = capture.forward(model, one, params)
        reads = _reads(outputs, params)
        calls = {name: len(uses) for name, uses in capture.uses.items()}
        first = {
            name
            for name, uses in capture.uses.items()
            if single and uses and all(_examples_first(layers[name], use.input) for use in uses)
        }
    hidden = {}
    for layer, module in layers.items():
        for leaf, p in module._parameters.items():
            if p is None:
                continue
            name = names[id(p)]
            if reads[name] > calls[layer]:
                own = f"{layer}.{leaf}" if layer else leaf
                hidden[name] = (
                    f'its layer "{layer}" never ran: another module reads it'
                    if not calls[layer]
                    else "is read by more than one module"
                    if own == name
                    else f'is tied to "{own}"'
                )
    return Probe(hidden, frozenset(first), frozenset(name for name, n in calls.items() if n))


def _examples_first(module: nn.Module, x: Tensor) -> bool:
    view = matrix_layer(module) or scale_layer(module)
    return view is not None and view.batched(x) and x.shape[0] == 1


def _reads(outputs: Tensor, params: Mapping[str, Tensor]) -> dict[str, int]:
    """Count the operations in the graph of `outputs` that read each parameter."""
    reads = dict.fromkeys(params, 0)
    names = {id(p): name for name, p in params.items()}
    for node in graph_nodes(outputs):
        for parent, _ in node.next_functions:
            name = names.get(id(getattr(parent, "variable", None)))
            if name is not None:
                reads[name] += 1
    return reads


def graph_nodes(*tensors: Tensor) -> Iterator[Node]:
    """Yield every operation in the autograd graph of some tensors, once."""
    seen: set[Node] = set()
    stack = [tensor.grad_fn for tensor in tensors]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack.extend(parent for parent, _ in node.next_functions)
