"""Quantised networks as ONNX: integers in the file, the network's answers out of it."""

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import bayeslim as bl
from bayeslim.errors import UnsupportedModel
from bayeslim.export.integer_onnx import INT8_TOLERANCE
from bayeslim.export.onnx import Session
from bayeslim.posteriors import Diagonal
from prune.given_posteriors import given, mean_of


class Sequences(nn.Module):
    """Products with a third dimension, whose weights the exporter turns round, and an embedding."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 12)
        self.hidden = nn.Linear(12, 40)
        self.out = nn.Linear(40, 9)

    def forward(self, x):
        return self.out(self.hidden(self.words(x)).relu())


NETWORKS = {
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 12, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(12, 16, 3),
            nn.Flatten(),
            nn.Linear(64, 9),
        ),
        lambda: torch.rand(32, 2, 8, 8),
    ),
    "linear": (
        lambda: nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 40, bias=False), nn.ReLU(), nn.Linear(40, 5)),
        lambda: torch.randn(50, 20),
    ),
    "sequences": (Sequences, lambda: torch.randint(0, 50, (16, 7))),
}


def quantised(model, **options):
    mean = mean_of(model)
    posterior = Diagonal(mean, {n: torch.full_like(m, 0.02) for n, m in mean.items()})
    return bl.quantise(given(model, posterior), **({"how": "nearest"} | options))


def made(case):
    torch.manual_seed(0)
    model, example = NETWORKS[case]
    return model().eval(), example()


@pytest.fixture(scope="module")
def dense_bytes(tmp_path_factory):
    """The size of each network's file before it is quantised."""
    sizes = {}
    for case in NETWORKS:
        model, x = made(case)
        sizes[case] = bl.export(model, tmp_path_factory.mktemp("dense") / "dense.onnx", example=x).bytes
    return sizes


def answers(path, x):
    return Session(path.read_bytes())(x)[0]


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("linear", {"bits": 4, "codebook": "kmeans"}),
        ("sequences", {"bits": 12}),
        ("convolutions", {"bits": 5, "per": "unit"}),
    ],
    ids=str,
)
def test_stored_codes_give_the_networks_answers_from_a_smaller_file(case, options, dense_bytes, tmp_path):
    model, x = made(case)
    found = quantised(model, **options)
    done = bl.export(found, tmp_path / "slim.onnx", example=x)
    assert done.difference < 1e-5
    assert done.batch_is_free
    with torch.no_grad():
        wanted = found.network(x)
    assert torch.allclose(answers(tmp_path / "slim.onnx", x), wanted, atol=1e-5 * float(wanted.abs().max()))
    limit = 0.75 if options["bits"] == 12 else 0.5
    assert done.bytes < limit * dense_bytes[case]
    kinds = {numpy_helper.to_array(t).dtype for t in onnx.load(tmp_path / "slim.onnx").graph.initializer if t.dims}
    assert kinds & {np.dtype(np.int8), np.dtype(np.uint8), np.dtype(np.int16)}


@pytest.mark.parametrize(("case", "per"), [("convolutions", "unit"), ("sequences", "layer")])
def test_integer_arithmetic_has_our_codes_and_nearly_the_networks_answers(case, per, dense_bytes, tmp_path):
    model, x = made(case)
    found = quantised(model, bits=8, per=per)
    path = tmp_path / "int8.onnx"
    done = bl.export(found, path, example=x, int8=True)
    assert 0 < done.difference < INT8_TOLERANCE / 2
    assert done.bytes < 0.65 * dense_bytes[case]
    proto = onnx.load(path)
    onnx.checker.check_model(proto)
    operations = [node.op_type for node in proto.graph.node]
    layers = sum(isinstance(module, (nn.Linear, nn.Conv2d)) for module in model.modules())
    assert operations.count("QuantizeLinear") == layers
    stored = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    for name, codes in found.codes.items():
        if codes.ndim > 1 and f"{name}_codes" in stored:
            own = stored[f"{name}_codes"].astype(int)
            if f"{name}_zero" in stored:  # unsigned: signed ones overflow on x86 without VNNI
                assert stored[f"{name}_codes"].dtype == np.uint8
                own = own - 128
            assert np.array_equal(own, codes.numpy())
    with torch.no_grad():
        wanted = found.network(x)
    gap = (answers(path, x) - wanted).abs().max() / wanted.abs().max()
    assert float(gap) < INT8_TOLERANCE / 2


def test_layers_that_cannot_are_only_stored(tmp_path):
    model, x = made("linear")
    mixed = quantised(model, bits={"0": 12, "all": 6})
    done = bl.export(mixed, tmp_path / "mixed.onnx", example=x, int8=True)
    operations = [node.op_type for node in onnx.load(tmp_path / "mixed.onnx").graph.node]
    assert operations.count("QuantizeLinear") == 2
    assert "Cast" in operations
    assert done.difference < INT8_TOLERANCE
    with pytest.raises(UnsupportedModel, match="at most 8 bits"):
        bl.export(quantised(model, bits=4, codebook="kmeans"), tmp_path / "no.onnx", example=x, int8=True)
    assert not (tmp_path / "no.onnx").exists()


def test_a_program_is_that_of_the_network(tmp_path):
    model, x = made("linear")
    found = quantised(model, bits=4)
    bl.export(found, tmp_path / "slim.pt2", example=x)
    again = torch.export.load(tmp_path / "slim.pt2").module()
    with torch.no_grad():
        assert torch.allclose(again(x), found.network(x), atol=1e-6)


def test_what_is_refused(tmp_path):
    model, x = made("linear")
    found = quantised(model, bits=4)
    with pytest.raises(ValueError, match="leave sparse=True out"):
        bl.export(found, tmp_path / "slim.onnx", example=x, sparse=True)
    with pytest.raises(ValueError, match="a plain network has none"):
        bl.export(found, tmp_path / "slim.onnx", example=x, samples=3)
    with pytest.raises(TypeError, match="the result of quantise"):
        bl.export(found.codes, tmp_path / "slim.onnx", example=x)
