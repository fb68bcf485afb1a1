"""Rounding within the noise, and the grids that fit: against every level."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bayeslim.quantise.fitting import coded_bits, fit_codebook, fit_scales, fit_uniform, given_codebook, nearest_losses
from bayeslim.quantise.grids import Codebook, Uniform, limit_of, storable
from bayeslim.quantise.rounding import CodebookRounder, UniformRounder, code_lengths
from bayeslim.quantise.weights import Weights


def some_weights(n=400, seed=0, by_unit=False, zeros=0.0):
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(n // 20, 20, generator=generator, dtype=torch.float64)
    kept = torch.rand(value.shape, generator=generator) >= zeros
    precision = torch.rand(value.shape, generator=generator, dtype=torch.float64) * 100 + 1
    return Weights.of(value * kept, precision, kept, by_unit)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 4), st.floats(0.001, 2.0), st.integers(0, 1000))
def test_the_code_has_the_lowest_price_of_all_levels(bits, strength, seed):
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(50, generator=generator, dtype=torch.float64)
    p = torch.rand(50, generator=generator, dtype=torch.float64) * 200
    limit = int(limit_of(torch.tensor(bits)))
    scale = torch.tensor(0.9 / limit, dtype=torch.float64)
    counts = torch.arange(limit, -1, -1).abs()  # falling away from zero, as frequencies of weights do
    frequent = torch.cat([counts.flip(0)[:-1], counts]).double() + 1
    lengths = -strength * (frequent / frequent.sum()).log()
    codes = UniformRounder(scale, torch.tensor(limit), lengths, torch.tensor(True))(w, p)
    levels = torch.arange(-limit, limit + 1).double()
    price = 0.5 * p[:, None] * (w[:, None] - levels * scale).square() + lengths
    best = price.min(1).values
    assert torch.allclose(price.gather(1, (codes + limit)[:, None])[:, 0], best, rtol=1e-12)


def test_without_lengths_it_is_the_nearest_level():
    w = torch.tensor([-3.0, -0.4, 0.0, 0.26, 0.24, 9.0])
    rounder = UniformRounder(torch.tensor(0.5), torch.tensor(3), None, torch.tensor(True))
    assert rounder(w, torch.ones(6)).tolist() == [-3, -1, 0, 1, 0, 3]


def test_one_bit_has_two_levels_and_no_zero():
    w = torch.tensor([-3.0, -0.01, 0.01, 2.0])
    for lengths in (None, torch.tensor([5.0, 0.0, 5.0])):
        rounder = UniformRounder(torch.tensor(1.0), torch.tensor(1), lengths, torch.tensor(False))
        assert rounder(w, torch.ones(4)).tolist() == [-1, -1, 1, 1]


def test_a_sharp_weight_stays_and_a_vague_one_takes_the_cheap_level():
    lengths = torch.tensor([4.0, 0.1, 4.0])
    rounder = UniformRounder(torch.tensor(1.0), torch.tensor(1), lengths, torch.tensor(True))
    assert rounder(torch.tensor([0.9, 0.9]), torch.tensor([100.0, 1.0])).tolist() == [1, 0]


def test_code_lengths_are_those_of_the_frequencies():
    codes = torch.tensor([0] * 60 + [1] * 30 + [-1] * 9)
    lengths = code_lengths(codes, -2, 2)
    counts = torch.tensor([0.5, 9.5, 60.5, 30.5, 0.5])
    assert torch.allclose(lengths, -(counts / counts.sum()).log().double())
    assert float((-lengths).exp().sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 8])
def test_scales_have_the_least_loss_of_a_fine_search(bits):
    weights = some_weights()
    found = float(nearest_losses(weights, bits))
    limit = int(limit_of(torch.tensor(bits)))
    best = math.inf
    for scale in torch.linspace(0.02, 1.2, 3000, dtype=torch.float64) * float(weights.values.abs().max()) / limit:
        codes = (weights.values / scale).round().clamp(-limit, limit)
        if bits == 1:
            codes = torch.where(weights.values < 0, -1.0, 1.0)
        best = min(best, float(weights.loss(codes * scale)))
    assert found <= best * 1.1  # 3,000 tries find luckier roundings of 400 weights


def test_units_are_fitted_as_if_each_were_alone():
    weights = some_weights(by_unit=True, zeros=0.3)
    bits = torch.arange(20) % 4 + 1
    together = fit_scales(weights, bits)
    for unit in range(20):
        mine = weights.unit == unit
        alone = Weights(
            weights.values[mine],
            weights.precision[mine],
            weights.places[mine],
            weights.unit[mine] * 0,
            1,
            weights.shape,
        )
        assert torch.equal(fit_scales(alone, bits[unit : unit + 1])[0], together[unit])


def test_a_further_bit_divides_the_loss_by_about_four():
    losses = [float(nearest_losses(some_weights(4000), bits)) for bits in (4, 5, 6, 7)]
    for wide, narrow in zip(losses[1:], losses[:-1], strict=True):
        assert 2.5 < narrow / wide < 5.0


def test_the_expected_loss_is_that_of_even_noise():
    weights = some_weights(20_000)
    scale = fit_scales(weights, torch.tensor([8]))
    even = float((weights.precision * scale.double() ** 2 / 24).sum())
    assert float(nearest_losses(weights, 8)) == pytest.approx(even, rel=0.1)  # a few are clipped


@pytest.mark.parametrize("strength", [0.0, 0.02, 0.5])
def test_frequencies_shorten_the_message(strength):
    weights = some_weights(2000, zeros=0.5)
    grid, _, codes = fit_uniform(weights, torch.tensor([4]), strength)
    plain_grid, _, plain = fit_uniform(weights, torch.tensor([4]), 0.0)

    def length(grid, codes):
        return coded_bits(weights.whole(codes), grid) * math.log(2)

    def loss(grid, codes):
        return float(weights.loss(grid.decode(codes).double()).sum())

    assert length(grid, codes) <= length(plain_grid, plain) + 1e-9
    whole = loss(grid, codes) + strength * length(grid, codes)
    assert whole <= loss(plain_grid, plain) + strength * length(plain_grid, plain) + 1e-6
    if strength == 0.5:
        assert int((codes != 0).sum()) < int((plain != 0).sum())


def test_a_codebook_is_a_fixed_point_of_weighted_k_means():
    weights = some_weights(600)
    grid, rounder, codes = fit_codebook(weights, 3, 0.0)
    assert len(grid.values) <= 8
    assert float(grid.values[0]) == 0.0
    distance = (weights.values[:, None] - grid.values.double()).abs()
    assert torch.allclose(distance.gather(1, codes[:, None])[:, 0], distance.min(1).values)
    for code in range(1, len(grid.values)):
        mine = codes == code
        centre = (weights.precision * weights.values)[mine].sum() / weights.precision[mine].sum()
        assert float(grid.values[code]) == pytest.approx(float(centre), rel=2**-7, abs=0.02)
    assert torch.equal(rounder(weights.values, weights.precision), codes)
    assert float(weights.loss(grid.decode(codes).double())) < float(nearest_losses(weights, 3))


def test_a_given_codebook_takes_its_shares_as_frequencies():
    weights = some_weights(200)
    levels, shares = torch.tensor([0.0, -1.0, 1.0]), torch.tensor([0.9, 0.05, 0.05])
    _, rounder, codes = given_codebook(weights, levels, shares, 0.3)
    price = 0.5 * weights.precision[:, None] * (weights.values[:, None] - levels.double()).square()
    price = price - 0.3 * shares.double().log()
    assert torch.equal(codes, price.argmin(1))
    assert isinstance(rounder, CodebookRounder)


def test_an_unused_level_is_not_kept():
    value = torch.tensor([[0.5] * 30 + [-0.5] * 30]).double()
    weights = Weights.of(value, torch.ones_like(value), value != 0, False)
    grid, _, codes = fit_codebook(weights, 4, 0.0)
    assert sorted(grid.values.tolist()) == [-0.5, 0.0, 0.5]
    assert torch.equal(grid.decode(codes).double(), weights.values)


def test_grids_decode_exactly():
    scale = storable(torch.rand(3, 1) + 0.1)
    codes = torch.tensor([[-127, 0, 127], [1, 2, 3], [5, 0, -5]])
    grid = Uniform(scale, torch.full((3, 1), 8))
    assert torch.equal(grid.decode(codes).double(), codes.double() * scale.double())
    book = Codebook(storable(torch.tensor([0.0, 0.3, -0.7])))
    assert int(book.bits) == 2
    assert book.decode(torch.tensor([2, 0, 1])).tolist() == [book.values[2].item(), 0.0, book.values[1].item()]
