"""What every kernel would use on GPUs that are not here: registers, spills, shared memory, width of global accesses.

    python -m bench.resources                                          # everything that launch.py chooses: an hour
    python -m bench.resources --operation attn_res_forward --dim 7168 --target sm_90

The operations themselves are called, on small tensors in the CPU's memory, and what they launch is compiled for the
target instead of run: the report is about the launches that happen, not about a copy of their arguments. To report on
another operation, add a function to `OPERATIONS` that calls it.

Needs no driver. A process that interprets Triton cannot compile: `measure` starts another one there.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from blockres_kernels import aggregate, launch, step

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
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Shape:
    """One shape at which an operation is called. `queries` is for operations that take several."""

    dim: int
    sources: int
    dtype: str = "bfloat16"
    queries: int = 1
    norm: bool = True
    tokens: int = 16

    def row(self) -> torch.Tensor:
        return torch.empty(self.tokens, self.dim, dtype=DTYPES[self.dtype])

    def vector(self) -> torch.Tensor:
        return torch.empty(self.dim)


@dataclass(frozen=True)
class Usage:
    """What one launch uses.

    `spilled` and `shared` are in bytes, a thread's and a program's. `narrow`: accesses of vectors that are less than 16
    bytes wide. `doubles`: whether anything is computed in float64.
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
    doubles: bool
    accesses: dict[str, int]
    seconds: float


def _attn_res_forward(shape: Shape) -> None:
    aggregate.attn_res_forward(
        [shape.row() for _ in range(shape.sources)],
        shape.vector(),
        shape.vector(),
        shape.vector() if shape.norm else None,
        1e-6,
        1.0,
        1e-6,
        DTYPES[shape.dtype],
    )


def _attn_res_backward(shape: Shape) -> None:
    statistics = torch.empty(shape.sources, shape.tokens)
    aggregate.attn_res_backward(
        shape.row(),
        None,
        None,
        [shape.row() for _ in range(shape.sources)],
        shape.vector(),
        shape.vector(),
        shape.vector() if shape.norm else None,
        statistics[0],
        statistics,
        statistics,
        1e-6,
        1.0,
        1e-6,
        [True] * shape.sources,
    )


def _attn_res_step(shape: Shape) -> None:
    """The sum of the open block in the last of `shape.sources` slots, and those before it."""
    *_, open_block = bank = torch.empty(shape.sources, shape.tokens, shape.dim, dtype=DTYPES[shape.dtype])
    step.attn_res_step(
        bank[:-1],
        open_block,
        shape.row(),
        open_block,
        shape.row(),
        shape.vector(),
        shape.vector(),
        shape.vector() if shape.norm else None,
        1e-6,
        1.0,
        1e-6,
    )


OPERATIONS: dict[str, Callable[[Shape], None]] = {
    "attn_res_forward": _attn_res_forward,
    "attn_res_backward": _attn_res_backward,
    "attn_res_step": _attn_res_step,
}


def measure(shapes: Iterable[tuple[str, Shape]], targets: Sequence[str]) -> list[Usage]:
    """Compile what each (operation, shape) launches, for each target; identical launches once."""
    if not os.environ.get("TRITON_INTERPRET"):
        return list(_measure(shapes, targets))
    request = json.dumps([[operation, asdict(shape)] for operation, shape in shapes])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.resources", "--json", *itertools.chain(*(("--target", t) for t in targets))]
    run = subprocess.run(command, input=request, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"compiling failed:\n{run.stderr}")
    return [Usage(**{**usage, "shape": Shape(**usage["shape"])}) for usage in json.loads(run.stdout)]


def _measure(shapes: Iterable[tuple[str, Shape]], targets: Sequence[str]) -> Iterator[Usage]:
    seen = set()
    for (operation, shape), target in itertools.product(list(shapes), targets):
        for launched in _launches_of(operation, shape, TARGETS[target]):
            source, options, key = _specialized(launched, TARGETS[target])
            if (key, target) not in seen:
                seen.add((key, target))
                yield _compile(operation, shape, target, source, options)


@dataclass(frozen=True)
class _Launch:
    kernel: JITFunction
    args: tuple
    kwargs: dict[str, Any]


