"""Registers, spills and access widths of other packages' kernels beside blockres's, compiled for a GPU that is not
here.

    python -m bench.peer_resources --target sm_90 --shape 9x16x7168x4

Forward and backward of every operation that a package has are called, and what they launch is compiled instead of run,
as `bench.resources` does for blockres. Where a package leaves the choice between several configurations to the moment
it first runs on a GPU, the one shown is the first of its list that does not spill, or the one that spills least.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import environment, resources
from bench.cases import OPERATIONS, Operation, Shape, leaves, make_inputs
from bench.implementations import Implementation, find
from bench.interpreted import PEER_MODULES, KernelMode, configurations, peer
from bench.launches import Launch, recorded
from bench.tables import markdown

SHAPES = ("9x16x1024x4", "9x16x4096x4")
FIGURES = ("warps", "registers", "spilled bytes", "shared bytes", "accesses < 16 bytes")
NAMES = ("blockres", *PEER_MODULES)


def usages(implementation: Implementation, shape: Shape, target: str) -> Iterator[resources.Usage]:
    """One for each launch of the operations, bfloat16."""
    for operation in OPERATIONS.values():
        if implementation.operation(operation.name) is not None:
            yield from _least_spilling(implementation, operation, shape, target)


def _least_spilling(
    implementation: Implementation, operation: Operation, shape: Shape, target: str
) -> list[resources.Usage]:
    found: list[resources.Usage] = []
    for configuration in range(configurations(implementation.name)):
        launches = _launches(implementation, operation, shape, target, configuration)
        if not found:
            found = [_compiled(launched, operation, shape, target) for launched in launches]
        for i, launched in enumerate(launches):
            if configuration and found[i].spilled:
                another = _compiled(launched, operation, shape, target)
                found[i] = min(found[i], another, key=lambda usage: usage.spilled)
        if not any(usage.spilled for usage in found):
            break
    return found


def _launches(
    implementation: Implementation, operation: Operation, shape: Shape, target: str, configuration: int
) -> list[Launch]:
    with peer(implementation.name, configuration), KernelMode():
        return recorded(partial(_train, implementation, operation, shape), resources.TARGETS[target].warp_size)


def _compiled(launched: Launch, operation: Operation, shape: Shape, target: str) -> resources.Usage:
    source, options, _ = resources.specialized(launched, resources.TARGETS[target])
    shown = resources.Shape(shape.dim, shape.sources)
    return resources.usage_of(operation.name, shown, target, source, options, launched.rows)


def _train(implementation: Implementation, operation: Operation, shape: Shape) -> None:
    function = implementation.operation(operation.name)
    assert function is not None
    inputs = make_inputs(operation, shape, torch.bfloat16)
    outputs = function(**inputs)
    torch.autograd.grad(outputs, leaves(inputs), [torch.empty_like(out) for out in outputs], allow_unused=True)


def rows_of(implementation: Implementation, shape: Shape, target: str) -> list[dict[str, Any]]:
    """As JSON holds them; what is launched for several operations alike is there for each, but once."""
    rows = [
        {"implementation": implementation.name, "dim": shape.dim, "sources": shape.sources, "target": target}
        | {"operation": u.operation, "kernel": u.kernel}
        | dict(zip(FIGURES, (u.warps, u.registers, u.spilled, u.shared, u.narrow), strict=True))
        for u in usages(implementation, shape, target)
    ]
    return [row for i, row in enumerate(rows) if row not in rows[:i]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", action="append", choices=NAMES)
    parser.add_argument("--shape", action="append", help="sources x tokens x dim x queries; may be given again")
    parser.add_argument("--target", choices=resources.TARGETS, default="sm_90")
    parser.add_argument("--json", type=Path, help="write the table there, for bench.report")
    options = parser.parse_args(arguments)
    print(f"{environment.summary(environment.describe())}; compiled for {options.target}, bfloat16\n", flush=True)
    rows = []
    for name in options.implementation or NAMES:
        implementation = find(name)
        if not isinstance(implementation, Implementation):
            print(f"{name}: {implementation.reason}")
            continue
        for shape in map(Shape.parse, options.shape or SHAPES):
            print(f"compiling {name}, {shape}", file=sys.stderr, flush=True)
            found = rows_of(implementation, shape, options.target)
            cells = [(f"{row['operation']} {row['kernel']}", *(row[figure] for figure in FIGURES)) for row in found]
            print(markdown((f"{name}, D = {shape.dim}", *FIGURES), cells) + "\n", flush=True)
            rows += found
            environment.save(options.json, "resources", rows)


if __name__ == "__main__":
    main()
