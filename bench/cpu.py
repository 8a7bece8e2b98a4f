"""blockres on a CPU against the textbook formula, eager and compiled.

    python -m bench.cpu                        # float32 and bfloat16, 1024 and 8192 tokens, 1 and 2 threads
    python -m bench.cpu --tokens 1024 --dtype float32 --implementation blockres --implementation eager
    python -m bench.cpu --allocator keep       # freed memory is used again, for all alike

One aggregation over 8 sources of width 1024, forward and backward. The implementations and a copy of the sources take
turns within each round, in one process for each number of threads; the copy goes into new memory, as results do.
`copies` is the time of forward and backward over that of the copy. `peak` is the most memory that was resident, over
inputs, outputs, gradients and saved statistics together. Compiling is timed apart, as the first call.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import environment
from bench.cases import DTYPES, OPERATIONS, Shape, leaves, make_inputs, upstream, verify
from bench.implementations import Implementation, find
from bench.memory import peak_growth
from bench.tables import markdown, number
from bench.timing import spread

NAMES = ("blockres", "eager", "compiled")
SOURCES, DIM = 8, 1024
OPERATION = OPERATIONS["attn_res"]


class Contender:
    """One implementation at one shape, ready to run."""

    def __init__(self, name: str, shape: Shape, dtype: torch.dtype) -> None:
        implementation = find(name)
        assert isinstance(implementation, Implementation)
        function = implementation.operation(OPERATION.name)
        assert function is not None
        self.name, self._function = name, function
        self._inputs = make_inputs(OPERATION, shape, dtype)
        self._gradient = upstream([self._inputs["sources"][0]], shape, dtype)
        start = time.perf_counter()
        self.run()
        self.first_call = time.perf_counter() - start
        self.error = verify(OPERATION, function, shape, dtype, "cpu")
        self.forward: list[float] = []
        self.backward: list[float] = []

    def run(self) -> tuple[float, float]:
        start = time.perf_counter()
        outputs = self._function(**self._inputs)
        middle = time.perf_counter()
        gradients = torch.autograd.grad(outputs, leaves(self._inputs), self._gradient)
        stop = time.perf_counter()
        del outputs, gradients
        return middle - start, stop - middle

    def time(self) -> None:
        forward, backward = self.run()
        self.forward.append(forward)
        self.backward.append(backward)

    def peak(self, shape: Shape, dtype: torch.dtype) -> float:
        """Most resident memory over what has to be there: inputs, upstream, output, gradients, two statistics each."""
        needed = (2 * shape.sources + 2) * shape.rows(dtype) + (2 * shape.sources + 1) * shape.tokens * 4
        held = (shape.sources + 1) * shape.rows(dtype)
        with peak_growth() as grown:
            self.run()
        return (held + grown.growth) / needed


def measure(names: Sequence[str], tokens: int, dtype_name: str, rounds: int, allocator: str) -> list[dict[str, Any]]:
    """One row for each implementation, all of them in turn with the copy. `allocator` is how this process runs."""
    shape, dtype = Shape(SOURCES, tokens, DIM), DTYPES[dtype_name]
    contenders = [Contender(name, shape, dtype) for name in names]
    for contender in contenders:
        if contender.error.wrong:
            raise ArithmeticError(f"{contender.name} is wrong: {contender.error.wrong}")
    source = torch.ones(SOURCES, tokens, DIM, dtype=dtype)
    copies = []
    for _ in range(rounds):
        for contender in contenders:
            contender.time()
        copies.append(_timed_copy(source))
    peaks = {contender.name: contender.peak(shape, dtype) for contender in contenders}
    return [_row(c, statistics.median(copies), peaks[c.name], tokens, dtype_name, allocator) for c in contenders]


def _timed_copy(source: Tensor) -> float:
    """Into new memory: every implementation has to get its results from the allocator too."""
    start = time.perf_counter()
    copy = source.clone()
    stop = time.perf_counter()
    del copy
    return stop - start


def _row(contender: Contender, copy: float, peak: float, tokens: int, dtype: str, allocator: str) -> dict[str, Any]:
    both = [forward + backward for forward, backward in zip(contender.forward, contender.backward, strict=True)]
    return {
        "implementation": contender.name,
        "dtype": dtype,
        "tokens": tokens,
        "threads": torch.get_num_threads(),
        "allocator": allocator,
        "ms forward": statistics.median(contender.forward) * 1e3,
        "ms backward": statistics.median(contender.backward) * 1e3,
        "ms": statistics.median(both) * 1e3,
        "copies": statistics.median(both) / copy,
        "spread": spread(both),
        "peak": peak,
        "first call s": contender.first_call,
        "error": contender.error.worst,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    header = (
        "",
        "allocator",
        "ms forward",
        "backward",
        "both",
        "copies",
        "eager / this",
        "2 threads / 1",
        "spread",
        "peak",
        "first call s",
    )
    by_case = {(r["implementation"], r["allocator"], r["dtype"], r["tokens"], r["threads"]): r["ms"] for r in rows}
    lines = []
    for r in rows:
        case = (r["allocator"], r["dtype"], r["tokens"])
        eager = by_case.get(("eager", *case, r["threads"]))
        single = by_case.get((r["implementation"], *case, 1))
        lines.append(
            (
                f"{r['dtype']} T {r['tokens']} threads {r['threads']} {r['implementation']}",
                r["allocator"],
                *(number(r[key]) for key in ("ms forward", "ms backward", "ms", "copies")),
                number(eager and eager / r["ms"]),
                number(single / r["ms"] if single and r["threads"] > 1 else None),
                f"{r['spread']:.0%}",
                f"{r['peak']:.2f}",
                number(r["first call s"], 2),
            )
        )
    return markdown(header, lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", action="append", choices=NAMES)
    parser.add_argument("--tokens", action="append", type=int)
    parser.add_argument("--dtype", action="append", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", action="append", type=int)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--allocator", choices=("default", "keep"), default="default")
    parser.add_argument("--json", type=Path, help="write the table there, for bench.report")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        json.dump(_work(options), sys.stdout)
        return
    rows = [row for threads in options.threads or (1, 2) for row in _in_a_process(options, threads)]
    print(environment.summary(environment.describe()) + f"; allocator: glibc, {options.allocator}\n\n{table(rows)}")
    environment.save(options.json, "cpu", rows)


def _in_a_process(options: argparse.Namespace, threads: int) -> list[dict[str, Any]]:
    """The rows for a number of threads: what is compiled for one number does not serve another.

    Nor does what was compiled before: the first call shows what compiling takes.
    """
    command = [sys.executable, "-m", "bench.cpu", "--worker", f"--rounds={options.rounds}"]
    command.append(f"--allocator={options.allocator}")
    for flag in ("implementation", "tokens", "dtype"):
        command += [f"--{flag}={value}" for value in getattr(options, flag) or ()]
    variables = {"OMP_NUM_THREADS": str(threads)}
    if options.allocator == "keep":
        variables["GLIBC_TUNABLES"] = environment.KEEP_MEMORY
    with tempfile.TemporaryDirectory() as folder:
        variables["TORCHINDUCTOR_CACHE_DIR"] = folder
        run = subprocess.run(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout)


def _work(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for dtype in options.dtype or ("float32", "bfloat16"):
        for tokens in options.tokens or (1024, 8192):
            print(f"threads {torch.get_num_threads()}, {dtype}, {tokens} tokens", file=sys.stderr, flush=True)
            rows += measure(options.implementation or NAMES, tokens, dtype, options.rounds, options.allocator)
    return rows


if __name__ == "__main__":
    main()
