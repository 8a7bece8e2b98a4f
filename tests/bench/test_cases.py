"""The check that stands before every time: it must tell right from wrong."""

import dataclasses

import pytest
import torch

from bench.cases import DTYPES, OPERATIONS, Shape, expected, make_inputs, relative_error, verify
from bench.implementations import REGISTRY, Implementation, Missing, eager, find
from bench.streams import Parameters, StackShape
from bench.work import stack_floor, verify_stack, wrong_stack

SHAPE = Shape(3, 5, 24, 2)


@pytest.mark.parametrize("name", ["blockres", "eager"])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_runs_on_a_cpu_is_right(name, operation, dtype):
    implementation = find(name)
    assert isinstance(implementation, Implementation)
    function = implementation.operation(operation)
    assert function is not None
    verdict = verify(OPERATIONS[operation], function, SHAPE, DTYPES[dtype], "cpu")
    assert verdict.wrong is None
    assert 0 < verdict.worst < 1e-2


def spoiled(change):
    """The formula with its output changed."""
    right = eager().operation("attn_res")
    assert right is not None
    return lambda **inputs: (change(right(**inputs)[0]),)


@pytest.mark.parametrize(
    "change",
    [
        lambda out: out * 1.02,
        lambda out: out * torch.nan,
        lambda out: out.roll(1, 0),
        lambda out: out.detach() + 0 * out,
    ],
    ids=["scaled", "nan", "shifted", "without gradient"],
)
def test_what_is_wrong_is_called_wrong(change):
    verdict = verify(OPERATIONS["attn_res"], spoiled(change), SHAPE, torch.bfloat16, "cpu")
    assert verdict.wrong is not None


def test_a_parameter_without_a_gradient_is_wrong():
    right = eager().operation("attn_res")
    assert right is not None
    function = lambda sources, query, key_weight: right(sources, query, key_weight.detach())  # noqa: E731
    verdict = verify(OPERATIONS["attn_res"], function, SHAPE, torch.float32, "cpu")
    assert verdict.wrong is not None
    assert "gradient of key_weight off by inf" in verdict.wrong


def test_inputs_are_the_same_for_the_same_seed_and_share_a_component():
    inputs, again = (make_inputs(OPERATIONS["attn_res"], SHAPE, torch.float32) for _ in range(2))
    assert torch.equal(inputs["sources"][1], again["sources"][1])
    many = make_inputs(OPERATIONS["attn_res"], Shape(2, 64, 256), torch.float32)["sources"]
    assert torch.nn.functional.cosine_similarity(*many).mean() > 0.4
    assert expected("attn_res", SHAPE, torch.float32, "cpu")[0][0].dtype == torch.float64


def test_relative_error_where_there_is_nothing_to_be_relative_to():
    zero = torch.zeros(3, dtype=torch.float64)
    assert relative_error(torch.ones(3), zero) == pytest.approx(3**0.5)
    assert relative_error(None, zero) == float("inf")
    assert relative_error(torch.full((3,), torch.nan), zero) == float("inf")


def test_sizes_are_read_back_as_they_are_written():
    assert Shape.parse("9x8192x7168") == Shape(9, 8192, 7168)
    assert Shape.parse(str(SHAPE)) == SHAPE
    with pytest.raises(ValueError, match="sources x tokens x dim"):
        Shape.parse("9x8192")
    assert StackShape.parse("8x4x5x24") == StackShape(8, 4, 5, 24)
    with pytest.raises(ValueError, match="sublayers per block"):
        StackShape.parse("8x4x5")


@pytest.mark.parametrize(
    ("name", "recompute"), [("standard", False), ("eager", False), ("blockres", False), ("blockres", True)]
)
def test_a_whole_stack_is_right(name, recompute):
    who = name if name == "standard" else find(name)
    errors = verify_stack(who, StackShape(7, 3, 5, 24), torch.float32, "cpu", recompute=recompute)
    assert wrong_stack(errors, torch.float32) is None
    assert max(errors.values()) > 0


def test_a_wrong_stack_is_called_wrong():
    right = eager()
    wrong = dataclasses.replace(right, aggregate=lambda *inputs: 1.01 * right.aggregate(*inputs))
    errors = verify_stack(wrong, StackShape(7, 3, 5, 24), torch.float32, "cpu")
    assert wrong_stack(errors, torch.float32) is not None


def test_the_floor_of_a_stack_is_the_sum_over_its_phases():
    forward, backward = (stack_floor(StackShape(128, 16, 1, 1), direction) for direction in ("forward", "backward"))
    assert forward == 36 + 128 + 5 * 128 + 10
    assert backward == 3 * 36 + 128 + 6 * 128 + 28


def test_all_packages_are_found_or_named_as_missing():
    for name in REGISTRY:
        found = find(name)
        assert found.name == name
        assert isinstance(found, Implementation) or found.reason.startswith("missing")
    assert isinstance(find("blockres"), Implementation)
    assert not isinstance(find("eager"), Missing)


def test_parameters_of_another_dtype_have_the_same_values():
    parameters = Parameters(StackShape(2, 1, 3, 8), torch.bfloat16, "cpu")
    wide = parameters.to(torch.float64)
    assert torch.equal(wide.queries[1].float(), parameters.queries[1].float())
    assert len(parameters.used_by("standard")) == 2
    assert len(parameters.used_by("eager")) == 2 + 2 * 3
