"""The candidates of a cut: weights, units or N:M layers, each with a score.

A cut is a set of candidates; `Candidates.masks` turns it into masks of the parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from bayeslim.bayesian import Bayesian
from bayeslim.compact import UnitGraph
from bayeslim.curvature.layers import is_transposed_linear
from bayeslim.errors import BayeslimError, NoSiteMatched
from bayeslim.posteriors import Posterior
from bayeslim.prune.criteria import Criterion
from bayeslim.sites import Selection, is_norm, is_weight, matcher, owner
from bayeslim.types import Params


@dataclass(frozen=True, eq=False)
class Candidates:
    """Everything that could be cut.

    All tensors are on one device: that of the posterior for weights, because sorts of many millions of scores take
    minutes on a CPU.

    Attributes:
        scores: of each candidate, higher = keep; float64.
        ties: second scores, to rank candidates of equal score.
        sizes: the number of weights with a posterior that go with each.
        layers: the layer of each, as an index of `layer_names`.
        layer_names: the layers.
        gone: the mask of those that are cut already.
        masks: computes the masks (True = kept) after cutting the candidates with some indices, earlier cuts included.
        weights: the parameters whose zeros make up the sparsity.
        left: why parameters, or parts of them, cannot go.
        unread: computes the weights among them that go only because no layer reads their unit, True by name.
        may_empty: whether all candidates of a layer may be cut.
        graph: the network's units, if candidates are units.
        units: the index of each candidate in `graph.units`, if candidates are units.
        turns: the order in which a pattern cuts its weights, by name, if candidates are layers that take a pattern.
    """

    scores: Tensor
    ties: Tensor
    sizes: Tensor
    layers: Tensor
    layer_names: tuple[str, ...]
    gone: Tensor
    masks: Callable[[Tensor], Params]
    weights: tuple[str, ...]
    left: dict[str, str]
    unread: Callable[[Tensor], Params] = lambda cut: {}
    may_empty: bool = False
    graph: UnitGraph | None = None
    units: tuple[int, ...] = ()
    turns: Params | None = None

    def __len__(self) -> int:
        return len(self.scores)


@dataclass(frozen=True, eq=False)
class Pruning:
    """A network that is about to be pruned.

    Attributes:
        bnn: the network.
        posterior: its posterior.
        criterion: scores the candidates.
        protect: selections of parameters that are left alone.
        start: earlier cuts: True = kept, by name.
    """

    bnn: Bayesian
    posterior: Posterior
    criterion: Criterion
    protect: tuple[Selection, ...]
    start: Mapping[str, Tensor]

    def kept(self, name: str) -> Tensor:
        """Return the mask of a parameter before the cut, on the CPU."""
        shape = self.bnn.model.get_parameter(name).shape
        return self.start[name].cpu() if name in self.start else torch.ones(shape, dtype=torch.bool)

    @property
    def device(self) -> torch.device:
        """The device where scores of weights are compared."""
        return self.posterior.mean[self.posterior.names[0]].device

    def parameters(self) -> list[tuple[str, nn.Parameter, nn.Module]]:
        """List the user's own parameters with the modules that own them."""
        model = self.bnn.model
        return [(site.name, model.get_parameter(site.name), owner(model, site.name)[0]) for site in self.bnn.sites]

    def protected(self) -> set[str]:
        """Find the protected parameters."""
        parameters = self.parameters()
        chosen: set[str] = set()
        for selection in self.protect:
            matches = matcher(selection)
            found = {name for name, p, module in parameters if matches(name, p, module)}
            if not found:
                shown = getattr(selection, "__name__", None) or repr(selection)
                raise NoSiteMatched(
                    f"protect={shown} matches none of the parameters of {self.bnn.sites.model}. "
                    "Print bl.sites(model) for their names."
                )
            chosen |= found
        return chosen

    def prunable(self) -> tuple[tuple[str, ...], dict[str, str]]:
        """Find the parameters whose weights can be cut singly, and why others cannot."""
        protected, random = self.protected(), set(self.posterior.names)
        names, left = [], {}
        for name, p, module in self.parameters():
            why = _why_not(name, p, module)
            if why is None and name in protected:
                why = "protected"
            if why is None and name not in random:
                why = "it has no posterior: trained as a point"
            if why is None:
                names.append(name)
            else:
                left[name] = why
        if not names:
            raise BayeslimError(
                f"No weight of {self.bnn.sites.model} can be cut. "
                f"{'; '.join(f'{n}: {why}' for n, why in left.items())}."
            )
        return tuple(names), left

    def weight_scores(self, names: tuple[str, ...]) -> Params:
        """Compute and check the scores of single weights, on one device."""
        scores = self.criterion.weights(self.posterior, self.bnn.priors)
        found: Params = {}
        for name in names:
            value = scores.get(name) if isinstance(scores, Mapping) else None
            wanted = tuple(self.posterior.mean[name].shape)
            if not isinstance(value, Tensor) or tuple(value.shape) != wanted:
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise BayeslimError(
                    f"A criterion gives a dict with a score for every weight, of the parameter's shape. For "
                    f'"{name}" of shape {wanted} {self.criterion.name} gave {got}.'
                )
            found[name] = checked(value.double().to(self.device), f'"{name}"', self.criterion.name)
        return found


