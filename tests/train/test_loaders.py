"""What people give in the place of a network, inputs or a loader is answered with what to write instead."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import bayeslim as bl
from bayeslim.errors import ShapeMismatch

X, Y = torch.randn(20, 3), torch.arange(20) % 2
GIVEN = {
    "numpy": (X.numpy(), "torch.from_numpy"),
    "torch's data set": (TensorDataset(X, Y), r"DataLoader\(dataset"),
    "a data set": (bl.data.Dataset("own", X, Y, X, Y), "train_x"),
}


@pytest.fixture
def bnn():
    return bl.bayesianize(nn.Linear(3, 2), bl.Variational(), likelihood=bl.likelihoods.Categorical(), num_data=20)


@pytest.mark.parametrize("kind", GIVEN)
def test_data_that_are_no_batches(bnn, kind):
    given, advice = GIVEN[kind]
    before = bnn.model.weight.detach().clone()
    for wrong in (
        lambda: bnn.fit(given),
        lambda: bl.distill(bnn, given),
        lambda: bl.distill(bnn, [(X, Y)], unlabelled=given),
        *([] if kind == "numpy" else [lambda: bl.predict(bnn, given)]),  # predict takes arrays
    ):
        with pytest.raises(TypeError, match=advice):
            wrong()
    assert torch.equal(bnn.model.weight, before)


@pytest.mark.parametrize("given", [X, (X, Y)])
def test_tensors_in_the_place_of_a_loader(bnn, given):
    for wrong in (lambda: bnn.fit(given), lambda: bl.distill(bnn, given)):
        with pytest.raises(TypeError, match=r"Loader\(x, y"):
            wrong()


def test_batches_of_numpy_arrays(bnn):
    for how in ("probs", "online"):
        with pytest.raises(ShapeMismatch, match="as_tensor"):
            bl.distill(bnn, [(X.numpy(), Y.numpy())], how=how, progress=False)


def test_a_plain_network_has_no_prediction():
    with pytest.raises(TypeError, match=r"Bayesian network.*Got Linear.*network\(x\)"):
        bl.predict(nn.Linear(3, 2), X)
