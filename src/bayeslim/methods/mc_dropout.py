"""Dropout as a posterior: every mask is a network drawn from it, at test time as in training.

    p(y|x, D) ≈ (1/S) Σ_s p(y|x, w ∘ z_s)        z_s ~ Bernoulli(1 − p) / (1 − p) where a dropout layer acts

Training is plain training with dropout and the prior as weight decay, so a network that was trained with dropout can be
used as it is. Batch norms and all other modules are in evaluation mode.

`predict` draws one mask per network and shares it between all inputs, so that a sample is a function. With
`how="local"` every example has its own masks. Both have the same marginals.

Modules that drop out (`nn.Dropout` and its variants, recurrent layers and attention with dropout) are put in training
mode, and functional dropout that is switched off (`F.dropout(x, p, self.training)`) is switched on. Dropout that a
module hides stays off, such as a `dropout_p` that it sets to zero outside of training.

A shared mask is the same for every example, and is drawn again from the same seed for every batch. All dropout in torch
draws its masks by `bernoulli_` or the kernel `native_dropout`, except in cuDNN's recurrent layers: there, every example
has its own mask.

The dimension of a mask that holds the examples is measured. The network first runs once with one more example, and that
dimension is the one that grows in proportion. If it holds several rows per example, as with heads of attention, they
are taken to be adjacent. A mask that does not grow, such as that of a weight, is drawn whole. So are all masks where
the network does not accept one more example (as with the adjacency matrix of a graph) or takes packed sequences.

Gal & Ghahramani 2016, arXiv:1506.02142
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bayeslim.attention import ExplicitAttention
from bayeslim.bayesian import Bayesian
from bayeslim.errors import UnsupportedModel
from bayeslim.io.registry import register
from bayeslim.methods.shared.noisy_network import NoisyNetwork
from bayeslim.noise import current_generator, random_seed
from bayeslim.train.seeding import seed_of_chain
from bayeslim.types import Inputs, arguments, batch_size, call, device_of, with_batch_size

_NONE = (
    "MCDropout needs a network with dropout, and {} has none. Put nn.Dropout(p) with p > 0 between its layers and "
    "train it, or use a method that needs no dropout, such as bl.Laplace()."
)


@register("method")
@dataclass(frozen=True)
class MCDropout(NoisyNetwork):
    """Dropout at test time, on any network with dropout layers."""

    name: ClassVar[str] = "mc-dropout"

    def convert(self, bnn: Bayesian) -> None:
        """Refuse a network without dropout."""
        if not any(drops_out(module) or mentions_dropout(module) for module in bnn.model.modules()):
            raise UnsupportedModel(_NONE.format(type(bnn.model).__name__))

    def prepared(self, bnn: Bayesian, batches: list[Inputs], local: bool) -> list[tuple[Inputs, Probe | None]]:
        """Pair inputs with a record of their masks, from which shared masks are made."""
        with dropping_out(bnn.model):
            return [(inputs, None if local else probed(bnn.model, inputs)) for inputs in batches]

    def noisy_pass(self, bnn: Bayesian, batches: list[tuple[Inputs, Probe | None]], local: bool) -> Tensor:
        """Compute the outputs of one network, or of one for every example."""
        seed, generator = None if local else random_seed(), current_generator(device_of(bnn.model))
        outputs = []
        with dropping_out(bnn.model) as dropout:
            for inputs, probe in batches:
                own = nullcontext() if generator is None else Separate(generator)
                with own if seed is None or probe is None else Shared(seed, probe):
                    outputs.append(call(bnn.model, inputs))
        if not dropout.seen and not any(drops_out(module) for module in bnn.model.modules()):
            raise UnsupportedModel(_NONE.format(type(bnn.model).__name__))
        return torch.cat(outputs)


FUNCTIONS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)


def drops_out(module: nn.Module) -> bool:
    """Return whether a module of torch drops something out in training mode."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    return isinstance(module, nn.MultiheadAttention) and module.dropout > 0


