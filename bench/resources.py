"""What every kernel would use on GPUs that are not here: registers, spills, shared memory, width of global accesses.

    python -m bench.resources                                          # everything that launch.py chooses: hours
    python -m bench.resources --operation attn_res_forward --dim 7168 --target sm_90
    python -m bench.resources --operation attn_res_inter_backward --minutes 10

The operations themselves are called, on small tensors in the CPU's memory, and what they launch is compiled for the
target instead of run (`bench.launches`): the report is about the launches that happen, not about a copy of their
arguments. The extremes of every axis come first, then the rest in an order that is mixed but always the same, so that
a sweep that is cut short has seen something of everything. What a former one has compiled comes from Triton's cache.

Needs no driver. A process that interprets Triton cannot compile: `measure` starts another one there.
"""

import argparse
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from bench import access
from bench.launches import DTYPES, OPERATIONS, Launch, Shape, launches_of, variants
from bench.tables import markdown

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMITS = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
"""Bytes that one program may have."""

DIMS = (768, 1024, 2048, 4096, 5120, 7168, 8192, 16384)
SOURCES = (1, 2, 5, 9, 16)
QUERIES = (4, 12, 16, 24)
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Usage:
    """What one launch uses.

    `spilled` and `shared` are in bytes, a thread's and a program's. `narrow`: accesses of vectors that are less than 16
    bytes wide; `row_access`: the narrowest of those to tensors `[T, D]`, in bytes, None where there are none.
    `doubles`: whether anything is computed in float64.
    """

    operation: str
    shape: Shape
    target: str
    kernel: str
    warps: int
    registers: int
    spilled: int
    shared: int
    narrow: int
    row_access: int | None
    doubles: bool
    accesses: dict[str, int]
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether nothing spills, rows are accessed 16 bytes at a time, and a program has the memory it shares."""
        wide = self.row_access is None or self.row_access >= 16
        return not self.spilled and wide and self.shared <= SHARED_LIMITS[self.target]


def measure(shapes: Iterable[tuple[str, Shape]], targets: Sequence[str]) -> list[Usage]:
    """Compile what each (operation, shape) launches, for each target; identical launches once."""
    if not os.environ.get("TRITON_INTERPRET"):
        return list(compiled(shapes, targets))
    request = json.dumps([[operation, asdict(shape)] for operation, shape in shapes])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.resources", "--json", *itertools.chain(*(("--target", t) for t in targets))]
    run = subprocess.run(command, input=request, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"compiling failed:\n{run.stderr}")
    return [Usage(**{**usage, "shape": Shape(**usage["shape"])}) for usage in json.loads(run.stdout)]


def compiled(shapes: Iterable[tuple[str, Shape]], targets: Sequence[str]) -> Iterator[Usage]:
    """As `measure`, one after the other, in this process."""
    seen = set()
    for operation, shape in shapes:
        for target in targets:
            for launched in launches_of(operation, shape, TARGETS[target].warp_size):
                source, options, key = specialized(launched, TARGETS[target])
                if (key, target) not in seen:
                    seen.add((key, target))
                    yield usage_of(operation, shape, target, source, options, launched.rows)


def specialized(launched: Launch, target: GPUTarget) -> tuple[ASTSource, dict[str, Any], str]:
    """What Triton would compile for these arguments, the options, and a key that identical launches share."""
    backend, kernel = make_backend(target), launched.kernel
    kwargs = {"debug": False, "instrumentation_mode": "", **launched.kwargs}
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(*launched.args, **kwargs)
    parsed, signature, constants, attributes = kernel._pack_args(backend, kwargs, bound, specialization, options)
    key = f"{kernel.fn.__qualname__} {specialization} {options}"
    return ASTSource(kernel, signature, constants, attributes), parsed.__dict__, key


def usage_of(
    operation: str, shape: Shape, target: str, source: ASTSource, options: dict[str, Any], rows: frozenset[str]
) -> Usage:
    """Compile one launch, whose arguments `rows` hold tensors `[T, D]`."""
    start = time.perf_counter()
    kernel = triton.compile(source, target=TARGETS[target], options=options)
    seconds = time.perf_counter() - start
    registers, spilled = _amd_registers(kernel) if target.startswith("gfx") else _nvidia_registers(kernel)
    return Usage(
        operation,
        shape,
        target,
        source.fn.fn.__name__,
        kernel.metadata.num_warps,
        registers,
        spilled,
        kernel.metadata.shared,
        access.narrow_vector_accesses(kernel),
        access.narrowest_row_access(kernel, rows),
        "f64" in kernel.asm["ttgir"],
        access.accesses(kernel),
        round(seconds, 2),
    )


def _nvidia_registers(kernel: Any) -> tuple[int, int]:
    """Registers, and bytes of stack (none of these kernels has a local array: a stack is spilled registers)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        said = subprocess.run([_CUOBJDUMP, "-res-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2])


def _amd_registers(kernel: Any) -> tuple[int, int]:
    assembly = kernel.asm["amdgcn"]
    used, spilled = (re.search(rf"\.{name}:\s+(\d+)", assembly) for name in ("vgpr_count", "vgpr_spill_count"))
    assert used, "no register count in the assembly"
    assert spilled, "no spill count in the assembly"
    return int(used[1]), 4 * int(spilled[1])


def all_shapes(
    operations: Sequence[str],
    dims: Sequence[int] = DIMS,
    sources: Sequence[int] = SOURCES,
    queries: Sequence[int] = QUERIES,
    dtypes: Sequence[str] = tuple(DTYPES),
) -> list[tuple[str, Shape]]:
    """Operations at every shape: extremes first, then the others, mixed."""
    axes = (dims, sources, queries)
    found: dict[tuple[str, Shape], bool] = {}
    for sizes in itertools.product(*axes):
        extreme = all(size in (axis[0], axis[-1]) for size, axis in zip(sizes, axes, strict=True))
        for operation, dtype in itertools.product(operations, dtypes):
            for shape in variants(operation, Shape(sizes[0], sizes[1], dtype, sizes[2])):
                found.setdefault((operation, shape), extreme)
    ordered = list(found)
    random.Random(0).shuffle(ordered)
    return sorted(ordered, key=lambda case: not found[case])


_COLUMNS = "{:<24}{:<32}{:>6}{:>4}{:>4}{:>9}{:>9} {:<6}{:<6}{:<8}{:>6}{:>10}{:>8}{:>8}{:>5}  {}"
_HEADS = ("operation", "kernel", "D", "n", "S", "dtype", "stream", "norm", "adds", "target", "warps", "registers")


def line(u: Usage) -> str:
    s = u.shape
    widths = " ".join(f"{width}:{count}" for width, count in sorted(u.accesses.items()))
    shape = (s.dim, s.sources, s.queries, s.dtype, s.stream or "", s.norm, s.adds)
    used = (u.warps, u.registers, u.spilled, u.shared, u.row_access, widths)
    return _COLUMNS.format(*map(str, (u.operation, u.kernel, *shape, u.target, *used)))


def summary(usages: Sequence[Usage]) -> str:
    """The worst of everything, for each operation and target."""
    numbers = ("registers", "spilled", "shared")
    header = ("operation", "target", "launches", *numbers, "row access", "do not fit", "float64")
    groups: dict[tuple[str, str], list[Usage]] = {}
    for usage in usages:
        groups.setdefault((usage.operation, usage.target), []).append(usage)
    rows = [
        (
            *group,
            len(found),
            *(max(getattr(u, name) for u in found) for name in numbers),
            min((u.row_access for u in found if u.row_access is not None), default="-"),
            sum(not u.fits for u in found),
            sum(u.doubles for u in found),
        )
        for group, found in groups.items()
    ]
    return markdown(header, rows)


def _sweep(shapes: Sequence[tuple[str, Shape]], targets: Sequence[str], minutes: float, failures: bool) -> list[Usage]:
    """Print what does not fit, or everything, until the time is up."""
    usages: list[Usage] = []
    stop = time.monotonic() + 60 * minutes
    progress = tqdm(shapes, unit="shape", file=sys.stderr)
    for usage in compiled(itertools.takewhile(lambda _: time.monotonic() < stop, progress), targets):
        usages.append(usage)
        progress.set_postfix_str(f"{len(usages)} launches, {sum(not u.fits for u in usages)} do not fit")
        if not failures or not usage.fits:
            tqdm.write(line(usage), file=sys.stdout)
            sys.stdout.flush()
    return usages


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operation", action="append", choices=OPERATIONS, help="default: all")
    parser.add_argument("--dim", action="append", type=int, help=f"default: {DIMS}")
    parser.add_argument("--sources", action="append", type=int, help=f"default: {SOURCES}")
    parser.add_argument("--queries", action="append", type=int, help=f"default: {QUERIES}")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="default: all")
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many; default: never")
    parser.add_argument("--failures", action="store_true", help="print only what does not fit, and the summary")
    parser.add_argument("--json", action="store_true", help="read (operation, shape) pairs from stdin, answer in JSON")
    given = parser.parse_args()
    targets = given.target or list(TARGETS)
    if given.json:
        request = [(operation, Shape(**shape)) for operation, shape in json.load(sys.stdin)]
        json.dump([asdict(usage) for usage in compiled(request, targets)], sys.stdout)
        return
    shapes = all_shapes(
        given.operation or list(OPERATIONS),
        given.dim or DIMS,
        given.sources or SOURCES,
        given.queries or QUERIES,
        given.dtype or list(DTYPES),
    )
    print(_COLUMNS.format(*_HEADS, "spilled", "shared", "row", "accesses"), flush=True)
    print("\n" + summary(_sweep(shapes, targets, given.minutes, given.failures)))


if __name__ == "__main__":
    _main()
