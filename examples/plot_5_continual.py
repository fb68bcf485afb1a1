"""
Continual learning
==================

Learn task after task: the posterior of the data so far is the prior for the new data. The tasks are digits with their
pixels shuffled, each in another way.
"""

import copy

import torch
from matplotlib import pyplot as plt

import bayeslim as bl

digits = bl.data.load("digits")
orders = [torch.randperm(64, generator=torch.Generator().manual_seed(task)) for task in range(3)]


def task(number, part):
    x, y = (digits.train_x, digits.train_y) if part == "train" else (digits.test_x, digits.test_y)
    return x.flatten(1)[:, orders[number]], y


def accuracy(network, number):
    x, y = task(number, "test")
    with torch.no_grad():
        return float((network(x).argmax(-1) == y).float().mean())


# %%
# One network with the Laplace approximation after each task, and one that only trains on.

torch.manual_seed(0)
start = bl.zoo.mlp(hidden=100, inputs=64)
bnn = bl.bayesianize(copy.deepcopy(start), bl.Laplace(), likelihood=bl.likelihoods.Categorical())
plain = copy.deepcopy(start)
first_task = {"Laplace": [], "training on": []}
for number in range(3):
    loader = bl.data.Loader(*task(number, "train"), batch_size=64, seed=number)
    options = {"epochs": 10, "lr": 2e-3, "seed": 0, "progress": False}
    if number == 0:
        bnn.fit(loader, **options)
    else:
        bnn = bl.continual.update(bnn, loader, **options)
    optimizer = torch.optim.Adam(plain.parameters(), lr=2e-3)
    for _ in range(10):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(plain(x), y).backward()
            optimizer.step()
    first_task["Laplace"].append(accuracy(bnn.mean_network(), 0))
    first_task["training on"].append(accuracy(plain, 0))

# %%
# The accuracy on the first task, after each task.

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for name, values in first_task.items():
    axes.plot(range(1, 4), [100 * value for value in values], marker="o", label=name)
axes.set(xlabel="tasks learned", ylabel="accuracy on the first task, %", xticks=[1, 2, 3])
axes.legend()
plt.show()
print(first_task)
