"""Several processes at one folder: nothing is lost, and the loser is told."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

import pytest
import torch

import bayeslim as bl
from bayeslim.errors import BayeslimError, CorruptFile, FolderInUse
from bayeslim.io import storage
from bayeslim.io.lock import locked
from bayeslim.io.storage import INDEX, read_folder, write_folder
from processes import in_processes

WRITERS = 3
WRITES = 15
READS = 50
SECONDS_TO_GIVE_UP = 60


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((64,), value), "v": torch.full((3,), -value)}


def work(rank: int, folder: str) -> None:
    """Write again and again, but for the last process, which reads."""
    torch.set_num_threads(1)
    done, wrong, end = 0, [], time.monotonic() + SECONDS_TO_GIVE_UP
    while done < (WRITES if rank < WRITERS else READS) and time.monotonic() < end:
        try:
            if rank < WRITERS:
                write_folder(folder, "thing", {"rank": rank, "turn": done}, tensors(1000.0 * rank + done))
            else:
                _, config, found = read_folder(folder, ("thing",))
                assert found["w"][0] == 1000.0 * config["rank"] + config["turn"] == -found["v"][0]
            done += 1
        except FolderInUse:
            time.sleep(0.001 * (1 + rank))
        except Exception as error:
            wrong.append(repr(error))
            break
    Path(f"{folder}-{rank}.json").write_text(json.dumps({"done": done, "wrong": wrong}))


def test_writers_and_a_reader_at_once(tmp_path):
    folder = tmp_path / "shared"
    write_folder(folder, "thing", {"rank": 0, "turn": 0}, tensors(0.0))
    in_processes(work, WRITERS + 1, str(folder))
    results = [json.loads(Path(f"{folder}-{rank}.json").read_text()) for rank in range(WRITERS + 1)]
    assert [found["wrong"] for found in results] == [[]] * (WRITERS + 1)
    assert [found["done"] for found in results] == [*[WRITES] * WRITERS, READS]
    _, config, found = read_folder(folder, ("thing",))
    assert torch.equal(found["w"], tensors(1000.0 * config["rank"] + config["turn"])["w"])
    assert len(list(folder.iterdir())) == 2


def test_the_loser_is_told_and_changes_nothing(tmp_path):
    network = torch.nn.Linear(2, 2)
    bl.save(network, tmp_path / "network")
    before = {file.name: file.read_bytes() for file in (tmp_path / "network").iterdir()}
    with locked(tmp_path / "network"):
        with pytest.raises(FolderInUse, match=f"is being written to by process {os.getpid()}. Wait until it is done"):
            bl.save(torch.nn.Linear(2, 2), tmp_path / "network")
        assert bl.load(tmp_path / "network", model=torch.nn.Linear(2, 2)).weight.equal(network.weight)
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "network").iterdir()}


def test_without_locks_only_the_replaced_file_goes(tmp_path, monkeypatch):
    monkeypatch.setattr("bayeslim.io.lock._lock", lambda descriptor: None)
    write_folder(tmp_path, "thing", {}, tensors(1.0))
    replaced = json.loads((tmp_path / INDEX).read_text())["tensors"]
    another = tmp_path / "tensors-0123456789abcdef.safetensors"
    another.write_bytes(b"of another process, whose index is about to follow")
    write_folder(tmp_path, "thing", {}, tensors(2.0))
    assert another.exists()
    assert not (tmp_path / replaced).exists()


def test_a_reader_whose_tensors_are_replaced_starts_again(tmp_path, monkeypatch):
    write_folder(tmp_path, "thing", {"turn": 1}, tensors(1.0))
    read, turns = storage._read_index, iter([2, 3])

    def read_then_replace(folder):
        text = read(folder)
        for turn in turns:
            write_folder(folder, "thing", {"turn": turn}, tensors(turn))
            break
        return text

    monkeypatch.setattr(storage, "_read_index", read_then_replace)
    _, config, found = read_folder(tmp_path, ("thing",))
    assert config["turn"] == 3
    assert found["w"][0] == 3


def test_a_missing_tensor_file_is_an_error(tmp_path):
    write_folder(tmp_path, "thing", {}, tensors(1.0))
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(CorruptFile, match="its tensor file is missing"):
        read_folder(tmp_path, ("thing",))


@pytest.mark.parametrize("place", ["format", "version", "kind", "tensors", "sha256", "aliases", "config"])
def test_a_change_of_any_entry_of_the_index_is_found(tmp_path, place):
    write_folder(tmp_path, "thing", {"a": 1.0}, tensors(1.0))
    index = json.loads((tmp_path / INDEX).read_text())
    changed = {"config": {"a": 3.0}, "aliases": {"x": "w"}, "version": 3}.get(place, "other")
    (tmp_path / INDEX).write_text(json.dumps(index | {place: changed}))
    with pytest.raises(CorruptFile):
        read_folder(tmp_path, ("thing", "other"))


def test_a_flipped_bit_in_the_settings_is_found(tmp_path):
    prior = bl.priors.Normal(1.0)
    network = torch.nn.Linear(2, 2)
    bnn = bl.bayesianize(network, bl.Variational(), likelihood=bl.likelihoods.Categorical(), prior=prior)
    bl.save(bnn, tmp_path)
    text = (tmp_path / INDEX).read_bytes()
    at = text.index(b"1.0", text.index(b'"std"'))
    flipped = text[:at] + bytes([text[at] ^ 2]) + text[at + 1 :]
    assert flipped[at : at + 3] == b"3.0"
    (tmp_path / INDEX).write_bytes(flipped)
    with pytest.raises(CorruptFile, match="does not match its checksum"):
        bl.load(tmp_path, model=network)


@pytest.mark.skipif(os.name == "nt", reason="folders cannot be opened there")
def test_folders_are_flushed_after_a_rename(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, Path.replace

    def flushed(descriptor):
        events.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def renamed(path, target):
        events.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "replace", renamed)
    write_folder(tmp_path, "thing", {}, tensors(1.0))
    assert events == ["file", "rename", "folder"] * 2


def test_settings_that_are_no_json_are_an_error(tmp_path):
    with pytest.raises(BayeslimError, match="cannot be written as JSON"):
        write_folder(tmp_path / "x", "thing", {"a": {1, 2}}, tensors(1.0))
    assert not (tmp_path / "x").exists()
