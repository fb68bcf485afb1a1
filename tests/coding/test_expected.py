"""What is expected before anything was coded: curves, and what they save."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bayeslim as bl
from bayeslim.coding.adaptive import Symbols
from bayeslim.coding.coders import Meter, Reader, Writer
from bayeslim.coding.codes import _pass, code_codes
from bayeslim.coding.expected import HALF_EXPONENTS, RATES, WEIGHTS, Curve, bits_a_step, closest_curve, expectations
from bayeslim.coding.geometry import Grid
from bayeslim.coding.logarithms import ONE
from bayeslim.quantise import Codebook

CURVES = st.builds(
    Curve,
    st.integers(0, len(HALF_EXPONENTS) - 1),
    st.integers(0, RATES - 1),
    st.integers(0, len(WEIGHTS) - 1),
)


def shares(curve: Curve, count: int) -> np.ndarray:
    """The formula, in floating point."""
    sizes = np.arange(1, count + 1)
    logs = HALF_EXPONENTS[curve.exponent] / 2 * np.log2(sizes) - bits_a_step(curve.rate) / ONE * sizes
    found = np.exp2(logs - logs.max())
    return found / found.sum()


@given(CURVES, st.integers(1, 256))
def test_curves_in_integers_are_their_formula(curve, count):
    below = np.array(curve.below(count), float)
    assert below[0] == 0
    assert (np.diff(below) >= 1).all()  # everything is possible
    assert np.allclose(np.diff(below) / below[-1], shares(curve, count), atol=1e-6)


@given(CURVES)
def test_the_closest_curve_to_a_curve_is_itself(curve):
    masses = shares(curve, 31)
    found = shares(closest_curve(masses), 31)
    assert np.allclose(found, masses, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(CURVES, st.integers(1, 40), st.data())
def test_symbols_are_read_as_written_whatever_was_expected(curve, count, data):
    symbols = data.draw(st.lists(st.integers(0, count - 1), max_size=30))

    def send(coder, symbols):
        learned = Symbols(count, curve.code(coder))
        return [learned.code(coder, symbol) for symbol in symbols]

    writer = Writer()
    send(writer, symbols)
    assert send(Reader(writer.finish()), [0] * len(symbols)) == symbols


def test_what_was_rightly_expected_saves_bits_and_what_was_wrongly_is_unlearned():
    generator = np.random.default_rng(0)
    right, wrong = Curve(4, 12, len(WEIGHTS) - 1), Curve(0, 0, 0)
    values = generator.choice(31, 400, p=shares(right, 31)).tolist()
    costs = {}
    for name, curve in (("none", None), ("right", right), ("wrong", wrong)):
        meter, symbols = Meter(), Symbols(31, curve)
        for value in values:
            symbols.code(meter, value)
        costs[name] = meter.bits
    entropy = -np.log2(shares(right, 31)[values]).sum()
    assert costs["right"] < entropy + 15 < entropy + 30 < costs["none"]
    assert costs["wrong"] < costs["none"] + 40


def test_a_curve_is_used_only_where_it_pays():
    generator = np.random.default_rng(0)
    grid, hits = Grid(200), [np.arange(200)]
    usual = (1 + generator.choice(31, 200, p=shares(Curve(4, 12, 0), 31))) * generator.choice([-1, 1], 200)
    odd = np.where(usual > 0, 31, -1)
    for codes, saves in ((usual, 10), (odd, -1)):  # one bit says that there is no curve
        most = (-int(codes.min()), int(codes.max()))
        with_curve, without = Meter(), Meter()
        code_codes(with_curve, codes, hits, grid, most)
        _pass(without, codes, hits, grid, most, None)
        assert with_curve.bits <= without.bits - saves


def network_and_quantised(units=40, **settings):
    torch.manual_seed(0)
    x, y = torch.randn(200, 16), torch.randint(0, 3, (200,))
    network = nn.Sequential(nn.Linear(16, units), nn.ReLU(), nn.Linear(units, 3))
    with torch.no_grad():
        for weight in (network[0].weight, network[2].weight):
            weight.copy_(weight.sign() * torch.distributions.Gamma(3.0, 30.0).sample(weight.shape))
    likelihood, prior = bl.likelihoods.Categorical(), bl.priors.Normal(0.01)
    bnn = bl.bayesianize(network, bl.Laplace(structure="diag"), likelihood=likelihood, prior=prior)
    bnn.fit([(x, y)])
    return network, bl.quantise(bnn, **settings)


@pytest.mark.parametrize("settings", [{"bits": 5}, {"bits": 4, "per": "unit"}, {"bits": 4, "codebook": "kmeans"}])
def test_what_is_expected_are_the_posteriors_probabilities(settings):
    _, quantised = network_and_quantised(**settings)
    for name, expected in expectations(quantised).items():
        probabilities, grid = quantised.probabilities[name], quantised.grids[name]
        if isinstance(grid, Codebook):
            zero, largest = probabilities[0], max(int((grid.values > 0).sum()), int((grid.values < 0).sum()))
        else:
            zero, largest = probabilities[len(probabilities) // 2], len(probabilities) // 2
        assert expected.sizes.sum() == pytest.approx(1 - float(zero))
        assert expected.sizes[:largest].any()
        assert not expected.sizes[largest:].any()
        if expected.columns is not None:
            assert expected.columns.sum() == pytest.approx(quantised.kept[name] * (1 - float(zero)))


def test_expected_sizes_are_those_that_are_written():
    _, quantised = network_and_quantised(bits=5)
    whole = expectations(quantised)
    even = replace(quantised, codes={name: 2 * (codes // 2) for name, codes in quantised.codes.items()})
    for name, expected in expectations(even).items():
        assert expected.sizes.tolist() == whole[name].sizes[1::2].tolist()
    _, listed = network_and_quantised(bits=3, codebook="kmeans")
    name, grid = next(iter(listed.grids.items()))
    ranked = [int(code) for code in grid.values.argsort() if grid.values[code] > 0]
    fewer = listed.codes | {name: torch.where(listed.codes[name] == ranked[0], ranked[1], listed.codes[name])}
    masses = listed.probabilities[name]
    lost = expectations(listed)[name].sizes.sum() - expectations(replace(listed, codes=fewer))[name].sizes.sum()
    assert lost == pytest.approx(float(masses[ranked[0]]))


def test_the_posteriors_probabilities_go_into_the_file_and_change_no_value(tmp_path):
    network, quantised = network_and_quantised(units=12, bits=6, how="nearest")
    sure = {
        name: torch.zeros_like(p).index_fill_(0, torch.tensor(0), 1.0) for name, p in quantised.probabilities.items()
    }
    sizes = []
    for name, one in (("own", quantised), ("other", replace(quantised, probabilities=sure))):
        sizes.append(bl.encode(one, tmp_path / name).total("values"))
        decoded = bl.decode(tmp_path / name, model=network)
        for key, value in quantised.network.state_dict().items():
            assert torch.equal(decoded.state_dict()[key], value)
    assert sizes[0] < sizes[1]
    assert (tmp_path / "own").read_bytes() != (tmp_path / "other").read_bytes()
