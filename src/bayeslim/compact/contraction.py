"""Rules for layers with weights: the channels a weight reads and produces.

    linear        y_o = Σ_k W_ok x_k + b_o                    columns read, rows and bias produce
    convolution   the same for every offset of the kernel; with groups, each group on its own
    embedding     columns produce, rows are chosen by the data
    norms         one parameter for each channel

A convolution in groups stays one only if whole groups go, or the same places in every group: whole groups where its
input allows it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from bayeslim.compact.channels import Channels, Contraction, rule
from bayeslim.compact.labels import varying
from bayeslim.compact.ops import Call

COMPUTED = "its weight is computed from other tensors"
SHARED = "every channel of another dimension shares it"


@rule("linear")
def _linear(walk: Channels, call: Call) -> Any:
    return contract(walk, call, call.nodes["input"], -1, call.nodes["weight"], 0, 1, call.nodes["bias"], folds=True)


def contract(
    walk: Channels,
    call: Call,
    source: fx.Node,
    dim: int,
    weight: fx.Node,
    produces: int,
    reads: int,
    bias: Any,
    folds: bool,
) -> Any:
    """Label a product with a weight matrix over a dimension of the source.

    The channels of the result run along the same dimension.

    Args:
        walk: the walk.
        call: the operation.
        source: the activation.
        dim: its channel dimension.
        weight: the weight.
        produces: the weight's dimension of output channels.
        reads: the weight's dimension of input channels.
        bias: the bias, or None.
        folds: whether a constant input channel can be folded into the bias.
    """
    found = walk.weight(weight)
    labels = walk.read(source)
    dim %= labels.ndim
    if found is None:
        return walk.unknown(call, COMPUTED)
    name, dims = found
    produces, reads = dims[produces], dims[reads]
    if varying(labels) and dim not in varying(labels):  # the heads share this weight: heads can go, the weight stays
        for axis, role in ((produces, "produces"), (reads, "reads")):
            walk.labels.freeze(walk.axis(name, axis, role), SHARED)
        if bias is not None:
            walk.labels.freeze(walk.read(bias), SHARED)
        return labels.narrow(dim, 0, 1).expand(call.result.shape)
    columns = walk.labels_along(source, dim)
    rows = walk.axis(name, produces, "produces")
    walk.kinds.append(("channel" if call.name.startswith("conv") else "neuron", rows))
    walk.labels.tie(walk.axis(name, reads, "reads"), columns)
    shape = (len(rows), len(columns))
    walk.contractions.append(
        Contraction(
            call.node, source, dim, name, produces, reads,
            channel=torch.arange(shape[1]).expand(shape), output=torch.arange(shape[0])[:, None].expand(shape),
            inputs=columns.expand(shape), outputs=rows[:, None].expand(shape),
            bias=tie_vector(walk, bias, rows) if folds else None,
        )
    )  # fmt: skip
    if not folds:
        tie_vector(walk, bias, rows)
    return place(rows, dim, call.result.shape)


def tie_vector(walk: Channels, node: Any, labels: Tensor) -> str | None:
    """Tie a vector to channels; return its name if it is a whole parameter."""
    if node is None:
        return None
    found = walk.weight(node)
    if found is not None and len(found[1]) == 1 and found[1][0] >= 0:
        walk.labels.tie(walk.axis(found[0], found[1][0], "produces"), labels)
        return found[0]
    walk.labels.tie(walk.read(node), labels)
    return None


def place(labels: Tensor, dim: int, shape: torch.Size) -> Tensor:
    """Expand labels along one dimension to a shape."""
    return labels.view([-1 if d == dim % len(shape) else 1 for d in range(len(shape))]).expand(shape)


@rule("conv1d", "conv2d", "conv3d")
def _convolution(walk: Channels, call: Call) -> Any:
    source, weight, groups = call.nodes["input"], call.nodes["weight"], call.values["groups"]
    spatial = call.values["weight"].ndim - 2
    dim = call.values["input"].ndim - spatial - 1
    walk.labels.unite_along(walk.read(source), list(range(dim + 1, dim + 1 + spatial)))
    padding = call.values["padding"]
    unpadded = padding == "valid" or (padding != "same" and not any(_many(padding)))
    if groups == 1:
        return contract(walk, call, source, dim, weight, 0, 1, call.nodes["bias"], folds=unpadded)
    found = walk.weight(weight)
    if found is None or found[1] != list(range(spatial + 2)):
        return walk.unknown(call, COMPUTED)
    name = found[0]
    columns, rows = walk.labels_along(source, dim), walk.axis(name, 0, "produces")
    inside = walk.axis(name, 1, "reads")
    matrix, whole = into_groups(walk, columns, groups)
    if whole:
        walk.labels.freeze(inside, "only whole groups can go")
        walk.labels.tie(rows.view(groups, -1), matrix[:, :1])
        walk.groups[call.node] = len(columns) // groups
    else:
        walk.labels.tie(inside, matrix[0])
        walk.labels.unite_along(rows.view(groups, -1), [0])
    walk.kinds.append(("channel", rows))
    each = len(rows) // groups
    channel = torch.arange(len(columns)).view(groups, 1, -1).expand(groups, each, -1).reshape(len(rows), -1)
    walk.contractions.append(
        Contraction(
            call.node, source, dim, name, 0, 1,
            channel=channel, output=torch.arange(len(rows))[:, None].expand(channel.shape),
            inputs=columns[channel], outputs=rows[:, None].expand(channel.shape),
            bias=tie_vector(walk, call.nodes["bias"], rows) if unpadded else None,
        )
    )  # fmt: skip
    tie_vector(walk, call.nodes["bias"], rows)
    return place(rows, dim, call.result.shape)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _transposed(walk: Channels, call: Call) -> Any:
    source, weight, groups = call.nodes["input"], call.nodes["weight"], call.values["groups"]
    spatial = call.values["weight"].ndim - 2
    dim = call.values["input"].ndim - spatial - 1
    walk.labels.unite_along(walk.read(source), list(range(dim + 1, dim + 1 + spatial)))
    if groups == 1:
        return contract(walk, call, source, dim, weight, 1, 0, call.nodes["bias"], folds=False)
    found = walk.weight(weight)
    if found is None or found[1] != list(range(spatial + 2)):
        return walk.unknown(call, COMPUTED)
    name = found[0]
    columns, inside = walk.labels_along(source, dim), walk.axis(name, 1, "produces")
    walk.labels.tie(walk.axis(name, 0, "reads"), columns)
    matrix, whole = into_groups(walk, columns, groups)
    each = len(inside)
    if whole:
        walk.labels.freeze(inside, "only whole groups can go")
        outputs = matrix[:, :1].expand(groups, each)
        walk.groups[call.node] = len(columns) // groups
    else:
        outputs = inside.expand(groups, each)
    rows = walk.labels.find(outputs).reshape(-1)
    walk.kinds.append(("channel", rows))
    group = torch.arange(len(columns)) // (len(columns) // groups)
    output = group * each + torch.arange(each)[:, None]
    walk.contractions.append(
        Contraction(
            call.node, source, dim, name, 1, 0, channel=torch.arange(len(columns)).expand(output.shape), output=output,
            inputs=columns.expand(output.shape), outputs=rows[output],
        )
    )  # fmt: skip
    tie_vector(walk, call.nodes["bias"], rows)
    return place(rows, dim, call.result.shape)


def into_groups(walk: Channels, columns: Tensor, groups: int) -> tuple[Tensor, bool]:
    """Return channels as (groups, channels in each), and whether whole groups go.

    Otherwise the same indices in all groups go together.
    """
    matrix = walk.labels.find(columns.view(groups, -1))
    if 0 in varying(matrix):
        return walk.labels.unite_along(matrix, [1]), True
    return matrix, False


@rule("channel_shuffle", "native_channel_shuffle")
def _shuffle(walk: Channels, call: Call) -> Any:
    source = call.operands[0]
    groups = call.values["groups"]
    columns = walk.labels_along(source, 1)
    matrix, whole = into_groups(walk, columns, groups)
    if whole:
        walk.groups[call.node] = len(columns) // groups
    return place(matrix.t().reshape(-1), 1, call.result.shape)


@rule("embedding")
def _embedding(walk: Channels, call: Call) -> Any:
    found = walk.weight(call.nodes["weight"])
    if found is None or found[1] != [0, 1]:
        return walk.unknown(call, COMPUTED)
    walk.labels.freeze(walk.axis(found[0], 0, "produces"), "the data choose among the rows of an embedding")
    walk.kinds.append(("neuron", walk.axis(found[0], 1, "produces")))
    return place(walk.axis(found[0], 1, "produces"), -1, call.result.shape)


@rule("batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm", "instance_norm")
def _per_channel_norm(walk: Channels, call: Call) -> Any:
    source = call.nodes["input"]
    labels = walk.labels_along(source, 1)
    for key in ("weight", "bias", "running_mean", "running_var"):
        tie_vector(walk, call.nodes[key], labels)
    if isinstance(call.result, Tensor):
        return place(labels, 1, call.result.shape)
    return [
        place(labels, 1, part.shape) if part.ndim > 1 else walk.labels.fixed("it is a statistic", part.shape)
        for part in call.result
    ]


@rule("prelu", "_prelu_kernel")
def _prelu(walk: Channels, call: Call) -> Any:
    source, slope = call.operands
    if walk.env[slope].numel() == 1:
        return walk.read(source)
    labels = walk.labels_along(source, 1)
    tie_vector(walk, slope, labels)
    return place(labels, 1, call.result.shape)


@rule("layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm")
def _layer_norm(walk: Channels, call: Call) -> Any:
    source = call.nodes["input"]
    labels = walk.read(source)
    dims = list(range(labels.ndim - len(call.values["normalized_shape"]), labels.ndim))
    if set(dims) & set(varying(labels)):
        walk.labels.freeze(labels, "it feeds a LayerNorm, whose mean runs over all channels")
    for key in ("weight", "bias"):
        if call.nodes.get(key) is not None:
            walk.labels.freeze(
                walk.read(call.nodes[key]), "it belongs to a LayerNorm, whose mean runs over all channels"
            )
    return [labels] if isinstance(call.result, (tuple, list)) else labels


@rule("group_norm", "native_group_norm")
def _group_norm(walk: Channels, call: Call) -> Any:
    source = call.nodes["input"]
    labels = walk.labels_along(source, 1)
    groups = call.values["num_groups"] if "num_groups" in call.values else call.values["group"]
    if isinstance(call.result, Tensor) and groups > 1:  # each group has a mean of its own: whole groups can go
        labels = walk.labels.unite_along(labels.view(groups, -1), [1]).reshape(-1)
    else:
        walk.labels.freeze(labels, "it feeds a GroupNorm, whose mean runs over a group of channels")
    for key in ("weight", "bias"):
        tie_vector(walk, call.nodes[key], labels)
    if not isinstance(call.result, Tensor):
        return [place(labels, 1, call.result[0].shape)] + [
            walk.labels.fixed("it is a statistic", part.shape) for part in call.result[1:]
        ]
    walk.groups[call.node] = len(labels) // groups
    return place(labels, 1, call.result.shape)


@rule("index_add", "index_copy")
def _added_at_indices(walk: Channels, call: Call) -> Any:
    dim = call.values["dim"] % call.result.ndim
    target, source = (walk.labels.unite_along(walk.read(call.nodes[key]), [dim]) for key in ("self", "source"))
    walk.labels.tie(target.narrow(dim, 0, 1), source.narrow(dim, 0, 1))
    return walk.labels.find(target.narrow(dim, 0, 1)).expand(call.result.shape)


@rule("glu")
def _gated(walk: Channels, call: Call) -> Any:
    labels = walk.read(call.nodes["self"])
    first, second = labels.chunk(2, call.values["dim"])
    walk.labels.tie(first, second)
    return first


def _many(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]
