"""Loading sets by name from every layout on the disk, from small files made here."""

from __future__ import annotations

import ast
import gzip
import hashlib
import io
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from bayeslim.app import data
from bayeslim.app.cli.calls import BadSetting
from bayeslim.app.cli.prediction_files import read_inputs
from bayeslim.app.data import images, uci
from bayeslim.app.data.formats import read_idx, read_npz
from bayeslim.app.data.store import destination, locate, roots
from bayeslim.errors import CorruptFile, DownloadFailed


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


def random_images(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    r = np.random.default_rng(seed)
    return r.integers(0, 256, (n, 28, 28), dtype=np.uint8), r.integers(0, 10, n, dtype=np.uint8)


def write_idx(folder, part, x, y, compressed=True):
    folder.mkdir(parents=True, exist_ok=True)
    for stem, array in zip(images.IDX_NAMES[part], (x, y), strict=True):
        if compressed:
            (folder / f"{stem}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / stem).write_bytes(idx(array))


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    """Nothing of the machine's own data, and no download that really goes out."""
    monkeypatch.delenv("BAYESLIM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def refuse(url, path, *, checksum):
        raise DownloadFailed(f"{url} {path} {checksum}")

    monkeypatch.setattr(images, "download", refuse)


def test_digits_is_in_the_package():
    digits = data.load("digits")
    assert digits.train_x.shape == (1297, 1, 8, 8)
    assert digits.test_x.shape == (500, 1, 8, 8)
    assert digits.train_x.dtype == torch.float32
    assert digits.train_y.dtype == torch.int64
    assert (digits.train_x.min(), digits.train_x.max()) == (0, 1)
    assert digits.num_classes == 10
    raw = data.load("digits", scaled=False)
    pixels = torch.cat([raw.train_x, raw.test_x])
    assert pixels.dtype == torch.uint8
    assert int(pixels.sum()) == 561_718
    assert torch.cat([raw.train_y, raw.test_y]).bincount().tolist() == [
        178,
        182,
        177,
        183,
        181,
        182,
        181,
        179,
        174,
        180,
    ]


def test_digits_can_be_told_apart():
    digits = data.load("digits")
    x, y = digits.train_x.flatten(1), torch.nn.functional.one_hot(digits.train_y).float()
    weights = torch.linalg.solve(x.T @ x + 0.1 * torch.eye(64), x.T @ y)
    error = ((digits.test_x.flatten(1) @ weights).argmax(1) != digits.test_y).float().mean()
    assert error < 0.1


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "kmnist"])
def test_idx_files(tmp_path, name, compressed):
    (x, y), (tx, ty) = random_images(7), random_images(5, seed=1)
    write_idx(tmp_path / name, "train", x, y, compressed)
    write_idx(tmp_path / name, "test", tx, ty, compressed)
    loaded = data.load(name, root=tmp_path)
    torch.testing.assert_close(loaded.train_x, torch.tensor(x).float().unsqueeze(1) / 255)
    assert loaded.test_y.tolist() == ty.tolist()
    assert repr(loaded) == f"Dataset {name}: 7 train, 5 test examples of shape 1x28x28, 10 classes"


def test_kmnist_as_npz_and_only_the_test_part(tmp_path):
    x, y = random_images(5)
    (tmp_path / "kmnist").mkdir()
    np.savez(tmp_path / "kmnist" / "kmnist-test-imgs.npz", x)
    np.savez(tmp_path / "kmnist" / "kmnist-test-labels.npz", y)
    loaded = data.load("kmnist", root=tmp_path, part="test")
    assert (loaded.test_x[:, 0] * 255).round().byte().tolist() == x.tolist()
    assert loaded.train_x.shape == (0, 1, 28, 28)
    with pytest.raises(DownloadFailed, match="train-images"):
        data.load("kmnist", root=tmp_path)


def test_notmnist_has_only_a_test_part(tmp_path):
    write_idx(tmp_path / "notmnist", "test", *random_images(5))
    loaded = data.load("notmnist", root=tmp_path)
    assert len(loaded.train_x) == 0
    assert len(loaded.test_x) == 5


def cifar_files(per_file: int = 3) -> tuple[dict[str, bytes], np.ndarray, np.ndarray]:
    r = np.random.default_rng(0)
    names = [*images.CIFAR_FILES["train"], *images.CIFAR_FILES["test"]]
    x = r.integers(0, 256, (6 * per_file, 3, 32, 32), dtype=np.uint8)
    y = r.integers(0, 10, 6 * per_file, dtype=np.uint8)
    records = np.concatenate([y[:, None], x.reshape(len(x), -1)], 1)
    return {name: records[i * per_file : (i + 1) * per_file].tobytes() for i, name in enumerate(names)}, x, y


@pytest.mark.parametrize("layout", ["npz", "folder", "tar"])
def test_cifar10_layouts(tmp_path, layout):
    files, x, y = cifar_files()
    home = tmp_path / "cifar10"
    (home / "cifar-10-batches-bin").mkdir(parents=True)
    if layout == "npz":
        nhwc = x.transpose(0, 2, 3, 1)
        np.savez(home / "cifar10.npz", train_x=nhwc[:15], train_y=y[:15], test_x=nhwc[15:], test_y=y[15:])
    elif layout == "folder":
        for name, content in files.items():
            (home / "cifar-10-batches-bin" / name).write_bytes(content)
    else:
        (home / "cifar-10-batches-bin").rmdir()
        with tarfile.open(home / images.CIFAR_ARCHIVE, "w:gz") as tar:
            for name, content in reversed(files.items()):
                entry = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    loaded = data.load("cifar10", root=tmp_path, scaled=False)
    assert loaded.train_x.tolist() == x[:15].tolist()
    assert loaded.test_x.tolist() == x[15:].tolist()
    assert torch.cat([loaded.train_y, loaded.test_y]).tolist() == y.tolist()


def test_the_environment_says_where_and_the_cache_comes_second(tmp_path, monkeypatch):
    write_idx(tmp_path / "cache" / "bayeslim" / "mnist", "test", *random_images(5))
    assert len(data.load("mnist", part="test").test_x) == 5
    write_idx(tmp_path / "own" / "mnist", "test", *random_images(6))
    monkeypatch.setenv("BAYESLIM_DATA", str(tmp_path / "own"))
    assert len(data.load("mnist", part="test").test_x) == 6
    assert roots() == [tmp_path / "own", tmp_path / "cache" / "bayeslim"]
    assert roots("~/x")[0].is_absolute()
    assert locate(["mnist/nothing"]) is None


def test_downloads_go_to_the_first_place_that_can_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("BAYESLIM_DATA", str(tmp_path / "own" / "deep"))
    assert destination() == tmp_path / "own" / "deep"
    (tmp_path / "own").write_text("a file in the way")
    assert destination() == tmp_path / "cache" / "bayeslim"
    assert destination(tmp_path / "here") == tmp_path / "here"


def test_a_missing_set_is_downloaded_with_its_checksum(tmp_path, monkeypatch):
    x, y = random_images(4)
    served = {stem: gzip.compress(idx(a)) for stem, a in zip(images.IDX_NAMES["test"], (x, y), strict=True)}
    fetched = []

    def fake(url, path, *, checksum):
        fetched.append((url, checksum))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(served[path.stem])
        return path

    monkeypatch.setattr(images, "download", fake)
    assert len(data.load("mnist", root=tmp_path, part="test").test_x) == 4
    assert fetched == [
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/t10k-images-idx3-ubyte.gz",
            "md5:9fb629c4189551a2d022fa330f9573f3",
        ),
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/t10k-labels-idx1-ubyte.gz",
            "md5:ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ]
    data.load("mnist", root=tmp_path, part="test")
    assert len(fetched) == 2


def test_every_download_address_has_a_checksum(tmp_path):
    for name in (*images.IDX_SETS, "cifar10"):
        with pytest.raises(DownloadFailed, match=r"^https?://\S+ \S+ md5:[0-9a-f]{32}$"):
            data.load(name, root=tmp_path)


BROKEN = {
    "cut off": lambda b: gzip.compress(b)[:-30],
    "not gzip": lambda b: b"<html>not found</html>",
    "not idx": lambda b: gzip.compress(b"hello, this is text"),
    "empty": lambda b: b"",
    "header only": lambda b: gzip.compress(b[:6]),
    "short": lambda b: gzip.compress(b[:-1]),
}


@pytest.mark.parametrize("how", sorted(BROKEN))
def test_a_broken_file_is_named(tmp_path, how):
    x, y = random_images(3)
    write_idx(tmp_path / "mnist", "test", x, y)
    (tmp_path / "mnist" / "t10k-images-idx3-ubyte.gz").write_bytes(BROKEN[how](idx(x)))
    with pytest.raises(CorruptFile, match=r"t10k-images-idx3-ubyte\.gz could not be read: .*Remove it"):
        data.load("mnist", root=tmp_path, part="test")


def test_files_that_do_not_belong_together(tmp_path):
    write_idx(tmp_path / "mnist", "test", random_images(3)[0], random_images(4)[1])
    with pytest.raises(CorruptFile, match="3 test images but 4 labels"):
        data.load("mnist", root=tmp_path, part="test")
    write_idx(tmp_path / "mnist", "test", random_images(3)[0], np.array([1, 2, 47]))
    with pytest.raises(CorruptFile, match="10 classes, but a test label is 47"):
        data.load("mnist", root=tmp_path, part="test")


def test_no_pickle_is_ever_read(tmp_path):
    (tmp_path / "cifar10").mkdir()
    np.savez(tmp_path / "cifar10" / "cifar10.npz", train_x=np.array([object()]), train_y=np.array([1]))
    with pytest.raises(CorruptFile, match=r"holds object of shape \(1,\), and needs numbers"):
        data.load("cifar10", root=tmp_path)
    np.save(tmp_path / "cifar10" / "cifar10", np.ones(3))
    (tmp_path / "cifar10" / "cifar10.npy").rename(tmp_path / "cifar10" / "cifar10.npz")
    with pytest.raises(CorruptFile, match="not a zip file"):
        data.load("cifar10", root=tmp_path)


def test_an_incomplete_cifar_folder_is_named(tmp_path):
    home = tmp_path / "cifar10" / "cifar-10-batches-bin"
    home.mkdir(parents=True)
    (home / "test_batch.bin").write_bytes(b"123")
    with pytest.raises(CorruptFile, match="lacks data_batch_1"):
        data.load("cifar10", root=tmp_path)
    with pytest.raises(CorruptFile, match="multiple of 3073"):
        data.load("cifar10", root=tmp_path, part="test")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "mnits"}, r'called "mnits". Closest: "mnist"'),
        ({"name": "digits", "split": 3}, r"takes no split for it. Got split=3"),
        ({"name": "digits", "part": "valid"}, r"Got 'valid'"),
        ({"name": "boston", "split": 20}, r"20 published splits, 0 to 19. Got split=20"),
        ({"name": "protein", "split": 5}, r"5 published splits, 0 to 4"),
        ({"name": "boston", "part": "test"}, r"loaded whole"),
    ],
)
def test_impossible_requests(arguments, words):
    with pytest.raises(ValueError, match=words):
        data.load(**arguments)


