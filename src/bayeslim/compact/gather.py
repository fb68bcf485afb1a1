"""Input features that nobody reads: dropped behind a gather in front of the layers that read the network's inputs."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

_READERS = {
    torch.ops.aten.linear.default: -1,
    torch.ops.aten.conv1d.default: -2,
    torch.ops.aten.conv2d.default: -3,
    torch.ops.aten.conv3d.default: -4,
}


def drop_unread_inputs(graph: fx.GraphModule) -> int:
    """Let layers that read inputs of the network gather only the features with a non-zero weight.

    Args:
        graph: a traced network; changed in place.

    Returns:
        The number of features dropped.
    """
    dropped = 0
    for node in list(graph.graph.nodes):
        if node.target not in _READERS or not _reads_input(node.args[0]):
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


def _reads_input(node: fx.Node) -> bool:
    """Whether a tensor is an input of the network, or an input after operations without parameters."""
    if node.op == "placeholder":
        return True
    return node.op == "call_function" and all(_reads_input(source) for source in node.all_input_nodes)
