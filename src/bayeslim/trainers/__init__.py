"""Bridges to other training loops: Lightning, the Trainer of Hugging Face, Accelerate, and your own.

    following    `Following`: counts steps, collects networks, and finds the posterior at the end, in any loop
    lightning    a callback and a module for Lightning
    transformers a callback and a model for the Trainer of Hugging Face

Such a loop needs two things of a Bayesian network: `bnn.loss(batch)`, or `bnn.objective` under a wrapper, and
`bnn.optimizer(lr)` or an optimizer of its own. `Following` does the rest.
"""

from bayeslim.trainers.following import Following

__all__ = ["Following"]
