"""How a kernel receives sources: a tuple of pointers and, beside it, the strides of their rows.

    token t of source j starts at  pointers[j] + (t // inner) * outer_strides[j] + (t % inner) * row_strides[j]

`[..., D]` tensors whose last dimension is contiguous and whose leading dimensions reduce to two strides are read where
they are: rows may be padded, strided, expanded (stride 0), overlapping, or the same storage twice. All sources of a
launch share `inner`, so that a program divides once a token and not once a source.

In a launcher `kernel[grid](rows_of(sources).argument(bucket), ...)`, in the kernel

    place = locate(sources, token)
    pointer = row_pointer(sources, j, place)

Another number of tokens does not make a kernel compile again:

- the tuples are padded to a bucket of the number of sources (`launch.bucket`); the number itself is an argument;
- Triton specialises integers inside a tuple on being 1 and on being multiples of 16, and `do_not_specialize` does not
  reach into a tuple. `inner`, which follows the number of tokens, is passed as `16 * inner`, for which both are fixed;
- what the kernel needs to know of alignment, and no more, is one constant: the largest power of two up to 16 bytes
  that divides every row's address.

What may are memory that is not aligned to 16 bytes, strides that follow the number of tokens (of a padded [B, L, D],
say), and those of more than 2^31 elements.

Offsets are computed in int64.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 2**28  # a token's index is an int32, and rows are looked for ahead of it by a few times their number


class RowsArgument(NamedTuple):
    """`Rows` as a kernel takes them. Constants: `alignment` in bytes; `flat`, whether one stride reaches all rows."""

    pointers: tuple[Tensor, ...]
    inner_times_16: int
    outer_strides: tuple[int, ...]
    row_strides: tuple[int, ...]
    alignment: tl.constexpr
    flat: tl.constexpr


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

    def argument(self, bucket: int = 1) -> RowsArgument:
        """What is passed to a kernel that is compiled for `bucket` tensors."""
        return RowsArgument(
            padded(self.tensors, bucket),
            16 * self.inner,
            padded(self.outer_strides, bucket),
            padded(self.row_strides, bucket),
            tl.constexpr(self.alignment),
            tl.constexpr(self.inner >= self.count),
        )

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
        outer = [_one_stride(leading[:cut], x.stride()[:cut], 0) for x in tensors]
        row = [_one_stride(leading[cut:], x.stride()[cut:-1], size) for x in tensors]
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


def vectors(
    query: Tensor, key_weight: Tensor | None, norm_weight: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The parameters with their elements side by side, copied where they are not."""
    key_weight, norm_weight = (None if x is None else x.contiguous() for x in (key_weight, norm_weight))
    return query.contiguous(), key_weight, norm_weight


class Tile(NamedTuple):
    """A row of `dim` elements as `len(chunks)` pieces of `width` (a power of two), of which the last may stick out.

    In a kernel a row is a tuple of [width] tensors; `[f(row[c]) for c in tile.chunks]` maps over it.
    """

    dim: int
    width: int
    chunks: tuple[int, ...]


