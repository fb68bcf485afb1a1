"""Small networks made of blocks, as large decoders are."""

import torch
import torch.nn.functional as F
from torch import nn

from bayeslim.types import split_batch


class Block(nn.Module):
    """Attention and an MLP; takes keyword arguments, and returns a tuple on demand."""

    def __init__(self, width, heads=2, bias=True, as_tuple=False):
        super().__init__()
        self.heads, self.as_tuple = heads, as_tuple
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=bias) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width, bias=bias), nn.Linear(2 * width, width, bias=bias)

    def forward(self, x, *, scale=None, past_key_values=None):
        if past_key_values is not None:
            past_key_values.append(x)
        normed = self.norm1(x)
        q, k, v = (p(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q = q if scale is None else q * scale[None, None, :, None]
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return (x, None) if self.as_tuple else x


class Decoder(nn.Module):
    """An embedding, blocks and a head; keyword arguments are made in its forward."""

    def __init__(self, width=8, blocks=2, words=11, bias=True, as_tuple=False, cached=False):
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.layers = nn.ModuleList([Block(width, bias=bias, as_tuple=as_tuple) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)
        self.cached = cached

    def forward(self, tokens):
        x = self.table(tokens)
        scale = torch.linspace(0.5, 1.5, tokens.shape[1], dtype=x.dtype)
        cache = [] if self.cached else None
        for layer in self.layers:
            out = layer(x, scale=scale, past_key_values=cache)
            x = out[0] if isinstance(out, tuple) else out
        assert cache is None or len(cache) <= len(self.layers)
        return self.head(self.norm(x))


class Skipping(nn.Module):
    """Blocks whose outputs are read by the last part too."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x):
        seen = [x]
        for layer in self.layers:
            seen.append(layer(seen[-1]).tanh())
        return sum(seen)


def decoder(seed=0, **options):
    torch.manual_seed(seed)
    return Decoder(**options)


def tokens(batches=3, examples=4, length=6, words=11, seed=1):
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randint(0, words, (examples, length + 1), generator=generator) for _ in range(batches)]
    return [(x[:, :-1], x[:, 1:]) for x in draw]


def inputs_of_layers(model, block, batches):
    """Record the inputs of every linear layer of a block, as rows with a constant 1."""
    seen = {}
    hooks = [
        module.register_forward_hook(lambda _m, args, _o, name=name: seen.setdefault(name, []).append(args[0]))
        for name, module in model.get_submodule(block).named_modules()
        if isinstance(module, nn.Linear)
    ]
    with torch.no_grad():
        for batch in batches:
            model(split_batch(batch)[0])
    for hook in hooks:
        hook.remove()
    rows = {name: torch.cat([x.flatten(0, -2) for x in found]).double() for name, found in seen.items()}
    return {name: torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1) for name, x in rows.items()}