# the regression sets


def write_yacht(root, constant=False):
    r = np.random.default_rng(0)
    x, y = r.normal(3, 2, (308, 6)), r.normal(10, 5, 308)
    if constant:
        x[:, 2] = 0.998
    (root / "uci").mkdir(parents=True, exist_ok=True)
    np.savez(root / "uci" / "yacht.npz", x=x, y=y)
    return x, y


def test_the_published_splits_are_reproduced():
    # the beginning of boston's first split, and a hash over all of its splits: they must never change
    train, test = uci.published_split(506, 0)
    assert (len(train), len(test)) == (455, 51)
    assert sorted([*train, *test]) == list(range(506))
    assert train[:5].tolist() == [307, 343, 47, 67, 362]
    digest = hashlib.md5()
    for split in range(20):
        for indices in uci.published_split(506, split):
            digest.update(indices.astype("<i4").tobytes())
    assert digest.hexdigest() == "5bd1ba18d1bf9e4d2eb5213979890430"


def test_regression_is_standardised_by_its_training_part(tmp_path):
    x, y = write_yacht(tmp_path)
    loaded = data.load("yacht", root=tmp_path, split=3)
    train, test = uci.published_split(308, 3)
    assert loaded.train_x.dtype == torch.float32
    assert loaded.train_y.shape == (277, 1)
    torch.testing.assert_close(loaded.train_x.mean(0), torch.zeros(6), atol=1e-6, rtol=0)
    torch.testing.assert_close(loaded.train_x.std(0, correction=0), torch.ones(6))
    assert loaded.target_scale.mean.item() == pytest.approx(y[train].mean())
    assert loaded.target_scale.std.item() == pytest.approx(y[train].std())
    torch.testing.assert_close(loaded.target_scale.restore(loaded.test_y)[:, 0], torch.tensor(y[test]).float())
    torch.testing.assert_close(loaded.input_scale.restore(loaded.test_x), torch.tensor(x[test]).float())
    assert repr(loaded) == "Dataset yacht: 277 train, 31 test examples of shape 6, regression"
    assert loaded.num_classes is None

    raw = data.load("yacht", root=tmp_path, split=3, scaled=False)
    torch.testing.assert_close(raw.test_x, torch.tensor(x[test]).float())
    assert raw.input_scale is None
    assert torch.equal(data.load("yacht", root=tmp_path).train_x, data.load("yacht", root=tmp_path, split=0).train_x)


