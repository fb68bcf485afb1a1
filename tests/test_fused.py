"""Layers called as one say what they say one after the other, and are left as they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bayeslim import fused as module
from bayeslim.fused import fused, steps_of
from bayeslim.stochastic import evaluating

IMAGES, ROWS = (3, 4, 9, 10), (6, 4)


def measured(layer):
    """A batch norm whose statistics and scales are not those of a new one."""
    for tensor in (*layer.parameters(), *layer.buffers()):
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5, 2.0)
    return layer


RELU, POOL, SQUARE = nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1)
NETWORKS = [
    ((SQUARE, RELU, SQUARE, RELU, POOL, RELU, SQUARE, POOL), IMAGES),  # layers that stand there several times
    ((nn.Sequential(SQUARE, RELU), nn.Sequential(SQUARE, RELU, POOL), RELU), IMAGES),
    ((nn.Conv2d(4, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 3 * 4, 3)), IMAGES),
    ((nn.Conv2d(4, 8, 3, 2, 1, bias=False), measured(nn.BatchNorm2d(8)), nn.ReLU(), nn.Conv2d(8, 2, 1)), IMAGES),
    ((nn.Conv2d(4, 8, 3, groups=2, dilation=2), measured(nn.BatchNorm2d(8)), nn.MaxPool2d(3, 2)), IMAGES),
    ((nn.Conv2d(4, 6, 3, padding="same"), nn.BatchNorm2d(6, affine=False), nn.ReLU(), nn.ReLU()), IMAGES),
    ((nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), measured(nn.BatchNorm2d(6)), nn.Tanh()), IMAGES),
    ((nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, track_running_stats=False), nn.ReLU()), IMAGES),
    ((nn.ReLU(), nn.MaxPool2d((1, 2)), nn.ReLU(), nn.MaxPool2d((2, 1), (1, 2)), nn.Identity()), IMAGES),
    ((nn.MaxPool2d(3, 2, padding=1), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True), nn.ReLU()), IMAGES),
    ((nn.ReLU(), nn.MaxPool2d(1), nn.ReLU(), nn.MaxPool2d(2, dilation=2), nn.ReLU()), IMAGES),
    ((nn.Identity(), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.Identity(), nn.ReLU(), nn.Dropout(), nn.Sigmoid()), IMAGES),
    ((nn.Sequential(nn.Conv2d(4, 6, 3), nn.Sequential(nn.ReLU())), nn.MaxPool2d(2), nn.ReLU(inplace=True)), IMAGES),
    ((nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5, bias=False), nn.ReLU(), nn.Linear(5, 2)), ROWS),
    ((nn.Linear(4, 70, bias=False), measured(nn.BatchNorm1d(70)), nn.ReLU(), nn.Linear(70, 2)), ROWS),
    ((nn.Linear(4, 8), measured(nn.BatchNorm1d(6)), nn.ReLU()), (3, 6, 4)),  # whose channels are not the features
    ((nn.Flatten(), nn.ReLU(), nn.Linear(8, 3)), (5, 2, 4)),
    ((measured(nn.LayerNorm(4)), nn.GELU(), nn.ReLU(), nn.LayerNorm(4, elementwise_affine=False), nn.Tanh()), ROWS),
    ((nn.LayerNorm((2, 4), bias=False), nn.GELU(approximate="tanh"), nn.Sigmoid(), nn.ReLU()), (5, 2, 4)),
    ((nn.Conv2d(4, 6, 3), nn.ReLU(), nn.MaxPool2d(2)), IMAGES[1:]),  # one image, no batch
    ((nn.Conv1d(4, 6, 3, 2, 1, dilation=2), nn.ReLU(), nn.Conv1d(6, 2, 3, groups=2), nn.SiLU()), (3, 4, 15)),
    ((nn.Conv1d(4, 6, 3, padding="same"), nn.SiLU(inplace=True), nn.Conv1d(6, 2, 1, bias=False), nn.ReLU()), (4, 15)),
]


@pytest.mark.parametrize(("layers", "shape"), NETWORKS)
@pytest.mark.parametrize("many", [0, 2**30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layers_as_one_say_what_they_say_one_after_the_other(layers, shape, many, dtype, monkeypatch):
    monkeypatch.setattr(module, "MANY", {"cpu": many, "cuda": many})
    monkeypatch.setattr(module, "POOLED", many)
    monkeypatch.setattr(module, "SOME", {"cpu": 0, "cuda": 0})
    model, x = nn.Sequential(*layers).to(dtype).eval(), torch.randn(shape, dtype=dtype)
    before = x.clone()
    with torch.no_grad():
        expected = model(x)
        x.copy_(before)  # a rectifier of the network itself may have written over it
        with fused(model):
            assert ("forward" in vars(model)) == any(isinstance(m, (nn.ReLU, nn.BatchNorm2d)) for m in model.modules())
            torch.testing.assert_close(model(x), expected)
        for device in ("cpu", "cuda"):  # the plan for a GPU says the same here
            y = x
            for step in steps_of(list(module._layers(model, set())), device):
                y = step(y)
            torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x, before, rtol=0, atol=0)
    assert not any("forward" in vars(m) for m in model.modules())


def test_a_batch_norm_of_many_values_is_part_of_the_convolution(monkeypatch):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), measured(nn.BatchNorm2d(2)), nn.ReLU()).eval()
    x = torch.randn(4, 1, 200, 200)
    expected = model(x)
    monkeypatch.setattr(module, "_normed", lambda *_: pytest.fail("the norm was called"))
    with torch.no_grad(), fused(model):
        torch.testing.assert_close(model(x), expected)


def test_a_rectifier_that_writes_over_what_others_read_still_does():
    """Such as the first one of a residual block, x + row(x): the sum is that of relu(x)."""
    row = nn.Sequential(nn.Dropout(), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.ReLU(inplace=True)).eval()
    x = torch.randn(40, 1, 20, 20)
    same = x.clone()
    with torch.no_grad(), fused(row):
        torch.testing.assert_close(row(x), nn.functional.max_pool2d(same.relu(), 2))
    torch.testing.assert_close(x, same.relu())


class Custom(nn.Module):
    """A network of one's own, with rows and pools in it."""

    def __init__(self):
        super().__init__()
        self.row = nn.Sequential(nn.Conv2d(1, 4, 3), measured(nn.BatchNorm2d(4)), nn.ReLU())
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.pool(self.row(x)).mean((2, 3)))


