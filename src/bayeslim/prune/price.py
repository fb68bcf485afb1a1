"""The price of a network after a cut: weights, parameters, arithmetic, bytes or seconds. It falls as more is cut.

The arithmetic of a layer is in proportion to the weights it has left. Products between activations (attention scores)
count in full, so that the count is an upper bound.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from bayeslim.attention import ExplicitAttention
from bayeslim.bayesian import Bayesian
from bayeslim.compact import compaction, cost
from bayeslim.compact.example import run_example
from bayeslim.compact.sparse import stored_bytes
from bayeslim.compact.trace import evaluating_copy
from bayeslim.prune.candidates import Candidates
from bayeslim.types import Inputs, Params, device_of, to_device

Price = Callable[[Params], float]
"""The price of a network after cutting by masks."""


def price(goal: str, bnn: Bayesian, candidates: Candidates, example: Inputs) -> Price:
    """Make the function that counts the price of a goal; "sparsity" is weights left."""
    model = bnn.mean_network()
    if goal == "sparsity":
        return lambda masks: float(sum(_count(masks[name]) for name in candidates.weights))
    if goal == "parameters":
        total = sum(p.numel() for p in model.parameters())
        earlier = {name: mask.cpu() for name, mask in bnn.masks.items()}
        return lambda masks: float(total - _cut({**earlier, **masks}))
    if goal == "bytes":
        return _unit_bytes(model) if candidates.graph is not None else _sparse_bytes(model)
    if goal == "flops":
        return _flops(model, example)
    graph = candidates.graph
    return lambda masks: seconds_a_call(compaction(model, masks, example, units=graph).network, example)


def _cut(masks: Params) -> int:
    return sum(mask.numel() - _count(mask) for mask in masks.values())


def _count(mask: Tensor) -> int:
    return int(torch.count_nonzero(mask))  # much faster than the sum of a mask


def _flops(model: nn.Module, example: Inputs) -> Price:
    total = cost(model, example).flops
    each = {n: flops / model.get_parameter(n).numel() for n, flops in flops_by_parameter(model, example).items()}
    return lambda masks: total - sum(each.get(name, 0.0) * _cut({name: mask}) for name, mask in masks.items())


def flops_by_parameter(model: nn.Module, example: Inputs) -> dict[str, float]:
    """Count the additions and multiplications of one call by parameter."""
    network = evaluating_copy(model).cpu()
    attribution = _Attribution({p.untyped_storage().data_ptr(): name for name, p in network.named_parameters()})
    with ExplicitAttention(), attribution:
        run_example(network, to_device(example, "cpu"))
    return attribution.flops


class _Attribution(TorchDispatchMode):
    """Attributes the arithmetic of every product to the parameter whose memory it reads."""

    def __init__(self, owners: dict[int, str]):
        super().__init__()
        self.owners = owners
        self.flops: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        rule = flop_registry.get(func._overloadpacket)
        if func is torch.ops.aten.mkldnn_rnn_layer.default:
            for weight in args[1:3]:  # each is multiplied with the inputs, or the state, of every step
                name = self.owners.get(weight.untyped_storage().data_ptr())
                if name is not None:
                    count = 2 * args[0].shape[:-1].numel() * weight.numel()
                    self.flops[name] = self.flops.get(name, 0.0) + count
        elif rule is not None:
            for tensor in pytree.tree_leaves(args):
                name = self.owners.get(tensor.untyped_storage().data_ptr()) if isinstance(tensor, Tensor) else None
                if name is not None and tensor.ndim > 1:
                    count = rule(*args, **(kwargs or {}), out_val=result)
                    self.flops[name] = self.flops.get(name, 0.0) + count
                    break
        return result


def _sparse_bytes(model: nn.Module) -> Price:
    """Count stored bytes with zeros left out."""
    state = _stored(model)
    return lambda masks: float(stored_bytes({n: t * masks[n] if n in masks else t for n, t in state.items()}))


def _unit_bytes(model: nn.Module) -> Price:
    """Count stored bytes without the cut units; buffers count in full."""
    state = _stored(model)

    def size(masks: Params) -> float:
        counts = {n: _count(masks[n]) if n in masks else t.numel() for n, t in state.items()}
        return float(sum(counts[n] * t.element_size() for n, t in state.items()))

    return size


def _stored(model: nn.Module) -> Params:
    """Collect the tensors of a state dict, tied ones once, under parameter names."""
    state = {name: p.detach().cpu() for name, p in model.named_parameters()}
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return state | {name: t.detach().cpu() for name, t in model.state_dict().items() if name not in known}


def seconds_a_call(model: nn.Module, example: Inputs, at_least: float = 0.2) -> float:
    """Measure the median time of a call in eval mode, of calls for `at_least` seconds."""
    model = model.eval()
    device = device_of(model)
    inputs = to_device(example, device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times: list[float] = []
    with torch.no_grad():
        for _ in range(3):
            run_example(model, inputs)
        while sum(times) < at_least or len(times) < 5:
            wait()
            started = time.perf_counter()
            run_example(model, inputs)
            wait()
            times.append(time.perf_counter() - started)
    return statistics.median(times)
