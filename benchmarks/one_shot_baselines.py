"""One-shot pruning by magnitude, Wanda, SparseGPT and the exact row solve.

All but magnitude go through the blocks in order: the inputs of a block are those that the cut blocks before it produce.
A layer y = W x with inputs X (n, inputs) has the layer-wise loss ‖X (W − V)ᵀ‖², whose Hessian is H = XᵀX for every row.

    magnitude   |w|, the smallest of a layer go                                 Han et al. 2015, arXiv:1506.02626
    wanda       |w_ij| ‖X_j‖₂, the smallest of every row go                      Sun et al. 2023, arXiv:2306.11695
    sparsegpt   columns in blocks of 128; w² / [H⁻¹]_jj² chooses within a block, the remaining columns compensate for
                each column's error through the Cholesky factor of H⁻¹; H is damped by 1 % of its mean diagonal
                                                                               Frantar & Alistarh 2023, arXiv:2301.00774
    row         w² / [H⁻¹]_jj chooses in a layer; the rest of each row is solved for exactly, v_R = H_RR⁻¹ (H w)_R
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

DAMPING = 0.01
COLUMNS_PER_BLOCK = 128
MAX_NUMBERS_PER_CHUNK = 2**27


@dataclass(frozen=True)
class Target:
    """A sparsity: a fraction of the weights, or all but n of every m inputs."""

    sparsity: float = 0.5
    n: int = 0
    m: int = 0


class Decoder(nn.Module):
    """The shape of a language model that can be cut block by block."""

    blocks: nn.ModuleList

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens (B, T), as the first block's inputs."""
        raise NotImplementedError

    def matrices(self) -> dict[str, nn.Linear]:
        """List the linear layers that are cut, by name."""
        raise NotImplementedError


Cut = Callable[[Tensor, Tensor, Target], Tensor]
"""The new weight of a layer from its weight (outputs, inputs), the Hessian XᵀX and the target."""


def lowest(scores: Tensor, target: Target, by_row: bool = False) -> Tensor:
    """Mask the lowest scores of a layer, of each row, or of every m neighbours."""
    if target.m:
        groups = scores.unflatten(1, (-1, target.m))
        chosen = groups.argsort(-1)[..., : target.m - target.n]
        return torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, chosen, True).flatten(1)
    flat = scores if by_row else scores.reshape(1, -1)
    chosen = flat.argsort(-1)[:, : round(target.sparsity * flat.shape[1])]
    return torch.zeros_like(flat, dtype=torch.bool).scatter_(-1, chosen, True).view_as(scores)


def magnitude(weight: Tensor, hessian: Tensor, target: Target) -> Tensor:
    """Cut the smallest weights."""
    return weight.masked_fill(lowest(weight.abs(), target), 0.0)


def wanda(weight: Tensor, hessian: Tensor, target: Target) -> Tensor:
    """Cut the smallest products of weight and input norm in every row."""
    return weight.masked_fill(lowest(weight.abs() * hessian.diagonal().sqrt(), target, by_row=True), 0.0)


def damped(hessian: Tensor) -> Tensor:
    """Add 1 % of the mean diagonal; inputs that are always zero get a one."""
    hessian = hessian.double().clone()
    diagonal = hessian.diagonal()
    diagonal[diagonal == 0] = 1.0
    diagonal += DAMPING * float(diagonal.mean())
    return hessian


def sparsegpt(weight: Tensor, hessian: Tensor, target: Target) -> Tensor:
    """Cut column after column; later columns compensate for the error of each."""
    left = weight.double().clone()
    left[:, hessian.diagonal() == 0] = 0.0
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped(hessian)))
    upper = torch.linalg.cholesky(inverse, upper=True)
    for start in range(0, left.shape[1], COLUMNS_PER_BLOCK):
        stop = min(start + COLUMNS_PER_BLOCK, left.shape[1])
        block, factor = left[:, start:stop].clone(), upper[start:stop, start:stop]
        errors = torch.zeros_like(block)
        gone = torch.zeros_like(block, dtype=torch.bool)
        if not target.m:
            gone = lowest((block / factor.diagonal()).square(), target)
        for column in range(stop - start):
            if target.m and column % target.m == 0:
                group = slice(column, column + target.m)
                gone[:, group] = lowest((block[:, group] / factor.diagonal()[group]).square(), target)
            new = block[:, column].masked_fill(gone[:, column], 0.0)
            errors[:, column] = (block[:, column] - new) / factor[column, column]
            block[:, column] = new
            block[:, column + 1 :] -= errors[:, column : column + 1] * factor[column, column + 1 :]
        left[:, start:stop] = block
        left[:, stop:] -= errors @ upper[start:stop, stop:]
    return left.to(weight.dtype)


def row(weight: Tensor, hessian: Tensor, target: Target) -> Tensor:
    """Cut by the saliency of weights, and solve for the rest of every row exactly."""
    full = damped(hessian)
    variance = torch.cholesky_inverse(torch.linalg.cholesky(full)).diagonal()
    wide = weight.double()
    gone = lowest(wide.square() / variance, target)
    return solved_rows(wide, full, gone).to(weight.dtype)


def solved_rows(weight: Tensor, hessian: Tensor, gone: Tensor) -> Tensor:
    """Solve H_RR v_R = (H w)_R for the kept weights R of every row."""
    found = torch.zeros_like(weight)
    pull = weight @ hessian
    step = max(1, MAX_NUMBERS_PER_CHUNK // hessian.numel())
    for start in range(0, len(weight), step):
        kept = ~gone[start : start + step]
        both = kept[:, :, None] & kept[:, None, :]
        identity = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
        factor = torch.linalg.cholesky(torch.where(both, hessian, identity))
        solution = torch.cholesky_solve((pull[start : start + step] * kept)[..., None], factor)
        found[start : start + step] = solution[..., 0] * kept
    return found


BASELINES: dict[str, Cut] = {"magnitude": magnitude, "wanda": wanda, "sparsegpt": sparsegpt, "row": row}


@torch.no_grad()
def prune_in_order(network: Decoder, tokens: Tensor, cut: Cut, target: Target, batch: int = 32) -> None:
    """Cut all blocks in place, in order, each on the outputs of the cut ones."""
    device = next(network.parameters()).device
    hidden = [network.embed(part.to(device)) for part in tokens.split(batch)]
    for block in network.blocks:
        layers = [module for module in block.modules() if isinstance(module, nn.Linear)]
        with second_moments(layers) as moments:
            for x in hidden:
                block(x)
        for layer, moment in zip(layers, moments, strict=True):
            layer.weight.copy_(cut(layer.weight, moment, target))
        hidden = [block(x) for x in hidden]


@contextmanager
def second_moments(layers: list[nn.Linear]) -> Iterator[list[Tensor]]:
    """Sum XᵀX of the inputs of layers in float64 while they run."""
    moments = [torch.zeros(m.in_features, m.in_features, dtype=torch.float64, device=m.weight.device) for m in layers]

    def add(index: int, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1]).double()
        moments[index].addmm_(rows.T, rows)

    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs, index=index: add(index, inputs[0]))
        for index, layer in enumerate(layers)
    ]
    try:
        yield moments
    finally:
        for hook in hooks:
            hook.remove()
