"""One aggregation, forward and backward. See `blockres.reference.attn_res` for the operation.

Letters: N sources, T tokens, D hidden size; g the gradient of the mixed row h, u = grad_out * norm_weight.

Forward, for a token:

    r_j = 1 / sqrt(mean(v_j^2) + eps)        s_j = scale * r_j * <q * w, v_j>
    a_j = exp(s_j - lse)                     h = sum_j a_j v_j
    y   = h * rho * norm_weight,  rho = 1 / sqrt(mean(h^2) + norm_eps)      (or y = h)

The softmax is online (a running maximum, sum and mixture), so each source's row is read once. s_j, r_j and lse are kept
for the backward; h is not. Above `launch.MAX_SOURCES` sources, a launch starts from the mixture and the lse that the
launch before it left.

Backward, for a token. h is mixed again from the sources, and products with sources are taken relative to it, so that
what the sources have in common costs no digits:

    g     = grad_out,  or  rho u - h rho^3 <u, h> / D        where the output norm is fused
    ds_j  = a_j <g, d_j> + e_j                               d_j = v_j - h,  e_j = a_j dlse + dscore_j
    dv_j  = a_j g + scale ds_j r_j q * w - v_j ds_j s_j r_j^2 / D
    dqw   = scale (sum_j ds_j (r_j v_j - r h) + r h sum_j e_j),       r = 1 / sqrt(mean(h^2) + eps)

The first is a_j (<g, v_j> - delta + dlse) + dscore_j with delta = <g, h> = sum_j a_j <g, v_j>. The last is
scale sum_j ds_j r_j v_j, written so that it gets sum_j a_j d_j = 0 from algebra and not from rounding. Where v_j is
near h, r_j v_j - r h is r d_j + (r_j - r) v_j, and r_j - r comes from mean(v_j^2) - mean(h^2) = <d_j, v_j + h> / D. One
source gives d_j = 0, hence ds_j = 0 and dqw = 0 exactly.

Both grids are persistent: a program strides over tokens. It holds q * w, and in the backward its sums of dqw and of
the norm weight's gradient, which it writes as one row at its end; the rows of all programs are added in a fixed order
(`parameters`). Rows of sources are loaded ahead of their use. In the backward they are held from their first use to
their second where `launch` finds room for them (and replaced, one by one, by those of the next token), and read again
where it does not, by the same program and so from L2.

Where D is wider than a program can hold, the backward is cut into slices of D. The sums over D (first <h, h> and
<u, h>, then <g, v_j - h>) are then collected by launches of their own before the one that writes gradients. With more
sources than one launch takes, h comes from the forward kernel.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .parameters import parameter_gradients
from .rows import Formula, inner_product, key_row, mix_in, normalized, square_and_product, zero_row
from .sources import (
    Rows,
    bits,
    compute_dtype,
    constants,
    indices,
    load_row,
    locate,
    on_device,
    padded,
    row_pointer,
    rows_of,
    rows_or_copy,
    store_chunk,
    store_row,
    tabulate,
    tabulated_row_pointer,
    triton_dtype,
    vectors,
)


class Statistics(NamedTuple):
    """What the forward keeps for the backward, in the compute dtype."""

    lse: Tensor  # [T]
    scores: Tensor  # [count, T]
    rstd: Tensor  # [count, T]


class Upstream(NamedTuple):
    """The gradients of lse and of the scores that arrive, where any do."""

    lse: Tensor | None  # [T]
    scores: Tensor | None  # [count, T]


class Scratch(NamedTuple):
    """Memory that backward launches leave to each other."""

    tables: Tensor  # [programs, bucket, 4]
    moments: Tensor | None  # [slices, T, 2], <h, h> and, for the norm, <u, h> within a slice
    pairs: Tensor | None  # [slices, count, T, 2], <g, d_j> and <d_j, v_j + h> within a slice
    key_rows: Tensor  # [programs, D]
    norm_rows: Tensor | None  # [programs, D]


@triton.jit
def _row_at(sources, reader, source, token, tile, start):
    """The row of a source that is known when the kernel runs; unread for a token that does not exist."""
    pointer = tabulated_row_pointer(sources, reader[0], source, locate(sources, token))
    return load_row(pointer, tile, token < reader[2], start)


@triton.jit
def _stream(sources, reader, token, ahead, tile):
    """Rows that are loaded ahead of their use: a queue, and source and token of the row to load next.

    `reader` is (table, count, tokens, stride): after a token's last source comes the first one of token + stride.
    """
    count, stride = reader[1], reader[3]
    zero = tl.zeros_like(token)
    queue = [_row_at(sources, reader, (zero + k) % count, token + (zero + k) // count * stride, tile, 0) for k in ahead]
    return queue, (zero + len(ahead)) % count, token + (zero + len(ahead)) // count * stride


@triton.jit
def _stream_of_token(sources, reader, token, ahead, tile, start):
    """A stream that ends with a token's last source: what follows is a token that does not exist."""
    count, tokens = reader[1], reader[2]
    place = locate(sources, token)
    queue = [load_row(row_pointer(sources, k, place), tile, k < count, start) for k in ahead]
    more = len(ahead) < count
    return queue, tl.where(more, len(ahead), 0), tl.where(more, token, tokens)