def _why_not(name: str, p: nn.Parameter, module: nn.Module) -> str | None:
    if is_norm(module):
        return "normalisation"
    return None if is_weight(name, p, module) else "bias"


def checked(scores: Tensor, of: str, criterion: str) -> Tensor:
    """Check that scores hold no NaN, and return them."""
    if bool(scores.isnan().any()):
        raise BayeslimError(
            f"The {criterion} scores of {of} hold NaN, so weights cannot be ranked. Check the criterion."
        )
    return scores


def weight_candidates(pruning: Pruning) -> Candidates:
    """List every prunable weight as a candidate."""
    names, left = pruning.prunable()
    scores = pruning.weight_scores(names)
    shapes = {name: scores[name].shape for name in names}
    sizes = [shape.numel() for shape in shapes.values()]
    device = pruning.device
    kept = torch.cat([pruning.kept(name).flatten() for name in names]).to(device)

    def masks(cut: Tensor) -> Params:
        left_over = kept.clone()
        left_over[cut] = False
        return {name: part.view(shapes[name]) for name, part in zip(names, left_over.split(sizes), strict=True)}

    return Candidates(
        scores=torch.cat([scores[name].flatten() for name in names]),
        ties=torch.cat([pruning.posterior.mean[name].double().abs().flatten().to(device) for name in names]),
        sizes=torch.ones(len(kept), dtype=torch.int64, device=device),
        layers=torch.repeat_interleave(torch.arange(len(names)), torch.tensor(sizes)).to(device),
        layer_names=names,
        gone=~kept,
        masks=masks,
        weights=names,
        left=left,
    )


def pattern(granularity: str) -> tuple[int, int] | None:
    """Read N and M of "N:M"; None for another granularity.

    >>> pattern("2:4")
    (2, 4)
    """
    found = re.fullmatch(r"(\d{1,4}):(\d{1,4})", granularity)
    if found is None:
        return None
    n, m = int(found[1]), int(found[2])
    if not 0 < n < m:
        raise ValueError(f'granularity="N:M" keeps N of every M weights, with 0 < N < M. Got "{granularity}".')
    return n, m


