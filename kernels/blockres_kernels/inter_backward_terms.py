"""The numbers for each token, query and source that phase 1's gradients are made of: a, e and f of `inter_backward`.

They go through memory, where what every lane needs of them is a load away: in registers each would have to be brought
from the lane that has it. What all launches of a backward share is here too.
"""

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .rows import Formula
from .sources import Rows, RowsArgument, bits, padded, rows_of


class Terms(NamedTuple):
    """What gradients of X tokens, or of the token that each of X programs is at, are made of; G launches share them."""

    ae: Tensor  # [X, N, 2, S]
    f: Tensor  # [X, N]
    common: Tensor  # [X, G, 2, S], of the sources of one launch: the sum of their e_s, and z


class Targets(NamedTuple):
    """Where one launch's gradients of sources go; bit j of `wanted` and of `added` is for source j."""

    existing: RowsArgument | None  # contiguous tensors [..., D] to add to
    dsources: tuple[Tensor, ...]
    wanted: int
    added: int


@triton.jit
def _weights_of(score):
    """[S, N]"""
    raised = tl.exp(score - tl.max(score, axis=1)[:, None])
    return raised / tl.sum(raised, axis=1)[:, None]


@triton.jit
def _load_scores(scores, rstd, count, present, answered, query, source, at, T):
    """Scores [S, N], -inf where there is no source, and r [N]; where all sources are in one launch."""
    where = (tl.cast(query, tl.int64)[:, None] * count + source[None, :]) * T + at
    score = tl.load(scores + where, mask=answered[:, None] & present[None, :], other=0.0)
    r = tl.load(rstd + tl.cast(source, tl.int64) * T + at, mask=present, other=0.0)
    return tl.where(present[None, :], score, -float("inf")), r


@triton.jit
def load_pairs(pairs, place, source, query, present, answered):
    """p [S, N] of one entry of a table [X, N, S], zero for the first source."""
    here = pairs + (place + source)[None, :] * query.shape[0] + query[:, None]
    return tl.load(here, mask=answered[:, None] & (present & (source > 0))[None, :], other=0.0)


@triton.jit
def _store_terms(p, score, r, dlse, terms, entry, present, query, source, panel, formula):
    """From p_sj - p_s0 [S, N] the terms that begin at `entry`; returns the sum of their e over j [S]."""
    a = _weights_of(score)
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
def _alike(r, present):
    """1 where the root mean squares of all sources are within a factor of two, else 0."""
    largest = tl.max(tl.where(present, r, 0.0), axis=0)
    smallest = tl.min(tl.where(present, r, float("inf")), axis=0)
    return tl.where(largest <= 2 * smallest, 1.0, 0.0).to(r.dtype)


@triton.jit
def make_terms(p, terms, scores, rstd, grad_lse, entry, at, T, count, query, source, answered, present, panel, formula):
    """The terms of one entry, a token or the program that is at it, where all sources are in one launch."""
    score, r = _load_scores(scores, rstd, count, present, answered, query, source, at, T)
    dlse = None
    if grad_lse is not None:
        dlse = tl.load(grad_lse + tl.cast(query, tl.int64) * T + at, mask=answered, other=0.0)
    e_sum = _store_terms(p, score, r, dlse, terms, entry * count, present, query, source, panel, formula)
    alike = _alike(r, present)
    common = terms.common + entry * (2 * panel.queries) + query
    tl.store(common, e_sum)
    tl.store(common + panel.queries, tl.zeros_like(e_sum) + alike)


@triton.jit
def chosen(bits, index):
    """[R] whether the bit `index` is set."""
    return ((bits >> index) & 1) != 0


@dataclass(frozen=True)
class Work:
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

    def targets(self, start: int, stop: int) -> Targets:
        """Those of the sources `start` to `stop`."""
        old, bucket = self.existing[start:stop], launch.bucket(stop - start)
        given = [x for x in old if x is not None]
        return Targets(
            rows_of([given[0] if x is None else x for x in old]).argument(bucket) if given else None,
            padded(self.dsources[start:stop], bucket),
            bits(self.wanted[start:stop]),
            bits([x is not None for x in old]),
        )

    def terms(self, entries: int, launches: int = 1) -> Terms:
        """Room for the terms of so many tokens or programs."""
        sources, queries = len(self.sources.tensors), self.plan.panel.queries
        return Terms(
            self.keys.new_empty(entries, sources, 2, queries),
            self.keys.new_empty(entries, sources),
            self.keys.new_empty(entries, launches, 2, queries),
        )

    def sums(self, launches: int, programs: int) -> tuple[Tensor, Tensor | None]:
        """Rows for the sums of all programs: [.., S, D], and [programs, D] where there is a norm."""
        norm = None if self.norm_weight is None else self.keys.new_empty(programs, self.keys.shape[1])
        return self.keys.new_empty(launches * programs, *self.keys.shape), norm
