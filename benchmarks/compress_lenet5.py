"""Size and speed of LeNet-5 on MNIST, compressed by units.

    python benchmarks/compress_lenet5.py

The network is trained as usual. Whole channels and neurons are cut by the Kronecker posterior in steps. The pruned
network is fine-tuned with its zeros kept, and compacted. The dense and the slim network are timed in eager PyTorch and
in onnxruntime, on one thread. Files that are in the run's folder already are not made again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from environment import RESULTS, save
from torch import Tensor, nn

import bayeslim as bl


def error(network: nn.Module, x: Tensor, y: Tensor) -> float:
    """Compute the error in per cent."""
    with torch.no_grad():
        wrong = torch.cat([network.eval()(part).argmax(1) for part in x.split(1000)]) != y
    return round(100 * float(wrong.double().mean()), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--fine-tune", type=int, default=5)
    parser.add_argument("--sparsity", type=float, default=0.9875)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/compress_lenet5"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    data = bl.data.load("mnist").with_validation(5_000, seed=0)
    train = bl.data.Loader(data.train_x, data.train_y, batch_size=128, seed=options.seed)
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
    example = data.test_x[:64]
    if (options.out / "slim").exists():
        slim = bl.load(options.out / "slim")
    else:
        bnn = bl.bayesianize(network, bl.Laplace(), likelihood=bl.likelihoods.Categorical())
        bnn.fit(train, seed=options.seed)
        budget = bl.Budget(sparsity=options.sparsity, empty_layers="keep best")
        pruned = bl.prune(bnn, budget, refresh=train, steps=5, example=example, granularity="unit")
        pruned.fit(train, epochs=options.fine_tune, lr=1e-3, lr_schedule="cosine", seed=options.seed)
        slim = bl.compact(pruned, example)
        bl.save(slim, options.out / "slim")
    errors = {name: error(net, data.test_x, data.test_y) for name, net in (("dense", network), ("slim", slim))}
    print(errors)
    torch.set_num_threads(1)
    times = bl.benchmark(network, slim, example=example)
    print(times)
    content = {
        "command": "python benchmarks/compress_lenet5.py",
        "settings": {k: v for k, v in vars(options).items() if k not in ("out", "results")},
        "test_error": errors,
        "slim": {name: list(p.shape) for name, p in slim.named_parameters()},
        "times": json.loads(times.to_json()),
    }
    print(save("compress_lenet5", content, folder=options.results))


if __name__ == "__main__":
    main()
