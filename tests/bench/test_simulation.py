"""The simulation of a pipeline where its outcome can be written down."""

import pytest

from bench.simulation import Link, simulate
from blockres.pipeline.routing import BlockRouting, split_sublayers

FREE = Link(1e30)


def run(pp_size, virtual, microbatches, *, per_block=2, link=FREE, cache=True, unit_bytes=1.0):
    routing = BlockRouting([2] * (pp_size * virtual), per_block, pp_size, cache=cache)
    return simulate(routing, microbatches, lambda stage: 1.0, lambda stage: 2.0, unit_bytes, link)


@pytest.mark.parametrize(
    ("pp_size", "virtual", "microbatches"), [(1, 1, 3), (2, 1, 8), (4, 1, 8), (4, 2, 8), (8, 4, 16)]
)
def test_where_the_wire_costs_nothing_the_bubble_is_that_of_the_interleaved_schedule(pp_size, virtual, microbatches):
    outcome = run(pp_size, virtual, microbatches)
    assert outcome.bubble == pytest.approx((pp_size - 1) / (virtual * microbatches + pp_size - 1))
    assert outcome.seconds == pytest.approx(3 * (virtual * microbatches + pp_size - 1))


def test_a_slow_link_bounds_the_step():
    link = Link(bandwidth=0.1)
    outcome = run(2, 1, 8, per_block=None, link=link)
    assert outcome.seconds >= 8 * 10, "eight payloads of ten seconds each go over one link"
    assert outcome.seconds > run(2, 1, 8, per_block=None).seconds


def test_the_cache_saves_time_where_the_wire_is_what_takes_it():
    link = Link(bandwidth=1.0)
    cached, naive = (run(4, 4, 8, link=link, cache=cache).seconds for cache in (True, False))
    assert cached < naive


def test_latency_comes_once_for_each_hop_on_the_way():
    forth_and_back = 2 * 3
    late = run(4, 1, 4, link=Link(1e30, latency=0.01)).seconds - run(4, 1, 4).seconds
    assert late >= forth_and_back * 0.01 - 1e-9


def test_uneven_stages_are_held_up_by_the_longest():
    routing = BlockRouting(split_sublayers(5, 2), None, 2)
    outcome = simulate(
        routing, 4, lambda s: len(routing.sublayers(s)), lambda s: 2 * len(routing.sublayers(s)), 1, FREE
    )
    assert outcome.seconds >= 4 * 3 * 3
