"""The launch choices: they cover every row, fit the registers and load 16 bytes at a time."""

import itertools

import pytest
import torch
import triton

from blockres_kernels import launch

DIMS = (1, 7, 96, 100, 128, 768, 1000, 1024, 2048, 4096, 5120, 7168, 7186, 8192, 8200, 12288, 16384)
ITEMSIZES = (2, 4, 8)
SLOTS = launch.BUCKETS
EVERYTHING = list(itertools.product(DIMS, ITEMSIZES, (32, 64)))


def _is_power_of_two(number):
    return number > 0 and number & (number - 1) == 0


def test_buckets_hold_every_number_of_sources():
    for count in range(1, launch.MAX_SOURCES + 1):
        assert launch.bucket(count) >= count
        assert launch.bucket(count) in launch.BUCKETS
    assert [launch.bucket(size) for size in launch.BUCKETS] == list(launch.BUCKETS)


@pytest.mark.parametrize("count", [1, 32, 33, 64, 65, 1025])
def test_groups_are_consecutive_and_complete(count):
    groups = launch.groups(count)
    assert groups[0][0] == 0
    assert groups[-1][1] == count
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(groups))
    assert all(0 < stop - start <= launch.MAX_SOURCES for start, stop in groups)


@pytest.mark.parametrize(("dim", "itemsize", "lanes"), EVERYTHING)
def test_a_forward_tile_covers_the_row(dim, itemsize, lanes):
    plan = launch.attn_res_forward(dim, itemsize, lanes)
    assert plan.tile.dim == dim
    assert 0 <= plan.tile.width * len(plan.tile.chunks) - dim < plan.tile.width
    assert plan.tile.width * itemsize == 16 * plan.warps * lanes
    assert _is_power_of_two(plan.tile.width)
    assert 0 <= plan.ahead <= 6


@pytest.mark.parametrize(("dim", "itemsize", "lanes"), EVERYTHING)
def test_backward_slices_cover_the_row(dim, itemsize, lanes):
    for slots, norm in itertools.product(SLOTS, (False, True)):
        plan = launch.attn_res_backward(dim, itemsize, slots, norm, lanes)
        columns = plan.tile.width * len(plan.tile.chunks)
        assert (plan.slices - 1) * columns < dim <= plan.slices * columns
        assert plan.tile.width * itemsize == 16 * plan.warps * lanes
        assert min(plan.ahead) >= 0
        assert not plan.held or (slots <= 16 and plan.slices == 1)


@pytest.mark.parametrize(("dim", "itemsize", "lanes"), EVERYTHING)
def test_registers_suffice_for_what_is_held(dim, itemsize, lanes):
    """Counted by hand: elements of a row for each thread, times the rows that are alive at once."""
    for slots, norm in itertools.product(SLOTS, (False, True)):
        plan = launch.attn_res_backward(dim, itemsize, slots, norm, lanes)
        elements = plan.tile.width * len(plan.tile.chunks) / (plan.warps * lanes)
        computed, stored = elements * max(itemsize, 4) / 4, elements * itemsize / 4
        rows = slots if plan.held else plan.ahead[1]
        assert (5 + norm) * computed + rows * stored <= 220


@pytest.mark.parametrize("itemsize", [2, 4])
def test_rows_up_to_8192_take_one_launch(itemsize):
    for dim, slots, norm in itertools.product(DIMS, SLOTS, (False, True)):
        if dim <= 8192:
            assert launch.attn_res_backward(dim, itemsize, slots, norm, 32).slices == 1


@pytest.mark.parametrize(("dim", "itemsize", "slots"), [(768, 2, 16), (2048, 2, 9), (4096, 2, 9), (1024, 4, 9)])
def test_rows_are_held_where_they_fit(dim, itemsize, slots):
    assert launch.attn_res_backward(dim, itemsize, slots, True, 32).held


QUERIES = (1, 2, 4, 12, 16, 33, 64)


def _assert_panel(panel, dim, queries, sources, itemsize):
    assert panel.dim == dim
    assert panel.queries >= queries
    assert panel.sources >= sources
    assert all(map(_is_power_of_two, panel[1:]))
    assert panel.columns % panel.vector == 0
    assert panel.vector * itemsize <= 16


@pytest.mark.parametrize(("dim", "itemsize", "lanes"), EVERYTHING)
def test_phase_1_holds_every_query_source_and_column(dim, itemsize, lanes):
    for queries, slots in itertools.product(QUERIES, SLOTS):
        plan = launch.attn_res_inter_forward(dim, itemsize, queries, slots, lanes)
        assert plan.tile.dim == dim
        assert 0 <= plan.tile.width * len(plan.tile.chunks) - dim < plan.tile.width
        assert plan.group <= queries
        _assert_panel(plan.panel, dim, queries, slots, itemsize)
        assert min(plan.warps, plan.panel_warps, plan.resident) >= 1
        for norm, adds in itertools.product((False, True), repeat=2):
            plan = launch.attn_res_inter_backward(dim, itemsize, queries, slots, norm, adds, lanes)
            _assert_panel(plan.panel, dim, queries, slots, itemsize)
            _assert_panel(plan.pairs, dim, queries, slots, itemsize)
            assert plan.panel[:3] == plan.pairs[:3]  # the launches share tables of these sizes
            assert 1 <= plan.warps <= 8
            assert plan.resident >= 1
            assert not plan.whole or plan.panel.columns >= dim


@pytest.mark.parametrize(("dim", "itemsize", "lanes"), EVERYTHING)
def test_a_merge_covers_the_row(dim, itemsize, lanes):
    assert launch.attn_res_merge_forward(dim).tile == launch.tile_of(dim, triton.next_power_of_2(dim))
    for narrow, norm in itertools.product((2, itemsize), (False, True)):
        plan = launch.attn_res_merge_backward(dim, (narrow, itemsize), norm, lanes)
        columns = plan.tile.width * len(plan.tile.chunks)
        assert (plan.slices - 1) * columns < dim <= plan.slices * columns
        assert columns % plan.piece.width == 0
        assert all(map(_is_power_of_two, (plan.tile.width, plan.piece.width, plan.warps)))
        assert plan.resident >= 1


@pytest.mark.parametrize(("dim", "itemsize", "lanes"), EVERYTHING)
def test_an_inference_step_covers_the_row_and_loads_16_bytes_of_the_narrowest(dim, itemsize, lanes):
    for narrowest in (size for size in ITEMSIZES if size <= itemsize):
        plan = launch.attn_res_step(dim, itemsize, narrowest, lanes)
        assert 0 <= plan.tile.width * len(plan.tile.chunks) - dim < plan.tile.width
        assert plan.tile.width * narrowest == 16 * plan.warps * lanes
        assert plan.ahead >= 0


def test_programs_are_no_more_than_tokens_and_what_runs_at_a_time():
    cpu = torch.device("cpu")
    at_a_time = 8 * launch.multiprocessors(cpu)
    assert [launch.persistent(tokens, 8, cpu) for tokens in (1, 5, 10**6)] == [1, 5, at_a_time]
    assert [launch.persistent_with_sums(tokens, 8, cpu) for tokens in (1, 10**6)] == [1, at_a_time]
    assert launch.persistent_with_sums(40, 8, cpu) == launch.multiprocessors(cpu)
