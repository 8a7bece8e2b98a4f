"""What one stage does with each tensor of a hop, worked out from the routing.

A unit is a tensor of the residual stream: a source, which goes by its number, or the open block's partial sum. Beside
the stream a tally may travel, which is in every hop.
"""

from dataclasses import dataclass

from blockres.pipeline.routing import BlockRouting

PARTIAL = -1
"""Stands for the partial sum where sources go by their numbers; it comes after them in every hop."""

TALLY = -2
"""Stands for the tally likewise; it comes last."""


@dataclass(frozen=True)
class StagePlan:
    """One stage's part of a routing, looked up once.

    Attributes:
        received: units that come in on the hop, or are handed over by the stage before on the same rank.
        held: sources that the rank's cache has.
        sent: units that go out on the hop, or are handed over.
        new_units: units that the stage makes.
        kept_received, kept_produced: sources that go into the rank's cache.
        released: sources that leave it when the stage has run its forward.
        deposits: how many gradients will be deposited for each kept source.
        sources_in, sources_out: how many sources exist before and after the stage.
        partial_out: whether a block is open after the stage.
    """

    received: tuple[int, ...]
    held: tuple[int, ...]
    sent: tuple[int, ...]
    new_units: tuple[int, ...]
    kept_received: tuple[int, ...]
    kept_produced: tuple[int, ...]
    released: tuple[int, ...]
    deposits: dict[int, int]
    sources_in: int
    sources_out: int
    partial_out: bool
    previous_is_local: bool
    next_is_local: bool
    is_first_on_rank: bool
    is_last_on_rank: bool

    @staticmethod
    def of(routing: BlockRouting, stage: int, tally: bool = False) -> "StagePlan":
        last = routing.num_stages - 1
        received, produced = routing.received(stage), routing.produced(stage)
        partial_in = (PARTIAL,) * routing.has_partial(stage)
        partial_out = (PARTIAL,) * (stage < last and routing.has_partial(stage + 1))
        tally_in, tally_out = (TALLY,) * (tally and stage > 0), (TALLY,) * (tally and stage < last)
        kept = routing.kept(stage)
        own_stages = routing.stages_of(routing.rank_of(stage))
        return StagePlan(
            received=received + partial_in + tally_in,
            held=routing.held(stage),
            sent=routing.sent(stage) + partial_out + tally_out,
            new_units=produced + partial_out + tally_out,
            kept_received=tuple(source for source in kept if source in received),
            kept_produced=tuple(source for source in kept if source in produced),
            released=routing.released(stage),
            deposits={source: len(routing.readers(stage, source)) for source in kept},
            sources_in=routing.num_sources(stage),
            sources_out=routing.num_sources(stage + 1),
            partial_out=bool(partial_out),
            previous_is_local=stage > 0 and routing.is_local(stage - 1),
            next_is_local=stage < last and routing.is_local(stage),
            is_first_on_rank=stage == own_stages[0],
            is_last_on_rank=stage == own_stages[-1],
        )

    @property
    def inputs(self) -> tuple[int, ...]:
        return self.received + self.held

    @property
    def is_alone_on_rank(self) -> bool:
        return self.is_first_on_rank and self.is_last_on_rank
