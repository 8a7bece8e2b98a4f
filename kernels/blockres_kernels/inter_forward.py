"""Phase 1, forward: all queries of a block over the sources that are complete. See `blockres.reference.attn_res_inter`.

Letters: N sources, S queries, T tokens, D hidden size. For a token:

    r_j  = 1 / sqrt(mean(v_j^2) + eps)       s_sj = scale * r_j * <key_s, v_j>,  key_s = q_s * w_s
    a_sj = softmax_j(s_sj)                   h_s = sum_j a_sj v_j
    y_0  = h_0 * rho * norm_weight,  rho = 1 / sqrt(mean(h_0^2) + norm_eps)      (or y_0 = h_0)

Where the N rows of a token fit into the registers of one program (`held`), each is read once: the queries come by one
or two at a time, each needing one reduction over D for its N scores and none for its mixture. Where they do not
(`twice`), a warp or two walk over D with all scores of a token in registers, as tiles [S, C] against single rows [C],
and a second time for the mixtures. The first output, where it is to be normalised, waits in a row for each program.

Above `launch.MAX_SOURCES` sources, launches carry their mixtures and `lse` to the next in the compute dtype.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .inter_tiles import (
    add_pairs,
    keys_of,
    load_tile,
    row_of,
    row_pointers,
    softmax,
    spread,
    strides_of,
    sums_of,
    uniform,
    within_lanes,
)
from .rows import Formula
from .sources import (
    Rows,
    compute_dtype,
    constants,
    indices,
    load_row,
    locate,
    on_device,
    row_pointer,
    rows_of,
    store_row,
    triton_dtype,
    vectors,
)


@triton.jit
def _scores(rows, keys, s, queries, slots, group, tile, dtype, VECTOR: tl.constexpr):
    """<key_s, v_j> for queries s, s + 1, ... of a group and all sources; source by source, its queries side by side."""
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
                added += (parts[j * len(group) + g] + within_lanes(value * key[g], VECTOR),)
        parts = added
    return sums_of(parts)


@triton.jit
def _squares(row, tile, dtype, VECTOR: tl.constexpr):
    squares = tl.zeros([tile.width // VECTOR], dtype)
    for c in tl.static_range(len(tile.chunks)):
        value = row[c].to(dtype)
        squares += within_lanes(value * value, VECTOR)
    return squares


@triton.jit
def _mixture(rows, weights, slots, tile, dtype):
    mixed = [tl.zeros([tile.width], dtype) for c in tile.chunks]
    for j in tl.static_range(len(slots)):
        mixed = [mixed[c] + weights[j] * rows[j][c].to(dtype) for c in tile.chunks]
    return mixed


@triton.jit
def _answer(rows, r, keys, norm_weight, results, s, sizes, token, slots, group, tile, formula, VECTOR: tl.constexpr):
    """The queries s, s + 1, ... of a group, at one token whose sources are in registers.

    `results` are outputs, lse and scores, `sizes` the numbers of queries, sources and tokens.
    """
    outputs, lse, scores = results
    queries, count, tokens = sizes
    T = tl.cast(tokens, tl.int64)
    products = _scores(rows, keys, s, queries, slots, group, tile, formula.dtype, VECTOR)
    for g in tl.static_range(len(group)):
        row = tl.cast(s + g, tl.int64)
        exists = s + g < queries
        score = [products[j * len(group) + g] * r[j] * formula.scale for j in slots]
        for j in tl.static_range(len(slots)):
            tl.store(scores + (row * count + j) * T + token, score[j], mask=exists & (count > j))
        weights, log_sum = softmax(score, slots, count)
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
    squares = sums_of([_squares(rows[j], tile, formula.dtype, VECTOR) for j in slots])
    r = [tl.rsqrt(squares[j] / tile.dim + formula.eps) for j in slots]
    for j in tl.static_range(len(slots)):
        tl.store(rstd + (j * tl.cast(tokens, tl.int64) + token), r[j], mask=count > j)
    results, sizes = (outputs, lse, scores), (queries, count, tokens)
    first = 0
    if norm_weight is not None:
        alone = group[:1]
        _answer(rows, r, keys, norm_weight, results, 0, sizes, token, slots, alone, tile, formula, VECTOR)
        first = 1
    for s in range(first, queries, len(group)):
        _answer(rows, r, keys, None, results, s, sizes, token, slots, group, tile, formula, VECTOR)


@triton.jit
def _column_of(tile, chosen):
    """The column [R] of a tile [R, C] that `chosen` [C] is true for, in all lanes."""
    return tl.sum(tl.where(chosen[None, :], tile, 0.0), axis=1)


@triton.jit
def _as_tile(pairs, slots, query, source, dtype):
    """Sums [S, lanes], one for each of `slots`, as the columns of a tile [S, N]; zero in all others."""
    tile = tl.zeros([query.shape[0], source.shape[0]], dtype)
    for i in tl.static_range(len(slots)):
        tile = tl.where((source == slots[i])[None, :], tl.sum(pairs[i], axis=1)[:, None], tile)
    return tile


_NORM_WIDTH = 512  # columns at a time of a row that is normalised at the end: 16 bytes a lane and more


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
    """Scores [S, N], -inf where there is no source; they and r are stored. `first`: the first source of this launch."""
    r = tl.rsqrt(tl.sum(squares, axis=1) / panel.dim + formula.eps)
    query = tl.arange(0, panel.queries)
    score = _as_tile(pairs, slots, query, source, formula.dtype) * r[None, :] * formula.scale
    tl.store(rstd + (tl.cast(source, tl.int64) + first) * T + at, r, mask=source < count)
    where = (tl.cast(query, tl.int64)[:, None] * total + source[None, :] + first) * T + at
    tl.store(scores + where, score, mask=answered[:, None] & present[None, :])
    return tl.where(present[None, :], score, -float("inf"))


@triton.jit
def _weights(score, carry, lse, answered):
    """Weights [S, N] of the sources and [S] of what is carried, in the softmax over both; its `lse` [S] is stored."""
    top = tl.max(score, axis=1)
    raised = tl.exp(score - top[:, None])
    norm = tl.sum(raised, axis=1)
    log_sum = top + tl.log(norm)
    share = 1.0 / norm
    keep = tl.zeros_like(norm)
    if carry is not None:
        earlier = tl.load(lse, mask=answered, other=0.0)
        tl.debug_barrier()  # every warp reads it before one of them overwrites it
        keep = tl.sigmoid(earlier - log_sum)
        share *= tl.sigmoid(log_sum - earlier)
        higher = tl.maximum(earlier, log_sum)
        log_sum = higher + tl.log(tl.exp(earlier - higher) + tl.exp(log_sum - higher))
    tl.store(lse, log_sum, mask=answered)
    return raised * share[:, None], keep


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
    addresses = spread(sources.pointers, source)
    strides = strides_of(sources, source, UNIFORM)
    if norm_weight is not None:
        unscaled += tl.cast(tl.program_id(0), tl.int64) * panel.dim
    for token in tl.range(tl.program_id(0), tokens, tl.num_programs(0), disable_licm=True):
        at = tl.cast(token, tl.int64)
        row = row_pointers(sources, addresses, strides, token)
        pairs = [tl.zeros([panel.queries, panel.columns // panel.vector], formula.dtype) for j in slots]
        squares = tl.zeros([panel.sources, panel.columns // panel.vector], formula.dtype)
        for start in tl.range(0, panel.dim, panel.columns):
            columns = start + tl.arange(0, panel.columns)
            inside = (columns < panel.dim)[None, :]
            v = load_tile(row, columns, present[:, None] & inside, formula.dtype)
            key = load_tile(keys + query64 * panel.dim, columns, answered[:, None] & inside, formula.dtype)
            squares += within_lanes(v * v, panel.vector)
            pairs = add_pairs(pairs, key, v, slots, source, panel.vector)
        score = _score_tile(
            pairs, squares, slots, source, first, count, total, present, answered, scores, rstd, at, T, panel, formula
        )
        shares, keep = _weights(score, carry, lse + query64 * T + at, answered)
        weights = [_column_of(shares, source == j) for j in slots]
        out_row = outputs + (query64 * T + at) * panel.dim
        squared = tl.zeros([panel.columns], formula.dtype)
        for back in tl.range(0, panel.dim, panel.columns):
            columns = tl.arange(0, panel.columns) - back + (panel.dim - 1) // panel.columns * panel.columns
            inside = (columns < panel.dim)[None, :]
            v = load_tile(row, columns, present[:, None] & inside, formula.dtype)
            mixed = weights[0][:, None] * row_of(v, source == 0)[None, :]
            for j in tl.static_range(1, len(slots)):
                mixed += weights[j][:, None] * row_of(v, source == j)[None, :]
            stored = answered[:, None] & inside
            if carry is not None:
                mixed += keep[:, None] * load_tile(
                    carry + (query64 * T + at) * panel.dim, columns, stored, formula.dtype
                )
            if norm_weight is not None:
                h = row_of(mixed, query == 0)
                squared += h * h
                tl.store(unscaled + columns, h, mask=columns < panel.dim)
                stored = stored & (query > 0)[:, None]
            tl.store(out_row[:, None] + columns[None, :], mixed.to(outputs.dtype.element_ty), mask=stored)
        if norm_weight is not None:
            out = outputs + at * panel.dim
            _normalized_row(unscaled, norm_weight, out, tl.sum(squared, axis=0), panel, formula, WIDTH)


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
        queries, key_weights, norm_weight = vectors(queries, key_weights, norm_weight)
        keys, formula = keys_of(queries, key_weights, dtype), Formula(eps, scale, norm_eps, triton_dtype(dtype))
        rows, stats = rows_of(sources), (lse, scores, rstd)
        size = launch.bucket(min(total, launch.MAX_SOURCES))
        plan = launch.attn_res_inter_forward(shape[-1], first.element_size(), count, size, launch.lanes())
        with on_device(first):
            if plan.held and total <= launch.MAX_SOURCES:
                _hold(plan, rows, keys, norm_weight, outputs, stats, formula)
            else:
                _read_twice(rows, keys, norm_weight, outputs, stats, formula)
    return outputs, lse, scores, rstd


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
    carry, total, lse, (count, dim) = None, len(rows.tensors), stats[0], keys.shape
    for start, stop in launch.groups(total):
        last, group = stop == total, rows.group(start, stop)
        target = outputs if last else torch.empty_like(outputs, dtype=lse.dtype) if carry is None else carry
        bucket = launch.bucket(stop - start)
        plan = launch.attn_res_inter_forward(dim, rows.tensors[0].element_size(), count, bucket, launch.lanes())
        programs = launch.persistent(rows.count, plan.resident, lse.device)
        normed = last and norm_weight is not None
        _attn_res_inter_forward_twice[(programs,)](
            group.argument(bucket),
            keys,
            norm_weight if normed else None,
            carry,
            target,
            lse.new_empty(programs, dim) if normed else None,
            *stats,
            count,
            stop - start,
            start,
            total,
            rows.count,
            indices(bucket),
            constants(plan.panel),
            constants(formula),
            uniform(group),
            _NORM_WIDTH,
            **launch.options(plan.panel_warps),
        )
        carry = target
