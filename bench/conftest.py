"""Options of `pytest bench --benchmark-only`, and the fixture that times a piece of work.

    --implementation, --operation, --direction, --dtype, --shape, --stack     only these; each may be given again
    --long                   the sweeps that the plots are drawn from, and all that has to be compiled for long
    --seconds                how long each case is timed
    --device                 cuda where there is one

A result that is wrong fails, with the error, and is not timed; nor is what is missing here: both are listed at the end
and stored in the JSON (`not_timed`). A table of all times comes last.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from bench import environment, times
from bench.cases import DIRECTIONS, DTYPES, OPERATIONS, Shape
from bench.implementations import REGISTRY, Implementation, Missing, find
from bench.streams import StackShape
from bench.timing import Timing, Work, measure, spread

QUICK = {"cpu": ["8x1024x1024x4"], "cuda": ["9x8192x7168x16"]}
LONG = {
    "cpu": ["2x1024x1024", "4x1024x1024", "16x1024x1024", "8x1024x512", "8x1024x2048", "8x256x1024", "8x4096x1024"],
    "cuda": [
        *(f"{n}x8192x4096" for n in (2, 3, 5, 9, 17, 33)),
        *(f"9x8192x{d}" for d in (768, 1024, 2048, 4096, 5120, 8192)),
        *(f"9x{t}x4096" for t in (1024, 4096, 16384, 65536)),
    ],
}
QUICK_DTYPES = ("float32", "bfloat16")
STACKS = {"cpu": ["16x4x512x512"], "cuda": ["128x16x4096x4096"]}
COMPILED_QUICKLY = ("attn_res",)
"""Compiling takes half a minute a case on two cores; without --long, `compiled` is timed in these operations only."""

TIMED = pytest.StashKey[list[times.Row]]()
NOT_TIMED = pytest.StashKey[dict[str, str]]()


@dataclass(frozen=True)
class OperationCase:
    operation: str
    direction: str
    name: str
    shape: Shape
    dtype: str

    @property
    def group(self) -> str:
        """What all implementations do alike."""
        return f"{self.operation}-{self.direction}-{self.shape}-{self.dtype}"

    def __str__(self) -> str:
        return f"{self.group}-{self.name}"


@dataclass(frozen=True)
class StackCase:
    direction: str
    name: str
    shape: StackShape
    dtype: str

    @property
    def group(self) -> str:
        return f"stack-{self.direction}-{self.shape}-{self.dtype}"

    def __str__(self) -> str:
        return f"{self.group}-{self.name}"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("blockres")
    for name, choices in (
        ("implementation", (*REGISTRY, "standard")),
        ("operation", tuple(OPERATIONS)),
        ("direction", DIRECTIONS),
        ("dtype", tuple(DTYPES)),
    ):
        group.addoption(f"--{name}", action="append", choices=choices, help="only this one; may be given again")
    group.addoption("--shape", action="append", help="sources x tokens x dim [x queries]; may be given again")
    group.addoption(
        "--stack", action="append", help="sublayers x sublayers per block x tokens x dim; may be given again"
    )
    group.addoption("--long", action="store_true", help="the sweeps over sources, tokens and hidden size as well")
    group.addoption("--seconds", type=float, default=1.0, help="how long each case is timed")
    group.addoption("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    device = option("device")
    if "operation_case" in metafunc.fixturenames:
        shapes = option("shape") or QUICK[device] + (LONG[device] if option("long") else [])
        names = option("implementation") or list(REGISTRY)
        cases = [
            OperationCase(operation, direction, name, Shape.parse(shape), dtype)
            for operation in option("operation") or OPERATIONS
            for shape in shapes
            for dtype in option("dtype") or QUICK_DTYPES
            for direction in option("direction") or DIRECTIONS
            for name in names
            if name != "standard" and _offered(name, operation, bool(option("long") or option("operation")))
        ]
        metafunc.parametrize("operation_case", cases, ids=str)
    if "stack_case" in metafunc.fixturenames:
        names = option("implementation") or ["standard", *REGISTRY]
        stacks = [
            StackCase(direction, name, StackShape.parse(stack), dtype)
            for stack in option("stack") or STACKS[device]
            for dtype in option("dtype") or QUICK_DTYPES
            for direction in option("direction") or DIRECTIONS
            for name in names
            if name != "compiled" or option("long") or option("implementation")
        ]
        metafunc.parametrize("stack_case", stacks, ids=str)


def _offered(name: str, operation: str, long: bool) -> bool:
    found = _find(name)
    if isinstance(found, Missing):
        return operation == "attn_res"  # enough to show that it is missing
    return found.operation(operation) is not None and (name != "compiled" or long or operation in COMPILED_QUICKLY)


_find = functools.cache(find)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.stash[TIMED] = []
    config.stash[NOT_TIMED] = {}
    config.option.benchmark_quiet = True  # one table for all cases comes instead of one for each


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("device")


@pytest.fixture
def available(request: pytest.FixtureRequest, device: str) -> Callable[[str, str], Implementation]:
    """`available(name, dtype)` is the implementation; the test ends there where it cannot run here."""

    def get(name: str, dtype: str) -> Implementation:
        found = _find(name)
        reason = found.reason if isinstance(found, Missing) else found.unsupported(device, DTYPES[dtype])
        if reason is not None:
            request.config.stash[NOT_TIMED][name] = reason
            pytest.skip(reason)
        assert isinstance(found, Implementation)
        return found

    return get


@pytest.fixture
def right(request: pytest.FixtureRequest) -> Callable[[str | None], None]:
    """`right(what is wrong)` ends the test where something is."""

    def check(wrong: str | None) -> None:
        if wrong is not None:
            request.config.stash[NOT_TIMED][request.node.name] = f"wrong: {wrong}"
            pytest.fail(f"wrong: {wrong}", pytrace=False)

    return check


class _Replay:
    """A clock for pytest-benchmark that shows times taken by `bench.timing`, one after the other."""

    def __init__(self) -> None:
        self._readings: Iterator[float] = iter(())

    def load(self, seconds: Sequence[float]) -> None:
        self._readings = iter([reading for duration in seconds for reading in (0.0, duration)])

    def __call__(self) -> float:
        return next(self._readings)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "timed" in getattr(item, "fixturenames", ()):
            (case,) = item.callspec.params.values()
            item.add_marker(pytest.mark.benchmark(timer=_Replay(), group=case.group))


@pytest.fixture
def timed(request: pytest.FixtureRequest, benchmark: BenchmarkFixture, device: str) -> Callable[..., Timing]:
    """`timed(make, nbytes, **extra)` times the work and hands the samples and `extra` to pytest-benchmark."""

    def time_it(make: Callable[[int], Work], nbytes: int, **extra: object) -> Timing:
        timing = measure(make, nbytes, device, request.config.getoption("seconds"))
        request.node.get_closest_marker("benchmark").kwargs["timer"].load(timing.seconds)
        benchmark.extra_info.update(
            extra,
            device=device,
            bytes=nbytes,
            median=timing.median,
            gb_per_s=timing.bandwidth(nbytes) / 1e9,
            copy_gb_per_s=timing.copy_bandwidth / 1e9,
            fraction_of_copy=1 / timing.times_copy(nbytes),
            spread=timing.spread,
            copy_spread=spread(timing.copies),
            **timing.extra,
        )
        request.config.stash[TIMED].append(benchmark.extra_info)
        benchmark.pedantic(lambda: None, rounds=len(timing.seconds))
        return timing

    return time_it


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict) -> None:
    machine_info["blockres_bench"] = environment.describe() | {
        "implementations": {
            name: found.version if isinstance(found, Implementation) else found.reason
            for name, found in ((name, _find(name)) for name in REGISTRY)
        }
    }


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: list, output_json: dict) -> None:
    output_json["not_timed"] = config.stash[NOT_TIMED]


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if config.stash[TIMED]:
        terminalreporter.write_line(f"\n{environment.summary(environment.describe())}\n")
        terminalreporter.write_line(f"{times.table(config.stash[TIMED])}\n")
    for name, reason in config.stash[NOT_TIMED].items():
        terminalreporter.write_line(f"not timed: {name}: {reason}")
