"""The Laplace approximation: a Gaussian around a trained network, with the curvature of its loss as precision.

    p(w|D) ≈ N(w*, P⁻¹)        P = H + δ        H = Σ_n J_nᵀ (−∇²_f log p(y_n|f_n)) J_n,  the generalised Gauss-Newton

with w* the weights as they are (the MAP estimate) and δ = 1/std² the precision of a Normal prior. The structure of H is
Kronecker factors of each layer, its diagonal, the full matrix, or its leading eigenvectors. Predictions come from the
linearised network (`bayeslim.predict.linearised`), whose posterior this Gaussian is, in closed form.

MacKay 1992 · Ritter, Botev & Barber 2018 · Immer et al. 2021, arXiv:2008.08217
Daxberger et al. 2021, arXiv:2106.14806
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch

from bayeslim.bayesian import Bayesian
from bayeslim.curvature.kfac import MAX_FACTOR_SIDE
from bayeslim.errors import NonFiniteLoss, UnsupportedModel
from bayeslim.evidence import marginal_likelihood, tune_prior
from bayeslim.evidence.relevance import Per
from bayeslim.io.registry import register
from bayeslim.methods.shared.curvature_posterior import Curvature, Structure, current, examples_in, measured
from bayeslim.methods.shared.found_posterior import FoundPosterior
from bayeslim.methods.subnetwork import Subnetwork, settled
from bayeslim.noise import drawing_from, kept_random_state, random_seed
from bayeslim.posteriors import Gaussian
from bayeslim.predict import linearised, links
from bayeslim.priors import Normal
from bayeslim.replica import replicate
from bayeslim.results import Evidence, Fit, Prediction
from bayeslim.train import fit as train
from bayeslim.train.loaders import check_labelled
from bayeslim.train.seeding import ordered_by
from bayeslim.types import Batches, call, device_of, split_batch, to_device

MAX_SOLVED_OUTPUTS = 512
"""With more outputs an example than this, the linearised network is sampled rather than solved for."""

Tune = Literal["evidence", "online", "grid", "cross-validation"]

CHOICES: dict[str, tuple[str, ...]] = {
    "structure": get_args(Structure),
    "curvature": get_args(Curvature),
    "sharing": ("expand", "reduce"),
    "unsupported": ("diagonal", "point"),
    "damping": ("exact", "sqrt"),
}


@register("method")
@dataclass(frozen=True)
class Laplace(FoundPosterior):
    """The posterior of a network that is already trained.

    Attributes:
        structure: "kron", "diag", "full" or "lowrank"; "auto" is "kron", and "full" for a subnetwork.
        subset: which of the sites are random: "all", "last-layer", names (a string or several, as in `sites`), or a
            `Subnetwork`; the others stay at their values.
        curvature: "exact", a backward pass for every output; "signs", one pass with random signs, an unbiased estimate;
            "auto", exact where outputs times examples are at most 16,384, and signs for more or for data of unknown
            size; "sampled", the Fisher information with sampled targets; "empirical", the observed targets; "kfra", the
            recursion for feed-forward networks (Kronecker only); "hutchinson", the Hessian's diagonal (diagonal only).
        sharing: how positions that share weights (convolutions, sequences) are counted, "expand" or "reduce".
        corrected: whether the eigenvalues of Kronecker factors are measured in a second pass (EKFAC).
        unsupported: parameters without Kronecker factors (norms, attention's projections, tied weights) get a
            "diagonal", or stay a "point".
        damping: "exact" adds the prior precision to Kronecker factors exactly; "sqrt" is the usual approximation.
        rank: how many eigenvectors "lowrank" keeps.
        max_side: the largest side of a Kronecker factor. A larger one is kept as a diagonal, with a warning that names
            the memory it would take; `fit` returns which in `details["diagonal_factors"]`, and plans have a note.

    The relative error of "signs": with K outputs, the curvature along a direction that N examples determine equally has
    a standard deviation of √(2 (1 − 1/K) / N) of itself. That is 18 % for 60 examples, 3 % for 2,000 and 0.6 % for
    60,000 (K large). The signs follow from `fit(seed=...)`: another seed is another estimate.

    Predictions, `bl.predict(bnn, x, how=...)`, average over the Gaussian outputs of the linearised network:

        "auto"             as near to the exact average as is cheap: exact for values and counts, by quadrature for
                           binary targets, by a fixed quasi-random rule for classes
        "joint"            the average over random draws of the outputs, `samples` of them
        "extended-probit"  a closed form for classes that compares every two classes, with their correlations
        "probit"           a closed form that shrinks each logit by its own variance alone; too unsure for classes
        "bridge"           a Dirichlet for classes, close to the plain network's probabilities
        "sample"           networks drawn from the posterior, not linearised
        "mean", "map"      the plain network

    For classes see `benchmarks/README.md` for how far each is from the exact average. "bridge" often has a better
    log-likelihood than the exact average: that says that the posterior is too wide under the given prior (tune it by
    `fit(tune=...)`), not that the bridge averages better.
    """

    structure: Structure = "auto"
    subset: str | tuple[str, ...] | Subnetwork = "all"
    curvature: Curvature = "auto"
    sharing: Literal["expand", "reduce"] = "expand"
    corrected: bool = False
    unsupported: Literal["diagonal", "point"] = "diagonal"
    damping: Literal["exact", "sqrt"] = "exact"
    rank: int = 100
    max_side: int = MAX_FACTOR_SIDE

    name: ClassVar[str] = "laplace"
    missing: ClassVar[str] = (
        "A Laplace posterior exists once the curvature has been measured: call bnn.fit(loader) on the trained "
        "network, or bnn.fit(loader, epochs=...) to train it first."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "subset", settled(self.subset))
        for setting, allowed in CHOICES.items():
            if getattr(self, setting) not in allowed:
                raise ValueError(f"{setting} must be one of {', '.join(allowed)}. Got {getattr(self, setting)!r}.")
        if isinstance(self.subset, Subnetwork) and self.kind != "full":
            raise ValueError(f'A subnetwork has a full covariance: use structure="full". Got {self.structure!r}.')
        for only, setting in (("kron", "kfra"), ("diag", "hutchinson")):
            if self.curvature == setting and self.kind != only:
                raise ValueError(f'curvature="{setting}" is for structure="{only}". Got {self.kind!r}.')
        for setting in ("rank", "max_side"):
            if getattr(self, setting) < 1:
                raise ValueError(f"{setting} must be at least 1. Got {getattr(self, setting)}.")

    @property
    def kind(self) -> str:
        """The structure that "auto" stands for."""
        if self.structure != "auto":
            return self.structure
        return "full" if isinstance(self.subset, Subnetwork) else "kron"

    def prior_factors(self, bnn: Bayesian) -> dict[str, float]:
        """Scale the priors of a subnetwork of S of D weights by √(D/S), once it is fitted."""
        posterior = bnn.state.get("posterior")
        if not isinstance(self.subset, Subnetwork) or posterior is None:
            return {}
        return dict.fromkeys(posterior.names, (bnn.sites.size / self.subset.size) ** 0.5)

    def convert(self, bnn: Bayesian) -> None:
        """Refuse a prior that is not Normal, before any work."""
        for name, prior in bnn.priors.items():
            if not isinstance(prior, Normal):
                raise UnsupportedModel(
                    f'Laplace needs a Normal prior, whose precision is added to the curvature. "{name}" has '
                    f"{type(prior).__name__}. Use prior=priors.Normal(std), or bl.Variational() for this one."
                )

    def fit_stack(self, stack: Any, networks: Sequence[Bayesian], loader: Any, **options: Any) -> Fit:
        """Train all MAP estimates at once, and measure the curvature of each."""
        result = super().fit_stack(stack, networks, loader, **options)
        for network, own in zip(networks, loader.loaders, strict=True):
            self.fit(network, own, progress=False)
        return result

    def fit(
        self,
        bnn: Bayesian,
        loader: Any,
        *,
        epochs: int | None = None,
        tune: Tune | None = None,
        per_layer: bool = False,
        per: Per | None = None,
        tune_every: int = 5,
        folds: int = 5,
        validate: Any = None,
        dtype: torch.dtype | None = None,
        seed: int | None = None,
        progress: bool = True,
        **training: Any,
    ) -> Fit:
        """Measure the curvature at the network's weights, after training if asked to.

        Args:
            bnn: the network.
            loader: batches of inputs and targets, gone over once or a few times.
            epochs: train the MAP estimate this long first.
            tune: how to choose the prior precision (and a learned Gaussian noise, by evidence): "evidence" maximises
                the marginal likelihood afterwards, "online" also every few epochs of training; "grid" takes the best
                of a grid on `validate`; "cross-validation" the best on held-out parts of the data.
            per_layer: whether each layer gets a prior precision of its own, for the two by evidence; `per="layer"`.
            per: the weights that share a prior precision, for the two by evidence: those of the "network", a "layer", a
                "unit" (a row) or each "weight" alone. The last two need structure="diag". During training
                (tune="online") they make a network that can be cut further (see `bayeslim.evidence.relevance`).
            tune_every: epochs between two tunings online.
            folds: parts of the data for cross-validation.
            validate: validation data, for "grid" and for training.
            dtype: to accumulate the curvature in, such as torch.float64.
            seed: of training, and of the random signs or samples of the curvature (0 if not given); it makes the run
                repeat, and leaves the global random state as it was.
            progress: show a progress bar.
            **training: options of `bayeslim.train.fit`, with `epochs`.
        """
        _check_options(tune, epochs, validate, training)
        shared = self._sharing(per, per_layer, tune)
        if hasattr(loader, "__next__"):  # a generator: several passes need to see all of it
            loader = list(loader)
        points: dict[str, str] = {}

        def measure(network: Bayesian, data: Any) -> Gaussian:
            found = measured(network, self, data, dtype=dtype, seed=seed or 0, progress=progress)
            points.update(found.points)
            result.details["curvature"] = found.curvature
            result.details["diagonal_factors"] = dict(found.diagonal_factors)
            network.state["posterior"] = found.posterior
            return found.posterior

        def tune_online(epoch: train.Epoch) -> None:
            if epoch.number % tune_every == 0:
                measure(bnn, loader)
                epoch.metrics["log_evidence"] = tune_prior.by_evidence_(bnn, loader, shared, in_place=True)

        result = Fit()
        if epochs is not None:
            if tune == "online":
                tune_prior.hold_in_tensors_(bnn, shared)
            callbacks = [*training.pop("callbacks", ()), *([tune_online] if tune == "online" else [])]
            options = {"validate": validate, "seed": seed, "progress": progress, "callbacks": callbacks, **training}
            result = train.fit(bnn, loader, epochs=epochs, **options)
        else:
            _check_first_batch(bnn, loader)
        started = time.monotonic()
        with kept_random_state():
            if seed is not None:
                torch.manual_seed(seed)
            measure(bnn, loader)
            if tune in ("evidence", "online"):
                result.details["log_evidence"] = tune_prior.by_evidence_(bnn, loader, shared)
            elif tune == "grid":
                tune_prior.by_validation_(bnn, validate)
            elif tune == "cross-validation":
                tune_prior.by_cross_validation_(bnn, loader, measure, folds)
        if not bnn.num_data_given:
            bnn.num_data = examples_in(loader)
        result.details["points"] = points
        result.seconds += time.monotonic() - started
        return result

    def _sharing(self, per: Per | None, per_layer: bool, tune: Tune | None) -> Per:
        """Check and return the weights that share a prior precision."""
        if per not in (None, *get_args(Per)):
            raise ValueError(f"per must be one of {', '.join(get_args(Per))}. Got {per!r}.")
        if per is not None and (tune not in ("evidence", "online") or (per_layer and per != "layer")):
            raise ValueError(
                f'per="{per}" says which precisions are tuned by evidence: pass tune="evidence" or "online", and leave '
                f"per_layer out. Got tune={tune!r}, per_layer={per_layer!r}."
            )
        if per in ("unit", "weight") and self.kind != "diag":
            raise ValueError(f'per="{per}" needs structure="diag". Got {self.kind!r}: use bl.Laplace("diag").')
        return per or ("layer" if per_layer else "network")

    def predictive(
        self, bnn: Bayesian, batches: Batches, samples: int, how: str, generator: torch.Generator | None
    ) -> Prediction | None:
        """Predict with the linearised network, in closed form where there is one."""
        if how == "sample":
            return None
        if how in ("mean", "map"):
            return bnn.likelihood.predict(torch.cat([call(bnn.model, x) for x in batches()]).unsqueeze(0))
        if how not in links.LINKS:
            ways = ", ".join((*links.LINKS, "sample", "mean", "map"))
            raise ValueError(f"how must be one of {ways} for laplace. Got {how!r}.")
        posterior = current(bnn)
        first = call(bnn.model, next(iter(batches())))
        solved = linearised.has_closed_form(posterior) and first[0].numel() <= MAX_SOLVED_OUTPUTS
        if not solved and how in ("auto", "glm", "joint"):
            draws = linearised.linearised_draws(bnn.model, posterior, batches, samples, generator)
            return bnn.likelihood.predict(draws)
        with drawing_from(generator):
            seed = random_seed()  # for the same draws in every part of the inputs, however large the parts are
        return links.concatenate(
            [
                links.summarise(
                    bnn.likelihood, mean, covariance, samples, how, torch.Generator(mean.device).manual_seed(seed)
                )
                for mean, covariance in links.gathered(linearised.output_gaussians(bnn.model, posterior, batches()))
            ]
        )

    def evidence(self, bnn: Bayesian, loader: Any, samples: int, generator: torch.Generator | None) -> Evidence:
        """Compute the Gaussian's marginal likelihood; exact for linear-Gaussian networks."""
        posterior = current(bnn)
        data = marginal_likelihood.data_term(bnn.model, bnn.likelihood, loader)
        value = marginal_likelihood.log_marginal_likelihood(data.value, posterior, tune_prior.prior_mean(bnn))
        return Evidence(float(value), "laplace", is_bound=False, num_data=data.examples)


def _check_first_batch(bnn: Bayesian, loader: Any) -> None:
    """Refuse data that do not fit the network or the likelihood, as training would.

    The curvature does not read the targets, and would not find out.
    """
    with torch.no_grad(), ordered_by(loader, 0):
        batch = next(iter(loader), None)
        if batch is None:
            return
        inputs, targets = to_device(split_batch(batch), device_of(bnn.model))
        bnn.likelihood.check_targets(targets)
        outputs = call(replicate(bnn.model), inputs)
        each = bnn.likelihood.log_prob(outputs, targets)
        bnn.likelihood.check_outputs(outputs)
        check_labelled(bnn.likelihood, (split_batch(batch)[1] for batch in loader))
    if not bool(torch.isfinite(each).all()):
        raise NonFiniteLoss(
            f"The log-likelihood of the first batch is {float(each[~torch.isfinite(each)][0])}. Look for NaN or "
            "infinite values in the inputs, the targets or the network's weights."
        )


def _check_options(tune: str | None, epochs: int | None, validate: Any, training: Mapping[str, Any]) -> None:
    if tune not in (None, *get_args(Tune)):
        raise ValueError(f"tune must be one of {', '.join(get_args(Tune))}, or None. Got {tune!r}.")
    if epochs is None and training:
        raise TypeError(
            f"{', '.join(training)} are options of training, and without epochs=... only the curvature is measured. "
            "Pass epochs=... too, or leave them out."
        )
    if tune == "online" and epochs is None:
        raise ValueError('tune="online" chooses the prior during training: pass epochs=..., or use tune="evidence".')
    if tune == "online" and training.get("checkpoint") is not None:
        raise ValueError('A checkpoint does not hold the prior, which tune="online" changes. Use one or the other.')
    if tune == "grid" and validate is None:
        raise ValueError('tune="grid" measures each prior precision on validation data: pass validate=...')
