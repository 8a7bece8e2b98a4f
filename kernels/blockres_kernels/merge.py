"""Phase 2: one query's phase-1 result merged with the running sum of the open block.

See `blockres.reference.attn_res_merge` for the operation.

Letters: T tokens, D hidden size; o the phase-1 output, p the partial sum, g the gradient of the merged row h.

Forward, for a token:

    p   = partial + update, rounded to the storage dtype of partial before anything else is made of it
    r   = 1 / sqrt(mean(p^2) + eps)          s = scale * r * <q * w, p>
    c   = sigmoid(s - lse)                   h = o + c (p - o)
    y   = h * rho * norm_weight,  rho = 1 / sqrt(mean(h^2) + norm_eps)      (or y = h)

One launch reads output, partial and update once and writes y and the new partial. `s` and `r` are kept.

Backward, for a token; u = grad_h * norm_weight. h is formed again from o and p, which are read anyway:

    g   = grad_h,  or  rho u - h rho^3 <u, h> / D       where the norm is fused
    ds  = c (1 - c) <g, p - o>                          dlse = -ds
    do  = (1 - c) g
    dp  = c g + scale ds r q * w - p ds s r^2 / D + grad_partial       (the gradient of partial and of update)
    dqw = sum over tokens of scale ds r p

`<g, p - o>` is taken from the difference itself and, with the norm, from sums that are all known after one pass:
rho (<u, p - o> - rho^2 <u, h> / D <h, p - o>). `1 - c` is sigmoid(lse - s), which keeps its digits where c is near 1.

A persistent grid: a program strides over tokens and keeps its part of dqw, and of the norm weight's gradient, in
registers; it writes one row at its end, and the rows of all programs are added in a fixed order. What is used after the
sums is loaded after them, so that it need not be held while they are made.

Where D is wider than a program can hold, it is cut into slices, one program for each: the program sums over the other
slices first (they come from L2: its neighbours are at the same token) and then does its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .parameters import parameter_gradients
from .rows import Formula, inner_product, key_row, normalized, vector, zero_row
from .sources import (
    compute_dtype,
    constants,
    load_row,
    locate,
    on_device,
    row_pointer,
    rows_or_copy,
    store_row,
    triton_dtype,
    vectors,
)


@triton.jit
def _row(rows, token, tile, dtype, start=0):
    row = load_row(row_pointer(rows, 0, locate(rows, token)), tile, start=start)
    return [row[c].to(dtype) for c in tile.chunks]


@triton.jit(do_not_specialize=["lse", "tokens"])
def _attn_res_merge_forward(
    output,
    partial,
    update,  # or None
    lse,  # [T], a row of phase 1's, which may begin anywhere
    query,  # [D]
    key_weight,  # [D] or None
    norm_weight,  # [D] or None
    h,  # [T, D]
    new_partial,  # [T, D] where there is an update
    stats,  # [2, T]
    tokens,
    tile,
    formula,
):
    token = tl.program_id(0)
    at = tl.cast(token, tl.int64)
    p = _row(partial, token, tile, formula.dtype)
    if update is not None:
        u = _row(update, token, tile, formula.dtype)
        rounded = [(p[c] + u[c]).to(new_partial.dtype.element_ty) for c in tile.chunks]
        store_row(new_partial + at * tile.dim, rounded, tile)
        p = [rounded[c].to(formula.dtype) for c in tile.chunks]
    o = _row(output, token, tile, formula.dtype)
    r = tl.rsqrt(inner_product(p, p, tile, formula.dtype) / tile.dim + formula.eps)
    s = inner_product(p, key_row(query, key_weight, tile, formula.dtype), tile, formula.dtype) * r * formula.scale
    tl.store(stats + at, s)
    tl.store(stats + (at + tl.cast(tokens, tl.int64)), r)
    share = tl.sigmoid(s - tl.load(lse + at).to(formula.dtype))
    merged = [o[c] + share * (p[c] - o[c]) for c in tile.chunks]
    store_row(h + at * tile.dim, normalized(merged, norm_weight, tile, formula), tile)


@triton.jit
def _no_products(tile, dtype):
    zero = tl.zeros([tile.width], dtype)
    return zero, zero, zero, zero


@triton.jit
def _add_products(sums, o, p, g, share, norm_weight, tile, dtype, start):
    """To each [width] sum its part of <h, h>, <u, h>, <h, p - o> and <u, p - o>; without a norm the last is enough."""
    hh, uh, hd, ud = sums
    u = g
    if norm_weight is not None:
        w = vector(norm_weight, tile, dtype, start)
        u = [g[c] * w[c] for c in tile.chunks]
    for c in tl.static_range(len(tile.chunks)):
        difference = p[c] - o[c]
        ud += u[c] * difference
        if norm_weight is not None:
            h = o[c] + share * difference
            hh += h * h
            uh += u[c] * h
            hd += h * difference
    return hh, uh, hd, ud


@triton.jit
def _over_slices(here, elsewhere, SLICES: tl.constexpr):
    total = tl.sum(here)
    if SLICES > 1:
        total += tl.sum(elsewhere)
    return total


@triton.jit(do_not_specialize=["lse", "tokens"])
def _attn_res_merge_backward(
    grad_h,
    grad_partial,  # or None
    output,
    partial,
    lse,  # [T], as in the forward
    stats,  # [2, T]
    query,  # [D]
    key_weight,  # [D] or None
    norm_weight,  # [D] or None
    doutput,  # [T, D]
    dlse,  # [T]
    dpartial,  # [T, D]
    dkey_rows,  # [programs, D]
    dnorm_rows,  # [programs, D] or None
    tokens,
    SLICES: tl.constexpr,
    piece,
    tile,
    formula,
):
    own = tl.program_id(0)
    SPAN: tl.constexpr = tile.width * len(tile.chunks)
    start = 0 if SLICES == 1 else own * SPAN
    dkey = zero_row(tile, formula.dtype)
    dnorm = zero_row(tile, formula.dtype)
    for token in tl.range(tl.program_id(1), tokens, tl.num_programs(1), disable_licm=True):
        at = tl.cast(token, tl.int64)
        s = tl.load(stats + at)
        r = tl.load(stats + (at + tl.cast(tokens, tl.int64)))
        z = s - tl.load(lse + at).to(formula.dtype)
        share = tl.sigmoid(z)
        rest = tl.sigmoid(-z)
        elsewhere = _no_products(piece, formula.dtype)
        for other in range(SPAN, SLICES * SPAN, piece.width):
            there = tl.multiple_of((start + other) % (SLICES * SPAN), piece.width)
            o = _row(output, token, piece, formula.dtype, there)
            p = _row(partial, token, piece, formula.dtype, there)
            g = _row(grad_h, token, piece, formula.dtype, there)
            elsewhere = _add_products(elsewhere, o, p, g, share, norm_weight, piece, formula.dtype, there)
        o = _row(output, token, tile, formula.dtype, start)
        p = _row(partial, token, tile, formula.dtype, start)
        g = _row(grad_h, token, tile, formula.dtype, start)
        here = _no_products(tile, formula.dtype)
        here = _add_products(here, o, p, g, share, norm_weight, tile, formula.dtype, start)
        pair = _over_slices(here[3], elsewhere[3], SLICES)
        if norm_weight is not None:
            hh, uh, hd = [_over_slices(here[k], elsewhere[k], SLICES) for k in (0, 1, 2)]
            rho = tl.rsqrt(hh / tile.dim + formula.norm_eps)
            along = uh / tile.dim * rho * rho
            pair = rho * (pair - along * hd)
        ds = share * rest * pair
        tl.store(dlse + at, (-ds).to(dlse.dtype.element_ty), mask=own == 0)
        on_key = ds * r * formula.scale
        dkey = [dkey[c] + on_key * p[c] for c in tile.chunks]
        if norm_weight is not None:
            h = [o[c] + share * (p[c] - o[c]) for c in tile.chunks]
            dnorm = [dnorm[c] + g[c] * (h[c] * rho) for c in tile.chunks]
            w = vector(norm_weight, tile, formula.dtype, start)
            g = [g[c] * (rho * w[c]) - h[c] * (rho * along) for c in tile.chunks]
        store_row(doutput + at * tile.dim, [rest * g[c] for c in tile.chunks], tile, start=start)
        on_value = ds * s * r * r / tile.dim
        dp = [share * g[c] - on_value * p[c] for c in tile.chunks]
        if grad_partial is not None:
            passed = _row(grad_partial, token, tile, formula.dtype, start)
            dp = [dp[c] + passed[c] for c in tile.chunks]
        key = key_row(query, key_weight, tile, formula.dtype, start)
        store_row(dpartial + at * tile.dim, [dp[c] + on_key * key[c] for c in tile.chunks], tile, start=start)
    row = tl.program_id(1).to(tl.int64) * tile.dim
    store_row(dkey_rows + row, dkey, tile, start=start)
    if norm_weight is not None:
        store_row(dnorm_rows + row, dnorm, tile, start=start)


def attn_res_merge_forward(
    output: Tensor,
    lse: Tensor,
    partial: Tensor,
    update: Tensor | None,
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    scale: float,
    norm_eps: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """`h [..., D]`, the new partial (empty without an update), and `stats [2, ...]`: the partial's score and rstd."""
    shape, dtype = output.shape, compute_dtype(torch.promote_types(output.dtype, partial.dtype))
    h = output.new_empty(shape, dtype=out_dtype)
    new_partial = partial.new_empty(0 if update is None else shape)
    stats = output.new_empty((2, *shape[:-1]), dtype=dtype)
    if not h.numel():
        return h, new_partial, stats
    plan = launch.attn_res_merge_forward(shape[-1])
    with on_device(output):
        _attn_res_merge_forward[(lse.numel(),)](
            rows_or_copy(output).argument(),
            rows_or_copy(partial).argument(),
            None if update is None else rows_or_copy(update).argument(),
            lse.contiguous(),
            *vectors(query, key_weight, norm_weight),
            h,
            new_partial,
            stats,
            lse.numel(),
            constants(plan.tile),
            constants(Formula(eps, scale, norm_eps, triton_dtype(dtype))),
            **plan.options,
        )
    return h, new_partial, stats


