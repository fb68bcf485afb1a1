"""Seconds of `plan`, `prune` and `compact` for the units of a decoder of 30 layers.

    python benchmarks/decoder_compaction.py                 on two threads, a few minutes
    python benchmarks/decoder_compaction.py --layers 2      a trial, which is not saved

The network is a `LlamaForCausalLM` of SmolLM2-135M's shape with random weights. 15 % of them go, by heads and neurons,
to uniform widths that are multiples of eight. The goal for `plan` and `compact` together is two minutes on two cores.
Seconds of other processes on the machine are in the first figure; CPU seconds are not.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from environment import save

import bayeslim as bl

NAME = "decoder_compaction"
LAYERS = 30
THREADS = 2
BUDGET = bl.Budget(sparsity=0.15, uniform=True, round_to=8)


def decoder(layers: int) -> transformers.LlamaForCausalLM:
    """Make the decoder."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def timed(act: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Run an action; return its result, and its seconds by the clock and of the CPU."""
    clock, cpu = time.perf_counter(), time.process_time()
    found = act()
    return found, {
        "seconds": round(time.perf_counter() - clock, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=LAYERS)
    layers = parser.parse_args().layers
    torch.set_num_threads(THREADS)
    model, example = decoder(layers), {"input_ids": torch.randint(2, 49_152, (2, 16))}
    bnn = bl.bayesianize(model, bl.Variational(), likelihood=bl.likelihoods.Categorical(), sites="*.layers.*")
    found: dict[str, Any] = {}
    plan, found["plan"] = timed(lambda: bl.plan(bnn, BUDGET, granularity="unit", example=example))
    pruned, found["prune"] = timed(lambda: bl.prune(bnn, plan, progress=False))
    slim, found["compact"] = timed(lambda: bl.compact(pruned, example))
    assert type(slim) is type(model)
    sizes = {name: sum(p.numel() for p in network.parameters()) for name, network in (("dense", model), ("slim", slim))}
    print(found, sizes, flush=True)
    if layers == LAYERS:
        save(NAME, {"layers": layers, "parameters": sizes, **found}, ["transformers"])


if __name__ == "__main__":
    main()
