import pytest
import torch
from curved_networks import make, mlp
from test_kfac import block, product
from torch import nn

import oracles
from bayeslim.curvature import kfac, kfra
from bayeslim.curvature.kfra import ELEMENTWISE
from bayeslim.errors import ShapeMismatch, UnsupportedModel
from bayeslim.likelihoods import Categorical, Gaussian


@pytest.mark.parametrize("activation", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_exact_for_a_single_example(activation):
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(4, 5), activation(), nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5)), nn.Linear(5, 3)
    )
    model.double()
    batch = (torch.randn(1, 2, 2, dtype=torch.float64), torch.tensor([1]))
    truth = oracles.ggn(model, [batch], Categorical())
    factors = kfra(model, [batch], Categorical())
    assert len(factors.layers) == 3
    for found in factors.layers.values():
        torch.testing.assert_close(product(found), block(truth, model, found), rtol=1e-9, atol=1e-12)


def test_exact_for_deep_linear_networks():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3, bias=False), nn.Linear(3, 2)).double()
    batch = (torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 2))
    truth = oracles.ggn(model, [batch], Gaussian(0.3))
    for found in kfra(model, [batch], Gaussian(0.3)).layers.values():
        torch.testing.assert_close(product(found), block(truth, model, found), rtol=1e-10, atol=1e-10)


def test_the_recursion_by_hand():
    model, x, y = mlp(), torch.randn(9, 4, dtype=torch.float64), torch.randint(0, 3, (9,))
    factors = kfra(model, [(x[:4], y[:4]), (x[4:], y[4:])], Categorical())
    H = oracles.output_hessian(Categorical(), model(x), y)
    slopes = (1 - torch.tanh(model[0](x)).square()).detach()
    W = model[2].weight.detach()
    G = (W.T @ H.mean(0) @ W) * (slopes.T @ slopes / 9) * 9
    torch.testing.assert_close(factors.layers["0.weight"].G[0], G)
    torch.testing.assert_close(factors.layers["2.weight"].G[0], H.sum(0))
    exact = kfac(model, [(x, y)], Categorical(), columns="exact")
    for key, layer in exact.layers.items():
        torch.testing.assert_close(factors.layers[key].A, layer.A)
    assert (factors.layers["0.weight"].G - exact.layers["0.weight"].G).norm() < 0.5 * exact.layers["0.weight"].G.norm()
    assert not torch.allclose(factors.layers["0.weight"].G, exact.layers["0.weight"].G)


def test_some_names_and_in_place_activations():
    case = make("mlp")
    both = kfra(case.model, case.batches(), case.likelihood)
    case.model[1] = nn.Hardtanh(-9, 9, inplace=True)
    some = kfra(case.model, case.batches(), case.likelihood, names=["2.weight", "0.bias"])
    assert some.unsupported == {"0.bias": "is a bias without its weight"}
    assert some.layers["2.weight"].A.shape == (1, 5, 5)
    assert both.layers["2.weight"].A.shape == (1, 6, 6)


def test_other_networks_are_refused():
    case = make("convolutions and norms")
    with pytest.raises(UnsupportedModel, match=r'Got Conv2d at "Sequential.0". Use kfac'):
        kfra(case.model, case.batches(), case.likelihood)
    with pytest.raises(UnsupportedModel, match=r'Got Twice at "Twice"'):
        kfra(make("twice").model, [], case.likelihood)
    with pytest.raises(UnsupportedModel, match="at least one nn"):
        kfra(nn.Sequential(nn.ReLU()), [], case.likelihood)
    shared = nn.Linear(3, 3)
    with pytest.raises(UnsupportedModel, match="used once"):
        kfra(nn.Sequential(shared, shared), [], case.likelihood)
    with pytest.raises(ShapeMismatch, match=r"needs inputs \(B, features\)"):
        kfra(nn.Sequential(nn.Linear(3, 2)), [(torch.randn(2, 4, 3), torch.zeros(2))], case.likelihood)
    with pytest.raises(ShapeMismatch, match=r"one input tensor\. Got dict"):
        kfra(nn.Sequential(nn.Linear(3, 2)), [{"x": torch.randn(2, 3), "y": torch.zeros(2)}], case.likelihood)
