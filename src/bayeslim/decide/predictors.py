"""Anything that predicts: a Bayesian network, a plain one, a recalibrated one, or a function of an exported file.

A guarantee holds for one fixed predictor. So a Bayesian network predicts held-out data and new inputs with the same
drawn networks: their seed is drawn once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from bayeslim.bayesian import Bayesian
from bayeslim.errors import BayeslimError, NotFinite, ShapeMismatch
from bayeslim.likelihoods import Bernoulli, Gaussian, Likelihood
from bayeslim.noise import drawing_from, random_seed
from bayeslim.predict.predict import predict
from bayeslim.replica import replicate
from bayeslim.results import Prediction
from bayeslim.train.loaders import check_loader
from bayeslim.types import Inputs, call, device_of, split_batch, to_device

Predictor = Bayesian | nn.Module | Callable[[Any], Any]


class Predicts:
    """A predictor and its options, called on inputs for a `Prediction`.

    Args:
        predictor: a Bayesian network; a plain, slim or distilled one; or a function from inputs to outputs, which may
            be the five of an exported posterior, or to a `Prediction`, such as `bl.calibrate` makes.
        likelihood: what the outputs of a predictor mean that is not Bayesian; known of one by `bl.calibrate`.
        options: of `bayeslim.predict`, for a Bayesian network.
        generator: of the drawn networks; it may also be among the options.
    """

    likelihood: Likelihood

    def __init__(
        self,
        predictor: Predictor,
        likelihood: Likelihood | None,
        options: dict[str, Any],
        generator: torch.Generator | None = None,
    ):
        if not callable(predictor):
            raise TypeError(
                "A predictor is a Bayesian network, a torch.nn.Module or a function of inputs. "
                f"Got {type(predictor).__name__}."
            )
        within = getattr(predictor, "predicts", None)  # of a recalibrated predictor
        if likelihood is None and isinstance(within, Predicts):
            likelihood = within.likelihood
        if isinstance(predictor, Bayesian):
            likelihood = predictor.likelihood
        elif likelihood is None:
            raise TypeError(
                "The outputs of a network that is not Bayesian need a meaning. Pass "
                "likelihood=bl.likelihoods.Categorical(), or another one."
            )
        elif options:
            raise TypeError(f"Only Bayesian networks take the options of predict. Got {', '.join(sorted(options))}.")
        self.predictor, self.likelihood, self.options = predictor, likelihood, dict(options)
        with drawing_from(self.options.pop("generator", generator)):
            self.seed = random_seed()
        self.target_shape: torch.Size | None = None

    def __call__(self, x: Inputs) -> Prediction:
        """Predict inputs; yes/no targets are predicted as two classes.

        One yes/no target of an example has the shape it has in the held-out data, (B,) or (B, 1).
        """
        prediction = self._predict(x)
        if not self.options.get("allow_nonfinite") and not bool(prediction.mean.isfinite().all()):
            raise NotFinite(
                "The predictor gave NaN or infinite values, on which nothing can be decided. Look for such values in "
                "its inputs and weights."
            )
        return as_classes(prediction, self.target_shape)

    def _predict(self, x: Inputs) -> Prediction:
        if isinstance(self.predictor, Bayesian):
            generator = torch.Generator(device_of(self.predictor.model)).manual_seed(self.seed)
            return self._classes_last(predict(self.predictor, x, generator=generator, **self.options))
        with torch.no_grad():
            if isinstance(self.predictor, nn.Module):
                outputs: Any = call(replicate(self.predictor), to_device(x, device_of(self.predictor)))
            else:
                outputs = self.predictor(x)
        if isinstance(outputs, Prediction):
            return outputs
        if isinstance(outputs, (tuple, list)):
            return _of_posterior(self.likelihood, [torch.as_tensor(one) for one in outputs])
        return self._classes_last(self.likelihood.predict(torch.as_tensor(outputs).unsqueeze(0)))

    def _classes_last(self, prediction: Prediction) -> Prediction:
        """Move the classes of drawn outputs to the end, as in the probabilities."""
        place = getattr(self.likelihood, "class_dim", -1)
        if place == -1:
            return prediction
        samples = prediction.samples.movedim(place + 1 if place >= 0 else place, -1)
        return dataclasses.replace(prediction, samples=samples)

    @property
    def ignored(self) -> int | None:
        """The class index of outputs without a target, such as unlabelled pixels."""
        found: int | None = getattr(self.likelihood, "ignore_index", None)
        return found

    @property
    def no_target(self) -> BayeslimError:
        """The error of held-out data without any target."""
        return BayeslimError(f"All validation targets are {self.ignored}, the class index of targets that are none.")

    def over(self, loader: Iterable[Any]) -> Iterator[tuple[Prediction, Tensor]]:
        """Predict every batch of a loader; the targets come along, on the same device."""
        if not isinstance(loader, Iterable):
            raise TypeError(f"The validation data must be a loader of (inputs, targets). Got {type(loader).__name__}.")
        check_loader(loader, "The validation data")
        count = 0
        for batch in loader:
            inputs, given = split_batch(batch)
            if not isinstance(given, Tensor | np.ndarray):
                raise BayeslimError(
                    "The validation data need targets: a loader of (inputs, targets), both tensors. Got targets of "
                    f"type {type(given).__name__}."
                )
            targets = torch.as_tensor(given)
            if not len(targets):
                continue
            self.target_shape = targets.shape[1:]
            prediction = self(inputs)
            count += len(targets)
            yield prediction, targets.to(prediction.mean.device)
        if not count:
            raise BayeslimError("The validation loader gave no batches with examples.")


def _of_posterior(likelihood: Likelihood, outputs: Sequence[Tensor]) -> Prediction:
    """Read the outputs of an exported posterior, which has averaged its draws already."""
    if len(outputs) not in (1, 5):
        raise ShapeMismatch(
            "A function gives the outputs of one network, or the five of an exported posterior: mean, variance, "
            f"entropy, aleatoric, epistemic. Got {len(outputs)}."
        )
    if len(outputs) == 1:
        return likelihood.predict(outputs[0].unsqueeze(0))
    mean, variance, _, aleatoric, epistemic = outputs
    if isinstance(likelihood, Gaussian):
        return Prediction("values", mean, mean.unsqueeze(0), aleatoric, epistemic, is_gaussian=True)
    is_binary = isinstance(likelihood, Bernoulli)
    logits = mean.logit() if is_binary else mean.log()
    kind: Literal["binary", "classes"] = "binary" if is_binary else "classes"
    return Prediction(kind, mean, logits.unsqueeze(0), aleatoric, epistemic, probs=mean, spread=variance)


def as_classes(prediction: Prediction, target_shape: torch.Size | None = None) -> Prediction:
    """Turn a prediction of yes/no targets into one of two classes.

    Args:
        prediction: of any targets.
        target_shape: the shape of the targets of an example; one target takes it.
    """
    if prediction.kind != "binary":
        return prediction
    if target_shape is not None and target_shape.numel() == prediction.mean.shape[1:].numel() == 1:
        shaped: dict[str, Any] = {
            name: value.reshape(*value.shape[: 2 if name == "samples" else 1], *target_shape)
            for name, value in vars(prediction).items()
            if isinstance(value, Tensor)
        }
        prediction = dataclasses.replace(prediction, **shaped)
    assert prediction.probs is not None
    yes = prediction.probs
    probs = torch.stack([1 - yes, yes], -1)
    samples = torch.stack([torch.zeros_like(prediction.samples), prediction.samples], -1)
    spread = None if prediction.spread is None else torch.stack([prediction.spread] * 2, -1)
    return dataclasses.replace(prediction, kind="classes", mean=probs, probs=probs, samples=samples, spread=spread)


def aligned_targets(prediction: Prediction, targets: Tensor) -> Tensor:
    """Give targets the shape of the mean; class indices have one dimension less.

    Only dimensions of size one may differ.
    """
    shape = prediction.mean.shape[:-1] if prediction.kind == "classes" else prediction.mean.shape
    if [size for size in targets.shape if size != 1] != [size for size in shape if size != 1]:
        raise ShapeMismatch(
            f"The targets must have as many entries as the predictions in every dimension, {tuple(shape)}. "
            f"Got {tuple(targets.shape)}."
        )
    return targets.reshape(shape)


def told_targets(prediction: Prediction, targets: Tensor, ignored: int | None) -> tuple[Tensor, Tensor]:
    """Align targets, and tell which outputs have one; the others get class 0.

    Raises:
        ShapeMismatch: for targets that are not of the predictions' shape, or no classes of them.
        NotFinite: for targets that are NaN or infinite.
    """
    targets = aligned_targets(prediction, targets)
    told = torch.ones_like(targets, dtype=torch.bool)
    if not bool(targets.isfinite().all()):
        raise NotFinite("The targets hold NaN or infinite values. Leave these examples out.")
    if prediction.kind != "classes":
        return targets, told
    if ignored is not None:
        told = targets != ignored
    labels, classes = targets.long().masked_fill(~told, 0), prediction.mean.shape[-1]
    if targets.numel() and not (int(labels.min()) >= 0 and int(labels.max()) < classes):
        raise ShapeMismatch(
            f"The predictions are of {classes} classes, so targets must be from 0 to {classes - 1}. "
            f"Got {int(labels.min())} to {int(labels.max())}."
        )
    if targets.is_floating_point() and bool((targets != labels)[told].any()):
        raise ShapeMismatch("The targets of classes must be whole numbers. Got fractions.")
    return labels, told


def need_kind(prediction: Prediction, kinds: tuple[str, ...], what: str) -> None:
    """Raise unless a prediction is of one of these kinds."""
    if prediction.kind not in kinds:
        raise BayeslimError(f"{what} needs predictions of {' or '.join(kinds)}. Got {prediction.kind}.")
