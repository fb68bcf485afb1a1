"""Targets of a student: a teacher's predictions, stored once for all inputs or drawn anew for every batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayeslim.bayesian import Bayesian
from bayeslim.distill.divergences import dirichlet_targets, targets_of
from bayeslim.errors import BayeslimError, ShapeMismatch
from bayeslim.likelihoods import Categorical
from bayeslim.posteriors import Particles
from bayeslim.predict.predict import predict
from bayeslim.results import Prediction
from bayeslim.train.loaders import Loader
from bayeslim.train.progress import progress as progress_bar
from bayeslim.types import Inputs, arguments, batch_size, call, device_of, inputs_of, to_device

MAX_INPUTS_PER_PREDICTION = 8192
"""Inputs that the teacher predicts at once, with the same draws."""


@dataclass(frozen=True)
class Online:
    """Batches of several loaders in random order, each with the outputs of a new draw of the teacher as targets.

    Attributes:
        teacher: the Bayesian network to draw from.
        loaders: the loaders of inputs.
    """

    teacher: Bayesian
    loaders: tuple[Any, ...]

    @classmethod
    def of(cls, teacher: Bayesian, loader: Any, unlabelled: Any, size: int) -> Online:
        """Combine a loader with unlabelled inputs; a tensor is cut into batches."""
        if isinstance(unlabelled, Tensor):
            unlabelled = Loader(unlabelled, torch.zeros(len(unlabelled)), size) if len(unlabelled) else None
        return cls(teacher, (loader,) if unlabelled is None else (loader, unlabelled))

    def __len__(self) -> int:
        """Count the batches in an epoch."""
        return sum(len(loader) for loader in self.loaders)

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        sources = [iter(loader) for loader in self.loaders]
        left = torch.tensor([len(loader) for loader in self.loaders], dtype=torch.float)
        while left.any():
            turn = int(torch.multinomial(left, 1))
            left[turn] -= 1
            batch = next(sources[turn], None)
            if batch is not None:
                inputs = inputs_of(batch)
                yield inputs, targets_of(_one_draw(self.teacher, inputs))

    @property
    def sampler(self) -> Any:
        """The sampler of the first loader, which `fit` tells the epoch."""
        return getattr(self.loaders[0], "sampler", None)

    @property
    def world_size(self) -> int:
        """The number of processes that share the first loader's data."""
        return int(getattr(self.loaders[0], "world_size", 1))

    def state_dict(self) -> dict[str, Any]:
        """Collect the state of every loader that has one."""
        return {str(i): _state(loader) for i, loader in enumerate(self.loaders)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of every loader."""
        for i, loader in enumerate(self.loaders):
            if hasattr(loader, "load_state_dict"):
                loader.load_state_dict(state[str(i)])
            elif "generator" in state[str(i)]:
                loader.generator.set_state(state[str(i)]["generator"])


def _state(loader: Any) -> Mapping[str, Any]:
    if hasattr(loader, "state_dict"):
        state: Mapping[str, Any] = loader.state_dict()
        return state
    generator = getattr(loader, "generator", None)
    return {"generator": generator.get_state()} if isinstance(generator, torch.Generator) else {}


def _one_draw(teacher: Bayesian, inputs: Inputs) -> Prediction:
    """Predict with one network of the posterior."""
    networks = teacher.state.get("networks", teacher.state.get("posterior"))
    if isinstance(networks, Particles):
        # `predict` takes particles in their order, so that one alone would always be the same
        network = networks.network(int(torch.randint(networks.count, ())), teacher.model)
        inputs = to_device(inputs, device_of(teacher.model))
        with torch.no_grad():
            outputs = call(teacher.replica(inputs).model, inputs, network)
    else:
        outputs = predict(teacher, inputs, samples=1, batch_size=None).samples[0]
    return teacher.likelihood.predict(outputs.unsqueeze(0))


def stored(
    teacher: Bayesian,
    loader: Iterable[Any],
    unlabelled: Any = None,
    *,
    samples: int | None = None,
    dirichlet: bool = False,
    size: int = 128,
    progress: bool = True,
) -> Loader:
    """Make a loader of all inputs with the teacher's predictions as targets."""
    more = [] if unlabelled is None else [unlabelled] if isinstance(unlabelled, Tensor) else unlabelled
    x = _joined([inputs_of(batch) for source in (loader, more) for batch in source])
    rows = Loader(x, torch.zeros(batch_size(x)), MAX_INPUTS_PER_PREDICTION, shuffle=False)
    answers = []
    for part, _ in progress_bar(rows, "teacher", enabled=progress):
        prediction = predict(teacher, part, samples)
        if not dirichlet:
            answers.append(targets_of(prediction))
            continue
        if len(prediction.samples) < 2:
            raise BayeslimError(f"A Dirichlet needs two draws of the teacher at least. Got {len(prediction.samples)}.")
        assert isinstance(teacher.likelihood, Categorical)
        answers.append(dirichlet_targets(teacher.likelihood, prediction.samples))
    args, kwargs = arguments(x)
    device = next(iter((*args, *kwargs.values()))).device
    return Loader(x, torch.cat(answers).to(device), size, seed=int(torch.randint(2**31, ())))


def _joined(parts: list[Inputs]) -> Inputs:
    """Join the rows of all parts into one tensor, tuple or dict."""
    first = parts[0]
    try:
        if isinstance(first, Tensor):
            return torch.cat(parts)
        if isinstance(first, Mapping):
            return {key: torch.cat([part[key] for part in parts]) for key in first}
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        raise ShapeMismatch(
            f"The inputs cannot be joined into one tensor: {error}. Give all inputs one shape, unlabelled ones too; "
            'or, if the teacher takes several shapes, use how="online", which takes batches one by one.'
        ) from error
