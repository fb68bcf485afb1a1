from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bayeslim.compact.sparse import pack, stored_bytes, unpack
from bayeslim.errors import CorruptFile

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 40), max_size=3),
    dtype=st.sampled_from(DTYPES),
    density=st.floats(0, 1),
    seed=st.integers(0, 10_000),
    odd=st.booleans(),
)
def test_every_bit_comes_back(shape, dtype, density, seed, odd):
    generator = torch.Generator().manual_seed(seed)
    tensor = (100 * torch.randn(shape, generator=generator)).to(dtype)
    tensor = torch.where(torch.rand(shape, generator=generator) < density, tensor, torch.zeros((), dtype=dtype))
    if odd and dtype.is_floating_point and tensor.numel() > 3:
        tensor.view(-1)[:3] = torch.tensor([float("nan"), float("inf"), -float("inf")]).to(dtype)
    packed = pack({"w": tensor, "other": torch.ones(2)})
    back = unpack(packed)
    assert list(back) == ["w", "other"]
    assert back["w"].dtype == dtype
    assert back["w"].shape == tensor.shape
    assert bits(back["w"]) == bits(tensor)
    assert stored_bytes({"w": tensor}) <= tensor.numel() * tensor.element_size()


@pytest.mark.parametrize(
    ("density", "form", "size"), [(0.99, "w", 40_000), (0.5, "w::bitmap", 22_000), (0.02, "w::gaps", 1_100)]
)
def test_the_smallest_form_is_taken(density, form, size):
    torch.manual_seed(0)
    tensor = torch.randn(100, 100) * (torch.rand(100, 100) < density)
    packed = pack({"w": tensor})
    assert form in packed
    assert stored_bytes({"w": tensor}) <= size


def test_a_masked_tensor_with_negative_zeros_is_as_small():
    mask = torch.rand(100, 100) < 0.02
    tensor = -torch.rand(100, 100) * mask
    assert torch.equal(unpack(pack({"w": tensor}))["w"], tensor)
    assert stored_bytes({"w": tensor}) < 5.1 * int(mask.sum()) + 16


def test_gaps_wider_than_a_byte():
    tensor = torch.zeros(200_000)
    for place in (0, 255, 256, 257 + 254, 257 + 254 + 256, 70_000, 199_999):
        tensor[place] = place + 1.0
    packed = pack({"w": tensor})
    assert packed["w::gaps"].dtype == torch.uint8
    assert torch.equal(unpack(packed)["w"], tensor)


def test_it_goes_through_a_file(tmp_path):
    tensors = {"a.weight": torch.eye(64), "a.bias": torch.arange(3.0)}
    save_file(pack(tensors), tmp_path / "w.safetensors")
    back = unpack(load_file(tmp_path / "w.safetensors"))
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_damage_is_noticed():
    packed = pack({"w": torch.eye(64)})
    for change in ("drop", "short"):
        broken = dict(packed)
        if change == "drop":
            del broken["w::gaps"]
        else:
            broken["w::values"] = broken["w::values"][:-1]
        with pytest.raises(CorruptFile, match='"w" is damaged'):
            unpack(broken)


def test_a_name_that_would_be_ambiguous():
    with pytest.raises(ValueError, match="must not contain"):
        pack({"a::b": torch.ones(2)})
