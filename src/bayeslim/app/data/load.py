"""`load`: read a data set by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from bayeslim.app.data.formats import Array
from bayeslim.app.data.images import IDX_SETS, Part, read_images
from bayeslim.app.data.uci import UCI_SETS, published_split, read_regression
from bayeslim.errors import closest
from bayeslim.train.dataset import Dataset, Scale

IMAGE_SETS = ("digits", *IDX_SETS, "cifar10")


def names() -> list[str]:
    """List the names that `load` knows: the image sets, then the regression sets."""
    return [*IMAGE_SETS, *UCI_SETS]


def check_name(name: str) -> None:
    """Raise for an unknown name."""
    if name not in names():
        alike = closest(name, names())
        hint = f" Closest: {alike}." if alike else ""
        raise ValueError(f'There is no data set called "{name}".{hint} There are: {", ".join(names())}.')


def load(
    name: str,
    *,
    root: str | Path | None = None,
    split: int | None = None,
    part: Literal["both", "train", "test"] = "both",
    scaled: bool = True,
) -> Dataset:
    """Load a data set, from the disk or else by downloading it.

    >>> load("digits")
    Dataset digits: 1,297 train, 500 test examples of shape 1x8x8, 10 classes

    Args:
        name: one of `names()`.
        root: the folder that holds `NAME/` folders (`uci/` for the regression sets) and gets the downloads; by
            default `$BAYESLIM_DATA` and the cache are searched.
        split: which of the published train/test splits, from 0 (the default), for the regression sets.
        part: "test" or "train" reads (and downloads) only that part of an image set; the other has no rows then.
        scaled: images as float32 in [0, 1], features and targets with mean 0 and standard deviation 1 on the training
            part. With False, as they are stored: uint8 images, the data's own units.

    Raises:
        ValueError: for an unknown name or split.
        DownloadFailed: when a file is neither on the disk nor can be fetched.
        CorruptFile: when a file is damaged, or is another.
    """
    check_name(name)
    if part not in ("both", "train", "test"):
        raise ValueError(f'part must be "both", "train" or "test". Got {part!r}.')
    if name in UCI_SETS:
        if part != "both":
            raise ValueError(f'{name} is loaded whole: its scale comes from the training part. Got part="{part}".')
        return _regression(name, 0 if split is None else split, root, scaled)
    if split is not None:
        raise ValueError(f"{name} has one fixed split, so load takes no split for it. Got split={split}.")
    return _images(name, root, part, scaled)


def _images(name: str, root: str | Path | None, part: str, scaled: bool) -> Dataset:
    brightest = 16 if name == "digits" else 255

    def tensors(images: Array, labels: Array) -> tuple[Tensor, Tensor]:
        x = torch.tensor(images)
        return (x.float().div_(brightest) if scaled else x), torch.tensor(labels, dtype=torch.int64)

    wanted: tuple[Part, ...] = ("train", "test")
    parts = {p: tensors(*read_images(name, p, root)) for p in wanted if part in ("both", p)}
    x, y = next(iter(parts.values()))
    train_x, train_y = parts.get("train", (x[:0], y[:0]))
    test_x, test_y = parts.get("test", (x[:0], y[:0]))
    return Dataset(name, train_x, train_y, test_x, test_y, num_classes=10)


def _regression(name: str, split: int, root: str | Path | None, scaled: bool) -> Dataset:
    spec = UCI_SETS[name]
    if not 0 <= split < spec.splits:
        raise ValueError(f"{name} has {spec.splits} published splits, 0 to {spec.splits - 1}. Got split={split}.")
    features, targets = read_regression(name, root)
    x, y = torch.from_numpy(features), torch.from_numpy(targets).unsqueeze(1)
    train, test = map(torch.from_numpy, published_split(len(x), split))
    if not scaled:
        return Dataset(name, x[train].float(), y[train].float(), x[test].float(), y[test].float())
    input_scale, target_scale = Scale.of(x[train]), Scale.of(y[train])
    x, y = input_scale.standardise(x).float(), target_scale.standardise(y).float()
    return Dataset(name, x[train], y[train], x[test], y[test], input_scale=input_scale, target_scale=target_scale)
