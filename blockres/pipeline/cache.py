"""The sources held and the gradients deposited on one pipeline rank.

Entries are keyed by (microbatch, source). A source is kept as one reference to one tensor, cut off from the graph that
made it; nothing is stacked or copied. A stage that read a source from here deposits the gradient it found for it; the
stage that brought the source onto the rank collects the sum of all deposits.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

Key = tuple[int, int]


class CachePeak(NamedTuple):
    """The most that a cache has held at once since it was made or since `reset_peak`."""

    entries: int
    bytes: int
    deposits: int
    deposit_bytes: int


def add_gradients(*gradients: Tensor | None) -> Tensor | None:
    """Sum in float32 (float64 for float64); a gradient that stands alone is returned as it is, in its own dtype."""
    present = [gradient for gradient in gradients if gradient is not None]
    if len(present) < 2:
        return present[0] if present else None
    total = _widen(present[0]) + _widen(present[1])
    for gradient in present[2:]:
        total += gradient
    return total


class BlockCache:
    """One per rank, shared by the rank's stages.

    Nothing of a microbatch is left once the rank's first stage has run its backward for it (in forward-only: once its
    last stage has run), so `len(cache) == 0` between steps.
    """

    def __init__(self) -> None:
        self._sources: dict[Key, Tensor] = {}
        self._deposits: dict[Key, _Deposits] = {}
        self._bytes = 0
        self._deposit_bytes = 0
        self.reset_peak()

    def __len__(self) -> int:
        """References held plus sums of deposits not yet collected."""
        return len(self._sources) + len(self._deposits)

    def __contains__(self, key: Key) -> bool:
        return key in self._sources

    @property
    def peak(self) -> CachePeak:
        return self._peak

    def reset_peak(self) -> None:
        self._peak = CachePeak(0, 0, 0, 0)

    def put(self, microbatch: int, source: int, tensor: Tensor) -> None:
        """Keep a source, as a leaf of its own that remembers whether gradients are wanted for it.

        Raises:
            RuntimeError: where the cache has it already.
        """
        if (microbatch, source) in self._sources:
            raise RuntimeError(f"source {source} of microbatch {microbatch} is in the cache already")
        self._sources[microbatch, source] = tensor.detach().requires_grad_(tensor.requires_grad)
        self._bytes += tensor.nbytes
        self._note_peak()

    def get(self, microbatch: int, source: int) -> Tensor:
        """A fresh leaf over the memory of a source: its gradient is the reader's own.

        Raises:
            RuntimeError: where the cache does not have it.
        """
        tensor = self._find(microbatch, source)
        return tensor.detach().requires_grad_(tensor.requires_grad)

    def release(self, microbatch: int, source: int) -> None:
        """Drop the reference; memory goes when autograd is done with it, too."""
        self._bytes -= self._find(microbatch, source).nbytes
        del self._sources[microbatch, source]

    def deposit(self, microbatch: int, source: int, gradient: Tensor | None) -> None:
        """Add one reader's gradient; None counts as a deposit of nothing.

        The sum is formed in float32 (float64 for float64).
        """
        entry = self._deposits.setdefault((microbatch, source), _Deposits())
        self._deposit_bytes -= entry.nbytes
        entry.add(gradient)
        self._deposit_bytes += entry.nbytes
        self._note_peak()

    def collect(self, microbatch: int, source: int, *, expected: int) -> Tensor | None:
        """Take the sum of the deposits for a source; None where all of them were None.

        Raises:
            RuntimeError: where the number of deposits is not the expected one. A missing deposit would be a wrong
                gradient without any other sign.
        """
        entry = self._deposits.pop((microbatch, source), None) or _Deposits()
        self._deposit_bytes -= entry.nbytes
        if entry.count != expected:
            raise RuntimeError(
                f"source {source} of microbatch {microbatch} has {entry.count} gradient deposits, expected {expected}: "
                "the backward of every stage that reads a cached source must run exactly once before it is collected"
            )
        return entry.total

    def check_sources_released(self, microbatch: int) -> None:
        """Raise RuntimeError where a source of this microbatch is still held."""
        self._check_none_left(microbatch, self._sources, "is still in the cache after its last reader")

    def check_deposits_collected(self, microbatch: int) -> None:
        """Raise RuntimeError where a deposit of this microbatch was never collected."""
        self._check_none_left(microbatch, self._deposits, "has gradient deposits that nobody collected")

    def clear(self) -> None:
        """Drop everything; the peak stays."""
        self._sources.clear()
        self._deposits.clear()
        self._bytes = self._deposit_bytes = 0

    def _find(self, microbatch: int, source: int) -> Tensor:
        tensor = self._sources.get((microbatch, source))
        if tensor is None:
            held = sorted(key[1] for key in self._sources if key[0] == microbatch)
            raise RuntimeError(
                f"source {source} of microbatch {microbatch} is not in the cache, which holds sources {held} of it"
            )
        return tensor

    def _note_peak(self) -> None:
        now = (len(self._sources), self._bytes, len(self._deposits), self._deposit_bytes)
        self._peak = CachePeak(*map(max, self._peak, now))

    @staticmethod
    def _check_none_left(microbatch: int, table: Iterable[Key], complaint: str) -> None:
        for left, source in table:
            if left == microbatch:
                raise RuntimeError(f"source {source} of microbatch {microbatch} {complaint}")


class _Deposits:
    """The running sum of one source's deposits, and how many there were."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.count = 0
        self._owns_total = False

    @property
    def nbytes(self) -> int:
        return 0 if self.total is None else self.total.nbytes

    def add(self, gradient: Tensor | None) -> None:
        self.count += 1
        if gradient is None:
            return
        # The first gradient is only referred to: autograd may have handed the same tensor to others.
        if self._owns_total and self.total is not None and self.total.dtype == _widened(gradient.dtype):
            self.total += gradient
        else:
            self._owns_total = self.total is not None
            self.total = add_gradients(self.total, gradient)


def _widened(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _widen(gradient: Tensor) -> Tensor:
    return gradient.to(_widened(gradient.dtype))
