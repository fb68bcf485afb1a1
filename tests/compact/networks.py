"""Small networks of every kind that compaction has to get right, with an example input for each."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayeslim.compact import UnitGraph, units

Case = tuple[nn.Module, Any]
CASES: dict[str, Callable[[], Case]] = {}


def case(function: Callable[[], Case]) -> Callable[[], Case]:
    CASES[function.__name__] = function
    return function


def build(name: str) -> Case:
    """The network in double precision and eval mode, every norm with statistics of its own."""
    torch.manual_seed(sum(map(ord, name)))
    model, example = CASES[name]()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            for tensor, low, high in ((module.running_mean, -1, 1), (module.running_var, 0.5, 2)):
                if tensor is not None:
                    tensor.uniform_(low, high)
        for name_, parameter in module.named_parameters(recurse=False):
            if "bias" in name_ or "norm" in type(module).__name__.lower():
                nn.init.uniform_(parameter, 0.2, 1.0)
    example = tuple(_double(x) for x in example) if isinstance(example, tuple) else _double(example)
    return model.double().eval(), example


@functools.lru_cache
def prepared(name: str) -> tuple[Case, UnitGraph]:
    """A network and its units, found once for all tests."""
    model, example = build(name)
    return (model, example), units(model, example)


def outputs(result: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def conv_bn(i: int, o: int, k: int = 3, stride: int = 1, groups: int = 1, act: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(i, o, k, stride, k // 2, groups=groups, bias=False), nn.BatchNorm2d(o)]
    return nn.Sequential(*layers, *([nn.ReLU(inplace=True)] if act else []))


@case
def lenet_300_100() -> Case:
    layers = [nn.Flatten(), nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 10), nn.Tanh(), nn.Linear(10, 5)]
    return nn.Sequential(*layers), torch.randn(3, 1, 8, 8)


class LeNet5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 8, 3)
        self.fc1, self.fc2 = nn.Linear(32, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = F.max_pool2d(torch.relu(self.conv2(x)), 2)
        return self.fc2(torch.relu(self.fc1(x.view(-1, 32))))  # a hard-coded size


@case
def lenet_5() -> Case:
    return LeNet5(), torch.randn(3, 1, 14, 14)


@case
def vgg_bn() -> Case:
    pool = nn.MaxPool2d(2)
    features = [conv_bn(3, 8), conv_bn(8, 8), pool, conv_bn(8, 12), conv_bn(12, 12), pool]
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 4)]
    return nn.Sequential(*features, *head), torch.randn(2, 3, 8, 8)


class Residual(nn.Module):
    def __init__(self, i: int, o: int, stride: int, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.shortcut = nn.Identity() if i == o and stride == 1 else conv_bn(i, o, 1, stride, act=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def _resnet(blocks: list[nn.Module], width: int) -> nn.Sequential:
    return nn.Sequential(
        conv_bn(3, 8), nn.MaxPool2d(3, 2, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5)
    )


@case
def resnet_18() -> Case:
    def block(i: int, o: int, stride: int = 1) -> Residual:
        return Residual(i, o, stride, nn.Sequential(conv_bn(i, o, 3, stride), conv_bn(o, o, act=False)))

    return _resnet([block(8, 8), block(8, 12, 2)], 12), torch.randn(2, 3, 16, 16)


@case
def resnet_50() -> Case:
    def block(i: int, o: int, stride: int = 1) -> Residual:
        mid = o // 4
        return Residual(
            i, o, stride, nn.Sequential(conv_bn(i, mid, 1), conv_bn(mid, mid, 3, stride), conv_bn(mid, o, 1, act=False))
        )

    return _resnet([block(8, 16), block(16, 16), block(16, 24, 2)], 24), torch.randn(2, 3, 16, 16)


@case
def resnext() -> Case:
    body = nn.Sequential(conv_bn(8, 12, 1), conv_bn(12, 12, 3, groups=4), conv_bn(12, 8, 1, act=False))
    return _resnet([Residual(8, 8, 1, body)], 8), torch.randn(2, 3, 8, 8)


class SqueezeExcite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))))


@case
def mobilenet() -> Case:
    def inverted(i: int, mid: int, o: int) -> nn.Sequential:
        return nn.Sequential(
            conv_bn(i, mid, 1),
            conv_bn(mid, mid, groups=mid),
            SqueezeExcite(mid),
            nn.Hardswish(),
            conv_bn(mid, o, 1, act=False),
        )

    return _resnet([inverted(8, 16, 8), Residual(8, 8, 1, inverted(8, 12, 8))], 8), torch.randn(2, 3, 8, 8)


class DenseBlock(nn.Module):
    def __init__(self, width: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(width + n * growth), nn.ReLU(), nn.Conv2d(width + n * growth, growth, 3, padding=1)
            )
            for n in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


@case
def densenet() -> Case:
    transition = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.AvgPool2d(2))
    return _resnet([DenseBlock(8, 4, 2), transition, DenseBlock(8, 4, 1)], 12), torch.randn(2, 3, 8, 8)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = conv_bn(3, 6), conv_bn(6, 8), conv_bn(8, 10)
        self.up2, self.up1 = nn.ConvTranspose2d(10, 8, 2, 2), nn.ConvTranspose2d(8, 6, 4, 2, 1, groups=2)
        self.join2, self.join1, self.out = conv_bn(16, 8), conv_bn(12, 6), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        x = self.middle(F.max_pool2d(b, 2))
        x = self.join2(torch.cat([self.up2(x), b], 1))
        x = self.join1(torch.cat([F.interpolate(self.up1(x), scale_factor=1.0, mode="bilinear"), a], 1))
        return self.out(x)


@case
def unet() -> Case:
    return UNet(), torch.randn(2, 3, 8, 8)


class Shuffle(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        return x.view(b, 4, c // 4, h, w).transpose(1, 2).reshape(b, c, h, w)


@case
def channel_shuffle() -> Case:
    body = nn.Sequential(
        conv_bn(8, 16, 1, groups=4),
        Shuffle(),
        conv_bn(16, 16, groups=16, act=False),
        nn.Conv2d(16, 8, 1, groups=2),
        nn.ChannelShuffle(2),
    )
    return _resnet([body, conv_bn(8, 8)], 8), torch.randn(2, 3, 8, 8)


@case
def super_resolution() -> Case:
    layers = [
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"),
        nn.PReLU(8),
        nn.Conv2d(8, 24, 3),
        nn.PixelShuffle(2),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, nn.InstanceNorm2d(6, affine=True), nn.Conv2d(6, 3, 3)), torch.randn(2, 3, 8, 8)


class Recurrent(nn.Module):
    def __init__(self, rnn: nn.RNNBase, width: int) -> None:
        super().__init__()
        self.embed, self.rnn, self.out = nn.Linear(5, rnn.input_size), rnn, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(F.gelu(self.embed(x)))[0][:, -1])


@case
def lstm_stacked() -> Case:
    return Recurrent(nn.LSTM(6, 8, 2, batch_first=True, dropout=0.1), 8), torch.randn(2, 4, 5)


@case
def lstm_bidirectional() -> Case:
    return Recurrent(nn.LSTM(6, 8, 2, batch_first=True, bidirectional=True), 16), torch.randn(2, 4, 5)


@case
def gru() -> Case:
    return Recurrent(nn.GRU(6, 8, batch_first=True, bias=False), 8), torch.randn(2, 4, 5)


@case
def transformer_encoder() -> Case:
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.Linear(5, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 3)
    ), torch.randn(2, 6, 5)


class FusedAttention(nn.Module):
    """q, k and v from one layer, the size of a head read off the tensor."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, t, -1))


