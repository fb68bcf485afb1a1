"""Low-rank adapters of PEFT: the ranks that stay, written into their configs.

A LoRA layer computes W x + s B A x with A of r × inputs and B of outputs × r. A rank is a hidden unit: a row of A and a
column of B. After a cut every layer may have its own rank, which PEFT's config holds as `rank_pattern`; the scale s
does not change, so `alpha_pattern` gets the α that gives the same s at the new rank (s = α / r, or α / √r with rsLoRA).

All other units stay: an adapter is saved without its base network, and fits no other widths than those of that network.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model is one of PEFT with LoRA layers."""
    return hasattr(model, "peft_config") and any(_is_lora(module) for module in model.modules())


def rank_weights(model: nn.Module) -> set[str]:
    """Name the weights A and B of all LoRA layers."""
    return {
        f"{path}.{matrix}.{name}.weight"
        for path, module in model.named_modules()
        if _is_lora(module)
        for matrix in ("lora_A", "lora_B")
        for name in getattr(module, matrix)
    }


def update_ranks_(model: Any) -> str:
    """Write the ranks of all LoRA layers into the configs of their adapters, in place.

    Returns:
        A sentence that says how many ranks are left.
    """
    before = after = 0
    ranks: dict[str, dict[str, int]] = {}
    alphas: dict[str, dict[str, float]] = {}
    changed = set()
    for path, module in model.named_modules():
        if not _is_lora(module):
            continue
        key = path.removeprefix("base_model.model.")
        for name, old in list(module.r.items()):
            if name in module.lora_A:
                rank = module.lora_A[name].weight.shape[0] // getattr(module, "num_experts", 1)
                before, after = before + old, after + rank
                if rank != old:
                    changed.add(name)
                    root = math.sqrt(rank) if model.peft_config[name].use_rslora else rank
                    module.r[name], module.lora_alpha[name] = rank, module.scaling[name] * root
            ranks.setdefault(name, {})[key] = module.r[name]
            alphas.setdefault(name, {})[key] = module.lora_alpha[name]
    for name in changed:
        # every layer by its whole name: PEFT takes the first pattern that matches, in the order of the alphabet
        config = model.peft_config[name]
        config.rank_pattern = {key: rank for key, rank in ranks[name].items() if rank != config.r}
        config.alpha_pattern = {key: alpha for key, alpha in alphas[name].items() if alpha != config.lora_alpha}
    return f"{after} of {before} ranks of its adapters stay"


def _is_lora(module: Any) -> bool:
    return all(isinstance(getattr(module, name, None), nn.ModuleDict) for name in ("lora_A", "lora_B")) and all(
        isinstance(getattr(module, name, None), dict) for name in ("r", "scaling", "lora_alpha")
    )
