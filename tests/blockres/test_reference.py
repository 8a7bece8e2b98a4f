"""The definition itself: derivatives by finite differences, and the identities that the mathematics promises."""

import subprocess
import sys

import pytest
import torch
from torch.nn.functional import rms_norm

from blockres import reference
from tests.support.operations import OPERATIONS, make_call


def test_the_package_brings_it_along():
    subprocess.run([sys.executable, "-c", "import blockres; blockres.reference.attn_res"], check=True, timeout=60)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("everything", [True, False])
def test_derivatives(name, everything):
    call = make_call(
        name,
        (2, 3),
        sources=2,
        queries=2,
        dtype=torch.float64,
        key_weight=everything,
        norm=everything,
        update=everything,
    )

    def function(*leaves):
        return call.with_leaves(leaves)(reference)

    assert torch.autograd.gradcheck(function, call.leaves)
    assert torch.autograd.gradgradcheck(function, call.leaves)


def test_derivatives_of_lse_and_weights():
    call = make_call("attn_res", (2, 3), sources=3, dtype=torch.float64, norm=False)
    sources, query, weight = call.positional

    def function(query, weight, *sources):
        return reference.attn_res(sources, query, weight, return_lse=True, return_weights=True)

    assert torch.autograd.gradcheck(function, (query, weight, *sources))


@pytest.mark.parametrize(("count", "width", "tokens"), [(1, 7, 3), (2, 96, 5), (4, 1, 2), (9, 100, 1)])
@pytest.mark.parametrize("norm", [True, False])
def test_two_phases_are_one_aggregation(count, width, tokens, norm):
    """Merging p into what phase 1 made of the sources gives the aggregation over the sources and p."""
    draw = lambda *size: torch.randn(*size, dtype=torch.float64)  # noqa: E731
    sources, partial, update = draw(count, tokens, width), draw(tokens, width), draw(tokens, width)
    queries, key_weights, gain = draw(3, width), draw(3, width), draw(width)
    norms = {"norm_weight": gain, "norm_eps": 1e-3} if norm else {}
    outputs, lse = reference.attn_res_inter(sources, queries, key_weights, scale=0.7, **norms)
    for s in range(3):
        completed = reference.attn_res(sources, queries[s], key_weights[s], scale=0.7, **(norms if s == 0 else {}))
        torch.testing.assert_close(outputs[s], completed, rtol=1e-12, atol=1e-12)
    for s in (1, 2):
        got, new = reference.attn_res_merge(
            outputs[s], lse[s], partial, queries[s], key_weights[s], update=update, scale=0.7, **norms
        )
        every = [*sources, partial + update]
        want = reference.attn_res(every, queries[s], key_weights[s], scale=0.7, **norms)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(new, partial + update, rtol=0, atol=0)


def test_weights_are_a_softmax_over_the_sources():
    sources, query = torch.randn(5, 4, 16), torch.randn(16)
    out, lse, weights = reference.attn_res(sources, query, return_lse=True, return_weights=True)
    torch.testing.assert_close(weights.sum(0), torch.ones(4))
    torch.testing.assert_close(torch.einsum("nt,ntd->td", weights, sources), out)
    scores = torch.einsum("ntd,d->nt", rms_norm(sources, (16,), eps=1e-6), query)
    torch.testing.assert_close(scores.exp().sum(0).log(), lse)


def test_a_zero_query_averages_and_one_source_is_returned():
    sources = torch.randn(4, 3, 8)
    torch.testing.assert_close(reference.attn_res(sources, torch.zeros(8)), sources.mean(0))
    assert torch.equal(reference.attn_res(sources[:1], torch.randn(8)), sources[0])


def test_the_output_norm_is_an_rms_norm():
    sources, query, gain = torch.randn(4, 3, 8), torch.randn(8), torch.randn(8)
    got = reference.attn_res(sources, query, norm_weight=gain, norm_eps=1e-2)
    torch.testing.assert_close(got, rms_norm(reference.attn_res(sources, query), (8,), gain, 1e-2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_sources_are_computed_in_float32_and_rounded_once(dtype):
    sources, query = torch.randn(4, 3, 8).to(dtype), torch.randn(8)
    wide = reference.attn_res(sources.float(), query)
    assert torch.equal(reference.attn_res(sources, query), wide.to(dtype))
    assert torch.equal(reference.attn_res(sources, query, out_dtype=torch.float32), wide)


def test_the_sum_is_rounded_before_it_is_scored():
    """Where the fused add kept more digits than storage does, a network would change when an add is unfused."""
    output, partial, update = (torch.randn(4, 8).bfloat16() for _ in range(3))
    lse, query = torch.randn(4), torch.randn(8)
    fused = reference.attn_res_merge(output, lse, partial, query, update=update, out_dtype=torch.float32)
    unfused = reference.attn_res_merge(output, lse, partial + update, query, out_dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(fused, unfused, strict=True))
