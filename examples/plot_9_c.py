"""
From network to C
=================

Prune single weights and write the network as one C file that needs no runtime. It leaves zeros out, while dense
runtimes multiply with them.
"""

import tempfile
from pathlib import Path

import torch
from matplotlib import pyplot as plt

import bayeslim as bl

digits = bl.data.load("digits")
loader = bl.data.Loader(digits.train_x, digits.train_y, batch_size=64)
x, y = digits.test_x, digits.test_y

torch.manual_seed(0)
bnn = bl.bayesianize(bl.zoo.lenet_300_100(inputs=64), bl.Laplace(), likelihood=bl.likelihoods.Categorical())
bnn.fit(loader, epochs=15, lr=1e-3, seed=0, progress=False)

# %%
# Cut 95 % of the weights in four steps and fine-tune the others. Compaction removes the units that no weight reaches;
# the layers that are left are still mostly zeros.

pruned = bl.prune(bnn, bl.Budget(sparsity=0.95), refresh=loader, steps=4, example=x, progress=False)
tuned = bl.fine_tune(pruned, loader, epochs=3, lr=1e-3, seed=0, progress=False)
slim = bl.compact(tuned, example=x)
weights = [parameter for parameter in slim.parameters() if parameter.ndim > 1]
print(f"{sum(int((w != 0).sum()) for w in weights):,} of {sum(w.numel() for w in weights):,} weights are not zero")

# %%
# Write the network as C. Each layer is written dense or sparse, whichever was faster when compiled; then the whole file
# is compiled and compared with the network.

folder = Path(tempfile.mkdtemp())
print(bl.export(slim, folder / "net.c", example=x))
print((folder / "net.h").read_text())

# %%
# A program in C includes ``net.h`` and calls ``net_run``. From Python, :func:`bayeslim.load_c` compiles the file and
# calls it.

network = bl.load_c(folder / "net.c")
with torch.no_grad():
    difference = float((network(x) - slim(x)).abs().max())
print(f"test error in C: {float((network(x).argmax(-1) != y).float().mean()):.1%}")
print(f"largest difference to PyTorch: {difference:.1e}")

# %%
# The time of one input, dense and slim in the same runtimes. The table has the ratios.

timed = bl.benchmark(
    bnn.mean_network(), slim, example=x, batch_sizes=(1,), runtimes=["eager", "onnxruntime", "C"], rounds=10
)
print(timed)

# %%
# Eager PyTorch and onnxruntime gain from smaller layers only. C gains from zeros too.

figure, axes = plt.subplots(figsize=(6, 2.5), layout="constrained")
for row, runtime in enumerate(timed.runtimes):
    for shift, name, colour in ((-0.2, "dense", "0.7"), (0.2, "slim", "C0")):
        axes.barh(row + shift, 1e6 * timed.latency(name, runtime, 1), height=0.38, color=colour)
axes.set_yticks(range(len(timed.runtimes)), timed.runtimes)
axes.invert_yaxis()
axes.set(xlabel="µs for one input", xscale="log", xlim=(1, None))
axes.legend(["dense", "slim"])
plt.show()