class GroupedAttention(nn.Module):
    """Separate q, k and v; several query heads to a key head; rotary positions; an output size taken from the layer."""

    def __init__(self, width: int, heads: int, shared: int = 1, rotary: bool = False) -> None:
        super().__init__()
        self.heads, self.size, self.shared, self.rotary = heads, width // heads, shared, rotary
        self.q, self.k, self.v = (
            nn.Linear(width, width),
            nn.Linear(width, width // shared),
            nn.Linear(width, width // shared),
        )
        self.proj = nn.Linear(width, width)
        self.register_buffer("angles", torch.arange(8.0)[:, None] / 10 ** torch.arange(self.size // 2))

    def _rotate(self, x: Tensor) -> Tensor:
        angles = self.angles[: x.shape[-2]]
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, self.heads, self.size).transpose(1, 2)
        k = self.k(x).view(b, t, self.heads // self.shared, self.size).transpose(1, 2)
        v = self.v(x).view(b, t, self.heads // self.shared, self.size).transpose(1, 2)
        if self.rotary:
            q, k = self._rotate(q), self._rotate(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.shared > 1)
        return self.proj(y.transpose(1, 2).reshape(b, t, self.heads * self.size))


class GatedMLP(nn.Module):
    def __init__(self, width: int, hidden: int, fused: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return self.down(F.glu(self.up(x)))
        a, b = self.up(x).chunk(2, -1)
        return self.down(F.silu(a) * b)


class Block(nn.Module):
    def __init__(self, width: int, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.LayerNorm(width), attention, nn.LayerNorm(width), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.cls, self.pos = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 5, 16))
        self.blocks, self.norm, self.head = nn.Sequential(*blocks), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos
        return self.head(self.norm(self.blocks(x))[:, 0])


def mlp(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


@case
def vit_fused() -> Case:
    return ViT(Block(16, FusedAttention(16, 4), mlp(16, 20))), torch.randn(2, 3, 8, 8)


@case
def vit_separate() -> Case:
    return ViT(Block(16, GroupedAttention(16, 4), mlp(16, 20))), torch.randn(2, 3, 8, 8)


class Language(nn.Module):
    """An embedding tied to the output layer, without norms on the way, so that its width can shrink too."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(11, 16), nn.Sequential(*blocks)
        self.pos, self.out = nn.Embedding(7, 16), nn.Linear(16, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        return self.out(self.blocks(x))


@case
def tied_embeddings() -> Case:
    return Language(mlp(16, 20), mlp(16, 20)), torch.randint(11, (3, 6))


@case
def language_gqa_glu() -> Case:
    attention = GroupedAttention(16, 4, shared=2, rotary=True)
    return Language(Block(16, attention, GatedMLP(16, 12, fused=False))), torch.randint(11, (3, 6))


@case
def glu() -> Case:
    return nn.Sequential(nn.Linear(5, 12), nn.GELU(), GatedMLP(12, 8, fused=True), nn.Linear(12, 3)), torch.randn(3, 5)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.layer, self.out = nn.Linear(5, 12), nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = torch.tanh(self.inp(x)), torch.relu(self.inp(y))
        for _ in range(2):
            x, y = torch.relu(self.layer(x)), torch.tanh(self.layer(y))
        return self.out(x * y)


@case
def shared_module() -> Case:
    return Shared(), (torch.randn(3, 5), torch.randn(3, 5))


class Custom(nn.Module):
    """Plain parameters, einsum, a single attention head, a scale for each channel, several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.scale = (
            nn.Parameter(torch.randn(5, 12)),
            nn.Parameter(torch.randn(8, 12)),
            nn.Parameter(torch.rand(12)),
        )
        self.q, self.k, self.v, self.out = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.relu(x @ self.w1) * self.scale
        h = torch.einsum("btd,od->bto", h, self.w2)
        y = F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h))
        return {"last": self.out(y), "norm": y.norm(dim=-1)}


@case
def custom_layers() -> Case:
    return Custom(), torch.randn(2, 4, 5)


class MixerBlock(nn.Module):
    """One layer along the tokens, shared by all channels, and one along the channels, shared by all tokens."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.across, self.within = mlp(tokens, 12), mlp(width, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(x.transpose(1, 2)).transpose(1, 2)
        return x + self.within(x)


@case
def mixer() -> Case:
    patches = nn.Sequential(nn.Conv2d(3, 8, 2, 2), nn.Flatten(2))
    return nn.Sequential(patches, MixerBlock(8, 16), nn.Flatten(), nn.Linear(128, 3)), torch.randn(2, 3, 8, 8)


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 8)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.out(state)


@case
def gru_cell() -> Case:
    return Cells(), torch.randn(2, 3, 5)


class Inception(nn.Module):
    """Branches of different kinds, joined, split at another place and joined the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.three, self.pool = (
            conv_bn(3, 4, 1),
            nn.Sequential(conv_bn(3, 4, 1), conv_bn(4, 6)),
            nn.Conv2d(3, 2, 1),
        )
        self.join, self.out = nn.Conv2d(12, 4, 1), nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.one(x), self.three(x), F.avg_pool2d(self.pool(x), 3, 1, 1)], 1)
        a, b = torch.split(y, [5, 7], 1)
        return self.out(F.max_pool2d(self.join(torch.cat([b.sigmoid(), a], 1)), 2).reshape(x.shape[0], -1))


@case
def inception() -> Case:
    return Inception(), torch.randn(2, 3, 8, 8)
