"""Phase 1: all queries of a block over the sources that are complete. See `blockres.reference.attn_res_inter`.

Letters: N sources, S queries, T tokens, D hidden size; g_s the gradient of query s's mixture h_s, u = grad_output_0 *
norm_weight.

Forward, for a token:

    r_j  = 1 / sqrt(mean(v_j^2) + eps)       s_sj = scale * r_j * <key_s, v_j>,  key_s = q_s * w_s
    a_sj = softmax_j(s_sj)                   h_s = sum_j a_sj v_j
    y_0  = h_0 * rho * norm_weight,  rho = 1 / sqrt(mean(h_0^2) + norm_eps)      (or y_0 = h_0)

Where the N rows of a token fit into the registers of one program (`held`), each is read once: the queries come by one
or
two at a time, each needing one reduction over D for its N scores and none for its mixture. Where they do not (`twice`),
a warp walks over D with all scores of its token in registers, as tiles [S, C] against single rows [C], and a second
time for the mixtures. The first output, where it is to be normalised, then waits in a row of float32 per program.

Backward, for a token. The gradient of h_0 is g_0 = rho u - beta h_0, beta = rho^3 <u, h_0> / D, where the norm is
fused:

    p_sj = <g_s, v_j>                        delta_s = sum_j a_sj p_sj
    ds_sj = a_sj (p_sj - delta_s + dlse_s)
    dv_j = sum_s a_sj g_s + sum_s e_sj key_s - f_j v_j
    dkey_s = sum over tokens of sum_j e_sj v_j,   e_sj = scale ds_sj r_j,   f_j = r_j^2 / D sum_s ds_sj s_sj

`sum_j a_sj (p_sj - delta_s)` is zero; what rounding leaves of it would be multiplied by all that the sources have in
common, and is taken out again in proportion to a_sj.

No gradient of a source is known before all p_sj of its token are. Where S rows of gradients, S of sums for dkey and N
of
sources fit into one program (`whole`), a persistent grid does everything at one read of each. Where they do not,
`pairs`
finds p_sj and from them a, e and f, a few numbers per token, and `slices` reads everything again, cut along D into
tiles
so narrow that one warp holds [S, C] of gradients and of sums: no warp ever waits for another. The sums are written as
one
row per program and added in a fixed order.

Tiles [S, C] and [N, C] have one row pointer per query and per source. Row j of a tile is brought to all lanes by a sum
over
the tile with all other rows masked out.

Above `launch.MAX_SOURCES` sources, forward launches carry their mixtures and `lse` to the next in the compute dtype,
and in
the backward a, e and f are made from all launches' p_sj by PyTorch: they are small.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .aggregate import Formula, add_rows
from .sources import (
    Rows,
    compute_dtype,
    constants,
    indices,
    load_row,
    locate,
    on_device,
    padded,
    row_pointer,
    rows_of,
    store_row,
    triton_dtype,
)


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
def _sums(parts):
    """The sums of many [W], in reductions of up to 16 at a time: the warps wait for each other once and not for
    each."""
    COUNT: tl.constexpr = len(parts)
    if COUNT > 16:
        return _sums(parts[:16]) + _sums(parts[16:])
    elif COUNT & (COUNT - 1) == 0:
        return _separated(tl.sum(_joined(parts), axis=0), COUNT)
    elif COUNT > 8:
        return _sums(parts[:8]) + _sums(parts[8:])
    elif COUNT > 4:
        return _sums(parts[:4]) + _sums(parts[4:])
    else:
        return _sums(parts[:2]) + _sums(parts[2:])


@triton.jit
def _within_lanes(products, VECTOR: tl.constexpr):
    """[..., W] -> [..., W / VECTOR]: the elements that a lane loaded together, added up without leaving it."""
    if len(products.shape) == 1:
        return tl.sum(tl.reshape(products, [products.shape[0] // VECTOR, VECTOR]), axis=1)
    else:
        return tl.sum(tl.reshape(products, [products.shape[0], products.shape[1] // VECTOR, VECTOR]), axis=2)


@triton.jit
def _scores(rows, keys, s, queries, slots, group, tile, dtype, VECTOR: tl.constexpr):
    """<key_s, v_j> for the queries s, s + 1, ... of a group and all sources; source by source, its queries side by
    side."""
    parts = ()
    for _ in tl.static_range(len(slots) * len(group)):
        parts += (tl.zeros([tile.width // VECTOR], dtype),)
    for c in tl.static_range(len(tile.chunks)):
        columns = c * tile.width + tl.arange(0, tile.width)
        key = [
            tl.load(keys + (s + g) * tile.dim + columns, mask=(columns < tile.dim) & (s + g < queries), other=0.0)
            for g in group
        ]
        added = ()
        for j in tl.static_range(len(slots)):
            value = rows[j][c].to(dtype)
            for g in tl.static_range(len(group)):
                added += (parts[j * len(group) + g] + _within_lanes(value * key[g], VECTOR),)
        parts = added
    return _sums(parts)


@triton.jit
def _squares(row, tile, dtype, VECTOR: tl.constexpr):
    squares = tl.zeros([tile.width // VECTOR], dtype)
    for c in tl.static_range(len(tile.chunks)):
        value = row[c].to(dtype)
        squares += _within_lanes(value * value, VECTOR)
    return squares


@triton.jit
def _softmax(scores, slots, count):
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
def _mixture(rows, weights, slots, tile, dtype):
    mixed = [tl.zeros([tile.width], dtype) for c in tile.chunks]
    for j in tl.static_range(len(slots)):
        mixed = [mixed[c] + weights[j] * rows[j][c].to(dtype) for c in tile.chunks]
    return mixed


@triton.jit
def _answer(
    rows,
    r,
    keys,
    norm_weight,
    outputs,
    lse,
    scores,
    s,
    queries,
    count,
    tokens,
    token,
    slots,
    group,
    tile,
    formula,
    VECTOR: tl.constexpr,
):
    """The queries s, s + 1, ... of a group, at one token whose sources are in registers."""
    T = tl.cast(tokens, tl.int64)
    products = _scores(rows, keys, s, queries, slots, group, tile, formula.dtype, VECTOR)
    for g in tl.static_range(len(group)):
        row = tl.cast(s + g, tl.int64)
        exists = s + g < queries
        score = [products[j * len(group) + g] * r[j] * formula.scale for j in slots]
        for j in tl.static_range(len(slots)):
            tl.store(scores + (row * count + j) * T + token, score[j], mask=exists & (count > j))
        weights, log_sum = _softmax(score, slots, count)
        tl.store(lse + row * T + token, log_sum, mask=exists)
        mixed = _mixture(rows, weights, slots, tile, formula.dtype)
        if norm_weight is not None:
            rho = tl.rsqrt(tl.sum(_squares(mixed, tile, formula.dtype, VECTOR), axis=0) / tile.dim + formula.norm_eps)
            w = load_row(norm_weight, tile)
            mixed = [mixed[c] * rho * w[c].to(formula.dtype) for c in tile.chunks]
        store_row(outputs + (row * T + token) * tile.dim, mixed, tile, exists)


@triton.jit(do_not_specialize=["queries", "count", "tokens"])
def _attn_res_inter_forward_held(
    sources,
    keys,  # [S, D]
    norm_weight,  # [D] or None
    outputs,  # [S, T, D]
    lse,  # [S, T]
    scores,  # [S, N, T]
    rstd,  # [N, T]
    queries,
    count,
    tokens,
    slots,
    group,
    tile,
    formula,
    VECTOR: tl.constexpr,
):
    token = tl.cast(tl.program_id(0), tl.int64)
    place = locate(sources, tl.program_id(0))
    rows = [load_row(row_pointer(sources, j, place), tile, count > j) for j in slots]
    squares = _sums([_squares(rows[j], tile, formula.dtype, VECTOR) for j in slots])
    r = [tl.rsqrt(squares[j] / tile.dim + formula.eps) for j in slots]
    for j in tl.static_range(len(slots)):
        tl.store(rstd + (j * tl.cast(tokens, tl.int64) + token), r[j], mask=count > j)
    first = 0
    if norm_weight is not None:
        _answer(
            rows,
            r,
            keys,
            norm_weight,
            outputs,
            lse,
            scores,
            0,
            queries,
            count,
            tokens,
            token,
            slots,
            group[:1],
            tile,
            formula,
            VECTOR,
        )
        first = 1
    for s in range(first, queries, len(group)):
        _answer(
            rows,
            r,
            keys,
            None,
            outputs,
            lse,
            scores,
            s,
            queries,
            count,
            tokens,
            token,
            slots,
            group,
            tile,
            formula,
            VECTOR,
        )


@triton.jit
def _spread(values, index):
    """Numbers or pointers in a tuple as an int64 tensor, `values[index]`."""
    spread = tl.full(index.shape, 0, tl.int64)
    for j in tl.static_range(len(values)):
        spread = tl.where(index == j, tl.cast(values[j], tl.int64), spread)
    return spread


@triton.jit
def _contiguous_rows(tensors, addresses, token, D: tl.constexpr):
    """Pointers [R] to a token's rows in contiguous tensors that begin at `addresses`."""
    size: tl.constexpr = tensors[0].dtype.element_ty.primitive_bitwidth // 8
    aligned: tl.constexpr = 16 if D * size % 16 == 0 else size
    return tl.multiple_of((addresses + token * (D * size)).to(tensors[0].dtype), aligned)


