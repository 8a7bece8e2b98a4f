"""The operations of blockres at one shape, and what they launch: recorded instead of run, on the CPU.

To have another operation reported on, add a function to `OPERATIONS` that calls it, and to `variants` what of a shape
matters to it.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from blockres_kernels import aggregate, cast, inter_backward, inter_forward, launch, merge, step

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SETTINGS = (1e-6, 1.0, 1e-6)


@dataclass(frozen=True)
class Shape:
    """One shape at which an operation is called.

    `queries` is for operations that take several. `norm`: the output norm is fused. `adds`: phase 1's backward adds to
    existing gradients, a merge adds an update or, backward, the gradient of the partial sum. `stream`: the dtype of the
    partial sum, where it is not that of the sources. `tokens` is a prime that no other size is likely to be.
    """

    dim: int
    sources: int
    dtype: str = "bfloat16"
    queries: int = 1
    norm: bool = True
    adds: bool = True
    stream: str | None = None
    tokens: int = 37

    def row(self, dtype: str | None = None) -> Tensor:
        return torch.empty(self.tokens, self.dim, dtype=DTYPES[dtype or self.dtype])

    def rows(self, count: int) -> list[Tensor]:
        return [self.row() for _ in range(count)]

    def vector(self) -> Tensor:
        return torch.empty(self.dim)

    def norm_weight(self) -> Tensor | None:
        return self.vector() if self.norm else None

    def statistic(self, *leading: int) -> Tensor:
        return torch.empty(*leading, self.tokens)


@dataclass(frozen=True)
class Launch:
    """One call of a kernel; `rows`: the names of its arguments that hold one or more tensors `[T, D]`."""

    kernel: JITFunction
    args: tuple
    kwargs: dict[str, Any]
    rows: frozenset[str] = frozenset()


def recorded(call: Callable[[], None], warp_size: int) -> list[Launch]:
    """What is launched while `call` runs on a GPU whose warps have so many threads. No kernel runs."""
    launches: list[Launch] = []

    def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(Launch(kernel, args, kwargs))

    with _replaced(JITFunction, "run", record), _replaced(launch, "lanes", lambda: warp_size):
        call()
    return launches


def launches_of(operation: str, shape: Shape, warp_size: int) -> list[Launch]:
    recording = recorded(lambda: OPERATIONS[operation](shape), warp_size)
    return [replace(launched, rows=_rows(launched, shape)) for launched in recording]


def _rows(launched: Launch, shape: Shape) -> frozenset[str]:
    size = shape.tokens * shape.dim
    named = itertools.chain(zip(launched.kernel.arg_names, launched.args, strict=False), launched.kwargs.items())
    return frozenset(
        name
        for name, value in named
        if any(x.shape[-1:] == (shape.dim,) and x.numel() % size == 0 for x in _tensors(value))
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        yield from itertools.chain.from_iterable(map(_tensors, value))


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _attn_res_forward(shape: Shape) -> None:
    aggregate.attn_res_forward(
        shape.rows(shape.sources),
        shape.vector(),
        shape.vector(),
        shape.norm_weight(),
        *SETTINGS,
        DTYPES[shape.dtype],
    )


def _attn_res_backward(shape: Shape) -> None:
    statistics = shape.statistic(shape.sources)
    aggregate.attn_res_backward(
        shape.row(),
        None,
        None,
        shape.rows(shape.sources),
        shape.vector(),
        shape.vector(),
        shape.norm_weight(),
        statistics[0],
        statistics,
        statistics,
        *SETTINGS,
        [True] * shape.sources,
    )


def _attn_res_inter_forward(shape: Shape) -> None:
    queries = torch.empty(shape.queries, shape.dim)
    inter_forward.attn_res_inter_forward(
        shape.rows(shape.sources), queries, queries, shape.norm_weight(), *SETTINGS, DTYPES[shape.dtype]
    )


def _attn_res_inter_backward(shape: Shape) -> None:
    queries = torch.empty(shape.queries, shape.dim)
    inter_backward.attn_res_inter_backward(
        shape.rows(shape.queries),
        shape.statistic(shape.queries),
        shape.rows(shape.sources),
        queries,
        queries,
        shape.norm_weight(),
        shape.statistic(shape.queries),
        shape.statistic(shape.queries, shape.sources),
        shape.statistic(shape.sources),
        *SETTINGS,
        [True] * shape.sources,
        [shape.row() if shape.adds else None] * shape.sources,
    )


def _attn_res_merge_forward(shape: Shape) -> None:
    merge.attn_res_merge_forward(
        shape.row(),
        shape.statistic(2)[1],
        shape.row(shape.stream),
        shape.row() if shape.adds else None,
        shape.vector(),
        shape.vector(),
        shape.norm_weight(),
        *SETTINGS,
        DTYPES[shape.dtype],
    )


def _attn_res_merge_backward(shape: Shape) -> None:
    merge.attn_res_merge_backward(
        shape.row(),
        shape.row(shape.stream) if shape.adds else None,
        shape.row(),
        shape.statistic(2)[1],
        shape.row(shape.stream),
        shape.vector(),
        shape.vector(),
        shape.norm_weight(),
        shape.statistic(2),
        *SETTINGS,
    )


def _attn_res_step(shape: Shape) -> None:
    """`shape.sources` slots, and the sum of the open block in one more."""
    *_, open_block = bank = torch.empty(shape.sources + 1, shape.tokens, shape.dim, dtype=DTYPES[shape.dtype])
    step.attn_res_step(
        bank[:-1],
        open_block,
        shape.row(),
        open_block,
        shape.row(),
        shape.vector(),
        shape.vector(),
        shape.norm_weight(),
        *SETTINGS,
    )


def _pack(shape: Shape) -> None:
    """What a hop of `shape.sources` tensors takes, to the other dtype and back."""
    wire = torch.float32 if shape.dtype == "bfloat16" else torch.bfloat16
    buffer = cast.pack(shape.rows(shape.sources), wire)
    cast.unpack(buffer, [(shape.tokens, shape.dim)] * shape.sources, [DTYPES[shape.dtype]] * shape.sources)


OPERATIONS: dict[str, Callable[[Shape], None]] = {
    "attn_res_forward": _attn_res_forward,
    "attn_res_backward": _attn_res_backward,
    "attn_res_inter_forward": _attn_res_inter_forward,
    "attn_res_inter_backward": _attn_res_inter_backward,
    "attn_res_merge_forward": _attn_res_merge_forward,
    "attn_res_merge_backward": _attn_res_merge_backward,
    "attn_res_step": _attn_res_step,
    "pack": _pack,
}


def variants(operation: str, shape: Shape) -> Iterator[Shape]:
    """The shape with and without what this operation may do or not, with one of each axis that it does not have."""
    several, one_source, adds = "inter" in operation, "merge" in operation, (True,)
    if operation == "attn_res_inter_backward" or one_source:
        adds = (False, True)
    streams = {None, "float32"} if one_source and shape.dtype != "float32" else {None}
    shape = replace(shape, queries=shape.queries if several else 1, sources=1 if one_source else shape.sources)
    for norm, added, stream in itertools.product((False, True), adds, streams):
        yield replace(shape, norm=norm, adds=added, stream=stream)
