"""Gradients of parameters, made of the rows of sums that the programs of a backward leave behind."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDTH, _DEPTH = 32, 128
"""Columns, 128 bytes of them, and rows at a time: few columns make many programs, which each wait for few loads."""


@triton.jit
def _sum_of_rows(table, rows, COLUMNS: tl.constexpr, columns, inside, DEPTH: tl.constexpr):
    """DEPTH rows are added side by side: in an order that depends on their number alone."""
    sums = tl.zeros([DEPTH, columns.shape[0]], table.dtype.element_ty)
    for first in range(0, rows, DEPTH):
        row = first + tl.arange(0, DEPTH)
        pointers = table + row[:, None].to(tl.int64) * COLUMNS + columns[None, :]
        sums += tl.load(pointers, mask=(row[:, None] < rows) & inside[None, :], other=0.0)
    return tl.sum(sums, axis=0)


@triton.jit(do_not_specialize=["key_count", "norm_count"])
def _parameter_gradients(
    key_rows,  # [key_count, KEY_COLUMNS]
    norm_rows,  # [norm_count, NORM_COLUMNS] or None
    query,  # [KEY_COLUMNS]
    key_weight,  # [KEY_COLUMNS] or None
    dquery,  # [KEY_COLUMNS]
    dkey_weight,  # [KEY_COLUMNS] where there is a key weight
    dnorm_weight,  # [NORM_COLUMNS]
    key_count,
    norm_count,
    KEY_COLUMNS: tl.constexpr,
    NORM_COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    KEY_PROGRAMS: tl.constexpr = (KEY_COLUMNS + WIDTH - 1) // WIDTH
    dtype = key_rows.dtype.element_ty
    if tl.program_id(0) < KEY_PROGRAMS:
        columns = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
        inside = columns < KEY_COLUMNS
        dkey = _sum_of_rows(key_rows, key_count, KEY_COLUMNS, columns, inside, DEPTH)
        if key_weight is None:
            tl.store(dquery + columns, dkey, mask=inside)
        else:
            w = tl.load(key_weight + columns, mask=inside, other=0.0).to(dtype)
            tl.store(dquery + columns, dkey * w, mask=inside)
            q = tl.load(query + columns, mask=inside, other=0.0).to(dtype)
            tl.store(dkey_weight + columns, dkey * q, mask=inside)
    elif norm_rows is not None:
        columns = (tl.program_id(0) - KEY_PROGRAMS) * WIDTH + tl.arange(0, WIDTH)
        inside = columns < NORM_COLUMNS
        dnorm = _sum_of_rows(norm_rows, norm_count, NORM_COLUMNS, columns, inside, DEPTH)
        tl.store(dnorm_weight + columns, dnorm, mask=inside)


def parameter_gradients(
    key_rows: Tensor, norm_rows: Tensor | None, query: Tensor, key_weight: Tensor | None, norm_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key weight and norm weight, in their dtypes; `(0,)` where there is none. One launch.

    Args:
        key_rows: `[rows, *query.shape]`, whose sum over the rows is the gradient of `query * key_weight`.
        norm_rows: `[rows, D]`, whose sum is the gradient of the norm weight.
        query, key_weight: `[D]` or `[S, D]`. All tensors are contiguous.
    """
    dquery = torch.empty_like(query)
    dkey_weight = query.new_empty(0) if key_weight is None else torch.empty_like(key_weight)
    dnorm_weight = query.new_empty(0) if norm_weight is None else torch.empty_like(norm_weight)
    columns = dquery.numel(), dnorm_weight.numel()
    if query.numel():
        _parameter_gradients[(sum(triton.cdiv(n, _WIDTH) for n in columns),)](
            key_rows,
            norm_rows,
            query,
            key_weight,
            dquery,
            dkey_weight,
            dnorm_weight,
            len(key_rows),
            0 if norm_rows is None else len(norm_rows),
            columns[0],
            columns[1],
            _WIDTH,
            _DEPTH,
            num_warps=4,
        )
    return dquery, dkey_weight, dnorm_weight
