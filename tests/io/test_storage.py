"""Folders are complete or untouched, and what is not ours is refused."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save as safetensors_bytes

import bayeslim
from bayeslim.errors import BayeslimError, CorruptFile
from bayeslim.io import storage
from bayeslim.io.storage import INDEX, check_fits, decode, encode, read_folder, sealed, write_folder

OLD, NEW = {"w": torch.arange(4.0)}, {"w": torch.arange(4.0) + 1}


def written(folder: Path, config=None, tensors=None) -> Path:
    write_folder(folder, "thing", config or {"a": 1}, tensors or OLD)
    return folder


def edit(folder: Path, **changes) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(sealed(index | changes)))


def put_tensors(folder: Path, data: bytes) -> None:
    """Other content for the tensor file, with a checksum that agrees: what an attacker would do."""
    name = f"tensors-{hashlib.sha256(data).hexdigest()[:16]}.safetensors"
    (folder / name).write_bytes(data)
    edit(folder, tensors=name, sha256=hashlib.sha256(data).hexdigest())


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_round_trip_of_every_kind_of_tensor(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    tensors = {
        "half": base.half(),
        "brain": base.bfloat16(),
        "double": base.double(),
        "long": base.long(),
        "bool": base > 3,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "transposed": base.t(),
        "slice": base[:, 1],
        "expanded": torch.ones(1).expand(5),
        "parameter": torch.nn.Parameter(base),
        "tied": base,
        "nan": torch.tensor([float("nan"), float("inf")]),
    }
    kind, config, read = read_folder(written(tmp_path, {"x": float("inf"), "é": ["ü", None]}, tensors), ("thing",))
    assert (kind, config) == ("thing", {"x": float("inf"), "é": ["ü", None]})
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        torch.testing.assert_close(read[name], tensor.detach(), rtol=0, atol=0, equal_nan=True)
    assert read["tied"] is read["parameter"]


def test_a_folder_holds_two_files_and_leaves_strangers_alone(tmp_path):
    (tmp_path / "notes.tmp").write_text("mine")
    (tmp_path / "tensors.safetensors").write_text("mine")
    (tmp_path / f"{INDEX}.0123abcd.tmp").write_text("left by a killed process")
    (tmp_path / "tensors-0123456789abcdef.safetensors.0123abcd.tmp").write_text("left by a killed process")
    written(tmp_path)
    written(tmp_path, tensors=NEW)
    names = {p.name for p in tmp_path.iterdir()}
    assert names - {"notes.tmp", "tensors.safetensors"} == {
        INDEX,
        json.loads((tmp_path / INDEX).read_text())["tensors"],
    }
    assert (tmp_path / "notes.tmp").read_text() == "mine"
    torch.testing.assert_close(read_folder(tmp_path, ("thing",))[2], NEW)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("dies_at", [0, 1])
@pytest.mark.parametrize("moment", ["before the rename", "after the rename", "half written"])
def test_a_kill_at_any_moment_leaves_old_or_new(tmp_path, monkeypatch, dies_at, moment):
    written(tmp_path)
    replace, calls = Path.replace, []

    def dying(self, target):
        calls.append(target)
        if len(calls) - 1 != dies_at:
            return replace(self, target)
        if moment == "after the rename":
            replace(self, target)
        if moment == "half written":
            self.write_bytes(self.read_bytes()[:7])
        raise Killed

    monkeypatch.setattr(Path, "replace", dying)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)  # a killed process cleans nothing up
    with pytest.raises(Killed):
        written(tmp_path, tensors=NEW)
    monkeypatch.undo()
    complete = dies_at == 1 and moment == "after the rename"
    torch.testing.assert_close(read_folder(tmp_path, ("thing",))[2], NEW if complete else OLD)
    written(tmp_path, tensors=NEW)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_folder_that_takes_no_files_is_reported_and_untouched(tmp_path, monkeypatch, number):
    before = content(written(tmp_path))

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(storage.os, "fsync", refuse)
    with pytest.raises(BayeslimError, match=f"Could not write to .*{os.strerror(number)}.*untouched"):
        written(tmp_path, tensors=NEW)
    assert content(tmp_path) == before


def test_paths_that_cannot_be_folders(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BayeslimError, match="is a file"):
        written(tmp_path / "file")
    with pytest.raises(BayeslimError, match="Could not write to"):
        written(tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_folder(tmp_path / "nowhere", ("thing",))


@pytest.mark.parametrize("keep", [0, 1, 20, -1])
@pytest.mark.parametrize("which", ["index", "tensors"])
def test_truncated_files(tmp_path, which, keep):
    written(tmp_path)
    file = tmp_path / INDEX if which == "index" else next(tmp_path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CorruptFile, match="not valid JSON" if which == "index" else "does not match its checksum"):
        read_folder(tmp_path, ("thing",))


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / INDEX).unlink(), "not written by bayeslim"),
        (lambda f: next(f.glob("*.safetensors")).unlink(), "is missing"),
        (lambda f: (f / INDEX).write_bytes(pickle.dumps(Bomb())), "not valid JSON"),
        (lambda f: (f / INDEX).write_bytes(b"\xff\xfe\x00"), "not valid JSON"),
        (lambda f: (f / INDEX).write_text(deep(200_000)), "not valid JSON"),
        (lambda f: (f / INDEX).write_text("9" * 10_000), "not valid JSON"),
        (lambda f: (f / INDEX).write_text("[]"), "not written by bayeslim"),
        (lambda f: (f / INDEX).write_text('{"format": "other"}'), "not written by bayeslim"),
        (lambda f: edit(f, version=99), "has version 99; this bayeslim reads version 2"),
        (lambda f: edit(f, version=None), "has version None"),
        (lambda f: edit(f, version="1"), "has version '1'"),
        (lambda f: edit(f, kind="other"), "holds a 'other'; needed thing"),
        (lambda f: edit(f, kind=["thing"]), "needed thing"),
        (lambda f: edit(f, tensors="../../etc/passwd"), "names a tensor file that bayeslim would not write"),
        (lambda f: edit(f, tensors="/etc/passwd"), "names a tensor file"),
        (lambda f: edit(f, tensors="x/../tensors-0123456789abcdef.safetensors"), "names a tensor file"),
        (lambda f: edit(f, tensors="tensors-0123456789abcdef.safetensors\n"), "names a tensor file"),
        (lambda f: edit(f, tensors=None), "names a tensor file"),
        (lambda f: edit(f, sha256=None), "does not match its checksum"),
        (lambda f: edit(f, config=[]), "lacks its config"),
        (lambda f: edit(f, aliases=None), "lacks its config or aliases"),
        (lambda f: edit(f, aliases={"v": "nowhere"}), "refers to a tensor that is not there: 'nowhere'"),
        (lambda f: edit(f, aliases={"v": ["w"]}), "refers to a tensor that is not there"),
        (lambda f: put_tensors(f, pickle.dumps(Bomb())), "not a safetensors file"),
        (lambda f: put_tensors(f, b""), "not a safetensors file"),
        (lambda f: put_tensors(f, b"\xff" * 64), "not a safetensors file"),
        (lambda f: put_tensors(f, safetensors_bytes(OLD)[:-4]), "not a safetensors file"),
        (lambda f: put_tensors(f, (1 << 60).to_bytes(8, "little") + b"{}"), "not a safetensors file"),
    ],
)
def test_foreign_and_hostile_folders(tmp_path, monkeypatch, damage, words):
    folder = written(tmp_path / "folder")
    monkeypatch.chdir(tmp_path)
    damage(folder)
    before = content(folder)
    with pytest.raises(CorruptFile, match=words):
        read_folder(folder, ("thing",))
    assert content(folder) == before
    assert not (tmp_path / "exploded").exists()


def test_an_index_of_absurd_size_is_not_read(tmp_path, monkeypatch):
    written(tmp_path)
    monkeypatch.setattr(storage, "_MAX_INDEX_BYTES", 10)
    with pytest.raises(CorruptFile, match="larger than any"):
        read_folder(tmp_path, ("thing",))


def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path):
    for config, tensors, words in (
        ({"a": object()}, OLD, "cannot be written as JSON"),
        ({}, {"extra": {"a": 1}}, '"extra" is a dict, not a tensor'),
        ({}, {"z": torch.zeros(2, dtype=torch.complex128)}, "cannot be written as safetensors"),
    ):
        with pytest.raises(BayeslimError, match=words):
            write_folder(tmp_path / "new", "thing", config, tensors)
        assert not (tmp_path / "new").exists()


def test_settings_survive_as_data():
    tensors: dict[str, torch.Tensor] = {}
    method = bayeslim.Variational(
        family=bayeslim.families.DiagonalGaussian(0.2), samples=4, kl_schedule=bayeslim.schedules.Cyclic(3.0)
    )
    prior = bayeslim.priors.Normal(torch.tensor([1.0, 2.0]), 0.5)
    likelihood = bayeslim.likelihoods.Gaussian("learned", initial_noise=0.3)
    text = json.dumps(encode({"m": method, "p": prior, "l": likelihood, "n": [1, None, True, "s"]}, tensors))
    back = decode(json.loads(text), tensors)
    assert back["m"] == method
    assert torch.equal(back["p"].std, prior.std)
    assert back["p"].mean == 0.5
    assert back["l"].config() == likelihood.config()
    assert back["n"] == [1, None, True, "s"]
    with pytest.raises(BayeslimError, match=r"cannot be saved.*not registered"):
        encode(object(), {})


@pytest.mark.parametrize(
    "value",
    [
        {"$type": "method:nothing", "fields": {"$dict": []}},
        {"$type": "os:system", "fields": {"$dict": []}},
        {"$type": "prior:normal", "fields": {"$dict": [["std", -1.0]]}},
        {"$type": "prior:normal", "fields": {"$dict": [["width", 1.0]]}},
        {"$type": "prior:normal", "fields": 3},
        {"$type": "prior:normal"},
        {"$type": ["prior"], "fields": {}},
        {"$tensor": "nowhere"},
        {"anything": "else"},
        {},
    ],
)
def test_settings_build_only_what_is_in_the_tables(value):
    with pytest.raises(CorruptFile):
        decode(value, {})


def test_fits_names_shapes_and_types():
    wanted = {"a": torch.zeros(2, 3), "b": torch.zeros(1)}
    check_fits(wanted, {"b": torch.ones(1), "a": torch.ones(2, 3)}, "Net")
    for given, words in (
        ({"a": torch.zeros(2, 3)}, "does not fit Net: the file lacks b"),
        (wanted | {"c": torch.zeros(1)}, "the model lacks c"),
        (wanted | {"a": torch.zeros(3, 2)}, r'"a" has shape \(3, 2\) in the file and \(2, 3\) in the model'),
        (wanted | {"a": torch.zeros(2, 3).double()}, r"float64 in the file and torch.float32.*model\.to"),
    ):
        with pytest.raises(CorruptFile, match=words):
            check_fits(wanted, given, "Net")


def test_nothing_is_pickled_anywhere():
    source = Path(bayeslim.__file__).parent
    banned = re.compile(
        r"^\s*(import|from)\s+(c?pickle|dill|joblib|shelve|marshal)|torch\.(load|save)\(|jit\.load\(", re.M
    )
    files = list(source.rglob("*.py"))
    assert len(files) > 30
    assert [f.name for f in files if banned.search(f.read_text())] == ["sources.py"]
    # Weights that torch.save wrote are read with torch's restricted reader, whose error is one of pickle's.
    (text,) = (f.read_text() for f in files if f.name == "sources.py")
    assert text.count("torch.load(") == text.count("weights_only=True") == 1
    assert set(re.findall(r"pickle\.\w+", text)) == {"pickle.UnpicklingError"}
    assert banned.search("    import pickle")
