import pytest
import torch
import torch.nn.functional as F
from dense_gaussians import psd
from torch import nn
from torch.func import functional_call, jacrev

from bayeslim.errors import ShapeMismatch
from bayeslim.posteriors import Diagonal, Kronecker, KroneckerFactors, functional
from bayeslim.posteriors.functional import diagonal_functional_covariance


def close(a, b, tolerance=1e-8):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def case(kind):
    """A layer, then a nonlinear head with three outputs; the layer's inputs as the weights see them."""
    torch.manual_seed(0)
    if kind == "linear":
        layer, x = nn.Linear(5, 4), torch.randn(6, 5)
        a = x[:, None]
    elif kind == "sequence":
        layer, x = nn.Linear(5, 4, bias=False), torch.randn(6, 3, 5)
        a = x
    else:
        groups = 2 if kind == "grouped" else 1
        layer, x = nn.Conv2d(4, 6, 2, groups=groups, bias=kind != "plain"), torch.randn(6, 4, 3, 4)
        a = F.unfold(x, 2).mT
    layer, x, a = layer.double(), x.double(), a.double()
    hidden = layer(x)
    head = nn.Sequential(nn.Flatten(), nn.Tanh(), nn.Linear(hidden[0].numel(), 3)).double()
    hidden = hidden.detach().requires_grad_()
    output = head(hidden)
    gradients = torch.stack([torch.autograd.grad(output[:, c].sum(), hidden, retain_graph=True)[0] for c in range(3)])
    g = gradients.reshape(3, 6, -1, 4) if kind in ("linear", "sequence") else gradients.flatten(3).mT
    params = {name: p.detach() for name, p in layer.named_parameters()}

    def network(p, one):
        return head(functional_call(layer, p, one[None]))[0]

    jacobian = [jacrev(network)(params, one) for one in x]
    return layer, params, a, g, {name: torch.stack([j[name] for j in jacobian]) for name in params}


def posterior_of(layer, params, prior):
    generator = torch.Generator().manual_seed(1)
    groups = getattr(layer, "groups", 1)
    outputs, inputs = params["weight"].shape[0] // groups, params["weight"][0].numel()
    return Kronecker(
        params,
        [
            KroneckerFactors.of(
                "weight",
                outputs=psd(groups, outputs, generator=generator, rank=2),
                inputs=psd(groups, inputs + ("bias" in params), generator=generator),
                bias="bias" if "bias" in params else None,
            )
        ],
        prior,
    )


@pytest.mark.parametrize("kind", ["linear", "sequence", "plain", "convolution", "grouped"])
@pytest.mark.parametrize("apart", [False, True])
def test_without_jacobians_equals_with_them(kind, apart, monkeypatch):
    layer, params, a, g, jacobian = case(kind)
    prior = {"weight": 0.4, "bias": 2.0} if apart and "bias" in params else 0.4
    posterior = posterior_of(layer, params, prior)
    wanted = posterior.functional_covariance(jacobian)
    block = posterior.blocks[0]
    close(block.functional_covariance(a, g), wanted)
    monkeypatch.setattr(functional, "MAX_NUMBERS_PER_CHUNK", 1)
    close(block.functional_covariance(a, g), wanted)
    close(block.functional_covariance(a.float(), g.float()).double(), wanted, 1e-4)
    assert block.functional_covariance(a[:0], g[:, :0]).shape == (0, 3, 3)


@pytest.mark.parametrize("kind", ["linear", "sequence", "plain", "convolution", "grouped"])
def test_independent_weights(kind):
    layer, params, a, g, jacobian = case(kind)
    independent = Diagonal(params, {name: torch.rand_like(t) for name, t in params.items()})
    wanted = sum(
        torch.einsum(
            "bcn,n,bdn->bcd", jacobian[n].flatten(2), independent.variance[n].flatten(), jacobian[n].flatten(2)
        )
        for n in params
    )
    block = posterior_of(layer, params, 1.0).blocks[0]
    close(diagonal_functional_covariance(block.layer, independent.variance, a, g), wanted)


def test_what_does_not_fit_is_refused():
    layer, params, a, g, _ = case("linear")
    block = posterior_of(layer, params, 1.0).blocks[0]
    for inputs, gradients in ((a[..., :3], g), (a, g[..., :3]), (a[:, 0], g), (a, g[:, :2]), (a, g[0])):
        with pytest.raises(ShapeMismatch, match="gradients"):
            block.functional_covariance(inputs, gradients)
