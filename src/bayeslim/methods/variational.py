"""Mean-field Gaussian variational inference.

    q(w) = Π N(wᵢ | μᵢ, σᵢ²)          maximise  L = E_q[log p(D|w)] − KL(q ‖ p)

Bayes by Backprop draws w = μ + σ ε and differentiates through it ("shared": one draw for the whole batch). Two
estimators with less variance draw for every example at the pre-activations, for layers linear in their weights: local
reparametrisation and Flipout (`stochastic.py`). Whatever cannot be done there, such as recurrent layers, attention,
embeddings, tied weights and layers that run several times, is drawn whole, once a pass, so it is right for any module.

Graves 2011 · Blundell et al. 2015, arXiv:1505.05424 · Kingma, Salimans & Welling 2015, arXiv:1506.02557
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from bayeslim import stochastic
from bayeslim.families import DiagonalGaussian
from bayeslim.methods.base import Method, Terms
from bayeslim.noise import standard_normal_like, standard_normals_like
from bayeslim.posteriors import Diagonal
from bayeslim.schedules import Schedule, Uniform
from bayeslim.select import owner
from bayeslim.types import Batch, Inputs, Params, call, split_batch

if TYPE_CHECKING:
    from bayeslim.bayesian import Bayesian


@dataclass(frozen=True)
class Variational(Method):
    """Variational inference by stochastic gradients.

    Attributes:
        family: the distribution that is fitted.
        estimator: how noise is drawn in training: "local", "shared" or "flipout"; "auto" is local, and shared for
            antithetic pairs.
        samples: draws a step, K; the data term is their average.
        antithetic: draw noise in pairs ε, −ε (needs an even number of samples and shared noise).
        kl_schedule: the KL's weight over training.
        temperature: a factor on the KL: below 1 is a cold posterior.
    """

    family: DiagonalGaussian = field(default_factory=DiagonalGaussian)
    estimator: Literal["auto", "local", "shared", "flipout"] = "auto"
    samples: int = 1
    antithetic: bool = False
    kl_schedule: Schedule = field(default_factory=Uniform)
    temperature: float = 1.0

    name: ClassVar[str] = "variational"
    default_sites: ClassVar[str] = "weights"

    def __post_init__(self) -> None:
        if self.estimator not in ("auto", "local", "shared", "flipout"):
            raise ValueError(f'estimator must be "auto", "local", "shared" or "flipout". Got {self.estimator!r}.')
        if self.samples < 1:
            raise ValueError(f"samples must be at least 1. Got {self.samples}.")
        if self.antithetic and (self.samples % 2 or self.noise_at != "shared"):
            raise ValueError(
                "antithetic=True draws pairs ε, −ε of whole weights: it needs an even number of samples and "
                f'estimator="auto" or "shared". Got samples={self.samples}, estimator={self.estimator!r}.'
            )
        if not isinstance(self.kl_schedule, Schedule):
            raise TypeError(f"kl_schedule must be one of bayeslim.schedules. Got {self.kl_schedule!r}.")

    @property
    def noise_at(self) -> str:
        """The estimator that "auto" stands for."""
        if self.estimator != "auto":
            return self.estimator
        return "shared" if self.antithetic else "local"

    def convert(self, bnn: Bayesian) -> None:
        """Give every random parameter its log σ beside it."""
        for name in bnn.sites.names:
            self.family.check(bnn.model, name)
        for name in bnn.sites.names:
            self.family.register(bnn.model, name)

    def strip(self, bnn: Bayesian, model: nn.Module) -> None:
        """Take every log σ out again."""
        for name in bnn.sites.names:
            module, leaf = owner(model, name)
            delattr(module, leaf + self.family.suffix)

    def _retype(self, bnn: Bayesian, inputs: Inputs) -> None:
        """Turn noise at the pre-activations on for the layers seen to run once; the rest are drawn whole."""
        if self.noise_at == "shared" or bnn.state.get("noisy") is not None or torch.compiler.is_compiling():
            return
        tied = {site.name for site in bnn.sites if site.aliases}
        candidates = []
        for name in bnn.sites.names:
            module, leaf = owner(bnn.model, name)
            if leaf == "weight" and name not in tied and type(module) in stochastic.LINEAR_LAYERS:
                candidates.append(name.rpartition(".")[0])
        noisy = sorted(stochastic.seen_once(bnn.model, inputs, candidates))
        for path in noisy:
            stochastic.make_noisy(bnn.model.get_submodule(path), self.noise_at)
        bnn.state["noisy"] = noisy

    def _whole(self, bnn: Bayesian) -> list[str]:
        """The random parameters that are drawn whole rather than at a layer's pre-activations."""
        noisy = set(bnn.state.get("noisy") or ())
        return [n for n in bnn.sites.names if n.rpartition(".")[0] not in noisy] if noisy else list(bnn.sites.names)

    def loss(self, bnn: Bayesian, batch: Batch, kl_weight: float | None) -> Terms:
        """Mean NLL over K draws, and the KL."""
        num_data = bnn.data_size()
        inputs, targets = split_batch(batch)
        self._retype(bnn, inputs)
        means, stds, kl = self._weights(bnn)
        whole = self._whole(bnn)
        log_likelihoods = []
        noise: Params = {}
        with stochastic.noise(bnn.model, on=True, given={name: (means[name], stds[name]) for name in means}):
            for k in range(self.samples):
                mirror = self.antithetic and k % 2 == 1
                noise = {n: -e for n, e in noise.items()} if mirror else standard_normals_like(stds, whole)
                params = {n: (stds[n] * noise[n]).add_(means[n]).to(means[n].dtype) for n in whole}
                log_likelihoods.append(bnn.likelihood.log_prob(call(bnn.model, inputs, params), targets).mean())
        if kl_weight is None:
            kl_weight = self.kl_schedule.weight(bnn.position)
        return Terms(-torch.stack(log_likelihoods).mean(), kl, kl_weight * self.temperature, num_data)

    def _weights(self, bnn: Bayesian) -> tuple[Params, Params, Tensor]:
        """μ and σ of every random parameter, and the KL of those that are not cut."""
        means: Params = {}
        stds: Params = {}
        kls = []
        for name, prior in bnn.priors.items():
            mean, log_std = bnn.model.get_parameter(name), self.family.log_std(bnn.model, name)
            if name in bnn.masks:
                kept = bnn.masks[name]
                means[name], stds[name] = mean, log_std.exp()
                kl = prior.at(kept).kl(mean.to(log_std.dtype)[kept], stds[name][kept], log_std[kept])
            else:
                means[name], stds[name], kl = prior.weights(mean, log_std)
            kls.append(kl)
        return means, stds, torch.stack(kls).sum()

    def condition(self, bnn: Bayesian, masks: Mapping[str, Tensor], **options: Any) -> None:
        """Zero means and zero spreads where a mask is False; independent survivors stay where they are."""
        conditioned = bnn.posterior_.condition(masks, **options)
        with torch.no_grad():
            for name, value in conditioned.mean.items():
                bnn.model.get_parameter(name).copy_(value)
                if name in masks:
                    self.family.log_std(bnn.model, name).masked_fill_(~masks[name], -math.inf)

    def posterior(self, bnn: Bayesian) -> Diagonal:
        """The fitted family, as it is now: training on does not change it."""
        with torch.no_grad():
            return Diagonal(
                {name: bnn.model.get_parameter(name).detach().clone() for name in bnn.sites.names},
                {name: self.family.std(bnn.model, name) for name in bnn.sites.names},
            )

    def draw(self, bnn: Bayesian, inputs: Inputs) -> Tensor:
        """One draw of the network, with the training estimator's noise, differentiable."""
        self._retype(bnn, inputs)
        params = {}
        for name in self._whole(bnn):
            mean, std = bnn.model.get_parameter(name), self.family.std(bnn.model, name)
            params[name] = torch.addcmul(mean, std, standard_normal_like(std)).to(mean.dtype)
        with stochastic.noise(bnn.model, on=True):
            return call(bnn.model, inputs, params)
