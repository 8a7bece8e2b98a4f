"""Phase 1's backward where a token's rows do not fit into one program: in launches. See `inter_backward`.

`pairs` walks over D for the products p_sj, in a warp per token. `terms` makes a, e and f of them. `slices` is cut along
D into tiles so narrow that one warp holds [S, C] of gradients and of sums for dkey: no warp ever waits for another. A
program keeps the addresses of rows in a table in memory: in registers they would be in the way of tiles.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .inter_backward_terms import (
    Terms,
    Work,
    chosen,
    load_pairs,
    make_terms,
)
from .inter_tiles import add_pairs, load_tile, row_of, row_pointers, spread, strides_of, uniform, within_lanes
from .sources import constants, indices


class Products(NamedTuple):
    """What terms are made of, for T tokens.

    Where one launch sees all sources, v_j - v_0 is in the place of v_j, and what belongs to the first source is unused.
    """

    p: Tensor  # [T, N, S]
    hv: Tensor  # [T, N]: <h_0, v_j>
    norm: Tensor  # [T, 2]: <h_0, h_0> and <u, h_0>; used where one launch sees all sources


@triton.jit
def _first_weights(scores, source, present, at, T):
    """a_0j [N], where all sources are in one launch."""
    score = tl.load(scores + tl.cast(source, tl.int64) * T + at, mask=present, other=-float("inf"))
    raised = tl.exp(score - tl.max(score, axis=0))
    return raised / tl.sum(raised, axis=0)


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
    tl.store(table + source, spread(sources.pointers, source))
    tl.store(grad_table + query, spread(grads.pointers, query))
    strides = strides_of(sources, source, UNIFORM)
    for token in tl.range(tl.program_id(0), tokens, tl.num_programs(0), disable_licm=True):
        at = tl.cast(token, tl.int64)
        tl.debug_barrier()
        row = row_pointers(sources, tl.load(table + source), strides, token)
        grad_row = row_pointers(grads, tl.load(grad_table + query), strides_of(grads, query, True), token)
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
            v = load_tile(row, columns, present[:, None] & inside[None, :], formula.dtype)
            if norm_weight is not None:
                if mixed is None:
                    h = tl.sum(a0[:, None] * v, axis=0)
                    hh += h * h
                else:
                    h = tl.load(mixed + at * panel.dim + columns, mask=inside, other=0.0)
            if len(paired) < len(slots):
                v -= row_of(v, source == 0)[None, :]
            if norm_weight is not None:
                hv += within_lanes(v * h[None, :], panel.vector)
            grad_row = tl.multiple_of(tl.load(grad_table + ROWS + query).to(grads.pointers[0].dtype), grads.alignment)
            g = load_tile(grad_row, columns, answered[:, None] & inside[None, :], formula.dtype)
            if norm_weight is not None:
                w = tl.load(norm_weight + columns, mask=inside, other=0.0).to(formula.dtype)
                g = tl.where((query == 0)[:, None], g * w[None, :], g)
                if mixed is None:
                    uh += h * row_of(g, query == 0)
            pairs = add_pairs(pairs, g, v, paired, source, panel.vector)
        entry = at * total + first
        for i in tl.static_range(len(paired)):
            p = products.p + (entry + paired[i]) * panel.queries + query
            tl.store(p, tl.sum(pairs[i], axis=1), mask=count > paired[i])
        if norm_weight is not None:
            tl.store(products.hv + entry + source, tl.sum(hv, axis=1), mask=present)
            tl.store(products.norm + 2 * at, tl.sum(hh, axis=0))
            tl.store(products.norm + 2 * at + 1, tl.sum(uh, axis=0))


@triton.jit
def _through_norm(p, products, rho_beta, at, place, source, query, present, panel, formula):
    """<g_0, v_j> in place of <u, v_j> in the first row of p; rho and beta are stored."""
    hv = tl.load(products.hv + place + source, mask=present & (source > 0), other=0.0)
    rho = tl.rsqrt(tl.load(products.norm + 2 * at) / panel.dim + formula.norm_eps)
    beta = rho * rho * rho * tl.load(products.norm + 2 * at + 1) / panel.dim
    tl.store(rho_beta + 2 * at, rho)
    tl.store(rho_beta + 2 * at + 1, beta)
    return tl.where((query == 0)[:, None], rho * p - (beta * hv)[None, :], p)


@triton.jit(do_not_specialize=["queries", "count", "tokens"])
def _attn_res_inter_backward_terms(
    scores,  # [S, N, T]
    rstd,  # [N, T]
    grad_lse,  # [S, T] or None
    products,  # of T tokens
    terms,
    rho_beta,  # [T, 2], or None without a norm
    queries,
    count,
    tokens,
    panel,
    formula,
):
    at = tl.cast(tl.program_id(0), tl.int64)
    T = tl.cast(tokens, tl.int64)
    query = tl.arange(0, panel.queries)
    source = tl.arange(0, panel.sources)
    answered = query < queries
    present = source < count
    p = load_pairs(products.p, at * count, source, query, present, answered)
    if rho_beta is not None:
        p = _through_norm(p, products, rho_beta, at, at * count, source, query, present, panel, formula)
    make_terms(p, terms, scores, rstd, grad_lse, at, at, T, count, query, source, answered, present, panel, formula)


@triton.jit
def _norm_gradients(g, h, w, rho_beta, at, query):
    """g_0 in place of the gradient of y_0 in a tile of gradients, and what a token adds to the norm weight's."""
    first = query == 0
    rho = tl.load(rho_beta + 2 * at)
    beta = tl.load(rho_beta + 2 * at + 1)
    dnorm = row_of(g, first) * h * rho
    return tl.where(first[:, None], g * (rho * w)[None, :] - (beta * h)[None, :], g), dnorm


