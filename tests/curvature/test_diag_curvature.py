import pytest
import torch
from curved_networks import CASES, make
from torch import nn

import oracles
from bayeslim.curvature import diag
from bayeslim.errors import NoSiteMatched, UnsupportedModel
from bayeslim.likelihoods import Categorical, Gaussian, Poisson


@pytest.mark.parametrize("name", CASES)
def test_is_the_diagonal_of_the_ggn(name):
    case = make(name)
    truth = oracles.ggn(case.model, case.batches(), case.likelihood).diagonal()
    found = diag(case.model, case.batches(), case.likelihood)
    torch.testing.assert_close(oracles.flat(found, oracles.parameter_names(case.model)), truth, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_empirical_is_the_sum_of_squared_gradients(name):
    case = make(name)
    truth = oracles.example_gradients(case.model, case.batches(), case.likelihood).square().sum(0)
    found = diag(case.model, case.batches(), case.likelihood, "empirical")
    torch.testing.assert_close(oracles.flat(found, oracles.parameter_names(case.model)), truth, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("name", "kind"), [("mlp", "fisher"), ("segmentation", "signs")])
def test_one_backward_is_unbiased(name, kind):
    case = make(name)
    names = oracles.parameter_names(case.model)
    truth = oracles.ggn(case.model, case.batches(), case.likelihood).diagonal()
    draws = torch.stack(
        [oracles.flat(diag(case.model, case.batches(), case.likelihood, kind, seed=s), names) for s in range(150)]
    )
    error = (draws.mean(0) - truth) / (draws.std(0) / 150**0.5 + 1e-9)
    assert draws.std(0).max() > 0
    assert error.abs().max() < 5


def test_minibatches_of_any_size_give_the_same():
    case = make("convolutions and norms")
    whole = diag(case.model, case.batches(5), case.likelihood)
    for name, value in diag(case.model, case.batches(1, 3, 1), case.likelihood).items():
        torch.testing.assert_close(value, whole[name])


def test_some_names_only():
    case = make("convolutions and norms")
    whole = diag(case.model, case.batches(), case.likelihood)
    some = diag(case.model, case.batches(), case.likelihood, names=["9.bias", "1.weight"])
    assert list(some) == ["1.weight", "9.bias"]
    for name, value in some.items():
        torch.testing.assert_close(value, whole[name])


def test_hutchinson_is_exact_where_the_hessian_is_diagonal():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, dtype=torch.float64))

        def forward(self, x):
            return x * self.w.exp()

    case = make("mlp")
    case.model, case.y = Scale(), torch.randn(5, 4, dtype=torch.float64)
    truth = oracles.hessian(case.model, case.batches(), Gaussian(0.5))
    found = diag(case.model, case.batches(), Gaussian(0.5), "hutchinson")["w"]
    torch.testing.assert_close(found, truth.diagonal())
    assert (truth - torch.diag(truth.diagonal())).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_hutchinson_is_unbiased_for_the_hessian(name):
    case = make(name)
    truth = oracles.hessian(case.model, case.batches(5), case.likelihood).diagonal()
    names = oracles.parameter_names(case.model)
    draws = torch.stack(
        [
            oracles.flat(diag(case.model, case.batches(5), case.likelihood, "hutchinson", probes=3, seed=s), names)
            for s in range(40)
        ]
    )
    spread = draws.std(0) / 40**0.5 + 1e-9
    assert ((draws.mean(0) - truth) / spread).abs().max() < 5.5
    if name == "mlp":  # and it is not the GGN
        ggn = oracles.ggn(case.model, case.batches(5), case.likelihood).diagonal()
        assert ((draws.mean(0) - ggn) / spread).abs().max() > 7


def test_hutchinson_says_what_cannot_be_differentiated_twice():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            return g * 2

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3).double()

        def forward(self, x):
            return Once.apply(self.inner(x))

    case = make("mlp")
    with pytest.raises(UnsupportedModel, match="cannot be differentiated twice"):
        diag(Model(), case.batches(), case.likelihood, "hutchinson")


def test_a_loss_linear_in_the_parameters_has_no_hessian():
    model = nn.Linear(2, 1).double()
    x, y = torch.zeros(3, 2, dtype=torch.float64), torch.zeros(3, 1)
    found = diag(model, [(x, y)], Poisson(), "hutchinson", names=["weight"])
    assert float(found["weight"].abs().sum()) == 0


def test_bad_arguments():
    case = make("mlp")
    with pytest.raises(ValueError, match=r"kind must be one of ggn, .* Got 'kfac'"):
        diag(case.model, case.batches(), case.likelihood, "kfac")
    with pytest.raises(ValueError, match="probes must be at least 1"):
        diag(case.model, case.batches(), case.likelihood, "hutchinson", probes=0)
    with pytest.raises(NoSiteMatched, match=r'"0.wieght" is no parameter of Sequential. Closest names: "0.weight"'):
        diag(case.model, case.batches(), case.likelihood, names=["0.wieght"])


def test_padding_does_not_count():
    model = nn.Linear(3, 4).double()
    x, y = torch.randn(2, 3, 3, dtype=torch.float64), torch.randint(0, 4, (2, 3))
    y[0, 1:] = -100
    kept = [(x[0, :1].unsqueeze(0), y[0, :1].unsqueeze(0)), (x[1:], y[1:])]
    for kind in ("ggn", "empirical"):
        torch.testing.assert_close(diag(model, [(x, y)], Categorical(), kind), diag(model, kept, Categorical(), kind))


def test_a_changed_input_is_refused():
    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            h = x.clone()
            out = self.inner(h)
            h += 1
            return self.head(out + h)

    case = make("mlp")
    model = Changes().double()
    with pytest.raises(UnsupportedModel, match='input of "inner" is changed in place'):
        diag(model, case.batches(), case.likelihood)
