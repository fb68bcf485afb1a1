"""Recipes: methods with a prior, training options and a budget that work together.

    recipe = bl.recipes.sparse_vd()
    bnn = bl.bayesianize(model, likelihood=bl.likelihoods.Categorical(), **recipe)    # method and prior
    bnn.fit(loader, **recipe.fit)
    pruned = bl.fine_tune(bl.prune(bnn, recipe.budget, **recipe.cut), loader, **recipe.fine_tune)

or all of it at once, `bl.compress(model, train, val, recipe=recipe)`. Start from a trained network. Printing a
recipe lists its parts. Every part can be exchanged: schedules, families, priors and gates combine freely.
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
    """A method and everything that goes with it.

    As a mapping it holds the method and the prior, the arguments of `bayesianize`.

    Attributes:
        name: its name.
        about: its effect, in a few words.
        method: the method of inference.
        prior: of the weights.
        fit: options of `bnn.fit`.
        budget: the budget of the cut afterwards; None without a cut.
        cut: options of `bayeslim.prune`.
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
    """Make Sparse Variational Dropout: weights with more noise than signal are cut.

    The KL is off for the first twentieth of training and rises until three tenths of it; weights with log α > 3 count
    as zero while training goes on; those with log α > 1 are cut, and the rest trained on.

    Args:
        epochs: the number of training epochs.
        prior: `priors.LogUniform()` if not given.
        temperature: a factor on the KL. Large networks trained with data augmentation need less than 1: 0.1 for the
            VGG-like network on CIFAR-10.
    """
    method = Variational(families.SparseGaussian(), kl_schedule=_warm(epochs), temperature=temperature)
    prior = priors.LogUniform() if prior is None else prior
    return _sparse("sparse_vd", "single weights go", method, prior, epochs, -1.0, "log_alpha")


def relevance(epochs: int = 100) -> Recipe:
    """Make Sparse Variational Dropout with automatic relevance determination.

    The prior of every weight has a scale of its own, always at its optimum.
    """
    return _sparse(
        "relevance", "single weights go", Variational(families.SparseGaussian(), kl_schedule=_warm(epochs)),
        priors.RelevanceDetermination(), epochs, -1.0, "log_alpha",
    )  # fmt: skip


def bottleneck(strength: float = 1.0, epochs: int = 100) -> Recipe:
    """Make the variational information bottleneck (VIBNet): units are cut.

    A gate pays for the information that it passes on, in proportion to the weights that go with it.

    Args:
        strength: what the loss of an example rises by, in nats, where every gate passes on one nat; a larger one leaves
            fewer units. It means the same for networks and data sets of any size.
        epochs: the number of training epochs.
    """
    gate = gates.InformationBottleneck(strength=strength, per="example")
    return _gated("bottleneck", gate, families.Point(), epochs)


def horseshoe(epochs: int = 100) -> Recipe:
    """Make scales of units under half-Cauchy priors: units are cut.

    Weights are points. With Gaussian weights, as in the paper, the scales of needed and of other units overlap, and the
    threshold would have to be chosen on validation data.
    """
    return _gated("horseshoe", gates.HalfCauchy(), families.Point(), epochs)


def jeffreys(epochs: int = 100) -> Recipe:
    """Make scales of units under log-uniform priors: units are cut.

    This is variational dropout of whole units. Weights are points; Gaussian weights, as in the paper, leave fewer units
    and larger errors.
    """
    return _gated("jeffreys", gates.NormalJeffreys(), families.Point(), epochs)


def log_normal(epochs: int = 100) -> Recipe:
    """Make structured Bayesian pruning: truncated log-normal noise on units."""
    return _gated("log_normal", gates.TruncatedLogNormal(), families.Point(), epochs)


def l0(cost: float = 100.0, epochs: int = 100) -> Recipe:
    """Make hard-concrete gates, where every open gate has a cost: units are cut.

    Args:
        cost: the cost of an open gate in nats. Small data sets need a smaller one: 30 for a thousand small digits.
        epochs: the number of training epochs.
    """
    return _gated("l0", gates.HardConcrete(cost=cost), families.Point(), epochs)


def lora_ranks(strength: float = 5.0, epochs: int = 100) -> Recipe:
    """Make an information bottleneck on the ranks of LoRA adapters: ranks are cut.

    It is for models of `peft.get_peft_model`. A gate stands between the two matrices of an adapter at every rank, and
    pays for the information that it passes on, in proportion to the weights of the rank. After the cut
    `bayeslim.compact` gives an adapter of fewer ranks, different from layer to layer (PEFT's `rank_pattern`).

    Args:
        strength: what the loss of an example rises by, in nats, where every gate passes on one nat; a larger one leaves
            fewer ranks. The default was chosen on transformers of 24 and 128 units, out of 2, 5 and 10.
        epochs: the number of training epochs.
    """
    # B starts at zero, so that noise harms nothing at first; from a small σ gates would not close in a short training
    gate = gates.InformationBottleneck(strength=strength, per="example", initial_std=0.3)
    recipe = _gated("lora_ranks", gate, families.Point(), epochs)
    assert isinstance(recipe.method, Variational)
    return replace(recipe, about="ranks go", method=replace(recipe.method, gate_at={r".*\.lora_B\..*": "inputs"}))


def weights_and_units(epochs: int = 100) -> Recipe:
    """Make Sparse Variational Dropout with a gate on every unit: both are cut."""
    method = Variational(families.SparseGaussian(), gates=gates.NormalJeffreys(), kl_schedule=_warm(epochs))
    return _sparse(
        "weights_and_units", "weights and units go", method, priors.LogUniform(), epochs, -1.0, "log_alpha"
    )  # fmt: skip


def gaussian_dropout(rate: float = 0.2, epochs: int = 50) -> Recipe:
    """Make Gaussian dropout of a fixed rate on every weight: nothing is cut.

    The prior is log-uniform, under which the KL is a constant; another prior would keep weights away from zero.

    Args:
        rate: the drop probability p of binary dropout with the same noise, α = p/(1 − p).
        epochs: the number of training epochs.
    """
    method = Variational(families.DropoutGaussian(rate=rate, learn=False))
    return Recipe("gaussian_dropout", "noise of a fixed rate", method, priors.LogUniform(), _training(epochs))


def variational_dropout(epochs: int = 50) -> Recipe:
    """Make the original variational dropout: the noise of units is learned, α ≤ 1."""
    method = Variational(families.DropoutGaussian(per="unit", largest=1.0), kl_schedule=_warm(epochs))
    about = "noise of units is learned, up to α = 1"
    return Recipe("variational_dropout", about, method, priors.LogUniform(), _training(epochs))


def concrete_dropout(rate: float = 0.2, epochs: int = 50) -> Recipe:
    """Make binary dropout with rates learned by the concrete relaxation.

    Args:
        rate: the initial drop probability.
        epochs: the number of training epochs.
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
"""Recipes by name, for the command line."""


def _gated(name: str, gate: gates.Gate, family: families.Family, epochs: int) -> Recipe:
    method = Variational(family, gates=gate, kl_schedule=_warm(epochs))
    recipe = _sparse(name, "units go", method, priors.Normal(1.0), epochs, gate.threshold, "gates")
    # Fine-tuning takes longer after a cut of units than after one of single weights.
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
