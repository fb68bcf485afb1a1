"""The reference networks: sizes as published, inputs as documented, and a memory of how they were built."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

from bayeslim.app import zoo
from bayeslim.errors import ShapeMismatch
from bayeslim.io.registry import unregister


def weights(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.ndim > 1)


SMALL = {
    "lenet5": ({}, (2, 1, 28, 28)),
    "lenet_300_100": ({}, (2, 1, 28, 28)),
    "lstm": ({"layers": 2, "hidden": 16}, (2, 1, 28, 28)),
    "mlp": ({"hidden": 20, "inputs": 64, "depth": 3, "dropout": 0.5}, (2, 1, 8, 8)),
    "resnet18": ({"width": 4}, (2, 3, 32, 32)),
    "transformer": ({"width": 16, "depth": 1}, (2, 1, 28, 28)),
    "vgg": ({"width": 0.05}, (2, 3, 32, 32)),
}


def test_every_network_is_in_the_table_of_this_test():
    assert zoo.names() == sorted(SMALL)


def test_published_weight_counts():
    assert weights(zoo.lenet_300_100()) == 266_200
    assert weights(zoo.lenet5()) == 430_500
    assert weights(zoo.mlp(1200)) == 784 * 1200 + 1200 * 1200 + 1200 * 10
    assert sum(p.numel() for p in zoo.resnet18().parameters()) == 11_173_962
    convolutions = [m for m in zoo.vgg().modules() if isinstance(m, nn.Conv2d)]
    assert [c.out_channels for c in convolutions] == [64] * 2 + [128] * 2 + [256] * 3 + [512] * 6
    assert sum(c.weight.numel() for c in convolutions) == 14_710_464


@pytest.mark.parametrize("name", sorted(SMALL))
def test_rebuilt_from_its_config_it_is_the_same_network(name):
    arguments, shape = SMALL[name]
    model = zoo.create(name, classes=5, **arguments).eval()
    x = torch.rand(shape)
    assert model(x).shape == (2, 5)

    config = json.loads(json.dumps(copy.deepcopy(model).zoo_config))
    assert config == model.zoo_config
    rebuilt = zoo.create(**config).eval()
    rebuilt.load_state_dict(model.state_dict())
    torch.testing.assert_close(rebuilt(x), model(x))


def test_positional_arguments_are_remembered_by_name_with_the_defaults():
    assert zoo.mlp(50, 13).zoo_config == {
        "name": "mlp", "hidden": 50, "inputs": 13, "classes": 10, "depth": 2, "dropout": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_tokens_and_sequences(name):
    assert zoo.create(name, vocabulary=7, classes=2)(torch.randint(0, 7, (3, 6))).shape == (3, 2)
    rows = torch.rand(3, 1, 8, 8)
    model = zoo.create(name, features=8)
    torch.testing.assert_close(model(rows), model(rows.squeeze(1)))


def test_the_lstm_depends_on_the_order_and_the_last_position():
    model = zoo.lstm(features=4, hidden=8)
    x = torch.rand(1, 5, 4)
    assert not torch.allclose(model(x), model(x.flip(1)))


def test_the_transformer_attends_as_torch_does():
    model = zoo.transformer(width=16, heads=4).blocks[0].attention
    reference = nn.MultiheadAttention(16, 4, batch_first=True)
    parts = (model.query, model.key, model.value)
    with torch.no_grad():
        reference.in_proj_weight.copy_(torch.cat([layer.weight for layer in parts]))
        reference.in_proj_bias.copy_(torch.cat([layer.bias for layer in parts]))
        reference.out_proj.weight.copy_(model.out.weight)
        reference.out_proj.bias.copy_(model.out.bias)
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(model(x), reference(x, x, x)[0])


def test_the_transformer_knows_positions_and_refuses_longer_sequences():
    model = zoo.transformer(features=4, length=5)
    x = torch.rand(1, 5, 4)
    assert not torch.allclose(model(x), model(x.flip(1)))
    with pytest.raises(ShapeMismatch, match=r"5 positions. Got a sequence of 6"):
        model(torch.rand(1, 6, 4))


def test_odd_image_sizes_fit():
    assert zoo.lenet5(3, 4, 32)(torch.rand(2, 3, 32, 32)).shape == (2, 4)
    assert zoo.lenet5(image_size=17)(torch.rand(2, 1, 17, 17)).shape == (2, 10)
    assert zoo.vgg(width=0.02, image_size=70)(torch.rand(2, 3, 70, 70)).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("lenet5", {"image_size": 15}, "at least 16x16. Got image_size=15"),
        ("vgg", {"image_size": 28}, "at least 32x32"),
        ("vgg", {"width": 0}, "positive width"),
        ("mlp", {"depth": -1}, "depth of 0 or more"),
        ("transformer", {"width": 10, "heads": 4}, "multiple of heads"),
        ("lenet-5", {}, 'no network called "lenet-5". The closest names are "lenet5"'),
    ],
)
def test_impossible_requests_say_what_was_needed(name, arguments, words):
    with pytest.raises(ValueError, match=words):
        zoo.create(name, **arguments)


def test_unknown_arguments_are_named():
    with pytest.raises(TypeError, match=r"lenet5 does not take width. It takes: in_channels, classes, image_size"):
        zoo.create("lenet5", width=2)


def test_a_network_of_the_users_own_can_join():
    try:

        @zoo.register
        def tiny(inputs: int = 3) -> nn.Linear:
            """One layer."""
            return nn.Linear(inputs, 2)

        assert zoo.create("tiny", inputs=4).zoo_config == {"name": "tiny", "inputs": 4}
        tiny.__wrapped__.__qualname__ = "another.tiny"
        with pytest.raises(ValueError, match="already"):
            zoo.register(tiny.__wrapped__)
    finally:
        unregister("network", "tiny")