def attn_res_merge_backward(
    grad_h: Tensor,
    grad_partial: Tensor | None,
    output: Tensor,
    lse: Tensor,
    partial_new: Tensor,
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    stats: Tensor,
    eps: float,
    scale: float,
    norm_eps: float,
) -> tuple[Tensor, ...]:
    """Gradients of output, lse, partial and update (one for both), query, key weight and norm weight.

    Those of parameters that are not given are `(0,)`.
    """
    shape, tokens = output.shape, lse.numel()
    parameters = vectors(query, key_weight, norm_weight)
    doutput, dpartial = output.new_empty(shape), partial_new.new_empty(shape)
    dlse = lse.new_empty(lse.shape)
    itemsizes = tuple(x.element_size() for x in (grad_h, output, partial_new))
    plan = launch.attn_res_merge_backward(shape[-1], itemsizes, norm_weight is not None, launch.lanes())
    programs = launch.persistent_with_sums(tokens, plan.resident, output.device)
    dkey_rows = stats.new_empty(programs, shape[-1])
    dnorm_rows = None if norm_weight is None else torch.empty_like(dkey_rows)
    with on_device(output):
        if output.numel():
            _attn_res_merge_backward[(plan.slices, programs)](
                rows_or_copy(grad_h).argument(),
                None if grad_partial is None else rows_or_copy(grad_partial).argument(),
                rows_or_copy(output).argument(),
                rows_or_copy(partial_new).argument(),
                lse.contiguous(),
                stats,
                *parameters,
                doutput,
                dlse,
                dpartial,
                dkey_rows,
                dnorm_rows,
                tokens,
                plan.slices,
                constants(plan.piece),
                constants(plan.tile),
                constants(Formula(eps, scale, norm_eps, triton_dtype(stats.dtype))),
                **launch.options(plan.warps),
            )
        return doutput, dlse, dpartial, *parameter_gradients(dkey_rows, dnorm_rows, *parameters)