@triton.jit
def _next_row(stream, sources, reader, ahead, tile, start=0):
    """The row at the head of the queue, and the stream after it."""
    queue, source, token = stream
    count, stride = reader[1], reader[3]
    added = _row_at(sources, reader, source, token, tile, start)
    last = source + 1 == count
    source = tl.where(last, 0, source + 1)
    token = tl.where(last, token + stride, token)
    if len(ahead) == 0:
        return added, (queue, source, token)
    else:
        return queue[0], ([queue[k + 1] if k + 1 < len(ahead) else added for k in ahead], source, token)


@triton.jit(do_not_specialize=["count", "tokens"])
def _attn_res_forward(
    sources,
    carry,  # [T, D], the mixture of the sources of earlier launches; None in the first
    query,  # [D]
    key_weight,  # [D] or None
    norm_weight,  # [D] or None
    out,  # [T, D]
    statistics,  # where there is a carry, with the lse of the sources of earlier launches
    tables,  # [programs, bucket, 3]
    count,
    tokens,
    slots,
    ahead,
    tile,
    formula,
    HOLD_KEY: tl.constexpr,
):
    dtype = formula.dtype
    table = tables + tl.program_id(0) * (3 * len(slots))
    tabulate(sources, table, slots)
    reader = (table, count, tokens, tl.num_programs(0))
    stream = _stream(sources, reader, tl.program_id(0), ahead, tile)
    if HOLD_KEY:
        key = key_row(query, key_weight, tile, dtype)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        at = tl.cast(token, tl.int64)
        if carry is None:
            peak = tl.full([], -float("inf"), dtype)
            total = tl.full([], 0.0, dtype)
            mixed = zero_row(tile, dtype)
        else:
            peak = tl.load(statistics.lse + at)
            total = tl.full([], 1.0, dtype)
            mixed = load_row(carry + at * tile.dim, tile)
        statistic = at
        for _ in range(0, count):
            row, stream = _next_row(stream, sources, reader, ahead, tile)
            if not HOLD_KEY:
                key = key_row(query, key_weight, tile, dtype)
            square, product = square_and_product(row, key, tile, dtype)
            r = tl.rsqrt(square / tile.dim + formula.eps)
            score = product * r * formula.scale
            tl.store(statistics.rstd + statistic, r)
            tl.store(statistics.scores + statistic, score)
            peak, total, mixed = mix_in(peak, total, mixed, row, score, tile, dtype)
            statistic += tokens
        tl.store(statistics.lse + at, peak + tl.log(total))
        share = 1.0 / total
        h = normalized([mixed[c] * share for c in tile.chunks], norm_weight, tile, formula)
        store_row(out + at * tile.dim, h, tile)


