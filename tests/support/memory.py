"""Buffers whose surroundings are watched, and allocations that are counted or full of NaN."""

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_GUARD = 64


class Guarded:
    """A tensor inside a larger buffer of NaN: reads beyond it poison results, writes beyond it are found by `check`.

    A tensor of integers is one of addresses: it lies among, and is full of, an address that there is not.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        size = math.prod(shape)
        self._fill = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min
        self.buffer = torch.full((size + 2 * _GUARD,), self._fill, dtype=dtype, device=device)
        self.tensor = self.buffer[_GUARD : _GUARD + size].view(*shape)

    def check(self) -> None:
        outside = torch.cat([self.buffer[:_GUARD], self.buffer[-_GUARD:]])
        untouched = outside.isnan() if outside.is_floating_point() else outside == self._fill
        assert untouched.all(), "memory beside the tensor was written"


def guarded(values: Tensor) -> Guarded:
    """A guarded copy of `values`."""
    copy = Guarded(values.shape, values.dtype, values.device)
    copy.tensor.copy_(values)
    return copy


def assert_only_read(blocks: Sequence[Guarded], values: Sequence[Tensor]) -> None:
    """Neither the guarded copies of `values` nor what lies beside them has been written."""
    for block, original in zip(blocks, values, strict=True):
        block.check()
        assert torch.equal(block.tensor, original)


class Allocations(TorchDispatchMode):
    """The elements of every tensor that an operation makes and that is no view; insides of operations are not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [x.data_ptr() for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)]
        if isinstance(result, Tensor) and not func.is_view and result.data_ptr() not in given:
            self.elements.append(result.numel())
        return result


class _Poison(TorchDispatchMode):
    """Every tensor that is allocated without a value is one of a `Guarded`, full of NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[Guarded] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet not in (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty):
            return result
        if not (result.is_floating_point() or result.dtype == torch.int64) or not result.is_contiguous():
            return result
        block = Guarded(result.shape, result.dtype, result.device)
        self.allocated.append(block)
        return block.tensor


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[list[Guarded]]:
    """Inside, `torch.empty` and its kin give NaN, or no address, between guards; on leaving, all guards are checked."""
    mode = _Poison()
    with mode:
        yield mode.allocated
    for block in mode.allocated:
        block.check()
