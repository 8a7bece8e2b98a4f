"""Count every byte that a piece of work moves, without a GPU: Triton kernels, PyTorch operations, autograd's additions.

    ledger = Ledger(tokens, dim)
    with ledger.phase("forward"):
        out = f(x)
    with ledger.phase("backward"):
        out.backward(g)
    ledger.units("rows", dtype)        # in row sets: [tokens, dim] in the storage dtype

Kernels run in the interpreter, which notes the bytes of unmasked lanes. An operation of PyTorch is counted as what it
must read and write: its arguments once, its results once, views and allocations nothing. Each access falls into one
class by the size of the tensor: rows (a multiple of tokens x dim), statistics (a multiple of tokens), parameters (all
else, rows of parameter gradients that belong to a program and not to a token among them). For that to be unambiguous,
`tokens` is a prime that divides none of the other sizes, and larger than the number of programs that a persistent
kernel is launched with when it is interpreted (16 at the most): `next_prime(TOKENS, …)`.
"""

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from bench.cases import EPS
from bench.interpreted import KernelMode
from bench.interpreter import Launch, count_traffic

CLASSES = ("rows", "statistics", "parameters")
TOKENS = 17
_UNTOUCHED = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "set_",
    "resize_",
    "_unsafe_view",
}
_OVERWRITES = {"copy_", "fill_", "zero_"}


@dataclass(frozen=True)
class Entry:
    """What one launch or one operation moved, in bytes."""

    phase: str
    name: str
    is_kernel: bool
    bytes: Counter


