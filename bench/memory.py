"""The most memory that this process had resident while something ran. Linux only."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Peak:
    """Bytes by which the resident memory grew at the most; set at the end."""

    growth: int = 0


@contextmanager
def peak_growth() -> Iterator[Peak]:
    peak = Peak()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before would otherwise serve what runs now, unseen
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's high-water mark starts anew
    before = _resident("VmRSS")
    yield peak
    peak.growth = _resident("VmHWM") - before


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field)))
