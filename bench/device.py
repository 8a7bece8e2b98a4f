"""Everything that needs a GPU, in one run of at most five minutes; the short table comes last.

    python -m bench.device                       # all that is installed
    python -m bench.device --implementation blockres --implementation fla-core
    python -m bench.device --dry-run             # no GPU: the same path in Triton's interpreter, tiny, nothing timed

First every operation of blockres against float64 at eight shapes. Then times: each operation at the shapes given,
forward and backward, beside the packages that are installed, as milliseconds, GB/s of the bytes that it must move, and
fraction of the copy bandwidth of the same minutes; then a whole training stack, and decoding as a CUDA graph. See
`bench.timing` for how a time is taken. Packages that choose among many configurations when they first run need most of
the time for that; what the budget does not reach is listed, and a second run with --implementation gets there, since
Triton keeps what it has compiled. Ends with 0, with 1 where there is no GPU, with 2 where a result of blockres was
wrong.
"""

import argparse
import contextlib
import dataclasses
import gc
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import environment
from bench.cases import DIRECTIONS, DTYPES, OPERATIONS, Shape
from bench.decoding import VARIANTS, decoding_bytes, decoding_work, verify_decoding
from bench.implementations import REGISTRY, Implementation, Missing, find
from bench.streams import StackShape
from bench.tables import markdown, number
from bench.timing import Timing, Work, measure
from bench.work import (
    operation_work,
    stack_floor,
    stack_work,
    standard_floor,
    verify_operation,
    verify_stack,
    wrong_stack,
)

CHECKED = (
    "1x7x100x2",
    "2x129x768x4",
    "5x1000x1024x12",
    "9x512x2048x16",
    "9x257x4096x16",
    "9x128x7168x16",
    "33x65x1024x8",
    "17x64x8192x4",
)
TIMED = ("9x8192x4096x16", "9x8192x7168x16")  # a width that every package takes, then that of the goals
STACK = "128x16x4096x4096"
DECODED = ("128x16x1x4096", "128x16x32x4096")
DRY_CHECKED, DRY_TIMED, DRY_STACK, DRY_DECODED = ("3x3x20x2",), ("2x3x64x2",), "3x2x3x64", ("3x2x2x64",)
GOALS = {"forward": 0.90, "backward": 0.85}
ORDER = (
    "blockres",
    "fla-core",
    "fast-attnres",
    "flash-attn-res",
    "liger-kernel",
    "fla-core level 0",
    "eager",
    "compiled",
)
CHECK_TOKENS, STACK_CHECK_TOKENS = 512, 64  # for the check before a time is taken, whose float64 graphs are large


class Run:
    """Results so far, and the time that is left for more."""

    def __init__(self, device: str, budget: float, seconds: float) -> None:
        self.device, self.seconds = device, seconds
        self._stop = time.monotonic() + budget
        self.rows: list[dict[str, Any]] = []
        self.wrong: list[str] = []
        self.skipped: list[str] = []

    def attempt(self, label: str, name: str, work: Callable[[], dict[str, Any]], **facts: Any) -> None:
        """Do it if there is time; whatever happens becomes a row."""
        if time.monotonic() > self._stop:
            self.skipped.append(label)
            return
        started = time.monotonic()
        try:
            with _interpreted(name, self.device):
                result = work()
        except Exception as error:
            if name == "blockres":
                traceback.print_exc()
                self.wrong.append(f"{label}: {type(error).__name__}: {error}")
            result = {"problem": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]}
        if name == "blockres" and result.get("problem", "").startswith("wrong"):
            self.wrong.append(f"{label}: {result['problem']}")
        self.rows.append({"label": label, "implementation": name} | facts | result)
        outcome = result.get("problem") or result.get("said", "")
        print(f"{label:<60} {outcome}  ({time.monotonic() - started:.1f} s)", flush=True)
        if self.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def time(self, make: Callable[[int], Work], nbytes: int) -> dict[str, Any]:
        """Time it; without a GPU, only run it."""
        if self.device == "cpu":
            work = make(0)
            work.run(work.prepare())
            return {"said": "ran"}
        torch.cuda.reset_peak_memory_stats()
        timing = measure(make, nbytes, "cuda", self.seconds)
        return _figures(timing, nbytes) | {"peak_memory": torch.cuda.max_memory_allocated()}


def _figures(timing: Timing, nbytes: int) -> dict[str, Any]:
    fraction = 1 / timing.times_copy(nbytes)
    return {
        "ms": timing.median * 1e3,
        "gb_per_s": timing.bandwidth(nbytes) / 1e9,
        "copy_gb_per_s": timing.copy_bandwidth / 1e9,
        "fraction_of_copy": fraction,
        "spread": timing.spread,
        "said": f"{timing.median * 1e3:.3f} ms, {timing.bandwidth(nbytes) / 1e9:.0f} GB/s, {fraction:.2f} of the copy",
    }


