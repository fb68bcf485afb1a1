"""Sums of outer products equal one product, in strips or whole."""

from __future__ import annotations

import pytest
import torch

from bayeslim.curvature.moments import MIN_ROWS_FOR_STRIPS, ROWS_PER_STRIP, add_outer_products, symmetric


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("size", [5, ROWS_PER_STRIP, 2 * ROWS_PER_STRIP + 7])
@pytest.mark.parametrize("rows", [3, MIN_ROWS_FOR_STRIPS + 1])
def test_outer_products(rows, size, groups):
    torch.manual_seed(0)
    first, second = torch.randn(2, rows, groups, size, dtype=torch.float64)
    total = torch.zeros(groups, size, size, dtype=torch.float64)
    add_outer_products(total, first)
    add_outer_products(total, second)
    both = torch.cat([first, second])
    torch.testing.assert_close(symmetric(total), torch.einsum("ngi,ngj->gij", both, both))
