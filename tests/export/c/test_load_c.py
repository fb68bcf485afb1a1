"""Libraries of networks in C, as functions of tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.errors import CorruptFile, ShapeMismatch
from bayeslim.export.c.library import compile_c, find_compiler
from bayeslim.export.c.weights import LANES

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C compiler")


@pytest.fixture(scope="module")
def mlp(tmp_path_factory):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 40), nn.ReLU(), nn.Linear(40, 5)).eval()
    source = tmp_path_factory.mktemp("c") / "my-net 2.c"
    bl.export(net, source, example=torch.randn(2, 7))
    return net, source, bl.load_c(source)


@pytest.mark.parametrize("rows", [1, LANES + 1])
def test_bound_inputs_are_read_at_every_call(mlp, rows):
    net, _, compiled = mlp
    x = torch.randn(rows, 7)
    run = compiled.bind(x)
    torch.testing.assert_close(run(), net(x), atol=2e-6, rtol=1e-5)
    x.mul_(2)
    torch.testing.assert_close(run(), net(x), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "unsuitable", [lambda x: x.double(), lambda x: x.t().contiguous().t(), lambda x: x[:1].expand(3, -1)]
)
def test_bind_refuses_memory_that_it_would_misread(mlp, unsuitable):
    compiled, x = mlp[-1], torch.randn(2, 7)
    with pytest.raises(ValueError, match="contiguous float32"):
        compiled.bind(unsuitable(x))
    with pytest.raises(TypeError, match="takes a tensor"):
        compiled(x.numpy())


def test_a_library_that_was_built_again_is_loaded_anew(tmp_path):
    net, x = nn.Linear(3, 2), torch.zeros(1, 3)
    for _ in range(2):
        nn.init.normal_(net.bias)
        bl.export(net, tmp_path / "net.c", example=torch.randn(2, 3))
        compile_c(tmp_path / "net.c", tmp_path / "net.so")
        torch.testing.assert_close(bl.load_c(tmp_path / "net.so")(x), net(x))
    (tmp_path / "text.so").write_text("text")
    with pytest.raises(CorruptFile, match="cannot be loaded"):
        bl.load_c(tmp_path / "text.so")
    with pytest.raises(FileNotFoundError):
        bl.load_c(tmp_path)


def test_names_of_files_become_names_in_c(mlp, tmp_path):
    net, source, compiled = mlp
    x = torch.randn(2, 7)
    assert "void my_net_2_run(" in source.with_suffix(".h").read_text()
    assert str(source) in repr(compiled)
    torch.testing.assert_close(compiled(x), net(x), atol=2e-6, rtol=1e-5)
    compile_c(source, tmp_path / "libother.so")
    assert bl.load_c(tmp_path / "libother.so", name="my_net_2")(x).shape == (2, 5)
    with pytest.raises(CorruptFile, match="no network called other"):
        bl.load_c(tmp_path / "libother.so")
    with pytest.raises(FileNotFoundError):
        bl.load_c(tmp_path / "nowhere.so")
    with pytest.raises(ShapeMismatch, match="batch, 7"):
        compiled(torch.randn(2, 8))
