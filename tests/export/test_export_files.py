"""Files for other programs: they answer as the network does, hold nothing else, and take their place in one step."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from small_networks import Branching, Convolutional, FixedBatch, Length, TwoInputs, mlp, with_zeros
from torch import nn

import bayeslim as bl
from bayeslim.compact import compact_network, units
from bayeslim.errors import BayeslimError, MissingExtra, ShapeMismatch, UnsupportedModel
from bayeslim.export import ExportFailed
from bayeslim.export import onnx as exporter

IMAGES = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


def run(path, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The answers of onnxruntime itself, without the library's own session."""
    session = onnxruntime.InferenceSession(path)
    feed = {entry.name: x.numpy() for entry, x in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(output) for output in session.run(None, feed)]


@pytest.fixture(scope="module")
def slim() -> nn.Module:
    torch.manual_seed(0)
    network = Convolutional().eval()
    found = units(network, IMAGES)
    return compact_network(network, found.masks(range(0, len(found.units), 2)), IMAGES)


@pytest.fixture(scope="module")
def sparse_network() -> nn.Module:
    torch.manual_seed(0)
    return with_zeros(nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 300)), 0.05).eval()


@pytest.fixture(scope="module")
def dense_file(sparse_network, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "dense.onnx"
    bl.export(sparse_network, path, example=IMAGES)
    return path


def test_onnxruntime_agrees_on_every_batch_size(slim, tmp_path):
    """The example holds a single row, which tracing would take for the only size there is."""
    done = bl.export(slim, tmp_path / "deep" / "slim.onnx", example=IMAGES[:1])
    assert done.batch_is_free
    assert done.difference < 1e-5
    assert done.bytes == done.path.stat().st_size
    assert "any batch size" in repr(done)
    for size in (1, 2, 7):
        x = torch.randn(size, 1, 8, 8)
        (answer,) = run(done.path, x)
        with torch.no_grad():
            torch.testing.assert_close(answer, slim(x), rtol=1e-5, atol=1e-6)
    assert onnxruntime.InferenceSession(done.path).get_outputs()[0].name == "output"


def test_the_file_holds_the_network_and_nothing_else(sparse_network, dense_file):
    content = dense_file.read_bytes()
    weights = sum(p.numel() * 4 for p in sparse_network.parameters())
    assert len(content) < weights + 3000
    for secret in (b"site-packages", b"forward", str(Path(__file__).parent).encode()):
        assert secret not in content
    onnx.checker.check_model(onnx.load_from_string(content), full_check=True)


def test_sparse_initialisers_shrink_the_file_and_give_the_same_answers(sparse_network, dense_file, tmp_path):
    done = bl.export(sparse_network, tmp_path / "sparse.onnx", example=IMAGES, sparse=True)
    nonzeros = sum(int(p.count_nonzero()) for p in sparse_network.parameters())
    assert done.bytes < 12 * nonzeros + 5000 < dense_file.stat().st_size / 4
    assert torch.equal(run(done.path, IMAGES)[0], run(dense_file, IMAGES)[0])
    onnx.checker.check_model(onnx.load(done.path))
    assert {t.values.name for t in onnx.load(done.path).graph.sparse_initializer} >= {"0.weight", "3.weight"}


def test_eight_bits_are_a_quarter_and_say_what_they_cost(sparse_network, dense_file, tmp_path):
    done = bl.export(sparse_network, tmp_path / "int8.onnx", example=IMAGES, int8=True)
    assert done.bytes < 0.35 * dense_file.stat().st_size
    with torch.no_grad():
        expected = sparse_network(IMAGES)
    gap = (run(done.path, IMAGES)[0] - expected).abs().max() / expected.abs().max()
    assert 0 < gap < 0.05
    assert 0 < done.difference < 0.05


def test_several_inputs_and_outputs(tmp_path):
    network = TwoInputs().eval()
    example = {"left": torch.randn(2, 3), "right": torch.randn(2, 5)}
    bl.export(network, tmp_path / "two.onnx", example=example)
    left, right = torch.randn(4, 3), torch.randn(4, 5)
    answer = run(tmp_path / "two.onnx", left, right)
    torch.testing.assert_close(answer, list(network(left, right).values()), rtol=1e-5, atol=1e-6)
    names = [entry.name for entry in onnxruntime.InferenceSession(tmp_path / "two.onnx").get_inputs()]
    assert names == ["left", "right"]


def test_attention_of_every_kind(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)

        def forward(self, x):
            x = self.encoder(x)
            x = F.scaled_dot_product_attention(x, x, x, torch.ones(3, 3, dtype=torch.bool).tril())  # without heads
            return x[:, 0]

    network = Net().eval()
    bl.export(network, tmp_path / "n.onnx", example=torch.randn(2, 3, 8))
    x = torch.randn(5, 3, 8)
    with torch.no_grad():
        torch.testing.assert_close(run(tmp_path / "n.onnx", x)[0], network(x), rtol=1e-5, atol=1e-6)
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("network", [Convolutional(), Length()])
def test_programs(network, tmp_path):
    example = IMAGES if isinstance(network, Convolutional) else torch.full((3, 4), 0.123456)
    done = bl.export(network, tmp_path / "net.pt2", example=example)
    assert done.batch_is_free
    again = torch.export.load(tmp_path / "net.pt2").module()
    x = torch.randn(5, *example.shape[1:])
    with torch.no_grad():
        torch.testing.assert_close(again(x), network.eval()(x))
    content = done.path.read_bytes()
    assert str(Path(__file__).parent).encode() not in content
    assert example.numpy().tobytes() not in content


def test_a_network_of_one_batch_size(tmp_path):
    done = bl.export(FixedBatch(), tmp_path / "fixed.pt2", example=torch.randn(4, 4))
    assert not done.batch_is_free
    assert "the example's batch size only" in repr(done)


def test_the_network_is_left_alone(tmp_path):
    network = Convolutional().train()
    network.fc1.weight.requires_grad_(False)
    before = copy.deepcopy(network.state_dict())
    bl.export(network, tmp_path / "net.pt2", example=IMAGES)
    assert network.training
    assert [p.requires_grad for p in network.parameters()].count(False) == 1
    assert all(p.grad is None for p in network.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())


def test_what_cannot_be_asked_for(tmp_path):
    network = mlp()
    bnn = bl.bayesianize(network, bl.Variational(), likelihood=bl.likelihoods.Categorical())
    for error, options, match in [
        (ValueError, {"path": "net.tflite"}, r'".onnx", ".pt2" or ".c"'),
        (ValueError, {"path": "net"}, r'".onnx", ".pt2" or ".c"'),
        (ValueError, {"path": "net.pt2", "sparse": True}, r"\.onnx"),
        (ValueError, {"sparse": True, "int8": True}, "Choose one"),
        (ValueError, {"samples": 3}, "plain network has none"),
        (UnsupportedModel, {"network": mlp().double(), "example": ROWS.double(), "int8": True}, "in torch.float64"),
        (UnsupportedModel, {"network": mlp().bfloat16(), "example": ROWS.bfloat16()}, r"network.float\(\)"),
        (ValueError, {"network": bnn}, r"samples=8.*mean_network"),
        (ValueError, {"network": bnn, "samples": 0, "path": "net.pt2"}, "at least 1"),
        (TypeError, {"network": "net"}, "torch.nn.Module"),
        (ShapeMismatch, {"example": torch.randn(2, 5)}, "does not run on the example"),
        (UnsupportedModel, {"network": Branching(), "example": torch.randn(2, 4)}, "cannot trace Branching"),
    ]:
        settings = {"network": network, "path": "net.onnx", "example": ROWS} | options
        with pytest.raises(error, match=match):
            bl.export(settings.pop("network"), tmp_path / settings.pop("path"), **settings)
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(BayeslimError, match="is a folder"):
        bl.export(network, tmp_path / "folder.onnx", example=ROWS)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.onnx"]


def test_a_place_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BayeslimError, match=r"Could not write.*untouched"):
        bl.export(mlp(), tmp_path / "file" / "net.pt2", example=ROWS)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_failure_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "net.pt2"
    path.write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(BayeslimError, match="No space left"):
        bl.export(mlp(), path, example=ROWS)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_extra_is_named(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"needs {package}.*bayeslim\[onnx\]"):
        bl.export(mlp(), tmp_path / "net.onnx", example=ROWS)
    assert not list(tmp_path.iterdir())


def test_a_file_that_gives_other_answers_is_not_written(tmp_path, monkeypatch):
    """The exporter is made to lose a bias; the check has to find out."""
    honest = exporter.traced

    def careless(*args):
        proto = honest(*args)
        for tensor in proto.graph.initializer:
            if tensor.name == "2.bias":
                tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros(3, np.float32), "2.bias"))
        return proto

    monkeypatch.setattr(exporter, "traced", careless)
    with pytest.raises(ExportFailed, match="gives other outputs"):
        bl.export(mlp(), tmp_path / "net.onnx", example=ROWS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_weights_that_are_not_finite_are_named(tmp_path, suffix):
    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with torch.no_grad():
        network[1].bias[0] = torch.nan
    with pytest.raises(ValueError, match=r'"1\.bias" of Sequential holds NaN'):
        bl.export(network, tmp_path / f"net.{suffix}", example=torch.randn(2, 3))
    assert not list(tmp_path.iterdir())
