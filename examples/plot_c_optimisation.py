"""
Bayesian optimisation with BoTorch
==================================

Maximise a function that is expensive to evaluate: a Bayesian network is the surrogate, BoTorch chooses the next inputs.
"""

import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.optim import optimize_acqf
from botorch.test_functions import Branin
from matplotlib import pyplot as plt
from torch import nn

import bayeslim as bl
from bayeslim.botorch import Surrogate

torch.manual_seed(1)
function = Branin(negate=True).to(torch.float64)  # its maximum is -0.398
bounds = function.bounds.double()
X = bounds[0] + (bounds[1] - bounds[0]) * torch.rand(10, 2, dtype=torch.float64)
Y = function(X)[:, None]


def surrogate_of(X, Y, seed):
    """Train a network on standardised data, with the posterior of its last layer."""
    scales = bl.data.Scale.of(X), bl.data.Scale.of(Y)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1)).double()
    method = bl.Laplace("full", subset="last-layer")
    bnn = bl.bayesianize(model, method, likelihood=bl.likelihoods.Gaussian(noise=0.05))
    loader = bl.data.Loader(scales[0].standardise(X), scales[1].standardise(Y), batch_size=64)
    bnn.fit(loader, epochs=200, lr=0.02, tune="evidence", seed=seed, progress=False)
    return Surrogate(bnn, samples=32, input_scale=scales[0], target_scale=scales[1])


# %%
# Ten random inputs, then ten that the surrogate chooses.

best = [float(Y.max())]
for step in range(10):
    surrogate = surrogate_of(X, Y, step)
    acquisition = LogExpectedImprovement(surrogate, best_f=Y.max())
    chosen, _ = optimize_acqf(acquisition, bounds, q=1, num_restarts=3, raw_samples=64, options={"maxiter": 40})
    X, Y = torch.cat([X, chosen]), torch.cat([Y, function(chosen)[:, None]])
    best.append(float(Y.max()))
print(f"best value {best[-1]:.3f} after {len(Y)} evaluations; the maximum is -0.398")

# %%
# On the left the mean of the last surrogate, with the chosen inputs; on the right the best value so far.

grid = torch.stack(torch.meshgrid(*(torch.linspace(*b, 60).double() for b in bounds.T), indexing="ij"), -1)
with torch.no_grad():
    mean = surrogate.posterior(grid.reshape(-1, 1, 2)).mean.reshape(60, 60)
figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
axes[0].contourf(grid[..., 0], grid[..., 1], mean, 20)
axes[0].plot(*X[:10].T, "o", color="0.8", label="random")
axes[0].plot(*X[10:].T, "r.", label="chosen")
axes[0].legend()
axes[1].plot(best)
axes[1].axhline(-0.398, color="0.6", linestyle="--")
axes[1].set(xlabel="evaluations after the first ten", ylabel="best value")
plt.show()
