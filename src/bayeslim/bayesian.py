"""`bayesianize`: a model, a method, a likelihood and a prior become one `Bayesian`.

    loss(batch) = mean NLL + kl_weight · KL / num_data

in this scale always, whatever the method, so that learning rates carry over from the plain network.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from numbers import Integral
from typing import Any, Self

import torch
from torch import Tensor, nn

from bayeslim import stochastic
from bayeslim.errors import BayeslimError, MissingDataSize, UnsupportedModel
from bayeslim.io.state import StateOfModel
from bayeslim.likelihoods import Likelihood
from bayeslim.methods.base import Method, Terms
from bayeslim.posteriors import Gaussian, Posterior
from bayeslim.priors import Normal, Prior, Priors, PriorSpec, resolve
from bayeslim.replica import deep_copy, reads_its_own_tensors, replicate
from bayeslim.results import Fit
from bayeslim.sites import Selection, Sites, check_has_values, sites, tensor_at, usable
from bayeslim.train.distributed import Objective, warn_if_past_wrapper
from bayeslim.train.loaders import check_loader
from bayeslim.train.options import check_values
from bayeslim.train.schedules import Position, Schedule, Uniform
from bayeslim.train.step import is_capturing
from bayeslim.types import Batch, Inputs, Params, call, check_device, device_of, inputs_of, note_inputs


def bayesianize(
    model: nn.Module,
    method: Method,
    *,
    likelihood: Likelihood,
    prior: PriorSpec | None = None,
    sites: Selection | None = None,
    num_data: int | None = None,
) -> Bayesian:
    """Make a copy of `model` Bayesian; the model itself is not touched.

    Args:
        model: any PyTorch module, trained or not.
        method: how to find the posterior, such as `Variational()`.
        likelihood: what the outputs mean, such as `likelihoods.Categorical()`.
        prior: one of `priors`, or a dict from parameters to priors; `priors.Normal(1.0)` if not given.
        sites: which parameters are random (see `bayeslim.sites`); the method's own default, without
            embeddings, if not given.
        num_data: the number of training examples; `fit` reads it from the loader.

    >>> import bayeslim as bl
    >>> bnn = bl.bayesianize(nn.Linear(4, 3), bl.Variational(), likelihood=bl.likelihoods.Categorical(), num_data=100)
    >>> bnn
    Bayesian Linear: variational posterior over 12 of 15 parameters, categorical likelihood
    """
    model = usable(model)
    _check(model, method, likelihood, num_data)
    try:
        model = deep_copy(model)
    except RuntimeError as error:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be copied: {error} It has tensors computed by old-style hooks "
            "(torch.nn.utils.weight_norm or prune): remove these first, or use bayesianize_ to convert in place."
        ) from error
    return Bayesian(model, method, copy.deepcopy(likelihood), prior, sites, num_data)


def bayesianize_(
    model: nn.Module,
    method: Method,
    *,
    likelihood: Likelihood,
    prior: PriorSpec | None = None,
    sites: Selection | None = None,
    num_data: int | None = None,
) -> Bayesian:
    """Make `model` itself Bayesian, its parameters the mean; else as `bayesianize`."""
    return Bayesian(usable(model), method, likelihood, prior, sites, num_data)


class Bayesian(StateOfModel):
    """A network with a posterior over its weights.

    Called on inputs it gives one draw in training mode and the mean network in evaluation mode. Made by `bayesianize`.

    Attributes:
        model: the network; its own parameters hold the posterior's mean (or the point estimate).
        method: how the posterior is found.
        likelihood: what the outputs mean.
        priors: the prior of every random parameter, with the present values of learned hyperparameters.
        sites: which parameters are random, and why.
        num_data: the size of the training set.
        num_data_given: whether `num_data` was passed to `bayesianize`; if not, `fit` reads it from its loader.
        position: where training is, for schedules: optimizer steps taken (`step`), and minibatches in an epoch.
        state: the state of the method beside the model's parameters.
        anchor: in continual learning (`bayeslim.continual`), the posterior that replaces the prior, and its strength.
        masks: for a pruned network, which weights are left (True) by parameter name; training keeps the others at zero.
        plan_: the plan it was pruned by, or None.
    """

    position: Position

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        likelihood: Likelihood,
        prior: PriorSpec | None,
        selection: Selection | None,
        num_data: int | None,
    ):
        super().__init__()
        _check(model, method, likelihood, num_data)
        report = sites(model, "default" if selection is None else selection, default=method.default_sites)
        priors = resolve(Normal(1.0) if prior is None else prior, model, report.names)
        method.check_priors(priors)
        self.model = model
        self.method = method
        self.likelihood = likelihood.to(device_of(model))
        self.sites: Sites = report
        self.priors = priors
        self.num_data = num_data
        self.num_data_given = num_data is not None
        self._kl_weight = torch.ones((), dtype=torch.float64)
        self._move(Position(0))
        self.state: dict[str, Any] = {}
        self.terms: Terms | None = None
        self.masks: Params = {}
        self._left: dict[str, tuple[Tensor | None, int, Tensor]] = {}
        self.anchor: tuple[Gaussian, float] | None = None
        self.plan_: Any = None
        self.seed: int | None = None  # of the present run of `fit`
        self._replicates: bool | None = None  # whether a replica of the model suffices; None before the check
        method.convert(self)
        self._maximise_priors()

    @property
    def priors(self) -> Priors:
        """The prior of every random parameter; `priors.used` are those of the posterior."""
        factors = self.method.prior_factors(self)
        return self._priors.rescaled(factors) if factors else self._priors

    @priors.setter
    def priors(self, priors: Mapping[str, Prior]) -> None:
        parameters = {name: self.model.get_parameter(name) for name in priors}
        self._priors = Priors(priors, parameters)
        self.hyperparameters = self._priors.learned

    def data_size(self) -> int:
        """Return `num_data`, or raise an error that says how to give it."""
        if self.num_data is None:
            raise MissingDataSize(
                "The loss weighs the KL against the whole training set and needs its size. "
                "Pass bayesianize(..., num_data=len(dataset)), or use bnn.fit(loader)."
            )
        return self.num_data

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.position.step

    @step.setter
    def step(self, step: int) -> None:
        self._move(Position(step, self.position.steps_per_epoch))

    @property
    def steps_per_epoch(self) -> int | None:
        """Minibatches in an epoch, for schedules."""
        return self.position.steps_per_epoch

    @steps_per_epoch.setter
    def steps_per_epoch(self, steps: int | None) -> None:
        self._move(Position(self.position.step, steps))

    def _move(self, position: Position) -> None:
        """Set the position of training, and the KL weight there as a tensor."""
        self._set(position=position)
        schedule: Schedule | None = getattr(self.method, "kl_schedule", None)
        if schedule is None or type(schedule) is Uniform:
            return
        if position.steps_per_epoch or not schedule.counts_epochs:
            self._kl_weight.fill_(schedule.weight(position))

    def scheduled(self, schedule: Schedule) -> float | Tensor:
        """Return the present weight of the KL.

        Under a compiler it is a tensor, since a Python number would trigger a compilation at every change.
        """
        if type(schedule) is Uniform:
            return 1.0
        if torch.compiler.is_compiling() and (self.steps_per_epoch or not schedule.counts_epochs):
            return self._kl_weight.clone()
        return schedule.weight(self.position)

    @property
    def posterior_(self) -> Posterior:
        """The posterior over the random parameters, as data."""
        return self.method.posterior(self)

    def forward(self, inputs: Inputs) -> Tensor:
        """Call one drawn network in training mode, the mean network in evaluation mode."""
        if self.training:
            return self.method.draw(self, inputs)
        params = self.method.mean_params(self)
        if params and not torch.compiler.is_compiling():
            return call(replicate(self.model), inputs, params)  # other threads may call the model meanwhile
        with stochastic.noise(self.model, on=False):
            return call(self.model, inputs, params)

    def replica(self, inputs: Inputs | None = None) -> Self:
        """Make a copy to evaluate that shares everything but the slots of parameters.

        Where the forward of the model reaches past its module tree (see `bayeslim.replica`), the model is copied whole.

        Args:
            inputs: example inputs for the check, which runs once; without them the result of an earlier check counts.
        """
        if self._replicates is None and inputs is not None:
            self._set(_replicates=reads_its_own_tensors(self.model, inputs))
        twin = replicate(self)
        twin.state = dict(self.state)
        if self._replicates is False:
            twin.model = deep_copy(self.model).eval()
        return twin

    def loss(self, batch: Batch, *, kl_weight: float | None = None) -> Tensor:
        """Compute the training loss of a batch: mean NLL + kl_weight · KL / num_data.

        Hyperpriors of learned hyperparameters count as part of the KL. The terms of the loss can be read from
        `bnn.terms` afterwards. Under DDP wrap `bnn.objective` and call the wrapper.

        Args:
            batch: inputs and targets.
            kl_weight: overrides the method's schedule.
        """
        warn_if_past_wrapper(self)
        try:
            terms = self.method.loss(self, batch, kl_weight)
        except (RuntimeError, ValueError) as error:
            if not isinstance(error, BayeslimError):  # torch's own errors may be about the shape of the inputs
                note_inputs(error, self.model, inputs_of(batch))
            raise
        log_hyperprior = self.priors.log_hyperprior()
        if log_hyperprior is not None:
            terms = terms.less(log_hyperprior)
        self._set(terms=terms.detached())
        return terms.objective

    def log_prior(self, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """Compute log p(w) of the network's own weights, or of others.

        In continual learning the posterior of the earlier tasks replaces the prior.

        Args:
            weights: by name, to use instead of the network's own.
        """
        names = self.priors if self.anchor is None else self.anchor[0].mean
        weights = {name: tensor_at(self.model, name) for name in names} if weights is None else weights
        if self.anchor is not None:
            posterior, strength = self.anchor
            off = {name: weights[name] - mean for name, mean in posterior.mean.items()}
            pull = posterior.precision_product(off)
            return -0.5 * strength * torch.stack([(off[name] * pull[name]).sum() for name in off]).sum()
        groups = self.priors.shared()
        values = [self.priors[names[0]].log_density([weights[name] for name in names]) for names in groups]
        return torch.stack(values).sum()

    @property
    def objective(self) -> Objective:
        """A module whose forward is the loss, to wrap in DDP or to compile."""
        return Objective(self)

    def optimizer(self, lr: float | None = None, *, steps_per_epoch: int | None = None) -> torch.optim.Optimizer:
        """Make the method's own optimizer, else a fused Adam; its steps are counted.

        Args:
            lr: the learning rate; the method's usual one if not given.
            steps_per_epoch: minibatches in an epoch, for schedules.
        """
        if steps_per_epoch is not None:
            self.steps_per_epoch = steps_per_epoch
        optimizer = self.method.optimizer(self, self.method.default_lr(self) if lr is None else lr)
        self.count_steps_of(optimizer)
        return optimizer

    def count_steps_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the steps of an optimizer that `bnn.optimizer` did not make."""
        # Bound methods of one object are equal, so an optimizer that is used again is not counted twice.
        if self._stepped not in optimizer._optimizer_step_post_hooks.values():
            optimizer.register_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        if self.masks:
            self.keep_zeros()
        self._maximise_priors()
        if not is_capturing():  # a replay counts its own step
            self.count_step()

    def count_step(self) -> None:
        """Count an optimizer step, and let the method observe the network after it."""
        self._move(Position(self.position.step + 1, self.position.steps_per_epoch))
        self.method.observe(self)

    def _set(self, **values: Any) -> None:
        """Set attributes that change at every step, without the checks of `nn.Module`."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _maximise_priors(self) -> None:
        """Update the priors that are learned in closed form."""
        if self.priors.has_closed_forms:
            self.priors.maximise_(self.posterior_, self.masks)

    @torch.no_grad()
    def keep_zeros(self) -> None:
        """Reset pruned weights to exactly zero, as after every optimizer step."""
        for name, mask in self.masks.items():
            weight = self.model.get_parameter(name)
            weight.masked_fill_(~mask.to(weight.device), 0)

    def left(self, name: str) -> Tensor:
        """Return the flat indices of the weights that a mask leaves."""
        mask = self.masks[name]
        known, version, indices = self._left.get(name, (None, 0, mask))
        if known is not mask or version != mask._version:
            indices = mask.flatten().nonzero().flatten()  # once a mask: a GPU must wait for their number
            self._left[name] = mask, mask._version, indices
        return indices

    def fit(self, loader: Any, **options: Any) -> Fit:
        """Find the posterior from a loader; for the options see `bayeslim.train.fit`."""
        check_loader(loader)
        check_values(options)
        check_has_values(self.model)
        self.seed = options.get("seed")
        try:
            return self.method.fit(self, loader, **options)
        finally:
            self.seed = None

    def mean_network(self) -> nn.Module:
        """Make a plain copy of the model with the posterior's mean as weights.

        The mean of an ensemble is a bad network, because its members lie far apart: there the copy is one of them,
        unless `bayeslim.align(..., average=True)` has put their units into one order.
        """
        plain = self.plain_copy()
        with torch.no_grad():
            for name, value in self.method.one_network(self).items():
                plain.get_parameter(name).copy_(value)
        return plain

    def plain_copy(self) -> nn.Module:
        """Make a plain copy of the model with its present weights, fitted or not."""
        plain = copy.deepcopy(self.model)
        for module in plain.modules():
            stochastic.make_plain(module)
        self.method.strip(self, plain)
        return plain

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move posteriors and masks along to another device."""
        check_device(fn, "The device that the network shall move to")
        super()._apply(fn, recurse)
        device = device_of(self.model)
        self.state.update({key: kept.to(device) for key, kept in self.state.items() if isinstance(kept, Posterior)})
        self.masks = {name: mask.to(device) for name, mask in self.masks.items()}
        return self

    def __repr__(self) -> str:
        total = sum(site.size for site in self.sites)
        return (
            f"Bayesian {self.sites.model}: {self.method.name} posterior over {self.sites.size:,} of {total:,} "
            f"parameters, {self.likelihood.name} likelihood"
        )


def _check(model: Any, method: Any, likelihood: Any, num_data: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module. Got {type(model).__name__}.")
    for what, value, kind, needed in (
        ("method", method, Method, "a bayeslim method, such as bl.Variational()"),
        ("likelihood", likelihood, Likelihood, "one of bayeslim.likelihoods, such as Categorical()"),
    ):
        if isinstance(value, type) and issubclass(value, kind):
            raise TypeError(f"{what} must be an instance: write {value.__name__}(), not {value.__name__}.")
        if not isinstance(value, kind):
            raise TypeError(f"{what} must be {needed}. Got {value!r}.")
    if num_data is not None and (isinstance(num_data, bool) or not isinstance(num_data, Integral) or num_data < 1):
        raise ValueError(f"num_data is the number of training examples, a whole number above 0. Got {num_data!r}.")
    if isinstance(model, Bayesian):
        raise TypeError("The model is Bayesian already. Pass the plain network (bnn.mean_network()).")
