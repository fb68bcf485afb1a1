"""
Your own training loop
======================

``bnn.loss`` is the mean negative log-likelihood plus the KL divided by the size of the data. Everything else is yours.
"""

import torch
from matplotlib import pyplot as plt

import bayeslim as bl

digits = bl.data.load("digits")
loader = bl.data.Loader(digits.train_x, digits.train_y, batch_size=64, seed=0)

torch.manual_seed(0)
bnn = bl.bayesianize(
    bl.zoo.mlp(hidden=64, inputs=64),
    bl.Variational(),
    likelihood=bl.likelihoods.Categorical(),
    num_data=len(digits.train_x),
)
print(bnn)

# %%
# An ordinary loop. Schedulers, clipping and logging go where they always go.

optimizer = bnn.optimizer(lr=3e-3)
losses = []
bnn.train()
for _ in range(10):
    for batch in loader:
        loss = bnn.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
bnn.eval()

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.plot(losses)
axes.set(xlabel="step", ylabel="loss")
plt.show()

# %%
# Score the predictions batch by batch.

scores = bl.metrics.Classification()
scores.update(bl.predict(bnn, digits.test_x).probs, digits.test_y)
print(scores.compute())
