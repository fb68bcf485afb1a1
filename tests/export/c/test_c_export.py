"""Networks in C: the same answers as in PyTorch, with every warning an error and under sanitizers."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bayeslim as bl
from bayeslim.errors import BayeslimError, BayeslimWarning, ShapeMismatch, UnsupportedModel
from bayeslim.export.c.fuse import fuse
from bayeslim.export.c.levels import find_levels
from bayeslim.export.c.library import find_compiler
from bayeslim.export.c.literals import literal
from bayeslim.export.c.read import read_program
from bayeslim.export.c.source import write_source
from bayeslim.export.c.steps import Weighted
from bayeslim.export.c.weights import LANES

needs_a_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler")


class Residual(nn.Module):
    """A residual block between convolutions, a difference, and scalars."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.third = nn.Conv2d(6, 4, 1, stride=2)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        h = torch.relu(self.norm(self.first(x)))
        h = torch.relu(h + 0.5 * self.second(h)) - h
        return self.last(self.third(h).mean((2, 3))) / 2 + 1


class Viewed(nn.Module):
    """Sizes that the forward reads from its input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 3)

    def forward(self, x):
        return self.layer(x.view(x.size(0), -1))


def mlp(activation=None, sizes=(7, 40, 33, 5)):
    layers = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), activation or nn.ReLU()]
    return nn.Sequential(*layers[:-1])


NETWORKS = {
    "mlp": (mlp, (7,)),
    "linear": (lambda: nn.Linear(3, 2, bias=False), (3,)),
    "lenet": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 5, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(5, 6, 3),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(6 * 25, 10),
            nn.Softmax(-1),
        ),
        (1, 28, 28),
    ),
    "normed": (
        lambda: nn.Sequential(
            nn.BatchNorm2d(3),
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.GELU(),
            nn.AvgPool2d(2),
            nn.Conv2d(8, 7, 3, stride=2, padding=(1, 2)),
            nn.BatchNorm2d(7),
            nn.LeakyReLU(0.2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(7, 4),
            nn.BatchNorm1d(4),
            nn.LogSoftmax(1),
        ),
        (3, 11, 13),
    ),
    "grouped": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 8, 3, groups=2, padding="same"),
            nn.SiLU(),
            nn.Conv2d(8, 8, (3, 1), groups=8, dilation=2),
            nn.Hardtanh(),
            nn.MaxPool2d(3, stride=2, padding=1),
            nn.Conv2d(8, 2, 1),
            nn.Softmax(1),
        ),
        (4, 9, 10),
    ),
    "signal": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 6, 5, padding=2),
            nn.BatchNorm1d(6),
            nn.Tanh(),
            nn.MaxPool1d(3),
            nn.Conv1d(6, 5, 3, stride=2),
            nn.Sigmoid(),
            nn.AvgPool1d(2, padding=1, count_include_pad=False),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(5, 3),
        ),
        (2, 53),
    ),
    "wide": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3),
            nn.ELU(),
            nn.MaxPool2d((2, 3)),
            nn.Conv2d(3, 3, 3),
            nn.Hardswish(),
            nn.AvgPool2d(2),
        ),
        (1, 17, 131),
    ),
    "residual": (Residual, (2, 8, 8)),
    "slopes": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 5, 3, padding=1),
            nn.PReLU(5),
            nn.MaxPool2d(2),
            nn.Conv2d(5, 3, 1),
            nn.PReLU(init=-0.5),
            nn.Flatten(),
            nn.Linear(27, 6),
            nn.PReLU(6),
            nn.Linear(6, 2),
        ),
        (2, 6, 6),
    ),
    "viewed": (Viewed, (3, 2, 2)),
    "tiny": (lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.GELU("tanh"), nn.MaxPool2d(2), nn.Flatten()), (1, 4, 4)),
    "dropped": (lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(12, 3), nn.Softplus()), (3, 2, 2)),
}


def network(name, density=0.3, seed=0):
    """A network of the table, with statistics of batch norms and zeros among its weights."""
    torch.manual_seed(seed)
    make, shape = NETWORKS[name]
    net = make()
    net(torch.randn(16, *shape))
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim > 1:
                parameter.mul_(torch.rand_like(parameter) < density)
        for layer in net.modules():
            if isinstance(layer, nn.PReLU) and layer.num_parameters > 1:
                layer.weight.copy_(torch.randn_like(layer.weight))
    return net.eval(), torch.randn(2, *shape)


MAIN = """
#include <stdio.h>
#include <stdlib.h>
#include "net.h"
int main(void)
{
    const size_t rows = %d;
    float *x = malloc(rows * NET_INPUTS * sizeof *x), *y = malloc(rows * NET_OUTPUTS * sizeof *y);
    float *one = malloc(NET_WORK * sizeof *one), *all = malloc(NET_BATCH_WORK * sizeof *all);
    if (fread(x, sizeof *x, rows * NET_INPUTS, stdin) != rows * NET_INPUTS)
        return 1;
    for (size_t n = 0; n < rows; ++n)
        net_run(x + n * NET_INPUTS, y + n * NET_OUTPUTS, one);
    fwrite(y, sizeof *y, rows * NET_OUTPUTS, stdout);
    net_run_batch(x, y, rows, all);
    fwrite(y, sizeof *y, rows * NET_OUTPUTS, stdout);
    free(x);
    free(y);
    free(one);
    free(all);
    return 0;
}
"""


def ask_a_program_under_sanitizers(folder, x, outputs):
    """Compile without a warning; allocate buffers to the byte, so that a step over their ends is found."""
    (folder / "main.c").write_text(MAIN % len(x))
    strict = [find_compiler(), "-std=c99", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*strict, "-O1", "-c", "net.c"], cwd=folder, check=True)  # some warnings need the optimiser
    flags = ["-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run([*strict, *flags, "main.c", "net.c", "-o", "main", "-lm"], cwd=folder, check=True)
    quick = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}  # networks allocate nothing, and the search takes seconds
    done = subprocess.run([folder / "main"], input=x.numpy().tobytes(), capture_output=True, check=True, env=quick)
    return torch.from_numpy(np.frombuffer(done.stdout, np.float32).copy()).view(2, len(x), *outputs)


@needs_a_compiler
@pytest.mark.parametrize("name", NETWORKS)
def test_answers_are_those_of_the_network_with_no_warnings_and_nothing_for_sanitizers(tmp_path, name):
    net, x = network(name)
    written(write_source(fuse(read_program(net, x)), "net", {}), tmp_path)
    x = torch.randn(LANES + 3, *x.shape[1:])
    one, batch = ask_a_program_under_sanitizers(tmp_path, x, net(x).shape[1:])
    torch.testing.assert_close(one, net(x), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(batch, net(x), atol=2e-6, rtol=1e-5)


@needs_a_compiler
@pytest.mark.parametrize(
    ("name", "density"),
    [("mlp", 0.0), ("lenet", 1.0), ("normed", 0.0), ("wide", 1.0), ("residual", 0.0), ("tiny", 1.0), ("mlp", 1.0)],
)
def test_both_kernels_of_every_layer(tmp_path, name, density):
    net, x = network(name, density)
    program = fuse(read_program(net, x))
    x = torch.randn(LANES + 1, *x.shape[1:])
    for is_sparse in (True, False):
        chosen = {n: is_sparse for n, step in enumerate(program.steps) if isinstance(step, Weighted)}
        compiled = built(write_source(program, "one", chosen), tmp_path / str(is_sparse))
        torch.testing.assert_close(compiled(x), net(x), atol=2e-6, rtol=1e-5)


def written(source, folder):
    folder.mkdir(exist_ok=True)
    (folder / f"{source.name}.h").write_text(source.header)
    (folder / f"{source.name}.c").write_text(source.code)


def built(source, folder):
    written(source, folder)
    return bl.load_c(folder / f"{source.name}.c")


ACTIVATIONS = [
    nn.ReLU(), nn.ReLU6(), nn.Hardtanh(-0.5, 0.25), nn.Hardtanh(-math.inf, 3.0), nn.LeakyReLU(0.1), nn.PReLU(),
    nn.ELU(0.7), nn.SELU(), nn.CELU(1.3), nn.GELU(), nn.GELU("tanh"), nn.Sigmoid(), nn.Tanh(), nn.SiLU(),
    nn.Softplus(2.0, 3.0), nn.Hardsigmoid(), nn.Hardswish(),
]  # fmt: skip


@needs_a_compiler
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_activations(tmp_path, activation):
    net = nn.Sequential(activation)
    compiled = built(write_source(fuse(read_program(net, torch.randn(2, 50))), "one", {}), tmp_path)
    x = torch.cat([torch.linspace(-12, 12, 45), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])])[None]
    alike = x.isfinite() if isinstance(activation, nn.GELU) else slice(None)  # torch's own GELU(−∞) is 0 or NaN
    torch.testing.assert_close(compiled(x)[alike], net(x)[alike], atol=1e-6, rtol=1e-5, equal_nan=True)


@needs_a_compiler
def test_pooling_of_an_image_in_another_shape_is_not_fused(tmp_path):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv2d(1, 4, 2), nn.Flatten(2), nn.MaxPool1d(2)), torch.randn(2, 1, 8, 8)
    compiled = built(write_source(fuse(read_program(net, x)), "one", {}), tmp_path)
    torch.testing.assert_close(compiled(x), net(x), atol=2e-6, rtol=1e-5)


@needs_a_compiler
@pytest.mark.parametrize("before", [(), (nn.Conv2d(1, 2, 1), nn.ReLU()), (nn.Conv2d(1, 2, 1), nn.GELU())])
def test_a_maximum_keeps_what_is_not_a_number(tmp_path, before):
    net = nn.Sequential(*before, nn.MaxPool2d(2)).eval()
    compiled = built(write_source(fuse(read_program(net, torch.randn(2, 1, 4, 4))), "one", {}), tmp_path)
    x = torch.randn(3, 1, 4, 4)
    x[0, 0, 0, 0] = x[1, 0, 1, 1] = torch.nan
    torch.testing.assert_close(compiled(x), net(x), atol=1e-6, rtol=1e-5, equal_nan=True)


def test_batch_norms_activations_and_pooling_are_fused():
    net, x = network("normed")
    kinds = [type(step).__name__ for step in fuse(read_program(net, x)).steps]
    assert kinds == ["Affine", "Pad", "Weighted", "Pad", "Weighted", "Weighted", "Softmax"]


@pytest.fixture(scope="module")
def fitted():
    torch.manual_seed(0)
    x, y = torch.randn(200, 1, 8, 8), torch.randint(0, 3, (200,))
    net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3))
    net(x)
    bnn = bl.bayesianize(net.eval(), bl.Laplace(structure="diag"), likelihood=bl.likelihoods.Categorical())
    bnn.fit([(x, y)])
    return bnn, x


@needs_a_compiler
@pytest.mark.parametrize("settings", [{"bits": 3}, {"bits": 4, "per": "unit"}, {"bits": 4, "codebook": "kmeans"}])
def test_quantised_networks_keep_their_codes(tmp_path, fitted, settings):
    bnn, x = fitted
    quantised = bl.quantise(bnn, strength=0.0, **settings)
    program = read_program(quantised.network.eval(), x)
    for is_sparse in (False, True):
        kernels = dict.fromkeys(range(len(program.steps)), is_sparse)
        plain = write_source(fuse(program), "net", kernels)
        coded = write_source(fuse(find_levels(program, quantised)), "net", kernels)
        written(coded, tmp_path)
        for answers in ask_a_program_under_sanitizers(tmp_path, x, (3,)):
            torch.testing.assert_close(answers, quantised.network(x), atol=1e-5, rtol=1e-5)
        assert "_code[" in coded.code
        assert coded.weight_bytes < (0.65 if is_sparse else 0.35) * plain.weight_bytes
    assert coded.weight_bytes < 4 * sum(p.numel() for p in quantised.network.parameters() if p.ndim > 1)


@needs_a_compiler
def test_a_quantised_network_is_exported(tmp_path, fitted):
    bnn, x = fitted
    quantised = bl.quantise(bnn, strength=0.0, bits=3)
    bl.export(quantised, tmp_path / "net.c", example=x)
    torch.testing.assert_close(bl.load_c(tmp_path / "net.c")(x), quantised.network(x), atol=1e-5, rtol=1e-5)


@needs_a_compiler
def test_few_zeros_are_dense_and_many_are_sparse_by_time(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(400, 300), nn.ReLU(), nn.Linear(300, 300))
    with torch.no_grad():
        net[0].weight.mul_(torch.rand(300, 400) < 0.9)
        net[2].weight.mul_(torch.rand(300, 300) < 0.01)
    exported = bl.export(net, tmp_path / "net.c", example=torch.randn(2, 400))
    assert exported.format == "c"
    assert exported.difference < 1e-5
    code = (tmp_path / "net.c").read_text()
    assert "net_0_value[" in code
    assert "net_0_tap[" not in code
    assert "net_1_tap[" in code


@pytest.fixture(scope="module")
def residual(tmp_path_factory):
    """A residual network, its inputs, its source and its library."""
    (net, x), folder = network("residual"), tmp_path_factory.mktemp("residual")
    source = write_source(fuse(read_program(net, x)), "net", {})
    return net, x, source, built(source, folder)


@needs_a_compiler
def test_nothing_is_allocated_and_no_state_is_kept(residual):
    _, x, source, compiled = residual
    code = source.code
    assert "malloc" not in code
    assert not [line for line in code.splitlines() if line.startswith("static") and "const" not in line.split("(")[0]
                and "(" not in line]  # fmt: skip
    inputs = [torch.randn(rows, *x.shape[1:]) for rows in (1, 40, 3, 64) * 8]
    expected = [compiled(one) for one in inputs]
    with ThreadPoolExecutor(8) as pool:
        assert all(torch.equal(a, b) for a, b in zip(pool.map(compiled, inputs), expected, strict=True))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class Floor(nn.Module):
    def forward(self, x):
        return torch.div(x, 0.3, rounding_mode="floor")


class Fixed(nn.Module):
    def forward(self, x):
        return x.view(4, 3)


class Cast(nn.Module):
    def forward(self, x):
        return x.double().float()


def empty() -> nn.Linear:
    layer = nn.Linear(4, 1, bias=False)
    layer.weight = nn.Parameter(torch.zeros(0, 4))
    return layer


@pytest.mark.parametrize(
    ("net", "x", "words"),
    [
        (nn.LSTM(4, 3, batch_first=True), torch.randn(2, 5, 4), "lstm"),
        (Attention(), torch.randn(2, 5, 8), "attention"),
        (nn.Sequential(nn.Conv3d(1, 2, 3)), torch.randn(2, 1, 5, 5, 5), "conv3d"),
        (nn.Sequential(nn.MaxPool2d(2, ceil_mode=True)), torch.randn(2, 1, 5, 5), '"0".*ceil_mode'),
        (nn.Sequential(nn.Embedding(5, 3)), torch.zeros(2, 4, dtype=torch.int64), "int64"),
        (nn.Linear(3, 2).double(), torch.randn(2, 3).double(), "float64"),
        (nn.Linear(3, 2), torch.randn(2, 5, 3), "features"),
        (nn.Sequential(nn.AdaptiveAvgPool2d(2)), torch.randn(2, 1, 5, 5), "equal windows"),
        (nn.LayerNorm(4), torch.randn(2, 4), "layer_norm"),
        (empty(), torch.randn(2, 4), '"weight" is empty'),
        (nn.Linear(4, 2), torch.randn(0, 4), r"Got torch.float32 \(0, 4\)"),
        (nn.Sequential(nn.Conv1d(1, 2, 3), nn.Softmax(2)), torch.randn(2, 1, 3), "a size of one"),
        (Floor(), torch.randn(2, 4), "it rounds"),
        (Fixed(), torch.randn(4, 3), "takes 4 at once"),
        (Cast(), torch.randn(2, 3), 'to" gives a torch.float64'),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, net, x, words):
    with pytest.raises((UnsupportedModel, ShapeMismatch), match=words):
        bl.export(net.eval(), tmp_path / "net.c", example=x)
    assert list(tmp_path.iterdir()) == []


def test_posteriors_are_refused(tmp_path, fitted):
    bnn, x = fitted
    with pytest.raises(ValueError, match="mean_network"):
        bl.export(bnn, tmp_path / "net.c", example=x, samples=3)


def test_without_a_compiler_the_file_is_written_and_a_warning_says_it_is_unchecked(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    net, x = network("mlp")
    with pytest.warns(BayeslimWarning, match="compiler"):
        exported = bl.export(net, tmp_path / "net.c", example=x)
    assert np.isnan(exported.difference)
    with pytest.raises(BayeslimError, match="gcc or clang"):
        bl.load_c(tmp_path / "net.c")


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_literals_are_read_back_to_the_bit(value):
    text = literal(value)
    assert text.endswith("f")
    assert ctypes.c_float(float(text[:-1])).value == value
    assert "." in text or "e" in text