def block_candidates(pruning: Pruning, n: int, m: int) -> Candidates:
    """List layers as candidates, each cut to the best n of every m inputs."""
    names, left = pruning.prunable()
    fitting: list[str] = []
    for name in names:
        module, _ = owner(pruning.bnn.model, name)
        shape = pruning.bnn.model.get_parameter(name).shape
        inputs = shape[_input_dim(module)]
        if inputs % m:
            left[name] = f"its {inputs} inputs are no multiple of {m}"
        else:
            fitting.append(name)
    if not fitting:
        raise BayeslimError(
            f"No weight can take the pattern {n}:{m}: {'; '.join(f'{name}: {why}' for name, why in left.items())}."
        )
    scores = pruning.weight_scores(tuple(fitting))
    keeps, turns, costs = {}, {}, []
    for name in fitting:
        dim = _input_dim(owner(pruning.bnn.model, name)[0])
        usable = torch.where(pruning.kept(name).to(pruning.device), scores[name], -torch.inf)
        size = pruning.posterior.mean[name].double().abs().to(pruning.device)
        ranks = ranks_in_blocks(usable, size, m, dim)
        keeps[name] = (ranks >= m - n).cpu()
        # every block loses its first weight before any loses its second, which depends on the first
        turns[name] = ranks + usable.flatten().argsort().argsort().view_as(ranks) / ranks.numel()
        lost = usable.cpu()[~keeps[name] & pruning.kept(name)]
        # weights cut before count as zero, so that layers whose pattern has begun come first
        costs.append(float(lost.sum() / (~keeps[name]).sum()) if len(lost) else -torch.inf)

    def masks(cut: Tensor) -> Params:
        chosen = set(cut.tolist())
        return {
            name: pruning.kept(name) & keeps[name] if place in chosen else pruning.kept(name)
            for place, name in enumerate(fitting)
        }

    return Candidates(
        scores=torch.tensor(costs, dtype=torch.float64),
        ties=torch.zeros(len(fitting), dtype=torch.float64),
        sizes=torch.ones(len(fitting), dtype=torch.int64),
        layers=torch.arange(len(fitting)),
        layer_names=tuple(fitting),
        gone=torch.tensor([not bool((pruning.kept(name) & ~keeps[name]).any()) for name in fitting]),
        masks=masks,
        weights=tuple(fitting),
        left=left,
        may_empty=True,
        turns=turns,
    )


def part_of_pattern(candidates: Candidates, masks: Params, before: Mapping[str, Tensor], share: float) -> Params:
    """Go a share of the way to a pattern: cut its first weights.

    Args:
        candidates: layers that take a pattern.
        masks: the whole cut, True = kept.
        before: masks of earlier cuts.
        share: on the logarithm of the number of weights left in the layers that are cut.
    """
    turns = candidates.turns or {}
    kept = {name: before[name].cpu() if name in before else torch.ones_like(mask) for name, mask in masks.items()}
    gone = {name: kept[name] & ~mask for name, mask in masks.items() if name in turns}
    lost = torch.cat([turns[name][where.to(turns[name].device)] for name, where in gone.items()])
    left = sum(int(kept[name].sum()) for name, where in gone.items() if bool(where.any()))
    count = left - round(left * (1 - len(lost) / max(1, left)) ** share)
    stays = torch.ones(len(lost), dtype=torch.bool)
    stays[lost.argsort(stable=True)[: max(1, count)].cpu()] = False
    parts = stays.split([int(where.sum()) for where in gone.values()])
    return dict(masks) | {
        name: masks[name].masked_scatter(where, part) for (name, where), part in zip(gone.items(), parts, strict=True)
    }


def _input_dim(module: nn.Module) -> int:
    return 0 if isinstance(module, _ConvTransposeNd) or is_transposed_linear(module) else 1


def ranks_in_blocks(scores: Tensor, ties: Tensor, m: int, dim: int) -> Tensor:
    """Rank every m neighbours along a dimension, the lowest first."""
    blocks, second = (t.movedim(dim, -1).unflatten(-1, (-1, m)) for t in (scores, ties))
    order = second.argsort(dim=-1, stable=True)
    order = order.gather(-1, blocks.gather(-1, order).argsort(dim=-1, stable=True))
    ranks: Tensor = order.argsort(dim=-1).flatten(-2).movedim(-1, dim).contiguous()
    return ranks
