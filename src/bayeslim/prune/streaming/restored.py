"""The restored curvature: every layer is fitted to the outputs of the dense network.

A layer after the first cut reads other inputs a than in the dense network, and what it adds its outputs to has changed
too. With y the layer's outputs in the dense network, s the residual stream that they are added to there, and s' that
stream in the cut network, the layer solves

    min  mean ‖V a − (y + s − s')‖² + δ ‖V − W‖²,   V zero where it is cut,

so that it makes up for earlier cuts as far as its inputs allow. A layer whose outputs are not added to a stream of the
same shape, or are transposed before, has s = s'. In x + (attention + mlp), s of the attention is x + mlp. Without the
mask the minimum is V₀ = (B + δ W) (A + δ I)⁻¹, B = mean (y + s − s') aᵀ; the cut is that of V₀ by the local curvature.
For the correction to see the cuts of its own block, layers are cut in the order in which they run; those that read the
same tensor together.

The dense network runs beside the cut one, block after block, so that twice the outputs of a block are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bayeslim.curvature.layers import ConvolutionLayer, MatrixLayer
from bayeslim.curvature.padding import without_padding
from bayeslim.curvature.sweep import examples_at_once, sum_over_processes
from bayeslim.errors import UnsupportedModel

ADDITIONS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})


class _Additions(TorchFunctionMode):
    """Follows the outputs of layers through additions, in this thread.

    In `x + (attention + mlp)` the stream of the attention is `mlp + x`. A sum is followed until another operation reads
    it: what is added later may depend on the output.
    """

    def __init__(self, watched: Watched):
        super().__init__()
        self.watched = watched

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        followed = [(call, tensor) for tensor in read for call in self.watched.returning(tensor)]
        if not followed:
            return func(*args, **kwargs)
        is_sum = getattr(func, "__name__", "") in ADDITIONS and len(args) == 2 and not kwargs
        if is_sum and len(read) == 2 and read[0].shape == read[1].shape:
            # copies: an addition in place changes its first tensor
            added = [(call, read[tensor is read[0]].clone()) for call, tensor in followed]
            result = func(*args)
            for call, other in added:
                call.add(other, result)
                self.watched.follow(call, result)
            return result
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                for call, tensor in followed:
                    if call.stream is not None and leaf.data_ptr() != tensor.data_ptr():
                        call.returned = None
        return result


@dataclass(eq=False)
class Call:
    """One call of a layer; the tensors are copies, which nothing can change in place.

    Attributes:
        input: of the layer.
        output: of the layer.
        stream: the sum of the tensors that the output was added to, if there were any.
        returned: the output itself or the last sum with it, to tell it from others; None if that was read otherwise.
        version: of that tensor when it was returned.
    """

    input: Tensor
    output: Tensor
    returned: Tensor | None
    version: int
    stream: Tensor | None = None

    def is_unchanged(self, other: Tensor) -> bool:
        """Whether a tensor is the output or the sum as returned, perhaps reshaped."""
        mine = self.returned
        return (
            mine is not None
            and other.numel() == mine.numel()
            and other._version == self.version
            and other.data_ptr() == mine.data_ptr()
            and ((other.is_contiguous() and mine.is_contiguous()) or other.stride() == mine.stride())
        )

    def add(self, other: Tensor, total: Tensor) -> None:
        """Note that another tensor was added to the output, which gave a sum."""
        other = other.reshape(self.output.shape)
        self.stream = other if self.stream is None else self.stream + other
        self.returned, self.version = total, total._version


class Watched:
    """The calls of some layers in a pass: inputs, outputs, and what the outputs are added to.

    Args:
        modules: the layers, by name.

    Attributes:
        calls: by layer, in order.
    """

    def __init__(self, modules: Mapping[str, nn.Module]):
        self.modules = modules
        self.calls: dict[str, list[Call]] = {}
        self._stack = ExitStack()
        self.clear()

    def clear(self) -> None:
        """Let go of the tensors of a batch."""
        self.calls = {name: [] for name in self.modules}
        self._returned: dict[int, dict[int, list[Call]]] = {}

    def follow(self, call: Call, returned: Tensor) -> None:
        """Make a call known by the size and the place of the tensor that it returned."""
        places = self._returned.setdefault(returned.numel(), {})
        # a sum in place stays where it is, and memory that another call has let go of may be taken again
        others = [other for other in places.get(returned.data_ptr(), []) if other.is_unchanged(returned)]
        places[returned.data_ptr()] = [other for other in others if other is not call] + [call]

    def returning(self, tensor: Tensor) -> list[Call]:
        """Find the calls that returned a tensor."""
        places = self._returned.get(tensor.numel())
        return [call for call in places.get(tensor.data_ptr(), []) if call.is_unchanged(tensor)] if places else []

    def __enter__(self) -> Self:
        for name, module in self.modules.items():
            handle = module.register_forward_hook(self._hook(name), prepend=True, with_kwargs=True)
            self._stack.callback(handle.remove)
        self._stack.enter_context(_Additions(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            given = args[0] if args else next(iter(kwargs.values()))
            call = Call(given.clone(), output.clone(), output, output._version)
            self.calls[name].append(call)
            self.follow(call, output)

        return hook


class Targets:
    """The sums B of some layers.

    Args:
        views: the layers as matrices, by name.
    """

    def __init__(self, views: Mapping[str, MatrixLayer]):
        self.views = views
        self.sums = {
            name: torch.zeros(
                (view.groups, view.rows, view.columns + 1), dtype=torch.float64, device=view.module.weight.device
            )
            for name, view in views.items()
        }
        self.count = dict.fromkeys(views, 0)

    def add(self, dense: Watched, cut: Watched, real: Tensor | None = None) -> None:
        """Add the calls of one batch in the dense and in the cut network.

        Of linear layers, only the `real` positions count if they are given.
        """
        for name, view in self.views.items():
            calls = dense.calls[name], cut.calls[name]
            if [call.input.shape for call in calls[0]] != [call.input.shape for call in calls[1]]:
                raise UnsupportedModel(
                    f'"{name}" reads other positions in the cut network than in the dense one, as an expert does that '
                    'a router chooses, so that its outputs cannot be restored. Use curvature="local".'
                )
            for original, own in zip(*calls, strict=True):
                wanted = original.output.double()
                if original.stream is not None and own.stream is not None:
                    wanted = wanted + (original.stream.double() - own.stream.double())
                given = own.input
                if not isinstance(view, ConvolutionLayer):
                    wanted, given = without_padding(wanted, real), without_padding(given, real)
                self._add(name, view, wanted, given)

    def _add(self, name: str, view: MatrixLayer, wanted: Tensor, x: Tensor) -> None:
        if not view.batched(x):
            x, wanted = x.unsqueeze(0), wanted.unsqueeze(0)
        step = examples_at_once(view.feature_bytes(x, wanted.shape), x.device)
        for start in range(0, x.shape[0], step):
            part = wanted[start : start + step]
            rows = view.gradients(part).flatten(0, 1).transpose(0, 1)  # (groups, n, rows)
            features = view.features(x[start : start + step], part.shape).flatten(0, 1).transpose(0, 1)
            self.sums[name][:, :, :-1].baddbmm_(rows.mT, features.double())
            self.sums[name][:, :, -1] += rows.sum(1)
            self.count[name] += rows.shape[1]

    def means(self) -> dict[str, Tensor]:
        """Average over the positions of all processes, (groups, outputs, inputs and 1)."""
        found = {}
        for name, total in self.sums.items():
            count = torch.tensor(float(self.count[name]), dtype=torch.float64)
            sum_over_processes(total, count)
            order = self.views[name].order
            if order is not None:
                total = torch.cat([total[:, :, order], total[:, :, -1:]], 2)
            found[name] = total / float(count)
        return found


def allocation(
    quantiles: Mapping[str, Tensor], sizes: Mapping[str, int], sparsity: float, floor: float
) -> dict[str, float]:
    """Share a sparsity out between layers by their scores.

    One threshold for all scores would give each layer its own sparsity. Scores are costs of single weights, which grow
    as more of a layer goes, so that a layer takes the mean of that sparsity and of the network's.

    Args:
        quantiles: of each layer's scores, ascending, at even steps from 0 to 1.
        sizes: the number of weights of each layer.
        sparsity: of all layers together.
        floor: a layer keeps this fraction of 1 − sparsity in the first of the two terms.
    """
    most = 1 - floor * (1 - sparsity)
    total = sum(sizes.values())
    candidates = torch.cat(list(quantiles.values())).sort().values

    def at(place: int) -> dict[str, float]:
        threshold = candidates[place]
        return {
            name: min(most, max(0.0, float(torch.searchsorted(values, threshold)) - 1) / (len(values) - 1))
            for name, values in quantiles.items()
        }

    def total_of(shares: Mapping[str, float]) -> float:
        return sum(share * sizes[name] for name, share in shares.items()) / total

    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if total_of(at(middle)) < sparsity else (low, middle)
    below, above = at(max(low - 1, 0)), at(low)
    step = total_of(above) - total_of(below)
    # many equal scores, as those of dead units, pass the threshold at once: some of them go
    part = min(1.0, (sparsity - total_of(below)) / step) if step > 0 else 1.0
    shares = {name: share + part * (above[name] - share) for name, share in below.items()}
    mean = total_of(shares)
    return {name: sparsity + (share - mean) / 2 for name, share in shares.items()}
