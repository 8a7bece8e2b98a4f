"""What the kernels of phase 1 have in common: sums over rows, softmax, and tiles of rows that lie anywhere.

A tile [S, C] or [N, C] holds C columns of a token's row of each query or source, and has one pointer per row. Row j of
a tile is brought to all lanes by a sum over the tile with all other rows masked out.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sources import Rows, locate


@triton.jit
def _joined(parts):
    """2^n tensors [W] as one [W, 2, 2, ...]."""
    HALF: tl.constexpr = len(parts) // 2
    if HALF == 0:
        return parts[0]
    else:
        return tl.join(_joined(parts[:HALF]), _joined(parts[HALF:]))


@triton.jit
def _separated(values, COUNT: tl.constexpr):
    """The inverse of `_joined` for what is left when axis 0 has been summed."""
    if COUNT == 1:
        return (values,)
    else:
        first, second = tl.split(values)
        return _separated(first, COUNT // 2) + _separated(second, COUNT // 2)


@triton.jit
def sums_of(parts):
    """The sums of many [W], in reductions of up to 16 at a time: warps wait for each other once and not for each."""
    COUNT: tl.constexpr = len(parts)
    if COUNT > 16:
        return sums_of(parts[:16]) + sums_of(parts[16:])
    elif COUNT & (COUNT - 1) == 0:
        return _separated(tl.sum(_joined(parts), axis=0), COUNT)
    elif COUNT > 8:
        return sums_of(parts[:8]) + sums_of(parts[8:])
    elif COUNT > 4:
        return sums_of(parts[:4]) + sums_of(parts[4:])
    else:
        return sums_of(parts[:2]) + sums_of(parts[2:])


@triton.jit
def within_lanes(products, VECTOR: tl.constexpr):
    """[..., W] -> [..., W / VECTOR]: the elements that a lane loaded together, added up without leaving it."""
    if len(products.shape) == 1:
        return tl.sum(tl.reshape(products, [products.shape[0] // VECTOR, VECTOR]), axis=1)
    else:
        return tl.sum(tl.reshape(products, [products.shape[0], products.shape[1] // VECTOR, VECTOR]), axis=2)


@triton.jit
def softmax(scores, slots, count):
    """Weights of one query's sources, and the logarithm of the sum that they were divided by."""
    present = [tl.where(count > j, scores[j], -float("inf")) for j in slots]
    top = present[0]
    for j in tl.static_range(1, len(slots)):
        top = tl.maximum(top, present[j])
    raised = [tl.exp(present[j] - top) for j in slots]
    total = raised[0]
    for j in tl.static_range(1, len(slots)):
        total += raised[j]
    return [raised[j] / total for j in slots], top + tl.log(total)


@triton.jit
def spread(values, index):
    """Numbers or pointers in a tuple as an int64 tensor, `values[index]`."""
    spread = tl.full(index.shape, 0, tl.int64)
    for j in tl.static_range(len(values)):
        spread = tl.where(index == j, tl.cast(values[j], tl.int64), spread)
    return spread


@triton.jit
def strides_of(rows, index, UNIFORM: tl.constexpr):
    """Outer and row strides: [R], or numbers where all tensors have the same."""
    if UNIFORM:
        return rows.outer_strides[0], rows.row_strides[0]
    else:
        return spread(rows.outer_strides, index), spread(rows.row_strides, index)


@triton.jit
def row_pointers(rows, addresses, strides, token):
    """Pointers [R] to a token's rows."""
    size: tl.constexpr = rows.pointers[0].dtype.element_ty.primitive_bitwidth // 8
    place = locate(rows, token)
    offset = place[0] * strides[0] + place[1] * strides[1]
    return tl.multiple_of((addresses + offset * size).to(rows.pointers[0].dtype), rows.alignment)


@triton.jit
def load_tile(pointers, columns, mask, dtype):
    return tl.load(pointers[:, None] + columns[None, :], mask=mask, other=0.0).to(dtype)


@triton.jit
def row_of(tile, chosen):
    """The row [C] of a tile [R, C] that `chosen` [R] is true for, in all lanes."""
    return tl.sum(tl.where(chosen[:, None], tile, 0.0), axis=0)


@triton.jit
def add_pairs(pairs, x, v, slots, source, VECTOR: tl.constexpr):
    """Add <x_s, v_j> over the columns of the tiles x [S, C] and v [N, C], but for the sum over lanes; j in `slots`."""
    added = ()
    for i in tl.static_range(len(slots)):
        added += (pairs[i] + within_lanes(x * row_of(v, source == slots[i])[None, :], VECTOR),)
    return added


def keys_of(queries: Tensor, key_weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    keys = queries.to(dtype)
    return keys if key_weights is None else keys * key_weights.to(dtype)


def uniform(rows: Rows) -> bool:
    """Whether all tensors have the same strides."""
    return len(set(zip(rows.outer_strides, rows.row_strides, strict=True))) == 1
