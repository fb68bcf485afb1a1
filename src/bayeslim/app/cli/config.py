"""The settings of a compression, which are kept in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from bayeslim.app.cli import sources
from bayeslim.app.cli.calls import BadSetting
from bayeslim.app.cli.toml import TomlSettings
from bayeslim.app.compress import Compressed, compress
from bayeslim.prune import Budget
from bayeslim.prune.budget import COUNTED, MEASURED

FILE = "run.toml"
DEFAULT_LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Settings(TomlSettings):
    """All settings of `bayeslim compress`; the flags' help says what they mean."""

    command: ClassVar[str] = "compress"
    file: ClassVar[str] = FILE

    weights: str | None = None
    method: str | None = None
    recipe: str | None = None
    prior: str | None = None
    likelihood: str | None = None
    epochs: int | None = None
    lr: float | None = None
    sparsity: float | None = None
    parameters: int | None = None
    flops: float | None = None
    bytes: float | None = None
    threshold: float | None = None
    latency: float | None = None
    max_error_increase: float | None = None
    evidence: bool = False
    scope: str = "global"
    protect: list[str] | None = None
    keep_best: bool = True
    granularity: str = "weight"
    criterion: str | None = None
    steps: int | None = None
    fine_tune: int = 0
    formats: list[str] | None = None
    baseline: bool = True
    batch_size: int = 128
    validation: float = 0.1
    seed: int = 0
    device: str = "auto"

    @property
    def budget(self) -> Budget | None:
        """The amount to cut; None for an N:M pattern without a goal."""
        return budget(vars(self), needs_none=":" in self.granularity or self.recipe is not None)

    def run(self) -> Compressed:
        """Compress, or go on with it; a run that is complete is read."""
        goal, device = self.budget, sources.device_by_name(self.device)
        loaders = sources.data_by_name(self.data, self.batch_size, self.validation, self.seed, device)
        weights = Path(self.weights) if self.weights else None
        model = sources.model_by_name(self.model, weights, self.seed).to(device)
        recipe = sources.recipe_by_name(self.recipe, self.epochs) if self.recipe else None
        rate = {} if self.lr is None else {"lr": self.lr}  # a recipe has its own, and its own epochs
        if recipe is None:
            rate = {"lr": DEFAULT_LEARNING_RATE, **rate}
            training = {"epochs": self.epochs, **rate} if self.epochs else None
        else:
            training = rate
        likelihood = sources.likelihood_by_name(self.likelihood) if self.likelihood else None
        if recipe is not None and self.weights is None:
            usual = {**recipe.fit, **rate}["lr"]
            model = sources.trained_as_usual(model, loaders, likelihood, recipe, usual, self.seed)
        return compress(
            model,
            loaders.train,
            loaders.val,
            budget=goal,
            out=self.out,
            method=sources.method_by_name(self.method) if self.method else None,
            recipe=recipe,
            likelihood=likelihood,
            prior=sources.prior_by_name(self.prior) if self.prior else None,
            fit=training,
            granularity=self.granularity,
            criterion=self.criterion,
            steps=self.steps,
            fine_tune={"epochs": self.fine_tune, **rate} if self.fine_tune else None,
            test=loaders.test,
            formats=self.formats,
            baseline=self.baseline,
            seed=self.seed,
        )


def budget(given: Mapping[str, Any], needs_none: bool = False) -> Budget | None:
    """Build the budget from flags; with `needs_none` there may be no goal."""
    goals: dict[str, Any] = {
        goal: given.get(goal) for goal in (*COUNTED, *MEASURED) if given.get(goal) not in (None, False)
    }
    if not goals and needs_none:
        return None
    if len(goals) != 1:
        flags = ", ".join(f"--{goal.replace('_', '-')}" for goal in (*COUNTED, *MEASURED))
        raise BadSetting(f"Say how much to cut with exactly one of {flags}. Got {', '.join(goals) or 'none'}.")
    rest: dict[str, Any] = {
        "scope": given.get("scope") or "global",
        "protect": given.get("protect") or (),
        "empty_layers": "refuse" if given.get("keep_best") is False else "keep best",
    }
    try:
        return Budget(**goals, **rest)
    except (TypeError, ValueError) as error:
        raise BadSetting(str(error)) from error
