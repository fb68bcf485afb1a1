"""Out-of-distribution alarms: scores that are high on inputs unlike the training data.

    entropy               H[E_q p(y|x, w)]                           all uncertainty about the class
    mutual information    H[E_q p] − E_q H[p]                        what the networks of the posterior disagree about
    output variance       Σ_c Var_q f_c(x, w)                        the spread of the outputs themselves
    energy                −E_q log Σ_c exp f_c(x, w)                 how little evidence there is for any class
    density               min_c (h − μ_c)ᵀ Σ⁻¹ (h − μ_c)             distance of the features h to the nearest class

The features are the inputs of the last linear or convolution layer of the mean network; μ_c and one Σ for all classes
are measured on training data. Values have the entropy of no class: there the variance and its epistemic part are
compared. The scores of pixels are averaged over an image.

Lee et al. 2018, arXiv:1807.03888 · Liu et al. 2020, arXiv:2010.03759
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayeslim.bayesian import Bayesian
from bayeslim.decide.predictors import Predictor, Predicts
from bayeslim.errors import BayeslimError, UnsupportedModel
from bayeslim.likelihoods import Likelihood
from bayeslim.metrics import aupr, auroc, fpr_at_95
from bayeslim.replica import replicate
from bayeslim.results import Prediction
from bayeslim.train.loaders import check_loader
from bayeslim.types import Inputs, call, device_of, inputs_of, split_batch, to_device

FEATURE_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose inputs are features."""

DISAGREEMENTS = ("mutual information", "epistemic variance")
"""Scores that are zero for one network, and then left out."""

LEAST_ENERGY = 1e-3
"""Log-probabilities, such as those of an exported posterior, have no energy but rounding errors, which are left out."""

RIDGE = 1e-3
"""Added to the covariance of features, relative to its mean variance: few data leave directions without any."""

LEAST_SHARE = 1e-6
"""The least mean variance inside classes that is assumed, relative to that of all features."""


@dataclass(frozen=True)
class Alarms:
    """How well scores tell outside inputs from inside ones.

    Attributes:
        rows: by score: "auroc", "aupr" (outside is the positive class) and "fpr95", the fraction of inside inputs that
            alarm when 95 % of the outside ones do.
    """

    rows: dict[str, dict[str, float]]

    @property
    def best(self) -> str:
        """The score with the largest AUROC."""
        return max(self.rows, key=lambda name: self.rows[name]["auroc"])

    def __repr__(self) -> str:
        lines = [f"{'':20}{'AUROC':>8}{'AUPR':>8}{'FPR95':>8}"]
        lines += [f"{name:20}{r['auroc']:8.3f}{r['aupr']:8.3f}{r['fpr95']:8.3f}" for name, r in self.rows.items()]
        return "\n".join(lines)


def alarms(
    predictor: Predictor,
    inside: Iterable[Any],
    outside: Iterable[Any],
    *,
    train: Iterable[Any] | None = None,
    likelihood: Likelihood | None = None,
    **options: Any,
) -> Alarms:
    """Compare out-of-distribution scores on data inside and outside.

    Args:
        predictor: a Bayesian network, a plain, slim or distilled one, or a function from inputs to outputs.
        inside: batches like the training data, with or without targets.
        outside: batches of other data.
        train: training data with targets, for the density of features; without it that score is left out.
        likelihood: what the outputs mean, where the predictor is not Bayesian.
        **options: of `bayeslim.predict`, for a Bayesian network.
    """
    for name, loader in (("inside", inside), ("outside", outside), ("train", train)):
        check_loader(loader, name)
    predicts = Predicts(predictor, likelihood, options)
    density = None if train is None else FeatureDensity(_network(predictor), train, predicts.ignored)
    found = [_scores_over(predicts, loader, density) for loader in (inside, outside)]
    return Alarms(
        {
            name: {"auroc": auroc(low, high), "aupr": aupr(low, high), "fpr95": fpr_at_95(low, high)}
            for (name, low), high in zip(found[0].items(), found[1].values(), strict=True)
            if (name not in DISAGREEMENTS or bool(low.any() or high.any()))
            and (name != "energy" or bool((torch.cat([low, high]).abs() > LEAST_ENERGY).any()))
        }
    )


def scores_of(prediction: Prediction) -> dict[str, Tensor]:
    """Compute the scores of a prediction, one number for each example."""
    per_example: dict[str, Tensor] = {}
    if prediction.probs is not None:
        per_example["entropy"] = prediction.entropy
    else:
        per_example["variance"] = prediction.variance
    disagreement = DISAGREEMENTS[0] if prediction.probs is not None else DISAGREEMENTS[1]
    per_example[disagreement] = prediction.epistemic
    if len(prediction.samples) > 1:
        per_example["output variance"] = prediction.samples.float().var(0)
    if prediction.kind == "classes":
        per_example["energy"] = -prediction.samples.float().logsumexp(-1).mean(0)
    return {name: value.reshape(len(value), -1).mean(1) for name, value in per_example.items()}