@triton.jit
def _strides(rows, index, UNIFORM: tl.constexpr):
    """Outer and row strides: [R], or numbers where all tensors have the same."""
    if UNIFORM:
        return rows.outer_strides[0], rows.row_strides[0]
    else:
        return _spread(rows.outer_strides, index), _spread(rows.row_strides, index)


@triton.jit
def _row_pointers(rows, addresses, strides, token):
    """Pointers [R] to a token's rows."""
    size: tl.constexpr = rows.pointers[0].dtype.element_ty.primitive_bitwidth // 8
    place = locate(rows, token)
    offset = place[0] * strides[0] + place[1] * strides[1]
    return tl.multiple_of((addresses + offset * size).to(rows.pointers[0].dtype), rows.alignment)


@triton.jit
def _load_tile(pointers, columns, mask, dtype):
    return tl.load(pointers[:, None] + columns[None, :], mask=mask, other=0.0).to(dtype)


@triton.jit
def _row_of(tile, chosen):
    """The row [C] of a tile [R, C] that `chosen` [R] is true for, in all lanes."""
    return tl.sum(tl.where(chosen[:, None], tile, 0.0), axis=0)


@triton.jit
def _column_of(tile, chosen):
    """The column [R] of a tile [R, C] that `chosen` [C] is true for, in all lanes."""
    return tl.sum(tl.where(chosen[None, :], tile, 0.0), axis=1)


@triton.jit
def _add_pairs(pairs, x, v, slots, source, VECTOR: tl.constexpr):
    """Add <x_s, v_j> over the columns of the tiles x [S, C] and v [N, C], but for the sum over lanes; j in `slots`."""
    added = ()
    for i in tl.static_range(len(slots)):
        added += (pairs[i] + _within_lanes(x * _row_of(v, source == slots[i])[None, :], VECTOR),)
    return added


@triton.jit
def _as_tile(pairs, slots, query, source, dtype):
    """Sums [S, lanes], one for each of `slots`, as the columns of a tile [S, N]; zero in all others."""
    tile = tl.zeros([query.shape[0], source.shape[0]], dtype)
    for i in tl.static_range(len(slots)):
        tile = tl.where((source == slots[i])[None, :], tl.sum(pairs[i], axis=1)[:, None], tile)
    return tile


@triton.jit
def _normalized_row(unscaled, norm_weight, out, squared, panel, formula, WIDTH: tl.constexpr):
    """Scale a row that this program left in `unscaled` and store it in `out`."""
    rho = tl.rsqrt(squared / panel.dim + formula.norm_eps)
    tl.debug_barrier()
    for start in range(0, panel.dim, WIDTH):
        columns = start + tl.arange(0, WIDTH)
        mask = columns < panel.dim
        h = tl.load(unscaled + columns, mask=mask, other=0.0)
        w = tl.load(norm_weight + columns, mask=mask, other=0.0).to(formula.dtype)
        tl.store(out + columns, (h * rho * w).to(out.dtype.element_ty), mask=mask)
    tl.debug_barrier()


@triton.jit
def _score_tile(
    pairs, squares, slots, source, first, count, total, present, answered, scores, rstd, at, T, panel, formula
):
    """Scores [S, N], -inf where there is no source; they and r are stored. `first` is the first source of this
    launch."""
    r = tl.rsqrt(tl.sum(squares, axis=1) / panel.dim + formula.eps)
    query = tl.arange(0, panel.queries)
    score = _as_tile(pairs, slots, query, source, formula.dtype) * r[None, :] * formula.scale
    tl.store(rstd + (tl.cast(source, tl.int64) + first) * T + at, r, mask=source < count)
    where = (tl.cast(query, tl.int64)[:, None] * total + source[None, :] + first) * T + at
    tl.store(scores + where, score, mask=answered[:, None] & present[None, :])
    return tl.where(present[None, :], score, -float("inf"))


