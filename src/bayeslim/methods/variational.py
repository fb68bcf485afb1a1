"""Variational inference: fit a distribution q(w) to the posterior by gradient descent.

    q(w) = Π N(wᵢ | μᵢ, σᵢ²)          maximise  L = E_q[log p(D|w)] − KL(q ‖ p)

and the same for other families (`families/`) and divergences (`evidence/renyi.py`).

Bayes by Backprop draws w = μ + σ ε and differentiates through it ("shared": one draw for the whole batch). Two
estimators with less variance draw noise for every example at the pre-activations of layers linear in their weights:
local reparametrisation and Flipout (`stochastic.py`). All other weights (recurrent layers, attention, embeddings, tied
weights, layers that run several times) are drawn once per forward pass, which is correct for any module. Correlated
weights, mixtures and Rényi bounds need the density of one draw of all weights, so there all weights are drawn once per
forward pass. Gates (`gates/`) multiply groups of weights by random scales with their own KL (`shared/gating.py`).

Graves 2011 · Blundell et al. 2015, arXiv:1505.05424 · Kingma, Salimans & Welling 2015, arXiv:1506.02557
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from bayeslim import stochastic
from bayeslim.bayesian import Bayesian
from bayeslim.errors import MAY_BE_INFINITE, BayeslimError
from bayeslim.evidence import renyi
from bayeslim.families import DiagonalGaussian, Family, Point, ZeroMean
from bayeslim.families.base import log_prior
from bayeslim.gates import Gate
from bayeslim.gates.placement import GateAt
from bayeslim.io.registry import register
from bayeslim.methods.base import Method, Terms
from bayeslim.methods.shared import gating
from bayeslim.methods.shared.first_pass import seen_once
from bayeslim.methods.shared.full_weight_elbo import as_parameters, full_weight_terms
from bayeslim.methods.shared.widths import Widths
from bayeslim.noise import current_generator, standard_normal_like, standard_normals_like
from bayeslim.posteriors import Diagonal, Gated, Posterior
from bayeslim.priors import Normal, Prior
from bayeslim.results import Fit
from bayeslim.sites import owner
from bayeslim.train.schedules import Schedule, Uniform
from bayeslim.types import Batch, Inputs, Params, call, split_batch


@register("method")
@dataclass(frozen=True)
class Variational(Method):
    """Variational inference by stochastic gradients.

    Attributes:
        family: the distribution that is fitted, one of `bayeslim.families`.
        renyi: the order α of the divergence, any number or ±inf. 1 is the ELBO; smaller fits wider, larger narrower.
            At α ≥ 0 the objective is, on the whole data and in expectation, a lower bound of the evidence. At α < 0
            it is not, and maximising it is a heuristic that depends on `samples` (see `evidence/renyi.py`).
            `kl_weight` and `temperature` multiply log q(w) − log p(w) in every log-weight; unless both are 1 there is
            no bound.
        estimator: how noise is drawn in training: "local", "shared" or "flipout". "auto" is local, and shared where
            one draw of all weights is needed: other families than the diagonal, α ≠ 1 and antithetic pairs. "mean" has
            no noise: only the means are trained (see `bayeslim.fine_tune`).
        samples: draws per step, K (for mixtures, from every component); α ≠ 1 compares them and needs at least two.
        antithetic: draw noise in pairs ε, −ε (needs an even number of samples and shared noise).
        kl_schedule: the weight of the KL over training.
        temperature: a factor on the KL; below 1 gives a cold posterior, which often predicts better once σ has
            converged.
        gates: random scales of groups of weights, one of `bayeslim.gates`, that learn which units a network needs.
        gate_at: the sides of layers to gate, by the names of layers, instead of the default (inputs of Linear layers,
            filters of convolutions, and so on), such as {"conv1": "outputs", "fc1": "inputs"} (see
            `bayeslim.gates.placement`).
        std_rate: a factor on the learning rate of log σ, for `DiagonalGaussian()` without gates and `ZeroMean()`. Adam
            moves every parameter by about the same amount, and log σ has further to go than μ, often to near the
            prior's width. Ten reaches it in a few epochs, but on little data the noise then grows before the means have
            learned. `fit` warns if σ still moves at the end.
    """

    family: Family = field(default_factory=DiagonalGaussian)
    renyi: float = field(default=1.0, metadata=MAY_BE_INFINITE)
    estimator: Literal["auto", "local", "shared", "flipout", "mean"] = "auto"
    samples: int = 1
    antithetic: bool = False
    kl_schedule: Schedule = field(default_factory=Uniform)
    temperature: float = 1.0
    gates: Gate | None = None
    gate_at: GateAt | None = None
    std_rate: float = 2.0

    name: ClassVar[str] = "variational"
    default_sites: ClassVar[str] = "weights"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.estimator not in ("auto", "local", "shared", "flipout", "mean"):
            raise ValueError(
                f'estimator must be "auto", "local", "shared", "flipout" or "mean". Got {self.estimator!r}.'
            )
        if not isinstance(self.family, Family):
            raise TypeError(
                f"family must be one of bayeslim.families, such as DiagonalGaussian(). Got {self.family!r}."
            )
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and not negative. Got {self.temperature}.")
        if not 0 < self.std_rate < math.inf:
            raise ValueError(f"std_rate is a factor on a learning rate and must be positive. Got {self.std_rate}.")
        if self.samples < 1:
            raise ValueError(f"samples must be at least 1. Got {self.samples}.")
        renyi.check(self.renyi)
        if self.renyi != 1 and self.samples < 2:
            raise ValueError(
                f"renyi={self.renyi:g} compares draws and needs samples of at least 2. Got samples={self.samples}. "
                "Pass, for example, samples=10."
            )
        if self.estimator in ("local", "flipout", "mean") and not self.mean_field:
            raise ValueError(
                f'estimator="{self.estimator}" needs independent weights, such as family=DiagonalGaussian(), and '
                "renyi=1. "
                f'Got family={self.family!r}, renyi={self.renyi:g}. Use estimator="auto" or "shared".'
            )
        if self.antithetic and (self.samples % 2 or self.noise_at != "shared"):
            raise ValueError(
                "antithetic=True draws pairs ε, −ε of all weights. It needs an even number of samples and "
                f'estimator="auto" or "shared". Got samples={self.samples}, estimator={self.estimator!r}.'
            )
        if not isinstance(self.kl_schedule, Schedule):
            raise TypeError(f"kl_schedule must be one of bayeslim.schedules. Got {self.kl_schedule!r}.")
        if isinstance(self.family, Point) and self.renyi != 1:
            raise ValueError(f"family=Point() has no density and needs renyi=1. Got renyi={self.renyi:g}.")
        if isinstance(self.family, ZeroMean) and self.estimator == "mean":
            raise ValueError(
                "family=ZeroMean() has no means to train without noise: its variances carry the information. Train on "
                'with bnn.fit, which has noise, instead of fine_tune or estimator="mean".'
            )
        gating.check(self.gates, self.gate_at, self.family, self.mean_field)
        if self.gate_at is not None:  # lists become tuples, as after reading a file
            sides = {layer: side if isinstance(side, str) else tuple(side) for layer, side in self.gate_at.items()}
            object.__setattr__(self, "gate_at", sides)

    @property
    def learns_priors_by(self) -> tuple[str, ...]:
        """How priors can be learned; closed forms are optima of the KL only."""
        if isinstance(self.family, Point):
            return ()
        return ("gradient", "closed form") if self.renyi == 1 and self.gates is None else ("gradient",)

    @property
    def noise_at(self) -> str:
        """The estimator, with "auto" resolved."""
        if self.estimator != "auto":
            return self.estimator
        return "local" if self.mean_field and not self.antithetic else "shared"

    @property
    def mean_field(self) -> bool:
        """Whether weights are independent and the divergence is the KL."""
        return isinstance(self.family, (DiagonalGaussian, Point)) and self.renyi == 1

    def convert(self, bnn: Bayesian) -> None:
        """Register the parameters of the family and of the gates."""
        self.family.check(bnn.model, bnn.sites.names)
        if self.gates is not None:
            gating.install(bnn, self.gates, self.gate_at)
        self.family.register(bnn.model, bnn.sites.names)
        if type(self.family) is DiagonalGaussian and self.family.initial_std is None:
            self._narrow_to_priors(bnn)

    @torch.no_grad()
    def _narrow_to_priors(self, bnn: Bayesian) -> None:
        """Start no wider than normal priors: training would narrow σ again."""
        for name, prior in bnn.priors.items():
            if isinstance(prior, Normal):
                log_std = self.family.log_std(bnn.model, name)  # type: ignore[attr-defined]
                log_std.copy_(torch.minimum(log_std, prior.setting_like("std", log_std).log()))

    def strip(self, bnn: Bayesian, model: nn.Module) -> None:
        """Remove the parameters of the family and of the gates."""
        self.family.strip(model, bnn.sites.names)
        if self.gates is not None:
            gating.strip(model, bnn.state["places"], self.gates)

    def _gating(self, bnn: Bayesian) -> gating.Gating | None:
        return None if self.gates is None else gating.Gating(self.gates, bnn)

    def _retype(self, bnn: Bayesian, inputs: Inputs) -> None:
        """Switch on noise at the pre-activations of layers that run once."""
        if self.noise_at == "shared" or bnn.state.get("noisy") is not None or torch.compiler.is_compiling():
            return
        tied = {site.name for site in bnn.sites if site.aliases}
        random = set()
        for name in bnn.sites.names if isinstance(self.family, DiagonalGaussian) else ():
            module, leaf = owner(bnn.model, name)
            if leaf == "weight" and name not in tied and stochastic.is_linear(module):
                random.add(name.rpartition(".")[0])
        gates = self._gating(bnn)
        gated = gates.layers(stochastic.LINEAR_LAYERS) if gates is not None else set()
        once = seen_once(bnn.model, inputs, sorted(random | gated)) if random | gated else set()
        if gates is not None:
            gates.stand_at(once & gated)
        noisy = sorted(once & random)
        for path in noisy:
            assert isinstance(self.family, DiagonalGaussian)
            stochastic.make_noisy(bnn.model.get_submodule(path), self.noise_at, self.family)
        bnn.state["noisy"] = noisy

    def _drawn_once(self, bnn: Bayesian) -> list[str]:
        """List the random parameters drawn once per pass instead of at pre-activations."""
        if isinstance(self.family, Point):
            return []
        noisy = set(bnn.state.get("noisy") or ())
        return [n for n in bnn.sites.names if n.rpartition(".")[0] not in noisy] if noisy else list(bnn.sites.names)

    def loss(self, bnn: Bayesian, batch: Batch, kl_weight: float | Tensor | None) -> Terms:
        """Compute the mean NLL over K draws, and the KL (see also `full_weight_elbo.py`)."""
        num_data = bnn.data_size()
        if kl_weight is None:
            kl_weight = bnn.scheduled(self.kl_schedule)
        inputs, targets = split_batch(batch)
        if not self.mean_field:
            return full_weight_terms(self, bnn, inputs, targets, kl_weight * self.temperature, num_data)
        if self.estimator == "mean":
            log_likelihood = bnn.likelihood.log_prob(self._mean_outputs(bnn, inputs), targets).mean()
            kl = self._weights(bnn)[2] if self.temperature else log_likelihood.new_zeros(())
            return Terms(-log_likelihood, kl, kl_weight * self.temperature, num_data)
        self._retype(bnn, inputs)
        gates = self._gating(bnn)
        drawn_once = self._drawn_once(bnn)
        means, spreads, kl = self._weights(bnn, stds_of=drawn_once if self.noise_at == "local" else None)
        nlls = []
        noise: Params = {}
        given = {name: (means[name], spreads[name]) for name in spreads}
        with stochastic.noise(bnn.model, on=True, given=given):
            for k in range(self.samples):
                mirror = self.antithetic and k % 2 == 1
                noise = {n: -e for n, e in noise.items()} if mirror else standard_normals_like(spreads, drawn_once)
                params = {n: (spreads[n] * noise[n]).add_(means[n]).to(means[n].dtype) for n in drawn_once}
                if gates is not None:
                    nlls.append(-gates.log_likelihood(inputs, targets, params))
                else:
                    nlls.append(bnn.likelihood.mean_nll(call(bnn.model, inputs, params), targets))
        nll = nlls[0] if len(nlls) == 1 else torch.stack(nlls).mean()
        return Terms(nll, kl, kl_weight * self.temperature, num_data)

    def kl(self, bnn: Bayesian) -> Tensor:
        """Compute KL(q ‖ p) of the remaining weights and of their gates."""
        assert self.mean_field
        return self._weights(bnn)[2]

    def _weights(self, bnn: Bayesian, stds_of: list[str] | None = None) -> tuple[Params, Params, Tensor]:
        """Compute μ and σ of every random parameter, and the KL.

        Points have no σ. The KL is that of the weights that are left.

        Args:
            bnn: the network.
            stds_of: the parameters to return σ for, if not all; for the others σ² is returned, as local noise needs.
        """
        means: Params = {}
        spreads: Params = {}
        log_stds: Params = {}
        family, gates = self.family, self._gating(bnn)
        kls = [] if gates is None else [gates.kl()]
        groups: dict[int, tuple[Prior, list[str]]] = {}
        for name, prior in bnn.priors.items():
            module, leaf = owner(bnn.model, name)
            mean = means[name] = getattr(module, leaf)
            log_std = family.log_std_of(module, leaf) if isinstance(family, DiagonalGaussian) else None
            kl = None if gates is None else gates.weight_kl(name, mean, log_std, prior)
            if log_std is None:
                kls.append(-log_prior({name: prior}, {name: mean}, bnn.masks) if kl is None else kl)
                continue
            log_stds[name] = log_std
            if kl is None and name not in bnn.masks:
                groups.setdefault(id(prior), (prior, []))[1].append(name)
                continue
            std = log_std.exp()
            spreads[name] = std if stds_of is None or name in stds_of else std.square()
            if kl is None:
                left = bnn.left(name)
                kl = prior.at(bnn.masks[name]).kl(mean.to(log_std.dtype).take(left), std.take(left), log_std.take(left))
            kls.append(kl)
        for prior, names in groups.values():
            squared = [stds_of is not None and name not in stds_of for name in names]
            found = prior.weights([means[name] for name in names], [log_stds[name] for name in names], squared)
            means |= zip(names, found[0], strict=True)
            spreads |= zip(names, found[1], strict=True)
            kls.append(found[2])
        if isinstance(family, DiagonalGaussian) and family.counts_otherwise:
            means |= {name: family.counted(means[name], log_std) for name, log_std in log_stds.items()}
        return means, spreads, kls[0] if len(kls) == 1 else torch.stack(kls).sum()

    @property
    def trains_plain_stds(self) -> bool:
        """Whether log σ of independent Gaussians is trained by Adam."""
        return type(self.family) is DiagonalGaussian and self.gates is None and self.estimator != "mean"

    def _log_stds(self, bnn: Bayesian) -> list[Tensor]:
        assert isinstance(self.family, DiagonalGaussian)
        return [self.family.log_std(bnn.model, name) for name in bnn.sites.names]

    def optimizer(self, bnn: Bayesian, lr: float) -> torch.optim.Optimizer:
        """Make an Adam optimizer, with a larger learning rate for log σ."""
        optimizer = super().optimizer(bnn, lr)
        if self.trains_plain_stds or isinstance(self.family, ZeroMean):
            stds = {id(log_std): log_std for log_std in self._log_stds(bnn)}
            (group,) = optimizer.param_groups
            group["params"] = [p for p in group["params"] if id(p) not in stds]
            optimizer.add_param_group({"params": list(stds.values()), "lr": self.std_rate * lr})
        return optimizer

    def fit(self, bnn: Bayesian, loader: Any, **options: Any) -> Fit:
        """Train as `bayeslim.train.fit`, and warn if deviations still move at the end."""
        if not self.trains_plain_stds:
            return super().fit(bnn, loader, **options)
        widths = Widths(lambda: self._log_stds(bnn))
        callbacks = [*options.pop("callbacks", ()), lambda epoch: widths.measure()]
        result = super().fit(bnn, loader, callbacks=callbacks, **options)
        result.details["std_change"] = widths.change
        widths.warn_if_moving()
        return result

    def condition(self, bnn: Bayesian, masks: Mapping[str, Tensor], **options: Any) -> None:
        """Condition the family on the zeros; correlated survivors move."""
        inside = {name: mask for name, mask in masks.items() if name in bnn.sites.names}
        self.family.assign(bnn.model, self._ungated(bnn).condition(inside, **options), inside)
        if self.gates is not None:
            gating.forget_masks(bnn)

    def _ungated(self, bnn: Bayesian) -> Posterior:
        return self.family.posterior(bnn.model, bnn.sites.names)

    def improper(self, bnn: Bayesian) -> list[str]:
        """Name the priors that do not integrate to one, of weights and gates."""
        if isinstance(self.family, Point):
            raise BayeslimError(
                "Weights that are points are no distribution, so there is no evidence. Use families.DiagonalGaussian()."
            )
        gates = [] if self.gates is None or self.gates.is_proper else [type(self.gates).__name__]
        return super().improper(bnn) + gates

    def posterior(self, bnn: Bayesian) -> Posterior:
        """Copy the current family as data, which further training does not change."""
        gates, base = self._gating(bnn), self._ungated(bnn)
        if gates is None:
            return base
        own = {name: bnn.model.get_parameter(name).detach().clone() for name in gates.parameters}
        points = {name: value for name, value in own.items() if name not in base.names}
        no_spread = {name: torch.zeros_like(value) for name, value in points.items()}
        return Gated(Diagonal({**base.mean, **points}, {**base.std, **no_spread}), gates.scales())

    def mean_params(self, bnn: Bayesian) -> Params:
        """Compute the weights of the mean network that differ from the trained parameters."""
        family, gates = self.family, self._gating(bnn)
        means: Params = {}
        if isinstance(family, DiagonalGaussian) and family.counts_otherwise:
            means = {name: family.mean(bnn.model, name) for name in bnn.sites.names}
        return means if gates is None else gates.mean_params(means)

    def _mean_outputs(self, bnn: Bayesian, inputs: Inputs) -> Tensor:
        with stochastic.noise(bnn.model, on=False), gating.drawing(bnn.model, on=False):
            return call(bnn.model, inputs, self.mean_params(bnn))

    def draw(self, bnn: Bayesian, inputs: Inputs) -> Tensor:
        """Compute the outputs of one draw with the noise of training, differentiable."""
        if self.estimator == "mean":
            return self._mean_outputs(bnn, inputs)
        family, gates = self.family, self._gating(bnn)
        if not isinstance(family, (DiagonalGaussian, Point)):
            q = family.density(bnn.model, bnn.sites.names, bnn.masks)
            component = torch.multinomial(
                q.log_weights.detach().exp(), 1, generator=current_generator(q.log_weights.device)
            )[0]
            return call(bnn.model, inputs, as_parameters(bnn, q.draw(q.noise(), component).weights))
        self._retype(bnn, inputs)
        params = {}
        for name in self._drawn_once(bnn):
            assert isinstance(family, DiagonalGaussian)
            mean, std = family.mean(bnn.model, name), family.std(bnn.model, name)
            params[name] = torch.addcmul(mean, std, standard_normal_like(std)).to(mean.dtype)
        with stochastic.noise(bnn.model, on=True):
            return call(bnn.model, inputs, params) if gates is None else gates.run(inputs, params)[0]
