"""Cuts as data: masks by parameter name, with the words and numbers that say how they were chosen.

`bayeslim.Plan` is a `Cuts` that can also be made tighter. This file knows nothing of how cuts are decided.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from bayeslim.errors import BayeslimError, NoSiteMatched, ShapeMismatch, closest
from bayeslim.posteriors.conjugate import Solve
from bayeslim.prune import plan_json
from bayeslim.sites import Sites

if TYPE_CHECKING:
    from bayeslim.bayesian import Bayesian

BY_HAND = "by hand"
"""The criterion of cuts that were written rather than decided."""


class NothingToCut(BayeslimError, ValueError):
    """A plan that cuts nothing, or a budget that is met already."""


class EmptyLayer(BayeslimError, ValueError):
    """A plan that cuts everything in a layer."""


@dataclass(frozen=True)
class ParameterCut:
    """The cut of one parameter: its name and shape, the number of weights that stay, and a remark."""

    name: str
    shape: tuple[int, ...]
    kept: int
    remark: str = ""

    @property
    def size(self) -> int:
        """The number of its weights."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, eq=False, repr=False)
class Cuts:
    """The weights to cut. Frozen; printed as a table; equal if what they cut, and why, is equal.

    Attributes:
        masks: True = kept, by parameter name, on the CPU.
        criterion: the name of the criterion that ranked the weights.
        granularity: "weight", "unit" or N:M, such as "2:4".
        budget: the budget in words.
        thresholds: by parameter (by layer for units), the lowest score that stays.
        left: why parameters, or parts of them, were left alone.
        unread: in a cut by units, the weights that go because no layer reads their unit any more, True by parameter
            name. Survivors compensate for a unit where it was read, and not a second time where it was made.
        notes: remarks on the whole, such as layers that keep their best weight.
        solves: how the survivors of each layer were solved for, by the weight's name: filled in by `bayeslim.prune`,
            and no part of the comparison of plans.
    """

    masks: Mapping[str, Tensor]
    criterion: str = BY_HAND
    granularity: str = "weight"
    budget: str = ""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    solves: Mapping[str, Solve] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, mask in (*self.masks.items(), *self.unread.items()):
            if not isinstance(name, str) or not isinstance(mask, Tensor) or mask.dtype != torch.bool:
                kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
                raise TypeError(f"A plan's masks are boolean tensors by parameter name, True = kept. Got {kind}.")
        for name, gone in self.unread.items():
            cut = ~self.masks[name] if name in self.masks else None
            if cut is None or cut.shape != gone.shape or bool((gone & ~cut).any()):
                raise ValueError(f'The unread weights of "{name}" must be among those that its mask cuts.')
        for attribute in ("masks", "unread"):
            copies = {name: mask.detach().cpu().clone() for name, mask in getattr(self, attribute).items()}
            object.__setattr__(self, attribute, MappingProxyType(copies))
        for attribute in ("thresholds", "left", "solves"):
            object.__setattr__(self, attribute, MappingProxyType(dict(getattr(self, attribute))))
        object.__setattr__(self, "notes", tuple(self.notes))

    @property
    def parameters(self) -> tuple[ParameterCut, ...]:
        """The cut of each parameter that it names."""
        return tuple(
            ParameterCut(name, tuple(mask.shape), int(mask.sum()), self.left.get(name, ""))
            for name, mask in self.masks.items()
        )

    @property
    def cut(self) -> int:
        """The number of parameters that it sets to zero, biases included."""
        return sum(p.size - p.kept for p in self.parameters)

    @property
    def sparsity(self) -> float:
        """The fraction of the weights it names, with two or more dimensions, that it cuts."""
        weights = [p for p in self.parameters if len(p.shape) > 1] or list(self.parameters)
        return sum(p.size - p.kept for p in weights) / max(1, sum(p.size for p in weights))

    def check(self, network: Bayesian | nn.Module) -> None:
        """Raise unless the plan fits a network, cuts something and empties no weight.

        Raises:
            ShapeMismatch: for a plan of another network.
            NothingToCut: if it cuts nothing.
            EmptyLayer: if it cuts a whole weight matrix.
        """
        sites = getattr(network, "sites", None)
        shapes = {n: tuple(p.shape) for n, p in network.named_parameters()}
        if isinstance(sites, Sites):
            shapes = {site.name: site.shape for site in sites}
        kind = sites.model if isinstance(sites, Sites) else type(network).__name__
        for name, mask in self.masks.items():
            if name not in shapes:
                hint = closest(name, shapes) or ", ".join(list(shapes)[:3])
                raise ShapeMismatch(
                    f'The plan is for another model: it cuts "{name}", which {kind} does not have. '
                    f"Closest names: {hint}."
                )
            if shapes[name] != tuple(mask.shape):
                raise ShapeMismatch(
                    f'The plan is for another model: its mask of "{name}" is {tuple(mask.shape)}, the parameter of '
                    f"{kind} {shapes[name]}."
                )
        if not self.cut:
            raise NothingToCut("The plan cuts nothing. Make one with bl.plan(bnn, bl.Budget(sparsity=0.5)).")
        for p in self.parameters:
            if len(p.shape) > 1 and not p.kept:
                raise EmptyLayer(
                    f'The plan cuts all {p.size:,} weights of "{p.name}": its layer would output its bias only. '
                    'Use Budget(..., empty_layers="keep best"), scope="layer", or plan.undo to leave it alone.'
                )

    def merge(self, other: Self) -> Self:
        """Make the plan that cuts what either cuts.

        Raises:
            ShapeMismatch: if they are for different models.
        """
        for name, mask in other.masks.items():
            if name in self.masks and self.masks[name].shape != mask.shape:
                raise ShapeMismatch(
                    f'Plans for different models cannot be merged: "{name}" is {tuple(self.masks[name].shape)} in one '
                    f"and {tuple(mask.shape)} in the other."
                )
        masks = dict(other.masks) | {n: mask & other.masks.get(n, mask) for n, mask in self.masks.items()}
        both = {name: value for name, value in self.left.items() if other.left.get(name) == value}
        unread = dict(other.unread) | {n: gone | other.unread.get(n, gone) for n, gone in self.unread.items()}
        return type(self)(
            {name: masks[name] for name in dict.fromkeys((*self.masks, *other.masks))},
            _joined(self.criterion, other.criterion),
            _joined(self.granularity, other.granularity),
            _joined(self.budget, other.budget),
            left=both,
            unread=unread,
            notes=tuple(dict.fromkeys((*self.notes, *other.notes))),
        )

    def undo(self, *names: str) -> Self:
        """Take the cuts in some parameters back.

        Args:
            names: of parameters or modules, or regular expressions that match whole parameter names.
        """
        chosen = {n for n in self.masks for s in names if n == s or n.startswith(f"{s}.") or _matches(s, n)}
        if not chosen:
            raise NoSiteMatched(
                f"undo({', '.join(map(repr, names))}) matches none of the parameters of the plan: "
                f"{', '.join(self.masks)}."
            )
        masks = {n: torch.ones_like(mask) if n in chosen else mask for n, mask in self.masks.items()}
        left = {**self.left, **dict.fromkeys(sorted(chosen), "its cuts were undone")}
        thresholds = {n: t for n, t in self.thresholds.items() if n not in chosen}
        # The restored weights may read some of the other cuts, so that none of them counts as unread.
        return replace(self, masks=masks, left=left, thresholds=thresholds, unread={}, solves={})

    def to_json(self) -> str:
        """Write the plan as JSON, with masks as compressed bits."""
        return plan_json.dumps(self)

    @classmethod
    def from_json(cls, text: str, model: nn.Module | None = None) -> Self:
        """Read a plan from the text of `to_json`.

        Args:
            text: the JSON.
            model: the network that the plan is for. Only plans of large networks with few cuts need it: their text is
                so short that it does not show whether the masks are as large as they claim.

        Raises:
            CorruptFile: if the text is anything else, or does not fit the network.
        """
        return cls(**plan_json.loads(text, model))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cuts) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        values = (getattr(self, f.name) for f in fields(self))
        return type(self), tuple(dict(value) if isinstance(value, MappingProxyType) else value for value in values)

    def __repr__(self) -> str:
        kept = sum(p.kept for p in self.parameters)
        budget = f" for {self.budget}" if self.budget else ""
        lines = [
            f"Plan: {100 * self.sparsity:.2f} % of the weights go ({self.cut:,} parameters of {kept + self.cut:,}), "
            f"by {self.criterion} of each {self.granularity}{budget}"
        ]
        width = max((len(name) for name in (*self.masks, *self.left)), default=0)
        for p in self.parameters:
            shape = "×".join(map(str, p.shape))
            share = 100 * (1 - p.kept / max(p.size, 1))
            score = f"  score ≥ {self.thresholds[p.name]:.4g}" if p.name in self.thresholds else ""
            remark = f"  {p.remark}" if p.remark else ""
            lines.append(
                f"  {p.name:<{width}}  {shape:>14}  {p.size:>11,} -> {p.kept:<11,} {share:6.2f} %{score}{remark}"
            )
        lines += [f"  {n:<{width}}  {'left alone':>14}  {why}" for n, why in self.left.items() if n not in self.masks]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  solved {name:<{width}}  {solve}" for name, solve in self.solves.items()]
        return "\n".join(lines)

    def _identity(self) -> str:
        return replace(self, solves={}).to_json()


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise NoSiteMatched(f"undo({pattern!r}) is neither a name nor a regular expression: {error}.") from None


def _joined(one: str, other: str) -> str:
    return one if one == other else " + ".join(part for part in (one, other) if part)
