"""How a kernel receives sources: a tuple of pointers and, beside it, two tuples of strides.

    token t of source j starts at  pointers[j] + (t // inner) * outer_strides[j] + (t % inner) * row_strides[j]

`[..., D]` tensors whose last dimension is contiguous and whose leading dimensions reduce to two strides are read where
they are: rows may be padded, strided, expanded (stride 0), overlapping, or the same storage twice. All sources of a
launch share `inner`, so that a program divides once a token and not once a source.

Nothing here makes a kernel compile again:

- the tuples are padded to a bucket of the number of sources (`launch.bucket`); the number itself is an argument;
- Triton specialises the integers inside a tuple on their value (1), on their divisibility (by 16) and on their width
  (32 or 64 bits), and `do_not_specialize` does not reach into a tuple. Strides are therefore passed as
  `16 * (stride + 2**40)`, for which all three are constant, and decoded by `row_pointer`;
- what the kernel needs to know of alignment, and no more, is one constant: the largest power of two up to 16 bytes
  that divides every row's address.

Offsets are computed in int64.
"""

import contextlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

STRIDE_BIAS = tl.constexpr(1 << 40)
MAX_ROWS = 2**31 - 2**24  # a token's index is an int32, and a loop over tokens may step past the last one


@dataclass(frozen=True)
class Rows:
    """T rows of D elements in each of several `[..., D]` tensors; strides in elements."""

    tensors: tuple[Tensor, ...]
    inner: int
    outer_strides: tuple[int, ...]
    row_strides: tuple[int, ...]

    @property
    def count(self) -> int:
        """T, the number of rows of each tensor."""
        return math.prod(self.tensors[0].shape[:-1])

    @property
    def alignment(self) -> int:
        """The largest power of two, at most 16, that divides the address of every row, in bytes."""
        size = self.tensors[0].element_size()
        strides = (size * stride for stride in self.outer_strides + self.row_strides)
        return math.gcd(16, *strides, *(x.data_ptr() for x in self.tensors))

    def pointers(self, bucket: int) -> tuple[Tensor, ...]:
        return padded(self.tensors, bucket)

    def strides(self, bucket: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Encoded outer and row strides, each padded to `bucket`."""
        return _encoded(padded(self.outer_strides, bucket)), _encoded(padded(self.row_strides, bucket))

    def group(self, start: int, stop: int) -> "Rows":
        part = slice(start, stop)
        return Rows(self.tensors[part], self.inner, self.outer_strides[part], self.row_strides[part])


def rows_of(tensors: Sequence[Tensor]) -> Rows:
    """The rows of tensors of one shape `[..., D]`, without a copy.

    Raises:
        ValueError: the last dimension of a tensor is not contiguous, or no one place to cut the leading dimensions
            leaves every tensor with one stride before it and one after it.
    """
    *leading, size = tensors[0].shape
    if math.prod(leading) > MAX_ROWS:
        raise ValueError(f"got {math.prod(leading)} tokens; one call takes at most {MAX_ROWS}: split the tokens")
    for x in tensors:
        if size > 1 and x.stride(-1) != 1:
            raise ValueError(
                f"the last dimension must be contiguous; got shape {tuple(x.shape)} with strides {x.stride()}: "
                "call .contiguous() on it first"
            )
    for cut in range(max(len(leading), 1)):
        outer = [_one_stride(leading[:cut], x.stride()[:cut]) for x in tensors]
        row = [_one_stride(leading[cut:], x.stride()[cut:-1]) for x in tensors]
        if None not in outer and None not in row:
            return Rows(
                tuple(tensors),
                max(math.prod(leading[cut:]), 1),
                tuple(s for s in outer if s is not None),
                tuple(s for s in row if s is not None),
            )
    raise ValueError(
        "the leading dimensions must reduce to two strides, cut at one place for all tensors of a call; got shape "
        f"{tuple(tensors[0].shape)} with strides {sorted({x.stride() for x in tensors})}: make them contiguous first"
    )


def rows_or_copy(x: Tensor) -> Rows:
    """The rows of one tensor, copied only where they cannot be read in place (an expanded last dimension, say)."""
    try:
        return rows_of([x])
    except ValueError:
        return rows_of([x.contiguous()])


def padded(values: Sequence, bucket: int) -> tuple:
    """`values` repeated from its first element up to `bucket` elements; a kernel never touches the added ones."""
    return (*values, *(values[0],) * (bucket - len(values)))


def compute_dtype(storage: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for all others."""
    return torch.promote_types(storage, torch.float32)


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return {torch.float32: tl.float32, torch.float64: tl.float64}[dtype]


def on_device(x: Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, whatever device its arguments are on."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _one_stride(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride that walks through all of these dimensions in order, or None where there is no such stride."""
    kept = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    for (_, stride), (next_size, next_stride) in itertools.pairwise(kept):
        if stride != next_size * next_stride:
            return None
    return kept[-1][1] if kept else 0


def _encoded(strides: Sequence[int]) -> tuple[int, ...]:
    return tuple(16 * (stride + STRIDE_BIAS.value) for stride in strides)


@triton.jit
def row_pointer(base, outer_stride, row_stride, outer_index, inner_index, ALIGNMENT: tl.constexpr):
    """Where a row starts: `outer_index = token // inner`, `inner_index = token % inner`, strides as encoded above."""
    outer = (outer_stride >> 4) - STRIDE_BIAS
    row = (row_stride >> 4) - STRIDE_BIAS
    return tl.multiple_of(base + (outer_index.to(tl.int64) * outer + inner_index.to(tl.int64) * row), ALIGNMENT)
