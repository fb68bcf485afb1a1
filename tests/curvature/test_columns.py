import pytest
import torch

import oracles
from bayeslim.curvature.columns import mixed_column, output_columns
from bayeslim.errors import ShapeMismatch
from bayeslim.likelihoods import Bernoulli, Categorical, Gaussian, Poisson

LIKELIHOODS = [
    (Categorical(), (4, 3), lambda f: torch.randint(0, 3, (4,))),
    (Categorical(), (4, 2, 3), lambda f: torch.randint(0, 3, (4, 2))),
    (Categorical(class_dim=1), (4, 3, 2, 2), lambda f: torch.randint(0, 3, (4, 2, 2))),
    (Bernoulli(), (4,), lambda f: torch.ones(4)),
    (Bernoulli(), (4, 2, 3), lambda f: torch.ones(4, 2, 3)),
    (Poisson(), (4, 2), lambda f: torch.ones(4, 2)),
    (Gaussian(0.3), (4, 2), lambda f: torch.zeros(4, 2)),
]


@pytest.mark.parametrize(("likelihood", "shape", "targets"), LIKELIHOODS)
def test_exact_columns_add_up_to_the_hessian(likelihood, shape, targets):
    f = torch.randn(shape, dtype=torch.float64)
    y = targets(f)
    columns = torch.stack(list(output_columns(likelihood, f, y, "exact", torch.Generator())))
    flat = columns.reshape(len(columns), shape[0], -1)
    truth = oracles.output_hessian(likelihood, f, y)
    torch.testing.assert_close(torch.einsum("knp,knq->npq", flat, flat), truth)


@pytest.mark.parametrize("kind", ["signs", "sampled"])
@pytest.mark.parametrize(("likelihood", "shape", "targets"), LIKELIHOODS)
def test_random_columns_have_the_hessian_as_second_moment(likelihood, shape, targets, kind):
    f = torch.randn(shape, dtype=torch.float64)
    truth = oracles.output_hessian(likelihood, f, targets(f))
    repeated = f.repeat(3000, *(1 for _ in shape[1:]))
    y = targets(f).repeat(3000, *(1 for _ in targets(f).shape[1:]))
    (column,) = output_columns(likelihood, repeated, y, kind, torch.Generator().manual_seed(0))
    flat = column.reshape(3000, shape[0], -1)
    outer = torch.einsum("snp,snq->snpq", flat, flat)
    error = (outer.mean(0) - truth) / (outer.std(0) / 3000**0.5 + 1e-9)
    assert error.abs().max() < 5


def test_signs_need_no_square_of_the_classes():
    """The closed form for classes is the mixture of the columns √p_c (e_c − p)."""
    f, likelihood = torch.randn(4, 3, 5, dtype=torch.float64), Categorical()
    mixed = mixed_column(likelihood, f, torch.Generator().manual_seed(1))
    signs = torch.randint(0, 2, f.shape, generator=torch.Generator().manual_seed(1), dtype=torch.int8).double() * 2 - 1
    p = f.softmax(-1)
    columns = p.sqrt().unsqueeze(-1) * (torch.eye(5, dtype=torch.float64) - p.unsqueeze(-2))
    torch.testing.assert_close(mixed, torch.einsum("npkc,npk->npc", columns, signs))
    huge = mixed_column(likelihood, torch.randn(2, 200_000), torch.Generator())
    assert huge.shape == (2, 200_000)


@pytest.mark.parametrize("kind", ["exact", "signs", "sampled", "empirical"])
def test_ignored_targets_have_no_curvature(kind):
    f, y = torch.randn(3, 4, 5), torch.randint(0, 5, (3, 4))
    y[0, 2] = y[2, 0] = -100
    for column in output_columns(Categorical(), f, y, kind, torch.Generator()):
        assert float(column[0, 2].abs().sum() + column[2, 0].abs().sum()) == 0
    total = sum(column.abs() for column in output_columns(Categorical(), f, y, kind, torch.Generator()))
    assert bool((total.sum(-1)[y != -100] > 0).all())


def test_half_precision_outputs():
    f = torch.randn(4, 3).half()
    for kind in ("exact", "signs", "sampled", "empirical"):
        for column in output_columns(Categorical(), f, torch.tensor([0, 1, 2, 0]), kind, torch.Generator()):
            assert column.dtype == torch.float16


def test_outputs_need_examples():
    with pytest.raises(ShapeMismatch, match="one row an example"):
        list(output_columns(Categorical(), torch.zeros(()), torch.zeros(()), "exact", torch.Generator()))
