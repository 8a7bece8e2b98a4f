"""Count the bytes that each call moves, for blockres and for every package whose kernels the interpreter can run.

    python -m bench.traffic                                    # all that is installed; no GPU needed
    python -m bench.traffic --operation attn_res+norm --shape 9x0x1024 --implementation blockres
    python -m bench.traffic --shape 9x0x4096x16            # kernels choose by the width: wide rows may be read twice

Row sets read and written, forward and backward, beside the floor of the operation; the launches of kernels and the
PyTorch operations that touch memory; the floats of statistics per token; and the row sets that are kept for backward
besides the inputs. The number of tokens does not change a count by the token; the interpreter gets a few (the shape's
own number is not used). `python -m bench.stack` counts a whole training stack in the same way.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import environment
from bench.interpreted import KernelMode, peer, require_interpreter

require_interpreter()

import torch  # noqa: E402

from bench.cases import DTYPES, OPERATIONS, Operation, Shape, leaves, make_inputs, upstream  # noqa: E402
from bench.counting import TOKENS, Ledger, next_prime  # noqa: E402
from bench.implementations import REGISTRY, Implementation, Missing, find  # noqa: E402
from bench.tables import markdown, number  # noqa: E402
from bench.work import verify_operation  # noqa: E402

SHAPES = ("9x0x512x4",)
NOT_COUNTED = ("compiled",)


@dataclass(frozen=True)
class Call:
    """Row sets of one operation by one implementation."""

    implementation: str
    operation: Operation
    shape: Shape
    ledger: Ledger
    kept: float
    error: float

    def rows(self, direction: str, dtype: torch.dtype) -> float:
        return self.ledger.units("rows", dtype, direction)

    def statistics_per_token(self, direction: str, dtype: torch.dtype) -> float:
        """In floats of 4 bytes."""
        return self.ledger.units("statistics", dtype, direction) * self.shape.dim * dtype.itemsize / 4

    def row(self, dtype: torch.dtype) -> dict[str, str | float]:
        """As JSON holds it."""
        moved = {direction: self.rows(direction, dtype) for direction in ("forward", "backward")}
        floor = {f"floor {direction}": units for direction, units in self.operation.floor(self.shape).items()}
        case = {"operation": self.operation.name, "implementation": self.implementation, "shape": str(self.shape)}
        launches = {f"kernels {direction}": self.ledger.launches(direction)[0] for direction in moved}
        return case | moved | floor | {"kept": self.kept} | launches


def count_call(implementation: Implementation, operation: Operation, shape: Shape, dtype: torch.dtype) -> Call:
    """Check the result against float64, then count one forward and one backward.

    Raises:
        ArithmeticError: where the result is wrong.
    """
    ledger = Ledger(shape.tokens, shape.dim)
    function = implementation.operation(operation.name, norm=ledger.rms_norm)
    assert function is not None
    with peer(implementation.name):
        with KernelMode():
            verdict = verify_operation(operation.name, implementation, shape, dtype, "cpu")
        if verdict.wrong:
            raise ArithmeticError(f"{implementation.name} {operation.name} is wrong: {verdict.wrong}")
        inputs = make_inputs(operation, shape, dtype)
        with ledger.phase("forward"):
            outputs = function(**inputs)
        gradients = [g.to(out.dtype) for g, out in zip(upstream(outputs, shape, dtype), outputs, strict=True)]
        results = sum(out.numel() >= shape.tokens * shape.dim and out.numel() for out in outputs)
        kept = ledger.kept(dtype) - results / (shape.tokens * shape.dim)
        with ledger.phase("backward"):
            torch.autograd.grad(outputs, leaves(inputs), gradients)
    return Call(implementation.name, operation, shape, ledger, kept, verdict.worst)


def table(calls: Sequence[Call], dtype: torch.dtype) -> str:
    header = ("", "forward", "floor", "backward", "floor", "kept", "kernels", "PyTorch ops", "statistics", "error")
    rows = []
    for call in calls:
        floor = call.operation.floor(call.shape)
        directions = ("forward", "backward")
        rows.append(
            (
                f"{call.operation.name} {call.implementation}",
                *(x for d in directions for x in (number(call.rows(d, dtype)), str(floor[d]))),
                number(call.kept),
                *(" + ".join(str(call.ledger.launches(d)[i]) for d in directions) for i in (0, 1)),
                " + ".join(number(call.statistics_per_token(d, dtype), 2) for d in directions),
                f"{call.error:.0e}",
            )
        )
    return markdown(header, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", action="append", choices=REGISTRY)
    parser.add_argument("--operation", action="append", choices=OPERATIONS)
    parser.add_argument("--shape", action="append", help="sources x any number x dim [x queries]; may be given again")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--json", type=Path, help="write the table there, for bench.report")
    options = parser.parse_args(arguments)
    rows: list[dict] = []
    dtype = DTYPES[options.dtype]
    names = options.implementation or [name for name in REGISTRY if name not in NOT_COUNTED]
    print(environment.summary(environment.describe()))
    for shape in (Shape.parse(text) for text in options.shape or SHAPES):
        tokens = next_prime(TOKENS, shape.sources, shape.queries, shape.dim)
        shape = dataclasses.replace(shape, tokens=tokens)
        print(f"\n{shape}, {options.dtype}: row sets read and written\n")
        calls = list(_calls(names, options.operation or list(OPERATIONS), shape, dtype))
        print(table(calls, dtype), flush=True)
        rows += [call.row(dtype) for call in calls]
    environment.save(options.json, "traffic", rows)


def _calls(names: Sequence[str], operations: Sequence[str], shape: Shape, dtype: torch.dtype) -> Iterator[Call]:
    found = [find(name) for name in names]
    for missing in found:
        if isinstance(missing, Missing):
            print(f"{missing.name}: {missing.reason}")
    for operation in operations:
        for implementation in found:
            if isinstance(implementation, Missing) or implementation.operation(operation) is None:
                continue
            if dtype not in implementation.dtypes:
                print(f"{implementation.name}: {implementation.unsupported(implementation.devices[0], dtype)}")
                continue
            print(f"counting {operation} {implementation.name}", file=sys.stderr, flush=True)
            yield count_call(implementation, OPERATIONS[operation], shape, dtype)


if __name__ == "__main__":
    main()