@triton.jit
def _mixture(sources, reader, rows, statistics, lse, token, slots, ahead, tile, start, dtype):
    """h, from `rows` where they are held."""
    count, tokens = reader[1], reader[2]
    h = zero_row(tile, dtype)
    statistic = tl.cast(token, tl.int64)
    if len(rows) > 0:
        for j in tl.static_range(len(slots)):
            if j < count:
                weight = tl.exp(tl.load(statistics.scores + statistic) - lse)
                h = [h[c] + weight * rows[j][c].to(dtype) for c in tile.chunks]
            statistic += tokens
    else:
        stream = _stream_of_token(sources, reader, token, ahead, tile, start)
        for _ in range(0, count):
            row, stream = _next_row(stream, sources, reader, ahead, tile, start)
            weight = tl.exp(tl.load(statistics.scores + statistic) - lse)
            h = [h[c] + weight * row[c].to(dtype) for c in tile.chunks]
            statistic += tokens
    return h


@triton.jit
def _over_slices(own, moments, which: tl.constexpr, at, tokens, STAGE: tl.constexpr):
    """A sum over all of D, of which `own` is this slice's part: stage "moments" stores it, later ones add the parts."""
    if STAGE == "whole":
        return own
    elif STAGE == "moments":
        tl.store(moments + (tl.program_id(1) * tl.cast(tokens, tl.int64) + at) * 2 + which, own)
        return own
    else:
        total = tl.zeros_like(own)
        for s in range(0, tl.num_programs(1)):
            total += tl.load(moments + (s * tl.cast(tokens, tl.int64) + at) * 2 + which)
        return total


@triton.jit
def _through_norm(g, h, norm_weight, grad_norm, moments, at, tokens, tile, start, formula, STAGE: tl.constexpr):
    """The gradient of h, where g is that of the output; the sum of the norm weight's gradients; and mean(h^2)."""
    dtype = formula.dtype
    square = _over_slices(inner_product(h, h, tile, dtype), moments, 0, at, tokens, STAGE) / tile.dim
    g = [g[c].to(dtype) for c in tile.chunks]
    if norm_weight is None:
        return g, grad_norm, square
    else:
        rho = tl.rsqrt(square + formula.norm_eps)
        # rho is never negative, which the compiler does not know: it would move this sum behind the pass over the
        # sources that follows, and hold g and h in registers until then.
        if not (rho < 0):
            grad_norm = [grad_norm[c] + g[c] * h[c] * rho for c in tile.chunks]
        w = load_row(norm_weight, tile, start=start)
        u = [g[c] * w[c].to(dtype) for c in tile.chunks]
        product = _over_slices(inner_product(u, h, tile, dtype), moments, 1, at, tokens, STAGE)
        along = rho * rho * rho * product / tile.dim
        return [rho * u[c] - along * h[c] for c in tile.chunks], grad_norm, square


@triton.jit
def _pair(g, h, value, pairs, j, at, count, tokens, tile, dtype, STAGE: tl.constexpr):
    """<g, d_j> and <d_j, v_j + h>; of this slice in stage "pairs", which stores them."""
    if STAGE == "gradients":
        product = tl.zeros([], dtype)
        shift = tl.zeros([], dtype)
        for s in range(0, tl.num_programs(1)):
            there = pairs + ((s * count + j) * tl.cast(tokens, tl.int64) + at) * 2
            product += tl.load(there)
            shift += tl.load(there + 1)
        return product, shift
    else:
        products = tl.zeros([tile.width], dtype)
        shifts = tl.zeros([tile.width], dtype)
        for c in tl.static_range(len(tile.chunks)):
            difference = value[c] - h[c]
            products += difference * g[c]
            shifts += difference * (value[c] + h[c])
        product, shift = tl.split(tl.sum(tl.join(products, shifts), axis=0))
        if STAGE == "pairs":
            here = pairs + ((tl.program_id(1) * count + j) * tl.cast(tokens, tl.int64) + at) * 2
            tl.store(here, product)
            tl.store(here + 1, shift)
        return product, shift


@triton.jit
def _relative_to_mixture(shift, square, r):
    """Factors a, b, c such that r_j v_j - r h = a v_j + b (c v_j - h) without cancellation, be v_j near h or not.

    1 / r^2 is `square`, 1 / r_j^2 is `square` + `shift`.
    """
    radius = tl.rsqrt(square)
    x = shift / square
    root = tl.sqrt(1 + x)
    near = tl.abs(x) < 0.5
    return tl.where(near, -radius * x / (root * (1 + root)), r), radius, tl.where(near, 1.0, 0.0)