class Ledger(KernelMode):
    """Counts the bytes that the work inside `phase` moves, and what it leaves allocated."""

    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__()
        self.tokens, self.dim = tokens, dim
        self.entries: list[Entry] = []
        self._phase = ""
        self._muted = False
        self._allocated: dict[int, tuple[StorageWeakRef, int]] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._phase = name
        with count_traffic() as traffic, _launches_unseen(), self:
            yield
        self.entries += [self._of_launch(launch) for launch in traffic.launches]

    def units(self, kind: str, dtype: torch.dtype, phase: str | None = None) -> float:
        """Row sets moved by tensors of one class."""
        total = sum(e.bytes[kind] for e in self.entries if phase in (None, e.phase))
        return total / (self.tokens * self.dim * dtype.itemsize)

    def parts(self, dtype: torch.dtype) -> dict[tuple[str, str], float]:
        """Row sets by phase and kernel or operation, the largest first."""
        parts: defaultdict[tuple[str, str], float] = defaultdict(float)
        for entry in self.entries:
            parts[entry.phase, entry.name] += entry.bytes["rows"] / (self.tokens * self.dim * dtype.itemsize)
        return dict(sorted(parts.items(), key=lambda part: -part[1]))

    def launches(self, phase: str) -> tuple[int, int]:
        """Launches of kernels, and operations of PyTorch that touch memory, most of which are a launch each."""
        kernels = [entry.is_kernel for entry in self.entries if entry.phase == phase]
        return sum(kernels), len(kernels) - sum(kernels)

    def kept(self, dtype: torch.dtype) -> float:
        """Row sets allocated inside and still alive, whoever holds them: tensors of the class rows only."""
        alive = {ref.cdata: size for ref, size in self._allocated.values() if not ref.expired()}
        return sum(alive.values()) / (self.tokens * self.dim * dtype.itemsize)

    def leaf(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        self._note_allocations(func._schema, result)
        if not self._muted:
            moved = self._of_operation(func, args, kwargs, result)
            if moved:
                self.entries.append(Entry(self._phase, func._schema.name.removeprefix("aten::"), False, moved))
        return result

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        self._muted = True
        try:
            yield
        finally:
            self._muted = False

    def as_one_kernel(self, name: str, body: Callable[..., Any], *tensors: Tensor) -> Any:
        """Run `body(*tensors)` and count it as one kernel that reads its arguments once and writes its results once."""
        with self.uncounted():
            results = body(*tensors)
        moved: Counter = Counter()
        for tensor in (*tensors, *(r for r in tree_leaves(results) if isinstance(r, Tensor))):
            moved[self._class(tensor.numel())] += _distinct(tensor) * tensor.element_size()
        self.entries.append(Entry(self._phase, name, True, moved))
        return results

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """An RMSNorm as one fused kernel each way, as a GPU has it: 2 row sets forward, 3 backward."""
        return _CountedNorm.apply(self, x, weight)

    def add_rms_norm(self, x: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """`x + update` and its RMSNorm, ideally fused: 4 row sets each way."""
        return _CountedAddNorm.apply(self, x, update, weight)

    def sublayer(self, x: Tensor) -> Tensor:
        """A stand-in for a sublayer: a new tensor from `x`, linear, its own traffic not counted, nothing saved."""
        return _StandIn.apply(self, x)

    def _of_launch(self, launch: Launch) -> Entry:
        moved: Counter = Counter()
        for name, argument in launch.arguments.items():
            start, stop = launch.spans[name][0]
            moved[self._class((stop - start) // 2)] += argument.total
        return Entry(self._phase, launch.kernel, True, moved)

    def _of_operation(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> Counter:
        schema = func._schema
        name = schema.name.split("::")[1]
        aliases = [r.alias_info for r in schema.returns]
        if name in _UNTOUCHED or (aliases and all(a is not None and not a.is_write for a in aliases)):
            return Counter()
        moved: Counter = Counter()
        generates = name.startswith("new_") or name.endswith("_like")
        for i, argument in enumerate(schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            accesses = written + (not generates and not argument.is_out and not (written and name in _OVERWRITES))
            self._add(moved, value, accesses)
        for alias, value in zip(aliases, result if isinstance(result, tuple) else (result,), strict=False):
            self._add(moved, value, alias is None)
        return moved

    def _add(self, moved: Counter, value: Any, accesses: int) -> None:
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor) and accesses:
                moved[self._class(tensor.numel())] += accesses * _distinct(tensor) * tensor.element_size()

    def _class(self, elements: int) -> str:
        """By the number of elements; of a kernel's argument only the bytes are known: taken as 2 an element."""
        if elements and elements % (self.tokens * self.dim) == 0:
            return "rows"
        return "statistics" if elements % self.tokens == 0 else "parameters"

    def _note_allocations(self, schema: Any, result: Any) -> None:
        if any(returned.alias_info is not None for returned in schema.returns):
            return
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.numel():
                storage = tensor.untyped_storage()
                if self._class(storage.nbytes() // tensor.element_size()) == "rows":
                    reference = StorageWeakRef(storage)
                    self._allocated[reference.cdata] = (reference, storage.nbytes())


@contextlib.contextmanager
def _launches_unseen() -> Iterator[None]:
    """Keep the interpreter's own handling of tensors, which a GPU does not do, from being counted as operations."""
    execute = GridExecutor.__call__

    def unseen(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return execute(self, *args, **kwargs)

    with mock.patch.object(GridExecutor, "__call__", unseen):
        yield


def _distinct(tensor: Tensor) -> int:
    """Elements in memory: an expanded dimension is there once."""
    return math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)


def _normalised(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    rstd = (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return wide * rstd, rstd


def _norm_forward(x: Tensor, weight: Tensor) -> Tensor:
    return (_normalised(x)[0] * weight.float()).to(x.dtype)


def _norm_backward(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    unit, rstd = _normalised(x)
    wide = grad.float() * weight.float()
    dx = rstd * (wide - unit * (wide * unit).mean(-1, keepdim=True))
    dweight = (grad.float() * unit).reshape(-1, x.shape[-1]).sum(0)
    return dx.to(x.dtype), dweight.to(weight.dtype)


class _CountedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ledger, x, weight):
        ctx.ledger = ledger
        ctx.save_for_backward(x, weight)
        return ledger.as_one_kernel("rms_norm", _norm_forward, x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return None, *ctx.ledger.as_one_kernel("rms_norm backward", _norm_backward, x, weight, grad)


class _CountedAddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ledger, x, update, weight):
        def body(x, update, weight):
            total = x + update
            return total, _norm_forward(total, weight)

        total, out = ledger.as_one_kernel("add_rms_norm", body, x, update, weight)
        ctx.ledger = ledger
        ctx.save_for_backward(total, weight)
        return total, out

    @staticmethod
    def backward(ctx, grad_total, grad):
        def body(x, weight, grad, grad_total):
            dx, dweight = _norm_backward(x, weight, grad)
            return dx + grad_total, dweight

        dx, dweight = ctx.ledger.as_one_kernel("add_rms_norm backward", body, *ctx.saved_tensors, grad, grad_total)
        return None, dx, dx, dweight


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ledger, x):
        ctx.ledger = ledger
        return _turn(ledger, x)

    @staticmethod
    def backward(ctx, grad):
        return None, _turn(ctx.ledger, grad)


def _turn(ledger: Ledger, x: Tensor) -> Tensor:
    with ledger.uncounted():
        return x.flip(-1).mul_(0.5)


def next_prime(at_least: int, *not_dividing: int) -> int:
    """A number of tokens for which the classes above are unambiguous."""
    candidate = max(at_least, 3)
    while any(candidate % f == 0 for f in range(2, math.isqrt(candidate) + 1)) or any(
        size % candidate == 0 for size in not_dividing
    ):
        candidate += 1
    return candidate