def _launches_of(operation: str, shape: Shape, target: GPUTarget) -> list[_Launch]:
    launches: list[_Launch] = []

    def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(_Launch(kernel, args, kwargs))

    with _replaced(JITFunction, "run", record), _replaced(launch, "lanes", lambda: target.warp_size):
        OPERATIONS[operation](shape)
    return launches


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _specialized(launched: _Launch, target: GPUTarget) -> tuple[ASTSource, dict[str, Any], str]:
    """What Triton would compile for these arguments, the options, and a key that identical launches share."""
    backend, kernel = make_backend(target), launched.kernel
    kwargs = {"debug": False, "instrumentation_mode": "", **launched.kwargs}
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(*launched.args, **kwargs)
    parsed, signature, constants, attributes = kernel._pack_args(backend, kwargs, bound, specialization, options)
    key = f"{kernel.fn.__qualname__} {specialization} {options}"
    return ASTSource(kernel, signature, constants, attributes), parsed.__dict__, key


def _compile(operation: str, shape: Shape, target: str, source: ASTSource, options: dict[str, Any]) -> Usage:
    start = time.perf_counter()
    kernel = triton.compile(source, target=TARGETS[target], options=options)
    seconds = time.perf_counter() - start
    registers, spilled = _amd_registers(kernel) if target.startswith("gfx") else _nvidia_registers(kernel)
    accesses = _accesses(kernel)
    return Usage(
        operation,
        shape,
        target,
        source.fn.fn.__name__,
        kernel.metadata.num_warps,
        registers,
        spilled,
        kernel.metadata.shared,
        _narrow_vector_accesses(accesses, kernel.asm["ttgir"]),
        "f64" in kernel.asm["ttgir"],
        accesses,
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


def _accesses(kernel: Any) -> dict[str, int]:
    """How often each width of global access, in bytes, is in the code (`16 load`: 40)."""
    found: Counter[str] = Counter()
    if "ptx" in kernel.asm:
        for kind, vector, bits in re.findall(r"\b(ld|st)\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", kernel.asm["ptx"]):
            found[f"{int(vector or 1) * int(bits) // 8} {kind}"] += 1
        return dict(found)
    widths = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "short": 2, "ushort": 2, "byte": 1, "ubyte": 1}
    pattern = r"\b(?:global|buffer)_(load|store)_(dwordx?\d?|u?short|u?byte)"
    for kind, width in re.findall(pattern, kernel.asm["amdgcn"]):
        found[f"{widths[width]} {kind[:2].replace('lo', 'ld')}"] += 1
    return dict(found)


def _narrow_vector_accesses(accesses: dict[str, int], ttgir: str) -> int:
    """Accesses below 16 bytes, less those of single numbers, of which the IR has exactly as many as the assembly."""
    narrow = sum(count for width, count in accesses.items() if int(width.split()[0]) < 16)
    single = len(re.findall(r"tt\.(?:load|store) .*: !tt\.ptr<", ttgir))
    return max(narrow - single, 0)


def all_shapes(
    operations: Sequence[str], dims: Sequence[int], sources: Sequence[int], dtypes: Sequence[str]
) -> Iterator:
    for operation, dim, count, dtype, norm in itertools.product(operations, dims, sources, dtypes, (False, True)):
        queries = QUERIES if "inter" in operation else (1,)
        for number in queries:
            yield operation, Shape(dim, count, dtype, number, norm)


def _print_table(usages: Iterable[Usage]) -> None:
    columns = "{:<24}{:<30}{:>6}{:>4}{:>9} {:<8}{:<8}{:>6}{:>10}{:>8}{:>8}{:>7}  {}"
    heads = (
        "operation",
        "kernel",
        "D",
        "n",
        "dtype",
        "norm",
        "target",
        "warps",
        "registers",
        "spilled",
        "shared",
        "narrow",
    )
    print(columns.format(*heads, "accesses"))
    for u in usages:
        s = u.shape
        accesses = " ".join(f"{width}:{count}" for width, count in sorted(u.accesses.items()))
        row = (u.operation, u.kernel, s.dim, s.sources, s.dtype, s.norm, u.target, u.warps)
        print(columns.format(*map(str, (*row, u.registers, u.spilled, u.shared, u.narrow, accesses))), flush=True)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operation", action="append", choices=OPERATIONS, help="default: all")
    parser.add_argument("--dim", action="append", type=int, help=f"default: {DIMS}")
    parser.add_argument("--sources", action="append", type=int, help=f"default: {SOURCES}")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="default: all")
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--json", action="store_true", help="read (operation, shape) pairs from stdin, answer in JSON")
    given = parser.parse_args()
    targets = given.target or list(TARGETS)
    if given.json:
        request = [(operation, Shape(**shape)) for operation, shape in json.load(sys.stdin)]
        json.dump([asdict(usage) for usage in _measure(request, targets)], sys.stdout)
        return
    shapes = all_shapes(
        given.operation or list(OPERATIONS), given.dim or DIMS, given.sources or SOURCES, given.dtype or list(DTYPES)
    )
    _print_table(_measure(shapes, targets))


if __name__ == "__main__":
    _main()
