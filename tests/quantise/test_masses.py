"""The posterior's probabilities of codes, against weights that are drawn and rounded."""

from __future__ import annotations

import pytest
import torch

from bayeslim.quantise import Codebook, Uniform
from bayeslim.quantise.masses import code_masses, presence
from bayeslim.quantise.weights import Weights

DRAWS = 4000


def some_weights(units: int = 1) -> Weights:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(4, 12, generator=generator)
    precision = 20 * torch.rand(4, 12, generator=generator) + 1
    return Weights.of(value, precision, torch.rand(4, 12, generator=generator) < 0.8, by_unit=units > 1)


def drawn(weights: Weights) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(DRAWS, len(weights), generator=generator, dtype=torch.float64)
    return weights.values + noise / weights.precision.sqrt()


def frequencies(codes: torch.Tensor, lowest: int, highest: int) -> torch.Tensor:
    return torch.bincount(codes.flatten().long() - lowest, minlength=highest - lowest + 1) / codes.numel()


def test_even_levels():
    weights = some_weights()
    grid = Uniform(torch.tensor(0.3), torch.tensor(3))
    codes = (drawn(weights) / 0.3).round().clamp(-3, 3)
    found = code_masses(weights, grid)
    assert found.sum() == pytest.approx(1.0)
    assert torch.allclose(found.float(), frequencies(codes, -3, 3), atol=0.005)


def test_units_of_different_widths_down_to_one_bit():
    weights = some_weights(units=4)
    scale, bits = torch.tensor([0.3, 0.5, 0.2, 0.8]), torch.tensor([3, 2, 4, 1])
    grid = Uniform(scale.view(4, 1), bits.view(4, 1))
    limit = torch.tensor([3.0, 1.0, 7.0, 1.0], dtype=torch.float64)[weights.unit]
    draws = drawn(weights)
    nearest = (draws / scale.double()[weights.unit]).round().maximum(-limit).minimum(limit)
    codes = torch.where(weights.unit == 3, draws.sign(), nearest)  # one bit has no zero
    assert torch.allclose(code_masses(weights, grid).float(), frequencies(codes, -7, 7), atol=0.005)


def test_codebooks_in_any_order():
    weights = some_weights()
    values = torch.tensor([0.0, 0.9, -1.2, 0.2, -0.3])
    codes = (drawn(weights)[..., None] - values).abs().argmin(-1)
    assert torch.allclose(code_masses(weights, Codebook(values)).float(), frequencies(codes, 0, 4), atol=0.005)


def test_columns_expect_as_many_weights_away_from_zero_as_are_drawn():
    for units, scale, bits in ((1, [0.9], [3]), (4, [0.3, 1.5, 0.2, 0.8], [3, 2, 4, 1])):
        weights = some_weights(units)
        steps = torch.tensor(scale, dtype=torch.float64)[weights.unit if units > 1 else 0]
        codes = (drawn(weights) / steps).round()
        if units > 1:
            codes[:, weights.unit == 3] = 1.0  # one bit has no zero
        columns = torch.zeros(DRAWS, 12).index_add_(1, weights.places % 12, (codes != 0).float()).mean(0)
        shape = (units, 1) if units > 1 else ()
        found = presence(weights, Uniform(torch.tensor(scale).view(shape), torch.tensor(bits).view(shape)))
        assert torch.allclose(found.float(), columns, atol=0.05)


@pytest.mark.parametrize("values", [[0.0, 0.9, -1.2, 0.2, -0.3], [0.0, 0.4, 2.0]])
def test_columns_and_codebooks(values):
    weights = some_weights()
    codes = (drawn(weights)[..., None] - torch.tensor(values)).abs().argmin(-1)
    columns = torch.zeros(DRAWS, 12).index_add_(1, weights.places % 12, (codes != 0).float()).mean(0)
    assert torch.allclose(presence(weights, Codebook(torch.tensor(values))).float(), columns, atol=0.05)


def test_weights_that_are_certain_have_their_own_code():
    weights = Weights.of(
        torch.tensor([[0.6, -0.3]]), torch.full((1, 2), 1e20), torch.ones(1, 2, dtype=torch.bool), False
    )
    assert code_masses(weights, Uniform(torch.tensor(0.3), torch.tensor(3))).tolist() == [0, 0, 0.5, 0, 0, 0.5, 0]


def test_of_many_weights_some_are_looked_at():
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(100, 300, generator=generator)
    weights = Weights.of(value, torch.full_like(value, 50.0), torch.ones_like(value, dtype=torch.bool), by_unit=True)
    grid = Uniform(torch.full((100, 1), 0.3), torch.full((100, 1), 4))
    noise = torch.randn(len(weights), generator=generator, dtype=torch.float64) / 50**0.5
    codes = ((weights.values + noise) / 0.3).round().clamp(-7, 7)
    assert torch.allclose(code_masses(weights, grid).float(), frequencies(codes, -7, 7), atol=0.01)


def test_weights_that_nothing_is_known_of_are_as_likely_on_either_side():
    weights = Weights.of(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), by_unit=True)
    grid = Uniform(torch.tensor([[0.3], [0.5]]), torch.tensor([[2], [3]]))
    masses = code_masses(weights, grid)
    assert masses.isfinite().all()
    assert masses.sum() == pytest.approx(1.0)
    for one in (grid, Codebook(torch.tensor([0.0, 0.4]))):
        assert presence(weights, one).isfinite().all()
