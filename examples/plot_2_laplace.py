"""
Laplace on a trained network
============================

Give a trained network uncertainty with one pass over its data. The weights do not change.
"""

import torch
from matplotlib import pyplot as plt
from torch import nn

import bayeslim as bl

# %%
# A regression problem with a gap in the middle, and an ordinary network trained on it.

generator = torch.Generator().manual_seed(0)
x = torch.cat([torch.rand(60, 1, generator=generator) - 2, torch.rand(60, 1, generator=generator) + 1])
y = torch.sin(2 * x) + 0.1 * torch.randn(x.shape, generator=generator)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(800):
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# %%
# Now make it Bayesian. ``fit`` measures the curvature of the loss; ``tune="evidence"`` chooses the prior.

likelihood = bl.likelihoods.Gaussian(noise=0.1)
bnn = bl.bayesianize(model, bl.Laplace(structure="full"), likelihood=likelihood)
loader = [(x, y)]
bnn.fit(loader, tune="evidence", progress=False)
print(bl.log_evidence(bnn, loader, progress=False))

# %%
# The band is narrow where there are data, and wide where there are none.

grid = torch.linspace(-3, 3, 200).unsqueeze(1)
prediction = bl.predict(bnn, grid)
mean, std = prediction.mean.squeeze(1), prediction.variance.sqrt().squeeze(1)

figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
axes.fill_between(grid.squeeze(1), mean - 2 * std, mean + 2 * std, alpha=0.25, label="two standard deviations")
axes.plot(grid, mean, label="mean")
axes.plot(x, y, "k.", markersize=3, label="data")
axes.set(xlabel="x", ylabel="y", ylim=(-4, 4))
axes.legend(loc="upper center", ncols=3)
plt.show()
