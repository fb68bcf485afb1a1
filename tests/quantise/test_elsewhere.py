"""Quantised networks where plain ones belong: errors that say what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bayeslim as bl


def test_errors_say_what_to_do(tmp_path) -> None:
    x = torch.randn(20, 4)
    bnn = bl.bayesianize(nn.Linear(4, 2), bl.Laplace(), likelihood=bl.likelihoods.Categorical())
    bnn.fit(bl.data.Loader(x, torch.arange(20) % 2, batch_size=10), progress=False)
    quantised = bl.quantise(bnn, bits=4)
    with pytest.raises(TypeError, match="Compact before you quantise"):
        bl.compact(quantised, x)
    with pytest.raises(TypeError, match=r"pass its \.network"):
        bl.benchmark(nn.Linear(4, 2), quantised, example=x)
    with pytest.raises(TypeError, match=r"bl\.encode"):
        bl.save(quantised, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