@triton.jit
def _through_source(row, j, state, key, sums, upstream, statistics, memory, reader, tile, start, formula, STAGE):
    """Store the gradient of source j; add to the sums of dqw, less its part along h, and of that part."""
    dtype = formula.dtype
    token, lse, square, g, h = state
    pairs, grads = memory
    count, tokens = reader[1], reader[2]
    at = tl.cast(token, tl.int64)
    statistic = at + j * tl.cast(tokens, tl.int64)
    grad_key, along_mixture = sums
    value = [row[c].to(dtype) for c in tile.chunks]
    product, shift = _pair(g, h, value, pairs, j, at, count, tokens, tile, dtype, STAGE)
    if STAGE == "pairs":
        return grad_key, along_mixture
    else:
        score = tl.load(statistics.scores + statistic)
        r = tl.load(statistics.rstd + statistic)
        weight = tl.exp(score - lse)
        extra = tl.zeros([], dtype)
        if upstream.lse is not None:
            extra += weight * tl.load(upstream.lse + at)
        if upstream.scores is not None:
            extra += tl.load(upstream.scores + statistic)
        ds = weight * product + extra
        scaled = formula.scale * ds
        by_value, by_difference, near = _relative_to_mixture(shift / tile.dim, square + formula.eps, r)
        grad_key = [
            grad_key[c] + scaled * (by_value * value[c] + by_difference * (near * value[c] - h[c])) for c in tile.chunks
        ]
        grad = tl.multiple_of(tl.load(grads + j).to(tl.pointer_type(row[0].dtype)), 16)
        wanted = grad.to(tl.int64) != 0
        along_value = ds * score * r * r / tile.dim
        for c in tl.static_range(len(tile.chunks)):  # stored one by one, not to hold them all
            gradient = weight * g[c] + scaled * r * key[c] - along_value * value[c]
            store_chunk(grad + at * tile.dim, gradient, c, tile, wanted, start)
        return grad_key, along_mixture + formula.scale * extra * by_difference


@triton.jit
def _replaced(rows, slot: tl.constexpr, sources, token, reader, held, tile, start):
    """Held rows, of which that of one source is the one of another token."""
    pointer = row_pointer(sources, slot, locate(sources, token))
    present = (slot < reader[1]) & (token < reader[2])
    return [load_row(pointer, tile, present, start) if k == slot else rows[k] for k in held]


@triton.jit
def _through_sources(
    rows,
    sources,
    state,
    key,
    grad_key,
    upstream,
    statistics,
    memory,
    reader,
    slots,
    ahead,
    tile,
    start,
    formula,
    STAGE,
):
    """Gradients of all sources of a token; the sum of dqw, and the rows of the next token where rows are held."""
    sums = (grad_key, tl.zeros_like(state[1]))
    if len(rows) > 0:
        for slot in tl.static_range(len(slots)):
            if slot < reader[1]:
                sums = _through_source(
                    rows[slot],
                    slot,
                    state,
                    key,
                    sums,
                    upstream,
                    statistics,
                    memory,
                    reader,
                    tile,
                    start,
                    formula,
                    STAGE,
                )
            rows = _replaced(rows, slot, sources, state[0] + tl.num_programs(0), reader, slots, tile, start)
    else:
        stream = _stream_of_token(sources, reader, state[0], ahead, tile, start)
        for j in range(0, reader[1]):
            row, stream = _next_row(stream, sources, reader, ahead, tile, start)
            sums = _through_source(
                row, j, state, key, sums, upstream, statistics, memory, reader, tile, start, formula, STAGE
            )
    return [sums[0][c] + sums[1] * state[4][c] for c in tile.chunks], rows


@triton.jit
def _tabulate_gradients(grad_sources, wanted, grads, slots):
    """Addresses of the sources' gradients, 0 for one that is not wanted."""
    for slot in tl.static_range(len(slots)):
        tl.store(grads + slot, grad_sources[slot].to(tl.int64) * ((wanted >> slot) & 1))