@triton.jit(do_not_specialize=["queries", "count", "first", "total", "tokens"])
def _attn_res_inter_forward_twice(
    sources,
    keys,  # [S, D]
    norm_weight,  # [D] or None
    carry,  # [S, T, D], the mixtures of earlier launches, or None
    outputs,  # [S, T, D]
    unscaled,  # [programs, D], or None without a norm
    lse,  # [S, T], of earlier launches too where there is a carry
    scores,  # [S, total, T]
    rstd,  # [total, T]
    queries,
    count,
    first,
    total,
    tokens,
    slots,
    panel,
    formula,
    UNIFORM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    T = tl.cast(tokens, tl.int64)
    query = tl.arange(0, panel.queries)
    source = tl.arange(0, panel.sources)
    answered = query < queries
    present = source < count
    query64 = tl.cast(query, tl.int64)
    addresses = _spread(sources.pointers, source)
    strides = _strides(sources, source, UNIFORM)
    if norm_weight is not None:
        unscaled += tl.cast(tl.program_id(0), tl.int64) * panel.dim
    for token in tl.range(tl.program_id(0), tokens, tl.num_programs(0), disable_licm=True):
        at = tl.cast(token, tl.int64)
        row = _row_pointers(sources, addresses, strides, token)
        pairs = [tl.zeros([panel.queries, panel.columns // panel.vector], formula.dtype) for j in slots]
        squares = tl.zeros([panel.sources, panel.columns // panel.vector], formula.dtype)
        for start in tl.range(0, panel.dim, panel.columns):
            columns = start + tl.arange(0, panel.columns)
            inside = (columns < panel.dim)[None, :]
            v = _load_tile(row, columns, present[:, None] & inside, formula.dtype)
            key = _load_tile(keys + query64 * panel.dim, columns, answered[:, None] & inside, formula.dtype)
            squares += _within_lanes(v * v, panel.vector)
            pairs = _add_pairs(pairs, key, v, slots, source, panel.vector)
        score = _score_tile(
            pairs, squares, slots, source, first, count, total, present, answered, scores, rstd, at, T, panel, formula
        )
        top = tl.max(score, axis=1)
        raised = tl.exp(score - top[:, None])
        norm = tl.sum(raised, axis=1)
        log_sum = top + tl.log(norm)
        share = 1.0 / norm
        keep = tl.zeros([panel.queries], formula.dtype)
        if carry is not None:
            earlier = tl.load(lse + query64 * T + at, mask=answered, other=0.0)
            keep = tl.sigmoid(earlier - log_sum)
            share *= tl.sigmoid(log_sum - earlier)
            higher = tl.maximum(earlier, log_sum)
            log_sum = higher + tl.log(tl.exp(earlier - higher) + tl.exp(log_sum - higher))
        tl.store(lse + query64 * T + at, log_sum, mask=answered)
        raised *= share[:, None]
        weights = [_column_of(raised, source == j) for j in slots]
        out_row = outputs + (query64 * T + at) * panel.dim
        squared = tl.zeros([panel.columns], formula.dtype)
        for back in tl.range(0, panel.dim, panel.columns):
            columns = tl.arange(0, panel.columns) - back + (panel.dim - 1) // panel.columns * panel.columns
            inside = (columns < panel.dim)[None, :]
            v = _load_tile(row, columns, present[:, None] & inside, formula.dtype)
            mixed = weights[0][:, None] * _row_of(v, source == 0)[None, :]
            for j in tl.static_range(1, len(slots)):
                mixed += weights[j][:, None] * _row_of(v, source == j)[None, :]
            stored = answered[:, None] & inside
            if carry is not None:
                mixed += keep[:, None] * _load_tile(
                    carry + (query64 * T + at) * panel.dim, columns, stored, formula.dtype
                )
            if norm_weight is not None:
                h = _row_of(mixed, query == 0)
                squared += h * h
                tl.store(unscaled + columns, h, mask=columns < panel.dim)
                stored = stored & (query > 0)[:, None]
            tl.store(out_row[:, None] + columns[None, :], mixed.to(outputs.dtype.element_ty), mask=stored)
        if norm_weight is not None:
            out = outputs + at * panel.dim
            _normalized_row(unscaled, norm_weight, out, tl.sum(squared, axis=0), panel, formula, WIDTH)


class Terms(NamedTuple):
    """What the gradients of X tokens, or of the token that each of X programs is at, are made of; G launches share
    them."""

    ae: Tensor | None  # [X, N, 2, S]
    f: Tensor | None  # [X, N]
    e_sum: Tensor | None  # [X, G, S], over the sources of one launch
    norm: Tensor | None  # [X, 2]: rho and beta


class Products(NamedTuple):
    """What terms are made of, for X tokens or for the token that each of X programs is at.

    Where one launch sees all sources, v_j - v_0 is in the place of v_j, and the first source's places are not written.
    """

    p: Tensor  # [X, N, S]
    hv: Tensor  # [X, N]: <h_0, v_j>
    norm: Tensor  # [X, 2]: <h_0, h_0> and <u, h_0>


@triton.jit
def _weights(score):
    """[S, N]"""
    raised = tl.exp(score - tl.max(score, axis=1)[:, None])
    return raised / tl.sum(raised, axis=1)[:, None]


@triton.jit
def _first_weights(scores, source, present, at, T):
    """a_0j [N], where all sources are in one launch."""
    score = tl.load(scores + tl.cast(source, tl.int64) * T + at, mask=present, other=-float("inf"))
    raised = tl.exp(score - tl.max(score, axis=0))
    return raised / tl.sum(raised, axis=0)


@triton.jit
def _load_scores(scores, rstd, count, present, answered, query, source, at, T):
    """Scores [S, N], -inf where there is no source, and r [N]; where all sources are in one launch."""
    where = (tl.cast(query, tl.int64)[:, None] * count + source[None, :]) * T + at
    score = tl.load(scores + where, mask=answered[:, None] & present[None, :], other=0.0)
    r = tl.load(rstd + tl.cast(source, tl.int64) * T + at, mask=present, other=0.0)
    return tl.where(present[None, :], score, -float("inf")), r


@triton.jit
def _load_products(products, place, source, query, present, answered):
    """p [S, N] and <h_0, v_j> [N] of this program's token, zero for the first source."""
    paired = present & (source > 0)
    p = products.p + (place + source)[None, :] * query.shape[0] + query[:, None]
    hv = tl.load(products.hv + place + source, mask=paired, other=0.0)
    return tl.load(p, mask=answered[:, None] & paired[None, :], other=0.0), hv


@triton.jit
def _store_terms(p, score, r, dlse, terms, entry, present, query, source, panel, formula):
    """From p_sj - p_s0 [S, N] the terms of one entry."""
    a = _weights(score)
    ds = a * (p - tl.sum(a * p, axis=1)[:, None])
    ds -= a * tl.sum(ds, axis=1)[:, None]
    r0 = tl.sum(tl.where(source == 0, r, 0.0), axis=0)
    e_sum = tl.sum(ds * tl.where(present, r - r0, 0.0)[None, :], axis=1)
    if dlse is not None:
        ds += a * dlse[:, None]
        e_sum += dlse * tl.sum(a * r[None, :], axis=1)
    f = tl.sum(ds * tl.where(present[None, :], score, 0.0), axis=0) * r * r / panel.dim
    ae = terms.ae + (entry + source)[None, :] * (2 * panel.queries) + query[:, None]
    tl.store(ae, a, mask=present[None, :])
    tl.store(ae + panel.queries, ds * r[None, :] * formula.scale, mask=present[None, :])
    tl.store(terms.f + entry + source, f, mask=present)
    return e_sum * formula.scale


@triton.jit
def _through_norm(p, hv, hh, uh, terms, entry, query, panel, formula):
    """<g_0, v_j> in place of <u, v_j> in the first row of p; rho and beta are stored."""
    rho = tl.rsqrt(hh / panel.dim + formula.norm_eps)
    beta = rho * rho * rho * uh / panel.dim
    tl.store(terms.norm + 2 * entry, rho)
    tl.store(terms.norm + 2 * entry + 1, beta)
    return tl.where((query == 0)[:, None], rho * p - (beta * hv)[None, :], p)


@triton.jit(do_not_specialize=["queries", "count", "first", "total", "tokens"])
def _attn_res_inter_backward_pairs(
    grads,
    sources,
    mixed,  # [T, D], h_0 where more sources than this launch's are in it, else None
    norm_weight,  # [D] or None
    scores,  # [S, total, T]
    products,  # of T tokens
    table,  # [programs, 2, N + S] int64: addresses of tensors, and of the token's rows
    queries,
    count,
    first,
    total,
    tokens,
    slots,
    paired,
    panel,
    formula,
    UNIFORM: tl.constexpr,
):
    ROWS: tl.constexpr = panel.sources + panel.queries
    LANES: tl.constexpr = panel.columns // panel.vector
    T = tl.cast(tokens, tl.int64)
    query = tl.arange(0, panel.queries)
    source = tl.arange(0, panel.sources)
    answered = query < queries
    present = source < count
    table += tl.program_id(0) * (2 * ROWS)
    grad_table = table + panel.sources
    tl.store(table + source, _spread(sources.pointers, source))
    tl.store(grad_table + query, _spread(grads.pointers, query))
    strides = _strides(sources, source, UNIFORM)
    for token in tl.range(tl.program_id(0), tokens, tl.num_programs(0), disable_licm=True):
        at = tl.cast(token, tl.int64)
        tl.debug_barrier()
        row = _row_pointers(sources, tl.load(table + source), strides, token)
        grad_row = _row_pointers(grads, tl.load(grad_table + query), _strides(grads, query, True), token)
        tl.store(table + ROWS + source, row.to(tl.int64))
        tl.store(grad_table + ROWS + query, grad_row.to(tl.int64))
        tl.debug_barrier()
        if norm_weight is not None and mixed is None:
            a0 = _first_weights(scores, source, present, at, T)
        pairs = [tl.zeros([panel.queries, LANES], formula.dtype) for j in paired]
        hv = tl.zeros([panel.sources, LANES], formula.dtype)
        hh = tl.zeros([panel.columns], formula.dtype)
        uh = tl.zeros([panel.columns], formula.dtype)
        for start in tl.range(0, panel.dim, panel.columns):
            columns = start + tl.arange(0, panel.columns)
            inside = columns < panel.dim
            row = tl.multiple_of(tl.load(table + ROWS + source).to(sources.pointers[0].dtype), sources.alignment)
            v = _load_tile(row, columns, present[:, None] & inside[None, :], formula.dtype)
            if norm_weight is not None:
                if mixed is None:
                    h = tl.sum(a0[:, None] * v, axis=0)
                    hh += h * h
                else:
                    h = tl.load(mixed + at * panel.dim + columns, mask=inside, other=0.0)
            if len(paired) < len(slots):
                v -= _row_of(v, source == 0)[None, :]
            if norm_weight is not None:
                hv += _within_lanes(v * h[None, :], panel.vector)
            grad_row = tl.multiple_of(tl.load(grad_table + ROWS + query).to(grads.pointers[0].dtype), grads.alignment)
            g = _load_tile(grad_row, columns, answered[:, None] & inside[None, :], formula.dtype)
            if norm_weight is not None:
                w = tl.load(norm_weight + columns, mask=inside, other=0.0).to(formula.dtype)
                g = tl.where((query == 0)[:, None], g * w[None, :], g)
                if mixed is None:
                    uh += h * _row_of(g, query == 0)
            pairs = _add_pairs(pairs, g, v, paired, source, panel.vector)
        entry = at * total + first
        for i in tl.static_range(len(paired)):
            p = products.p + (entry + paired[i]) * panel.queries + query
            tl.store(p, tl.sum(pairs[i], axis=1), mask=count > paired[i])
        if norm_weight is not None:
            tl.store(products.hv + entry + source, tl.sum(hv, axis=1), mask=present)
            tl.store(products.norm + 2 * at, tl.sum(hh, axis=0))
            tl.store(products.norm + 2 * at + 1, tl.sum(uh, axis=0))


@triton.jit(do_not_specialize=["queries", "count", "tokens"])
def _attn_res_inter_backward_terms(
    scores,  # [S, N, T]
    rstd,  # [N, T]
    grad_lse,  # [S, T] or None
    products,  # of T tokens
    terms,
    queries,
    count,
    tokens,
    panel,
    formula,
    NORM: tl.constexpr,
):
    at = tl.cast(tl.program_id(0), tl.int64)
    T = tl.cast(tokens, tl.int64)
    query = tl.arange(0, panel.queries)
    source = tl.arange(0, panel.sources)
    answered = query < queries
    present = source < count
    p, hv = _load_products(products, at * count, source, query, present, answered)
    if NORM:
        hh = tl.load(products.norm + 2 * at)
        p = _through_norm(p, hv, hh, tl.load(products.norm + 2 * at + 1), terms, at, query, panel, formula)
    score, r = _load_scores(scores, rstd, count, present, answered, query, source, at, T)
    dlse = None
    if grad_lse is not None:
        dlse = tl.load(grad_lse + tl.cast(query, tl.int64) * T + at, mask=answered, other=0.0)
    e_sum = _store_terms(p, score, r, dlse, terms, at * count, present, query, source, panel, formula)
    tl.store(terms.e_sum + at * panel.queries + query, e_sum)


@triton.jit
def _norm_gradients(g, h, w, terms, entry, query):
    """g_0 in place of the gradient of y_0 in a tile of gradients, and what a token adds to the norm weight's."""
    first = query == 0
    rho = tl.load(terms.norm + 2 * entry)
    beta = tl.load(terms.norm + 2 * entry + 1)
    dnorm = _row_of(g, first) * h * rho
    return tl.where(first[:, None], g * (rho * w)[None, :] - (beta * h)[None, :], g), dnorm


@triton.jit
def _gradients(v, g, key, dv, dkey, ae, f, e_sum, count, present, query, source, panel):
    """A token's part of the sources' gradients on top of dv [N, C], and of the keys' on top of dkey [S, C]."""
    dv -= tl.load(f + source, mask=present, other=0.0)[:, None] * v
    v0 = _row_of(v, source == 0)
    dkey += tl.load(e_sum + query)[:, None] * v0[None, :]
    v -= v0[None, :]
    for j in tl.range(0, count, disable_licm=True):
        here = source == j
        a = tl.load(ae + 2 * j * panel.queries + query)
        e = tl.load(ae + (2 * j + 1) * panel.queries + query)
        dv += tl.where(here[:, None], tl.sum(a[:, None] * g + e[:, None] * key, axis=0)[None, :], 0.0)
        dkey += e[:, None] * _row_of(v, here)[None, :]
    return dv, dkey


@triton.jit
def _chosen(bits, index):
    """[R] whether the bit `index` is set."""
    return ((bits >> index) & 1) != 0


@triton.jit(do_not_specialize=["queries", "count", "first", "total", "group", "groups", "tokens", "wanted", "added"])
def _attn_res_inter_backward_slices(
    grads,
    sources,
    existing,  # tensors [T, D] to add to, or None
    dsources,  # tensors [T, D]
    keys,  # [S, D]
    mixed,  # as for the pairs
    norm_weight,  # [D] or None
    terms,  # of T tokens
    table,  # [slices, programs, 3 N + S] int64
    dkey_rows,  # [programs, S, D]
    dnorm_rows,  # [programs, D] or None
    queries,
    count,
    first,
    total,
    group,
    groups,
    tokens,
    wanted,  # bits
    added,  # bits
    panel,
    formula,
    UNIFORM: tl.constexpr,
):
    query = tl.arange(0, panel.queries)
    source = tl.arange(0, panel.sources)
    columns = tl.program_id(0) * panel.columns + tl.arange(0, panel.columns)
    inside = columns < panel.dim
    present = source < count
    in_grads = (query < queries)[:, None] & inside[None, :]
    in_sources = present[:, None] & inside[None, :]
    table += (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * (3 * panel.sources + panel.queries)
    outputs, olds, gradients = table + panel.sources, table + 2 * panel.sources, table + 3 * panel.sources
    tl.store(table + source, _spread(sources.pointers, source))
    tl.store(outputs + source, _spread(dsources, source))
    if existing is not None:
        tl.store(olds + source, _spread(existing, source))
    tl.store(gradients + query, _spread(grads.pointers, query))
    tl.debug_barrier()
    strides = _strides(sources, source, UNIFORM)
    key_row = keys + tl.cast(query, tl.int64) * panel.dim
    dkey = tl.zeros([panel.queries, panel.columns], formula.dtype)
    dnorm = tl.zeros([panel.columns], formula.dtype)
    for token in tl.range(tl.program_id(1), tokens, tl.num_programs(1), disable_licm=True):
        at = tl.cast(token, tl.int64)
        v = _load_tile(
            _row_pointers(sources, tl.load(table + source), strides, token), columns, in_sources, formula.dtype
        )
        grad_row = _row_pointers(grads, tl.load(gradients + query), _strides(grads, query, True), token)
        g = _load_tile(grad_row, columns, in_grads, formula.dtype)
        key = _load_tile(key_row, columns, in_grads, formula.dtype)
        entry = at * total + first
        ae = terms.ae + entry * (2 * panel.queries)
        if norm_weight is not None:
            if mixed is None:
                h = tl.sum(tl.load(ae + source * (2 * panel.queries), mask=present, other=0.0)[:, None] * v, axis=0)
            else:
                h = tl.load(mixed + at * panel.dim + columns, mask=inside, other=0.0)
            w = tl.load(norm_weight + columns, mask=inside, other=0.0).to(formula.dtype)
            g, dnorm_part = _norm_gradients(g, h, w, terms, at, query)
            dnorm += dnorm_part
        dv = tl.zeros([panel.sources, panel.columns], formula.dtype)
        if existing is not None:
            old = _contiguous_rows(existing, tl.load(olds + source), at, panel.dim)
            dv = _load_tile(old, columns, in_sources & _chosen(added, source)[:, None], formula.dtype)
        e_sum = terms.e_sum + (at * groups + group) * panel.queries
        dv, dkey = _gradients(v, g, key, dv, dkey, ae, terms.f + entry, e_sum, count, present, query, source, panel)
        out = _contiguous_rows(dsources, tl.load(outputs + source), at, panel.dim)
        stored = in_sources & _chosen(wanted, source)[:, None]
        tl.store(out[:, None] + columns[None, :], dv.to(dsources[0].dtype.element_ty), mask=stored)
    program = tl.cast(tl.program_id(1), tl.int64)
    dkey_row = dkey_rows + (program * queries + query) * panel.dim
    tl.store(dkey_row[:, None] + columns[None, :], dkey, mask=in_grads)
    if dnorm_rows is not None:
        tl.store(dnorm_rows + program * panel.dim + columns, dnorm, mask=inside)


@triton.jit
def _first_mixture(values, scores, count, at, T, slots):
    """h_0, from the scores of query 0."""
    weights, _ = _softmax([tl.load(scores + j * T + at, mask=count > j, other=0.0) for j in slots], slots, count)
    h = weights[0] * values[0]
    for j in tl.static_range(1, len(slots)):
        h += weights[j] * values[j]
    return h


@triton.jit
def _store_pairs(table, stride, x, differences, slots, VECTOR: tl.constexpr):
    """<x, v_j - v_0> for j > 0, at `stride` from one to the next."""
    if len(slots) > 1:
        sums = _sums([_within_lanes(x * differences[j], VECTOR) for j in slots[1:]])
        for j in tl.static_range(1, len(slots)):
            tl.store(table + j * stride, sums[j - 1])


@triton.jit(do_not_specialize=["count", "tokens", "wanted", "added"])
def _attn_res_inter_backward_whole(
    grads,
    sources,
    existing,  # tensors [T, D] to add to, or None
    dsources,  # tensors [T, D]
    keys,  # [S, D]
    norm_weight,  # [D] or None
    scores,  # [S, N, T]
    rstd,  # [N, T]
    grad_lse,  # [S, T] or None
    terms,  # of all programs
    products,  # of all programs
    dkey_rows,  # [programs, S, D]
    dnorm_rows,  # [programs, D] or None
    count,
    tokens,
    wanted,  # bits
    added,  # bits
    slots,
    asked,
    panel,
    formula,
):
    QUERIES: tl.constexpr = len(asked)
    T = tl.cast(tokens, tl.int64)
    columns = tl.arange(0, panel.columns)
    inside = columns < panel.dim
    query = tl.arange(0, panel.queries)
    source = tl.arange(0, panel.sources)
    present = source < count
    answered = query < QUERIES
    program = tl.cast(tl.program_id(0), tl.int64)
    entry = program * count
    ae = terms.ae + entry * (2 * panel.queries)
    e_sum = terms.e_sum + program * panel.queries
    scratch = program * panel.sources
    p_table = products.p + scratch * panel.queries
    dkey = [tl.zeros([panel.columns], formula.dtype) for s in asked]
    dnorm = tl.zeros([panel.columns], formula.dtype)
    for token in tl.range(tl.program_id(0), tokens, tl.num_programs(0), disable_licm=True):
        at = tl.cast(token, tl.int64)
        place = locate(sources, token)
        v = [
            tl.load(row_pointer(sources, j, place) + columns, mask=inside & (count > j), other=0.0).to(formula.dtype)
            for j in slots
        ]
        place = locate(grads, token)
        g = [tl.load(row_pointer(grads, s, place) + columns, mask=inside, other=0.0).to(formula.dtype) for s in asked]
        v0 = v[0]
        if norm_weight is not None:
            h = _first_mixture(v, scores, count, at, T, slots)
        v = [v[j] - v0 for j in slots]
        for s in tl.static_range(QUERIES):
            x = g[s]
            if norm_weight is not None:
                if s == 0:
                    x = g[0] * tl.load(norm_weight + columns, mask=inside, other=0.0).to(formula.dtype)
                    hh, uh = _sums((_within_lanes(h * h, panel.vector), _within_lanes(h * x, panel.vector)))
                    _store_pairs(products.hv + scratch, 1, h, v, slots, panel.vector)
            _store_pairs(p_table + s, panel.queries, x, v, slots, panel.vector)
        tl.debug_barrier()
        p, hv = _load_products(products, scratch, source, query, present, answered)
        score, r = _load_scores(scores, rstd, count, present, answered, query, source, at, T)
        if norm_weight is not None:
            p = _through_norm(p, hv, hh, uh, terms, program, query, panel, formula)
        dlse = None
        if grad_lse is not None:
            dlse = tl.load(grad_lse + tl.cast(query, tl.int64) * T + at, mask=answered, other=0.0)
        tl.store(e_sum + query, _store_terms(p, score, r, dlse, terms, entry, present, query, source, panel, formula))
        tl.debug_barrier()
        if norm_weight is not None:
            w = tl.load(norm_weight + columns, mask=inside, other=0.0).to(formula.dtype)
            rho = tl.load(terms.norm + 2 * program)
            dnorm += g[0] * h * rho
            g = [g[0] * (rho * w) - h * tl.load(terms.norm + 2 * program + 1)] + g[1:]
        for j in tl.static_range(len(slots)):
            exists = count > j
            dv = tl.zeros([panel.columns], formula.dtype)
            if existing is not None:
                old = existing[j] + at * panel.dim + columns
                dv = tl.load(old, mask=inside & exists & _chosen(added, j), other=0.0).to(formula.dtype)
            f = tl.load(terms.f + entry + j, mask=exists, other=0.0)
            dv -= f * (v0 if j == 0 else v[j] + v0)
            for s in tl.static_range(QUERIES):
                a = tl.load(ae + 2 * j * panel.queries + s, mask=exists, other=0.0)
                e = tl.load(ae + (2 * j + 1) * panel.queries + s, mask=exists, other=0.0)
                dv += a * g[s] + e * tl.load(keys + s * panel.dim + columns, mask=inside, other=0.0)
            if j == 0:
                dkey = [dkey[s] + tl.load(e_sum + s) * v0 for s in asked]
            else:
                e = ae + (2 * j + 1) * panel.queries
                dkey = [dkey[s] + tl.load(e + s, mask=exists, other=0.0) * v[j] for s in asked]
            out = dsources[j] + at * panel.dim + columns
            stored = inside & exists & _chosen(wanted, j)
            tl.store(out, dv.to(dsources[0].dtype.element_ty), mask=stored)
        tl.debug_barrier()
    for s in tl.static_range(QUERIES):
        tl.store(dkey_rows + (program * QUERIES + s) * panel.dim + columns, dkey[s], mask=inside)
    if norm_weight is not None:
        tl.store(dnorm_rows + program * panel.dim + columns, dnorm, mask=inside)


def attn_res_inter_forward(
    sources: list[Tensor],
    queries: Tensor,
    key_weights: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    scale: float,
    norm_eps: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`outputs [S, ..., D]`, and in the compute dtype `lse [S, ...]`, `scores [S, N, ...]` and `rstd [N, ...]`."""
    first, count, total = sources[0], queries.shape[0], len(sources)
    shape, dtype = first.shape, compute_dtype(first.dtype)
    outputs = first.new_empty((count, *shape), dtype=out_dtype)
    lse = first.new_empty((count, *shape[:-1]), dtype=dtype)
    scores = first.new_empty((count, total, *shape[:-1]), dtype=dtype)
    rstd = first.new_empty((total, *shape[:-1]), dtype=dtype)
    if outputs.numel():
        keys, formula = _keys(queries, key_weights, dtype), Formula(eps, scale, norm_eps, triton_dtype(dtype))
        rows, stats = rows_of(sources), (lse, scores, rstd)
        size = launch.bucket(min(total, launch.MAX_SOURCES))
        plan = launch.attn_res_inter_forward(shape[-1], first.element_size(), count, size, launch.lanes())
        with on_device(first):
            if plan.held and total <= launch.MAX_SOURCES:
                _hold(plan, rows, keys, norm_weight, outputs, stats, formula)
            else:
                _read_twice(rows, keys, norm_weight, outputs, stats, formula)
    return outputs, lse, scores, rstd


def _keys(queries: Tensor, key_weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    keys = queries.to(dtype)
    return (keys if key_weights is None else keys * key_weights.to(dtype)).contiguous()


def _hold(
    plan: launch.InterForward,
    rows: Rows,
    keys: Tensor,
    norm_weight: Tensor | None,
    outputs: Tensor,
    stats: tuple[Tensor, Tensor, Tensor],
    formula: Formula,
) -> None:
    bucket = launch.bucket(len(rows.tensors))
    _attn_res_inter_forward_held[(rows.count,)](
        rows.argument(bucket),
        keys,
        norm_weight,
        outputs,
        *stats,
        keys.shape[0],
        len(rows.tensors),
        rows.count,
        indices(bucket),
        indices(plan.group),
        constants(plan.tile),
        constants(formula),
        min(16 // rows.tensors[0].element_size(), plan.tile.width),
        **launch.options(plan.warps),
    )


def _read_twice(
    rows: Rows,
    keys: Tensor,
    norm_weight: Tensor | None,
    outputs: Tensor,
    stats: tuple[Tensor, Tensor, Tensor],
    formula: Formula,
) -> None:
    carry, total, lse = None, len(rows.tensors), stats[0]
    for start, stop in launch.groups(total):
        last = stop == total
        target = outputs if last else torch.empty_like(outputs, dtype=lse.dtype) if carry is None else carry
        bucket = launch.bucket(stop - start)
        count, dim = keys.shape
        plan = launch.attn_res_inter_forward(dim, rows.tensors[0].element_size(), count, bucket, launch.lanes())
        programs = launch.persistent(rows.count, plan.resident, lse.device)
        normed = last and norm_weight is not None
        _attn_res_inter_forward_twice[(programs,)](
            rows.group(start, stop).argument(bucket),
            keys,
            norm_weight if normed else None,
            carry,
            target,
            lse.new_empty(programs, keys.shape[1]) if normed else None,
            *stats,
            keys.shape[0],
            stop - start,
            start,
            total,
            rows.count,
            indices(bucket),
            constants(plan.panel),
            constants(formula),
            _uniform(rows.group(start, stop)),
            512,
            **launch.options(1),
        )
        carry = target


def _uniform(rows: Rows) -> bool:
    """Whether all tensors have the same strides."""
    return len(set(zip(rows.outer_strides, rows.row_strides, strict=True))) == 1


def attn_res_inter_backward(
    grad_outputs: list[Tensor] | Tensor,
    grad_lse: Tensor | None,
    sources: list[Tensor],
    queries: Tensor,
    key_weights: Tensor | None,
    norm_weight: Tensor | None,
    lse: Tensor,
    scores: Tensor,
    rstd: Tensor,
    eps: float,
    scale: float,
    norm_eps: float,
    needs_grad: list[bool],
    accumulate: list[Tensor | None],
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Gradients of the sources (empty where not needed), of `queries * key_weights [S, D]` and of `norm_weight [D]`.

    Args:
        grad_outputs: S tensors `[..., D]`, as a sequence or stacked; copied only where their rows cannot be read in
        place
            with one pair of strides for all.
        accumulate: for each source a gradient `[..., D]` to which its own is added, or None. The sum goes to fresh
            memory: autograd may hand the same gradient to others.
    """
    dsources = [x.new_empty(x.shape if needed else (0,)) for x, needed in zip(sources, needs_grad, strict=True)]
    if not sources[0].numel():
        width = 0 if norm_weight is None else norm_weight.shape[0]
        return dsources, scores.new_zeros(queries.shape), scores.new_zeros(width)
    work = _Backward(
        _gradient_rows(list(grad_outputs)),
        rows_of(sources),
        _same_dtype([None if x is None else x.contiguous() for x in accumulate or [None] * len(sources)]),
        dsources,
        needs_grad,
        _keys(queries, key_weights, scores.dtype),
        norm_weight,
        scores,
        rstd,
        None if grad_lse is None else grad_lse.to(scores.dtype).contiguous(),
        Formula(eps, scale, norm_eps, triton_dtype(scores.dtype)),
    )
    with on_device(sources[0]):
        if work.plan.whole and len(sources) <= launch.MAX_SOURCES:
            dkey_rows, dnorm_rows = _launch_whole(work)
        elif len(sources) <= launch.MAX_SOURCES:
            dkey_rows, dnorm_rows = _launch_slices(work, None, _launch_terms(work, _launch_pairs(work, None)))
        else:
            head = None if key_weights is None else key_weights[:1]
            mixed = None
            if norm_weight is not None:
                mixed = attn_res_inter_forward(sources, queries[:1], head, None, eps, scale, norm_eps, scores.dtype)[0]
            dkey_rows, dnorm_rows = _launch_slices(work, mixed, _terms_of_groups(work, _launch_pairs(work, mixed)))
        dnorm_weight = scores.new_empty(0) if dnorm_rows is None else add_rows(dnorm_rows)[0]
        return dsources, add_rows(dkey_rows.flatten(1))[0].view(queries.shape), dnorm_weight


@dataclass(frozen=True)
class _Backward:
    """What the launches of one backward share."""

    grads: Rows
    sources: Rows
    existing: list[Tensor | None]
    dsources: list[Tensor]
    wanted: list[bool]
    keys: Tensor
    norm_weight: Tensor | None
    scores: Tensor
    rstd: Tensor
    grad_lse: Tensor | None
    formula: Formula

    @property
    def sizes(self) -> tuple[int, int, int]:
        """S, N and T."""
        return self.keys.shape[0], len(self.sources.tensors), self.sources.count

    @property
    def plan(self) -> launch.InterBackward:
        queries, sources, _ = self.sizes
        bucket = launch.bucket(min(sources, launch.MAX_SOURCES))
        return launch.attn_res_inter_backward(
            self.keys.shape[1],
            self.sources.tensors[0].element_size(),
            queries,
            bucket,
            self.norm_weight is not None,
            any(x is not None for x in self.existing),
            launch.lanes(),
        )

    def targets(self, start: int, stop: int) -> tuple[tuple[Tensor, ...] | None, tuple[Tensor, ...], int, int]:
        """For sources `start` to `stop`: tensors to add to (None: to none), tensors to write to, bits of the latter
        and former."""
        old, bucket = self.existing[start:stop], launch.bucket(stop - start)
        given = [x for x in old if x is not None]
        return (
            padded([given[0] if x is None else x for x in old], bucket) if given else None,
            padded(self.dsources[start:stop], bucket),
            _bits(self.wanted[start:stop]),
            _bits([x is not None for x in old]),
        )

    def terms(self, entries: int, launches: int = 1) -> Terms:
        """Room for the terms of so many tokens or programs."""
        sources, queries = len(self.sources.tensors), self.plan.panel.queries
        return Terms(
            self.keys.new_empty(entries, sources, 2, queries),
            self.keys.new_empty(entries, sources),
            self.keys.new_empty(entries, launches, queries),
            self.keys.new_empty(entries, 2),
        )

    def products(self, entries: int, sources: int) -> Products:
        queries = self.plan.panel.queries
        return Products(
            self.keys.new_empty(entries, sources, queries),
            self.keys.new_empty(entries, sources),
            self.keys.new_empty(entries, 2),
        )

    def sums(self, launches: int, programs: int) -> tuple[Tensor, Tensor | None]:
        """Rows for the sums of all programs: [.., S, D], and [programs, D] where there is a norm."""
        norm = None if self.norm_weight is None else self.keys.new_empty(programs, self.keys.shape[1])
        return self.keys.new_empty(launches * programs, *self.keys.shape), norm


def _launch_whole(work: _Backward) -> tuple[Tensor, Tensor | None]:
    queries, sources, tokens = work.sizes
    plan, bucket = work.plan, launch.bucket(sources)
    programs = launch.persistent(tokens, plan.resident, work.keys.device)
    existing, dsources, wanted, added = work.targets(0, sources)
    sums = work.sums(1, programs)
    _attn_res_inter_backward_whole[(programs,)](
        work.grads.argument(queries),
        work.sources.argument(bucket),
        existing,
        dsources,
        work.keys,
        work.norm_weight,
        work.scores,
        work.rstd,
        work.grad_lse,
        work.terms(programs),
        work.products(programs, plan.panel.sources),
        *sums,
        sources,
        tokens,
        wanted,
        added,
        indices(bucket),
        indices(queries),
        constants(plan.panel),
        constants(work.formula),
        **launch.options(plan.warps),
    )
    return sums


def _launch_pairs(work: _Backward, mixed: Tensor | None) -> Products:
    queries, sources, tokens = work.sizes
    plan, groups = work.plan, launch.groups(sources)
    programs = launch.persistent(tokens, plan.resident, work.keys.device)
    products = work.products(tokens, sources)
    table = work.keys.new_empty(programs, 2 * (plan.pairs.sources + plan.pairs.queries), dtype=torch.int64)
    for start, stop in groups:
        group, slots = work.sources.group(start, stop), indices(launch.bucket(stop - start))
        _attn_res_inter_backward_pairs[(programs,)](
            work.grads.argument(queries),
            group.argument(len(slots)),
            mixed,
            work.norm_weight,
            work.scores,
            products,
            table,
            queries,
            stop - start,
            start,
            sources,
            tokens,
            slots,
            slots[1:] if len(groups) == 1 else slots,
            constants(plan.pairs),
            constants(work.formula),
            _uniform(group),
            **launch.options(plan.warps),
        )
    return products


def _launch_terms(work: _Backward, products: Products) -> Terms:
    queries, sources, tokens = work.sizes
    terms, panel = work.terms(tokens), work.plan.panel
    _attn_res_inter_backward_terms[(tokens,)](
        work.scores,
        work.rstd,
        work.grad_lse,
        products,
        terms,
        queries,
        sources,
        tokens,
        constants(panel),
        constants(work.formula),
        work.norm_weight is not None,
        **launch.options(max(panel.queries * panel.sources // 256, 1)),
    )
    return terms


def _terms_of_groups(work: _Backward, products: Products) -> Terms:
    """What `_launch_terms` does, where there are more sources than a program sees."""
    queries, sources, tokens = work.sizes
    p, hv = products.p[:, :, :queries], products.hv
    width, formula, groups = work.keys.shape[1], work.formula, launch.groups(sources)
    score = work.scores.reshape(queries, sources, tokens).permute(2, 1, 0)
    r = work.rstd.reshape(sources, tokens).t()
    a = score.softmax(1)
    terms = work.terms(tokens, len(groups))
    assert terms.ae is not None
    assert terms.e_sum is not None
    assert terms.f is not None
    if work.norm_weight is not None:
        rho = ((a[:, :, 0] * hv).sum(1, keepdim=True) / width + formula.norm_eps).rsqrt()
        beta = rho**3 * (a[:, :, 0] * p[:, :, 0]).sum(1, keepdim=True) / width
        p[:, :, 0] = rho * p[:, :, 0] - beta * hv
        torch.cat([rho, beta], 1, out=terms.norm)
    ds = a * (p - (a * p).sum(1, keepdim=True))
    ds -= a * ds.sum(1, keepdim=True)
    if work.grad_lse is not None:
        ds += a * work.grad_lse.reshape(queries, tokens).t()[:, None]
    e = formula.scale * ds * r[:, :, None]
    for term, values in ((terms.ae[:, :, 0], a), (terms.ae[:, :, 1], e)):
        term.zero_()[:, :, :queries] = values
    for number, (start, stop) in enumerate(groups):
        terms.e_sum[:, number].zero_()[:, :queries] = e[:, start:stop].sum(1)
    terms.f.copy_((ds * score).sum(2) * r * r / width)
    return terms


def _launch_slices(work: _Backward, mixed: Tensor | None, terms: Terms) -> tuple[Tensor, Tensor | None]:
    queries, sources, tokens = work.sizes
    plan, groups = work.plan, launch.groups(sources)
    slices = triton.cdiv(plan.panel.dim, plan.panel.columns)
    programs = launch.persistent(tokens, max(plan.resident // slices, 1), work.keys.device)
    dkey_rows, dnorm_rows = work.sums(len(groups), programs)
    rows = 3 * plan.panel.sources + plan.panel.queries
    table = work.keys.new_empty(slices * programs, rows, dtype=torch.int64)
    for number, (start, stop) in enumerate(groups):
        existing, dsources, wanted, added = work.targets(start, stop)
        group, bucket = work.sources.group(start, stop), launch.bucket(stop - start)
        _attn_res_inter_backward_slices[(slices, programs)](
            work.grads.argument(queries),
            group.argument(bucket),
            existing,
            dsources,
            work.keys,
            mixed,
            work.norm_weight,
            terms,
            table,
            dkey_rows[number * programs :],
            dnorm_rows if number == 0 else None,
            queries,
            stop - start,
            start,
            sources,
            number,
            len(groups),
            tokens,
            wanted,
            added,
            constants(plan.panel),
            constants(work.formula),
            _uniform(group),
            **launch.options(plan.warps),
        )
    return dkey_rows, dnorm_rows


def _gradient_rows(grads: list[Tensor]) -> Rows:
    """Rows with one pair of strides for all tensors; copied where they have none."""
    grads = _same_dtype(grads)
    try:
        rows = rows_of(grads)
    except ValueError:
        return rows_of([x.contiguous() for x in grads])
    return rows if _uniform(rows) else rows_of([x.contiguous() for x in grads])


def _same_dtype(tensors: list) -> list:
    given = [x.dtype for x in tensors if x is not None]
    return [x if x is None else x.to(functools.reduce(torch.promote_types, given)) for x in tensors]


def _bits(flags: list[bool]) -> int:
    """Bit j for flag j, as a signed integer of 32 bits."""
    bits = sum(1 << j for j, flag in enumerate(flags) if flag)
    return bits - (1 << 32) if bits >= 1 << 31 else bits
