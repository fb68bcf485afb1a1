"""Predict through `torch.compile`: the same prediction, once the compiler has seen an example.

Several networks are compiled as one graph, so that a small network costs little more than its arithmetic. On a GPU the
graph is also captured as a CUDA graph (`mode="reduce-overhead"`). All of it is torch's own machinery: it compiles anew
for inputs of another shape, and keeps what it compiled for as long as the `Compiled` lives.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.errors import UnsupportedModel
from bayeslim.noise import drawing_from, on_device
from bayeslim.posteriors import Particles, Posterior
from bayeslim.predict.predict import DEFAULT_SAMPLES
from bayeslim.results import Prediction
from bayeslim.train.step import own_code
from bayeslim.types import Inputs, Params, arguments, as_tensor, call_with, device_of, to_device

MAX_NETWORKS_PER_GRAPH = 8
"""Networks in one compiled graph: compiling takes time in proportion, and eight keep a GPU busy."""


def compiled(bnn: Bayesian, example: Inputs, samples: int | None = None, **options: Any) -> Compiled:
    """Compile the predictions of a network that is no longer trained.

    Args:
        bnn: a Bayesian network whose predictions average drawn networks. Weights that change afterwards are not seen.
        example: inputs to compile for; inputs of other shapes compile anew.
        samples: the number of networks to average, as in `predict`.
        **options: options of `torch.compile`; on a GPU `mode="reduce-overhead"` if not given.

    >>> import bayeslim as bl
    >>> bnn = bl.bayesianize(torch.nn.Linear(4, 3), bl.Variational(), likelihood=bl.likelihoods.Categorical())
    >>> fast = bl.compiled(bnn, torch.randn(8, 4), samples=5, backend="eager")
    >>> fast(torch.randn(8, 4)).probs.shape
    torch.Size([8, 3])
    """
    found = Compiled(bnn, example, samples, options)
    found(example)
    return found


class Compiled:
    """Compiled predictions; call it on inputs. Made by `compiled`.

    Args:
        bnn: the network.
        example: inputs to check the network on.
        samples: the number of networks to average.
        options: options of `torch.compile`.
    """

    def __init__(self, bnn: Bayesian, example: Inputs, samples: int | None, options: dict[str, Any]):
        self.device = device_of(bnn.model)
        twin = bnn.replica(to_device(example, self.device))
        networks = bnn.state.get("networks")
        self.posterior: Posterior = networks if networks is not None else bnn.posterior_
        if networks is None and not _draws_networks(twin, to_device(example, self.device)):
            raise UnsupportedModel(
                f"{bnn.method.name} does not predict by averaging drawn networks, so there is nothing to compile. "
                "Use bl.predict."
            )
        self.samples = samples or (self.posterior.count if isinstance(self.posterior, Particles) else DEFAULT_SAMPLES)
        self.likelihood = twin.likelihood
        if self.device.type == "cuda":
            options = {"mode": "reduce-overhead", **options}
        self._stacks = list(self._drawn(None)) if isinstance(self.posterior, Particles) else None

        def outputs(stack: Params, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
            networks = ({n: v[k] for n, v in stack.items()} for k in range(len(next(iter(stack.values())))))
            return torch.stack([as_tensor(call_with(twin.model, p, args, kwargs), twin.model) for p in networks])

        self._outputs = torch.compile(own_code(outputs), **options)
        self._summary = torch.compile(self._parts, **{k: v for k, v in options.items() if k != "mode"})

    def __call__(self, x: Inputs, generator: torch.Generator | None = None) -> Prediction:
        """Predict.

        Args:
            x: inputs, all in one call.
            generator: the source of random numbers.
        """
        args, kwargs = arguments(to_device(x, self.device))
        generator = on_device(generator, self.device)
        with torch.no_grad(), drawing_from(generator):
            stacks = self._drawn(generator) if self._stacks is None else self._stacks
            # a CUDA graph writes its next outputs over the last ones
            outputs = torch.cat([self._outputs(stack, args, kwargs).clone() for stack in stacks])
            kind, mean, aleatoric, epistemic, probs, spread = self._summary(outputs)
            return Prediction(kind, mean, outputs, aleatoric, epistemic, probs, spread)

    def _parts(self, outputs: Tensor) -> tuple[Any, ...]:
        """Summarise outputs as fields of the prediction that is made outside the graph."""
        found = self.likelihood.predict(outputs)
        return found.kind, found.mean, found.aleatoric, found.epistemic, found.probs, found.spread

    def _drawn(self, generator: torch.Generator | None) -> Iterator[Params]:
        """Draw networks, in stacks of one size, so that one graph serves them all."""
        if isinstance(self.posterior, Particles):
            chosen = self.posterior.spread(self.samples)
            every = self.posterior.values | self.posterior.buffers
            stack = {name: value[chosen].to(self.device) for name, value in every.items()}
        else:
            stack = self.posterior.sample(self.samples, generator=generator)
        count = len(next(iter(stack.values())))
        size = max(n for n in range(1, MAX_NETWORKS_PER_GRAPH + 1) if count % n == 0)
        return ({name: value[k : k + size] for name, value in stack.items()} for k in range(0, count, size))


def _draws_networks(bnn: Bayesian, example: Inputs) -> bool:
    """Check whether predictions average drawn networks, as not all methods do."""
    with torch.no_grad():
        return bnn.method.predictive(bnn, lambda: iter([example]), 1, "auto", None) is None
