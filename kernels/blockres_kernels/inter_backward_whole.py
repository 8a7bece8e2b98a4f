"""Phase 1's backward where all rows of a token fit into one program: everything is read once. See `inter_backward`.

The grid is persistent: a program strides over tokens and keeps its part of dkey, and of the norm weight's gradient, in
registers. A row is one tensor [columns], and the code is repeated for each query and source.
"""

import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .inter_backward_terms import (
    Work,
    chosen,
    load_products,
    load_scores,
    store_terms,
    through_norm,
)
from .inter_tiles import softmax, sums_of, within_lanes
from .sources import constants, indices, locate, row_pointer


@triton.jit
def _first_mixture(values, scores, count, at, T, slots):
    """h_0, from the scores of query 0."""
    weights, _ = softmax([tl.load(scores + j * T + at, mask=count > j, other=0.0) for j in slots], slots, count)
    h = weights[0] * values[0]
    for j in tl.static_range(1, len(slots)):
        h += weights[j] * values[j]
    return h


@triton.jit
def _store_pairs(table, stride, x, differences, slots, VECTOR: tl.constexpr):
    """<x, v_j - v_0> for j > 0, at `stride` from one to the next."""
    if len(slots) > 1:
        sums = sums_of([within_lanes(x * differences[j], VECTOR) for j in slots[1:]])
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
                    hh, uh = sums_of((within_lanes(h * h, panel.vector), within_lanes(h * x, panel.vector)))
                    _store_pairs(products.hv + scratch, 1, h, v, slots, panel.vector)
            _store_pairs(p_table + s, panel.queries, x, v, slots, panel.vector)
        tl.debug_barrier()
        p, hv = load_products(products, scratch, source, query, present, answered)
        score, r = load_scores(scores, rstd, count, present, answered, query, source, at, T)
        if norm_weight is not None:
            p = through_norm(p, hv, hh, uh, terms, program, query, panel, formula)
        dlse = None
        if grad_lse is not None:
            dlse = tl.load(grad_lse + tl.cast(query, tl.int64) * T + at, mask=answered, other=0.0)
        tl.store(e_sum + query, store_terms(p, score, r, dlse, terms, entry, present, query, source, panel, formula))
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
                dv = tl.load(old, mask=inside & exists & chosen(added, j), other=0.0).to(formula.dtype)
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
            stored = inside & exists & chosen(wanted, j)
            tl.store(out, dv.to(dsources[0].dtype.element_ty), mask=stored)
        tl.debug_barrier()
    for s in tl.static_range(QUERIES):
        tl.store(dkey_rows + (program * QUERIES + s) * panel.dim + columns, dkey[s], mask=inside)
    if norm_weight is not None:
        tl.store(dnorm_rows + program * panel.dim + columns, dnorm, mask=inside)


def launch_whole(work: Work) -> tuple[Tensor, Tensor | None]:
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
