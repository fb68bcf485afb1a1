"""Rules for products of activations (attention) and for recurrent layers.

In softmax(q kᵀ / √d) v a head is a batch dimension of both products, so the parts of q, k and v that belong to one
head go together. Without heads, the dimensions of q and k that are multiplied with each other go together, and those
of v on their own.

In an LSTM or GRU a unit is a row of every gate, in every layer and in both directions, because the kernels take one
size for all of them. With projections, the projected outputs are units of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from bayeslim.compact.channels import Channels, Contraction, Product, rule
from bayeslim.compact.contraction import COMPUTED, contract, place
from bayeslim.compact.labels import varying
from bayeslim.compact.ops import MOVEMENT, Call
from bayeslim.compact.trace import op_name


@rule("matmul", "mm", "bmm")
def _matmul(walk: Channels, call: Call) -> Any:
    left, right = call.node.args[0], call.node.args[1]
    return _product(walk, call, left, right)


@rule("addmm", "baddbmm")
def _matmul_with_bias(walk: Channels, call: Call) -> Any:
    bias, left, right = call.node.args[:3]
    labels = _product(walk, call, left, right)
    walk.of[call.node] = labels
    return walk.combine([call.node, bias], call.result.shape)  # type: ignore[list-item]


def _product(walk: Channels, call: Call, left: Any, right: Any) -> Any:
    if _is_matrix(walk, right):
        return contract(walk, call, left, -1, right, -1, -2, None, folds=False)
    if _is_matrix(walk, left):
        return contract(walk, call, right, -2, left, -2, -1, None, folds=False)
    if walk.env[left].ndim < 2 or walk.env[right].ndim < 2:
        return walk.unknown(call, "it is multiplied by a vector")
    rank = call.result.ndim
    a, b = (labels[(None,) * (rank - labels.ndim)] for labels in (walk.read(left), walk.read(right)))
    if any(dim < rank - 2 for dim in varying(a) + varying(b)):
        a, b = (walk.labels.unite_along(labels, [rank - 2, rank - 1]) for labels in (a, b))
        return _share_batch(walk, [a, b]).expand(call.result.shape)
    if rank - 1 in varying(a) or rank - 2 in varying(b):
        a, b = walk.labels.unite_along(a, [rank - 2]), walk.labels.unite_along(b, [rank - 1])
        return _over_channels(walk, call, (left, right), (-1, -2), a.select(-2, 0), b.select(-1, 0))
    if varying(a) and varying(b):
        for labels in (a, b):
            walk.labels.freeze(labels, "it is multiplied with every channel of another tensor")
        return walk.labels.fixed("it is a product of all channels with all channels", call.result.shape)
    return (a.narrow(-1, 0, 1) if varying(a) else b.narrow(-2, 0, 1)).expand(call.result.shape)


def _is_matrix(walk: Channels, node: Any) -> bool:
    """Return whether a node is a parameter used as a matrix."""
    found = walk.weight(node)
    return (
        found is not None and len(found[1]) >= 2 and all(dim < 0 for dim in found[1][:-2]) and min(found[1][-2:]) >= 0
    )


def _over_channels(
    walk: Channels, call: Call, nodes: tuple[fx.Node, fx.Node], dims: tuple[int, int], a: Tensor, b: Tensor
) -> Tensor:
    """Tie the channels of two activations that Σ_k a_k b_k sums over."""
    walk.labels.tie(a, b)
    labels = walk.labels.find(a)
    line = labels.reshape(-1, labels.shape[-1])[0]
    walk.products.append(Product(call.node, nodes, dims, line))
    return walk.labels.fixed("it is a sum over channels", call.result.shape)


def _share_batch(walk: Channels, operands: list[Tensor]) -> Tensor:
    """Tie operands along batch dimensions, except those that are broadcast there."""
    dims = {dim for labels in operands for dim in varying(labels)}
    tied = [labels for labels in operands if all(labels.shape[dim] > 1 for dim in dims)]
    for labels in operands:
        if any(labels.shape[dim] > 1 for dim in dims) and not any(labels is other for other in tied):
            walk.labels.unite_along(labels, list(dims))
    for labels in tied:
        walk.labels.tie(tied[0].narrow(-1, 0, 1).narrow(-2, 0, 1), labels.narrow(-1, 0, 1).narrow(-2, 0, 1))
    walk.kinds.append(("head", tied[0]))
    return walk.labels.find(tied[0].narrow(-1, 0, 1).narrow(-2, 0, 1))


@rule("scaled_dot_product_attention")
def _attention(walk: Channels, call: Call) -> Any:
    q, k, v = (walk.read(call.nodes[key]) for key in ("query", "key", "value"))
    rank = q.ndim
    mask = call.nodes["attn_mask"]
    if any(dim < rank - 2 for dim in varying(q) + varying(k) + varying(v)):
        q, k, v = (walk.labels.unite_along(labels, [rank - 2, rank - 1]) for labels in (q, k, v))
        if q.shape[-3] != k.shape[-3]:  # several heads of q share one of k and v
            shared = q.shape[-3] // k.shape[-3]
            walk.labels.unite_along(q.unflatten(-3, (k.shape[-3], shared)), [rank - 3 + 1])
            k, v = (labels.repeat_interleave(shared, -3) for labels in (k, v))
        operands = [q, k, v]
        if mask is not None:
            labels = walk.labels.unite_along(walk.read(mask), [-1 % walk.env[mask].ndim, -2 % walk.env[mask].ndim])
            operands.append(labels[(None,) * (rank - labels.ndim)])
        return _share_batch(walk, operands).expand(call.result.shape)
    q, k = (walk.labels.unite_along(labels, [rank - 2]) for labels in (q, k))
    if varying(q) or varying(k):
        _over_channels(walk, call, (call.nodes["query"], call.nodes["key"]), (-1, -1), q.select(-2, 0), k.select(-2, 0))
    v = walk.labels.unite_along(v, [rank - 2])
    return v.narrow(-2, 0, 1).expand(call.result.shape)


@rule("expand")
def _expanded(walk: Channels, call: Call) -> Any:
    """Give each head its own copy of a mask that all heads share."""
    source, shape = call.nodes["self"], call.result.shape
    if source not in walk.of or not _is_mask(call.node):
        return walk.moved(call)
    labels = walk.read(source)
    grown = [dim for dim, size in enumerate(labels[(None,) * (len(shape) - labels.ndim)].shape) if size < shape[dim]]
    if len(grown) != 1 or grown[0] == 0 or not walk.labels.all_frozen(labels):
        return walk.moved(call)
    walk.copied.add(call.node)
    return place(walk.labels.mint(shape[grown[0]]), grown[0], shape)


def _is_mask(node: fx.Node) -> bool:
    """Return whether attention reads a node as its mask."""
    for user in node.users:
        name = op_name(user)
        if name == "scaled_dot_product_attention" and node in (*user.args[3:4], user.kwargs.get("attn_mask")):
            return True
        if (name in MOVEMENT or name in ("clone", "add")) and _is_mask(user):
            return True
    return False


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def _recurrent(walk: Channels, call: Call) -> Any:
    source = call.nodes["input" if "input" in call.nodes else "data"]
    directions = 2 if call.values["bidirectional"] else 1
    weights = [walk.weight(node) for node in call.nodes["params"]]
    each = len(weights) // (call.values["num_layers"] * directions)
    if any(found is None for found in weights):
        return walk.unknown(call, COMPUTED)
    names = [found[0] for found in weights if found is not None]
    projected = each in (3, 5)  # a matrix that projects the hidden state, besides those of the gates
    hidden = call.values["params"][each - 1 if projected else 1].shape[1]
    units = walk.labels.mint(hidden)
    outputs = walk.labels.mint(call.values["params"][1].shape[1]) if projected else units
    for labels in (units, outputs):
        walk.kinds.append(("recurrent unit", labels))
    columns = walk.labels_along(source, -1)
    for start in range(0, len(names), each):
        first = start < each * directions
        below = columns if first else outputs.repeat(directions)
        _gates(walk, call, names[start : start + each], units, outputs, (source if first else None, below))
    states = call.nodes["hx"]
    states = list(states) if isinstance(states, (tuple, list)) else [states]
    for state, labels in zip(states, (outputs, units), strict=False):
        walk.labels.tie(walk.labels_along(state, -1), labels)
    out, *last = call.result
    return [place(outputs.repeat(directions), -1, out.shape)] + [
        place(labels, -1, part.shape) for part, labels in zip(last, (outputs, units), strict=False)
    ]


@rule("_pack_padded_sequence", "_pad_packed_sequence")
def _packing(walk: Channels, call: Call) -> Any:
    """Keep the features of sequences whose rows are packed or padded."""
    source = call.nodes["input" if "input" in call.nodes else "data"]
    if walk.env[source].ndim < (3 if "input" in call.nodes else 2):
        return walk.unknown(call, "it is packed without a feature dimension")
    sequence, counts = call.result
    kept = place(walk.labels_along(source, -1), -1, sequence.shape)
    return [kept, walk.labels.fixed("it counts the rows of a packed sequence", counts.shape)]


def _gates(
    walk: Channels,
    call: Call,
    names: list[str],
    units: Tensor,
    outputs: Tensor,
    below: tuple[fx.Node | None, Tensor],
) -> None:
    """Tie the weights and biases of one layer in one direction."""
    projected = len(names) in (3, 5)
    gates = walk.axis(names[0], 0, "produces").numel() // len(units)
    rows = units.repeat(gates)
    for name in names[:-1] if projected else names:
        walk.labels.tie(walk.axis(name, 0, "produces"), rows)
    connections = [(names[0], rows, below[1], below[0]), (names[1], rows, outputs, None)]
    if projected:
        walk.labels.tie(walk.axis(names[-1], 0, "produces"), outputs)
        connections.append((names[-1], outputs, units, None))
    for name, produced, read, source in connections:
        walk.labels.tie(walk.axis(name, 1, "reads"), read)
        shape = (len(produced), len(read))
        walk.contractions.append(
            Contraction(
                call.node, source, -1, name, 0, 1, _count(shape, 1), _count(shape, 0),
                inputs=read.expand(shape), outputs=produced[:, None].expand(shape),
            )
        )  # fmt: skip


def _count(shape: tuple[int, int], dim: int) -> Tensor:
    return torch.arange(shape[dim]).view([-1 if d == dim else 1 for d in range(2)]).expand(shape)
