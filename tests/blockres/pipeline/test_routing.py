"""The routing against a walk of one microbatch through all sublayers, and against the closed form."""

from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockres.pipeline import BlockRouting, split_sublayers


@st.composite
def routings(draw: st.DrawFn, cache: bool | None = None) -> BlockRouting:
    pp_size = draw(st.integers(1, 4))
    virtual = draw(st.integers(1, 4))
    stages = st.lists(st.integers(0, 5), min_size=pp_size * virtual, max_size=pp_size * virtual)
    block = st.one_of(st.none(), st.integers(1, 6))
    placement = st.sampled_from(["loop", "v"])
    keeps = draw(st.booleans()) if cache is None else cache
    return BlockRouting(draw(stages), draw(block), pp_size, draw(placement), cache=keeps)


@dataclass
class Walk:
    """What happens to one microbatch, found by running it sublayer by sublayer with sets of sources on each rank."""

    held: list[set[int]] = field(default_factory=list)
    received: list[set[int]] = field(default_factory=list)
    produced: list[set[int]] = field(default_factory=list)
    partial: list[bool] = field(default_factory=list)
    readers: dict[tuple[int, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    last_use: dict[tuple[int, int], int] = field(default_factory=dict)


def walk(routing: BlockRouting) -> Walk:
    result = Walk()
    on_rank: list[dict[int, int]] = [{} for _ in range(routing.pp_size)]  # source -> the stage that brought it
    exists, inside, block = 0, 0, routing.sublayers_per_block
    for stage, sublayers in enumerate(routing.sublayers_per_stage):
        rank = _rank(routing, stage)
        before = set(range(exists))
        held = {source for source in before if source in on_rank[rank]} if routing.cache else set()
        result.held.append(held)
        result.received.append(before - held)
        result.partial.append(stage > 0 and (block is None or inside > 0))
        for source in held:
            result.readers[on_rank[rank][source], source].append(stage)
            result.last_use[rank, source] = stage
        if stage == 0 and block is not None:
            exists = 1
        for _ in range(sublayers):
            inside += 1
            if inside == block:
                exists, inside = exists + 1, 0
        produced = set(range(exists)) - before
        result.produced.append(produced if stage < routing.num_stages - 1 else set())
        for source in (before - held) | produced:
            on_rank[rank][source] = stage
    return result


def _rank(routing: BlockRouting, stage: int) -> int:
    path = list(range(routing.pp_size))
    laps = range(routing.num_stages // routing.pp_size)
    order = [rank for lap in laps for rank in (path[::-1] if routing.placement == "v" and lap % 2 else path)]
    return order[stage]


@given(routings())
def test_routing_agrees_with_a_walk(routing: BlockRouting) -> None:
    expected = walk(routing)
    for stage in range(routing.num_stages):
        rank = _rank(routing, stage)
        assert routing.rank_of(stage) == rank
        assert set(routing.held(stage)) == expected.held[stage]
        assert set(routing.received(stage)) == expected.received[stage]
        assert set(routing.produced(stage)) == expected.produced[stage]
        assert routing.has_partial(stage) == expected.partial[stage]
        assert set(routing.sent(stage)) == (expected.received[stage + 1] if stage + 1 < routing.num_stages else set())
        for source in routing.brought(stage):
            assert list(routing.readers(stage, source)) == expected.readers[stage, source]
        assert set(routing.kept(stage)) == {s for s in routing.brought(stage) if expected.readers[stage, s]}
        assert set(routing.released(stage)) == {s for s in routing.held(stage) if expected.last_use[rank, s] == stage}


@given(routings())
def test_a_stage_finds_every_source_exactly_once(routing: BlockRouting) -> None:
    for stage in range(routing.num_stages):
        found = sorted(routing.held(stage) + routing.received(stage))
        assert found == list(range(routing.num_sources(stage)))


@given(routings(cache=True))
def test_every_deposit_has_one_collector(routing: BlockRouting) -> None:
    deposited = {(stage, s): 0 for stage in range(routing.num_stages) for s in routing.kept(stage)}
    for reader in range(routing.num_stages):
        for source in routing.held(reader):
            collectors = [key for key in deposited if key[1] == source and reader in routing.readers(*key)]
            assert len(collectors) == 1
            deposited[collectors[0]] += 1
    for (stage, source), count in deposited.items():
        assert count == len(routing.readers(stage, source)) > 0


@given(routings(cache=True))
def test_hop_units_follow_the_closed_form(routing: BlockRouting) -> None:
    def src(l: int) -> int:
        return 0 if routing.sublayers_per_block is None else 1 + l // routing.sublayers_per_block

    def is_open(l: int) -> int:
        return 1 if routing.sublayers_per_block is None else l % routing.sublayers_per_block != 0

    starts = [sum(routing.sublayers_per_stage[:stage]) for stage in range(routing.num_stages + 1)]
    cached, naive = routing.hop_units(), routing.hop_units(cache=False)
    for stage in range(routing.num_stages - 1):
        everything = src(starts[stage + 1]) + is_open(starts[stage + 1])
        if routing.is_local(stage):
            assert cached[stage] == naive[stage] == 0
            continue
        assert naive[stage] == everything
        if routing.placement == "loop":
            lap = stage + 1 - routing.pp_size
            known = src(starts[lap + 1]) if lap >= 0 else 0
            assert cached[stage] == everything - known


@given(routings(cache=True), st.integers(1, 5), st.randoms(use_true_random=False))
def test_the_predicted_peak_is_that_of_a_replay(routing: BlockRouting, microbatches: int, random) -> None:
    for rank in range(routing.pp_size):
        queues = [[(stage, m) for stage in routing.stages_of(rank)] for m in range(microbatches)]
        order, entries, peak = [], set(), 0
        while any(queues):
            order.append(random.choice([queue for queue in queues if queue]).pop(0))
        for stage, microbatch in order:
            entries |= {(microbatch, source) for source in routing.kept(stage)}
            peak = max(peak, len(entries))
            entries -= {(microbatch, source) for source in routing.released(stage)}
        assert not entries
        assert routing.cache_peak(rank, order) == peak <= microbatches * routing.cache_entries(rank)


@pytest.mark.parametrize(
    ("pp_size", "virtual", "naive", "exact", "peaks"),
    [(2, 2, 6, 3, (3, 1)), (4, 2, 28, 18, (7, 3)), (4, 4, 120, 42, (15, 3)), (8, 4, 496, 196, (31, 7))],
)
def test_totals_for_one_block_per_stage(
    pp_size: int, virtual: int, naive: int, exact: int, peaks: tuple[int, int]
) -> None:
    """P(P-1)(2V-1)/2 blocks with the cache, C(C-1)/2 without; the embedding comes on top, once per first lap."""
    stages = pp_size * virtual
    routing = BlockRouting([3] * stages, 3, pp_size)
    embedding = [1] * (pp_size - 1) + [0] * (stages - pp_size)
    blocks = [units - extra for units, extra in zip(routing.hop_units(), embedding, strict=True)]
    blocks_naive = [units - 1 for units in routing.hop_units(cache=False)]
    assert (sum(blocks_naive), sum(blocks)) == (naive, exact)
    assert (max(blocks_naive), max(blocks)) == peaks


def test_v_placement_sends_a_cached_source_onward() -> None:
    routing = BlockRouting([1] * 6, 1, 3, "v")
    onward = set(routing.held(4)) & set(routing.sent(4))
    assert onward == {2}, "rank 1's second stage sends the block that its first one produced"
    assert routing.hop_units()[2] == 0, "the turn is local"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, -1], 2, 2), "must not be negative"),
        (([1, 1], 0, 2), "at least 1"),
        (([1, 1, 1], 2, 2), "multiple of pp_size"),
        (([], 2, 1), "positive multiple"),
        (([1, 1], 2, 2, "zigzag"), "'loop' or 'v'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockRouting(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((12, 4, 2), r"one number for each stage, got 12; split_sublayers\(12, num_stages\) makes one"),
        (([1, 1.5], 2, 2), r"sublayers_per_stage\[1\] must be an integer, got 1.5"),
        (([1, 1], 2.5, 2), "sublayers_per_block must be an integer, got 2.5"),
        (([1, 1], True, 2), "sublayers_per_block must be an integer, got True"),
        (([1, 1], 2, "2"), "pp_size must be an integer, got '2'"),
    ],
)
def test_arguments_of_another_type_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        BlockRouting(*arguments)


@pytest.mark.parametrize("routing", [BlockRouting([2, 1], 2, 2), BlockRouting([1] * 4, None, 2, "v", cache=False)])
def test_the_repr_builds_the_routing_again(routing: BlockRouting) -> None:
    again = eval(repr(routing))
    assert vars(again) == vars(routing)


def test_wrong_questions_are_refused() -> None:
    routing = BlockRouting([2, 2], 2, 2)
    with pytest.raises(ValueError, match="stage 2 is out of range"):
        routing.rank_of(2)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank {rank} is out of range: there are 2 ranks"):
            routing.stages_of(rank)
    with pytest.raises(ValueError, match="not source 1"):
        BlockRouting([2, 2, 2, 2], 2, 2).readers(2, 1)


def test_split_gives_the_remainder_to_the_first_stages() -> None:
    assert split_sublayers(11, 4) == [3, 3, 3, 2]
    with pytest.raises(ValueError, match="0 stages"):
        split_sublayers(3, 0)
