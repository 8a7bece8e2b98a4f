"""What the kernels would use on GPUs, compiled offline. `python -m bench.resources` does it for every shape."""

import dataclasses

import pytest
import torch

from bench.resources import OPERATIONS, SHARED_LIMITS, TARGETS, Shape, Usage, all_shapes, line, measure, summary

REPRESENTATIVE = [
    ("attn_res_forward", Shape(768, 2, "float32")),
    ("attn_res_forward", Shape(7168, 9, "bfloat16")),
    ("attn_res_forward", Shape(16384, 5, "float32")),
    ("attn_res_backward", Shape(1024, 5, "float32")),
    ("attn_res_backward", Shape(4096, 9, "bfloat16")),
    ("attn_res_backward", Shape(7168, 16, "bfloat16")),
    ("attn_res_backward", Shape(8192, 9, "float32")),
    ("attn_res_backward", Shape(16384, 2, "bfloat16")),
    ("attn_res_inter_forward", Shape(7168, 2, "bfloat16", 16)),
    ("attn_res_inter_forward", Shape(1024, 9, "float32", 12)),
    ("attn_res_inter_forward", Shape(1024, 16, "bfloat16", 24)),
    ("attn_res_inter_forward", Shape(16384, 3, "float32", 4)),
    ("attn_res_inter_backward", Shape(1024, 2, "bfloat16", 4)),
    ("attn_res_inter_backward", Shape(2048, 9, "bfloat16", 16)),
    ("attn_res_inter_backward", Shape(7168, 5, "float32", 24)),
    ("attn_res_merge_forward", Shape(4096, 1, "bfloat16", stream="float32")),
    ("attn_res_merge_forward", Shape(16384, 1, "bfloat16")),
    ("attn_res_merge_backward", Shape(1024, 1, "bfloat16")),
    ("attn_res_merge_backward", Shape(7168, 1, "float32")),
    ("attn_res_merge_backward", Shape(8192, 1, "bfloat16", norm=False, adds=False)),
    ("attn_res_merge_backward", Shape(16384, 1, "bfloat16", stream="float32")),
    ("attn_res_step", Shape(768, 1, "float32")),
    ("attn_res_step", Shape(7168, 9, "bfloat16")),
    ("attn_res_step", Shape(16384, 9, "bfloat16")),
    ("pack", Shape(768, 3, "bfloat16")),
    ("pack", Shape(7168, 5, "float32")),
]
ELSEWHERE = [
    ("attn_res_forward", Shape(7168, 9, "bfloat16")),
    ("attn_res_backward", Shape(7168, 9, "bfloat16")),
    ("attn_res_inter_forward", Shape(2048, 9, "bfloat16", 16)),
    ("attn_res_inter_backward", Shape(2048, 9, "bfloat16", 16)),
    ("attn_res_merge_forward", Shape(7168, 1, "bfloat16")),
    ("attn_res_merge_backward", Shape(7168, 1, "bfloat16")),
    ("attn_res_step", Shape(7168, 9, "bfloat16")),
]
SUMS, TERMS = "_parameter_gradients", "_attn_res_inter_backward_terms"  # which touch no tensor [T, D]


def assert_within_limits(usage: Usage) -> None:
    assert usage.spilled == 0, usage
    assert usage.shared <= SHARED_LIMITS[usage.target], usage
    assert not usage.doubles, usage
    assert usage.row_access == (None if usage.kernel in (SUMS, TERMS) else 16), usage
    assert usage.fits


def test_kernels_fit_without_spills_and_access_rows_16_bytes_at_a_time():
    usages = measure(REPRESENTATIVE, ["sm_90"])
    assert {u.operation for u in usages} == set(OPERATIONS)
    assert {u.kernel.removeprefix("_attn_res_inter_") for u in usages if "inter" in u.kernel} == {
        *("forward_held", "forward_twice"),
        *("backward_whole", "backward_pairs", "backward_terms", "backward_slices"),
    }
    for usage in usages:
        assert_within_limits(usage)
        if usage.kernel != SUMS:  # a persistent grid of more programs than run at a time would take twice as long
            assert usage.registers * 32 * usage.warps * (8 // usage.warps) <= 65536, usage


def test_kernels_fit_other_generations():
    for usage in measure(ELSEWHERE, [target for target in TARGETS if target != "sm_90"]):
        assert_within_limits(usage)


WAYS = [
    ("attn_res_forward", Shape(256, 3)),
    ("attn_res_forward", Shape(100, 3)),  # rows of 200 bytes: one of them is no better aligned than many
    ("attn_res_step", Shape(100, 3)),
    ("attn_res_backward", Shape(256, 3)),
    ("attn_res_inter_forward", Shape(256, 3, queries=4)),
    ("attn_res_inter_forward", Shape(16384, 3, "float32", queries=4)),
    ("attn_res_inter_backward", Shape(256, 3, queries=4)),
    ("attn_res_inter_backward", Shape(256, 3, queries=32)),
    ("attn_res_merge_forward", Shape(256, 1)),
    ("attn_res_merge_backward", Shape(256, 1)),
    ("attn_res_step", Shape(256, 3)),
    ("pack", Shape(256, 3)),  # of a size that is a multiple of 16 whatever the number of tokens
]


def test_nothing_is_compiled_again_for_another_number_of_tokens():
    tokens = (37, 1, 7, 16, 17, 48, 100)
    shapes = [(operation, dataclasses.replace(shape, tokens=count)) for count in tokens for operation, shape in WAYS]
    compiled = measure(shapes, ["sm_90"])
    assert {usage.operation for usage in compiled} == set(OPERATIONS)
    assert [usage for usage in compiled if usage.shape.tokens != tokens[0]] == []


def test_a_failing_compilation_is_reported():
    with pytest.raises((RuntimeError, KeyError), match="no such operation"):
        measure([("no such operation", Shape(256, 3))], ["sm_90"])


def test_shapes_give_tensors_of_their_dtype():
    shape = Shape(96, 2, "float32", tokens=5)
    assert shape.row().shape == (5, 96)
    assert shape.row().dtype == torch.float32
    assert shape.row("bfloat16").dtype == torch.bfloat16


def test_a_sweep_covers_every_shape_and_begins_with_the_extremes():
    shapes = all_shapes(["attn_res_inter_backward", "attn_res_merge_backward"])
    inter = [shape for operation, shape in shapes if operation == "attn_res_inter_backward"]
    assert len(shapes) == len(set(shapes))
    assert len(inter) == 8 * 5 * 4 * 2 * 2 * 2
    assert len(shapes) - len(inter) == 8 * (2 + 1) * 2 * 2  # bfloat16 with either stream, and float32
    first = inter[: 2 * 2 * 2 * 2 * 2 * 2]
    assert {(s.dim, s.sources, s.queries) for s in first} == {
        (d, n, q) for d in (768, 16384) for n in (1, 16) for q in (4, 24)
    }


def test_what_does_not_fit_shows_in_the_summary():
    usage = Usage("op", Shape(96, 2), "gfx942", "kernel", 1, 200, 0, 1024, 0, 16, False, {"16 ld": 3}, 0.1)
    for changes in ({"spilled": 8}, {"shared": 65 * 1024}, {"row_access": 8}):
        worse = dataclasses.replace(usage, **changes)
        assert usage.fits
        assert not worse.fits
        row = summary([usage, worse]).splitlines()[-1]
        assert [cell.strip() for cell in row.split("|")[1:5]] == ["op", "gfx942", "2", "200"]
        assert row.split("|")[-3].strip() == "1"
        assert "kernel" in line(worse)
