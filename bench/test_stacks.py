"""Times of whole training stacks, forward and backward, between sublayers that take no time."""

import dataclasses

from bench.cases import DTYPES
from bench.work import stack_floor, stack_work, standard_floor, verify_stack, wrong_stack


def test_stack(stack_case, device, available, right, timed):
    case, dtype = stack_case, DTYPES[stack_case.dtype]
    standard = case.name == "standard"
    implementation = "standard" if standard else available(case.name, case.dtype)
    errors = verify_stack(implementation, case.shape, dtype, device)
    right(wrong_stack(errors, dtype))
    floor = standard_floor if standard else stack_floor
    timed(
        stack_work(implementation, case.direction, case.shape, dtype, device),
        floor(case.shape, case.direction) * case.shape.tokens * case.shape.dim * dtype.itemsize,
        suite="stacks",
        implementation=case.name,
        version=None if isinstance(implementation, str) else implementation.version,
        operation="stack",
        direction=case.direction,
        dtype=case.dtype,
        error=max(errors.values()),
        **dataclasses.asdict(case.shape),
    )
