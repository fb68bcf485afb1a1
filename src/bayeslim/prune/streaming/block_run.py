"""A network that runs from a given block on, with the outputs of the blocks before it kept for every batch.

All of it happens on a replica that shares the network's tensors. There the finished blocks are replaced by functions
that return the kept outputs of the last of them: the network itself makes the arguments of the next block (masks,
position embeddings), from its own forward. Nothing is changed on the network, so nothing has to be put back.

This is right for networks whose blocks run once each, one after the other, where all that follows a block reads its
output and none before. One batch is run in both ways to check it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from bayeslim.curvature.padding import real_positions
from bayeslim.errors import UnsupportedModel
from bayeslim.replica import replicate
from bayeslim.types import Inputs, arguments, device_of, to_device

CACHES = ("past_key_value", "past_key_values", "layer_past", "cache")
"""Arguments of a block that hold a cache of earlier calls: a block that runs again must not fill it twice."""


class _Reached(BaseException):
    """The end of a block, with its output. No `except Exception` of a user's forward may catch it."""

    def __init__(self, output: Any):
        super().__init__()
        self.output = output


class BlockRun:
    """A pass over the calibration batches, block after block.

    Args:
        model: the network; in any mode, it runs in evaluation mode.
        names: its blocks.
        batches: the inputs of each batch.
        offload: the device that keeps outputs between blocks; by default the network's.

    Attributes:
        names: the blocks, in the order in which they run.
        done: the number of blocks whose outputs are kept: the next block is `names[done]`.
        twin: the replica.
        real: the positions of the last batch that are no padding, see `bayeslim.curvature.padding`.
    """

    def __init__(
        self, model: nn.Module, names: Sequence[str], batches: Sequence[Inputs], offload: torch.device | None = None
    ):
        self.device = device_of(model)
        self.offload = offload or self.device
        self.batches = batches
        self.twin = replicate(model)
        for module in self.twin.modules():
            config = getattr(module, "config", None)
            if getattr(config, "use_cache", None) is True:  # blocks of some decoders take the cache by position
                vars(module)["config"] = copy.copy(config)
                vars(module)["config"].use_cache = False
            if not isinstance(module, nn.RNNBase):  # its flat list of weights would have to follow
                for leaf, p in module._parameters.items():
                    # without gradients of their own, weights keep no activations alive in a backward pass
                    module._parameters[leaf] = None if p is None else p.detach()  # type: ignore[assignment]
        self.names = tuple(names)
        self.done = 0
        self._kept: list[Any] = [None] * len(batches)
        self._now: Any = None
        self.real: Tensor | None = None

    @property
    def block(self) -> nn.Module:
        """The next block, on the replica."""
        return self.twin.get_submodule(self.names[self.done])

    @torch.no_grad()
    def check(self) -> None:
        """Sort the blocks by the order in which they run, and check that they are a chain.

        Raises:
            UnsupportedModel: if a block runs never or twice, or if later parts read more than the last output.
        """
        if not self.batches:
            return
        calls: list[str] = []

        def noted(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                calls.append(name)
                if len(calls) == len(self.names) - 1:
                    before.append(output)

            return hook

        before: list[Any] = []
        handles = [self.twin.get_submodule(n).register_forward_hook(noted(n)) for n in self.names]
        try:
            wanted = self._call(0)
        finally:
            for handle in handles:
                handle.remove()
        for name in self.names:
            if calls.count(name) != 1:
                raise UnsupportedModel(
                    f'A block must run exactly once in a forward pass, as a module of the network. "{name}" ran '
                    f"{calls.count(name)} times. Pass blocks=[...] without it."
                )
        self.names = tuple(calls)
        if len(self.names) > 1:
            with self._skipping(len(self.names) - 1, before[0]):
                try:
                    again = self._call(0)
                except Exception as error:  # the same call has just worked with all blocks
                    raise UnsupportedModel(
                        f"{type(self.twin).__name__} cannot be run block by block: layers between the blocks do not "
                        f"take the output of a later block ({error}). Leave the blocks before them out."
                    ) from error
            if not _equal(again, wanted):
                raise UnsupportedModel(
                    f"{type(self.twin).__name__} reads the outputs of earlier blocks after later ones (or draws random "
                    "numbers in its forward), so that it cannot be run block by block. Use bl.prune on the whole "
                    "network."
                )

    def __len__(self) -> int:
        return len(self.batches)

    @torch.no_grad()
    def pass_block(self) -> Iterator[Any]:
        """Run the next block on every batch; yield its outputs. Hooks see its layers."""

        def stop(module: nn.Module, args: Any, output: Any) -> None:
            raise _Reached(output)

        handle = self.block.register_forward_hook(stop)
        try:
            for place in range(len(self.batches)):
                yield self._until_stopped(place)
        finally:
            handle.remove()

    def advance(self) -> None:
        """Run the next block on every batch, keep its outputs, and go on."""
        for place, output in enumerate(self.pass_block()):
            self._kept[place] = _moved(output, self.offload)
        self.done += 1

    def put(self, name: str, value: Tensor) -> None:
        """Give the replica another value of a parameter."""
        path, _, leaf = name.rpartition(".")
        self.twin.get_submodule(path)._parameters[leaf] = value  # type: ignore[assignment]

    @contextmanager
    def rest_of_network(self) -> Iterator[Callable[[int], tuple[nn.Module, Inputs]]]:
        """Prepare passes from the next block to the end of the network.

        Blocks after the next one are checkpointed: they keep their inputs only, and run again in a backward pass.

        Yields:
            a function from the place of a batch to the replica and the inputs to call it with.
        """

        def prepared(place: int) -> tuple[nn.Module, Inputs]:
            self._now = _moved(self._kept[place], self.device)
            return self.twin, self._inputs(place)

        later = [self.twin.get_submodule(name) for name in self.names[self.done + 1 :]]
        with _replaced_forwards(later, _checkpointed), self._skipping(self.done):
            try:
                yield prepared
            finally:
                self._now = None

    def arguments_of_block(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Find the arguments that the first batch calls the next block with."""
        found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append((args, kwargs))
            raise _Reached(None)

        handle = self.block.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            with torch.no_grad():
                self._until_stopped(0)
        finally:
            handle.remove()
        args, kwargs = found[0]
        return args, _without_caches(kwargs)

    def _until_stopped(self, place: int) -> Any:
        try:
            with self._skipping(self.done, self._kept[place]):
                self._call(place)
        except _Reached as reached:
            return reached.output
        raise UnsupportedModel(f'The block "{self.names[self.done]}" did not run on batch {place}.')

    def _inputs(self, place: int) -> Inputs:
        inputs = to_device(self.batches[place], self.device)
        self.real = real_positions(inputs)
        return inputs

    def _call(self, place: int) -> Any:
        args, kwargs = arguments(self._inputs(place))
        return self.twin(*args, **kwargs)

    @contextmanager
    def _skipping(self, count: int, output: Any = None) -> Iterator[None]:
        """Let the first `count` blocks return the kept output of the last of them."""
        if output is not None:
            self._now = _moved(output, self.device)

        def constant(forward: Any) -> Callable[..., Any]:
            return lambda *args, **kwargs: self._now

        skipped = [self.twin.get_submodule(name) for name in self.names[:count]]
        with _replaced_forwards(skipped, constant):
            try:
                yield
            finally:
                self._now = None


@contextmanager
def _replaced_forwards(
    modules: Sequence[nn.Module], replacement: Callable[[Any], Callable[..., Any]]
) -> Iterator[None]:
    """Give modules of a replica another forward for a while."""
    own = [vars(module).get("forward") for module in modules]
    try:
        for module in modules:
            vars(module)["forward"] = replacement(module.forward)
        yield
    finally:
        for module, forward in zip(modules, own, strict=True):
            vars(module).pop("forward", None)
            if forward is not None:
                vars(module)["forward"] = forward


def _checkpointed(forward: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **_without_caches(kwargs))

    return run


def _without_caches(kwargs: dict[str, Any]) -> dict[str, Any]:
    changed = {k: None if k in CACHES else v for k, v in kwargs.items()}
    return changed | ({"use_cache": False} if "use_cache" in changed else {})


def _moved(output: Any, device: torch.device) -> Any:
    return tree_map(lambda value: value.detach().to(device) if isinstance(value, Tensor) else value, output)


def _equal(one: Any, other: Any) -> bool:
    """Compare the tensors of two outputs up to rounding."""
    found: list[list[Tensor]] = [[], []]
    for place, output in enumerate((one, other)):
        tree_map(lambda v, place=place: found[place].append(v) if isinstance(v, Tensor) else None, output)
    return len(found[0]) == len(found[1]) and all(
        a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=1e-3, atol=1e-5, equal_nan=True)
        for a, b in zip(*found, strict=True)
    )
