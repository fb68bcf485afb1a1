"""The comparison of two networks on several inputs.

It runs in double precision where the networks do, so that rounding cannot hide a fault. Where the result rests on
constants of the trace, the networks are also compared on the other paths of the network, which symbolic sizes show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from bayeslim.compact.example import rows_of, run_example, tensors_in
from bayeslim.compact.guards import Guard, all_hold, resized_to, sizes_of
from bayeslim.compact.paths import Path, path_at, paths_beyond
from bayeslim.compact.trace import Trace, quiet_copy
from bayeslim.errors import ShapeMismatch, UnsupportedModel, check_number
from bayeslim.types import Inputs, device_of, to_device, with_batch_size

_RELATIVE_ROUNDING = {torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 5e-2}

MAX_TRIED_SIZE = 2048
"""The largest size that `torch.export` excludes at which a graph is compared with its network."""

MAX_FOLDED_ROUNDINGS = 16
"""The number of roundings of a folded constant by which outputs may differ: later layers add several up."""


@dataclass(frozen=True)
class Proof:
    """How far a network is from its reference.

    Attributes:
        difference: the largest difference between their outputs, relative to the largest output; infinite if it fails.
        holds: whether that is within the tolerance.
    """

    difference: float
    holds: bool


class Reference:
    """The outputs that another network has to give.

    Args:
        network: the reference, in eval mode.
        example: inputs.
        tolerance: the relative difference allowed; where double precision is not possible, rounding comes on top.

    Raises:
        UnsupportedModel: if the network does not repeat itself, or gives no finite output.
    """

    def __init__(self, network: nn.Module, example: Inputs, tolerance: float):
        check_number("tolerance", tolerance, least=0)
        self.tolerance = tolerance
        self._folded = 0.0
        self._network = network
        example = to_device(example, device_of(network))
        first, second = (tensors_in(run_example(network, example)) for _ in range(2))
        _check(network, first, second)
        self._noise, larger = _like(example)
        self._inputs = [example, larger]
        self._answers: dict[bool, list[list[Tensor] | None]] = {}
        self._taken: dict[str, list[Inputs] | None] = {}

    def allow_folded(self, dtype: torch.dtype) -> None:
        """Allow for the rounding of constants that were folded into biases of a dtype."""
        self._folded = max(
            self._folded, min(MAX_FOLDED_ROUNDINGS * torch.finfo(dtype).eps, _RELATIVE_ROUNDING.get(dtype, 1e-9))
        )

    def compare(self, network: nn.Module) -> Proof:
        """Compare another network, in double precision if both run in it."""
        for double in (True, False):
            try:
                expected = self._answer(double)
                candidate = _in_double(network) if double else network
                pairs = [
                    (answer, tensors_in(run_example(candidate, _cast(inputs, double))))
                    for inputs, answer in zip(self._inputs, expected, strict=True)
                    if answer is not None
                ]
            except ShapeMismatch:
                continue
            worst = max(_relative(*pair) for pair in pairs)
            rounding = max(_rounding(answer) for answer, _ in pairs)
            return Proof(worst, worst <= self.tolerance + max(self._folded, rounding))
        return Proof(float("inf"), False)

    def agrees_elsewhere(self, network: nn.Module, trace: Trace) -> bool:
        """Return whether another network agrees on the other branches.

        These are the branches of the reference's own code. That is enough if the networks are equal at all inputs that
        take the path of the trace.

        Args:
            network: the other network.
            trace: the trace in which they are equal.
        """
        if "elsewhere" not in self._taken:
            self._taken["elsewhere"] = _taken_elsewhere(quiet_copy(self._network).cpu(), trace)
        return self._agrees_at(network, self._taken["elsewhere"])

    def agrees_beyond(self, network: nn.Module, trace: Trace) -> bool:
        """Return whether another network agrees on all inputs that violate a guard.

        That is so where the reference itself refuses such inputs, or runs the same operations.

        Args:
            network: the other network.
            trace: the trace in which constants were found.
        """
        if "beyond" not in self._taken:
            self._taken["beyond"] = _taken_beyond(quiet_copy(self._network).cpu(), trace)
        return self._agrees_at(network, self._taken["beyond"])

    def _agrees_at(self, network: nn.Module, taken: list[Inputs] | None) -> bool:
        if taken is None:
            return False
        reference, other = (quiet_copy(one).cpu() for one in (self._network, network))
        return all(_agree(reference, other, inputs, self.tolerance + self._folded) for inputs in taken)

    def needed_guards(self, network: nn.Module, trace: Trace) -> list[Guard]:
        """List the guards that a network needs; see `needed_guards`."""
        reference, graph = (quiet_copy(one).cpu() for one in (self._network, network))
        return needed_guards(trace.guards, reference, graph, trace.example)

    def _answer(self, double: bool) -> list[list[Tensor] | None]:
        """Run the reference on all inputs; None stands for failures."""
        if double not in self._answers:
            network = _in_double(self._network) if double else self._network
            answers = [_finite_outputs(network, _cast(inputs, double)) for inputs in self._inputs]
            if answers[1] is None:  # the network takes no larger batch
                self._inputs[1] = self._noise
                answers[1] = _finite_outputs(network, _cast(self._noise, double))
            if answers[0] is None:
                raise ShapeMismatch(f"{type(network).__name__} does not run on the example in double precision.")
            self._answers[double] = answers
        return self._answers[double]


def needed_guards(guards: Sequence[Guard], network: nn.Module, graph: nn.Module, example: Inputs) -> list[Guard]:
    """List the guards, without those that exclude a size at which the graph agrees.

    `torch.export` excludes sizes even where the operations do not differ; see `Guard.excluded`.

    Args:
        guards: the guards.
        network: the network that was traced, on the CPU.
        graph: its graph.
        example: the inputs that it was traced on.
    """
    doubtful = [guard for guard in guards if guard.excluded is not None and guard.excluded <= MAX_TRIED_SIZE]
    certain = [guard for guard in guards if guard not in doubtful]
    usual = path_at(quiet_copy(network), example)
    if usual is None:
        return list(guards)
    tried = [
        (inputs, usual)
        for inputs in _with_excluded_sizes(doubtful, example)
        if all_hold((*certain, *usual.decisions), pytree.tree_leaves(inputs))
    ]
    needed: set[Guard] = set()
    for inputs, path in (
        *tried, *paths_beyond(network, [usual.decisions], example, within=certain, by_decisions=True)
    ):  # fmt: skip
        if path is None:
            return list(guards)
        leaves = pytree.tree_leaves(inputs)
        is_refused = not all_hold((*certain, *needed), leaves)
        agrees = not path.fails and _same(path, usual, inputs) and _agree(network, graph, inputs, 0.0)
        if not is_refused and not agrees:
            needed |= {guard for guard in doubtful if not guard.holds(leaves)}
    return [guard for guard in guards if guard not in doubtful or guard in needed]


def _taken_elsewhere(network: nn.Module, trace: Trace) -> list[Inputs]:
    """List inputs of each path on which a network's own code branches otherwise.

    Another path that depends on values is tried at one input. If that of the trace does, no other is looked for.
    """
    usual = path_at(quiet_copy(network), trace.example)
    if usual is None:
        return []
    sizes = sizes_of(trace.inputs)
    given = [guard for guard in usual.decisions if not guard.can_be_violated(sizes)]  # such as a missing mask
    others = paths_beyond(network, [usual.decisions], trace.example, within=given, by_decisions=True)
    return [inputs for inputs, path in others if path is None or not path.fails]


def _taken_beyond(network: nn.Module, trace: Trace) -> list[Inputs] | None:
    """List inputs of each path beyond the guards of a trace.

    It is None if some path has other operations, or is not known.
    """
    usual = path_at(quiet_copy(network), trace.example)
    if usual is None:
        return None
    # Sizes of one are tried, not followed: each doubles the number of paths.
    ones = [guard for guard in (*trace.guards, *usual.guards) if guard.excludes_size_one]
    found = list(_with_excluded_sizes([guard for guard in trace.guards if guard.excludes_size_one], trace.example))
    for inputs, path in paths_beyond(network, [trace.guards, usual.guards], trace.example, within=ones):
        if path is None or not (path.fails or _same(path, usual, inputs)):
            return None
        found += [] if path.fails else [inputs]
    return found


def _same(path: Path, other: Path, inputs: Inputs) -> bool:
    """Return whether two paths make the same calls at some inputs."""
    leaves = pytree.tree_leaves(inputs)
    return path.calls_at(leaves) == other.calls_at(leaves)


def _with_excluded_sizes(guards: Sequence[Guard], example: Inputs) -> Iterator[Inputs]:
    """Make inputs of the sizes that guards exclude.

    Each size is taken alone, then all the smallest together, and all the largest.
    """
    leaves, spec = pytree.tree_flatten(example)
    pairs = [(guard.excluded, guard.sizes()[0]) for guard in guards if guard.excluded is not None]
    excluded = sorted(pairs, key=lambda pair: pair[0])
    for chosen in (*([one] for one in excluded), excluded[::-1], excluded):
        sizes = sizes_of(leaves)
        for number, size in chosen:
            sizes[size.leaf] = sizes[size.leaf].with_size(size.dim, number)
        yield pytree.tree_unflatten([resized_to(leaf, new) for leaf, new in zip(leaves, sizes, strict=True)], spec)


def _agree(network: nn.Module, other: nn.Module, inputs: Inputs, tolerance: float) -> bool:
    expected = _finite_outputs(network, inputs)
    if expected is None:
        return True
    actual = _finite_outputs(other, inputs)
    return actual is not None and _relative(expected, actual) <= tolerance + _rounding(expected)


def _finite_outputs(network: nn.Module, inputs: Inputs) -> list[Tensor] | None:
    """Run a network; return None if it fails, or gives values that are not finite."""
    try:
        outputs = tensors_in(run_example(network, inputs))
    except ShapeMismatch:
        return None
    return outputs if all(bool(x.isfinite().all()) for x in outputs) else None


def _check(network: nn.Module, first: list[Tensor], second: list[Tensor]) -> None:
    if not all(bool(torch.isfinite(x).all()) for x in first):
        raise UnsupportedModel(
            f"{type(network).__name__} gives infinite or NaN outputs on the example, so a smaller network cannot be "
            "compared with it. Pass an example with finite outputs."
        )
    if _relative(first, second) > _rounding(first):  # a GPU may sum in any order
        raise UnsupportedModel(
            f"{type(network).__name__} gives different outputs for the same input in eval mode, so a smaller network "
            "cannot be compared with it. Make its forward deterministic in eval mode."
        )


def _rounding(answer: list[Tensor]) -> float:
    return max((_RELATIVE_ROUNDING.get(x.dtype, 1e-9) for x in answer), default=0.0)


def _like(example: Inputs) -> tuple[Inputs, Inputs]:
    """Make noise like the example, with integers permuted, and as a larger batch."""
    generator = torch.Generator().manual_seed(0)

    def randomise(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype == torch.bool or not x.numel():
            return x
        if not x.is_floating_point():
            return x.flatten()[torch.randperm(x.numel(), generator=generator).to(x.device)].view(x.shape)
        scale = x.float().std(correction=0).clamp(min=0.1)
        noise = torch.randn(x.shape, generator=generator).to(x.device)
        return (x.float().mean() + 1.5 * scale * noise).to(x.dtype)

    larger = with_batch_size(example, rows_of(example) + 1)
    return pytree.tree_map(randomise, example), pytree.tree_map(randomise, larger)


def _in_double(network: nn.Module) -> nn.Module:
    """Copy a network to double precision, with the dtypes that its graph names."""
    found = quiet_copy(network).double()
    for module in found.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                node.args = fx.node.map_aggregate(node.args, _doubled)
                node.kwargs = fx.node.map_aggregate(node.kwargs, _doubled)
            module.recompile()
    return found


def _doubled(argument: Any) -> Any:
    is_float = isinstance(argument, torch.dtype) and argument.is_floating_point
    return torch.float64 if is_float else argument


def _cast(inputs: Inputs, double: bool) -> Inputs:
    return pytree.tree_map(
        lambda x: x.double() if double and torch.is_tensor(x) and x.is_floating_point() else x, inputs
    )


def _relative(expected: list[Tensor], actual: list[Tensor]) -> float:
    if [x.shape for x in expected] != [x.shape for x in actual]:
        return float("inf")
    worst = 0.0
    for a, b in zip(expected, actual, strict=True):
        finite = torch.isfinite(a)
        if not torch.equal(finite, torch.isfinite(b)):
            return float("inf")
        gap, scale = (a[finite].double() - b[finite].double()).abs(), a[finite].double().abs()
        if gap.numel():
            worst = max(worst, float(gap.max()) / max(float(scale.max()), 1e-12))
    return worst
