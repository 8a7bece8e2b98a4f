"""The cache on its own: references, sums of deposits, and what it refuses."""

import pytest
import torch
from torch import Tensor

from blockres.pipeline import BlockCache
from blockres.pipeline.cache import add_gradients


def test_a_source_is_kept_by_reference_and_cut_off_from_its_graph() -> None:
    cache = BlockCache()
    source = torch.randn(3, requires_grad=True) * 2
    cache.put(0, 1, source)
    first, second = cache.get(0, 1), cache.get(0, 1)
    assert first is not second
    for leaf in (first, second):
        assert leaf.is_leaf
        assert leaf.requires_grad
        assert leaf.grad_fn is None
        assert leaf.data_ptr() == source.data_ptr()


def test_a_source_that_wants_no_gradient_gives_leaves_that_want_none() -> None:
    cache = BlockCache()
    cache.put(0, 0, torch.zeros(2))
    assert not cache.get(0, 0).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_deposits_are_summed_in_float32_or_wider(dtype: torch.dtype) -> None:
    cache = BlockCache()
    deposits = [torch.randn(50).to(dtype) for _ in range(5)]
    for deposit in deposits:
        cache.deposit(0, 1, deposit)
    total = cache.collect(0, 1, expected=5)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert total is not None
    assert total.dtype == wide
    torch.testing.assert_close(total, torch.stack(deposits).to(wide).sum(0))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)])
def test_deposits_leave_their_tensors_alone(order: tuple[int, ...]) -> None:
    """Autograd may have given one tensor to several inputs, and None counts as a deposit."""
    cache = BlockCache()
    deposits: list[Tensor | None] = [torch.ones(4), torch.full((4,), 2.0), None]
    for index in (*order, 0):
        cache.deposit(0, 1, deposits[index])
    total = cache.collect(0, 1, expected=4)
    assert total is not None
    assert total.tolist() == [4.0] * 4
    assert deposits[0] is not None
    assert deposits[0].tolist() == [1.0] * 4
    assert deposits[1] is not None
    assert deposits[1].tolist() == [2.0] * 4


def test_a_lone_gradient_is_passed_on_as_it_is() -> None:
    cache, gradient = BlockCache(), torch.randn(3, dtype=torch.bfloat16)
    cache.deposit(0, 0, gradient)
    assert cache.collect(0, 0, expected=1) is gradient
    assert add_gradients(None, gradient, None) is gradient
    assert add_gradients(None, None) is None


@pytest.mark.parametrize(("made", "expected"), [(1, 2), (3, 2), (0, 1)])
def test_a_missing_or_surplus_deposit_names_both_numbers(made: int, expected: int) -> None:
    cache = BlockCache()
    for _ in range(made):
        cache.deposit(4, 7, torch.ones(1))
    with pytest.raises(RuntimeError, match=f"source 7 of microbatch 4 has {made} .* expected {expected}"):
        cache.collect(4, 7, expected=expected)


def test_what_the_cache_refuses() -> None:
    cache = BlockCache()
    cache.put(0, 3, torch.ones(1))
    with pytest.raises(RuntimeError, match="source 3 of microbatch 0 is in the cache already"):
        cache.put(0, 3, torch.ones(1))
    with pytest.raises(RuntimeError, match=r"source 1 of microbatch 0 is not in the cache, which holds sources \[3\]"):
        cache.get(0, 1)
    with pytest.raises(RuntimeError, match="not in the cache"):
        cache.release(1, 3)
    with pytest.raises(RuntimeError, match="still in the cache"):
        cache.check_sources_released(0)
    cache.check_sources_released(1)
    cache.deposit(2, 3, None)
    with pytest.raises(RuntimeError, match="nobody collected"):
        cache.check_deposits_collected(2)


def test_peak_counts_entries_and_bytes() -> None:
    cache = BlockCache()
    for microbatch in range(3):
        cache.put(microbatch, 0, torch.ones(4))
    cache.release(1, 0)
    cache.deposit(0, 0, torch.ones(4))
    cache.deposit(0, 0, torch.ones(4, dtype=torch.float64))
    assert cache.peak == (3, 48, 1, 32)
    assert len(cache) == 3
    assert (0, 0) in cache
    assert (1, 0) not in cache
    cache.clear()
    assert len(cache) == 0
    assert cache.peak == (3, 48, 1, 32)
    cache.reset_peak()
    assert cache.peak == (0, 0, 0, 0)
    cache.put(0, 0, torch.ones(1))
    assert cache.peak.bytes == 4
