"""
Know when you don't know
========================

Use the uncertainty of a network to tell inputs unlike its data apart, to abstain where it is not sure, and to give sets
of classes that hold the truth as often as they promise.
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

# %%
# A threshold with a guarantee: ``selective`` looks at held-out data and abstains so often that, with 95 % confidence,
# at most 5 % of the answers are wrong. The held-out data must be neither training nor test data.

held_out = bl.data.Loader(digits.test_x[:250], digits.test_y[:250])
x, y = digits.test_x[250:], digits.test_y[250:]
answers = bl.selective(ensemble, held_out, max_risk=0.05)(x)
of_answers = (answers.prediction.classes != y)[answers.answered].float().mean()
print(f"answered {answers.answered.float().mean():.0%}, of which {of_answers:.1%} wrong")

# %%
# Conformal sets: instead of abstaining, name all classes that are plausible. The set holds the truth with the
# probability that you ask for, whatever the network. Unknown inputs get larger sets, but the promise is only for inputs
# like the held-out ones.

predict_sets = bl.conformal(ensemble, held_out, coverage=0.98)
sets, unknown_sets = predict_sets(x), predict_sets(shuffled.reshape(digits.test_x.shape))
print(f"sets that hold the truth: {sets.covers(y).float().mean():.1%}, asked for 98 %")

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
sizes = torch.arange(11)
for found, offset, label in ((sets, -0.2, "digits"), (unknown_sets, 0.2, "shuffled pixels")):
    share = 100 * torch.bincount(found.sizes, minlength=11) / len(found.sizes)
    axes.bar(sizes + offset, share, width=0.4, label=label)
axes.set(xlabel="classes in the set", ylabel="inputs, %", xticks=sizes.tolist())
axes.legend()
plt.show()
