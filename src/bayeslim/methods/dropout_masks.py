"""Dropout at test time, in a network that is otherwise in evaluation mode, with masks for all inputs or for each.

Modules that drop out (`nn.Dropout` and its kin, recurrent layers and attention with a dropout of their own) are put in
training mode, and functional dropout that is told not to (`F.dropout(x, p, self.training)`) is told to. What a module
hides from it stays off, such as a `dropout_p` that it sets to zero outside of training.

A mask that is drawn for all inputs at once makes the outputs those of one network: it is the same for every example,
and drawn again from the same seed for every batch. All of torch's dropout draws its masks by `bernoulli_` or is one
kernel, `native_dropout`, except inside cuDNN's recurrent layers: there, every example has a mask of its own.

Which dimension of a mask the examples are in is seen, not guessed: the network first runs once with one example more,
and that dimension is the one that grows in proportion. Where several rows of it belong to an example, as heads of
attention do, they are taken to be next to each other. A mask that does not grow, such as that of a weight, is drawn
whole, and so are all masks where the network does not take one more (the adjacency of a graph has a row and a column
for each), or takes packed sequences.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bayeslim.compact.example import with_batch_size
from bayeslim.noise import current_generator
from bayeslim.samplers.run import seed_of_chain
from bayeslim.stochastic import own_layers
from bayeslim.types import Inputs, arguments, batch_size, call, device_of

FUNCTIONS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)


def drops_out(module: nn.Module) -> bool:
    """Whether a module of torch's drops something out in training mode."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    return isinstance(module, nn.MultiheadAttention) and module.dropout > 0


def mentions_dropout(module: nn.Module) -> bool:
    """Whether the forward of a module that is not torch's calls something named after dropout."""
    code = getattr(type(module).forward, "__code__", None)
    own = not type(module).__module__.startswith("torch.")
    return own and code is not None and any("dropout" in name.lower() for name in code.co_names)


class Always(TorchFunctionMode):
    """Functional dropout that is told not to drop out does so all the same; `seen` says whether there was any."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called for every function of torch."""
        kwargs = kwargs or {}
        if func in FUNCTIONS and kwargs.get("p", 0.5) > 0:
            self.seen = True
            kwargs = {**kwargs, "training": True}
        return func(*args, **kwargs)


class Masks(TorchDispatchMode):
    """Says what the masks of all dropout are."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called for every operation."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.bernoulli_.float and kwargs.get("generator") is None:
            mask: Tensor = args[0]
            return mask.copy_(self.mask(mask, args[1] if len(args) > 1 else 0.5))
        if func is torch.ops.aten.native_dropout.default:
            values, p = args[:2]
            kept = self.mask(values, 1 - p)
            return values * kept / (1 - p), kept.bool()
        return func(*args, **kwargs)

    @abstractmethod
    def mask(self, like: Tensor, p: float) -> Tensor:
        """Ones with probability p, else zeros."""


class Probe(Masks):
    """Nothing is dropped; `shapes` are those of the masks.

    Args:
        examples: how many there are in the batch.
    """

    def __init__(self, examples: int):
        super().__init__()
        self.examples = examples
        self.shapes: list[tuple[int, ...]] = []

    def mask(self, like: Tensor, p: float) -> Tensor:
        """Ones."""
        self.shapes.append(tuple(like.shape))
        return torch.ones_like(like)


class Shared(Masks):
    """Every mask is the same for all examples.

    Args:
        seed: of this network; the same one gives the same masks, in the order they are drawn in.
        probe: of one example more than there are; without shapes where they cannot be told apart.
    """

    def __init__(self, seed: int, probe: Probe):
        super().__init__()
        self.seed, self.examples, self.probe, self.drawn = seed, probe.examples - 1, probe, 0

    def mask(self, like: Tensor, p: float) -> Tensor:
        """The same for all examples."""
        generator = torch.Generator(like.device).manual_seed(seed_of_chain(self.seed, self.drawn))
        shape = tuple(like.shape)
        other = self.probe.shapes[self.drawn] if self.drawn < len(self.probe.shapes) else shape
        self.drawn += 1
        apart, together = shapes_of(shape, self.examples, other)
        one = torch.empty(together, dtype=like.dtype, device=like.device).bernoulli_(p, generator=generator)
        return one.expand(apart).reshape(shape)


class Separate(Masks):
    """Every example has masks of its own, from a generator.

    Args:
        generator: where they come from.
    """

    def __init__(self, generator: torch.Generator):
        super().__init__()
        self.generator = generator

    def mask(self, like: Tensor, p: float) -> Tensor:
        """Draw every entry by itself."""
        return torch.empty_like(like).bernoulli_(p, generator=self.generator)


def shapes_of(shape: tuple[int, ...], examples: int, other: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A shape with examples in a dimension of their own, and the same with one example; no change where there is none.

    Args:
        shape: with so many `examples`.
        examples: their number.
        other: the shape with one example more.

    >>> shapes_of((8, 8, 5), 8, (8, 9, 5))  # after the positions of a sequence
    ((8, 8, 1, 5), (8, 1, 1, 5))
    >>> shapes_of((16, 7, 7), 8, (18, 7, 7))  # two heads of attention each
    ((8, 2, 7, 7), (1, 2, 7, 7))
    >>> shapes_of((8, 5), 8, (8, 5))  # a weight
    ((8, 5), (8, 5))
    """
    if len(shape) == len(other):
        for at, (size, resized) in enumerate(zip(shape, other, strict=True)):
            if size != resized and size * (examples + 1) == resized * examples:
                rest = (size // examples, *shape[at + 1 :])
                return (*shape[:at], examples, *rest), (*shape[:at], 1, *rest)
    return shape, shape


_PROBES: ContextVar[dict[int, Probe] | None] = ContextVar("probes", default=None)


@contextmanager
def one_probe_each() -> Iterator[None]:
    """In here inputs are probed once, for all samples; they must all stay alive, as they are known by their `id`."""
    token = _PROBES.set({})
    try:
        yield
    finally:
        _PROBES.reset(token)


def probed(model: nn.Module, inputs: Inputs) -> Probe:
    """What masks a model draws with one example more; with fewer, indices it keeps might point nowhere."""
    known = _PROBES.get()
    if known is not None and id(inputs) in known:
        return known[id(inputs)]
    probe = Probe(batch_size(inputs) + 1)
    args, kwargs = arguments(inputs)
    if not any(isinstance(value, nn.utils.rnn.PackedSequence) for value in (*args, *kwargs.values())):
        try:
            with torch.no_grad(), probe:
                call(model, with_batch_size(inputs, probe.examples))
        except Exception:  # whatever a network says to a number of examples that it does not take
            probe.shapes.clear()
    if known is not None:
        known[id(inputs)] = probe
    return probe


@contextmanager
def dropping_out(model: nn.Module) -> Iterator[Always]:
    """A model in evaluation mode drops out all the same, every example for itself."""
    modules = [m for m in model.modules() if drops_out(m) and not m.training]
    for module in modules:
        module.training = True
    always = Always()
    try:
        with own_layers(), always:
            yield always
    finally:
        for module in modules:
            module.training = False


@contextmanager
def masks_of(seed: int | None, model: nn.Module, inputs: Inputs) -> Iterator[None]:
    """Masks are those of the network of a seed, the same for all examples; every example has its own without a seed."""
    if seed is None:
        generator = current_generator(device_of(model))
        with nullcontext() if generator is None else Separate(generator):
            yield
        return
    with Shared(seed, probed(model, inputs)):
        yield
