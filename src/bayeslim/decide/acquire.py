"""Active learning: choose the inputs whose labels would teach most.

    random    any
    entropy   H[y | x]                                    uncertain inputs, also those that no label would settle
    BALD      I[y; w | x] = H[y | x] − E_q H[y | x, w]    inputs that the networks of the posterior disagree about
    batch BALD   I[y_1 … y_k; w | x_1 … x_k]              together: what one label tells is not asked twice

Batch BALD is greedy: the input with the largest gain H[y | chosen] − E_q H[y | w] is added until there are k. With
P_s(c) the probability of a combination c of their labels under the draw w_s of the posterior, and P = mean_s P_s,

    H[y | chosen] = Σ_c P(c) H[Σ_s r_s(c) p_s(y)],      r_s(c) = P_s(c) / Σ_t P_t(c)

The sum over combinations is exact while they are few and sampled after that.

For values the same quantities are those of Gaussians: H = ½ log 2πe (σ² + v), I = ½ log (1 + v / σ²) with the noise σ²
and the variance v of the outputs, and together ½ log det (1 + K / σ²) with their covariance K. The scores of pixels are
averaged over an image.

Houlsby et al. 2011, arXiv:1112.5745 · Kirsch, van Amersfoort & Gal 2019, arXiv:1906.08158
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayeslim.bayesian import Bayesian
from bayeslim.decide.predictors import Predictor, Predicts, need_kind
from bayeslim.errors import BayeslimError, check_whole
from bayeslim.likelihoods import Likelihood
from bayeslim.noise import kept_random_state
from bayeslim.predict.batches import batches_of
from bayeslim.results import Prediction
from bayeslim.types import Inputs, as_tensors, batch_size

Rule = Literal["bald", "batch-bald", "entropy", "random"]

MAX_COMBINATIONS = 4096
"""Combinations of labels that are enumerated; beyond them as many are drawn."""
CANDIDATES_PER_CHUNK = 256
EXAMPLES_PER_CHUNK = 2048
"""Examples of a pool that are predicted together."""


def acquire(
    predictor: Predictor,
    pool: Inputs | Iterable[Any],
    count: int = 1,
    rule: Rule = "bald",
    *,
    likelihood: Likelihood | None = None,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Tensor:
    """Choose inputs of a pool to label next; return their indices, best first.

    The pool is predicted part by part, with the same networks. "batch-bald" keeps the outputs of all of them for the
    whole pool; the other rules keep one number for each input.

    Args:
        predictor: a Bayesian network, a plain, slim or distilled one, or a function from inputs to outputs.
        pool: inputs without labels, or a loader of them in a fixed order, whose targets are ignored.
        count: the number to choose.
        rule: "bald" (the networks of a posterior disagree), "batch-bald" (a Bayesian network, not for pixels),
            "entropy" or "random".
        likelihood: what the outputs mean, where the predictor is not Bayesian.
        generator: of the random numbers.
        **options: of `bayeslim.predict`, such as samples=100.
    """
    if rule not in ("bald", "batch-bald", "entropy", "random"):
        raise ValueError(f'rule must be "bald", "batch-bald", "entropy" or "random". Got {rule!r}.')
    check_whole("count", count)
    network = predictor if isinstance(predictor, nn.Module) else nn.Identity()
    batches = batches_of(as_tensors(pool, network), EXAMPLES_PER_CHUNK, network)
    total = sum(batch_size(inputs) for inputs in batches())
    if count > total:
        raise ValueError(f"count must be from 1 to the size of the pool, {total}. Got {count}.")
    if rule == "random":
        return torch.randperm(total, generator=generator)[:count]
    predicts = Predicts(predictor, likelihood, options, generator)
    predictions = (predicts(inputs) for inputs in batches())
    if rule != "batch-bald":
        scores = torch.cat([_scores(prediction, rule) for prediction in predictions])
        if rule == "bald" and not bool(scores.any()):
            raise BayeslimError('"bald" compares the networks of a posterior, and there is one. Use rule="entropy".')
        return scores.argsort(descending=True)[:count]
    parts = [_joint_parts(prediction) for prediction in predictions]
    if parts[0][1] is None:
        return batch_bald(torch.cat([probs for probs, _ in parts], 1), count, generator)
    return batch_bald_of_values(
        torch.cat([means for means, _ in parts], 1),
        torch.cat([noise for _, noise in parts if noise is not None]),
        count,
    )


@dataclass(frozen=True)
class Round:
    """A round of active learning.

    Attributes:
        labelled: the indices of the labelled inputs, in the order of their labels.
        bnn: the network that was fitted to them.
    """

    labelled: Tensor
    bnn: Bayesian


def learn_actively(
    fit: Callable[[Tensor], Bayesian],
    pool: Tensor,
    first: Tensor,
    count: int,
    rounds: int,
    rule: Rule = "bald",
    *,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Iterator[Round]:
    """Fit a network, choose inputs to label, and fit again, round after round.

    Args:
        fit: a function of the indices of labelled inputs that returns a fitted network; it asks for the labels.
        pool: all inputs.
        first: the indices of the first labelled inputs.
        count: inputs to label after each round.
        rounds: how often to ask for labels.
        rule: how inputs are chosen, as in `acquire`.
        generator: of the random numbers.
        **options: of `bayeslim.predict`.

    Yields:
        The network of each round with its labelled inputs: `rounds + 1` in all.
    """
    wanted = len(first) + count * rounds
    if wanted > len(pool):
        raise ValueError(f"{rounds} rounds of {count} label {wanted} inputs, and the pool has {len(pool)}. Use fewer.")
    labelled = first.clone()
    for number in range(rounds + 1):
        with kept_random_state():
            bnn = fit(labelled)
        yield Round(labelled, bnn)
        if number < rounds:
            left = torch.ones(len(pool), dtype=torch.bool)
            left[labelled] = False
            rest = left.nonzero().flatten()
            chosen = acquire(bnn, pool[rest.to(pool.device)], count, rule, generator=generator, **options)
            labelled = torch.cat([labelled, rest[chosen]])


def _scores(prediction: Prediction, rule: Rule) -> Tensor:
    """Compute the entropy or the mutual information of every example, (B,)."""
    need_kind(prediction, ("classes", "values"), "acquire")
    if rule == "entropy":
        each = prediction.entropy
    elif prediction.kind == "classes":
        each = prediction.epistemic
    else:
        each = 0.5 * torch.log1p(prediction.epistemic / prediction.aleatoric)
    return each.reshape(len(each), -1).double().mean(1).cpu()


def _joint_parts(prediction: Prediction) -> tuple[Tensor, Tensor | None]:
    """Return the probabilities of draws, or their means and the noise.

    They are (S, B, C), or (S, B, M) and (B, M).
    """
    need_kind(prediction, ("classes", "values"), "acquire")
    mean, samples = prediction.mean, prediction.samples.double()
    if prediction.kind == "classes" and mean.shape[1:-1] == (1,):  # one yes or no in a column
        samples = samples.squeeze(-2)
    elif mean.ndim > 2:
        raise BayeslimError(
            '"batch-bald" needs one class, or one row of values, for each input. Use "bald" for pixels.'
        )
    if len(prediction.samples) < 2:
        raise BayeslimError('"batch-bald" compares draws of the outputs, and there is one. Pass how="joint".')
    if prediction.kind == "classes":
        return samples.softmax(-1), None
    rows = samples.reshape(*samples.shape[:2], -1)
    return rows[..., : mean[0].numel()], prediction.aleatoric.double().reshape(len(mean), -1)


def batch_bald_of_values(means: Tensor, noise: Tensor, count: int) -> Tensor:
    """Choose a batch greedily by ½ log det (1 + K / σ²); outputs are independent.

    Args:
        means: of every draw, input and output, (S, B, M).
        noise: the variance of the noise, (B, M).
        count: the number to choose.
    """
    scaled = (means - means.mean(0)) / (len(means) * noise).sqrt()
    left = torch.ones(means.shape[1], dtype=torch.bool, device=means.device)
    chosen: list[int] = []
    for _ in range(count):
        # given the chosen, scaled has the covariance K − K_c (K_cc + 1)⁻¹ K_cᵀ: the variances that are left
        gain = torch.log1p(scaled.square().sum(0)).sum(1)
        gain[~left] = -torch.inf
        best = int(gain.argmax())
        chosen.append(best)
        left[best] = False
        own = scaled[:, best]
        size = own.square().sum(0)
        share = torch.where(size > 0, (1 - (1 + size).rsqrt()) / size.clamp_min(1e-300), 0.0)
        scaled = scaled - own[:, None] * (share * (own[:, None] * scaled).sum(0))
    return torch.tensor(chosen)


def batch_bald(probs: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Choose a batch greedily by its joint mutual information with the weights.

    The gain of an input only falls as others are chosen (labels are independent given the weights), so its last gain
    bounds the next, and most inputs are not computed again.

    Args:
        probs: of every draw, input and class, (S, B, C).
        count: the number to choose.
        generator: of sampled combinations.
    """
    draws, _, classes = probs.shape
    conditional = torch.special.entr(probs).sum(-1).mean(0)
    weight = probs.new_ones(1)  # of every combination of labels chosen so far
    belief = probs.new_full((draws, 1), 1 / draws)  # in every draw, given the combination
    chosen: list[int] = []
    bounds = torch.full_like(conditional, torch.inf)
    for _ in range(count):
        best, most = -1, -torch.inf
        for part in bounds.argsort(descending=True).split(CANDIDATES_PER_CHUNK):
            if best >= 0 and float(bounds[part[0]]) <= most:
                break
            gain = _next_entropy(belief, weight, probs[:, part]) - conditional[part]
            bounds[part] = torch.where(bounds[part].isneginf(), -torch.inf, gain)  # the chosen stay out
            top = int(bounds[part].argmax())
            if float(bounds[part[top]]) > most:
                best, most = int(part[top]), float(bounds[part[top]])
        chosen.append(best)
        bounds[best] = -torch.inf
        if belief.shape[1] * classes > MAX_COMBINATIONS:
            belief, weight = _sampled(probs[:, chosen], generator)
        else:
            joint = ((weight * belief)[:, :, None] * probs[:, best, None, :]).flatten(1)
            weight = joint.sum(0)
            belief = joint / weight.clamp_min(torch.finfo(joint.dtype).tiny)
    return torch.tensor(chosen)


def _next_entropy(belief: Tensor, weight: Tensor, probs: Tensor) -> Tensor:
    """Compute the entropy of each input's label, given those of the chosen."""
    found = []
    for part in probs.split(CANDIDATES_PER_CHUNK, 1):
        mean = torch.einsum("sk,sbc->kbc", belief, part)
        found.append((weight[:, None, None] * torch.special.entr(mean)).sum((0, 2)))
    return torch.cat(found)


def _sampled(probs: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Draw combinations of labels; return beliefs in the draws, and weights.

    Beliefs are computed in logarithms: the probability of a combination of hundreds of labels is too small for a float.
    """
    draws, chosen, _ = probs.shape
    which = torch.randint(draws, (MAX_COMBINATIONS,), generator=generator)  # a generator of the CPU
    drawn = torch.multinomial(probs.cpu()[which].flatten(0, 1), 1, generator=generator)
    labels = drawn.view(MAX_COMBINATIONS, chosen).to(probs.device)
    log_joint = probs.new_zeros(draws, MAX_COMBINATIONS)
    for place in range(chosen):
        log_joint += probs[:, place][:, labels[:, place]].log()
    return log_joint.softmax(0), probs.new_full((MAX_COMBINATIONS,), 1 / MAX_COMBINATIONS)
