"""What the kernels would use on GPUs, compiled offline. `python -m bench.resources` does it for every shape."""

import pytest
import torch

from bench.resources import SHARED_LIMITS, TARGETS, Shape, Usage, measure

REPRESENTATIVE = [
    ("attn_res_forward", Shape(768, 2, "float32")),
    ("attn_res_forward", Shape(7168, 9, "bfloat16")),
    ("attn_res_forward", Shape(16384, 5, "float32")),
    ("attn_res_backward", Shape(1024, 5, "float32")),
    ("attn_res_backward", Shape(4096, 9, "bfloat16")),
    ("attn_res_backward", Shape(7168, 16, "bfloat16")),
    ("attn_res_backward", Shape(8192, 9, "float32")),
    ("attn_res_backward", Shape(16384, 2, "bfloat16")),
]
ELSEWHERE = [("attn_res_forward", Shape(7168, 9, "bfloat16")), ("attn_res_backward", Shape(7168, 9, "bfloat16"))]


def assert_within_limits(usage: Usage) -> None:
    assert usage.spilled == 0, usage
    assert usage.shared <= SHARED_LIMITS[usage.target], usage
    assert not usage.doubles, usage
    assert usage.narrow == 0 or usage.kernel == "_add_rows", usage  # whose vectors are parameters' gradients


def test_kernels_fit_without_spills_and_load_16_bytes_at_a_time():
    usages = measure(REPRESENTATIVE, ["sm_90"])
    assert {u.kernel for u in usages} == {"_attn_res_forward", "_attn_res_backward", "_add_rows"}
    for usage in usages:
        assert_within_limits(usage)
        assert usage.accesses["16 ld"] > 0


@pytest.mark.parametrize("target", [target for target in TARGETS if target != "sm_90"])
def test_kernels_fit_other_generations(target):
    for usage in measure(ELSEWHERE, [target]):
        assert_within_limits(usage)


def test_the_programs_that_launch_counts_on_are_resident_together():
    """A persistent grid of more programs than run at a time would take twice as long."""
    for usage in measure([*REPRESENTATIVE, *ELSEWHERE], ["sm_90"]):
        if usage.kernel != "_add_rows":
            assert usage.registers * 32 * usage.warps * (8 // usage.warps) <= 65536, usage


def test_nothing_is_compiled_again_for_another_number_of_tokens():
    shapes = [
        (operation, Shape(256, 3, tokens=tokens))
        for operation in ("attn_res_forward", "attn_res_backward")
        for tokens in (1, 7, 16, 17, 48, 100)
    ]
    compiled = [usage.kernel for usage in measure(shapes, ["sm_90"])]
    assert sorted(compiled) == ["_add_rows", "_attn_res_backward", "_attn_res_forward"]


def test_a_failing_compilation_is_reported():
    with pytest.raises((RuntimeError, KeyError), match="no such operation"):
        measure([("no such operation", Shape(256, 3))], ["sm_90"])


def test_shapes_give_tensors_of_their_dtype():
    shape = Shape(96, 2, "float32", tokens=5)
    assert shape.row().shape == (5, 96)
    assert shape.row().dtype == torch.float32
