"""The cut of one block: measure, choose, solve."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bayeslim.errors import BayeslimError, BayeslimWarning, NoSiteMatched
from bayeslim.posteriors.conjugate import Solve, Solver
from bayeslim.posteriors.layer_matrix import LayerMatrix
from bayeslim.prune.budget import Budget
from bayeslim.prune.candidates import pattern, ranks_in_blocks
from bayeslim.prune.streaming.block_run import BlockRun
from bayeslim.prune.streaming.block_units import cut_units
from bayeslim.prune.streaming.factors import KroneckerSettings, LocalSettings, layer_groups, measure, measure_group
from bayeslim.prune.streaming.layer_curvature import LayerCurvature
from bayeslim.prune.streaming.processes import owners, send, send_solve
from bayeslim.prune.streaming.resume import BlockCut
from bayeslim.sites import matcher, owner
from bayeslim.train.distributed import rank_and_world
from bayeslim.types import Params

RANKING_TOLERANCE = 0.03
"""The relative error of solutions that are only used to choose the next weights to cut."""


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
def cut_block(
    run: BlockRun, cutting: Cutting, dense: BlockRun | None = None, shares: Mapping[str, float] | None = None
) -> BlockCut:
    """Cut the next block of a run; the network is not changed yet.

    Args:
        run: the network, cut up to this block.
        cutting: how.
        dense: the dense network before this block, if its outputs are to be restored.
        shares: the sparsity of each weight, if layers differ in it.

    Raises:
        BayeslimError: if nothing in it can be cut.
    """
    name = run.names[run.done]
    block = cutting.model.get_submodule(name)
    skip = skipped(cutting, name)
    groups: list[list[str]] = []
    curvatures: Mapping[str, LayerCurvature] = {}
    if dense is not None:
        groups, left = layer_groups(run, skip)
    if dense is None or cutting.granularity == "unit":
        curvatures, left = measure(run, skip, cutting.curvature)
    if not curvatures and not groups:
        raise BayeslimError(
            f'No weight of the block "{name}" can be cut: '
            + ("; ".join(f"{weight}: {why}" for weight, why in left.items()) or "it has no linear layer that ran")
            + ". Pass other blocks=..., or protect less."
        )
    means = {layer: _matrix(cutting, c.layer) for layer, c in curvatures.items()}
    masks: Params = {}
    unread: Params = {}
    if cutting.granularity == "unit":
        assert cutting.budget is not None
        stay = set(protected(cutting))
        units = cut_units(block, name, run.arguments_of_block(), curvatures, means, cutting.budget, stay)
        masks, unread = units.masks, units.unread
        left = left | units.left
    elif dense is None:
        masks = _weight_masks(cutting, curvatures, means, left)
    masks = {n: mask.to(run.device) for n, mask in masks.items()}
    unread = {n: gone.to(run.device) for n, gone in unread.items()}
    if dense is None:
        weights, solves = _solved(cutting, curvatures, means, masks, unread)
    else:
        curvatures, means = {}, {}  # those of a group follow
        weights, solves = _restored(run, dense, cutting, groups, masks, unread, shares, left)
    for n, mask in masks.items():  # biases and norms of units, and weights without a curvature
        if n not in weights:
            weights[n] = cutting.model.get_parameter(n).detach().masked_fill(~mask, 0)
    on_cpu = {n: mask.cpu() for n, mask in masks.items()}
    return BlockCut(weights, on_cpu, {n: gone.cpu() for n, gone in unread.items()}, left, solves)


def skipped(cutting: Cutting, block: str) -> dict[str, str]:
    """List the weights of a block that are not cut, with the reasons."""
    return _tied(cutting.model, block) | protected(cutting)


def _matrix(cutting: Cutting, layer: LayerMatrix) -> Tensor:
    return layer.matrix({n: cutting.model.get_parameter(n).detach().double() for n in layer.names})


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
    for (name, curvature), source in zip(changed.items(), _sources(changed, means), strict=True):
        new, solve = None, None
        if rank == source:
            kept, silent = _kept(cutting, curvature.layer, masks, unread)
            new, solve = curvature.survivors(means[name].masked_fill(silent, 0), kept, cutting.solver)
        found, solves[curvature.layer.weight] = _sent(cutting, curvature.layer, new, solve, source)
        weights |= found
    return weights, solves


def _restored(
    run: BlockRun,
    dense: BlockRun,
    cutting: Cutting,
    groups: Sequence[Sequence[str]],
    masks: Params,
    unread: Params,
    shares: Mapping[str, float] | None,
    left: dict[str, str],
) -> tuple[Params, dict[str, Solve]]:
    """Cut the layers of a block in the order in which they run.

    Each sees the cuts before it. Masks of units are given; others are chosen here, and added to `masks`.
    """
    assert isinstance(cutting.curvature, LocalSettings)
    rank, _ = rank_and_world()
    n_of_m = pattern(cutting.granularity)
    weights: Params = {}
    solves: dict[str, Solve] = {}
    for group in groups:
        curvatures, targets = measure_group(run, dense, group, cutting.curvature)
        originals = {name: _matrix(cutting, c.layer) for name, c in curvatures.items()}
        for (name, curvature), source in zip(curvatures.items(), _sources(curvatures, originals), strict=True):
            layer = curvature.layer
            if n_of_m is not None and layer.shape[_input_dim(layer)] % n_of_m[1]:
                left[layer.weight] = f"its {layer.shape[_input_dim(layer)]} inputs are no multiple of {n_of_m[1]}"
                continue
            target = targets[name] if layer.bias is not None else targets[name][..., :-1]
            fitted = (target + curvature.prior * originals[name]) @ curvature.input_inverse
            share = None if shares is None else shares[layer.weight]
            new, solve, mask = None, None, torch.ones(layer.shape, dtype=torch.bool, device=run.device)
            given = cutting.granularity == "unit"
            if rank == source:
                if given:
                    kept, silent = _kept(cutting, layer, masks, unread)
                    new, solve = curvature.survivors(fitted.masked_fill(silent, 0), kept, cutting.solver)
                else:
                    mask, new, solve = _cut_in_steps(cutting, curvature, fitted, share)
            if not given:
                send(mask, source)
                masks[layer.weight] = mask
            found, solves[layer.weight] = _sent(cutting, layer, new, solve, source)
            weights |= found
            for n, value in found.items():
                run.put(n, value)
    if not masks:
        raise _none_can(cutting.granularity, left)
    return weights, solves


def _cut_in_steps(
    cutting: Cutting, curvature: LayerCurvature, fitted: Tensor, share: float | None
) -> tuple[Tensor, Tensor, Solve]:
    """Cut one layer in steps; return its mask, its matrix and the last solve."""
    assert isinstance(cutting.curvature, LocalSettings)
    assert cutting.curvature.steps is not None
    layer, n_of_m = curvature.layer, pattern(cutting.granularity)
    alone = replace(layer, bias=None)
    new, mask = fitted, torch.ones(layer.shape, dtype=torch.bool, device=fitted.device)
    for step in range(1, cutting.curvature.steps + 1):
        every = curvature.scores(new)
        scores = alone.params(every if layer.bias is None else every[..., :-1])[layer.weight]
        scores = scores.masked_fill(~mask, -1.0)  # what is gone stays so
        if n_of_m is None:
            assert cutting.budget is not None
            most = _count(scores, cutting.budget.value if share is None else share)
        else:
            ranks = ranks_in_blocks(scores, scores, n_of_m[1], _input_dim(layer))
            scores = scores.masked_fill(ranks >= n_of_m[1] - n_of_m[0], torch.inf)
            most = int(torch.isfinite(scores).sum())
        mask = _lowest(scores, round(most * step / cutting.curvature.steps))
        kept, _ = _kept(cutting, layer, {layer.weight: mask}, {})
        solver = cutting.solver
        if step < cutting.curvature.steps:  # a solution that only ranks weights may be rough
            solver = replace(solver, tolerance=max(solver.tolerance, RANKING_TOLERANCE))
        new, solve = curvature.survivors(fitted, kept, solver)
    return mask, new, solve


def _lowest(scores: Tensor, count: int) -> Tensor:
    """Mask all but the `count` lowest scores; of equals, the first go first."""
    kept = torch.ones(scores.numel(), dtype=torch.bool, device=scores.device)
    kept[scores.flatten().argsort(stable=True)[:count]] = False
    return kept.view(scores.shape)


def _count(scores: Tensor, fraction: float) -> int:
    return min(scores.numel() - 1, round(fraction * scores.numel()))


def _input_dim(layer: LayerMatrix) -> int:
    return 0 if layer.transposed else 1


def _sources(curvatures: Mapping[str, LayerCurvature], means: Mapping[str, Tensor]) -> list[int]:
    return owners([float(means[layer].numel()) * sum(means[layer].shape[1:]) for layer in curvatures])


def _kept(cutting: Cutting, layer: LayerMatrix, masks: Params, unread: Params) -> tuple[Tensor, Tensor]:
    """Make the matrices of what is kept and of what is not read any more."""
    params = {n: cutting.model.get_parameter(n) for n in layer.names}
    ones = {n: torch.ones(p.shape, dtype=torch.bool, device=p.device) for n, p in params.items()}
    kept = layer.matrix({n: masks.get(n, ones[n]) for n in layer.names})
    return kept, layer.matrix({n: unread.get(n, ~ones[n]) for n in layer.names})


def _sent(
    cutting: Cutting, layer: LayerMatrix, new: Tensor | None, solve: Solve | None, source: int
) -> tuple[Params, Solve]:
    """Give the weights that one process solved for to all, in the network's dtypes."""
    params = {n: cutting.model.get_parameter(n) for n in layer.names}
    if new is not None:
        found = {n: value.to(params[n].dtype).contiguous() for n, value in layer.params(new).items()}
    else:
        found = {n: torch.empty_like(p, memory_format=torch.contiguous_format) for n, p in params.items()}
    for value in found.values():
        send(value, source)
    solve = send_solve(solve, source, next(iter(params.values())).device)
    if not solve.converged:
        warnings.warn(
            f'The solve for the kept weights of "{layer.weight}" stopped after {solve.iterations} iterations with '
            f"a relative residual of {solve.residual:.2g}. Its last iterate is used, which is better than weights "
            "that did not move. Use a larger damping or a narrower prior.",
            BayeslimWarning,
            stacklevel=2,
        )
    return found, solve


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
            dim = _input_dim(layer)
            if layer.shape[dim] % n_of_m[1]:
                left[layer.weight] = f"its {layer.shape[dim]} inputs are no multiple of {n_of_m[1]}"
                continue
            magnitudes = cutting.model.get_parameter(layer.weight).detach().double().abs()
            ranks = ranks_in_blocks(scores[layer.weight], magnitudes, n_of_m[1], dim)
            masks[layer.weight] = ranks >= n_of_m[1] - n_of_m[0]
        if not masks:
            raise _none_can(cutting.granularity, left)
        return masks
    assert cutting.budget is not None
    return {name: _lowest(value, _count(value, cutting.budget.value)) for name, value in scores.items()}


def _none_can(granularity: str, left: Mapping[str, str]) -> BayeslimError:
    """Make the error of a block whose weights all stay."""
    cut = "be cut" if pattern(granularity) is None else f"take the pattern {granularity}"
    reasons = "; ".join(f"{name}: {why}" for name, why in left.items())
    return BayeslimError(f"No weight of a block can {cut}: {reasons or 'no linear layer ran in it'}.")


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


def protected(cutting: Cutting) -> dict[str, str]:
    """List the parameters that the budget protects, with that as the reason."""
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
