"""`quantise`: fewer bits for a network, allocated by its posterior.

Under a Gaussian posterior, rounding weights by δ costs ½ δᵀ P δ nats: little where the posterior is wide. This loss
decides how many bits each layer or unit gets (`allocate`), to which level a weight is rounded (`rounding`), and where
the weights that are not rounded yet move (`moves`).

Hinton & van Camp 1993, "Keeping neural networks simple by minimizing the description length of the weights" ·
Louizos, Ullrich & Welling 2017, arXiv:1705.08665
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayeslim.bayesian import Bayesian
from bayeslim.coding.content import content_of
from bayeslim.errors import BayeslimError, BayeslimWarning
from bayeslim.likelihoods import Likelihood
from bayeslim.priors import SoftSharing
from bayeslim.prune.budget import Budget
from bayeslim.prune.search import error_of_predictions, fewest
from bayeslim.quantise.carry_out import Settings, carry_out
from bayeslim.quantise.result import Quantised
from bayeslim.quantise.source import BitsSpec, Source, source_of, widths
from bayeslim.quantise.spend import WIDTHS, Spending
from bayeslim.results import Prediction
from bayeslim.train.loaders import ignored_class
from bayeslim.train.progress import progress
from bayeslim.types import Inputs, call, device_of

MEAN_WIDTHS = tuple(width / 4 for width in range(4 * WIDTHS[0], 4 * WIDTHS[-1] + 1))
"""The mean bits per weight that a search tries."""
STRENGTHS = tuple(10 ** (-tenth / 10) for tenth in range(31))
"""The strengths that a search tries where the bits are given, from 1 down to 0.001."""

Ladder = list[tuple[str, Callable[[], Quantised]]]
"""The candidates of a search, from the smallest file to the largest: a description and a function that makes it."""


def quantise(
    bnn: Bayesian,
    *,
    bits: BitsSpec | None = None,
    budget: float | Budget | None = None,
    per: Literal["layer", "unit"] = "layer",
    how: Literal["posterior", "nearest"] = "posterior",
    strength: float = 0.01,
    codebook: Literal["kmeans", "prior"] | None = None,
    move: Literal["joint", "row"] | None = "joint",
    steps: int = 8,
    rest: int | None = 8,
    validate: Iterable[Any] | None = None,
    max_error_increase: float | None = None,
) -> Quantised:
    """Round the weights of a fitted network to few levels; zeros stay zero.

    `bnn` is not changed. The bits per weight are given (`bits`), or allocated for the least expected loss (`budget`),
    or searched for the fewest that keep the validation error (`max_error_increase`). For the smallest file give `bits`
    (such as 5) with `max_error_increase` or `Budget(bytes=...)`: then the strength is searched instead.

    Args:
        bnn: a fitted Bayesian network. Prune and compact it first.
        bits: bits per weight, 4 by default; or a dict from selections of parameters (as in `bl.sites`) to bits, such as
            {"fc1": 2, "all": 4}.
        budget: the mean bits per non-zero weight, such as 3.5; or `Budget(bytes=...)`, the largest file of
            `bayeslim.encode`, header included. Each parameter, or unit, gets 1 to 8 bits.
        per: one grid per parameter ("layer"), or one per slice of its first dimension ("unit").
        how: "posterior" minimises expected loss plus code length, and moves the weights that are not rounded yet to
            their conditional mean; "nearest" rounds to the nearest level.
        strength: the price of a nat of code length in nats of log-posterior, for how="posterior". 1 is minimum
            description length, which trusts the posterior far from its mean; few networks stay accurate there.
        codebook: levels anywhere instead of evenly spaced: "kmeans" fits 2^bits of them to each parameter; "prior"
            takes the means of the `priors.SoftSharing` that the network was trained with, and with how="nearest" gives
            each weight the mean of its most responsible component.
        move: how weights move under a correlated posterior: "joint" solves for all of a layer together; "row"
            (Kronecker only) row by row, one weight after the other; None leaves them.
        steps: the number of parts in which move="joint" rounds; a dense posterior is always rounded weight by weight.
        rest: the bits of parameters without a posterior, such as biases; None leaves them as they are.
        validate: validation data, as a loader.
        max_error_increase: the allowed rise of the validation error: in percentage points for classes, in per cent of
            the root mean squared error for values and counts.

    Raises:
        NotFitted: if there is no posterior yet.
        ValueError: for an impossible budget; the message says the smallest possible one.
    """
    _check(bnn, bits, budget, per, how, strength, codebook, move, steps, validate, max_error_increase)
    source = source_of(bnn, by_unit=per == "unit")
    _check_codebook(bnn, codebook, source)
    plain = how == "nearest"
    settings = Settings(0.0 if plain else float(strength), codebook, None if plain else move, steps)
    fixed = {n: _of_units(source, n, w) for n, w in widths(4 if bits is None else bits, rest, source).items()}

    def rounded(chosen: dict[str, Tensor], settings: Settings) -> Quantised:
        return carry_out(source, fixed | chosen, settings, bnn.priors)

    if budget is None and max_error_increase is None:
        return _warned(rounded({}, settings))
    if bits is None:
        spending = Spending(source)
        if isinstance(budget, (int, float)):
            return _warned(rounded(spending.at(budget), settings))
        ladder: Ladder = [
            (f"{mean:g} bits a weight", partial(lambda mean: rounded(spending.at(mean), settings), mean))
            for mean in MEAN_WIDTHS
        ]
    else:
        ladder = [
            (f"a strength of {own:.3g}", partial(rounded, {}, replace(settings, strength=own))) for own in STRENGTHS
        ]
    if isinstance(budget, Budget):
        return _warned(_that_fits(ladder, budget.value))
    assert validate is not None
    assert max_error_increase is not None
    return _warned(_harmless(ladder, bnn, source, validate, max_error_increase))


def _of_units(source: Source, name: str, width: int) -> Tensor:
    weights = source.weights[name] if name in source.weights else source.others[name]
    return torch.full((weights.units,), width, device=weights.values.device)


@contextmanager
def _searching(ladder: Ladder) -> Iterator[Callable[[int], Quantised]]:
    """Yield a function that makes each candidate once, under a progress bar."""
    with progress(range(0), "searching bits", total=math.ceil(math.log2(len(ladder))) + 1) as bar:

        @cache
        def attempt(place: int) -> Quantised:
            bar.advance()
            return ladder[place][1]()

        yield attempt


def _that_fits(ladder: Ladder, most: float) -> Quantised:
    """Find the candidate with the largest file of at most `most` bytes.

    The bisection uses the estimate of `coded_bytes`, corrected by the error of the estimate at the last file.
    """
    last, beside = len(ladder) - 1, 0.0

    def estimate(steps: int) -> float:
        return attempt(last - steps).coded_bytes + beside

    with _searching(ladder) as attempt:
        while True:
            place = last - fewest(estimate, most, 0, last)
            found = attempt(place)
            size = _file_size(found)
            if size <= most or not place:
                break
            beside = size - found.coded_bytes
        while size <= most and place < last and _file_size(attempt(place + 1)) <= most:
            place, found = place + 1, attempt(place + 1)
    if size > most:
        raise ValueError(
            f"Budget(bytes={most:g}) is impossible: the least is {size:,}, with {ladder[place][0]}. "
            "Cut weights first (bl.prune), or allow more bytes."
        )
    return found


def _file_size(quantised: Quantised) -> int:
    """Compute the bytes of the coded file, without sorting units."""
    return len(content_of(quantised.network).data)


def _harmless(ladder: Ladder, bnn: Bayesian, source: Source, validate: Iterable[Any], increase: float) -> Quantised:
    """Find the first candidate whose validation error rises by at most `increase`."""
    before, percent = error_of(source.network, bnn.likelihood, validate)
    allowed = before + increase * (1 if percent else before / 100) + 1e-9

    with _searching(ladder) as attempt:

        def error(place: int) -> float:
            return error_of(attempt(place).network, bnn.likelihood, validate)[0]

        place = fewest(error, allowed, 0, len(ladder) - 1)
        found, after = attempt(place), error(place)
    if after > allowed:
        raise ValueError(
            f"max_error_increase={increase:g} is impossible: the validation error rises from {before:.4g} to "
            f"{after:.4g} with {ladder[place][0]}. Give more bits, or allow more."
        )
    return found


def error_of(network: nn.Module, likelihood: Likelihood, loader: Iterable[Any]) -> tuple[float, bool]:
    """Compute the validation error: in per cent for classes (True), else the RMSE."""
    network = network.eval()

    def predicted(inputs: Inputs) -> Prediction:
        with torch.no_grad():
            return likelihood.predict(call(network, inputs).unsqueeze(0))

    return error_of_predictions(predicted, loader, device_of(network), ignored_class(likelihood))


def _warned(found: Quantised) -> Quantised:
    """Warn of layers that were rounded to zero, and return the result."""
    for name in found.losses:
        codes = found.codes[name]
        if codes.ndim > 1 and found.kept[name] and not bool(codes.any()):
            warnings.warn(
                f'All of "{name}" was rounded to zero: at this strength its code costs more than its loss. '
                "Lower strength, or give it more bits.",
                BayeslimWarning,
                stacklevel=3,
            )
    return found


def _check_codebook(bnn: Bayesian, codebook: str | None, source: Source) -> None:
    if codebook != "prior":
        return
    for name in source.weights:
        prior = bnn.priors.get(name)
        if not isinstance(prior, SoftSharing):
            raise ValueError(
                f'codebook="prior" needs weights whose prior is priors.SoftSharing(). That of "{name}" is {prior!r}. '
                'Use codebook="kmeans".'
            )


def _check(
    bnn: Any,
    bits: Any,
    budget: Any,
    per: Any,
    how: Any,
    strength: Any,
    codebook: Any,
    move: Any,
    steps: Any,
    validate: Any,
    increase: Any,
) -> None:
    if not isinstance(bnn, Bayesian):
        raise TypeError(
            f"quantise needs a Bayesian network, whose posterior decides how to round. Got {type(bnn).__name__}. "
            "For a trained network: bl.bayesianize(model, bl.Laplace(), likelihood=...).fit(loader) first."
        )
    for name, value, known in (
        ("per", per, ("layer", "unit")),
        ("how", how, ("posterior", "nearest")),
        ("codebook", codebook, (None, "kmeans", "prior")),
        ("move", move, ("joint", "row", None)),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}. Got {value!r}.")
    if budget is not None and increase is not None:
        raise ValueError("budget and max_error_increase are two goals, and quantise takes one. Leave one of them out.")
    if bits is not None and isinstance(budget, (int, float)):
        raise ValueError("A numeric budget is the mean of the bits, and bits fixes them: leave one of them out.")
    if bits is not None and how == "nearest" and (budget is not None or increase is not None):
        raise ValueError(
            'With bits given the search varies the strength, and how="nearest" ignores it. Use how="posterior".'
        )
    if isinstance(budget, Budget) and budget.goal != "bytes":
        raise ValueError(f"budget must be the mean bits per weight or Budget(bytes=...). Got {budget}.")
    if budget is not None and not isinstance(budget, Budget):
        _check_number("budget", budget, "the mean bits per weight")
    if not 0 <= _check_number("strength", strength, "the price of a nat of code length", least=0.0) < math.inf:
        raise ValueError(f"strength must be finite. Got {strength}.")
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps is a number of parts and must be a whole number of at least 1. Got {steps!r}.")
    if codebook is not None and per == "unit":
        raise ValueError('All units of a parameter share its codebook: use per="layer" with codebook. Got per="unit".')
    if increase is not None:
        _check_number("max_error_increase", increase, "the allowed rise of the error", least=0.0)
        if validate is None:
            raise ValueError("max_error_increase is measured on data: pass validate=loader.")
        if iter(validate) is validate:
            raise BayeslimError("validate is read several times: pass a loader or a list, not an iterator.")


def _check_number(name: str, value: Any, meaning: str, least: float = 1e-12) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise TypeError(f"{name} is {meaning} and must be a number. Got {value!r}.")
    if value < least:
        raise ValueError(f"{name} is {meaning} and must be {'positive' if least else 'at least 0'}. Got {value}.")
    return float(value)
