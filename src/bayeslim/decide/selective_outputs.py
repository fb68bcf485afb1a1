"""Selective prediction of single outputs, such as pixels: answer where each is sure.

An output is answered where its confidence exceeds a threshold θ of a fixed grid. For image i let w_i(θ) be the fraction
of its outputs that are answered and wrong, a_i(θ) the fraction that is answered. The selective risk is E w / E a, and

    E w / E a ≤ r   ⇔   E L ≤ r,      L_i = w_i + r (1 − a_i)  in [0, 1]

so "the risk is above r" is tested on the mean of L over images: outputs of an image may depend on each other in any
way. The test bets against it, image after image,

    K_t = Π_{i ≤ t} (1 − ν_i (L_i − r)),    p = 1 / max_t K_t        ν_i from the images before i

and is far sharper than a binomial bound where L varies little. Thresholds are tested from strict to lax, starting at
`STARTS` places of the grid with the level δ / `STARTS` each; all those rejected before the first that is not are safe
together.

Angelopoulos et al. 2021, arXiv:2110.01052 · Waudby-Smith & Ramdas 2024, arXiv:2010.09686
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bayeslim.decide.predictors import need_kind
from bayeslim.results import Prediction

GRID = 200
"""The number of thresholds."""
STARTS = 8
BET_SIZE = 5.0
"""The logarithm of the capital that bets aim at, log 1/level. Any value is valid; this one suits levels about 1 %."""
BISECTIONS = 50
MAX_STRICTNESS = 1e-6
"""The smallest distance of a threshold for probabilities to one."""


def confidence_of_outputs(prediction: Prediction) -> Tensor:
    """Compute the confidence of every output, (B, ...).

    It is the largest probability for classes, and minus the standard deviation for values.
    """
    need_kind(prediction, ("classes", "values"), "selective")
    if prediction.kind == "classes":
        assert prediction.probs is not None
        return prediction.probs.amax(-1)
    return -prediction.std


def thresholds(prediction: Prediction) -> Tensor:
    """Make the grid of thresholds, strict ones first.

    For classes it is fixed beforehand. For values it is that of the standard deviations of one batch, which must not
    be tested on; the last one answers everything.
    """
    if prediction.kind == "classes":
        assert prediction.probs is not None
        chance = 1 - 1 / prediction.probs.shape[-1]
        return 1 - torch.logspace(torch.tensor(MAX_STRICTNESS).log10(), torch.tensor(chance).log10(), GRID).double()
    confidences = -prediction.std.double().cpu().flatten().sort().values  # `quantile` takes 16 million at most
    grid = confidences[torch.linspace(0, len(confidences) - 1, GRID, dtype=torch.float64).long()]
    grid[-1] = -math.inf  # equal confidences are above no quantile of theirs
    return grid


def fractions(sure: Tensor, wrong: Tensor, told: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Compute w_i(θ) and a_i(θ) at every threshold, (B, GRID).

    Images without any target are left out.

    Args:
        sure: the confidence of every output, (B, ...).
        wrong: whether it is wrong.
        told: whether it has a target; the others do not count.
        grid: the thresholds, strict ones first.
    """
    parts = [part.reshape(len(sure), -1).cpu() for part in (sure.double(), wrong, told)]
    sure, wrong, told = (part[parts[2].any(1)] for part in parts)
    # an output is answered from the first threshold on that its confidence exceeds
    first = torch.searchsorted(-grid, -sure, right=True)
    weight = told / told.sum(1, keepdim=True)
    found = []
    for part in (weight * wrong, weight):
        counts = torch.zeros(len(sure), len(grid) + 1, dtype=torch.float64).scatter_add_(1, first, part.double())
        found.append(counts[:, :-1].cumsum(1))
    return found[0], found[1]


def betting_p_value(loss: Tensor, risk: float) -> float:
    """Bound the probability of losses this small if the expected loss were `risk`.

    Args:
        loss: independent losses in [0, 1], in random order.
        risk: the expected loss under the hypothesis.
    """
    count = torch.arange(1, len(loss) + 1, dtype=torch.float64)
    mean = (0.5 + loss.cumsum(0)) / (1 + count)
    variance = (0.25 + (loss - mean).square().cumsum(0)) / (1 + count)
    before = torch.cat([torch.tensor([0.25], dtype=torch.float64), variance[:-1]])
    bet = (2 * BET_SIZE / (len(loss) * before)).sqrt().clamp_max(1.0)
    capital = torch.log1p(-bet * (loss - risk)).cumsum(0)
    return min(1.0, float(torch.exp(-capital.max())))


def loosest_safe(wrong: Tensor, answered: Tensor, max_risk: float, delta: float) -> int | None:
    """Find the laxest threshold with a risk below `max_risk` at level δ; None without.

    Args:
        wrong: w, (N, GRID).
        answered: a, (N, GRID).
        max_risk: r.
        delta: δ.
    """

    def p_value(place: int) -> float:
        return betting_p_value(wrong[:, place] + max_risk * (1 - answered[:, place]), max_risk)

    return last_safe(p_value, GRID, delta)


def last_safe(p_value: Callable[[int], float], count: int, delta: float, starts: int = STARTS) -> int | None:
    """Find the last place that a fixed-sequence test reaches; None without.

    A sequence starts at each of a few places, evenly spread, with an equal share of the level δ, and goes on to the
    first place that is not rejected.

    Args:
        p_value: of the hypothesis that a place is not safe.
        count: the number of places, in the order of the tests.
        delta: δ.
        starts: the number of sequences.
    """
    found: int | None = None
    for start in range(0, count, -(-count // starts)):
        if found is not None and start <= found:  # a sequence that began earlier went past this place
            continue
        for place in range(start, count):
            if p_value(place) > delta / starts:
                break
            found = place
    return found


def risk_bound(wrong: Tensor, answered: Tensor, delta: float) -> float:
    """Find the largest risk that one threshold does not rule out at level δ."""
    return largest_risk(lambda risk: betting_p_value(wrong + risk * (1 - answered), risk), delta)


def largest_risk(p_value: Callable[[float], float], delta: float) -> float:
    """Find the largest risk with a p-value above δ, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle) > delta else (low, middle)
    return high


def curve(wrong: Tensor, answered: Tensor) -> tuple[Tensor, Tensor]:
    """Compute coverage and risk at evenly spaced coverages up to the largest."""
    coverage = answered.mean(0)
    risk = wrong.mean(0) / coverage.clamp_min(1e-12)
    wanted = torch.linspace(float(coverage.max()) / GRID, float(coverage.max()), GRID, dtype=torch.float64)
    places = torch.searchsorted(coverage, wanted).clamp_max(GRID - 1)
    return wanted, risk[places]
