"""Image classification sets: digits (in the package), MNIST and sets in its format, CIFAR-10.

- digits: the test part of "Optical recognition of handwritten digits" by E. Alpaydin and C. Kaynak (UCI machine
  learning repository, 1998; CC BY 4.0): 1,797 images of 8 x 8 pixels with values 0 to 16, of which we
  hold a fixed random 500 as the test part.
- mnist: Y. LeCun, C. Cortes, C. Burges.
- fashion-mnist: Zalando SE; MIT licence.
- kmnist: the Kuzushiji data set by CODH; CC BY-SA 4.0.
- notmnist: letters A to J by Y. Bulatov, as converted by D. Flanagan; the test part only, as images that are not
  digits.
- cifar10: A. Krizhevsky; the binary version.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from bayeslim.app.data.download import download
from bayeslim.app.data.formats import Array, read_cifar, read_idx, read_npz
from bayeslim.app.data.store import destination, locate
from bayeslim.errors import CorruptFile

Part: TypeAlias = Literal["train", "test"]

DIGITS_TRAIN = 1_297
CIFAR_FILES: dict[Part, list[str]] = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
CIFAR_ARCHIVE = "cifar-10-binary.tar.gz"
CIFAR_URL = f"https://www.cs.toronto.edu/~kriz/{CIFAR_ARCHIVE}"
CIFAR_CHECKSUM = "md5:c32a1d4ab5d03f1284b67883e8d87530"


@dataclass(frozen=True)
class IdxSet:
    """A set of 28 x 28 grey images in idx files, as MNIST is.

    Attributes:
        home: the address that the files lie under.
        md5: the hashes of the compressed images and labels, by part.
        other_names: names under which the files may also be found, as npz, by part.
    """

    home: str
    md5: dict[Part, tuple[str, str]]
    other_names: dict[Part, tuple[str, str]] = field(default_factory=dict)


IDX_NAMES: dict[Part, tuple[str, str]] = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}

IDX_SETS = {
    "mnist": IdxSet(
        home="https://ossci-datasets.s3.amazonaws.com/mnist/",
        md5={
            "train": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "d53e105ee54ea40749a09fcbcd1e9432"),
            "test": ("9fb629c4189551a2d022fa330f9573f3", "ec29112dd5afa0611ce80d1b7f02629c"),
        },
    ),
    "fashion-mnist": IdxSet(
        home="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        md5={
            "train": ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "25c81989df183df01b3e8a0aad5dffbe"),
            "test": ("bef4ecab320f06d8554ea6380940ec79", "bb300cfdad3c16e7a12a480ee83cd310"),
        },
    ),
    "kmnist": IdxSet(
        home="http://codh.rois.ac.jp/kmnist/dataset/kmnist/",
        md5={
            "train": ("bdb82020997e1d708af4cf47b453dcf7", "e144d726b3acfaa3e44228e80efcd344"),
            "test": ("5c965bf0a639b31b8f53240b1b52f4d7", "7320c461ea6c1c855c0b718fb2a4b134"),
        },
        other_names={
            "train": ("kmnist-train-imgs.npz", "kmnist-train-labels.npz"),
            "test": ("kmnist-test-imgs.npz", "kmnist-test-labels.npz"),
        },
    ),
    "notmnist": IdxSet(
        home="https://raw.githubusercontent.com/davidflanagan/notMNIST-to-MNIST/master/",
        md5={"test": ("2c87c839a4ef9b238846600eec8c35b7", "7ea9118cbafd0f6e3ee2ad771d782a01")},
    ),
}


def read_images(name: str, part: Part, root: str | Path | None) -> tuple[Array, Array]:
    """Read images (N, C, H, W) and labels (N,), uint8, of a part; no rows without it."""
    if name == "digits":
        images, labels = _digits(part)
    elif name == "cifar10":
        images, labels = _cifar10(part, root)
    else:
        images, labels = _idx(name, part, root)
    if len(images) != len(labels):
        raise CorruptFile(f"{name} has {len(images):,} {part} images but {len(labels):,} labels. Load it anew.")
    if labels.size and labels.max() > 9:
        raise CorruptFile(f"{name} has 10 classes, but a {part} label is {labels.max()}. Load it anew.")
    return images, labels


def _digits(part: Part) -> tuple[Array, Array]:
    with resources.as_file(resources.files("bayeslim.app.data") / "digits.npz") as path:
        images, labels = read_npz(path, "x", "y")
    # the writers of the last images are others, so a split in the file's order would be harder
    order = np.random.RandomState(0).permutation(len(labels))
    rows = order[:DIGITS_TRAIN] if part == "train" else order[DIGITS_TRAIN:]
    return images[rows, None], labels[rows]


def _idx(name: str, part: Part, root: str | Path | None) -> tuple[Array, Array]:
    spec = IDX_SETS[name]
    if part not in spec.md5:
        return np.empty((0, 1, 28, 28), np.uint8), np.empty(0, np.uint8)
    arrays = []
    for i in (0, 1):
        stem = IDX_NAMES[part][i]
        others = [spec.other_names[part][i]] if spec.other_names else []
        path = locate([f"{name}/{file}" for file in (f"{stem}.gz", stem, *others)], root) or download(
            f"{spec.home}{stem}.gz", destination(root) / name / f"{stem}.gz", checksum=f"md5:{spec.md5[part][i]}"
        )
        arrays.append(read_npz(path, "arr_0")[0] if path.suffix == ".npz" else read_idx(path))
    return arrays[0][:, None], arrays[1]


def _cifar10(part: Part, root: str | Path | None) -> tuple[Array, Array]:
    path = locate([f"cifar10/{file}" for file in ("cifar10.npz", "cifar-10-batches-bin", CIFAR_ARCHIVE)], root)
    if path and path.suffix == ".npz":
        images, labels = read_npz(path, f"{part}_x", f"{part}_y")
        return np.ascontiguousarray(images.transpose(0, 3, 1, 2)), labels
    path = path or download(CIFAR_URL, destination(root) / "cifar10" / CIFAR_ARCHIVE, checksum=CIFAR_CHECKSUM)
    return read_cifar(path, CIFAR_FILES[part])
