"""A data set in memory, and the scales that standardised it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor

NOTHING = torch.empty(0)


@dataclass(frozen=True, eq=False)
class Scale:
    """Mean and standard deviation of columns: z = (x − mean) / std.

    Attributes:
        mean: the mean of each column, (D,).
        std: the standard deviation of each column, (D,); 1 for a constant column, which is only centred.
    """

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Scale:
        """Compute the scale of the columns of `values`, (N, D)."""
        std = values.std(0, correction=0)
        # rounding leaves a constant column with a tiny standard deviation, which must not be scaled up to 1
        constant = std <= 1e-10 * values.abs().amax(0)
        return cls(values.mean(0), torch.where(constant, torch.ones_like(std), std))

    def standardise(self, values: Tensor) -> Tensor:
        """Convert values from the data's units to mean 0 and standard deviation 1."""
        return (values - self.mean.to(values)) / self.std.to(values)

    def restore(self, values: Tensor) -> Tensor:
        """Convert standardised values to the data's units (variances: times `std ** 2`)."""
        return values * self.std.to(values) + self.mean.to(values)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in memory.

    A part that was not asked for, or does not exist, has no rows.

    Attributes:
        name: as given to `load`.
        train_x: inputs: images (N, C, H, W) in [0, 1], or standardised features (N, D).
        train_y: class indices (N,), or standardised targets (N, 1).
        test_x: inputs of the test part.
        test_y: targets of the test part.
        num_classes: number of classes; None for regression.
        input_scale: the scale of the features in the training part; None for images.
        target_scale: the scale of the targets in the training part; None for classes.
        valid_x: inputs held out of the training part by `with_validation`.
        valid_y: targets held out of the training part by `with_validation`.
    """

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    num_classes: int | None = None
    input_scale: Scale | None = None
    target_scale: Scale | None = None
    valid_x: Tensor = field(default=NOTHING)
    valid_y: Tensor = field(default=NOTHING)

    def with_validation(self, size: int | float, seed: int = 0) -> Dataset:
        """Hold a random part of the training set out for validation.

        Args:
            size: number of examples, or their fraction if it is a float.
            seed: the seed of the choice.

        Returns:
            A new data set whose `train` is without the examples that are in its `valid`.
        """
        total = len(self.train_x)
        count = round(size * total) if isinstance(size, float) else size
        if len(self.valid_x):
            raise ValueError(f"{self.name} has a validation part of {len(self.valid_x)} already. Start from load(...).")
        if not 0 < count < total:
            raise ValueError(
                f"A validation part must have an example, and leave some of the {total} of {self.name} for training. "
                f"A size of {size} gives it {count}."
            )
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
        # sorted, so that the held-out choice is random but the data keep their order
        valid, train = order[:count].sort().values, order[count:].sort().values
        return dataclasses.replace(
            self,
            train_x=self.train_x[train],
            train_y=self.train_y[train],
            valid_x=self.train_x[valid],
            valid_y=self.train_y[valid],
        )

    def __repr__(self) -> str:
        parts = [("train", self.train_x), ("validation", self.valid_x), ("test", self.test_x)]
        sizes = ", ".join(f"{len(x):,} {part}" for part, x in parts if len(x))
        shape = "x".join(map(str, next((x for _, x in parts if len(x)), self.train_x).shape[1:]))
        what = f"{self.num_classes} classes" if self.num_classes else "regression"
        return f"Dataset {self.name}: {sizes} examples of shape {shape}, {what}"
