"""Rows of sums made into gradients of parameters."""

import pytest
import torch

from blockres_kernels.parameters import parameter_gradients
from tests.support.memory import poisoned_allocations
from tests.support.numerics import assert_parameter_gradient


@pytest.mark.parametrize("key_weight", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("programs", "queries"), [(37, ()), (1, ()), (65, (3,)), (0, (2,))])
def test_rows_are_added_and_split_between_factors(programs, queries, norm, key_weight, device):
    dim = 300
    key_rows = torch.randn(programs, *queries, dim, device=device)
    norm_rows = torch.randn(programs + 5, dim, device=device) if norm else None
    query = torch.randn(*queries, dim, device=device)
    weight = torch.randn(*queries, dim, device=device).bfloat16() if key_weight else None
    norm_weight = torch.randn(dim, device=device).double() if norm else None
    first = parameter_gradients(key_rows, norm_rows, query, weight, norm_weight)
    with poisoned_allocations():
        second = parameter_gradients(key_rows, norm_rows, query, weight, norm_weight)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    nothing, dkey = torch.empty(0), key_rows.cpu().double().sum(0)
    exact = (
        dkey if weight is None else dkey * weight.cpu().double(),
        nothing if weight is None else dkey * query.cpu().double(),
        nothing if norm_rows is None else norm_rows.cpu().double().sum(0),
    )
    for gradient, parameter, right in zip(first, (query, weight, norm_weight), exact, strict=True):
        assert parameter is None or gradient.dtype == parameter.dtype
        assert_parameter_gradient(gradient, right, torch.float32)
