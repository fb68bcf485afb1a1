"""
Know when you don't know
========================

Use the uncertainty of a network to abstain on inputs it is not sure of, and to tell inputs unlike its data apart.
"""

import torch
from matplotlib import pyplot as plt

import bayeslim as bl

digits = bl.data.load("digits")
loader = bl.data.Loader(digits.train_x, digits.train_y, batch_size=64)

torch.manual_seed(0)
ensemble = bl.bayesianize(
    bl.zoo.mlp(hidden=64, inputs=64), bl.DeepEnsemble(members=5), likelihood=bl.likelihoods.Categorical()
)
ensemble.fit(loader, epochs=10, lr=3e-3, seed=0, progress=False)

# %%
# Unknown inputs: the same digits with their pixels shuffled. The entropy of the prediction is higher on them.

known = bl.predict(ensemble, digits.test_x)
shuffled = digits.test_x.flatten(1)[:, torch.randperm(64, generator=torch.Generator().manual_seed(1))]
unknown = bl.predict(ensemble, shuffled.reshape(digits.test_x.shape))
print(f"AUROC of the entropy: {bl.metrics.auroc(known.entropy, unknown.entropy):.3f}")

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
bins = torch.linspace(0, 2.3, 30).tolist()
axes.hist(known.entropy.numpy(), bins=bins, alpha=0.6, label="digits")
axes.hist(unknown.entropy.numpy(), bins=bins, alpha=0.6, label="shuffled pixels")
axes.set(xlabel="entropy of the prediction, nats", ylabel="examples")
axes.legend()
plt.show()

# %%
# Abstain: answer only the most certain inputs. The error falls with the fraction that is left to a person.

order = known.entropy.argsort()
wrong = (known.classes != digits.test_y)[order].float()
answered = torch.arange(1, len(wrong) + 1)
error = wrong.cumsum(0) / answered

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.plot(100 * answered / len(wrong), 100 * error)
axes.set(xlabel="inputs answered, %", ylabel="error on them, %")
plt.show()
