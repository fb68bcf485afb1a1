"""Active learning: choose the inputs whose labels would teach most.

    random    any
    entropy   H[y | x]                                    uncertain inputs, also those that no label would settle
    BALD      I[y; w | x] = H[y | x] − E_q H[y | x, w]    inputs that the networks of the posterior disagree about
    batch BALD   I[y_1 … y_k; w | x_1 … x_k]              together: what one label tells is not asked twice

The joint entropy of a batch is computed from draws w_s of the posterior: with P_s(c) the probability of a combination
of labels c under w_s, H = −Σ_c P(c) log P(c), P = mean_s P_s. It is greedy: the input with the largest gain is added
until there are k. Combinations are exact while they are few and sampled after that.

Houlsby et al. 2011, arXiv:1112.5745 · Kirsch, van Amersfoort & Gal 2019, arXiv:1906.08158
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError
from bayeslim.predict.predict import predict
from bayeslim.types import Inputs

Rule = Literal["bald", "batch-bald", "entropy", "random"]

MAX_COMBINATIONS = 4096
"""Combinations of labels that are enumerated; beyond them as many are drawn."""
CANDIDATES_PER_CHUNK = 256


def acquire(
    bnn: Bayesian,
    pool: Inputs,
    count: int = 1,
    rule: Rule = "bald",
    *,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Tensor:
    """Choose inputs of a pool to label next; return their indices, best first.

    Args:
        bnn: a fitted network of classes.
        pool: inputs without labels.
        count: the number to choose.
        rule: "bald", "batch-bald", "entropy" or "random".
        generator: of the random numbers.
        **options: of `bayeslim.predict`, such as samples=100.
    """
    if rule not in ("bald", "batch-bald", "entropy", "random"):
        raise ValueError(f'rule must be "bald", "batch-bald", "entropy" or "random". Got {rule!r}.')
    prediction = predict(bnn, pool, generator=generator, **options)
    total = len(prediction)
    if not 1 <= count <= total:
        raise ValueError(f"count must be from 1 to the size of the pool, {total}. Got {count}.")
    if prediction.kind != "classes" or prediction.mean.ndim != 2:
        raise BayeslimError(f"acquire needs one class for each input. Got predictions of {prediction.kind}.")
    if rule == "random":
        return torch.randperm(total, generator=generator)[:count]
    if rule == "batch-bald":
        return batch_bald(prediction.samples.double().softmax(-1).cpu(), count, generator)
    score = prediction.entropy if rule == "entropy" else prediction.epistemic
    return score.argsort(descending=True)[:count].cpu()


def batch_bald(probs: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Choose a batch greedily by its joint mutual information with the weights.

    Args:
        probs: of every draw, input and class, (S, B, C).
        count: the number to choose.
        generator: of sampled combinations.
    """
    draws, total, classes = probs.shape
    conditional = torch.special.entr(probs).sum(-1).mean(0)
    joint = probs.new_ones(draws, 1)  # P_s(c) of the combinations of labels chosen so far
    weight = probs.new_ones(1)  # of every combination in the sum over combinations
    chosen: list[int] = []
    left = torch.ones(total, dtype=torch.bool)
    for _ in range(count):
        gain = _joint_entropy(joint, weight, probs) - conditional
        gain[~left] = -torch.inf
        best = int(gain.argmax())
        chosen.append(best)
        left[best] = False
        joint = (joint[:, :, None] * probs[:, best, None, :]).flatten(1)
        weight = weight.repeat_interleave(classes)
        if joint.shape[1] > MAX_COMBINATIONS:
            joint, weight = _sampled(probs[:, chosen], generator)
    return torch.tensor(chosen)


def _joint_entropy(joint: Tensor, weight: Tensor, probs: Tensor) -> Tensor:
    """Compute the entropy of the chosen labels and of one more, for every input."""
    found = []
    for part in probs.split(CANDIDATES_PER_CHUNK, 1):
        mean = torch.einsum("sk,sbc->kbc", joint, part) / len(joint)
        found.append((weight[:, None, None] * torch.special.entr(mean)).sum((0, 2)))
    return torch.cat(found)


def _sampled(probs: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Draw combinations of labels of the chosen inputs; return P_s(c) and weights.

    A sum over all combinations is the mean over drawn ones of the summand over P(c).
    """
    draws, chosen, _ = probs.shape
    which = torch.randint(draws, (MAX_COMBINATIONS,), generator=generator)
    labels = torch.multinomial(probs[which].flatten(0, 1), 1, generator=generator).view(MAX_COMBINATIONS, chosen)
    joint = probs.new_ones(draws, MAX_COMBINATIONS)
    for place in range(chosen):
        joint = joint * probs[:, place][:, labels[:, place]]
    return joint, 1 / (MAX_COMBINATIONS * joint.mean(0))
