"""`bayeslim data`: list the data sets, find their files, download them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bayeslim.app import data
from bayeslim.app.data.images import CIFAR_ARCHIVE, IDX_NAMES, IDX_SETS
from bayeslim.app.data.load import check_name
from bayeslim.app.data.store import locate
from bayeslim.app.data.uci import UCI_SETS, published_split

SIZES = {
    "digits": ("1,297 + 500", "1×8×8"),
    "mnist": ("60,000 + 10,000", "1×28×28"),
    "fashion-mnist": ("60,000 + 10,000", "1×28×28"),
    "kmnist": ("60,000 + 10,000", "1×28×28"),
    "notmnist": ("0 + 10,000", "1×28×28"),
    "cifar10": ("50,000 + 10,000", "3×32×32"),
}
"""Training and test examples of the image sets, and the shape of one. Sets that are not on the disk are listed too."""

MISSING = "not here"


@dataclass(frozen=True)
class Entry:
    """A data set in the list, with the folder it was found in, if nothing is missing."""

    name: str
    task: str
    examples: str
    shape: str
    where: str
    is_here: bool


def listed() -> list[Entry]:
    """List all data sets."""
    return [_entry(name) for name in data.names()]


def fetch(names: Sequence[str]) -> list[str]:
    """Download missing files of data sets, read them whole, and say a line about each."""
    for name in names:
        check_name(name)
    return [f"{data.load(name)}, {_entry(name).where}" for name in names]


def _entry(name: str) -> Entry:
    if name in UCI_SETS:
        spec = UCI_SETS[name]
        train, test = (len(part) for part in published_split(spec.rows, 0))
        path = locate([f"uci/{spec.stem}.npz", f"uci/{spec.stem}/data/data.txt"])
        where = MISSING if path is None else _short(path.parent)
        return Entry(name, "regression", f"{train:,} + {test:,}", str(spec.features), where, path is not None)
    files, wanted = _files(name)
    if not wanted:
        where = "in the package"
    elif not files:
        where = MISSING
    elif len(files) < wanted:
        where = f"{len(files)} of {wanted} files in {_short(files[0].parent)}"
    else:
        where = _short(files[0].parent)
    return Entry(name, "10 classes", *SIZES[name], where, len(files) == wanted)


def _files(name: str) -> tuple[list[Path], int]:
    """Find the files of an image set on the disk, and count those it should have."""
    if name == "digits":
        return [], 0
    if name == "cifar10":
        wanted = [[f"cifar10/{file}" for file in ("cifar10.npz", "cifar-10-batches-bin", CIFAR_ARCHIVE)]]
    else:
        spec = IDX_SETS[name]
        wanted = [
            [f"{name}/{file}" for file in (f"{stem}.gz", stem, *[o[i] for o in [spec.other_names.get(part)] if o])]
            for part in spec.md5
            for i, stem in enumerate(IDX_NAMES[part])
        ]
    found = [path for candidates in wanted if (path := locate(candidates))]
    return found, len(wanted)


def _short(path: Path) -> str:
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
