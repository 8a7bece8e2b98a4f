"""Triton's interpreter made trustworthy: exact bfloat16, sums in a tree, and a count of the bytes that kernels move.

TRITON_INTERPRET=1 has to be in the environment before triton is imported. Then `install()` once, and

    with count_traffic() as traffic:
        run_something_that_launches_kernels()
    traffic.read, traffic.write, traffic.atomic      # bytes, of unmasked lanes only
    traffic.moved("sources", "out")                  # the part that went through these kernel arguments
    [launch.kernel for launch in traffic.launches]

Repaired are: rounding of float32 to bfloat16, which is truncated otherwise; arithmetic on bfloat16, which works on bit
patterns as if they were integers; constants of bfloat16, which cannot be made; sums along a tensor's first axis, which
add one element after the other and lose digits that no GPU loses; calls of functions, which take twice the time;
and names for dtypes within a kernel, which Triton 3.6 refuses here alone.
A `tl.multiple_of` that is not true, which would be a misaligned access on a GPU, is an error.
"""

import contextlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_Builder, _Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """float32 values -> uint16 bit patterns, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    half_minus_tie = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits + half_minus_tie) >> np.uint32(16)).astype(np.uint16)
    quiet_nan = ((bits >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)
    return np.where(np.isnan(values), quiet_nan, rounded).reshape(np.shape(values))


def bfloat16_values(bits: np.ndarray) -> np.ndarray:
    """uint16 bit patterns -> the float32 values that they stand for."""
    wide = np.ascontiguousarray(bits).astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32).reshape(np.shape(bits))


def tree_sum(values: np.ndarray, axis: int | None, keepdims: bool = False) -> np.ndarray:
    """Add halves onto each other until one element is left, as a GPU's reduction does."""
    moved = values.reshape(-1) if axis is None else np.moveaxis(values, axis, 0)
    while len(moved) > 1:
        half = len(moved) // 2
        added = moved[:half] + moved[half : 2 * half]
        moved = np.concatenate([added, moved[2 * half :]])
    if not keepdims:
        return moved[0]
    return moved[0].reshape((1,) * values.ndim) if axis is None else np.moveaxis(moved, 0, axis)


def install() -> None:
    """Repair the interpreter of this process. Further calls do nothing."""
    if _Builder.cast_impl.__module__ == __name__:
        return
    _install_casts()
    _install_arithmetic()
    _install_sum()
    _install_atomic_add()
    _install_hints()
    _install_constants()
    _patch_language_once_a_launch()


def _is_bfloat16(handle: Any) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _widened(handle: Any) -> Any:
    return _Handle(bfloat16_values(handle.data), tl.float32) if _is_bfloat16(handle) else handle


def _narrowed(values: np.ndarray) -> Any:
    return _Handle(bfloat16_bits(values), tl.bfloat16)


def _install_casts() -> None:
    original_cast, original_fp_to_fp = _Builder.cast_impl, _Builder.create_fp_to_fp

    def cast_impl(self, source, target):
        if source.dtype.scalar == target.scalar:
            return source
        source = _widened(source)
        if target.scalar == tl.bfloat16:
            return _narrowed(source.data.astype(np.float32))
        return source if source.dtype.scalar == target.scalar else original_cast(self, source, target)

    def create_fp_to_fp(self, source, target, rounding):
        if tl.bfloat16 in (source.dtype.scalar, target.scalar):
            return cast_impl(self, source, target)
        return original_fp_to_fp(self, source, target, rounding)

    _Builder.cast_impl, _Builder.create_fp_to_fp = cast_impl, create_fp_to_fp
    _Builder.get_bf16 = lambda self, value: _narrowed(np.array([value], np.float32))


def _install_arithmetic() -> None:
    original_binary, original_fma, original_dot = _Builder.binary_op, _Builder.create_fma, _Builder.create_dot

    def binary_op(self, a, b, operation):
        if operation in _BITWISE or not (_is_bfloat16(a) and _is_bfloat16(b)):
            return original_binary(self, a, b, operation)
        with np.errstate(all="ignore"):
            result = operation(_widened(a).data, _widened(b).data)
        return _Handle(result, tl.int1) if result.dtype == bool else _narrowed(result)

    def create_fma(self, x, y, z):
        if not _is_bfloat16(z):
            return original_fma(self, x, y, z)
        return _narrowed(_widened(x).data * _widened(y).data + _widened(z).data)

    _Builder.binary_op, _Builder.create_fma = binary_op, create_fma
    _Builder.create_dot = lambda self, a, b, *rest: original_dot(self, _widened(a), _widened(b), *rest)
    if hasattr(_Builder, "create_fneg"):
        original_negate = _Builder.create_fneg
        _Builder.create_fneg = lambda self, a: (
            _Handle(a.data ^ np.uint16(0x8000), tl.bfloat16) if _is_bfloat16(a) else original_negate(self, a)
        )


