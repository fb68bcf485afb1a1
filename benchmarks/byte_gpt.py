"""A byte-level GPT, and Python source to train it on.

The text is the Python source installed with the interpreter and with torch. A hash of its path puts a file into one of
two parts: nine in ten files train the network and calibrate the cuts, the others test it.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
MAX_BYTES = 60_000_000


@dataclass(frozen=True)
class Shape:
    """The size of a network: blocks, width, heads, and the longest sequence."""

    blocks: int = 6
    width: int = 384
    heads: int = 6
    context: int = 256


class Attention(nn.Module):
    """Causal self-attention with separate linear layers for Q, K, V and output."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Attend over (B, T, width)."""
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and an MLP, each behind a layer norm and added to its input."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform (B, T, width)."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ByteGPT(nn.Module):
    """Logits of the next byte at every position, (B, T) to (B, T, 256)."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        for name, p in self.named_parameters():
            if p.ndim > 1:
                residual = name.endswith(("o.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (math.sqrt(2 * shape.blocks) if residual else 1.0))

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens and positions, (B, T, width)."""
        return self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def matrices(self) -> dict[str, nn.Linear]:
        """List the linear layers of the blocks, which are cut, by name."""
        return {name: m for name, m in self.named_modules() if isinstance(m, nn.Linear) and name.startswith("blocks.")}


def python_source(max_bytes: int) -> tuple[Tensor, Tensor]:
    """Read installed Python source as bytes: the training part and the test part."""
    folders = [Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent]
    files: dict[str, Path] = {}
    for folder in folders:
        for path in folder.rglob("*.py"):
            relative = path.relative_to(folder)
            if folder is not folders[0] or "site-packages" not in relative.parts:
                files[f"{folder.name}/{relative}"] = path
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    # in the order of their hashes, so that the first files are a random sample of all
    for digest, name in sorted((hashlib.sha256(name.encode()).hexdigest(), name) for name in files):
        text = files[name].read_bytes()
        parts[int(digest[-1], 16) % 10 == 9].append(text + b"\0")
        total += len(text)
        if total >= max_bytes:
            break
    train, test = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return train, test


def sequences(text: Tensor, count: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw `count` sequences of a text and their next bytes, (count, length)."""
    starts = torch.randint(len(text) - length - 1, (count, 1), generator=torch.Generator().manual_seed(seed))
    drawn = text[starts + torch.arange(length + 1)].long()
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def train(network: ByteGPT, text: Tensor, steps: int, batch: int, lr: float, seed: int = 0) -> float:
    """Train in place with AdamW, warm-up and a cosine; return the seconds it took."""
    device = next(network.parameters()).device
    started = time.perf_counter()
    text = text.to(device)
    decayed = [p for p in network.parameters() if p.ndim > 1]
    plain = [p for p in network.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    warm_up = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm_up, 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2),
    )
    generator = torch.Generator(device).manual_seed(seed)
    offsets = torch.arange(network.shape.context + 1, device=device)
    network.train()
    for _ in range(steps):
        starts = torch.randint(len(text) - len(offsets), (batch, 1), generator=generator, device=device)
        drawn = text[starts + offsets].long()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits = network(drawn[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), drawn[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    network.eval()
    return time.perf_counter() - started


@torch.no_grad()
def log_perplexity(network: nn.Module, tokens: Tensor, targets: Tensor, batch: int = 32) -> float:
    """Compute the mean of −log p(next byte) over sequences, in nats."""
    device = next(network.parameters()).device
    total = 0.0
    for x, y in zip(tokens.split(batch), targets.split(batch), strict=True):
        logits = network(x.to(device)).float()
        total += float(F.cross_entropy(logits.flatten(0, 1), y.to(device).flatten(), reduction="sum"))
    return total / targets.numel()


def trained(path: Path, shape: Shape, text: Tensor, steps: int, batch: int, lr: float, device: str) -> ByteGPT:
    """Load a trained network from a file, or train it and write the file."""
    torch.manual_seed(0)
    network = ByteGPT(shape).to(device)
    if path.exists():
        saved = torch.load(path, map_location=device, weights_only=True)
        if saved["shape"] != asdict(shape):
            raise SystemExit(f"{path} holds a network of {saved['shape']}. Needed {asdict(shape)}: name another file.")
        network.load_state_dict(saved["weights"])
        return network.eval()
    seconds = train(network, text, steps, batch, lr)
    print(f"trained {sum(p.numel() for p in network.parameters()):,} parameters in {seconds:.0f} s", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"shape": asdict(shape), "weights": network.state_dict()}, path)
    return network