@triton.jit
def _gradients(v, g, key, dv, dkey, ae, f, common, count, present, query, source, panel):
    """A token's part of the sources' gradients on top of dv [N, C], and of the keys' on top of dkey [S, C]."""
    dv -= tl.load(f + source, mask=present, other=0.0)[:, None] * v
    center = row_of(v, source == 0) * tl.load(common + panel.queries)
    dkey += tl.load(common + query)[:, None] * center[None, :]
    v -= center[None, :]
    for j in tl.range(0, count, disable_licm=True):
        here = source == j
        a = tl.load(ae + 2 * j * panel.queries + query)
        e = tl.load(ae + (2 * j + 1) * panel.queries + query)
        dv += tl.where(here[:, None], tl.sum(a[:, None] * g + e[:, None] * key, axis=0)[None, :], 0.0)
        dkey += e[:, None] * row_of(v, here)[None, :]
    return dv, dkey


@triton.jit
def _contiguous_rows(tensors, addresses, token, D: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Pointers [R] to a token's rows in contiguous tensors that begin at `addresses`, multiples of `ALIGNMENT`."""
    size: tl.constexpr = tensors[0].dtype.element_ty.primitive_bitwidth // 8
    aligned: tl.constexpr = ALIGNMENT if D * size % 16 == 0 else size
    return tl.multiple_of((addresses + token * (D * size)).to(tensors[0].dtype), aligned)


@triton.jit(do_not_specialize=["queries", "count", "first", "total", "group", "groups", "tokens", "wanted", "added"])
def _attn_res_inter_backward_slices(
    grads,
    sources,
    existing,  # contiguous rows to add to, or None
    dsources,  # tensors [T, D]
    keys,  # [S, D]
    mixed,  # as for the pairs
    norm_weight,  # [D] or None
    terms,  # of T tokens
    rho_beta,  # [T, 2], or None without a norm
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
    tl.store(table + source, spread(sources.pointers, source))
    tl.store(outputs + source, spread(dsources, source))
    if existing is not None:
        tl.store(olds + source, spread(existing.pointers, source))
    tl.store(gradients + query, spread(grads.pointers, query))
    tl.debug_barrier()
    strides = strides_of(sources, source, UNIFORM)
    key_row = keys + tl.cast(query, tl.int64) * panel.dim
    dkey = tl.zeros([panel.queries, panel.columns], formula.dtype)
    dnorm = tl.zeros([panel.columns], formula.dtype)
    for token in tl.range(tl.program_id(1), tokens, tl.num_programs(1), disable_licm=True):
        at = tl.cast(token, tl.int64)
        v = load_tile(
            row_pointers(sources, tl.load(table + source), strides, token), columns, in_sources, formula.dtype
        )
        grad_row = row_pointers(grads, tl.load(gradients + query), strides_of(grads, query, True), token)
        g = load_tile(grad_row, columns, in_grads, formula.dtype)
        entry = at * total + first
        ae = terms.ae + entry * (2 * panel.queries)
        if norm_weight is not None:
            if mixed is None:
                h = tl.sum(tl.load(ae + source * (2 * panel.queries), mask=present, other=0.0)[:, None] * v, axis=0)
            else:
                h = tl.load(mixed + at * panel.dim + columns, mask=inside, other=0.0)
            w = tl.load(norm_weight + columns, mask=inside, other=0.0).to(formula.dtype)
            g, dnorm_part = _norm_gradients(g, h, w, rho_beta, at, query)
            dnorm += dnorm_part
        dv = tl.zeros([panel.sources, panel.columns], formula.dtype)
        if existing is not None:
            old = _contiguous_rows(existing.pointers, tl.load(olds + source), at, panel.dim, existing.alignment)
            dv = load_tile(old, columns, in_sources & chosen(added, source)[:, None], formula.dtype)
        common = terms.common + (at * groups + group) * (2 * panel.queries)
        key = load_tile(key_row, columns, in_grads, formula.dtype)
        dv, dkey = _gradients(v, g, key, dv, dkey, ae, terms.f + entry, common, count, present, query, source, panel)
        out = _contiguous_rows(dsources, tl.load(outputs + source), at, panel.dim, 16)
        stored = in_sources & chosen(wanted, source)[:, None]
        tl.store(out[:, None] + columns[None, :], dv.to(dsources[0].dtype.element_ty), mask=stored)
    program = tl.cast(tl.program_id(1), tl.int64)
    dkey_row = dkey_rows + (program * queries + query) * panel.dim
    tl.store(dkey_row[:, None] + columns[None, :], dkey, mask=in_grads)
    if dnorm_rows is not None:
        tl.store(dnorm_rows + program * panel.dim + columns, dnorm, mask=inside)


def launch_slices(work: Work, mixed: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The rows of sums of all programs; `mixed [T, D]` is h_0, where more sources than one launch takes are in it."""
    products = _launch_pairs(work, mixed)
    alone = len(work.sources.tensors) <= launch.MAX_SOURCES
    terms, rho_beta = (_launch_terms if alone else _terms_of_groups)(work, products)
    return _launch_gradients(work, mixed, terms, rho_beta)


def _launch_pairs(work: Work, mixed: Tensor | None) -> Products:
    queries, sources, tokens = work.sizes
    plan, groups = work.plan, launch.groups(sources)
    programs = launch.persistent(tokens, plan.resident, work.keys.device)
    padded = plan.panel.queries
    products = Products(*(work.keys.new_empty(tokens, *shape) for shape in ((sources, padded), (sources,), (2,))))
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
            uniform(group),
            **launch.options(plan.warps),
        )
    return products


def _launch_terms(work: Work, products: Products) -> tuple[Terms, Tensor | None]:
    """The terms, and where there is a norm its rho and beta [T, 2]."""
    queries, sources, tokens = work.sizes
    terms, panel = work.terms(tokens), work.plan.panel
    rho_beta = None if work.norm_weight is None else work.keys.new_empty(tokens, 2)
    _attn_res_inter_backward_terms[(tokens,)](
        work.scores,
        work.rstd,
        work.grad_lse,
        products,
        terms,
        rho_beta,
        queries,
        sources,
        tokens,
        constants(panel),
        constants(work.formula),
        **launch.options(max(panel.queries * panel.sources // 256, 1)),
    )
    return terms, rho_beta


def _terms_of_groups(work: Work, products: Products) -> tuple[Terms, Tensor | None]:
    """What `_launch_terms` does, where there are more sources than a program sees."""
    queries, sources, tokens = work.sizes
    p, hv = products.p[:, :, :queries], products.hv
    width, formula, groups = work.keys.shape[1], work.formula, launch.groups(sources)
    score = work.scores.reshape(queries, sources, tokens).permute(2, 1, 0)
    r = work.rstd.reshape(sources, tokens).t()
    a = score.softmax(1)
    terms, rho_beta = work.terms(tokens, len(groups)), None
    if work.norm_weight is not None:
        rho = ((a[:, :, 0] * hv).sum(1, keepdim=True) / width + formula.norm_eps).rsqrt()
        beta = rho**3 * (a[:, :, 0] * p[:, :, 0]).sum(1, keepdim=True) / width
        p[:, :, 0] = rho * p[:, :, 0] - beta * hv
        rho_beta = torch.cat([rho, beta], 1)
    ds = a * (p - (a * p).sum(1, keepdim=True))
    ds -= a * ds.sum(1, keepdim=True)
    if work.grad_lse is not None:
        ds += a * work.grad_lse.reshape(queries, tokens).t()[:, None]
    e = formula.scale * ds * r[:, :, None]
    for term, values in ((terms.ae[:, :, 0], a), (terms.ae[:, :, 1], e)):
        term.zero_()[:, :, :queries] = values
    for number, (start, stop) in enumerate(groups):
        largest, smallest = r[:, start:stop].amax(1), r[:, start:stop].amin(1)
        alike = (largest <= 2 * smallest).to(r.dtype)[:, None]
        terms.common[:, number, 0].zero_()[:, :queries] = e[:, start:stop].sum(1)
        terms.common[:, number, 1] = alike
    terms.f.copy_((ds * score).sum(2) * r * r / width)
    return terms, rho_beta


def _launch_gradients(
    work: Work, mixed: Tensor | None, terms: Terms, rho_beta: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    queries, sources, tokens = work.sizes
    plan, groups = work.plan, launch.groups(sources)
    slices = triton.cdiv(plan.panel.dim, plan.panel.columns)
    programs = launch.persistent_with_sums(tokens, max(plan.resident // slices, 1), work.keys.device)
    dkey_rows, dnorm_rows = work.sums(len(groups), programs)
    rows = 3 * plan.panel.sources + plan.panel.queries
    table = work.keys.new_empty(slices * programs, rows, dtype=torch.int64)
    for number, (start, stop) in enumerate(groups):
        targets = work.targets(start, stop)
        group, bucket = work.sources.group(start, stop), launch.bucket(stop - start)
        _attn_res_inter_backward_slices[(slices, programs)](
            work.grads.argument(queries),
            group.argument(bucket),
            targets.existing,
            targets.dsources,
            work.keys,
            mixed,
            work.norm_weight,
            terms,
            rho_beta,
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
            targets.wanted,
            targets.added,
            constants(plan.panel),
            constants(work.formula),
            uniform(group),
            **launch.options(plan.warps),
        )
    return dkey_rows, dnorm_rows
