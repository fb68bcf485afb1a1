"""
Bayesian regression on a table
==============================

Predict a number from a table of features with an interval, and check how often the intervals hold the truth.
"""

import torch
from matplotlib import pyplot as plt

import bayeslim as bl

# %%
# A small table: five features, of which three matter, and noise that grows with the first one.

generator = torch.Generator().manual_seed(0)
x = torch.randn(600, 5, generator=generator)
noise = 0.1 + 0.3 * torch.sigmoid(2 * x[:, :1])
y = torch.sin(2 * x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:3] + noise * torch.randn(600, 1, generator=generator)
train, test = (x[:400], y[:400]), (x[400:], y[400:])
loader = bl.data.Loader(*train, batch_size=50, seed=0)

# %%
# An ensemble whose networks learn the noise of each input: the second output is the logarithm of the variance.

torch.manual_seed(0)
bnn = bl.bayesianize(
    bl.zoo.mlp(hidden=50, inputs=5, classes=2),
    bl.DeepEnsemble(members=5),
    likelihood=bl.likelihoods.Gaussian(noise="heteroscedastic"),
)
bnn.fit(loader, epochs=40, lr=5e-3, seed=0, progress=False)
prediction = bl.predict(bnn, test[0])
rmse = float((prediction.mean - test[1]).square().mean().sqrt())
print(f"root mean squared error {rmse:.3f}")

# %%
# On the left: how often do central intervals of the prediction hold the target? On the diagonal, as often as they
# should; below it, the network is over-confident. On the right: the aleatoric part follows the noise of the data, and
# the epistemic part is the one that more data would remove.

levels = torch.linspace(0.05, 0.95, 19)
distance = (prediction.mean - test[1]).abs() / prediction.variance.sqrt()
inside = torch.erf(distance / 2**0.5)
covered = [float((inside <= level).float().mean()) for level in levels]

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.5), layout="constrained")
left.plot([0, 1], [0, 1], color="grey", linewidth=1)
left.plot(levels, covered, marker="o", markersize=3)
left.set(xlabel="probability of the interval", ylabel="targets inside", aspect="equal")
right.scatter(test[0][:, 0], prediction.aleatoric.sqrt(), s=6, label="aleatoric")
right.scatter(test[0][:, 0], prediction.epistemic.sqrt(), s=6, label="epistemic")
order = x[:, 0].argsort()
right.plot(x[order, 0], noise[order, 0], color="black", label="true noise")
right.set(xlabel="first feature", ylabel="standard deviation")
right.legend()
plt.show()