def tile_of(dim: int, width: int) -> Tile:
    return Tile(dim, width, tuple(range(-(-dim // width))))


_Constants = TypeVar("_Constants", bound=tuple)


def constants(values: _Constants) -> _Constants:
    """A NamedTuple as a kernel takes it when its fields are compile-time constants."""
    wrapped = (tuple(map(tl.constexpr, v)) if isinstance(v, tuple) else tl.constexpr(v) for v in values)
    return type(values)(*wrapped)


@functools.cache
def indices(count: int) -> tuple[tl.constexpr, ...]:
    """0, 1, ... count - 1 as a kernel takes them, to map over: `[f(j) for j in indices]`."""
    return tuple(tl.constexpr(j) for j in range(count))


def padded(values: Sequence, bucket: int) -> tuple:
    """`values` repeated from its first element up to `bucket` elements; a kernel never touches the added ones."""
    return (*values, *(values[0],) * (bucket - len(values)))


def bits(flags: Sequence[bool]) -> int:
    """Bit j for flag j, as a signed integer of 32 bits: a kernel would be compiled again for a wider one."""
    number = sum(1 << j for j, flag in enumerate(flags) if flag)
    return number - (1 << 32) if number >= 1 << 31 else number


def compute_dtype(storage: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for all others."""
    return torch.promote_types(storage, torch.float32)


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return {torch.float32: tl.float32, torch.float64: tl.float64}[dtype]


def on_device(x: Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, whatever device its arguments are on."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _one_stride(sizes: Sequence[int], strides: Sequence[int], only: int) -> int | None:
    """The stride that walks through all of these dimensions in order, or None where there is no such stride.

    `only`: what is said to be the stride of a single row, so that a kernel is the same for one token as for many.
    """
    kept = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    for (_, stride), (next_size, next_stride) in itertools.pairwise(kept):
        if stride != next_size * next_stride:
            return None
    return kept[-1][1] if kept else only


@triton.jit
def locate(rows, token):
    """Where to look for a token's row: the index before the cut and the one after it, int64."""
    if rows.flat:
        return tl.cast(0, tl.int64), tl.cast(token, tl.int64)
    else:
        inner = rows.inner_times_16 // 16
        return tl.cast(token // inner, tl.int64), tl.cast(token % inner, tl.int64)


@triton.jit
def row_pointer(rows, j: tl.constexpr, place):
    """The address of the first element of source j's row at `place`."""
    offset = place[0] * rows.outer_strides[j] + place[1] * rows.row_strides[j]
    return tl.multiple_of(rows.pointers[j] + offset, rows.alignment)


@triton.jit
def tabulate(rows, table, slots):
    """Write pointers and strides to this program's table, [bucket, 3] int64, where a loop over the sources finds them.

    Arguments can be picked by a constant only: a kernel without a table repeats its code for every source, is compiled
    for so many seconds, and holds in registers what does not change from one token to the next.
    """
    for j in tl.static_range(len(slots)):
        tl.store(table + 3 * j, rows.pointers[j].to(tl.int64))
        tl.store(table + 3 * j + 1, tl.cast(rows.outer_strides[j], tl.int64))
        tl.store(table + 3 * j + 2, tl.cast(rows.row_strides[j], tl.int64))
    tl.debug_barrier()


@triton.jit
def tabulated_row_pointer(rows, table, j, place):
    """As `row_pointer`, for a `j` that is known when the kernel runs."""
    offset = place[1] * tl.load(table + 3 * j + 2)
    if not rows.flat:
        offset += place[0] * tl.load(table + 3 * j + 1)
    return tl.multiple_of(tl.load(table + 3 * j).to(rows.pointers[0].dtype) + offset, rows.alignment)


@triton.jit
def load_row(pointer, tile, present=True, start=0):
    """The row at `pointer` from element `start` on; zero, and unread, beyond its end and wherever not `present`."""
    lanes = tl.arange(0, tile.width)
    return [
        tl.load(
            pointer + start + c * tile.width + lanes,
            mask=(start + lanes < tile.dim - c * tile.width) & present,
            other=0.0,
        )
        for c in tile.chunks
    ]


@triton.jit
def store_row(pointer, row, tile, wanted=True, start=0):
    """Round a row to the dtype of what `pointer` points at and store it, where `wanted`, from element `start` on."""
    for c in tl.static_range(len(tile.chunks)):
        store_chunk(pointer, row[c], c, tile, wanted, start)


@triton.jit
def store_chunk(pointer, chunk, c: tl.constexpr, tile, wanted=True, start=0):
    """One chunk of a row, as `store_row` stores it."""
    lanes = tl.arange(0, tile.width)
    mask = (start + lanes < tile.dim - c * tile.width) & wanted
    tl.store(pointer + start + c * tile.width + lanes, chunk.to(pointer.dtype.element_ty), mask=mask)
