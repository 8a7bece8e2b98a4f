"""How a time is taken: always in turn with a copy, so that a figure is a ratio that survives a busy or a slow machine.

On a CPU: `time.perf_counter` around one run, then around one copy that moves as many bytes, and so on until the time
is used up. On a GPU: events around a batch of runs, which the device starts only when all of them have been queued, so
that the host's time does not count; consecutive runs use different tensors where one set would fit into the L2 cache;
the copy is one of 1 GiB. The figures are medians, the spread is the distance of the quartiles over the median.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

GPU_COPY_BYTES = 2**30  # small copies do not reach the bandwidth that kernels are held against
BATCH_BYTES = 2**34  # runs of one batch hold their results and what they saved at the same time
GPU_CLOCK_HZ = 2e9  # what a cycle of torch.cuda._sleep is about, on the generous side
ROUNDS = (5, 200)


@dataclass(frozen=True)
class Work:
    """Something to time: `run(prepare())`, of which `prepare` is not timed."""

    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Timing:
    """Seconds of each run, and of each copy in between, which moved `copy_bytes` in all (read and written)."""

    seconds: Sequence[float]
    copies: Sequence[float]
    copy_bytes: int
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        return spread(self.seconds)

    @property
    def copy_bandwidth(self) -> float:
        """Bytes per second, read and written."""
        return self.copy_bytes / statistics.median(self.copies)

    def bandwidth(self, nbytes: int) -> float:
        return nbytes / self.median

    def times_copy(self, nbytes: int) -> float:
        """How many times as long as a copy that moves this many bytes."""
        return self.median * self.copy_bandwidth / nbytes


def spread(samples: Sequence[float]) -> float:
    """The distance of the quartiles over the median."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle


def measure(make: Callable[[int], Work], nbytes: int, device: str, seconds: float) -> Timing:
    """Time `make(seed)` for about this long; `nbytes` is what one run moves at the least."""
    if device == "cuda":
        return _measure_cuda(make, nbytes, seconds)
    return _measure_cpu(make(0), nbytes, seconds)


def _measure_cpu(work: Work, nbytes: int, seconds: float) -> Timing:
    source = torch.ones(max(1, nbytes // 8))  # read once and written once: half of the bytes each, 4 to an element
    target = torch.empty_like(source)
    copy = Work(lambda _: target.copy_(source))
    for warm_up in (work, copy):
        _clocked(warm_up)
    runs: list[float] = []
    copies: list[float] = []
    stop = time.perf_counter() + seconds
    while len(runs) < ROUNDS[0] or (len(runs) < ROUNDS[1] and time.perf_counter() < stop):
        runs.append(_clocked(work))
        copies.append(_clocked(copy))
    return Timing(runs, copies, 8 * source.numel())


def _clocked(work: Work) -> float:
    state = work.prepare()
    start = time.perf_counter()
    result = work.run(state)
    stop = time.perf_counter()
    del result
    return stop - start


def _measure_cuda(make: Callable[[int], Work], nbytes: int, seconds: float) -> Timing:
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    sets = max(1, min(32, math.ceil(2 * cache / nbytes)))
    works = [make(seed) for seed in range(sets)]
    batch = works * max(1, min(4, BATCH_BYTES // nbytes) // sets)
    copy = [_large_copy()]
    for warm_up in (*batch, *copy):
        warm_up.run(warm_up.prepare())
    queueing = {name: _queueing_seconds(queued) for name, queued in (("runs", batch), ("copies", copy))}
    runs: list[float] = []
    copies: list[float] = []
    stop = time.perf_counter() + seconds
    while len(runs) < ROUNDS[0] or (len(runs) < ROUNDS[1] and time.perf_counter() < stop):
        runs.append(_device_time(batch, queueing["runs"]))
        copies.append(_device_time(copy, queueing["copies"]))
    return Timing(runs, copies, GPU_COPY_BYTES, {"sets": sets, "batch": len(batch)})


def _large_copy() -> Work:
    source = torch.ones(GPU_COPY_BYTES // 8, device="cuda")
    target = torch.empty_like(source)
    return Work(lambda _: target.copy_(source))


def _queueing_seconds(batch: Sequence[Work]) -> float:
    """How long the host takes to queue the batch."""
    states = [work.prepare() for work in batch]
    torch.cuda.synchronize()
    start = time.perf_counter()
    for work, state in zip(batch, states, strict=True):
        work.run(state)
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds


def _device_time(batch: Sequence[Work], queueing: float) -> float:
    """Seconds of one run on the device, which sleeps while the host queues the batch."""
    states = [work.prepare() for work in batch]
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(int(1.5 * queueing * GPU_CLOCK_HZ))
    start.record()
    for work, state in zip(batch, states, strict=True):
        work.run(state)
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3 / len(batch)
