"""Recipes: a method with its prior and its training, for a purpose, with settings that are known to work together.

    recipe = bl.recipes.sparse_vd()
    bnn = bl.bayesianize(model, likelihood=bl.likelihoods.Categorical(), **recipe)    # method and prior
    bnn.fit(loader, **recipe.fit)
    pruned = bl.fine_tune(bl.prune(bnn, recipe.budget, **recipe.cut), loader, **recipe.fine_tune)

or all of it at once, `bl.compress(model, train, val, recipe=recipe)`. Start from a trained network. Printed, a recipe
says what it does. Every part can be exchanged: schedules, families, priors and gates go together as they like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bayeslim import families, gates, priors
from bayeslim.methods.base import Method
from bayeslim.methods.variational import Variational
from bayeslim.priors import Prior
from bayeslim.prune import Budget
from bayeslim.train.schedules import Schedule, Uniform, Warmup


@dataclass(frozen=True)
class Recipe(Mapping[str, Any]):
    """A method and all that goes with it; as a mapping, what `bayesianize` needs: method and prior.

    Attributes:
        name: what it is called.
        about: what it does.
        method: how the posterior is found.
        prior: of the weights.
        fit: options of `bnn.fit`.
        budget: what to cut afterwards; None where nothing goes by itself.
        cut: how, the options of `bayeslim.prune`.
        fine_tune: options of `bayeslim.fine_tune`.
    """

    name: str
    about: str
    method: Method
    prior: Prior
    fit: Mapping[str, Any]
    budget: Budget | None = None
    cut: Mapping[str, Any] = field(default_factory=dict)
    fine_tune: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        if key not in ("method", "prior"):
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(("method", "prior"))

    def __len__(self) -> int:
        return 2

    def __repr__(self) -> str:
        lines = [f"{self.name}: {self.about}", f"  method     {self.method}", f"  prior      {self.prior}"]
        lines.append(f"  fit        {_words(self.fit)}")
        if self.budget is not None:
            lines.append(f"  prune      {self.budget}, {_words(self.cut)}")
            lines.append(f"  fine_tune  {_words(self.fine_tune)}")
        return "\n".join(lines)


def sparse_vd(epochs: int = 100, prior: Prior | None = None, temperature: float = 1.0) -> Recipe:
    """Sparse Variational Dropout: most weights drown in their own noise, and go.

    The KL is off for the first twentieth of training and rises until three tenths of it; weights with log α > 3 count
    as zero while training goes on; those with log α > 1 are cut, and the rest trained on.

    Args:
        epochs: of training.
        prior: `priors.LogUniform()` if not given.
        temperature: a factor on the KL. Large networks whose images are moved and mirrored in training, so that there
            are more of them than the data has, need less than 1: 0.1 for the VGG-like network on CIFAR-10.
    """
    method = Variational(families.SparseGaussian(), kl_schedule=_warm(epochs), temperature=temperature)
    prior = priors.LogUniform() if prior is None else prior
    return _sparse("sparse_vd", "single weights go", method, prior, epochs, -1.0, "log_alpha")


def relevance(epochs: int = 100) -> Recipe:
    """The same with a scale of its own for every weight, at its optimum: automatic relevance determination."""
    return _sparse(
        "relevance", "single weights go", Variational(families.SparseGaussian(), kl_schedule=_warm(epochs)),
        priors.RelevanceDetermination(), epochs, -1.0, "log_alpha",
    )  # fmt: skip


def bottleneck(strength: float = 0.1, epochs: int = 100) -> Recipe:
    """Gates that pay for the information they let through (VIBNet), by the weights that go with them: units go.

    Args:
        strength: nats that a nat of information costs, for each of these weights; more of it leaves fewer units. The
            nats are those of the whole training set, so that few data bear less: 0.025 for a thousand small digits.
        epochs: of training.
    """
    gate = gates.InformationBottleneck(strength=strength, per="weight")
    return _gated("bottleneck", gate, families.Point(), epochs)


def horseshoe(epochs: int = 100) -> Recipe:
    """Scales of units under half-Cauchy priors: units go, and few that are needed.

    Weights are points. With Gaussian ones, as in the paper, scales have no gap between those of units that are needed
    and the others, and where to cut would have to be chosen on validation data.
    """
    return _gated("horseshoe", gates.HalfCauchy(), families.Point(), epochs)


def jeffreys(epochs: int = 100) -> Recipe:
    """Scales of units under log-uniform priors, variational dropout of whole units: units go, and few that are needed.

    Weights are points; Gaussian ones, as in the paper, leave fewer units and larger errors.
    """
    return _gated("jeffreys", gates.NormalJeffreys(), families.Point(), epochs)


def log_normal(epochs: int = 100) -> Recipe:
    """Structured Bayesian pruning: truncated log-normal noise on units."""
    return _gated("log_normal", gates.TruncatedLogNormal(), families.Point(), epochs)


def l0(cost: float = 100.0, epochs: int = 100) -> Recipe:
    """Hard-concrete gates: every open one has a price.

    Args:
        cost: nats for an open gate. Few data bear less: 30 for a thousand small digits.
        epochs: of training.
    """
    return _gated("l0", gates.HardConcrete(cost=cost), families.Point(), epochs)


def weights_and_units(epochs: int = 100) -> Recipe:
    """Sparse Variational Dropout with a gate on every unit: weights go, and units that have lost theirs."""
    method = Variational(families.SparseGaussian(), gates=gates.NormalJeffreys(), kl_schedule=_warm(epochs))
    return _sparse(
        "weights_and_units", "weights and units go", method, priors.LogUniform(), epochs, -1.0, "log_alpha"
    )  # fmt: skip


def gaussian_dropout(rate: float = 0.2, epochs: int = 50) -> Recipe:
    """Multiplicative Gaussian noise of a fixed rate on every weight: uncertainty, and no sparsity.

    The prior is log-uniform, under which the KL is a constant; another one would keep weights away from zero.

    Args:
        rate: the drop probability p of binary dropout with as much noise, α = p/(1 − p).
        epochs: of training.
    """
    method = Variational(families.DropoutGaussian(rate=rate, learn=False))
    return Recipe("gaussian_dropout", "noise of a fixed rate", method, priors.LogUniform(), _training(epochs))


def variational_dropout(epochs: int = 50) -> Recipe:
    """The original variational dropout: the noise of every unit is learned, α ≤ 1."""
    method = Variational(families.DropoutGaussian(per="unit", largest=1.0), kl_schedule=_warm(epochs))
    about = "noise of units is learned, up to α = 1"
    return Recipe("variational_dropout", about, method, priors.LogUniform(), _training(epochs))


def concrete_dropout(rate: float = 0.2, epochs: int = 50) -> Recipe:
    """Binary dropout as a posterior, its rates learned through the concrete relaxation.

    Args:
        rate: the drop probability at the start.
        epochs: of training.
    """
    method = Variational(families.Point(), gates=gates.Bernoulli(rate=rate, learn="concrete"))
    return Recipe("concrete_dropout", "rates of dropout are learned", method, priors.Normal(1.0), _training(epochs))


RECIPES: dict[str, Callable[..., Recipe]] = {
    recipe.__name__: recipe
    for recipe in (
        sparse_vd, relevance, bottleneck, horseshoe, jeffreys, log_normal, l0, weights_and_units, gaussian_dropout,
        variational_dropout, concrete_dropout,
    )
}  # fmt: skip
"""Recipes by name, for the command line; a new one is added here."""


def _gated(name: str, gate: gates.Gate, family: families.Family, epochs: int) -> Recipe:
    method = Variational(family, gates=gate, kl_schedule=_warm(epochs))
    recipe = _sparse(name, "units go", method, priors.Normal(1.0), epochs, gate.threshold, "gates")
    # A network without its units is another one, which takes longer to train than one without single weights.
    tuning = {"epochs": max(1, round(0.8 * epochs)), "lr": 1e-3, "lr_schedule": "cosine"}
    return replace(recipe, fine_tune=tuning)


def _sparse(
    name: str, about: str, method: Method, prior: Prior, epochs: int, threshold: float, criterion: str
) -> Recipe:
    budget = Budget(threshold=threshold, empty_layers="keep best")
    tuning = {"epochs": max(1, round(0.3 * epochs)), "lr": 5e-4, "lr_schedule": "cosine"}
    return Recipe(name, about, method, prior, _training(epochs), budget, {"criterion": criterion}, tuning)


def _warm(epochs: int) -> Schedule:
    return Warmup(start=0.05 * epochs, end=0.3 * epochs) if epochs > 1 else Uniform()


def _training(epochs: int) -> dict[str, Any]:
    if type(epochs) is not int or epochs < 1:
        raise ValueError(f"epochs must be a whole number, at least 1. Got {epochs!r}.")
    return {"epochs": epochs, "lr": 1e-3, "lr_schedule": "half-then-linear"}


def _words(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())