@triton.jit(do_not_specialize=["wanted", "count", "tokens"])
def _attn_res_backward(
    sources,
    grad_sources,  # a tuple of [T, D]
    wanted,  # bit j: source j needs its gradient
    grad_out,
    upstream,
    statistics,
    mixture,  # [T, D], h of all sources where this launch sees only some, else None
    query,  # [D]
    key_weight,  # [D] or None
    norm_weight,  # [D] or None
    scratch,
    count,
    tokens,
    slots,
    held,
    ahead,
    tile,
    formula,
    STAGE: tl.constexpr,
):
    dtype = formula.dtype
    program = tl.program_id(0)
    start = 0 if STAGE == "whole" else tl.program_id(1) * (tile.width * len(tile.chunks))
    table = scratch.tables + (program + tl.program_id(1) * tl.num_programs(0)) * (4 * len(slots))
    grads = table + 3 * len(slots)
    _tabulate_gradients(grad_sources, wanted, grads, slots)
    tabulate(sources, table, slots)
    reader = (table, count, tokens, tokens)
    key = key_row(query, key_weight, tile, dtype, start)
    grad_key = zero_row(tile, dtype)
    grad_norm = zero_row(tile, dtype)
    rows = [load_row(row_pointer(sources, k, locate(sources, program)), tile, k < count, start) for k in held]
    for token in range(program, tokens, tl.num_programs(0)):
        at = tl.cast(token, tl.int64)
        lse = tl.load(statistics.lse + at)
        if mixture is None:
            h = _mixture(sources, reader, rows, statistics, lse, token, slots, ahead[0], tile, start, dtype)
        else:
            h = load_row(mixture + at * tile.dim, tile, start=start)
        g = load_row(row_pointer(grad_out, 0, locate(grad_out, token)), tile, start=start)
        g, grad_norm, square = _through_norm(
            g, h, norm_weight, grad_norm, scratch.moments, at, tokens, tile, start, formula, STAGE
        )
        if STAGE != "moments":
            state, memory = (token, lse, square, g, h), (scratch.pairs, grads)
            grad_key, rows = _through_sources(
                rows,
                sources,
                state,
                key,
                grad_key,
                upstream,
                statistics,
                memory,
                reader,
                slots,
                ahead[1],
                tile,
                start,
                formula,
                STAGE,
            )
    if STAGE == "whole" or STAGE == "gradients":
        row = tl.cast(program, tl.int64) * tile.dim
        store_row(scratch.key_rows + row, grad_key, tile, start=start)
        if norm_weight is not None:
            store_row(scratch.norm_rows + row, grad_norm, tile, start=start)