def _install_sum() -> None:
    def reduce_sum(self, x):
        total = tree_sum(_widened(x.handle).data, self.axis, self.keep_dims)
        if x.dtype != tl.bfloat16:
            return self.to_tensor(total.astype(x.handle.data.dtype), x.dtype)
        bits = bfloat16_bits(np.atleast_1d(total))
        kind = tl.block_type(tl.bfloat16, list(total.shape)) if total.shape else tl.bfloat16
        return tl.core.tensor(_Handle(bits, tl.bfloat16), kind)

    interpreter.ReduceOps.sum = reduce_sum


def _install_atomic_add() -> None:
    original = _Builder.create_atomic_rmw

    def create_atomic_rmw(self, operation, pointer, value, mask, *rest):
        if not _is_bfloat16(value):
            return original(self, operation, pointer, value, mask, *rest)
        if operation.name != "FADD":
            raise NotImplementedError(f"bfloat16 atomic {operation.name}; only FADD is exact here")
        shape = value.data.shape
        addresses, added, active = (np.broadcast_to(h.data, shape).flatten() for h in (pointer, value, mask))
        previous = np.zeros(added.shape, np.uint16)
        for lane in np.flatnonzero(active):  # one program runs at a time, so one lane after the other is atomic
            previous[lane] = _add_in_memory(addresses[lane : lane + 1], added[lane : lane + 1])
        return _Handle(previous.reshape(shape), tl.bfloat16)

    _Builder.create_atomic_rmw = create_atomic_rmw


def _install_hints() -> None:
    original = _Handle.set_attr

    def set_attr(self, key, value):
        if key == "tt.divisibility" and (self.data % np.asarray(value[0], self.data.dtype)).any():
            raise AssertionError(f"tl.multiple_of says that {value[0]} divides {self.data}")
        original(self, key, value)

    _Handle.set_attr = set_attr


def _install_constants() -> None:
    """Let a kernel give a name to a dtype among its constants; in Triton 3.6 only compiled kernels may."""
    original = TritonSemantic.to_tensor

    def to_tensor(self, x, check_type=True):
        return original(self, x.value if isinstance(x, tl.constexpr) else x, check_type)

    TritonSemantic.to_tensor = to_tensor


def _patch_language_once_a_launch() -> None:
    """Let functions that a kernel calls find the language as the kernel's own launch has patched it.

    The interpreter patches every member of triton.language anew for every call of a function: more than half its time.
    """
    original = interpreter._patch_lang
    language = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    active: list[Any] = []

    class Scope:
        def restore(self) -> None:
            if active[-1] is self:
                active.pop()
                self.patched.restore()

    def patch_lang(fn: Any) -> Any:
        if not active:
            scope = Scope()
            scope.patched = original(language)
            active.append(scope)
            return scope
        return types.SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_lang


def _add_in_memory(address: np.ndarray, added: np.ndarray) -> int:
    memory, always = interpreter._interpreter, np.ones(1, bool)
    present = memory.load(address, always, np.zeros(1, np.uint16), np.dtype(np.uint16))
    memory.store(address, bfloat16_bits(bfloat16_values(present) + bfloat16_values(added)), always)
    return int(present[0])


@dataclass
class Moved:
    """Bytes that unmasked lanes read, wrote and updated atomically."""

    read: int = 0
    write: int = 0
    atomic: int = 0

    @property
    def total(self) -> int:
        return self.read + self.write + self.atomic

    def __add__(self, other: "Moved") -> "Moved":
        return Moved(self.read + other.read, self.write + other.write, self.atomic + other.atomic)


