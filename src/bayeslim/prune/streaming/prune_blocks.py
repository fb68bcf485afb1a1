"""`prune_blocks`: cut a large network block after block, with the curvature of one block in memory.

For each block in turn: run the calibration batches up to it, through the blocks that are cut already; measure the
factors of its layers; choose the masks; solve for the survivors; and go on with the outputs of the cut block. Besides
the network, memory holds the factors of one block, the outputs of one block for all batches (`offload="cpu"` keeps them
there; of the dense network too, where the cut one is fitted to it) and the activations of one batch.

In a process group every process is given the same batches and takes each `world_size`-th of them. The sums of the
factors are added over the processes, each layer of a block is solved by one of them, and its weights are broadcast: all
processes end with the same network, which is that of one process up to the order of the sums.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bayeslim.bayesian import Bayesian
from bayeslim.curvature.columns import Columns
from bayeslim.errors import BayeslimError, ShapeMismatch, UnsupportedModel
from bayeslim.io.digest import digest
from bayeslim.likelihoods import Likelihood
from bayeslim.methods.laplace import Laplace
from bayeslim.noise import kept_random_state
from bayeslim.posteriors.conjugate import Solver
from bayeslim.priors import Normal
from bayeslim.prune.budget import Budget
from bayeslim.prune.candidates import pattern
from bayeslim.prune.plan import Plan
from bayeslim.prune.ranking import MIN_CAPACITY
from bayeslim.prune.streaming.block_cut import Cutting, cut_block, skipped, write_weights
from bayeslim.prune.streaming.block_run import BlockRun
from bayeslim.prune.streaming.factors import KroneckerSettings, LocalSettings, measure, output_weights
from bayeslim.prune.streaming.found_blocks import find_blocks
from bayeslim.prune.streaming.processes import least
from bayeslim.prune.streaming.restored import allocation
from bayeslim.prune.streaming.resume import BlockCut, Checkpoint
from bayeslim.prune.streaming.shortfalls import warn_of_the_budget, warn_of_the_rest
from bayeslim.replica import deep_copy
from bayeslim.sites import usable
from bayeslim.train.distributed import rank_and_world
from bayeslim.train.loaders import check_labelled, check_loader
from bayeslim.train.progress import progress as progress_bar
from bayeslim.train.progress import showing
from bayeslim.types import chosen_device, inputs_of, split_batch, to_device

Curvature = Literal["restored", "local", "kronecker"]
COLUMNS: Columns = "signs"
"""Gradients measure the loss in one backward pass, see `bayeslim.curvature.columns`."""
MAX_ITERATIONS = 1000
"""Conjugate gradients stop after this many products, with a warning."""
SCORE_QUANTILES = 1024
"""Scores of a layer are kept as this many quantiles, to share the sparsity out between layers."""


@dataclass(frozen=True, eq=False)
class PrunedBlocks:
    """The result of `prune_blocks`.

    Attributes:
        model: the plain network with zeros in place.
        plan: what was cut, and how the survivors of each layer were solved for.
    """

    model: nn.Module
    plan: Plan


def prune_blocks(
    network: nn.Module | Bayesian,
    budget: Budget | None,
    calibration: Iterable[Any],
    *,
    blocks: str | Sequence[str] | None = None,
    curvature: Curvature = "restored",
    granularity: str = "weight",
    likelihood: Likelihood | None = None,
    prior_std: float | None = None,
    damping: float = 0.01,
    steps: int = 16,
    tolerance: float = 1e-3,
    offload: torch.device | str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> PrunedBlocks:
    """Cut a copy of a large network, one block after the other.

    Only the layers of the blocks are cut: embeddings and heads stay. `prune_blocks_` cuts the network itself, without a
    copy.

    Args:
        network: a plain network, or a Bayesian one: then its mean network, its likelihood and its prior are used. A
            `Laplace` network need not be fitted.
        budget: `Budget(sparsity=...)`, of the layers in the blocks. With the scope "global" the restored curvature
            with a likelihood gives each layer its own share. Otherwise every layer is cut by the same fraction. None
            for N:M patterns.
        calibration: batches of inputs, or of inputs and targets, as for `fit`. In a process group all processes are
            given the same batches.
        blocks: a name or glob, or several, of an `nn.ModuleList` or of modules; by default the longest
            `nn.ModuleList` that is not inside of another.
        curvature: "restored", the error of each layer against the dense network's outputs, the residual stream
            included, so that later layers make up for the cuts of earlier ones; with a likelihood, outputs count by
            their squared gradients in the dense network, which takes one backward pass. "local", the error of each
            layer's own outputs, given the inputs that it has then. "kronecker", the curvature of the loss at the end of
            the network, which takes a backward pass through all later blocks for each block: with L blocks about L / 2
            times the cost of a pass over the whole network and back.
        granularity: "weight", "unit" (heads and neurons inside of a block), or "N:M" such as "2:4".
        likelihood: of the network's outputs; the Kronecker curvature needs it.
        prior_std: standard deviation of the Normal prior, for the Kronecker curvature; by default 1, or that of the
            Bayesian network.
        damping: the prior precision of the local and restored curvature, as a fraction of the mean squared input.
        steps: how often the restored curvature solves for the survivors of a layer while its weights are chosen.
        tolerance: conjugate gradients stop at this relative error.
        offload: the device that keeps the outputs of a block between blocks, such as "cpu"; by default the network's.
        checkpoint: a folder for finished blocks; a call with the same arguments and the same batches goes on where the
            last one ended.
        progress: whether to show a progress bar.

    Raises:
        UnsupportedModel: for a network that cannot be run block by block, that has several longest lists, or that was
            cut before.
        BayeslimError: if nothing in a block can be cut.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
    >>> batches = [torch.arange(9)[None]]
    >>> pruned = prune_blocks(model, Budget(sparsity=0.5), batches, blocks=["1", "2"], progress=False)
    >>> pruned.plan.sparsity
    0.5
    """
    if isinstance(network, Bayesian):
        if network.masks:
            raise UnsupportedModel(
                "prune_blocks fits every layer anew, and would bring back weights that were cut before. Give it the "
                "network before that cut, with the whole sparsity, or use bl.prune."
            )
        # the weights of a trained network are the mean of its Laplace posterior, before the curvature is measured too
        unmeasured = isinstance(network.method, Laplace) and "posterior" not in network.state
        model = deep_copy(network.model) if unmeasured else network.mean_network()
        likelihood = likelihood or network.likelihood
        if curvature == "kronecker" and prior_std is None:
            prior_std = _one_std(network)
    else:
        model = deep_copy(_plain(network, "prune_blocks needs a network: an nn.Module or a Bayesian"))
    return prune_blocks_(
        model, budget, calibration, blocks=blocks, curvature=curvature, granularity=granularity, likelihood=likelihood,
        prior_std=prior_std, damping=damping, steps=steps, tolerance=tolerance, offload=offload, checkpoint=checkpoint,
        progress=progress,
    )  # fmt: skip


@torch.inference_mode(False)
def prune_blocks_(
    model: nn.Module,
    budget: Budget | None,
    calibration: Iterable[Any],
    *,
    blocks: str | Sequence[str] | None = None,
    curvature: Curvature = "restored",
    granularity: str = "weight",
    likelihood: Likelihood | None = None,
    prior_std: float | None = None,
    damping: float = 0.01,
    steps: int = 16,
    tolerance: float = 1e-3,
    offload: torch.device | str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> PrunedBlocks:
    """Cut a large plain network in place, one block after the other.

    For networks that do not fit in memory twice; the arguments are those of `prune_blocks`. The weights of a block
    change when the block is done: if the call is interrupted, the finished blocks are cut and the others are as they
    were. To resume from `checkpoint`, load the network's original weights first.
    """
    model = _plain(model, "prune_blocks_ needs a plain network, an nn.Module")
    std = 1.0 if prior_std is None else prior_std
    _check(budget, granularity, curvature, likelihood, std, damping, steps)
    check_loader(calibration, "calibration")
    names, solver = find_blocks(model, blocks), Solver(tolerance, MAX_ITERATIONS)
    rank, world = rank_and_world()
    with kept_random_state():
        everything = list(calibration)
    if len(everything) < world:
        raise ShapeMismatch(
            f"The calibration data need at least one batch for each of {world} process(es). Got {len(everything)}. "
            "A generator can be used up only once: pass a DataLoader or a list of batches."
        )
    places = range(rank, len(everything), world)
    inputs = [inputs_of(everything[place]) for place in places]
    kept_on = None if offload is None else chosen_device(offload)
    run = BlockRun(model, names, inputs, kept_on)
    run.check()
    settings: LocalSettings | KroneckerSettings = LocalSettings(damping)
    loss = None
    if likelihood is not None and curvature != "local":
        check_labelled(likelihood, (split_batch(batch)[1] for batch in everything))
        targets = [split_batch(everything[place])[1] for place in places]
        loss = KroneckerSettings(likelihood, targets, tuple(places), float(std) ** -2, COLUMNS)
    dense, shares = None, None
    if curvature == "kronecker":
        assert loss is not None
        settings = loss
    elif curvature == "restored":
        settings = LocalSettings(damping, None if loss is None else output_weights(run, loss), steps)
        dense = BlockRun(model, run.names, inputs, kept_on)
    cutting = Cutting(model, budget, granularity, solver, settings)
    if dense is not None and loss is not None and granularity == "weight" and _is_global(budget):
        shares = _shares(BlockRun(model, run.names, inputs, kept_on), cutting)
    described = {
        "blocks": list(run.names),
        "budget": repr(budget),
        "curvature": curvature,
        "granularity": granularity,
        "prior": repr((prior_std, damping, steps, COLUMNS, repr(likelihood))),
        "solver": repr(solver),
        "batches": len(everything),
        "calibration data": digest(_tensors(everything)) if checkpoint is not None else "",
        "weights": digest(model.parameters()) if checkpoint is not None else "",
    }
    with showing(progress and rank == 0):
        cuts = _cut_all(run, dense, cutting, shares, Checkpoint(checkpoint, described))
    plan = _plan(cuts, curvature, granularity, budget, shares is not None)
    warn_of_the_budget(plan, budget)
    warn_of_the_rest(plan, cutting)
    return PrunedBlocks(model, plan)


def _cut_all(
    run: BlockRun,
    dense: BlockRun | None,
    cutting: Cutting,
    shares: Mapping[str, float] | None,
    store: Checkpoint,
) -> list[BlockCut]:
    """Cut or read every block, and write its weights into the network."""
    rank, _ = rank_and_world()
    finished = least(store.finished(len(run.names)), cutting.model)
    cuts: list[BlockCut] = []
    bar = progress_bar(run.names, "blocks")
    for place, name in enumerate(bar):
        bar.show(block=name)
        if place < finished:
            cut = store.read(place, cutting.model)
        else:
            cut = cut_block(run, cutting, dense, shares)
            if rank == 0:
                store.write(place, cut)
        is_last = place + 1 == len(run.names)
        if dense is not None and not is_last:
            dense.advance()  # before the weights, which both runs share, change
        write_weights(cutting.model, cut)
        for changed in cut.weights:
            run.put(changed, cutting.model.get_parameter(changed).detach())
        cuts.append(replace(cut, weights={}))
        if not is_last:
            run.advance()
    return cuts


def _plain(network: Any, needed: str) -> nn.Module:
    network = usable(network)
    if not isinstance(network, nn.Module) or isinstance(network, Bayesian):
        raise TypeError(f"{needed}. Got {type(network).__name__}.")
    return network


def _is_global(budget: Budget | None) -> bool:
    return budget is not None and budget.scope == "global"


@torch.no_grad()
def _shares(run: BlockRun, cutting: Cutting) -> dict[str, float]:
    """Share the sparsity out between the layers, by their scores in the dense network."""
    assert cutting.budget is not None
    quantiles: dict[str, Tensor] = {}
    sizes: dict[str, int] = {}
    for place in range(len(run.names)):
        for weight, scores in _scores(run, cutting).items():
            quantiles[weight], sizes[weight] = scores[even_places(len(scores)).to(scores.device)], len(scores)
        if place + 1 < len(run.names):
            run.advance()
    return allocation(quantiles, sizes, cutting.budget.value, MIN_CAPACITY) if quantiles else {}


def even_places(count: int) -> Tensor:
    """List places at even steps from the first to the last, in whole numbers.

    Single precision could not tell the last of many places apart.
    """
    return torch.arange(SCORE_QUANTILES + 1) * (count - 1) // SCORE_QUANTILES


def _scores(run: BlockRun, cutting: Cutting) -> dict[str, Tensor]:
    """Sort the scores of the weights of the next block, by weight."""
    found = {}
    curvatures, _ = measure(run, skipped(cutting, run.names[run.done]), cutting.curvature)
    for curvature in curvatures.values():
        layer = curvature.layer
        scores = curvature.scores(layer.matrix({n: cutting.model.get_parameter(n).double() for n in layer.names}))
        found[layer.weight] = (scores if layer.bias is None else scores[..., :-1]).flatten().sort().values
    return found


def _plan(cuts: Sequence[BlockCut], curvature: str, granularity: str, budget: Budget | None, are_shared: bool) -> Plan:
    def merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        return {name: value for part in parts for name, value in part.items()}

    notes = []
    if granularity == "weight" and _is_global(budget) and not are_shared:
        notes.append('every layer was cut by the same fraction: only the curvature "restored" with a likelihood shares')
    return Plan(
        merged(cut.masks for cut in cuts),
        criterion="curvature" if curvature == "kronecker" else curvature,
        granularity=granularity,
        budget=repr(budget) if budget else "",
        left=merged(cut.left for cut in cuts),
        unread=merged(cut.unread for cut in cuts),
        notes=(f"cut block by block, {len(cuts)} blocks", *notes),
        solves=merged(cut.solves for cut in cuts),
    )


def _one_std(bnn: Bayesian) -> float:
    """Find the standard deviation of a network's prior, if it is one number."""
    stds = [p.config()["std"] if isinstance(p, Normal) else None for p in (bnn.priors[n] for n in bnn.sites.names)]
    if len(set(map(repr, stds))) != 1 or not isinstance(stds[0], (int, float)):
        raise BayeslimError(
            "The Kronecker curvature of blocks needs a Normal prior with one standard deviation. "
            "Pass prior_std=..., or use bl.prune on the whole network."
        )
    return float(stds[0])


