"""Times of single operations, forward and backward, by implementation, shape and dtype."""

import dataclasses

from bench.cases import DTYPES, OPERATIONS
from bench.work import operation_work, verify_operation


def test_operation(operation_case, device, available, right, timed):
    case, dtype = operation_case, DTYPES[operation_case.dtype]
    implementation = available(case.name, case.dtype)
    verdict = verify_operation(case.operation, implementation, case.shape, dtype, device)
    right(verdict.wrong)
    timed(
        operation_work(case.operation, implementation, case.direction, case.shape, dtype, device),
        OPERATIONS[case.operation].bytes(case.shape, dtype, case.direction),
        suite="operations",
        implementation=case.name,
        version=implementation.version,
        operation=case.operation,
        direction=case.direction,
        dtype=case.dtype,
        error=verdict.worst,
        **dataclasses.asdict(case.shape),
    )
