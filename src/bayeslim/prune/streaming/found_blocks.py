"""The blocks of a network: the modules that are cut one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from bayeslim.compact.adapters import has_adapters
from bayeslim.errors import NoSiteMatched, UnsupportedModel, closest


def find_blocks(model: nn.Module, blocks: str | Sequence[str] | None = None) -> tuple[str, ...]:
    """Find the names of the blocks.

    Args:
        model: the network.
        blocks: a name or glob, or several, of an `nn.ModuleList` (its members are the blocks) or of modules. A star
            stands for one part of a name: "encoder.*.layers". None takes the longest `nn.ModuleList` that is not
            inside of another.

    Raises:
        NoSiteMatched: if there are none.
        UnsupportedModel: if several lists are the longest, if one block is inside of another or is a script module, or
            if an adapter is not merged.

    >>> find_blocks(nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])}))
    ('layers.0', 'layers.1')
    """
    if has_adapters(model):
        raise UnsupportedModel(
            f"Blocks are cut without an adapter: sparse weights and a sparse adapter have a dense sum. This "
            f"{type(model).__name__} has one. Pass model.merge_and_unload()."
        )
    modules = dict(model.named_modules())
    if blocks is None:
        lists = [n for n, m in modules.items() if isinstance(m, nn.ModuleList) and len(m)]
        outer = [n for n in lists if not any(n.startswith(f"{other}.") for other in lists)]
        if not outer:
            raise NoSiteMatched(
                f"{type(model).__name__} has no nn.ModuleList of blocks. Pass blocks=[...], the names of its blocks."
            )
        lengths = {name: len(list(modules[name].children())) for name in outer}
        longest = [name for name in outer if lengths[name] == max(lengths.values())]
        if len(longest) > 1:  # an encoder and a decoder, say: a cut of one of them would leave half of the network
            raise UnsupportedModel(
                f"{type(model).__name__} has {len(longest)} lists of {lengths[longest[0]]} modules: "
                f"{', '.join(longest)}. Pass blocks=..., one of them; to cut the others too, call again on the result."
            )
        patterns: Sequence[str] = longest
    else:
        patterns = [blocks] if isinstance(blocks, str) else list(blocks)
    found: dict[str, None] = {}
    for pattern in patterns:
        matched = [name for name in modules if name and _matches(name, pattern)]
        if not matched:
            near = closest(pattern, [name for name in modules if name])
            raise NoSiteMatched(
                f"blocks={pattern!r} is no module of {type(model).__name__}. "
                + (f"Closest names: {near}." if near else "Print model.named_modules() for the names.")
            )
        for name in matched:
            module = modules[name]
            inside = [f"{name}.{child}" for child in dict(module.named_children())]
            found |= dict.fromkeys(inside if isinstance(module, nn.ModuleList) else [name])
    names = tuple(found)
    for name in names:
        within = [other for other in names if name.startswith(f"{other}.")]
        if within:
            raise UnsupportedModel(f'Blocks must be apart, and "{name}" is inside of "{within[0]}". Name one of them.')
        if isinstance(modules[name], torch.jit.ScriptModule):
            raise UnsupportedModel(f'The block "{name}" is a script module. Pass the plain network.')
    return names


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(fnmatchcase(a, b) for a, b in zip(parts, wanted, strict=True))
