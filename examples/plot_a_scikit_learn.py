"""
A regressor for scikit-learn
============================

Fit, predict with an interval, search a grid, and make the intervals conformal with MAPIE.
"""

import numpy as np
from mapie.regression import SplitConformalRegressor
from matplotlib import pyplot as plt
from sklearn.model_selection import GridSearchCV

from bayeslim.sklearn import BayesianRegressor

random = np.random.default_rng(0)
X = random.uniform(-3, 3, (400, 1))
X = X[np.abs(X[:, 0] - 1) > 0.7]  # no data around 1
y = 100 + 20 * np.sin(2 * X[:, 0]) + 3 * random.normal(size=len(X))
train, held_out = slice(0, 150), slice(150, None)

# %%
# Data are standardised inside; predictions are in their own units. No network is given, so it is a multilayer
# perceptron, with a Laplace posterior around its trained weights.

model = BayesianRegressor(random_state=0).fit(X[train], y[train])
print(f"R² on held-out data: {model.score(X[held_out], y[held_out]):.3f}")
grid = np.linspace(-4, 4, 200)[:, None]
mean = model.predict(grid)
low, high = model.predict_interval(grid, coverage=0.9).T

figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
axes.plot(X[train, 0], y[train], ".", color="0.6")
axes.plot(grid[:, 0], mean)
axes.fill_between(grid[:, 0], low, high, alpha=0.25)
axes.set(xlabel="x", ylabel="y", title="90 % intervals: wide where there are no data")
plt.show()

# %%
# It is an estimator like any other: here a grid search over the width of the network.

search = GridSearchCV(BayesianRegressor(max_epochs=30, random_state=0), {"hidden": [5, 50]}, cv=3)
print(search.fit(X[train], y[train]).best_params_)

# %%
# MAPIE calibrates its predictions on held-out data, with a guarantee on the coverage.

first, second = slice(150, 220), slice(220, None)
made = SplitConformalRegressor(model, confidence_level=0.9).conformalize(X[first], y[first])
_, bounds = made.predict_interval(X[second])
inside = (bounds[:, 0, 0] <= y[second]) & (y[second] <= bounds[:, 1, 0])
print(f"covered: {inside.mean():.2f}")