@contextlib.contextmanager
def _interpreted(name: str, device: str):
    if device == "cuda":
        yield
        return
    from bench.interpreted import KernelMode, peer

    with peer(name), KernelMode():
        yield


def check_operations(run: Run, shapes: Sequence[str]) -> None:
    implementation = find("blockres")
    assert isinstance(implementation, Implementation)
    for operation in OPERATIONS:
        for shape in shapes:
            for dtype in ("bfloat16", "float32"):

                def work(operation: str = operation, shape: str = shape, dtype: str = dtype) -> dict[str, Any]:
                    verdict = verify_operation(operation, implementation, Shape.parse(shape), DTYPES[dtype], run.device)
                    if verdict.wrong:
                        return {"problem": f"wrong: {verdict.wrong}"}
                    return {"error": verdict.worst, "said": f"right, worst error {verdict.worst:.1e}"}

                run.attempt(f"check {operation} {shape} {dtype}", "blockres", work, part="check", dtype=dtype)


def time_operations(run: Run, implementation: Implementation, shapes: Sequence[str]) -> None:
    for shape in map(Shape.parse, shapes):
        for operation in OPERATIONS:
            if implementation.operation(operation) is not None:
                for direction in DIRECTIONS:
                    _time_operation(run, implementation, operation, direction, shape)


def _time_operation(run: Run, implementation: Implementation, operation: str, direction: str, shape: Shape) -> None:
    dtype = torch.bfloat16
    nbytes = OPERATIONS[operation].bytes(shape, dtype, direction)

    def work() -> dict[str, Any]:
        small = dataclasses.replace(shape, tokens=min(shape.tokens, CHECK_TOKENS))
        verdict = verify_operation(operation, implementation, small, dtype, run.device)
        if verdict.wrong:
            return {"problem": f"wrong: {verdict.wrong}"}
        return run.time(operation_work(operation, implementation, direction, shape, dtype, run.device), nbytes)

    run.attempt(
        f"{operation} {direction} {shape} {implementation.name}",
        implementation.name,
        work,
        part="operation",
        operation=operation,
        direction=direction,
        shape=str(shape),
    )


def time_stacks(run: Run, implementation: Implementation, stack: str) -> None:
    variants: list[tuple[str, Implementation | str, bool]] = [(implementation.name, implementation, False)]
    if implementation.name == "blockres":
        variants += [("blockres, recompute", implementation, True), ("standard", "standard", False)]
    for label, who, recompute in variants:
        for direction in DIRECTIONS:
            _time_stack(run, label, who, direction, StackShape.parse(stack), recompute)


def _time_stack(
    run: Run, label: str, implementation: Implementation | str, direction: str, shape: StackShape, recompute: bool
) -> None:
    dtype = torch.bfloat16
    floor = standard_floor if implementation == "standard" else stack_floor
    nbytes = floor(shape, direction) * shape.tokens * shape.dim * dtype.itemsize

    def work() -> dict[str, Any]:
        small = dataclasses.replace(shape, tokens=min(shape.tokens, STACK_CHECK_TOKENS))
        problem = wrong_stack(verify_stack(implementation, small, dtype, run.device, recompute=recompute), dtype)
        if problem:
            return {"problem": f"wrong: {problem}"}
        make = stack_work(implementation, direction, shape, dtype, run.device, recompute=recompute)
        return run.time(make, nbytes)

    name = implementation if isinstance(implementation, str) else implementation.name
    run.attempt(
        f"stack {direction} {shape} {label}",
        name,
        work,
        part="stack",
        direction=direction,
        shape=str(shape),
        variant=label,
    )


def time_decoding(run: Run, shapes: Sequence[str]) -> None:
    for shape in map(StackShape.parse, shapes):
        for variant in VARIANTS:
            _time_decoding(run, variant, shape)


def _time_decoding(run: Run, variant: str, shape: StackShape) -> None:
    dtype = torch.bfloat16

    def work() -> dict[str, Any]:
        problem = wrong_stack(verify_decoding(variant, shape, dtype, run.device), dtype)
        if problem:
            return {"problem": f"wrong: {problem}"}
        nbytes = decoding_bytes(variant, shape, dtype)
        return run.time(decoding_work(variant, shape, dtype, run.device), nbytes)

    run.attempt(
        f"decoding in a CUDA graph {shape} {variant}",
        variant.split()[0],
        work,
        part="stack",
        direction="decoding",
        shape=str(shape),
        variant=variant,
    )


