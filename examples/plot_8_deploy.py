"""
From network to a small file
============================

Prune, round the weights to few bits within their posterior, and write files for deployment: an ONNX file that runs
without bayeslim, and an entropy-coded file that decodes to the bit.
"""

import tempfile
from pathlib import Path

import onnxruntime
import torch
from matplotlib import pyplot as plt

import bayeslim as bl

digits = bl.data.load("digits")
loader = bl.data.Loader(digits.train_x, digits.train_y, batch_size=64)
x, y = digits.test_x, digits.test_y

torch.manual_seed(0)
bnn = bl.bayesianize(bl.zoo.mlp(hidden=100, inputs=64), bl.Laplace(), likelihood=bl.likelihoods.Categorical())
bnn.fit(loader, epochs=15, lr=2e-3, seed=0, progress=False)
dense = bnn.mean_network()

# %%
# Prune whole units in four steps; the curvature is computed again after each. ``bayesian=True`` keeps the posterior.

pruned = bl.prune(bnn, bl.Budget(sparsity=0.8), refresh=loader, steps=4, granularity="unit", example=x, progress=False)
small = bl.compact(pruned, example=x, bayesian=True)
rounded = bl.quantise(small, bits=4)
print(rounded)

# %%
# Write the files, and run the ONNX file as a program without bayeslim would.

folder = Path(tempfile.mkdtemp())
bl.export(dense, folder / "dense.onnx", example=x)
bl.export(small.mean_network(), folder / "slim.onnx", example=x)
print(bl.encode(rounded, folder / "slim.bayes"))

session = onnxruntime.InferenceSession(folder / "slim.onnx", providers=["CPUExecutionProvider"])
logits = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
print(f"test error in onnxruntime: {float((torch.from_numpy(logits).argmax(-1) != y).float().mean()):.1%}")

decoded = bl.decode(folder / "slim.bayes")
with torch.no_grad():
    print(f"test error of the coded file: {float((decoded(x).argmax(-1) != y).float().mean()):.1%}")

# %%
# The sizes on disk.

names = ("dense.onnx", "slim.onnx", "slim.bayes")
figure, axes = plt.subplots(figsize=(6, 2.5), layout="constrained")
axes.barh(names, [(folder / name).stat().st_size / 1000 for name in names])
axes.invert_yaxis()
axes.set(xlabel="kB on disk", xscale="log")
plt.show()
