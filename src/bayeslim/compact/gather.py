"""Unread features: a gather drops the inputs whose weights are all zero.

These are features of the network's own inputs, and positions of a flattened feature map, whose channels stay because
they are read elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

_READERS = {
    torch.ops.aten.linear.default: -1,
    torch.ops.aten.conv1d.default: -2,
    torch.ops.aten.conv2d.default: -3,
    torch.ops.aten.conv3d.default: -4,
}


_FLATTENING = (
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.flatten.using_ints,
    torch.ops.aten._unsafe_view.default,
)


def drop_unread_features(graph: fx.GraphModule) -> int:
    """Gather only the features with a non-zero weight in front of the first layers.

    It applies to layers that read inputs of the network or flattened feature maps.

    Args:
        graph: a traced network; changed in place.

    Returns:
        The number of features dropped.
    """
    dropped = 0
    for node in list(graph.graph.nodes):
        if node.target not in _READERS or not (_reads_input(node.args[0]) or _is_flattened(node.args[0])):
            continue
        weight_node = node.args[1]
        groups = node.args[6] if len(node.args) > 6 else node.kwargs.get("groups", 1)
        if weight_node.op != "get_attr" or len(weight_node.users) > 1 or groups != 1:
            continue
        owner_name, _, attribute = str(weight_node.target).rpartition(".")
        owner = graph.get_submodule(owner_name)
        weight: Tensor = getattr(owner, attribute)
        read = (weight != 0).movedim(1, 0).flatten(1).any(1)
        if bool(read.all()) or not bool(read.any()):
            continue
        places = read.nonzero().flatten()
        setattr(
            owner, attribute, nn.Parameter(weight.detach().index_select(1, places), requires_grad=weight.requires_grad)
        )
        buffer = f"{weight_node.name}_inputs"
        graph.register_buffer(buffer, places)
        with graph.graph.inserting_before(node):
            index = graph.graph.get_attr(buffer)
            gathered = graph.graph.call_function(
                torch.ops.aten.index_select.default, (node.args[0], _READERS[node.target], index)
            )
        node.update_arg(0, gathered)
        dropped += int((~read).sum())
    graph.recompile()
    return dropped


def _is_flattened(node: fx.Node) -> bool:
    """Return whether a tensor is a flattened feature map."""
    if node.target not in _FLATTENING:
        return False
    before = node.all_input_nodes[0].meta.get("val")
    return before is not None and before.ndim > 2


def _reads_input(node: fx.Node) -> bool:
    """Return whether a tensor is computed from inputs without parameters."""
    if node.op == "placeholder":
        return True
    return node.op == "call_function" and all(_reads_input(source) for source in node.all_input_nodes)