def test_rows_and_pools_within_a_network_of_another_kind():
    model, x = Custom().eval(), torch.randn(40, 1, 28, 28)
    with torch.no_grad():
        expected = model(x)
        with fused(model):
            assert "forward" in vars(model.row)
            assert "forward" in vars(model.pool)
            torch.testing.assert_close(model(x), expected)
    assert not any("forward" in vars(m) for m in model.modules())


def test_pooling_of_many_values_is_the_same_to_the_bit():
    x = torch.randn(30, 4, 29, 31)
    x[0, 0, 0, 0], x[1, 0, 5, 5], x[2, 1, 3, 3] = torch.nan, torch.inf, -torch.inf
    for pool in (nn.MaxPool2d(2), nn.MaxPool2d(3, 2), nn.MaxPool2d((3, 2), (1, 4)), nn.MaxPool2d(5, 1)):
        model = nn.Sequential(pool, nn.ReLU())
        expected = model(x)
        with torch.no_grad(), fused(model):
            torch.testing.assert_close(model(x), expected, rtol=0, atol=0, equal_nan=True)
    channels_last = x.to(memory_format=torch.channels_last)
    with torch.no_grad(), fused(model):
        torch.testing.assert_close(model(channels_last), expected, rtol=0, atol=0, equal_nan=True)


def test_images_smaller_than_a_window_get_the_error_of_torch():
    model = nn.Sequential(nn.MaxPool2d(5), nn.ReLU())
    with fused(model), pytest.raises(RuntimeError, match=r"[Oo]utput size is too small"):
        model(torch.randn(1, 1, 3, 3))
    assert "forward" not in vars(model)


def test_hooks_see_what_they_saw_before():
    model, x = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2)).eval(), torch.randn(2, 1, 80, 80)
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        expected = model(x)
        with fused(model):
            torch.testing.assert_close(model(x), expected)
    assert len(seen) == 2
    torch.testing.assert_close(seen[1], seen[0])  # not rectified in place
    assert seen[1].min() < 0


def test_layers_are_called_as_they_are_where_others_have_a_say():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.randn(2, 3)
    with torch.autocast("cpu", torch.bfloat16), fused(model):
        assert "forward" not in vars(model)
        assert model(x).dtype == torch.bfloat16
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with fused(model):
            assert "forward" not in vars(model)
    finally:
        handle.remove()
    compiled = torch.compile(model, backend="eager")
    with fused(compiled):
        assert "forward" not in vars(model)
    model.compile(backend="eager")
    with fused(model):
        assert "forward" not in vars(model)


def test_norms_in_training_are_called_as_they_are():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU()), torch.randn(5, 3)
    with torch.no_grad(), evaluating(model):
        model[1].training = True
        before = model[1].running_mean.clone()
        with fused(model):
            model(x)
    assert not torch.equal(model[1].running_mean, before)