def test_a_constant_feature_stays_finite(tmp_path):
    write_yacht(tmp_path, constant=True)
    loaded = data.load("yacht", root=tmp_path)
    assert loaded.input_scale.std[2] == 1
    assert loaded.train_x[:, 2].abs().max() < 1e-6
    assert loaded.test_x.isfinite().all()


def test_the_published_table_is_read_too(tmp_path):
    x, y = write_yacht(tmp_path / "npz")
    home = tmp_path / "txt" / "uci" / "yacht" / "data"
    home.mkdir(parents=True)
    np.savetxt(home / "data.txt", np.concatenate([y[:, None], x], 1), fmt="%.18e")
    np.savetxt(home / "index_features.txt", np.arange(1, 7))
    np.savetxt(home / "index_target.txt", np.array([0]))
    first, second = (data.load("yacht", root=tmp_path / layout) for layout in ("npz", "txt"))
    torch.testing.assert_close(first.train_x, second.train_x)
    torch.testing.assert_close(first.test_y, second.test_y)


def test_a_missing_table_says_what_to_put_where(tmp_path):
    with pytest.raises(DownloadFailed, match=r"x \(506, 13\) and y \(506,\) at .*bostonHousing\.npz"):
        data.load("boston", root=tmp_path)


def test_a_table_of_another_size_is_refused(tmp_path):
    (tmp_path / "uci").mkdir()
    np.savez(tmp_path / "uci" / "yacht.npz", x=np.ones((5, 6)), y=np.ones(5))
    with pytest.raises(CorruptFile, match="308 rows of 6 features"):
        data.load("yacht", root=tmp_path)


