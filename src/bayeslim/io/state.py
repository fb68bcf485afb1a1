"""The state of a module under the names of the model inside it, so that a plain checkpoint fits."""

from __future__ import annotations

from typing import Any

from torch import nn

PREFIXES = {"likelihood:": "likelihood", "prior:": "hyperparameters"}
"""Where the parameters of likelihood and priors stand in a `state_dict`; no module can have such a name."""


class StateOfModel(nn.Module):
    """A module with a `model`, a `likelihood` and `hyperparameters`, saved under the model's own names."""

    model: nn.Module

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Collect the state under the model's own names, the rest under its prefixes."""
        destination = self.model.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        for start, place in PREFIXES.items():
            part: nn.Module = getattr(self, place)
            destination = part.state_dict(destination=destination, prefix=prefix + start, keep_vars=keep_vars)
        return destination

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load a state that `state_dict` returned."""
        for start, place in PREFIXES.items():
            part: nn.Module = getattr(self, place)
            own = {k.removeprefix(start): v for k, v in state_dict.items() if k.startswith(start)}
            part.load_state_dict(own, strict=strict, assign=assign)
        own = {k: v for k, v in state_dict.items() if not k.startswith(tuple(PREFIXES))}
        return self.model.load_state_dict(own, strict=strict, assign=assign)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Translate names for torch, which loads a module that holds this one."""
        for name in [name for name in state_dict if name.startswith(prefix)]:
            own = name.removeprefix(prefix)
            start = next((start for start in PREFIXES if own.startswith(start)), "")
            place = f"{PREFIXES.get(start, 'model')}.{own.removeprefix(start)}"
            state_dict[prefix + place] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *rest)
