"""Which source is where: the bookkeeping of a pipelined residual stream, in pure Python.

Letters: P ranks, V stages per rank, C = P·V stages in model order, S sublayers per block. Source 0 is the embedding,
source k > 0 the sum of the k-th block. `src(l) = 1 + l // S` sources exist once `l` sublayers have run, and a block is
open (a partial sum exists) when `l mod S != 0`.

A rank that holds the sources which it received or produced earlier need not receive them again. With loop placement and
`L_c` sublayers before stage c, the hop c -> c+1 then carries

    src(L_{c+1}) - src(L_{c+2-P}) + open(L_{c+1})        for c + 1 >= P, else src(L_{c+1}) + open(L_{c+1})

units: exactly what the P - 1 stages before the receiver have produced since the receiver's rank last ran.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Literal

from blockres import checks

Placement = Literal["loop", "v"]


def split_sublayers(num_sublayers: int, num_stages: int) -> list[int]:
    """Sublayers per stage for an even split; the first stages take the remainder."""
    if num_stages < 1 or num_sublayers < 0:
        raise ValueError(f"cannot split {num_sublayers} sublayers over {num_stages} stages")
    share, rest = divmod(num_sublayers, num_stages)
    return [share + (stage < rest) for stage in range(num_stages)]


class BlockRouting:
    """What every stage of a pipeline holds, receives, produces, sends and lets go, for one microbatch.

    All ranks build the same routing. It knows neither tensors nor an engine.

    Args:
        sublayers_per_stage: one number per stage, in model order; 0 is allowed, and the stages need not be equal.
        sublayers_per_block: S >= 1, or None for the standard residual: then there are no sources and the running sum
            travels on every hop.
        pp_size: P; the number of stages must be a multiple of it.
        placement: "loop" puts stage c on rank `c mod P`, "v" runs through the ranks forth and back.
        cache: whether a rank keeps the sources that it has seen. Without, every hop carries all of them.

    Raises:
        TypeError: where a number is no integer, or `sublayers_per_stage` no sequence of them.
        ValueError: for negative sublayers, S < 1, or stages that cannot be placed on P ranks.
    """

    def __init__(
        self,
        sublayers_per_stage: Sequence[int],
        sublayers_per_block: int | None,
        pp_size: int,
        placement: Placement = "loop",
        *,
        cache: bool = True,
    ) -> None:
        if not isinstance(sublayers_per_stage, Iterable):
            raise TypeError(
                f"sublayers_per_stage is a list with one number for each stage, got {sublayers_per_stage!r}; "
                f"split_sublayers({sublayers_per_stage!r}, num_stages) makes one"
            )
        self.sublayers_per_stage = tuple(sublayers_per_stage)
        self.sublayers_per_block = sublayers_per_block
        self.pp_size = pp_size
        self.placement = placement
        self.cache = cache
        self._check()
        self._starts = (0, *accumulate(self.sublayers_per_stage))
        self._ranks = tuple(self._place(stage) for stage in range(self.num_stages))

    def __repr__(self) -> str:
        return (
            f"BlockRouting({list(self.sublayers_per_stage)}, sublayers_per_block={self.sublayers_per_block}, "
            f"pp_size={self.pp_size}, placement={self.placement!r}, cache={self.cache})"
        )

    @property
    def num_stages(self) -> int:
        return len(self.sublayers_per_stage)

    @property
    def num_sublayers(self) -> int:
        return self._starts[-1]

    def with_cache(self, cache: bool) -> "BlockRouting":
        """The same routing with the cache switched on or off."""
        return BlockRouting(
            self.sublayers_per_stage, self.sublayers_per_block, self.pp_size, self.placement, cache=cache
        )

    def rank_of(self, stage: int) -> int:
        self._check_stage(stage)
        return self._ranks[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in model order."""
        if not 0 <= rank < self.pp_size:
            raise ValueError(f"rank {rank} is out of range: there are {self.pp_size} ranks, counted from 0")
        return tuple(stage for stage, owner in enumerate(self._ranks) if owner == rank)

    def is_local(self, stage: int) -> bool:
        """Whether the hop from `stage` to the next stage stays on one rank."""
        return self.rank_of(stage) == self.rank_of(stage + 1)

    def sublayers(self, stage: int) -> range:
        """The global indices of the sublayers that a stage runs."""
        self._check_stage(stage)
        return range(self._starts[stage], self._starts[stage + 1])

    def num_sources(self, stage: int) -> int:
        """How many sources exist when a stage begins; `num_sources(C)` is the number that exist at the end."""
        if self.sublayers_per_block is None or stage == 0:
            return 0
        return 1 + self._starts[stage] // self.sublayers_per_block

    def has_partial(self, stage: int) -> bool:
        """Whether a block is open when a stage begins, so that its running sum comes in on the hop."""
        if self.sublayers_per_block is None or stage == 0:
            return stage > 0
        return self._starts[stage] % self.sublayers_per_block != 0

    def held(self, stage: int) -> tuple[int, ...]:
        """The sources that the stage's rank already has when the stage begins."""
        before = [earlier for earlier in self.stages_of(self.rank_of(stage)) if earlier < stage]
        return self._available(before[-1]) if before and self.cache else ()

    def received(self, stage: int) -> tuple[int, ...]:
        """The sources that come in on the hop into a stage: those that exist and are not held."""
        held = set(self.held(stage))
        return tuple(source for source in range(self.num_sources(stage)) if source not in held)

    def produced(self, stage: int) -> tuple[int, ...]:
        """The sources that come to exist in a stage and are handed on (the last stage hands on none)."""
        if stage == self.num_stages - 1:
            return ()
        return tuple(range(self.num_sources(stage), self.num_sources(stage + 1)))

    def sent(self, stage: int) -> tuple[int, ...]:
        """The sources on the hop out of a stage. A cached one may be among them under V placement."""
        return () if stage == self.num_stages - 1 else self.received(stage + 1)

    def brought(self, stage: int) -> tuple[int, ...]:
        """The sources that a stage brings onto its rank, by receiving or by producing them."""
        return self.received(stage) + self.produced(stage)

    def readers(self, stage: int, source: int) -> tuple[int, ...]:
        """The later stages that read, from the rank's cache, a source that `stage` brought; each deposits once."""
        if source not in self.brought(stage):
            raise ValueError(f"stage {stage} brings sources {list(self.brought(stage))}, not source {source}")
        later = [reader for reader in self.stages_of(self.rank_of(stage)) if reader > stage]
        return tuple(later) if self.cache else ()

    def kept(self, stage: int) -> tuple[int, ...]:
        """The sources that a stage puts into its rank's cache: those it brought that a later stage will read."""
        return tuple(source for source in self.brought(stage) if self.readers(stage, source))

    def released(self, stage: int) -> tuple[int, ...]:
        """The sources that leave the rank's cache once a stage has run its forward: it was their last reader."""
        is_last_reader = stage == self.stages_of(self.rank_of(stage))[-1]
        return self.held(stage) if is_last_reader else ()

    def hop_units(self, cache: bool | None = None) -> tuple[int, ...]:
        """Tensors on the wire, for each of the C - 1 hops and one microbatch; 0 where a hop stays on its rank.

        Backward carries the same number the other way. One unit has the bytes of one `[B, T, D]` in the pipeline dtype.

        Args:
            cache: count as if the cache were on or off; default: as this routing is.
        """
        routing = self if cache is None or cache == self.cache else self.with_cache(cache)
        return tuple(
            0 if routing.is_local(stage) else len(routing.sent(stage)) + routing.has_partial(stage + 1)
            for stage in range(self.num_stages - 1)
        )

    def cache_entries(self, rank: int) -> int:
        """The most sources that a rank's cache holds for one microbatch, whatever the schedule."""
        return sum(len(self.kept(stage)) for stage in self.stages_of(rank))

    def cache_peak(self, rank: int, forwards: Iterable[tuple[int, int]]) -> int:
        """The most (microbatch, source) entries that a rank's cache holds under a schedule.

        Args:
            forwards: the schedule's (stage, microbatch) forwards on that rank, in order.
        """
        entries = peak = 0
        for stage, _ in forwards:
            entries += len(self.kept(stage))
            peak = max(peak, entries)
            entries -= len(self.released(stage))
        return peak

    def _available(self, stage: int) -> tuple[int, ...]:
        return self.held(stage) + self.brought(stage)

    def _place(self, stage: int) -> int:
        lap, position = divmod(stage, self.pp_size)
        return self.pp_size - 1 - position if self.placement == "v" and lap % 2 else position

    def _check_stage(self, stage: int) -> None:
        if not 0 <= stage < self.num_stages:
            raise ValueError(f"stage {stage} is out of range: there are {self.num_stages} stages, counted from 0")

    def _check(self) -> None:
        checks.integers(pp_size=self.pp_size)
        for stage, count in enumerate(self.sublayers_per_stage):
            checks.integers(**{f"sublayers_per_stage[{stage}]": count})
        if self.sublayers_per_block is not None:
            checks.integers(sublayers_per_block=self.sublayers_per_block)
        if any(count < 0 for count in self.sublayers_per_stage):
            raise ValueError(f"sublayers_per_stage must not be negative, got {list(self.sublayers_per_stage)}")
        if self.sublayers_per_block is not None and self.sublayers_per_block < 1:
            raise ValueError(
                f"sublayers_per_block is {self.sublayers_per_block}; it must be at least 1 (full Attention Residuals), "
                "or None for the standard residual"
            )
        if self.placement not in ("loop", "v"):
            raise ValueError(f"placement is {self.placement!r}; it must be 'loop' or 'v'")
        if self.pp_size < 1 or not self.num_stages or self.num_stages % self.pp_size:
            raise ValueError(
                f"{self.num_stages} stages cannot be shared out over {self.pp_size} ranks: the number of stages "
                "must be a positive multiple of pp_size"
            )