# validation


def test_validation_is_taken_off_the_training_set():
    digits = data.load("digits")
    held = digits.with_validation(297, seed=1)
    assert (len(held.train_x), len(held.valid_x), len(held.test_x)) == (1000, 297, 500)
    assert "1,000 train, 297 validation, 500 test" in repr(held)

    def rows(x, y):
        return sorted([*row.flatten().tolist(), label.item()] for row, label in zip(x, y, strict=True))

    together = rows(torch.cat([held.train_x, held.valid_x]), torch.cat([held.train_y, held.valid_y]))
    assert together == rows(digits.train_x, digits.train_y)
    assert torch.equal(held.valid_x, digits.with_validation(297, seed=1).valid_x)
    assert not torch.equal(held.valid_x, digits.with_validation(297, seed=2).valid_x)
    assert len(digits.with_validation(0.5).valid_x) == 648
    assert len(digits.train_x) == 1297
    assert len(digits.valid_x) == 0


@pytest.mark.parametrize("size", [0, 1297, -1, 1.0, 0.0])
def test_a_validation_part_must_leave_some(size):
    with pytest.raises(ValueError, match="leave some of the 1297"):
        data.load("digits").with_validation(size)


def test_no_second_validation_part():
    with pytest.raises(ValueError, match="already"):
        data.load("digits").with_validation(10).with_validation(10)


