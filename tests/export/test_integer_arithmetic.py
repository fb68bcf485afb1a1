"""Int8 files of networks with layers that are silent on the example, or very small."""

import itertools

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import bayeslim as bl
from bayeslim.export.onnx import Session
from bayeslim.posteriors import Diagonal
from prune.given_posteriors import given, mean_of


def quantised(model, bits, per="layer"):
    mean = mean_of(model)
    posterior = Diagonal(mean, {name: torch.full_like(value, 0.02) for name, value in mean.items()})
    return bl.quantise(given(model.eval(), posterior), bits=bits, per=per, how="nearest")


def network(*widths):
    torch.manual_seed(0)
    pairs = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*[module for pair in pairs for module in pair][:-1])


def gap(coded, path, x):
    """Between the file and the network, relative to the largest output."""
    with torch.no_grad():
        wanted = coded.network(x)
    return float((Session(path.read_bytes())(x)[0] - wanted).abs().max() / wanted.abs().max())


def rows(width, count=64):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(0))


def test_a_layer_that_reads_only_zeros_on_the_example(tmp_path):
    model, x, path = network(6, 64, 64, 64), rows(6), tmp_path / "int8.onnx"
    with torch.no_grad():
        model[2].bias.fill_(-5)
    coded = quantised(model, 8)
    done = bl.export(coded, path, example=x, int8=True)
    assert done.difference < 1e-3
    assert gap(coded, path, x) < 1e-3
    assert [node.op_type for node in onnx.load(path).graph.node].count("QuantizeLinear") == 3


def test_what_was_not_seen_on_the_example_is_read_all_the_same(tmp_path):
    coded, path = quantised(nn.Sequential(nn.ReLU(), *network(6, 64)), 8), tmp_path / "int8.onnx"
    bl.export(coded, path, example=-rows(6).abs(), int8=True)
    assert gap(coded, path, rows(6).sigmoid()) < 0.02


def test_biases_beside_which_inputs_or_weights_are_nothing(tmp_path):
    """In steps of the products of either, they are beyond any integer of 32 bits."""
    model, x, path = network(6, 64, 64, 64), rows(6), tmp_path / "int8.onnx"
    with torch.no_grad():
        model[2].weight[:4] *= 1e-12
    coded = quantised(model, 8, "unit")
    for example in (x, 1e-12 * x):
        bl.export(coded, path, example=example, int8=True)
        assert gap(coded, path, example) < 0.02


@pytest.mark.parametrize("widths", [(6, 8, 2), (1, 1, 1)])
def test_the_smallest_layers_compute_in_integers_too(widths, tmp_path):
    x, path = rows(widths[0]), tmp_path / "int8.onnx"
    coded = quantised(network(*widths), 4)
    bl.export(coded, path, example=x, int8=True)
    assert gap(coded, path, x) < 0.02
    proto = onnx.load(path)
    assert [node.op_type for node in proto.graph.node].count("QuantizeLinear") == 2
    stored = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    assert np.array_equal(stored["0.weight_codes"].astype(int) - 128, coded.codes["0.weight"].numpy())  # unsigned


def test_what_codes_would_make_larger_is_stored_as_it_is(tmp_path):
    x = rows(6)
    bl.export(quantised(network(6, 8, 2), 4), tmp_path / "slim.onnx", example=x)
    assert "Cast" not in [node.op_type for node in onnx.load(tmp_path / "slim.onnx").graph.node]