class FeatureDensity:
    """Gaussians of the features of every class, with one covariance.

    The features of pixels have the classes of pixels, where there are as many of both; otherwise their mean over an
    example stands for it. Values have no classes, and one Gaussian. Sums are kept, not features, so memory is bounded.

    Args:
        network: the network whose features are read.
        train: training data with targets.
        ignored: the class index of outputs without a target.
    """

    def __init__(self, network: nn.Module, train: Iterable[Any], ignored: int | None = None):
        self.network = replicate(network)
        layers = [module for module in self.network.modules() if isinstance(module, FEATURE_LAYERS)]
        if not layers:
            raise UnsupportedModel(
                "The density of features needs a network that ends in a linear or convolution layer."
            )
        self.last = layers[-1]
        self.per_output = False
        sums = _ClassSums()
        for batch in train:
            inputs, targets = split_batch(batch)
            rows = self._rows(inputs)
            targets = targets.to(rows.device)
            if targets.is_floating_point():
                labels = torch.zeros(len(rows), dtype=torch.long, device=rows.device)
            elif targets.numel() == len(rows):
                labels, self.per_output = targets.flatten().long(), targets.ndim > 1
            elif targets.numel() == self._examples:
                labels = targets.flatten().long()
            else:
                labels = torch.zeros(self._examples, dtype=torch.long, device=rows.device)
            if len(labels) != len(rows):
                rows = rows.view(len(labels), -1, rows.shape[1]).mean(1)
            told = labels != ignored if ignored is not None else torch.ones_like(labels, dtype=torch.bool)
            sums.add(rows[told], labels[told])
        if not sums.count:
            raise BayeslimError("The training loader gave no batches.")
        self.means, covariance = sums.moments()
        # the features of a class may all be equal: rounding errors are in proportion to the variance of all of them
        least = (LEAST_SHARE * sums.products.diagonal().mean() / sums.count).clamp_min(1e-12)
        covariance.diagonal().add_(RIDGE * torch.maximum(covariance.diagonal().mean(), least))
        self.root = torch.linalg.cholesky(covariance)

    def _rows(self, inputs: Inputs) -> Tensor:
        """Read the inputs of the last layer, a row for every place of an example."""
        seen: list[Tensor] = []
        handle = self.last.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
        try:
            with torch.no_grad():
                call(self.network, to_device(inputs, device_of(self.network)))
        finally:
            handle.remove()
        found = seen[-1]
        self._examples = len(found)
        found = found if isinstance(self.last, nn.Linear) else found.movedim(1, -1)
        return found.reshape(-1, found.shape[-1]).double()

    def score(self, inputs: Inputs) -> Tensor:
        """Compute the squared distance to the nearest class.

        It is the mean over the places of an example.
        """
        rows = self._rows(inputs)
        if not self.per_output:
            rows = rows.view(self._examples, -1, rows.shape[1]).mean(1)
        whitened = torch.linalg.solve_triangular(self.root, rows.mT, upper=False).mT
        centres = torch.linalg.solve_triangular(self.root, self.means.mT, upper=False).mT
        nearest = torch.stack([(whitened - centre).square().sum(1) for centre in centres]).amin(0)
        return nearest.view(self._examples, -1).mean(1)


class _ClassSums:
    """Sums of features and of their products, by class; relative to the first features, against cancellation."""

    def __init__(self) -> None:
        self.count = 0
        self.sums: dict[int, Tensor] = {}
        self.counts: dict[int, int] = {}

    def add(self, rows: Tensor, labels: Tensor) -> None:
        """Add features with their classes."""
        if not len(rows):
            return
        if not self.count:
            self.origin = rows.mean(0)
            self.products = rows.new_zeros(rows.shape[1], rows.shape[1])
        rows = rows - self.origin
        self.products += rows.mT @ rows
        for label in labels.unique().tolist():
            own = rows[labels == label]
            self.sums[label] = self.sums.get(label, 0) + own.sum(0)
            self.counts[label] = self.counts.get(label, 0) + len(own)
        self.count += len(rows)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Compute the means of classes, (C, D), and the covariance around them, (D, D)."""
        order = sorted(self.sums)
        counts = torch.tensor([self.counts[c] for c in order], dtype=torch.float64, device=self.products.device)
        means = torch.stack([self.sums[c] for c in order]) / counts[:, None]
        covariance = (self.products - (counts[:, None] * means).mT @ means) / self.count
        return means + self.origin, covariance


def _network(predictor: Predictor) -> nn.Module:
    if isinstance(predictor, Bayesian):
        return predictor.mean_network().eval()
    if isinstance(predictor, nn.Module):
        return predictor
    raise TypeError("The density of features needs a torch.nn.Module. Leave train=... out for a function.")


def _scores_over(predicts: Predicts, loader: Iterable[Any], density: FeatureDensity | None) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {}
    for batch in loader:
        inputs = inputs_of(batch)
        found = scores_of(predicts(inputs))
        if density is not None:
            found["density"] = density.score(inputs)
        for name, value in found.items():
            parts.setdefault(name, []).append(value.double().cpu())
    if not parts:
        raise BayeslimError("A loader gave no batches: there is nothing to compare.")
    return {name: torch.cat(values) for name, values in parts.items()}