def test_its_files_import_nothing_but_torch_and_numpy():
    allowed = {"bayeslim", "numpy", "torch", *sys.stdlib_module_names}
    for path in Path(data.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            imported = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            imported += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in imported} <= allowed


@pytest.fixture
def little_memory():
    """At most 256 MiB more than now, so that a file that takes gigabytes fails at once."""
    resource = pytest.importorskip("resource")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory in use from /proc")
@pytest.mark.parametrize("promised", [True, False])
def test_a_small_idx_file_does_not_unpack_to_gigabytes(tmp_path, little_memory, promised):
    (tmp_path / "mnist").mkdir()
    write_idx(tmp_path / "mnist", "test", *random_images(3))
    count = 4_000_000 if promised else 3
    with gzip.open(tmp_path / "mnist" / "t10k-images-idx3-ubyte.gz", "wb", compresslevel=1) as file:
        file.write(b"\0\0\x08\x03" + np.array([count, 28, 28], ">u4").tobytes())
        for _ in range(400):
            file.write(bytes(1 << 20))
    with pytest.raises(CorruptFile, match="more than the 47,040,000" if promised else "but more follow"):
        data.load("mnist", root=tmp_path, part="test")


def npy_header(shape, size=0):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": shape})
    return file.getvalue() + bytes(size)


@pytest.mark.parametrize("shape", [(1 << 40,), (1 << 20, 1 << 20), (-1, 3)])
def test_a_huge_declared_shape_is_refused_before_memory_is_taken(tmp_path, shape):
    (tmp_path / "uci").mkdir()
    with zipfile.ZipFile(tmp_path / "uci" / "yacht.npz", "w") as archive:
        archive.writestr("x.npy", npy_header(shape, 64))
        archive.writestr("y.npy", npy_header((3,), 24))
    with pytest.raises(CorruptFile, match=r"its header promises|needs numbers"):
        data.load("yacht", root=tmp_path)
    (tmp_path / "x.npy").write_bytes(npy_header(shape, 64))
    with pytest.raises(BadSetting, match=r"its header promises|needs numbers"):
        read_inputs(tmp_path / "x.npy", None, torch.float32)


@pytest.mark.parametrize("wrong", [b"(", b"'", b"\0", b"[(1,)]", b"{1: 2"])
def test_a_damaged_header_of_an_array_is_named(tmp_path, wrong):
    """Python's own tokenizer reads the header, and its errors are not those of files."""
    header = bytearray(npy_header((3,), 24))
    header[10 : 10 + len(wrong)] = wrong
    (tmp_path / "x.npy").write_bytes(header)
    with pytest.raises(BadSetting, match=r"x\.npy is no .npy file of numbers"):
        read_inputs(tmp_path / "x.npy", None, torch.float32)
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", bytes(header))
    with pytest.raises(CorruptFile, match=r"x\.npz could not be read"):
        read_npz(tmp_path / "x.npz", "x")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_an_idx_file_that_ends_in_its_header(tmp_path, suffix):
    file = tmp_path / f"images{suffix}"
    content = b"\0\0\x08\xff" + b"\xff" * 100
    file.write_bytes(gzip.compress(content) if suffix else content)
    with pytest.raises(CorruptFile, match="promises 255 dimensions, and ends before them"):
        read_idx(file)


def test_a_small_npz_does_not_unpack_to_gigabytes(tmp_path):
    (tmp_path / "uci").mkdir()
    with zipfile.ZipFile(tmp_path / "uci" / "yacht.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("x.npy", "w") as file:
            file.write(npy_header((25_000_000,)))
            for _ in range(25):
                file.write(bytes(8_000_000))
        archive.writestr("y.npy", npy_header((3,), 24))
    assert (tmp_path / "uci" / "yacht.npz").stat().st_size < 1_000_000
    with pytest.raises(CorruptFile, match="more than the 153,600,000 bytes"):
        data.load("yacht", root=tmp_path)


def test_a_cifar_file_with_too_many_records_is_refused(tmp_path):
    folder = tmp_path / "cifar10" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    with (folder / "test_batch.bin").open("wb") as file:
        file.truncate(3073 * 10_001)
    with pytest.raises(CorruptFile, match="more than 10,000 records take"):
        data.load("cifar10", root=tmp_path, part="test")
