"""A sublayer's input for inference: the add before it, the aggregation over a bank of sources, the norm after it.

Letters: N slots of the bank, T tokens, D hidden size. For a token:

    p   = partial + update, rounded to the storage dtype of the bank before anything else is made of it
          (the update alone where it opens a block, the partial sum alone where nothing was written since)
    r_v = 1 / sqrt(mean(v^2) + eps)          s_v = scale * r_v * <q * w, v>
    h   = sum_v exp(s_v - lse) v             over v = p, where there is one, and the slots
    y   = h * rho * norm_weight,  rho = 1 / sqrt(mean(h^2) + norm_eps)      (or y = h)

One launch reads N slots, partial and update once and writes p and y. Nothing is kept for a backward: there is none.

The bank is one tensor, so that its slots are a stride apart: the loop over them needs no table of pointers, and no
number of them is compiled for, or too large. The softmax is online and begins with p, whose rows arrive while those of
the bank, which are loaded ahead of their use, are on their way. The grid is persistent: a program strides over tokens
and holds q * w.

p may be written where partial lies, and y where update does: a program has read a token's rows before it writes them.

Neither another number of tokens or slots nor other strides are compiled for again: strides are int64 whatever their
value, and of alignment the kernel is told no more than what all rows of a width have in common.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .rows import Formula, key_row, mix_in, normalized, square_and_product, zero_row
from .sources import (
    Rows,
    compute_dtype,
    constants,
    indices,
    load_row,
    on_device,
    rows_of,
    rows_or_copy,
    store_row,
    triton_dtype,
    vectors,
)


class Alignment(NamedTuple):
    """What divides the address of every row, in bytes, up to 16: constants of the kernel."""

    bank: int
    partial: int
    update: int
    total: int
    out: int


@triton.jit
def _row_of(pointer, offset, tile, dtype, ALIGNMENT: tl.constexpr):
    row = load_row(tl.multiple_of(pointer + offset, ALIGNMENT), tile)
    return [row[c].to(dtype) for c in tile.chunks]


@triton.jit
def _slot_row(bank, reader, slot, token, tile, ALIGNMENT: tl.constexpr):
    """The row of a slot; unread for a token that does not exist. `reader` is (N, T, stride of tokens, two strides)."""
    pointer = bank + tl.cast(slot, tl.int64) * reader[3] + tl.cast(token, tl.int64) * reader[4]
    return load_row(tl.multiple_of(pointer, ALIGNMENT), tile, token < reader[1])


@triton.jit
def _rows_ahead(bank, reader, token, ahead, tile, ALIGNMENT: tl.constexpr):
    """A queue of rows, and slot and token of the one to load next: a token's last slot is followed by the next one's
    first."""
    zero = tl.zeros_like(token)
    queue = [
        _slot_row(bank, reader, (zero + k) % reader[0], token + (zero + k) // reader[0] * reader[2], tile, ALIGNMENT)
        for k in ahead
    ]
    return queue, (zero + len(ahead)) % reader[0], token + (zero + len(ahead)) // reader[0] * reader[2]


@triton.jit
def _next_row(stream, bank, reader, ahead, tile, ALIGNMENT: tl.constexpr):
    """The row at the head of the queue, and the stream after it."""
    queue, slot, token = stream
    added = _slot_row(bank, reader, slot, token, tile, ALIGNMENT)
    last = slot + 1 == reader[0]
    slot = tl.where(last, 0, slot + 1)
    token = tl.where(last, token + reader[2], token)
    if len(ahead) == 0:
        return added, (queue, slot, token)
    else:
        return queue[0], ([queue[k + 1] if k + 1 < len(ahead) else added for k in ahead], slot, token)


@triton.jit(
    do_not_specialize=[
        *("bank", "partial", "update", "total", "out", "count", "tokens", "slot_stride", "bank_row"),
        *("partial_row", "update_inner", "update_outer", "update_row", "total_row", "out_row"),
    ]
)
def _attn_res_step(
    bank,  # [N, T, D]
    partial,  # [T, D] or None
    update,  # [T, D] or None
    total,  # [T, D], where there is an update
    out,  # [T, D]
    query,  # [D]
    key_weight,  # [D] or None
    norm_weight,  # [D] or None
    count,
    tokens,
    slot_stride: tl.int64,
    bank_row: tl.int64,
    partial_row: tl.int64,
    update_inner: tl.int64,
    update_outer: tl.int64,
    update_row: tl.int64,
    total_row: tl.int64,
    out_row: tl.int64,
    ahead,
    tile,
    alignment,
    formula,
    HOLD_KEY: tl.constexpr,
):
    dtype = formula.dtype
    reader = (count, tokens, tl.num_programs(0), slot_stride, bank_row)
    stream = _rows_ahead(bank, reader, tl.program_id(0), ahead, tile, alignment.bank)
    if HOLD_KEY:
        key = key_row(query, key_weight, tile, dtype)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        at = tl.cast(token, tl.int64)
        if partial is None and update is None:
            peak = tl.full([], -float("inf"), dtype)
            sum_of_weights = tl.full([], 0.0, dtype)
            mixed = zero_row(tile, dtype)
        else:
            if update is None:
                mixed = _row_of(partial, at * partial_row, tile, dtype, alignment.partial)
            else:
                place = at // update_inner * update_outer + at % update_inner * update_row
                mixed = _row_of(update, place, tile, dtype, alignment.update)
                if partial is not None:
                    before = _row_of(partial, at * partial_row, tile, dtype, alignment.partial)
                    mixed = [before[c] + mixed[c] for c in tile.chunks]
                rounded = [mixed[c].to(bank.dtype.element_ty) for c in tile.chunks]
                store_row(tl.multiple_of(total + at * total_row, alignment.total), rounded, tile)
                mixed = [rounded[c].to(dtype) for c in tile.chunks]
            if not HOLD_KEY:
                key = key_row(query, key_weight, tile, dtype)
            square, product = square_and_product(mixed, key, tile, dtype)
            peak = product * tl.rsqrt(square / tile.dim + formula.eps) * formula.scale
            sum_of_weights = tl.full([], 1.0, dtype)
        for _ in range(0, count):
            row, stream = _next_row(stream, bank, reader, ahead, tile, alignment.bank)
            if not HOLD_KEY:
                key = key_row(query, key_weight, tile, dtype)
            square, product = square_and_product(row, key, tile, dtype)
            score = product * tl.rsqrt(square / tile.dim + formula.eps) * formula.scale
            peak, sum_of_weights, mixed = mix_in(peak, sum_of_weights, mixed, row, score, tile, dtype)
        share = 1.0 / sum_of_weights
        h = normalized([mixed[c] * share for c in tile.chunks], norm_weight, tile, formula)
        store_row(tl.multiple_of(out + at * out_row, alignment.out), h, tile)


def attn_res_step(
    bank: Tensor,
    partial: Tensor | None,
    update: Tensor | None,
    total: Tensor,
    out: Tensor,
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    scale: float,
    norm_eps: float,
) -> None:
    """Write `partial + update` into `total [..., D]`, where there is an update, and what is read into `out [..., D]`.

    Only an update or parameters that cannot be read where they are, are copied; nothing else is allocated.

    Raises:
        ValueError: rows of a slot, of partial, total or out that are not one stride apart.
    """
    if not out.numel():
        return
    dim, dtype = out.shape[-1], compute_dtype(bank.dtype)
    added = out if update is None else update
    slots, before, target, result = (
        _one_stride(name, x)
        for name, x in (
            ("a slot of the bank", bank[0]),
            ("partial", bank[0] if partial is None else partial),
            ("total", bank[0] if update is None else total),
            ("out", out),
        )
    )
    writes = rows_or_copy(added)
    plan = launch.attn_res_step(
        dim, bank.element_size(), min(bank.element_size(), added.element_size(), out.element_size()), launch.lanes()
    )
    parameters = vectors(query, key_weight, norm_weight)
    alignment = _alignments(bank, slots, before, writes, target, result)
    with on_device(bank):
        _attn_res_step[(launch.persistent(slots.count, plan.resident, bank.device),)](
            bank,
            partial,
            None if update is None else writes.tensors[0],
            total,
            out,
            *parameters,
            len(bank),
            slots.count,
            bank.stride(0),
            slots.row_strides[0],
            before.row_strides[0],
            writes.inner,
            writes.outer_strides[0],
            writes.row_strides[0],
            target.row_strides[0],
            result.row_strides[0],
            indices(plan.ahead),
            constants(plan.tile),
            constants(alignment),
            constants(Formula(eps, scale, norm_eps, triton_dtype(dtype))),
            plan.holds_key,
            **launch.options(plan.warps),
        )


def _one_stride(name: str, x: Tensor) -> Rows:
    rows = rows_of([x])
    if rows.inner < rows.count:
        raise ValueError(
            f"the rows of {name} must be one stride apart, got shape {tuple(x.shape)} with strides {x.stride()}"
        )
    return rows


def _alignments(bank: Tensor, slots: Rows, *others: Rows) -> Alignment:
    every_slot = math.gcd(_alignment(slots), bank.stride(0) * bank.element_size())
    return Alignment(every_slot, *map(_alignment, others))


def _alignment(rows: Rows) -> int:
    """What divides every row's address, as far as it would for any number of tokens and without padding."""
    x = rows.tensors[0]
    return math.gcd(rows.alignment, x.shape[-1] * x.element_size())