def attn_res_forward(
    sources: list[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    scale: float,
    norm_eps: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`out [..., D]` in `out_dtype`; `lse [...]`, `scores [N, ...]` and `rstd [N, ...]` in the compute dtype."""
    first = sources[0]
    parameters = vectors(query, key_weight, norm_weight)
    shape, dtype = first.shape, compute_dtype(first.dtype)
    out = first.new_empty(shape, dtype=out_dtype)
    lse = first.new_empty(shape[:-1], dtype=dtype)
    scores, rstd = (first.new_empty((len(sources), *shape[:-1]), dtype=dtype) for _ in range(2))
    if not out.numel():
        return out, lse, scores, rstd
    rows, plan = rows_of(sources), launch.attn_res_forward(shape[-1], first.element_size(), launch.lanes())
    programs = launch.persistent(rows.count, plan.resident, first.device)
    formula = Formula(eps, scale, norm_eps, triton_dtype(dtype))
    carry = None
    with on_device(first):
        for start, stop in launch.groups(len(sources)):
            last, bucket = stop == len(sources), launch.bucket(stop - start)
            target = out if last else first.new_empty(shape, dtype=dtype) if carry is None else carry
            _attn_res_forward[(programs,)](
                rows.group(start, stop).argument(bucket),
                carry,
                *parameters[:2],
                parameters[2] if last else None,
                target,
                Statistics(lse, scores[start:stop], rstd[start:stop]),
                first.new_empty((programs, bucket, 3), dtype=torch.int64),
                stop - start,
                rows.count,
                indices(bucket),
                indices(plan.ahead),
                constants(plan.tile),
                constants(formula),
                plan.holds_key,
                **launch.options(plan.warps),
            )
            carry = target
    return out, lse, scores, rstd


def attn_res_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    grad_scores: Tensor | None,
    sources: list[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    lse: Tensor,
    scores: Tensor,
    rstd: Tensor,
    eps: float,
    scale: float,
    norm_eps: float,
    needs_grad: list[bool],
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Gradients of the sources, of query, key weight and norm weight, in their dtypes.

    `(0,)` for a source that needs none, and for a parameter that is not given.

    `grad_out` is read where it lies. It is copied only where its last dimension is not contiguous, as in the gradient
    of a sum, or its rows have more than two strides.
    """
    first = sources[0]
    dtype, parameters = compute_dtype(first.dtype), vectors(query, key_weight, norm_weight)
    grads = [x.new_empty(x.shape if needed else (0,)) for x, needed in zip(sources, needs_grad, strict=True)]
    with on_device(first):
        if not grad_out.numel():
            nothing = lse.new_empty(0, first.shape[-1])
            return grads, *parameter_gradients(nothing, nothing, *parameters)
        mixture = None
        if len(sources) > launch.MAX_SOURCES:
            mixture = attn_res_forward(sources, query, key_weight, None, eps, scale, norm_eps, dtype)[0]
        work = _Backward(
            rows_of(sources),
            grads,
            needs_grad,
            rows_or_copy(grad_out),
            Upstream(*(None if x is None else x.to(dtype).contiguous() for x in (grad_lse, grad_scores))),
            Statistics(lse, scores, rstd),
            mixture,
            parameters,
            Formula(eps, scale, norm_eps, triton_dtype(dtype)),
        )
        sums = [work.launch(start, stop) for start, stop in launch.groups(len(sources))]
        key_rows, norm_rows = sums[0] if len(sums) == 1 else (torch.cat([rows for rows, _ in sums]), sums[0][1])
        return grads, *parameter_gradients(key_rows, norm_rows, *parameters)


class _Backward(NamedTuple):
    """What the launches of one backward share."""

    sources: Rows
    grads: list[Tensor]
    needs_grad: list[bool]
    grad_out: Rows
    upstream: Upstream
    statistics: Statistics
    mixture: Tensor | None
    parameters: tuple[Tensor | None, ...]
    formula: Formula

    def launch(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Gradients of sources start to stop; each program's sums for the key and, if there is one, the norm weight."""
        bucket, dim, tokens = launch.bucket(stop - start), self.grad_out.tensors[0].shape[-1], self.sources.count
        lse, first, norm = self.statistics.lse, self.sources.tensors[0], self.parameters[2] is not None
        plan = launch.attn_res_backward(dim, first.element_size(), bucket, norm, launch.lanes())
        programs = launch.persistent_with_sums(tokens, plan.resident, lse.device)
        sliced = plan.slices > 1
        scratch = Scratch(
            lse.new_empty((plan.slices * programs, bucket, 4), dtype=torch.int64),
            lse.new_empty((plan.slices, tokens, 2)) if sliced else None,
            lse.new_empty((plan.slices, stop - start, tokens, 2)) if sliced else None,
            lse.new_empty((programs, dim)),
            lse.new_empty((programs, dim)) if norm else None,
        )
        for stage in ("moments", "pairs", "gradients") if sliced else ("whole",):
            _attn_res_backward[(programs, plan.slices)](
                self.sources.group(start, stop).argument(bucket),
                padded([x if x.numel() else first for x in self.grads[start:stop]], bucket),
                bits(self.needs_grad[start:stop]),
                self.grad_out.argument(),
                Upstream(self.upstream.lse, None if self.upstream.scores is None else self.upstream.scores[start:stop]),
                Statistics(lse, self.statistics.scores[start:stop], self.statistics.rstd[start:stop]),
                self.mixture,
                *self.parameters,
                scratch,
                stop - start,
                tokens,
                indices(bucket),
                indices(bucket if plan.held else 0),
                tuple(indices(min(ahead, bucket)) for ahead in plan.ahead),
                constants(plan.tile),
                constants(self.formula),
                stage,
                **launch.options(plan.warps),
            )
        return scratch.key_rows, scratch.norm_rows