@dataclass
class Launch:
    """What one launch moved, in all and by the kernel's argument (a tuple of tensors counts as one argument).

    A byte that lies in the memory of two arguments is counted for both.
    """

    kernel: str
    grid: tuple[int, ...]
    spans: dict[str, list[tuple[int, int]]]
    moved: Moved = field(default_factory=Moved)
    arguments: dict[str, Moved] = field(default_factory=dict)
    touched: dict[str, dict[str, list[np.ndarray]]] = field(default_factory=dict)

    def record(self, kind: str, addresses: np.ndarray, mask: np.ndarray | None, size: int) -> None:
        addresses = np.ravel(
            addresses if mask is None else addresses[np.broadcast_to(mask, addresses.shape).astype(bool)]
        )
        setattr(self.moved, kind, getattr(self.moved, kind) + addresses.size * size)
        if not addresses.size:
            return
        for name, spans in self.spans.items():
            inside = sum((addresses >= start) & (addresses < stop) for start, stop in spans).astype(bool)
            if inside.any():
                argument = self.arguments.setdefault(name, Moved())
                setattr(argument, kind, getattr(argument, kind) + int(inside.sum()) * size)
                touched = self.touched.setdefault(name, {}).setdefault(kind, [])
                touched.append(np.unique(addresses[inside]) * np.uint64(16) + np.uint64(size))


@dataclass
class Traffic:
    launches: list[Launch] = field(default_factory=list)

    @property
    def all(self) -> Moved:
        return sum((launch.moved for launch in self.launches), Moved())

    @property
    def read(self) -> int:
        return self.all.read

    @property
    def write(self) -> int:
        return self.all.write

    @property
    def atomic(self) -> int:
        return self.all.atomic

    def moved(self, *arguments: str) -> Moved:
        """What went through these arguments, over all launches."""
        none = Moved()
        return sum((launch.arguments.get(name, none) for launch in self.launches for name in arguments), Moved())

    def unique(self, *arguments: str, kind: str = "read") -> int:
        """Bytes of these arguments that were read (or written) at least once."""
        parts = [
            part
            for launch in self.launches
            for name in arguments
            for part in launch.touched.get(name, {}).get(kind, [])
        ]
        unique = np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.uint64)
        return int((unique & np.uint64(15)).sum())


class _Recorder:
    """Stands in for the interpreter's memory and notes every access of the launch that runs."""

    def __init__(self, memory: Any, traffic: Traffic) -> None:
        self._memory, self._traffic = memory, traffic

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def _record(self, kind: str, pointers: np.ndarray, mask: np.ndarray | None, size: int) -> None:
        self._traffic.launches[-1].record(kind, pointers, mask, size)

    def load(self, pointers, mask, other, dtype):
        self._record("read", pointers, mask, dtype.itemsize)
        return self._memory.load(pointers, mask, other, dtype)

    def store(self, pointers, value, mask):
        self._record("write", pointers, mask, value.dtype.itemsize)
        return self._memory.store(pointers, value, mask)

    def atomic_rmw(self, operation, pointers, value, mask, order):
        self._record("atomic", pointers, mask, value.dtype.itemsize)
        return self._memory.atomic_rmw(operation, pointers, value, mask, order)

    def atomic_cas(self, pointers, expected, value, order):
        self._record("atomic", pointers, None, value.dtype.itemsize)
        return self._memory.atomic_cas(pointers, expected, value, order)


@contextlib.contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count what every kernel launched inside moves. The counting is exact: one program runs at a time."""
    traffic = Traffic()
    memory, execute = interpreter._interpreter, interpreter.GridExecutor.__call__

    def counted(self, *args, **kwargs):
        traffic.launches.append(_launch_of(self, args, kwargs))
        return execute(self, *args, **kwargs)

    interpreter._interpreter = _Recorder(memory, traffic)
    interpreter.GridExecutor.__call__ = counted
    try:
        yield traffic
    finally:
        interpreter._interpreter = memory
        interpreter.GridExecutor.__call__ = execute


def _launch_of(executor: Any, args: tuple, kwargs: dict[str, Any]) -> Launch:
    named = dict(zip(executor.arg_names, args, strict=False)) | kwargs
    spans = {name: list(dict.fromkeys(_spans(value))) for name, value in named.items()}
    grid: tuple | Callable = executor.grid
    size = grid(named) if callable(grid) else grid
    return Launch(executor.fn.__name__, tuple(size), {name: found for name, found in spans.items() if found})


def _spans(value: Any) -> Iterator[tuple[int, int]]:
    """The ranges of addresses that an argument's tensors cover."""
    if isinstance(value, tuple):
        for element in value:
            yield from _spans(element)
    elif hasattr(value, "data_ptr") and value.numel():
        last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        yield value.data_ptr(), value.data_ptr() + (last + 1) * value.element_size()
