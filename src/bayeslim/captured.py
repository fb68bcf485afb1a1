"""Networks of particles on a GPU, captured as one graph that is played again in every prediction of the same kind.

A small network is some dozens of kernels of a few microseconds each, and launching them from Python takes several times
as long as they do. A graph is launched in one call, whatever is in it; and where inputs are few, networks stand in it
side by side, or are called at once, whichever is quicker. It reads weights where the particles have them, and inputs
where they were when it was captured, so that these are copied there. Capturing takes as long as some predictions do,
and keeps the memory of one: a kind of inputs is captured when it comes again and again. What a graph gives is first
compared with what the networks give.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from operator import is_, itemgetter
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from bayeslim.methods.mapped import is_same
from bayeslim.posteriors import Particles
from bayeslim.ready import Way
from bayeslim.twins import twins_of
from bayeslim.types import Batches, modules_of

AGAIN = 3
"""The how manieth prediction of a kind is captured."""
KINDS = 32
"""How many kinds of inputs are looked after, of the same particles."""
MOST = 2**20
"""Of how many numbers inputs may be; of more, kernels take longer than calls."""
BRANCHES = 5
"""How many networks stand side by side; each has its own memory, so that it is fewer of many inputs."""
LAUNCHES = 5
"""How often a graph is launched to see how long it takes."""
WORTH = 0.97
"""What a graph may take of the time of calls to be kept, as it keeps memory."""


@dataclass(eq=False, slots=True)
class _Captured:
    """Networks on inputs of one kind.

    Attributes:
        networks: which.
        way: called them for the graph, which reads what tensors it may have of its own.
        graph: launches them.
        inputs: where it reads.
        outputs: where it writes.
    """

    networks: list[nn.Module]
    way: Way
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    outputs: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """The outputs of all networks, (S, N, ...)."""
        self.inputs.copy_(x)
        self.graph.replay()
        return self.outputs.clone()


_kinds: WeakKeyDictionary[Particles, dict[Any, _Captured | int | None]] = WeakKeyDictionary()
"""What was captured, or how many predictions of a kind there were; None where it failed, or gave something else."""


def outputs_captured(
    particles: Particles, chosen: Sequence[int], model: nn.Module, batches: Batches, at_once: Callable[[], Way | None]
) -> Tensor | None:
    """What networks of particles give, (S, N, ...); None if they are to be called, as they are not captured.

    Args:
        particles: the networks.
        chosen: their numbers.
        model: their architecture, unrolled, in evaluation mode.
        batches: the inputs.
        at_once: gives a function that calls all of them at once, if there is one.
    """
    x = next(batches())
    if not isinstance(x, Tensor) or not _can_be_captured(x) or len([*islice(batches(), 2)]) > 1:
        return None
    kinds = _kinds.setdefault(particles, {})
    kind = _kind(x, chosen)
    known = kinds.get(kind, 0)
    if known is None or (known == 0 and len(kinds) >= KINDS):
        return None
    if isinstance(known, int) and known + 1 < AGAIN:
        kinds[kind] = known + 1
        return None
    networks = twins_of(particles, chosen, model, x)
    if networks is None:
        return None
    if isinstance(known, int):
        others = [other.graph for k, other in kinds.items() if isinstance(other, _Captured) and k[:2] == kind[:2]]
        known = kinds[kind] = _quickest(networks, at_once(), x, others[0].pool() if others else None)
    elif not all(map(is_, known.networks, networks)):
        kinds[kind] = 1  # they were changed since, and may go on being
        return None
    return None if known is None else known(x)


def way_captured(particles: Particles, chosen: Sequence[int], x: Tensor) -> Way | None:
    """How all networks that were captured are called on such inputs again; None if they were not, or not all."""
    kind = _kind(x, chosen)
    captured = _kinds[particles][kind]
    if not isinstance(captured, _Captured) or len(chosen) < particles.count:
        return None

    def played_again(x: Tensor) -> Tensor | None:
        return captured(x) if _can_be_captured(x) and _kind(x, chosen) == kind else None

    return played_again


def _kind(x: Tensor, chosen: Sequence[int]) -> tuple[Any, ...]:
    return *_place(x.device), x.shape, x.dtype, tuple(chosen), *_settings()


def _can_be_captured(x: Tensor) -> bool:
    """Not where the same bits are wanted in every prediction: which way is the quickest may change."""
    return x.is_cuda and x.numel() <= MOST and not (_is_deterministic() or torch.cuda.is_current_stream_capturing())


def _is_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() or bool(torch.backends.cudnn.deterministic)


def _place(device: torch.device) -> tuple[torch.device, int]:
    """Where kernels are launched: graphs that are there follow each other, and can have the same memory."""
    return device, torch.cuda.current_stream(device).cuda_stream


def _settings() -> tuple[Any, ...]:
    """What has a say in which kernels are launched."""
    cudnn: Any = torch.backends.cudnn
    return (
        torch.is_inference_mode_enabled(), cudnn.enabled, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision,
        torch.backends.cuda.matmul.fp32_precision,
    )  # fmt: skip


def _quickest(networks: list[nn.Module], at_once: Way | None, x: Tensor, pool: Any) -> _Captured | None:
    """Networks on inputs such as `x`, in the quickest way; None if all fail, do something else, or are no quicker.

    Args:
        networks: as modules.
        at_once: calls all of them, if there is such a function.
        x: the inputs.
        pool: memory of other graphs, if there are any.
    """
    spare = x.clone()  # networks may write to it
    expected = _without_waiting(networks, spare)
    if expected is None:
        return None
    ways: list[Way] = [partial(_side_by_side, networks)]
    if any(isinstance(module, nn.RNNBase) for module in modules_of(networks[0])):
        ways.append(partial(_by_torchs_own, networks))
    if at_once is not None and at_once(spare) is not None:
        ways.append(at_once)
    seconds, way = min(((_seconds_captured(way, x, expected), way) for way in ways), key=itemgetter(0))
    if seconds > WORTH * _seconds_of(partial(_one_by_one, networks), spare):
        return None
    try:
        return _Captured(networks, way, *_graph_of(way, x.clone(), pool))  # those before had memory of their own
    except RuntimeError:
        return None


def _seconds_captured(way: Way, x: Tensor, expected: Tensor) -> float:
    """What a launch takes; no end of time if it cannot be captured, or gives something else than what is expected."""
    try:
        captured = _Captured([], way, *_graph_of(way, x.clone(), None))
    except RuntimeError:  # such as memory that does not suffice
        return math.inf
    agrees = is_same(captured(x), expected) and torch.equal(captured.inputs, x)  # else networks write to their inputs
    return _seconds_of(captured, x) if agrees else math.inf


def _one_by_one(networks: list[nn.Module], inputs: Tensor) -> Tensor:
    return torch.stack([network(inputs) for network in networks])


def _side_by_side(networks: list[nn.Module], inputs: Tensor) -> Tensor:
    """Networks on streams of their own, fewer of many inputs."""
    trunk = torch.cuda.current_stream()
    beside = min(BRANCHES, len(networks), MOST // max(inputs.numel(), 1))
    branches = _branches(inputs.device)[:beside] if beside > 1 else []
    for branch in branches:
        branch.wait_stream(trunk)
    outputs = []
    try:
        for k, network in enumerate(networks):
            with torch.cuda.stream(branches[k % beside] if branches else trunk):
                outputs.append(network(inputs))
    finally:
        for branch in branches:
            trunk.wait_stream(branch)
    return torch.stack(outputs)


@cache
def _branches(device: torch.device) -> list[torch.cuda.Stream]:
    """The same streams in all graphs: cuBLAS has memory for each that it was ever called on."""
    return [torch.cuda.Stream(device) for _ in range(BRANCHES)]


def _by_torchs_own(networks: list[nn.Module], inputs: Tensor) -> Tensor:
    """The same without cuDNN: torch's own recurrent layers are many kernels, which are launched at no cost here.

    The setting is that of the whole process.
    """
    enabled = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        return _side_by_side(networks, inputs)
    finally:
        torch.backends.cudnn.enabled = enabled


def _without_waiting(networks: list[nn.Module], inputs: Tensor) -> Tensor | None:
    """What networks give, (S, N, ...); None if one looks at numbers, which are not there in a capture.

    A capture that fails for this would leave torch's random numbers of no use.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            outputs = _one_by_one(networks, inputs)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return None if any("called a synchronizing" in str(warning.message) for warning in said) else outputs


def _seconds_of(call: Way, x: Tensor) -> float:
    """What a call takes at least."""
    seconds = []
    for _ in range(LAUNCHES):
        torch.cuda.synchronize(x.device)
        started = perf_counter()
        call(x)
        torch.cuda.synchronize(x.device)
        seconds.append(perf_counter() - started)
    return min(seconds)


def _graph_of(way: Way, inputs: Tensor, pool: Any) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
    """A graph, where it reads, and where it writes, (S, N, ...)."""
    stream = torch.cuda.current_stream(inputs.device)
    graph = torch.cuda.CUDAGraph()
    try:
        with (
            torch.cuda.device(inputs.device),
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),  # other threads may go on
        ):
            outputs = way(inputs)
    finally:
        torch.cuda.set_stream(stream)  # a capture that fails may leave another
        torch._C._cuda_clearCublasWorkspaces()  # else what cuBLAS had in the capture outlives the graph
    assert outputs is not None
    return graph, inputs, outputs
