"""Gradients of single examples through the whole network: right for every parameter of every module, but slow.

For parameters whose gradients do not follow from hooks on a layer (attention's input projection, tied weights,
parameters of the user's own modules): examples are vmapped, or run in a loop where an operation has no batching rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from bayeslim.attention import ExplicitAttention
from bayeslim.curvature.recurrent import is_unrolled
from bayeslim.curvature.sweep import examples
from bayeslim.types import Inputs, Params, call

WITHOUT_BATCHING_RULES: tuple[type[nn.Module], ...] = (nn.RNNBase, nn.EmbeddingBag)
"""Modules that `vmap` cannot run, or only in a loop of its own: their examples go one by one, unless unrolled."""


class WholeNetwork:
    """Per-example gradients of some parameters of a replica in evaluation mode."""

    def __init__(self, model: nn.Module, names: Sequence[str]):
        fixed = {name: p.detach() for name, p in model.named_parameters()}
        self.model = model
        self.params: Params = {name: fixed.pop(name) for name in names}
        self.fixed = fixed
        self._vectorised = not any(
            isinstance(module, WITHOUT_BATCHING_RULES) and not is_unrolled(module) for module in model.modules()
        )

    def gradients(self, inputs: Inputs, columns: Tensor) -> Params:
        """Compute gradients of Σ column · outputs, (K, B, *shape) by name."""
        if self._vectorised:
            try:
                return self._all_at_once(inputs, columns)
            except (RuntimeError, NotImplementedError, UserWarning):  # a warning of vmap's, where those are errors
                self._vectorised = False
        return self._one_by_one(inputs, columns)

    def _all_at_once(self, inputs: Inputs, columns: Tensor) -> Params:
        total = columns.shape[1]
        examples(inputs, 0, 1, total)
        leaves, tree = tree_flatten(inputs)
        batched = [isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == total for leaf in leaves]
        moving = [leaf for leaf, moves in zip(leaves, batched, strict=True) if moves]

        def one(moving: list[Tensor], columns: Tensor) -> Params:
            moved = iter(moving)
            row = [next(moved).unsqueeze(0) if moves else leaf for leaf, moves in zip(leaves, batched, strict=True)]
            single = tree_unflatten(row, tree)
            pull: Callable[[Tensor], tuple[Params]]
            pull = vjp(lambda params: call(self.model, single, self.fixed | params)[0], self.params)[1]
            gradients: Params = vmap(lambda column: pull(column)[0])(columns)
            return gradients

        with ExplicitAttention():
            found: Params = vmap(one, in_dims=(0, 1), out_dims=1, randomness="different")(moving, columns)
            return found

    def _one_by_one(self, inputs: Inputs, columns: Tensor) -> Params:
        total = columns.shape[1]
        params = {name: p.clone().requires_grad_() for name, p in self.params.items()}
        stacked = {name: p.new_zeros(*columns.shape[:2], *p.shape) for name, p in params.items()}
        for n in range(total):
            outputs = call(self.model, examples(inputs, n, n + 1, total), self.fixed | params)
            if not outputs.requires_grad:
                continue
            for k, column in enumerate(columns[:, n]):
                grads = torch.autograd.grad(
                    outputs[0], list(params.values()), column, retain_graph=True, allow_unused=True
                )
                for name, grad in zip(params, grads, strict=True):
                    if grad is not None:
                        stacked[name][k, n] = grad
        return stacked
