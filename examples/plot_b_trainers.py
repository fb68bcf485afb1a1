"""
Training loops of other libraries
=================================

The same network, trained by Lightning and by a loop of your own. Both end with a posterior.
"""

import warnings

import lightning
import torch
from matplotlib import pyplot as plt
from torch.utils.data import DataLoader, TensorDataset

import bayeslim as bl
from bayeslim.trainers import Following
from bayeslim.trainers.lightning import BayesianModule

warnings.filterwarnings("ignore", module="lightning")  # its advice about workers and loggers
QUIET = {"enable_progress_bar": False, "enable_model_summary": False}
digits = bl.data.load("digits").with_validation(200)
train = DataLoader(TensorDataset(digits.train_x, digits.train_y), batch_size=64, shuffle=True)
val = DataLoader(TensorDataset(digits.valid_x, digits.valid_y), batch_size=200)


def network(method):
    torch.manual_seed(0)
    return bl.bayesianize(bl.zoo.mlp(hidden=64, inputs=64), method, likelihood=bl.likelihoods.Categorical())


# %%
# Lightning: the module brings its callback, which logs the scores of averaged predictions. At the end of training it
# measures the curvature, so that the network has its Laplace posterior.

bnn = network(bl.Laplace())
trainer = lightning.Trainer(max_epochs=10, logger=False, enable_checkpointing=False, **QUIET)
trainer.fit(BayesianModule(bnn, lr=3e-3), train, val)
print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items()})

# %%
# A loop of your own: `Following` collects the networks of SWAG along the way.

swag = network(bl.SWAG(start=0.5, every=10))
optimizer = swag.optimizer(lr=3e-3)
history = []
with Following(swag, train, optimizer, epochs=10) as run:
    for _ in range(10):
        for batch in train:
            loss = swag.loss(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        history.append(run.evaluate(val)["nll"])
print(run.evaluate(val))

# %%
# Both posteriors are less sure of noise than of digits.

figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
for one, bayesian, name in zip(axes, (bnn, swag), ("Laplace, Lightning", "SWAG, own loop"), strict=True):
    for inputs, label in ((digits.test_x, "digits"), (torch.rand_like(digits.test_x), "noise")):
        one.hist(bl.predict(bayesian, inputs).entropy, bins=30, alpha=0.6, label=label, density=True)
    one.set(title=name, xlabel="entropy, nats")
    one.legend()
plt.show()
