"""A place that cannot be written to: a clear error from every verb that writes, and nothing lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bayeslim as bl
from bayeslim.errors import BayeslimError

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
LOADER = bl.data.Loader(X, (X[:, 0] > 0).long(), 16)


@pytest.mark.parametrize(
    "write",
    [
        lambda model, place: bl.save(model, place / "network"),
        lambda model, place: bl.export(model, place / "network.onnx", example=X[:2]),
        lambda model, place: bl.export(model, place / "network.pt2", example=X[:2]),
        lambda model, place: bl.compress(model, LOADER, LOADER, budget=bl.Budget(sparsity=0.5), out=place / "run"),
    ],
    ids=["save", "onnx", "pt2", "compress"],
)
def test_a_place_that_cannot_be_written_to(tmp_path, write):
    place = tmp_path / "file"  # no folder can be made below a file, whoever runs this
    place.write_text("kept")
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(BayeslimError, match=r"(?s)Could not write.*may write to"):
        write(model, place)
    assert place.read_text() == "kept"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
