"""LeNet-5 on MNIST, compressed by units: how much smaller and faster is what comes out?

    python benchmarks/compress_lenet5.py

The network is trained as usual, then `bl.compress` cuts whole channels and neurons by the Kronecker posterior in steps,
fine-tunes with zeros kept, compacts, exports and times it: dense against slim, in eager PyTorch and in onnxruntime.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import bayeslim as bl

RESULTS = Path(__file__).parent / "results" / "compress_lenet5.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--fine-tune", type=int, default=3)
    parser.add_argument("--sparsity", type=float, default=0.985)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/compress_lenet5"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    data = bl.data.load("mnist").with_validation(5_000, seed=0)
    train = bl.data.Loader(data.train_x, data.train_y, batch_size=128, seed=options.seed)
    val = bl.data.Loader(data.valid_x, data.valid_y, batch_size=1000, shuffle=False)
    test = bl.data.Loader(data.test_x, data.test_y, batch_size=1000, shuffle=False)
    torch.manual_seed(options.seed)
    network = bl.zoo.create("lenet5")
    trained = options.out / "trained"
    if trained.exists():
        network = bl.load(trained)
    else:
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * len(train))
        for _ in range(options.epochs):
            for x, y in train:
                optimizer.zero_grad()
                F.cross_entropy(network(x), y).backward()
                optimizer.step()
                schedule.step()
        bl.save(network.eval(), trained)
    started = time.monotonic()
    result = bl.compress(
        network,
        train,
        val,
        budget=bl.Budget(sparsity=options.sparsity, empty_layers="keep best"),
        granularity="unit",
        steps=5,
        fine_tune={"epochs": options.fine_tune, "lr": 1e-3, "lr_schedule": "cosine"},
        test=test,
        baseline=False,
        out=options.out,
        seed=options.seed,
    )
    seconds = time.monotonic() - started
    print(result)
    torch.set_num_threads(1)
    times = bl.benchmark(network, result.slim, example=data.test_x[:64])
    print(times)
    content = {
        "command": "python benchmarks/compress_lenet5.py",
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items() if k != "results"},
        "environment": {"torch": torch.__version__, "bayeslim": bl.__version__, "threads": 1},
        "seconds": round(seconds, 1),
        "rows": {name: str(row) for name, row in result.rows.items()},
        "slim": {name: list(p.shape) for name, p in result.slim.named_parameters()},
        "times": json.loads(times.to_json()),
    }
    options.results.parent.mkdir(parents=True, exist_ok=True)
    temporary = options.results.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1))
    os.replace(temporary, options.results)


if __name__ == "__main__":
    main()
