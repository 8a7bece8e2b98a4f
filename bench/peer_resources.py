"""Registers, spills and access widths of the kernels of other packages, compiled for a GPU that is not here.

    python -m bench.peer_resources --target sm_90 --shape 9x16x7168x4

Forward and backward of every operation that a package has are called, and what they launch is compiled instead of run,
as
`bench.resources` does for blockres. Where a package leaves the choice between several configurations to the moment it
first runs on a GPU, the one shown is the first of its list.
"""

import argparse
from collections.abc import Iterator, Sequence

import torch

from bench import resources
from bench.cases import OPERATIONS, Operation, Shape, leaves, make_inputs
from bench.implementations import Implementation, find
from bench.interpreted import PEER_MODULES, KernelMode, peer
from bench.tables import markdown

SHAPES = ("9x16x1024x4", "9x16x4096x4")
HEADER = ("warps", "registers", "spilled bytes", "shared bytes", "accesses < 16 bytes")


def usages(implementation: Implementation, shape: Shape, target: str) -> Iterator[resources.Usage]:
    """One for each different kernel that the operations launch, bfloat16."""
    for operation in OPERATIONS.values():
        if implementation.operation(operation.name) is not None:
            launches: list[resources._Launch] = []
            with (
                peer(implementation.name),
                KernelMode(),
                resources._launching_replaced_by(
                    lambda *launch, into=launches: into.append(resources._Launch(*launch))
                ),
            ):
                _train(implementation, operation, shape)
            for launch in launches:
                source, options, _ = resources._specialized(launch, resources.TARGETS[target])
                yield resources._compile(
                    operation.name, resources.Shape(shape.dim, shape.sources), target, source, options
                )


def _train(implementation: Implementation, operation: Operation, shape: Shape) -> None:
    function = implementation.operation(operation.name)
    assert function is not None
    inputs = make_inputs(operation, shape, torch.bfloat16)
    outputs = function(**inputs)
    torch.autograd.grad(outputs, leaves(inputs), [torch.empty_like(out) for out in outputs], allow_unused=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", action="append", choices=PEER_MODULES)
    parser.add_argument("--shape", action="append", help="sources x tokens x dim x queries; may be given again")
    parser.add_argument("--target", choices=resources.TARGETS, default="sm_90")
    options = parser.parse_args(arguments)
    print(f"{options.target}, bfloat16\n", flush=True)
    for name in options.implementation or PEER_MODULES:
        implementation = find(name)
        if not isinstance(implementation, Implementation):
            print(f"{name}: {implementation.reason}")
            continue
        for shape in map(Shape.parse, options.shape or SHAPES):
            rows = [
                (f"{u.operation} {u.kernel}", u.warps, u.registers, u.spilled, u.shared, u.narrow)
                for u in usages(implementation, shape, options.target)
            ]
            print(markdown((f"{name}, D = {shape.dim}", *HEADER), list(dict.fromkeys(rows))) + "\n", flush=True)


if __name__ == "__main__":
    main()
