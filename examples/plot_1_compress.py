"""
Compress a trained network
==========================

Prune a network by its posterior, compact it to a smaller plain network, and compare it with pruning by magnitude.
Nothing is retrained after the cut.
"""

import torch
from matplotlib import pyplot as plt

import bayeslim as bl

digits = bl.data.load("digits")
loader = bl.data.Loader(digits.train_x, digits.train_y, batch_size=64)
x, y = digits.test_x, digits.test_y

# %%
# Start from a trained network. Here, training and the Laplace approximation are one call; for a network that is trained
# already, ``bnn.fit(loader)`` measures the curvature only.

torch.manual_seed(0)
model = bl.zoo.mlp(hidden=100, inputs=64)
bnn = bl.bayesianize(model, bl.Laplace(), likelihood=bl.likelihoods.Categorical())
bnn.fit(loader, epochs=15, lr=2e-3, seed=0, progress=False)


def test_error(network):
    with torch.no_grad():
        return float((network(x).argmax(-1) != y).float().mean())


print(f"dense: test error {test_error(bnn.mean_network()):.1%}")

# %%
# A plan says what would be cut, before anything is cut.

plan = bl.plan(bnn, bl.Budget(sparsity=0.8), granularity="unit", example=x)
print(plan)

# %%
# Cut at several sparsities, by the posterior and by magnitude. The posterior moves the surviving weights to their
# conditional mean; magnitude leaves them where they are.

sparsities = (0.3, 0.5, 0.7, 0.8, 0.9)
curves = {"posterior": [], "magnitude": []}
for sparsity in sparsities:
    budget = bl.Budget(sparsity=sparsity, empty_layers="keep best")
    pruned = bl.prune(bnn, budget, granularity="unit", example=x, progress=False)
    curves["posterior"].append(test_error(pruned.mean_network()))
    masks = bl.plan(bnn, budget, granularity="unit", criterion="magnitude", example=x).masks
    plain = bnn.mean_network()
    with torch.no_grad():
        for name, mask in masks.items():
            plain.get_parameter(name).mul_(mask)
    curves["magnitude"].append(test_error(plain))

figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
for name, errors in curves.items():
    axes.plot([100 * s for s in sparsities], [100 * e for e in errors], marker="o", label=name)
axes.set(xlabel="weights cut, %", ylabel="test error, %", yscale="log")
axes.set_yticks([3, 5, 10, 20, 50], labels=["3", "5", "10", "20", "50"])
axes.minorticks_off()
axes.legend()
plt.show()

# %%
# Compact the network. The result is made of plain torch layers, and was checked to compute the same outputs.

pruned = bl.prune(bnn, bl.Budget(sparsity=0.8), granularity="unit", example=x, progress=False)
slim = bl.compact(pruned, example=x)
print(slim)
print(
    f"slim: {sum(p.numel() for p in slim.parameters()):,} of {sum(p.numel() for p in model.parameters()):,} parameters"
)
