"""The cut of one block: measure, choose, solve."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bayeslim.errors import BayeslimError, BayeslimWarning, NoSiteMatched
from bayeslim.posteriors.conjugate import Solve, Solver
from bayeslim.prune.budget import Budget
from bayeslim.prune.candidates import pattern, ranks_in_blocks
from bayeslim.prune.streaming.block_run import BlockRun
from bayeslim.prune.streaming.block_units import cut_units
from bayeslim.prune.streaming.choice import ranked_together, same_fraction
from bayeslim.prune.streaming.factors import KroneckerSettings, LocalSettings, measure
from bayeslim.prune.streaming.layer_curvature import LayerCurvature
from bayeslim.prune.streaming.processes import owners, send, send_solve
from bayeslim.prune.streaming.resume import BlockCut
from bayeslim.sites import matcher, owner
from bayeslim.train.distributed import rank_and_world
from bayeslim.types import Params


@dataclass(frozen=True, eq=False)
class Cutting:
    """How blocks are cut.

    Attributes:
        model: the network; its weights are written by `write_weights` only.
        budget: with a sparsity; None for a pattern.
        granularity: "weight", "unit" or N:M.
        solver: when conjugate gradients stop.
        curvature: which, and its settings.
    """

    model: nn.Module
    budget: Budget | None
    granularity: str
    solver: Solver
    curvature: LocalSettings | KroneckerSettings


@torch.no_grad()
def cut_block(run: BlockRun, cutting: Cutting) -> BlockCut:
    """Cut the next block of a run; nothing is changed yet.

    Raises:
        BayeslimError: if nothing in it can be cut.
    """
    name = run.names[run.done]
    block = cutting.model.get_submodule(name)
    protected = _protected(cutting)
    curvatures, left = measure(run, _tied(cutting.model, name) | protected, cutting.curvature)
    if not curvatures:
        raise BayeslimError(
            f'No weight of the block "{name}" can be cut: '
            + ("; ".join(f"{weight}: {why}" for weight, why in left.items()) or "it has no linear layer that ran")
            + ". Pass other blocks=..., or protect less."
        )
    means = {
        layer: c.layer.matrix({n: cutting.model.get_parameter(n).detach().double() for n in c.layer.names})
        for layer, c in curvatures.items()
    }
    unread: Params = {}
    if cutting.granularity == "unit":
        assert cutting.budget is not None
        units = cut_units(block, name, run.arguments_of_block(), curvatures, means, cutting.budget, set(protected))
        masks, unread = units.masks, units.unread
        left = left | units.left
    else:
        masks = _weight_masks(cutting, curvatures, means, left)
    masks = {n: mask.to(run.device) for n, mask in masks.items()}
    unread = {n: gone.to(run.device) for n, gone in unread.items()}
    weights, solves = _solved(cutting, curvatures, means, masks, unread)
    for n, mask in masks.items():  # biases and norms of units, and weights without a curvature
        if n not in weights:
            weights[n] = cutting.model.get_parameter(n).detach().masked_fill(~mask, 0)
    on_cpu = {n: mask.cpu() for n, mask in masks.items()}
    return BlockCut(weights, on_cpu, {n: gone.cpu() for n, gone in unread.items()}, left, solves)


@torch.no_grad()
def write_weights(model: nn.Module, cut: BlockCut) -> None:
    """Write the weights of a cut block into the network."""
    for name, value in cut.weights.items():
        model.get_parameter(name).copy_(value)


def _solved(
    cutting: Cutting,
    curvatures: Mapping[str, LayerCurvature],
    means: Mapping[str, Tensor],
    masks: Params,
    unread: Params,
) -> tuple[Params, dict[str, Solve]]:
    """Solve for the survivors of all layers, each in one of the processes."""
    rank, _ = rank_and_world()
    weights: Params = {}
    solves: dict[str, Solve] = {}
    changed = {
        layer: c
        for layer, c in curvatures.items()
        if any(n in masks and not bool(masks[n].all()) for n in c.layer.names)
    }
    costs = [float(means[layer].numel()) * sum(means[layer].shape[1:]) for layer in changed]
    for (name, curvature), source in zip(changed.items(), owners(costs), strict=True):
        layer = curvature.layer
        params = {n: cutting.model.get_parameter(n) for n in layer.names}
        solve = None
        if rank == source:
            ones = {n: torch.ones(p.shape, dtype=torch.bool, device=p.device) for n, p in params.items()}
            kept = layer.matrix({n: masks.get(n, ones[n]) for n in layer.names})
            silent = layer.matrix({n: unread.get(n, ~ones[n]) for n in layer.names})
            new, solve = curvature.survivors(means[name].masked_fill(silent, 0), kept, cutting.solver)
            found = {n: value.to(params[n].dtype).contiguous() for n, value in layer.params(new).items()}
        else:
            found = {n: torch.empty_like(p, memory_format=torch.contiguous_format) for n, p in params.items()}
        for value in found.values():
            send(value, source)
        solve = send_solve(solve, source, next(iter(params.values())).device)
        weights |= found
        solves[layer.weight] = solve
        if not solve.converged:
            warnings.warn(
                f'The solve for the kept weights of "{layer.weight}" stopped after {solve.iterations} iterations with '
                f"a relative residual of {solve.residual:.2g}. Its last iterate is used, which is better than weights "
                "that did not move. Raise max_iterations, or use a larger damping or a narrower prior.",
                BayeslimWarning,
                stacklevel=2,
            )
    return weights, solves


def _weight_masks(
    cutting: Cutting, curvatures: Mapping[str, LayerCurvature], means: Mapping[str, Tensor], left: dict[str, str]
) -> Params:
    """Choose single weights or patterns, by parameter name."""
    scores: Params = {}
    for name, curvature in curvatures.items():
        layer, every = curvature.layer, curvature.scores(means[name])
        alone = replace(layer, bias=None)
        scores |= alone.params(every if layer.bias is None else every[..., :-1])
    n_of_m = pattern(cutting.granularity)
    if n_of_m is not None:
        masks = {}
        for curvature in curvatures.values():
            layer = curvature.layer
            dim = 0 if layer.transposed else 1
            if layer.shape[dim] % n_of_m[1]:
                left[layer.weight] = f"its {layer.shape[dim]} inputs are no multiple of {n_of_m[1]}"
                continue
            magnitudes = cutting.model.get_parameter(layer.weight).detach().double().abs()
            ranks = ranks_in_blocks(scores[layer.weight], magnitudes, n_of_m[1], dim)
            masks[layer.weight] = ranks >= n_of_m[1] - n_of_m[0]
        if not masks:
            raise BayeslimError(
                f"No weight can take the pattern {cutting.granularity}: "
                + "; ".join(f"{name}: {why}" for name, why in left.items())
            )
        return masks
    assert cutting.budget is not None
    if cutting.budget.scope == "layer" or isinstance(cutting.curvature, LocalSettings):
        return same_fraction(scores, cutting.budget.value)
    return ranked_together(scores, cutting.budget.value, cutting.budget.empty_layers == "keep best")


def _tied(model: nn.Module, block: str) -> dict[str, str]:
    """Find weights of a block that other modules share, with the reason."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return {
        name: f"is shared: {', '.join(tied)}"
        for tied in names.values()
        if len(tied) > 1
        for name in tied
        if name.startswith(f"{block}.")
    }


def _protected(cutting: Cutting) -> dict[str, str]:
    found: dict[str, str] = {}
    for selection in cutting.budget.protect if cutting.budget is not None else ():
        matches = matcher(selection)
        chosen = [n for n, p in cutting.model.named_parameters() if matches(n, p, owner(cutting.model, n)[0])]
        if not chosen:
            shown = getattr(selection, "__name__", None) or repr(selection)
            raise NoSiteMatched(
                f"protect={shown} matches none of the parameters of {type(cutting.model).__name__}. "
                "Print bl.sites(model) for their names."
            )
        found |= dict.fromkeys(chosen, "protected")
    return found
