"""Pack tensors into one buffer and unpack them, with a change of dtype on the way: for what travels between ranks.

    pack:    buffer[start_j + i] = x_j[i] rounded to the buffer's dtype,  start_j = sum of the sizes before j
    unpack:  x_j[i] = buffer[start_j + i] rounded to x_j's dtype

Both are copies between pairs of contiguous pieces, each element read once and written once. A program copies `BLOCK`
elements of one pair: the grid is (blocks of a piece, pairs). All pieces of a launch have one size, as the tensors of a
hop have, so that neither a table of sizes is needed nor a program without work; a list of several sizes takes a launch
for each run of equal ones.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .sources import on_device, padded

Pair = tuple[Tensor, Tensor]


@triton.jit  # specialised on whether the size is a multiple of 16: a mask that may end anywhere splits every access
def _cast(read, written, size, BLOCK: tl.constexpr):
    at = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    for j in tl.static_range(len(read)):
        if tl.program_id(1) == j:
            values = tl.load(read[j] + at, mask=at < size)
            tl.store(written[j] + at, values.to(written[j].dtype.element_ty), mask=at < size)


def pack(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The elements of all tensors, one tensor after the other, in one flat buffer of `dtype`.

    The tensors are on one device and of any shapes and float dtypes; one that is not contiguous is made so first.
    """
    sizes = [tensor.numel() for tensor in tensors]
    buffer = tensors[0].new_empty(sum(sizes), dtype=dtype)
    _copy([(tensor.contiguous(), part) for tensor, part in zip(tensors, buffer.split(sizes), strict=True)])
    return buffer


def unpack(buffer: Tensor, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """What was packed, in shapes and dtypes of one's own; views of the buffer where no cast is needed."""
    parts = buffer.split([math.prod(shape) for shape in shapes])
    tensors = [
        part.view(tuple(shape)) if part.dtype == dtype else part.new_empty(tuple(shape), dtype=dtype)
        for part, shape, dtype in zip(parts, shapes, dtypes, strict=True)
    ]
    _copy([(part, x) for part, x in zip(parts, tensors, strict=True) if part.dtype != x.dtype])
    return tensors


def _copy(pairs: Sequence[Pair]) -> None:
    for group in _groups(pairs):
        size, bucket = group[0][0].numel(), launch.bucket(len(group))
        read, written = zip(*group, strict=True)
        with on_device(read[0]):
            _cast[(triton.cdiv(size, launch.CAST_BLOCK), len(group))](
                padded(read, bucket), padded(written, bucket), size, launch.CAST_BLOCK, num_warps=launch.CAST_WARPS
            )


def _groups(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Runs of pairs of one size, of at most `MAX_SOURCES`; those without elements are left out."""
    for size, run in itertools.groupby(pairs, key=lambda pair: pair[0].numel()):
        group = list(run)
        for start in range(0, len(group) if size else 0, launch.MAX_SOURCES):
            yield group[start : start + launch.MAX_SOURCES]