def _tensors(batches: Iterable[Any]) -> Iterator[Tensor]:
    for batch in batches:  # dicts of other libraries become plain ones by the move
        yield from (leaf for leaf in tree_leaves(to_device(batch, torch.device("cpu"))) if isinstance(leaf, Tensor))


def _check(
    budget: Any, granularity: Any, curvature: Any, likelihood: Any, prior_std: Any, damping: Any, steps: Any
) -> None:
    n_of_m = pattern(granularity) if isinstance(granularity, str) else None
    if n_of_m is None and granularity not in ("weight", "unit"):
        raise ValueError(f'granularity must be "weight", "unit" or "N:M", such as "2:4". Got {granularity!r}.')
    if n_of_m is not None:
        if budget is not None:
            raise TypeError(f'"{granularity}" says how much goes: pass None as the budget. Got {budget!r}.')
    elif not isinstance(budget, Budget) or budget.goal != "sparsity":
        raise TypeError(
            "prune_blocks needs a bl.Budget(sparsity=...): a block is cut before the later ones are seen, so that no "
            f"other goal can be met. Got {budget!r}."
        )
    elif budget.uniform and budget.scope != "layer":
        raise ValueError(
            "Blocks that are cut one after the other have the same widths only if all their layers lose the same "
            f'fraction: pass Budget(..., uniform=True, scope="layer"). Got {budget!r}.'
        )
    if curvature not in ("restored", "local", "kronecker"):
        raise ValueError(f'curvature must be "restored", "local" or "kronecker". Got {curvature!r}.')
    if curvature == "kronecker" and not isinstance(likelihood, Likelihood):
        raise TypeError(
            "The Kronecker curvature is that of a loss: pass likelihood=..., such as bl.likelihoods.Categorical(), or "
            f"a Bayesian network. Got {likelihood!r}."
        )
    for name, value in (("damping", damping), ("prior_std", prior_std)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ValueError(f"{name} must be a positive, finite number. Got {value!r}.")
    if type(steps) is not int or steps < 1:
        raise ValueError(f"steps must be a whole number of at least 1. Got {steps!r}.")
