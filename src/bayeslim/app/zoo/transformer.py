"""A small transformer encoder that classifies a sequence.

A. Vaswani et al., "Attention is all you need", 2017, with the normalisation before each sub-layer and learned
positions. Queries, keys and values are separate linear layers that are really called, so that every weight can be
random or pruned.
"""

from __future__ import annotations

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from bayeslim.errors import ShapeMismatch
from bayeslim.io.networks import register_network


class SelfAttention(nn.Module):
    """softmax(Q Kᵀ / √d) V in several heads."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform sequences of shape (B, T, width) to the same shape."""
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class EncoderBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform sequences of shape (B, T, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return out


@torch.fx.wrap
def check_length(x: Tensor, positions: int) -> None:
    """Raise if a sequence is too long.

    It is a function of its own, because `torch.fx` can trace a call, but not a condition.
    """
    if x.shape[1] > positions:
        raise ShapeMismatch(f"This transformer has {positions} positions. Got a sequence of {x.shape[1]}.")


class Transformer(nn.Module):
    """Embedding with positions, encoder blocks, the mean over the sequence, and a linear head."""

    def __init__(
        self,
        classes: int,
        features: int,
        length: int,
        width: int,
        heads: int,
        depth: int,
        hidden: int,
        vocabulary: int | None,
    ):
        super().__init__()
        self.features, self.length, self.tokens = features, length, vocabulary is not None
        self.embed = nn.Linear(features, width) if vocabulary is None else nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(EncoderBlock(width, heads, hidden) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits (B, classes) of a batch of sequences.

        Inputs are tokens (B, T), features (B, T, features), or images (B, C, H, W), which are read row by row.
        """
        if not self.tokens:
            x = x.flatten(1).unflatten(1, (-1, self.features))
        check_length(x, self.length)
        h = self.blocks(self.embed(x) + self.positions[: x.shape[1]])
        logits: Tensor = self.fc(self.norm(h).mean(1))
        return logits


@register_network
def transformer(
    classes: int = 10,
    features: int = 28,
    length: int = 28,
    width: int = 64,
    heads: int = 4,
    depth: int = 2,
    hidden: int = 128,
    vocabulary: int | None = None,
) -> Transformer:
    """Build an encoder for short sequences; the defaults read MNIST row by row.

    Args:
        classes: the number of outputs.
        features: numbers at each position; unused with a vocabulary.
        length: the longest sequence.
        width: the model's width, a multiple of `heads`.
        heads: attention heads.
        depth: encoder blocks.
        hidden: hidden units of each block.
        vocabulary: the number of tokens, where the inputs are token indices; None for numbers.
    """
    if width % heads:
        raise ValueError(f"transformer needs a width that is a multiple of heads. Got width={width}, heads={heads}.")
    return Transformer(classes, features, length, width, heads, depth, hidden, vocabulary)
