"""Seconds and memory of cuts block by block, `bl.prune_blocks`.

    python benchmarks/streaming.py --encoder                 a sentence encoder of 22 M parameters, on a CPU
    python benchmarks/streaming.py --device cuda             a decoder of 1 billion parameters in bfloat16, one block of
                                                             8B shape, and growth over width and depth

The networks have random weights: the time of a cut does not depend on their values but for the iterations of the
solver. Each cell is written to `results/streaming.json` when it is done, and a second call goes on with the next one.
`--minutes` ends the run before a cell that begins later.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from environment import RESULTS, environment, save
from torch import Tensor, nn

import bayeslim as bl

NAME = "streaming"
ENCODER_SEQUENCES = 256
ENCODER_BATCH = 16
LAYERS = r"layers\.\d+\.(q|k|v|o|up|down)\.(weight|bias)"
SECONDS_PER_MINUTE = 60
WAYS = ("restored", "local", "kronecker")


class EncoderLayer(nn.Module):
    """A post-norm transformer layer, as in sentence encoders."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Transform (B, T, width) under a mask of padding."""
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.norm1(x + self.o(attended.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    """Six layers of width 384 over a vocabulary of 30,522 words: 22 M parameters; its output is a unit vector."""

    def __init__(self, layers: int = 6, width: int = 384, hidden: int = 1536, words: int = 30_522):
        super().__init__()
        self.table, self.places = nn.Embedding(words, width), nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList([EncoderLayer(width, 12, hidden) for _ in range(layers)])

    def forward(self, words: Tensor) -> Tensor:
        """Embed sentences (B, T), padded with 0."""
        kept = words != 0
        x = self.norm(self.table(words) + self.places(torch.arange(words.shape[1], device=words.device)))
        for layer in self.layers:
            x = layer(x, kept[:, None, None, :])
        weight = kept[..., None].to(x.dtype)
        return F.normalize((x * weight).sum(1) / weight.sum(1), dim=-1)


@dataclass(frozen=True)
class Shape:
    """The size of a decoder."""

    width: int
    hidden: int
    heads: int
    groups: int
    blocks: int
    words: int = 32_000


ONE_BILLION = Shape(width=2048, hidden=5632, heads=32, groups=4, blocks=22)
EIGHT_BILLION = Shape(width=4096, hidden=14_336, heads=32, groups=8, blocks=32, words=128_256)


class DecoderBlock(nn.Module):
    """Rotary attention with grouped queries, and a SwiGLU, each behind an RMS norm."""

    def __init__(self, shape: Shape):
        super().__init__()
        width, head = shape.width, shape.width // shape.heads
        self.head = head
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, head * shape.groups, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, width, bias=False)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Transform (B, T, width), with the cosines and sines of the positions."""
        normed = self.norm1(x)
        q, k, v = (p(normed).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = rotated(q, turns), rotated(k, turns)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def rotated(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs of features by angles that grow with the position."""
    first, second = x.chunk(2, -1)
    return x * turns[0] + torch.cat([-second, first], -1) * turns[1]


class Decoder(nn.Module):
    """A plain decoder."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.table = nn.Embedding(shape.words, shape.width)
        self.layers = nn.ModuleList([DecoderBlock(shape) for _ in range(shape.blocks)])
        self.norm, self.lm_head = nn.RMSNorm(shape.width), nn.Linear(shape.width, shape.words, bias=False)
        self.head = shape.width // shape.heads

    def forward(self, words: Tensor) -> Tensor:
        """Compute the logits of the next words, (B, T, words)."""
        x = self.table(words)
        rates = 10_000 ** -(torch.arange(0, self.head, 2, device=words.device) / self.head)
        angles = (torch.arange(words.shape[1], device=words.device)[:, None] * rates).repeat(1, 2)
        turns = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, turns)
        return self.lm_head(self.norm(x))


class Clock:
    """Wall and CPU seconds, and the peak memory of a GPU or of the process."""

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        """Read seconds and memory since the start."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            memory = torch.cuda.max_memory_allocated() / 1e9
        else:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        return {
            "seconds": round(time.perf_counter() - self.wall, 2),
            "cpu_seconds": round(time.process_time() - self.cpu, 2),
            "peak_memory_gb": round(memory, 3),
        }


def sentences(seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Draw 256 sequences of 32 to 128 words, in batches padded to their longest."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(32, 129, (ENCODER_SEQUENCES,), generator=generator).sort().values
    batches = []
    for part in lengths.split(ENCODER_BATCH):
        words = torch.randint(1, 30_522, (len(part), int(part.max())), generator=generator)
        words[torch.arange(words.shape[1]) >= part[:, None]] = 0
        batches.append((words, torch.zeros(len(part), 384)))
    return batches


def encoder(way: str) -> dict[str, Any]:
    """Cut half of the encoder's weights, and compare its embeddings with the dense network's."""
    torch.manual_seed(0)
    model, batches = Encoder().eval(), sentences()
    budget, likelihood = bl.Budget(sparsity=0.5), bl.likelihoods.Gaussian(0.1)
    clock = Clock(torch.device("cpu"))
    extra: dict[str, Any] = {}
    if way == "whole network":
        bnn = bl.bayesianize(model, bl.Laplace(), likelihood=likelihood, sites=LAYERS)
        bnn.fit(batches)
        extra["cpu_seconds_of_curvature"] = clock.read()["cpu_seconds"]
        pruned = bl.prune(bnn, budget)
        measured, network, plan = clock.read(), pruned.mean_network(), pruned.plan_
    else:
        found = bl.prune_blocks(model, budget, batches, curvature=way, likelihood=likelihood)
        measured, network, plan = clock.read(), found.model, found.plan
    zeros = Encoder().eval()
    zeros.load_state_dict(model.state_dict())
    assert plan is not None
    with torch.no_grad():
        for name, mask in plan.masks.items():
            zeros.get_parameter(name).mul_(mask)
        fresh = [words for words, _ in sentences(seed=1)[:4]]
        cosines = {
            key: round(float(torch.cat([(model(x) * other(x)).sum(-1) for x in fresh]).mean()), 4)
            for key, other in (("cosine", network), ("cosine_of_zeros_alone", zeros))
        }
    iterations = [solve.iterations for solve in plan.solves.values()]
    return measured | extra | cosines | {"sparsity": round(plan.sparsity, 4), "most_iterations": max(iterations)}


def decoder_cut(shape: Shape, device: str, way: str, sequences: int, length: int, batch: int = 4) -> dict[str, Any]:
    """Cut a decoder with random weights to 50 %, in place."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(shape).to(torch.bfloat16).eval().requires_grad_(False)
    words = torch.randint(0, shape.words, (sequences, length + 1))
    batches = [(part[:, :-1], part[:, 1:]) for part in words.split(batch)]
    parameters = sum(p.numel() for p in model.parameters())
    clock = Clock(torch.device(device))
    found = bl.prune_blocks_(
        model,
        bl.Budget(sparsity=0.5),
        batches,
        curvature=way,
        likelihood=bl.likelihoods.Categorical(),
        progress=False,
    )
    measured = clock.read()
    iterations = [solve.iterations for solve in found.plan.solves.values()]
    result = {
        "parameters": parameters,
        "tokens": sequences * length,
        "sparsity": round(found.plan.sparsity, 4),
        "most_iterations": max(iterations),
        "converged": all(solve.converged for solve in found.plan.solves.values()),
    }
    del model, found
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return measured | result


def one_block_of_8b(device: str, way: str, sequences: int = 64, length: int = 2048) -> dict[str, Any]:
    """Time one block of 8B shape, and extrapolate to all of its blocks.

    The Kronecker curvature of a block takes a pass through every later block: a network of two blocks gives its cost.
    """
    blocks = EIGHT_BILLION.blocks
    measured = decoder_cut(replace(EIGHT_BILLION, blocks=1), device, way, sequences, length)
    one = measured["seconds"]
    if way != "kronecker":
        return measured | {"formula": f"{blocks} blocks × {one} s", "seconds_for_all_blocks": round(blocks * one, 1)}
    two = decoder_cut(replace(EIGHT_BILLION, blocks=2), device, way, sequences, length)["seconds"]
    later = max(0.0, two - 2 * one)
    passes = blocks * (blocks - 1) // 2
    return measured | {
        "seconds_of_two_blocks": two,
        "formula": f"{blocks} blocks × {one} s + {passes} passes through a later block × {later:.2f} s",
        "seconds_for_all_blocks": round(blocks * one + passes * later, 1),
    }


def exponent(points: list[tuple[float, float]]) -> float:
    """Fit the slope of log seconds over log size."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)


def cells(arguments: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    """List the measurements that the arguments ask for, by name."""
    if arguments.encoder:
        return {
            f"encoder, {way}": lambda way=way: encoder(way)  # type: ignore[misc]
            for way in ("local", "restored", "whole network", "kronecker")
        }
    device = arguments.device
    big = device == "cuda"
    tokens = (64, 2048) if big else (4, 32)
    widths = (256, 512, 1024, 2048) if big else (32, 64)
    depths = (2, 4, 8, 16) if big else (2, 3)
    found: dict[str, Callable[[], dict[str, Any]]] = {}

    def small(width: int, blocks: int) -> Shape:
        return Shape(width, 4 * width, max(2, width // 64), max(1, width // 256), blocks, words=1024)

    for way in WAYS:
        if big:
            found[f"1B, {way}"] = lambda way=way: decoder_cut(ONE_BILLION, device, way, *tokens)  # type: ignore[misc]
            found[f"one block of 8B, {way}"] = lambda way=way: one_block_of_8b(device, way)  # type: ignore[misc]
        for width in widths:
            found[f"width {width}, {way}"] = lambda way=way, width=width: decoder_cut(  # type: ignore[misc]
                small(width, 2), device, way, tokens[0] // 4, tokens[1]
            )
        for blocks in depths:
            found[f"depth {blocks}, {way}"] = lambda way=way, blocks=blocks: decoder_cut(  # type: ignore[misc]
                small(widths[-2], blocks), device, way, tokens[0] // 4, tokens[1]
            )
    return found


def growth(results: dict[str, Any]) -> dict[str, float]:
    """Fit the exponents of seconds over width and depth."""
    found = {}
    for axis in ("width", "depth"):
        for way in WAYS:
            points = [
                (float(name.split(",")[0].split()[1]), cell["seconds"])
                for name, cell in results.items()
                if name.startswith(axis) and name.endswith(way)
            ]
            if len(points) > 1:
                found[f"seconds over {axis}, {way}"] = round(exponent(points), 2)
    return found


def main() -> None:
    """Run the cells that are not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", action="store_true", help="the sentence encoder, on a CPU")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no cell after this many minutes")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--again", action="store_true", help="measure cells that are there already")
    arguments = parser.parse_args()
    start = time.monotonic()
    path = RESULTS / f"{NAME}.json"
    results: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
    for name, cell in cells(arguments).items():
        if arguments.only not in name or (name in results and not arguments.again):
            continue
        if time.monotonic() - start > SECONDS_PER_MINUTE * arguments.minutes:
            print(f"{arguments.minutes} minutes are over before {name}: call again to go on.")
            break
        if arguments.device == "cuda":  # the first use of a GPU's libraries takes seconds
            torch.linalg.cholesky(torch.eye(64, dtype=torch.float64, device="cuda"))
        results[name] = cell() | {"machine": _machine(arguments.device)}
        print(f"{name}: {results[name]}", flush=True)
        save(NAME, {"results": results, "growth": growth(results)})


def _machine(device: str) -> dict[str, Any]:
    facts = environment()
    names = ("gpu",) if device == "cuda" else ("processor", "threads", "load")
    return {key: facts[key] for key in (*names, "commit", "changed") if key in facts}


if __name__ == "__main__":
    main()
