"""Phase 1's backward where all rows of a token fit into one program: everything is read once. See `inter_backward`.

The grid is persistent: a program strides over tokens and keeps its part of dkey, and of the norm weight's gradient, in
registers. A row is one tensor [columns], and the code is repeated for each query and source.
"""

import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .inter_backward_terms import Work, chosen, load_pairs, make_terms
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
def _norm_gradients(g, h, w, VECTOR: tl.constexpr, dim, eps):
    """The gradient of h_0 from that of y_0, and what a token adds to the norm weight's."""
    hh, uh = sums_of((within_lanes(h * h, VECTOR), within_lanes(h * g * w, VECTOR)))
    rho = tl.rsqrt(hh / dim + eps)
    return g * (rho * w) - h * (rho * rho * rho * uh / dim), g * h * rho


@triton.jit
def _store_pairs(pairs, g, v, count, slots, asked, panel):
    """<g_s, v_j - v_0> for j > 0 into [N, S]."""
    for j in tl.static_range(1, len(slots)):
        difference = v[j] - v[0]
        sums = sums_of([within_lanes(g[s] * difference, panel.vector) for s in asked])
        for s in tl.static_range(len(asked)):
            tl.store(pairs + j * panel.queries + s, sums[s], mask=count > j)


@triton.jit
def _store_gradients(targets, at, g, v, dkey, keys, terms, entry, columns, inside, count, slots, asked, panel, formula):
    """The gradients of a token's sources; dkey with what the token adds to it is returned."""
    existing, dsources, wanted, added = targets
    place = entry * count
    common = terms.common + entry * (2 * panel.queries)
    center = v[0] * tl.load(common + panel.queries)
    for j in tl.static_range(len(slots)):
        exists = count > j
        a_row = terms.ae + (place + j) * (2 * panel.queries)
        e_row = a_row + panel.queries
        dv = v[j] * -tl.load(terms.f + place + j, mask=exists, other=0.0)
        for s in tl.static_range(len(asked)):
            a = tl.load(a_row + s, mask=exists, other=0.0)
            e = tl.load(e_row + s, mask=exists, other=0.0)
            dv += a * g[s] + e * tl.load(keys + s * panel.dim + columns, mask=inside, other=0.0)
        if existing is not None:
            old = existing.pointers[j] + at * panel.dim + columns
            dv += tl.load(old, mask=inside & exists & chosen(added, j), other=0.0).to(formula.dtype)
        if j == 0:
            dkey = [dkey[s] + tl.load(common + s) * center for s in asked]
        dkey = [dkey[s] + tl.load(e_row + s, mask=exists, other=0.0) * (v[j] - center) for s in asked]
        stored = inside & exists & chosen(wanted, j)
        tl.store(dsources[j] + at * panel.dim + columns, dv.to(dsources[0].dtype.element_ty), mask=stored)
    return dkey


@triton.jit(do_not_specialize=["count", "tokens", "wanted", "added"])
def _attn_res_inter_backward_whole(
    grads,
    sources,
    existing,  # contiguous rows to add to, or None
    dsources,  # tensors [T, D]
    keys,  # [S, D]
    norm_weight,  # [D] or None
    scores,  # [S, N, T]
    rstd,  # [N, T]
    grad_lse,  # [S, T] or None
    terms,  # of all programs
    pairs,  # [programs, N, S]
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
    answered = query < QUERIES
    present = source < count
    program = tl.cast(tl.program_id(0), tl.int64)
    targets = existing, dsources, wanted, added
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
        if norm_weight is not None:
            h = _first_mixture(v, scores, count, at, T, slots)
            w = tl.load(norm_weight + columns, mask=inside, other=0.0).to(formula.dtype)
            first, dnorm_part = _norm_gradients(g[0], h, w, panel.vector, panel.dim, formula.norm_eps)
            dnorm += dnorm_part
            g = [first] + g[1:]
        place = program * count
        _store_pairs(pairs + place * panel.queries, g, v, count, slots, asked, panel)
        tl.debug_barrier()
        p = load_pairs(pairs, place, source, query, present, answered)
        make_terms(
            p, terms, scores, rstd, grad_lse, program, at, T, count, query, source, answered, present, panel, formula
        )
        tl.debug_barrier()
        dkey = _store_gradients(
            targets, at, g, v, dkey, keys, terms, program, columns, inside, count, slots, asked, panel, formula
        )
        tl.debug_barrier()
    for s in tl.static_range(QUERIES):
        tl.store(dkey_rows + (program * QUERIES + s) * panel.dim + columns, dkey[s], mask=inside)
    if norm_weight is not None:
        tl.store(dnorm_rows + program * panel.dim + columns, dnorm, mask=inside)


def launch_whole(work: Work) -> tuple[Tensor, Tensor | None]:
    queries, sources, tokens = work.sizes
    plan, bucket = work.plan, launch.bucket(sources)
    programs = launch.persistent_with_sums(tokens, plan.resident, work.keys.device)
    targets = work.targets(0, sources)
    sums = work.sums(1, programs)
    _attn_res_inter_backward_whole[(programs,)](
        work.grads.argument(queries),
        work.sources.argument(bucket),
        targets.existing,
        targets.dsources,
        work.keys,
        work.norm_weight,
        work.scores,
        work.rstd,
        work.grad_lse,
        work.terms(programs),
        work.keys.new_empty(programs, sources, plan.panel.queries),
        *sums,
        sources,
        tokens,
        targets.wanted,
        targets.added,
        indices(bucket),
        indices(queries),
        constants(plan.panel),
        constants(work.formula),
        **launch.options(plan.warps),
    )
    return sums
