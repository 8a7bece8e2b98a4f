"""How sources are described to a kernel: strides, alignment, padding, and what is refused."""

import pytest
import torch

from blockres_kernels.sources import MAX_ROWS, compute_dtype, padded, rows_of, rows_or_copy, tile_of


def _address(rows, j, token):
    """The formula at the top of `sources.py`, for one element of what is passed to a kernel."""
    argument = rows.argument(len(rows.tensors))
    inner = argument.inner_times_16 // 16
    return (token // inner) * argument.outer_strides[j] + (token % inner) * argument.row_strides[j]


def _layouts():
    x = torch.randn(4, 3, 5, 8)
    yield "contiguous", x
    yield "padded", torch.randn(4, 3, 5, 12)[..., :8]
    yield "sliced", torch.randn(4, 3, 9, 8)[:, :, 2:7]
    yield "transposed", torch.randn(3, 5, 4, 8).permute(2, 0, 1, 3)
    yield "expanded", torch.randn(1, 3, 5, 8).expand(4, 3, 5, 8)
    yield "one row", torch.randn(1, 1, 1, 8).expand(4, 3, 5, 8)
    yield "vector", torch.randn(8)
    yield "one long row", torch.randn(1, 1, 8)


@pytest.mark.parametrize(("name", "x"), list(_layouts()))
def test_every_row_is_where_it_is(name, x):
    rows = rows_of([x])
    flat = x.reshape(-1, 8)
    assert rows.count == len(flat)
    for token in range(rows.count):
        row = torch.as_strided(x, (8,), (1,), x.storage_offset() + _address(rows, 0, token))
        assert torch.equal(row, flat[token])


def test_sources_of_different_layouts_share_a_cut():
    sources = [torch.randn(4, 6, 8), torch.randn(6, 4, 8).transpose(0, 1), torch.randn(1, 6, 8).expand(4, 6, 8)]
    rows = rows_of(sources)
    assert rows.inner == 6
    assert rows.argument(3).flat.value is False
    assert rows_of(sources[:1]).argument(1).flat.value is True


def test_alignment_is_what_divides_every_row():
    x = torch.empty(64, 100, dtype=torch.bfloat16)
    assert rows_of([torch.empty(64, 128, dtype=torch.bfloat16)]).alignment == 16
    assert rows_of([x]).alignment == 8
    assert rows_of([x, x.flatten()[1:101].view(1, 100).expand(64, 100)]).alignment == 2
    assert rows_of([torch.empty(64, 104, dtype=torch.bfloat16)[:, :100]]).alignment == 16


def test_tuples_are_padded_to_the_bucket():
    sources = [torch.randn(4, 8) for _ in range(3)]
    argument = rows_of(sources).argument(5)
    assert [len(field) for field in (argument.pointers, argument.outer_strides, argument.row_strides)] == [5, 5, 5]
    assert argument.pointers[3] is sources[0]
    assert padded([1, 2], 4) == (1, 2, 1, 1)


def test_a_group_is_a_part():
    sources = [torch.randn(4, 8) for _ in range(5)]
    part = rows_of(sources).group(2, 4)
    assert [x.data_ptr() for x in part.tensors] == [x.data_ptr() for x in sources[2:4]]
    assert len(part.row_strides) == 2


def test_refusals_say_what_came_and_what_would_do():
    three_strides = torch.randn(4, 3, 5, 8).permute(2, 1, 0, 3)
    with pytest.raises(ValueError, match=r"two strides.*\(5, 3, 4, 8\).*contiguous first"):
        rows_of([three_strides])
    with pytest.raises(ValueError, match=r"last dimension must be contiguous.*\(8, 4\)"):
        rows_of([torch.randn(4, 8).t()])
    with pytest.raises(ValueError, match=str(MAX_ROWS)):
        rows_of([torch.empty(1, 1).expand(MAX_ROWS + 1, 1)])


def test_what_cannot_be_read_in_place_is_copied():
    total = torch.ones(()).expand(4, 8)
    assert rows_or_copy(total).tensors[0].is_contiguous()
    x = torch.randn(4, 8)
    assert rows_or_copy(x).tensors[0] is x


def test_tiles_and_dtypes():
    assert tile_of(100, 64).chunks == (0, 1)
    assert tile_of(128, 64).chunks == (0, 1)
    assert compute_dtype(torch.bfloat16) == torch.float32
    assert compute_dtype(torch.float64) == torch.float64
