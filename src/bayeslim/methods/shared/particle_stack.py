"""S networks of one architecture on the same inputs, as one module with stacked parameters.

Members of an ensemble (`abreast.py`) each see their own batches; here all networks see the same batch. They run vmapped
where that is faster, else one after the other, which works for any module.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from bayeslim.methods.shared.abreast import is_faster
from bayeslim.posteriors.particles import stacked
from bayeslim.types import Inputs, Params, call

STACK = "stack."
"""The prefix of the name of a stacked parameter, before its number."""


class ParticleStack(nn.Module):
    """S networks as one module, from inputs (B, ...) to outputs (S, B, ...).

    Args:
        model: the architecture; it is copied.
        networks: trained parameters and buffers of each network, by name.
    """

    def __init__(self, model: nn.Module, networks: list[Params]):
        super().__init__()
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        everything = stacked(networks)
        self.members = len(networks)
        self.together = is_faster(model)
        self.names = [name for name in everything if name in trained]
        self.others = [name for name in everything if name not in trained]
        self.network = copy.deepcopy(model).requires_grad_(False)
        self.stack = nn.ParameterList([nn.Parameter(everything[name]) for name in self.names])
        for index, name in enumerate(self.others):
            self.register_buffer(f"buffer_{index}", everything[name])

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the outputs of every network on the same inputs."""
        inputs: Inputs = kwargs or args
        if self.together:
            outputs: Tensor = vmap(self._one, in_dims=(0, None), randomness="different")(self._tensors(), inputs)
            return outputs
        apart = {name: tensor.unbind(0) for name, tensor in self._tensors().items()}
        each = [self._one({name: parts[k] for name, parts in apart.items()}, inputs) for k in range(self.members)]
        return torch.stack(each)

    def _one(self, tensors: Params, inputs: Inputs) -> Tensor:
        return call(self.network, inputs, tensors)

    def _tensors(self) -> Params:
        buffers = {name: getattr(self, f"buffer_{index}") for index, name in enumerate(self.others)}
        return dict(zip(self.names, self.stack, strict=True)) | buffers

    def path_of(self, name: str) -> str:
        """Return the name under which the stack of a parameter is registered."""
        return f"{STACK}{self.names.index(name)}"

    def tensors(self) -> Params:
        """Return parameters and buffers of all networks by name, (S, *shape)."""
        return {name: tensor.detach() for name, tensor in self._tensors().items()}
