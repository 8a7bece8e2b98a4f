"""The repaired interpreter against exact arithmetic, and the counter of bytes against sums done by hand."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from bench.interpreter import bfloat16_bits, bfloat16_values, count_traffic, tree_sum

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's own arithmetic is used where there is one")


@triton.jit
def _arithmetic(a, b, sums, products, negated, larger, narrowed, constant, WIDTH: tl.constexpr):
    lanes = tl.arange(0, WIDTH)
    x, y = tl.load(a + lanes), tl.load(b + lanes)
    tl.store(sums + lanes, x + y)
    tl.store(products + lanes, x * y)
    tl.store(negated + lanes, -x)
    tl.store(larger + lanes, x > y)
    tl.store(narrowed + lanes, (x.to(tl.float32) * 1.1).to(tl.bfloat16))
    tl.store(constant + lanes, tl.full([WIDTH], 1 / 3, tl.bfloat16))


@triton.jit
def _total(x, total, WIDTH: tl.constexpr):
    tl.store(total, tl.sum(tl.load(x + tl.arange(0, WIDTH)), axis=0))


@triton.jit
def _atomic_total(x, total, WIDTH: tl.constexpr):
    tl.atomic_add(total + tl.zeros([WIDTH], tl.int32), tl.load(x + tl.arange(0, WIDTH)))


@triton.jit
def _copy_some(x, extra, out, n, WIDTH: tl.constexpr):
    lanes = tl.arange(0, WIDTH)
    values = tl.load(x + lanes, mask=lanes < n, other=0.0) + tl.load(extra[0] + lanes, mask=lanes < 1, other=0.0)
    tl.store(out + lanes, values, mask=lanes < n)


@triton.jit
def _twice(x):
    return tl.zeros_like(x) + x + x


@triton.jit
def _call(x, out, WIDTH: tl.constexpr):
    lanes = tl.arange(0, WIDTH)
    tl.store(out + lanes, _twice(_twice(tl.load(x + lanes))))


def _edge_values() -> torch.Tensor:
    """float32 at, just below and just above every kind of tie, infinities, NaN, subnormals and the largest numbers."""
    high = np.arange(0, 1 << 16, 37, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return torch.from_numpy((high[:, None] | low).ravel().view(np.float32).copy())


def test_rounding_of_edge_patterns_and_random_values_equals_torch():
    values = torch.cat([_edge_values(), torch.randint(-(2**31), 2**31, (100_000,)).int().view(torch.float32)])
    expected = values.bfloat16()
    actual = torch.from_numpy(bfloat16_bits(values.numpy()).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(actual.isnan(), values.isnan())
    assert torch.equal(actual[~values.isnan()], expected[~values.isnan()])


def test_widening_is_exact():
    bits = np.arange(1 << 16, dtype=np.uint16)
    expected = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float()
    assert torch.equal(torch.from_numpy(bfloat16_values(bits)).view(torch.int32), expected.view(torch.int32))


def test_bfloat16_operations_equal_torch():
    a, b = torch.randn(2, 512).bfloat16()
    results = [torch.empty(512, dtype=torch.bfloat16) for _ in range(6)]
    results[3] = torch.empty(512, dtype=torch.bool)
    _arithmetic[(1,)](a, b, *results, WIDTH=512)
    expected = [a + b, a * b, -a, a > b, (a.float() * 1.1).bfloat16(), torch.full((512,), 1 / 3, dtype=torch.bfloat16)]
    for actual, right in zip(results, expected, strict=True):
        assert torch.equal(actual, right)


def test_bfloat16_sum_is_rounded_once():
    x, total = torch.randn(256).bfloat16(), torch.empty(1, dtype=torch.bfloat16)
    _total[(1,)](x, total, WIDTH=256)
    assert torch.equal(total[0], x.float().sum().bfloat16())


def test_bfloat16_atomic_add_rounds_after_every_addend():
    x, total = torch.randn(32).bfloat16(), torch.zeros(1, dtype=torch.bfloat16)
    _atomic_total[(1,)](x, total, WIDTH=32)
    expected = torch.zeros((), dtype=torch.bfloat16)
    for addend in x:
        expected = expected + addend
    assert torch.equal(total[0], expected)


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("keepdims", [False, True])
def test_tree_sum_has_numpys_shapes_and_loses_few_digits(axis, keepdims):
    values = np.random.default_rng(torch.initial_seed()).random((3000, 3), np.float32)
    actual, exact = tree_sum(values, axis, keepdims), values.astype(np.float64).sum(axis, keepdims=keepdims)
    assert actual.shape == exact.shape
    assert np.abs(actual / exact - 1).max() < 2e-7


def test_functions_of_a_kernel_leave_the_language_as_it_was():
    members = {name: getattr(tl, name) for name in ("load", "sum", "range", "zeros")}
    x, out = torch.randn(32), torch.empty(32)
    _call[(2,)](x, out, WIDTH=32)
    assert torch.equal(out, 4 * x)
    assert all(getattr(tl, name) is member for name, member in members.items())


@triton.jit
def _read_as_aligned(x, out, BYTES: tl.constexpr):
    tl.store(out, tl.load(tl.multiple_of(x, BYTES)))


def test_a_hint_on_alignment_that_is_not_true_is_an_error():
    x, out = torch.randn(8), torch.empty(1)
    _read_as_aligned[(1,)](x[4:], out, BYTES=16)
    assert torch.equal(out[0], x[4])
    with pytest.raises(Exception, match="multiple_of says that 16 divides"):
        _read_as_aligned[(1,)](x[1:], out, BYTES=16)


def test_traffic_counts_unmasked_lanes_by_launch_and_argument():
    x, extra, out = torch.randn(64), torch.randn(64), torch.empty(64)
    with count_traffic() as traffic:
        _copy_some[(2,)](x, (extra,), out, 40, WIDTH=64)
        _copy_some[(1,)](x, (extra,), out, 10, WIDTH=64)
    assert [launch.kernel for launch in traffic.launches] == ["_copy_some", "_copy_some"]
    assert traffic.launches[0].grid == (2,)
    assert (traffic.moved("x").read, traffic.moved("extra").read, traffic.moved("out").write) == (360, 12, 360)
    assert (traffic.read, traffic.write, traffic.atomic) == (372, 360, 0)
    assert traffic.unique("x") == 160
    assert traffic.unique("out", kind="write") == 160


def test_counting_stops_with_its_block():
    x, out = torch.randn(64), torch.empty(64)
    with count_traffic() as traffic:
        pass
    _copy_some[(1,)](x, (x,), out, 40, WIDTH=64)
    assert traffic.launches == []
