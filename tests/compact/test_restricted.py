"""The posterior of the remaining weights, against rows and columns of the dense precision."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bayeslim.compact.restricted import NotRestrictable, restricted, sliced_setting
from bayeslim.compact.surgery import sliced
from bayeslim.posteriors import Conditioned, Dense, Diagonal, Kronecker, KroneckerFactors, LowRank, Posterior

SHAPES = {
    "fc.weight": (4, 5), "fc.bias": (4,), "conv.weight": (6, 2, 2, 1), "conv.bias": (6,), "up.weight": (4, 3, 2),
    "words.weight": (6, 2), "norm.weight": (3,),
}  # fmt: skip
SIZE = sum(math.prod(shape) for shape in SHAPES.values())


def psd(*shape, generator, rank=None):
    root = torch.randn(*shape, rank or shape[-1] + 2, generator=generator, dtype=torch.float64)
    return root @ root.mT / root.shape[-1]


def kronecker(generator, mean, prior, **options):
    def matrix(*shape):
        return psd(*shape, generator=generator)

    factors = [
        KroneckerFactors.of("fc.weight", outputs=matrix(4), inputs=matrix(6), bias="fc.bias"),
        KroneckerFactors.of("conv.weight", outputs=matrix(2, 3), inputs=matrix(2, 5), bias="conv.bias"),
        KroneckerFactors.of("up.weight", outputs=matrix(2, 3), inputs=matrix(2, 4), transposed=True),
        KroneckerFactors.of("words.weight", outputs=matrix(2), inputs=matrix(6).diagonal(), transposed=True),
    ]
    rest = {"norm.weight": torch.rand(3, generator=generator, dtype=torch.float64)}
    return Kronecker(mean, factors, prior, rest=rest, **options)


def full(generator, mean, prior):
    return Dense(mean, psd(SIZE, generator=generator), prior)


def subnetwork(generator, mean, prior):
    indices = {name: torch.randperm(value.numel(), generator=generator)[:3] for name, value in mean.items()}
    return Dense(mean, psd(3 * len(mean), generator=generator), prior, indices=indices)


def low_rank(generator, mean, prior):
    values = torch.rand(7, generator=generator, dtype=torch.float64)
    return LowRank(mean, torch.randn(SIZE, 7, generator=generator, dtype=torch.float64), values, prior)


FAMILIES = {"kronecker": kronecker, "full": full, "subnetwork": subnetwork, "low rank": low_rank}


def steps(*shape):
    return torch.linspace(0.2, 1.4, math.prod(shape), dtype=torch.float64).view(shape)


PRIORS = {
    "one number": 0.7,
    "one a layer": {"fc": 0.3, "conv": 0.5, "up": 0.9, "words": 1.1, "norm": 1.3},
    "one a row": {"fc.weight": steps(4, 1), "fc.bias": steps(4), "conv": 0.5, "up": steps(2), "words": steps(2),
                  "norm.weight": steps(3)},
}  # fmt: skip


def some(size, generator):
    """Draw some of `size` indices, at least one, in order."""
    chosen = torch.rand(size, generator=generator) < 0.6
    chosen[torch.randint(size, (), generator=generator)] = True
    return chosen.nonzero()[:, 0]


def random_kept(generator):
    """Draw the units and inputs that compaction may leave of these layers."""
    fc = some(4, generator)
    kept = {"fc.weight": {0: fc, 1: some(5, generator)}, "fc.bias": {0: fc}}
    if torch.rand((), generator=generator) < 0.5:  # a whole group, or the same places in both
        group = int(torch.randint(2, (), generator=generator))
        rows, ups = torch.arange(3) + 3 * group, torch.arange(2) + 2 * group
        kept |= {"conv.weight": {0: rows}, "conv.bias": {0: rows}, "up.weight": {0: ups}}
    else:
        one, in_up = some(3, generator), some(2, generator)
        rows = torch.cat([one, one + 3])
        kept |= {"conv.weight": {0: rows, 1: some(2, generator)}, "conv.bias": {0: rows}}
        kept["up.weight"] = {0: torch.cat([in_up, in_up + 2]), 1: some(3, generator)}
    return kept | {"words.weight": {1: some(2, generator)}, "norm.weight": {0: some(3, generator)}}


def flat(params):
    return torch.cat([value.flatten() for value in params.values()])


def precision_of(posterior):
    parts = torch.eye(sum(v.numel() for v in posterior.mean.values())).double()
    split = parts.split([value.numel() for value in posterior.mean.values()], 1)
    basis = {n: part.reshape(-1, *posterior.mean[n].shape) for n, part in zip(posterior.mean, split, strict=True)}
    return torch.cat([image.flatten(1) for image in posterior.precision_product(basis).values()], 1)


def places_left(kept):
    numbers = torch.arange(SIZE).split([math.prod(shape) for shape in SHAPES.values()])
    named = {name: number.view(SHAPES[name]) for name, number in zip(SHAPES, numbers, strict=True)}
    return flat({name: sliced(number, kept.get(name, {})) for name, number in named.items()})


def prepared(family, prior, seed):
    generator = torch.Generator().manual_seed(seed)
    mean = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
    return FAMILIES[family](generator, mean, PRIORS[prior]), random_kept(generator), generator


def left_of_mean(posterior, kept):
    return {name: sliced(value, kept.get(name, {})) for name, value in posterior.mean.items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prior", PRIORS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_precision_loses_rows_and_columns(family, prior, seed):
    posterior, kept, _ = prepared(family, prior, seed)
    left = restricted(posterior, kept, left_of_mean(posterior, kept))
    assert type(left) is type(posterior)
    places = places_left(kept)
    torch.testing.assert_close(precision_of(left), precision_of(posterior)[places][:, places])
    torch.testing.assert_close(flat(left.mean), flat(posterior.mean)[places])
    again = type(left).restore(left.config(), left.tensors())
    torch.testing.assert_close(precision_of(again), precision_of(left))
    tighter = (p.with_prior_precision(2.0) for p in (left, posterior))
    small, large = (precision_of(p) for p in tighter)
    torch.testing.assert_close(small, large[places][:, places])


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), uncut=st.booleans())
def test_zeros_that_are_left_stay_zeros_and_more_can_be_cut(family, seed, uncut):
    """A cut of what is left is a cut of the whole network, in which what went stays where it was."""
    base, kept, generator = prepared(family, "one number", seed)
    places, total = places_left(kept), SIZE
    masks = {name: torch.rand(shape, generator=generator) < 0.7 for name, shape in SHAPES.items()}
    if not uncut:  # all that goes is zero
        stays = torch.zeros(total, dtype=torch.bool).index_fill_(0, places, True)
        split = stays.split([math.prod(shape) for shape in SHAPES.values()])
        masks = {n: mask & part.view(SHAPES[n]) for (n, mask), part in zip(masks.items(), split, strict=True)}
    whole = base.condition(masks, tolerance=1e-12)
    left = restricted(whole, kept, left_of_mean(whole, kept))
    inside = flat(masks)[places]
    if bool(inside.all()):
        assert not isinstance(left, Conditioned)
        return
    assert isinstance(left, Conditioned)
    assert torch.equal(flat(left.masks), inside)
    torch.testing.assert_close(precision_of(left), precision_of(whole)[places][:, places])
    extra = {n: torch.rand(mask.shape, generator=generator) < 0.7 for n, mask in left.masks.items()}
    further = left.condition(extra, tolerance=1e-12)
    assert_cut_of_whole(flat(further.mean), base, whole, places, inside & flat(extra))


@pytest.mark.parametrize("family", ["kronecker", "full", "low rank"])
def test_a_mean_that_was_moved_stays_moved_when_it_is_found_again(family):
    base, kept, generator = prepared(family, "one number", 3)
    masks = {"fc.weight": torch.rand(4, 5, generator=generator) < 0.5}
    whole = base.condition(masks, tolerance=1e-12)
    mean = left_of_mean(whole, kept)
    mean["fc.bias"] = mean["fc.bias"] + 3.0  # a constant that was folded into it
    left = restricted(whole, kept, mean)
    assert isinstance(left, Conditioned)
    torch.testing.assert_close(flat(left.condition({}, tolerance=1e-12).mean), flat(mean))


def assert_cut_of_whole(found, base, whole, places, kept):
    """P_RR m_R = (P μ)_R − P_RD v_D among the random weights R that are left."""
    P, mean, v = precision_of(base), flat(base.mean), flat(whole.mean)
    random = flat(base.support)
    gone = torch.ones(SIZE, dtype=torch.bool).index_fill_(0, places, False)
    R = places[kept & random[places]]
    expected = torch.zeros(SIZE, dtype=torch.float64)
    expected[places[kept & ~random[places]]] = mean[places[kept & ~random[places]]]
    expected[R] = torch.linalg.solve(P[R][:, R], (P @ mean)[R] - P[R][:, gone] @ v[gone])
    torch.testing.assert_close(found, expected[places], rtol=1e-6, atol=1e-8)


def test_independent_weights_keep_their_spread():
    generator = torch.Generator().manual_seed(0)
    mean, std = ({n: torch.rand(shape, generator=generator) for n, shape in SHAPES.items()} for _ in range(2))
    kept = random_kept(generator)
    left = restricted(Diagonal(mean, std), kept, left_of_mean(Diagonal(mean, std), kept))
    assert torch.equal(flat(left.std), flat(std)[places_left(kept)])
    assert torch.equal(flat(left.mean), flat(mean)[places_left(kept)])


def test_what_belongs_to_a_whole_layer_is_refused():
    generator = torch.Generator().manual_seed(0)
    mean = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
    kept = {"fc.weight": {1: torch.tensor([0, 2])}}
    damped = kronecker(generator, mean, 1.0, damping="sqrt")
    with pytest.raises(NotRestrictable, match=r'damping="sqrt" belong to the whole of "fc.weight"'):
        restricted(damped, kept, left_of_mean(damped, kept))
    plain = kronecker(generator, mean, 1.0)
    first = plain.factors[0]
    corrected = KroneckerFactors(first.weight, first.outputs, first.inputs, first.bias, torch.ones(1, 4, 6).double())
    ekfac = Kronecker(mean, [corrected, *plain.factors[1:]], 1.0, rest={"norm.weight": torch.ones(3).double()})
    with pytest.raises(NotRestrictable, match=r"Corrected eigenvalues"):
        restricted(ekfac, kept, left_of_mean(ekfac, kept))
    elsewhere = {"conv.weight": {1: torch.tensor([0])}}  # other layers do not mind
    assert restricted(ekfac, elsewhere, left_of_mean(ekfac, elsewhere)).factors[0] is corrected
    crooked = {"fc.weight": {0: torch.tensor([0, 1])}, "fc.bias": {0: torch.tensor([0, 2])}}
    with pytest.raises(NotRestrictable, match=r'kept part of "fc.weight" is not some rows times some columns'):
        restricted(plain, crooked, left_of_mean(plain, crooked))


class Unheard(Posterior):
    mean = variance = sample = log_prob = condition = tensors = restore = None


def test_a_posterior_nobody_heard_of_is_refused():
    with pytest.raises(NotRestrictable, match="A Unheard posterior cannot be cut to fewer weights"):
        restricted(Unheard(), {}, {})


def test_settings_that_broadcast_are_cut_where_they_have_places():
    dims = {0: torch.tensor([1, 3]), 2: torch.tensor([0])}
    assert sliced_setting(torch.rand(4, 5, 6), 3, dims).shape == (2, 5, 1)
    assert sliced_setting(torch.rand(1, 5, 6), 3, dims).shape == (1, 5, 1)
    assert sliced_setting(torch.rand(6), 3, dims).shape == (1,)
    assert sliced_setting(torch.rand(5, 1), 3, dims).shape == (5, 1)
    assert sliced_setting(torch.tensor(2.0), 3, dims) == 2
