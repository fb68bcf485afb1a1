"""The base of methods: a method is a frozen dataclass that turns a model and data into a posterior.

Its hooks; all but `posterior` have defaults:

    convert      prepare the model (already a copy, or the user's own for `bayesianize_`)
    strip        undo `convert` on a copy of the model
    loss         the terms of the training loss of one batch
    default_lr   the learning rate where none is given
    optimizer    the optimizer to train with
    observe      called after every optimizer step
    fit          train, or compute the posterior of a trained network
    posterior    the posterior, as data
    one_network  the weights that stand for it as one network
    mean_params  the parameters of the mean network that differ from the model's own
    draw         one random network's outputs on inputs, for `bnn(x)` in training mode
    condition    condition the posterior on zeros (on a copy, for pruning)
    predictive   predictions, where the method has its own way to predict
    improper     the priors that rule an evidence out
    evidence     the evidence, where the method has its own estimate

A method holds settings only. State that changes lives in the model's parameters or in `bnn.state`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from bayeslim.errors import UnsupportedModel, check_settings
from bayeslim.posteriors import Posterior
from bayeslim.priors import Learnable, Prior
from bayeslim.results import Evidence, Fit, Prediction
from bayeslim.train.fit import fit
from bayeslim.types import Batch, Batches, Inputs, Params, call, fitting, split_batch

if TYPE_CHECKING:
    from bayeslim.bayesian import Bayesian


class Terms:
    """The loss of a batch in its parts: mean NLL + kl_weight · KL / num_data.

    Args:
        nll: the mean over examples of −log p(y|x, w).
        kl: the whole KL(q ‖ p), or −log p(w) for point estimates; summed, never averaged. A function is called
            when its value is read, without gradients.
        kl_weight: the weight of the KL from the schedule.
        num_data: the size of the training set.
    """

    def __init__(self, nll: Tensor, kl: Tensor | Callable[[], Tensor], kl_weight: float | Tensor, num_data: int):
        self.nll, self._kl, self.kl_weight, self.num_data = nll, kl, kl_weight, num_data

    def __reduce__(self) -> tuple[Any, ...]:
        return Terms, (self.nll, self.kl, self.kl_weight, self.num_data)  # a copy has values, and no function

    @property
    def kl(self) -> Tensor:
        """The whole KL, or −log p(w)."""
        if callable(self._kl):
            with torch.no_grad():
                self._kl = self._kl()
        return self._kl

    @property
    def loss(self) -> Tensor:
        """The whole loss: mean NLL + kl_weight · KL / num_data."""
        share = self.kl_weight / self.num_data
        if isinstance(share, Tensor):
            return self.nll + self.kl * share.to(self.kl)
        return self.nll.add(self.kl, alpha=share)

    @property
    def objective(self) -> Tensor:
        """The loss to call `backward` on; the data term where an optimizer has the KL."""
        return self.nll if callable(self._kl) else self.loss

    def less(self, log_density: Tensor) -> Terms:
        """Subtract a log-density from the KL."""
        return Terms(self.nll, self.kl - log_density, self.kl_weight, self.num_data)

    def detached(self) -> Terms:
        """Detach every term."""
        kl = self._kl if callable(self._kl) else self._kl.detach()
        return Terms(self.nll.detach(), kl, self.kl_weight, self.num_data)


@dataclass(frozen=True)
class Method:
    """The base of all methods, with the default hooks.

    Attributes:
        name: in files, reports and on the command line.
        default_sites: the parameters that are random by default.
    """

    name: ClassVar[str]
    default_sites: ClassVar[str] = "all"

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def learns_priors_by(self) -> tuple[str, ...]:
        """The ways to learn hyperparameters of priors: "gradient", "closed form".

        A point estimate learns none: the joint mode of weights and prior scale has all weights and the scale at zero.
        """
        return ()

    def check_priors(self, priors: Mapping[str, Prior]) -> None:
        """Raise if a prior is to be learned in a way that the method does not have."""
        for name, prior in priors.items():
            how = prior.learned_by if isinstance(prior, Learnable) else None
            if how is None or how in self.learns_priors_by:
                continue
            if self.learns_priors_by:
                raise UnsupportedModel(
                    f'The prior of "{name}" is to be learned in {how}, which is not the optimum of what {self!r} '
                    "maximises. Use learn=True."
                )
            raise UnsupportedModel(
                f'The prior of "{name}" is to be learned, and {self.name} does not learn priors. Use bl.Variational() '
                'or a fixed prior; Laplace chooses the scale of one with fit(loader, tune="evidence").'
            )

    def prior_factors(self, bnn: Bayesian) -> Mapping[str, float]:
        """Return the factors on the priors' standard deviations in the posterior, by name."""
        return {}

    def convert(self, bnn: Bayesian) -> None:
        """Prepare the model; do nothing by default."""

    def strip(self, bnn: Bayesian, model: nn.Module) -> None:
        """Undo `convert` on a copy of the model; do nothing by default."""

    def loss(self, bnn: Bayesian, batch: Batch, kl_weight: float | None) -> Terms:
        """Compute the MAP loss: mean NLL − log p(w) / num_data."""
        inputs, targets = split_batch(batch)
        nll = bnn.likelihood.mean_nll(call(bnn.model, inputs), targets)
        return Terms(nll, -bnn.log_prior(), 1.0 if kl_weight is None else kl_weight, bnn.data_size())

    def default_lr(self, bnn: Bayesian) -> float:
        """Return the default learning rate: the usual one of Adam."""
        return 1e-3

    def optimizer(self, bnn: Bayesian, lr: float) -> torch.optim.Optimizer:
        """Make an Adam optimizer of all trainable parameters, fused where torch can."""
        params = [p for p in bnn.parameters() if p.requires_grad]
        # On a CPU the fused kernel assumes memory without gaps: it would write outside of a view.
        fusable = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() and _is_dense(p) for p in params)
        return torch.optim.Adam(params, lr=lr, fused=fusable)

    def observe(self, bnn: Bayesian) -> None:
        """Update state after an optimizer step; do nothing by default."""

    def fit(self, bnn: Bayesian, loader: Any, **options: Any) -> Fit:
        """Minimise the loss by gradient descent."""
        return fit(bnn, loader, **options)

    def fit_stack(self, stack: Any, networks: Sequence[Bayesian], loader: Any, **options: Any) -> Fit:
        """Train networks that are stacked, and give each its share.

        A method whose `fit` does more than descend the loss has a `fit_stack` of its own.

        Args:
            stack: the networks as one (`shared.abreast.Stack`).
            networks: the networks.
            loader: passes over the data of all of them at once; `loader.loaders` has one for each network.
            **options: of `fit`.
        """
        result = fit(stack, loader, **options)
        stack.unstack(networks)
        return result

    def posterior(self, bnn: Bayesian) -> Posterior:
        """Return the posterior, as data."""
        raise NotImplementedError

    def one_network(self, bnn: Bayesian) -> Params:
        """Return one network's weights, by name, that stand for the posterior: its mean."""
        return bnn.posterior_.mean

    def mean_params(self, bnn: Bayesian) -> Params:
        """Return the mean network's parameters that differ from the model's own."""
        return {}

    def draw(self, bnn: Bayesian, inputs: Inputs) -> Tensor:
        """Call one network drawn from the posterior."""
        return call(bnn.model, inputs, fitting(bnn.model, bnn.posterior_.sample()))

    def condition(self, bnn: Bayesian, masks: Mapping[str, Tensor], **options: Any) -> None:
        """Condition the posterior on w = 0 where a mask is False, and move to its mean."""
        posterior = bnn.posterior_.condition(masks, **options)
        bnn.state["posterior"] = posterior
        with torch.no_grad():
            for name, value in posterior.mean.items():
                bnn.model.get_parameter(name).copy_(value)

    def predictive(
        self, bnn: Bayesian, batches: Batches, samples: int, how: str, generator: torch.Generator | None
    ) -> Prediction | None:
        """Predict inputs in chunks, or return None to leave it to the posterior's type."""
        return None

    def improper(self, bnn: Bayesian) -> list[str]:
        """Name the priors that do not integrate to one; with any, there is no evidence."""
        return sorted({type(prior).__name__ for prior in bnn.priors.values() if not prior.is_proper})

    def evidence(self, bnn: Bayesian, loader: Any, samples: int, generator: torch.Generator | None) -> Evidence | None:
        """Estimate the evidence, or return None to leave it to the posterior's type."""
        return None


def _is_dense(parameter: Tensor) -> bool:
    """Check whether a parameter fills memory without gaps, in any order of dimensions."""
    size = 1
    for length, stride in sorted(zip(parameter.shape, parameter.stride(), strict=True), key=lambda pair: pair[1]):
        if length > 1:
            if stride != size:
                return False
            size *= length
    return True
