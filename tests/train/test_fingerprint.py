"""The fingerprint of data: of their content alone, without a draw."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, SubsetRandomSampler, TensorDataset

import bayeslim as bl
from bayeslim.train import fingerprint


class Squares(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, row):
        return torch.tensor([float(row)]), row**2


X, Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12)


@pytest.mark.parametrize(
    ("one", "others"),
    [
        (lambda x, y: bl.data.Loader(x, y, 4), [(X, Y + 1), (X.double(), Y), (X[:9], Y[:9]), (X.T.reshape(12, 3), Y)]),
        (lambda x, y: bl.data.Loader({"a": x, "b": x}, y, 4), [(X, Y + 1), (X + 1, Y)]),
        (lambda x, y: [(x, y), {"x": x, "labels": y}], [(X, Y + 1), (-X, Y), (X.bfloat16(), Y)]),
        (lambda x, y: [(x, "a", y[0])], [(X, Y + 1), (X + 1, Y)]),
        (lambda x, y: DataLoader(TensorDataset(x, y), 4, shuffle=True), [(X, Y + 1), (X[:9], Y[:9])]),
        (lambda x, y: DataLoader(Subset(TensorDataset(X, Y), y.tolist())), [(X, Y.flip(0)), (X, Y[:5])]),
        (lambda x, y: DataLoader(TensorDataset(X, Y), sampler=SubsetRandomSampler(y[:5])), [(X, Y[1:])]),
    ],
)
def test_a_fingerprint_is_of_the_content_and_changes_nothing(one, others):
    loader, random = one(X, Y), torch.get_rng_state()
    found = fingerprint.fingerprint(loader)
    assert found == fingerprint.fingerprint(one(X.clone().requires_grad_(), Y.clone()))
    assert len({found, *(fingerprint.fingerprint(one(x, y)) for x, y in others)}) == 1 + len(others)
    assert torch.equal(random, torch.get_rng_state())
    assert getattr(loader, "epoch", 0) == 0, "it was not gone over"


def test_streams_and_other_data_sets_have_no_fingerprint_and_are_not_read():
    stream = iter([(X, Y)])
    assert fingerprint.fingerprint(stream) is None
    assert next(stream)[0] is X
    subset = Subset(Squares(), [0, 1])
    assert fingerprint.fingerprint(DataLoader(Squares())) is fingerprint.fingerprint(DataLoader(subset)) is None


def test_of_large_data_rows_from_everywhere_and_all_labels_are_hashed(monkeypatch):
    monkeypatch.setattr(fingerprint, "MAX_BYTES_HASHED", 4000)
    x, y = torch.zeros(500, 10), torch.zeros(500)  # 20,000 and 2,000 bytes: every tenth row, and all
    known = {fingerprint.fingerprint(bl.data.Loader(x, y))}
    for tensor, row, seen in ((x, 0, True), (x, 490, True), (x, 491, False), (y, 491, True)):
        tensor[row] += 1
        found = fingerprint.fingerprint(bl.data.Loader(x, y))
        assert (found not in known) == seen
        known.add(found)