def tables(run: Run) -> str:
    """The short table: what the goals are about first."""
    checks = [row for row in run.rows if row["part"] == "check"]
    worst = {
        dtype: max((row["error"] for row in checks if row["dtype"] == dtype and "error" in row), default=None)
        for dtype in ("float32", "bfloat16")
    }
    lines = [
        f"checks against float64: {len(checks)}, wrong: {len(run.wrong)}; worst relative error: "
        + ", ".join(f"{dtype} {error:.1e}" for dtype, error in worst.items() if error is not None)
    ]
    for part, label in (("operation", "operation"), ("stack", "part")):
        rows = [row for row in run.rows if row["part"] == part]
        for shape in dict.fromkeys(row["shape"] for row in rows):
            own = [row for row in rows if row["shape"] == shape]
            cases = list(dict.fromkeys((row[label], row["direction"]) for row in own))
            own.sort(key=lambda row: cases.index((row[label], row["direction"])))
            cells = [_row(row, f"{row[label]} {row['direction']}") for row in own]
            lines.append(f"\n{shape}, bfloat16\n\n{markdown(_HEADER, cells)}")
    lines.append(_stack_totals(run))
    lines += [f"not reached: {label}" for label in run.skipped]
    lines += [f"WRONG: {problem}" for problem in run.wrong]
    return "\n".join(lines)


def _stack_totals(run: Run) -> str:
    """Forward and backward of a whole stack together; the goal is half of the time of any other package."""
    totals: dict[str, list[float]] = {}
    for row in run.rows:
        if row["part"] == "stack" and row["direction"] in DIRECTIONS and "ms" in row:
            totals.setdefault(row["variant"], []).append(row["ms"])
    both = {variant: sum(times) for variant, times in totals.items() if len(times) == len(DIRECTIONS)}
    ours = both.get("blockres")
    rows = [(variant, number(ms), "-" if ours is None else f"{ms / ours:.2f}") for variant, ms in both.items()]
    return "\n" + markdown(("stack, forward + backward", "ms", "over blockres"), rows) if rows else ""


_HEADER = ("", "implementation", "ms", "GB/s", "of copy", "goal", "spread", "peak GB")


def _row(row: dict[str, Any], label: str) -> tuple[str, ...]:
    name = row.get("variant", row["implementation"])
    if "ms" not in row:
        return (label, name, row.get("problem") or row.get("said", ""), *("",) * 5)
    goal = GOALS[row["direction"]] if row["part"] == "operation" and row["implementation"] == "blockres" else None
    met = "" if goal is None else f"{goal:.2f} {'met' if row['fraction_of_copy'] >= goal else 'missed'}"
    return (
        label,
        name,
        number(row["ms"]),
        f"{row['gb_per_s']:.0f}",
        f"{row['fraction_of_copy']:.2f}",
        met,
        f"{row['spread']:.0%}",
        number(row["peak_memory"] / 1e9),
    )


def _implementations(names: Sequence[str]) -> list[Implementation]:
    found = []
    for name in names:
        implementation = find(name)
        if isinstance(implementation, Missing):
            print(f"{name}: {implementation.reason}")
        else:
            found.append(implementation)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", action="append", choices=REGISTRY)
    parser.add_argument("--shape", action="append", help="sources x tokens x dim x queries, to time")
    parser.add_argument("--stack", help="sublayers x sublayers per block x tokens x dim")
    parser.add_argument("--seconds", type=float, default=0.3, help="how long each case is timed")
    parser.add_argument("--budget", type=float, default=280.0, help="seconds after which no new case begins")
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: run the same path, tiny, time nothing")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print(
            "bench.device times kernels on a GPU, and torch.cuda.is_available() is False here. "
            "With --dry-run it goes the same way in Triton's interpreter, and times nothing.",
            file=sys.stderr,
        )
        return 1
    if options.dry_run:
        from bench.interpreted import require_interpreter

        require_interpreter()
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    facts = environment.describe()
    print(environment.summary(facts))
    run = Run("cpu" if options.dry_run else "cuda", options.budget, options.seconds)
    names = options.implementation or [name for name in ORDER if not options.dry_run or name != "compiled"]
    implementations = _implementations(names)
    shapes = options.shape or (DRY_TIMED if options.dry_run else TIMED)
    stack = options.stack or (DRY_STACK if options.dry_run else STACK)
    check_operations(run, DRY_CHECKED if options.dry_run else CHECKED)
    for implementation in implementations:
        time_operations(run, implementation, shapes if implementation.name == "blockres" else shapes[:1])
        time_stacks(run, implementation, stack)
        if implementation.name == "blockres":
            time_decoding(run, DRY_DECODED if options.dry_run else DECODED)
    for implementation in implementations:
        if implementation.name != "blockres":
            time_operations(run, implementation, shapes[1:])
    environment.save(options.json, "device", run.rows, not_reached=run.skipped)
    print(f"\n{environment.summary(facts)}\n\n{tables(run)}")
    return 2 if run.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