def mentions_dropout(module: nn.Module) -> bool:
    """Return whether the forward of a user's module mentions dropout."""
    code = getattr(type(module).forward, "__code__", None)
    own = not type(module).__module__.startswith("torch.")
    return own and code is not None and any("dropout" in name.lower() for name in code.co_names)


class Always(TorchFunctionMode):
    """Functional dropout that is always on; `seen` says whether there was any."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Switch dropout on; called for every function of torch."""
        kwargs = kwargs or {}
        if func in FUNCTIONS and kwargs.get("p", 0.5) > 0:
            self.seen = True
            kwargs = {**kwargs, "training": True}
        return func(*args, **kwargs)


class Masks(TorchDispatchMode):
    """The base of modes that choose the masks of all dropout."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace dropout by a multiplication with `mask`; called for every operation."""
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
        """Draw ones with probability p, else zeros."""


class Probe(Masks):
    """A mode that drops nothing and records the `shapes` of the masks.

    Args:
        examples: number of examples in the batch.
    """

    def __init__(self, examples: int):
        super().__init__()
        self.examples = examples
        self.shapes: list[tuple[int, ...]] = []

    def mask(self, like: Tensor, p: float) -> Tensor:
        """Return ones."""
        self.shapes.append(tuple(like.shape))
        return torch.ones_like(like)


class Shared(Masks):
    """A mode whose masks are the same for all examples.

    Args:
        seed: the seed of this network; the same seed gives the same sequence of masks.
        probe: a record with one more example; without shapes where examples cannot be told apart.
    """

    def __init__(self, seed: int, probe: Probe):
        super().__init__()
        self.seed, self.examples, self.probe, self.drawn = seed, probe.examples - 1, probe, 0

    def mask(self, like: Tensor, p: float) -> Tensor:
        """Draw one mask for all examples."""
        generator = torch.Generator(like.device).manual_seed(seed_of_chain(self.seed, self.drawn))
        shape = tuple(like.shape)
        other = self.probe.shapes[self.drawn] if self.drawn < len(self.probe.shapes) else shape
        self.drawn += 1
        apart, together = shapes_of(shape, self.examples, other)
        one = torch.empty(together, dtype=like.dtype, device=like.device).bernoulli_(p, generator=generator)
        return one.expand(apart).reshape(shape)


class Separate(Masks):
    """A mode that draws masks for every example from a generator.

    Args:
        generator: the source of random numbers.
    """

    def __init__(self, generator: torch.Generator):
        super().__init__()
        self.generator = generator

    def mask(self, like: Tensor, p: float) -> Tensor:
        """Draw every entry independently."""
        return torch.empty_like(like).bernoulli_(p, generator=self.generator)


def shapes_of(shape: tuple[int, ...], examples: int, other: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split the dimension of the examples off a shape.

    Return that shape, and the same with one example.

    Both are the shape itself if no dimension holds the examples.

    Args:
        shape: the shape with `examples` examples.
        examples: their number.
        other: the shape with one more example.

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


def probed(model: nn.Module, inputs: Inputs) -> Probe:
    """Record the masks of one more example; with fewer, indices may be out of range."""
    probe = Probe(batch_size(inputs) + 1)
    args, kwargs = arguments(inputs)
    if not any(isinstance(value, nn.utils.rnn.PackedSequence) for value in (*args, *kwargs.values())):
        try:
            with torch.no_grad(), probe:
                call(model, with_batch_size(inputs, probe.examples))
        except Exception:  # any error of a network that does not accept this number of examples
            probe.shapes.clear()
    return probe


@contextmanager
def dropping_out(model: nn.Module) -> Iterator[Always]:
    """Switch on the dropout of a model in evaluation mode."""
    modules = [m for m in model.modules() if drops_out(m) and not m.training]
    for module in modules:
        module.training = True
    always = Always()
    try:
        with ExplicitAttention(), always:
            yield always
    finally:
        for module in modules:
            module.training = False
