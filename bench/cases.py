"""What is measured: shapes, inputs, the operations with the bytes that they cannot avoid moving, and the checks.

Letters: N sources, S queries, T tokens, D hidden size. A *row set* is one `[T, D]` tensor in the storage dtype.
"""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockres import reference

EPS = 1e-6
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DIRECTIONS = ("forward", "backward")

Inputs = dict[str, Any]  # a tensor by its name, a list of tensors for the sources
Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Shape:
    """Sizes of one operation; written as `9x8192x7168`, or `9x8192x7168x16` with the number of queries."""

    sources: int
    tokens: int
    dim: int
    queries: int = 4

    @staticmethod
    def parse(text: str) -> "Shape":
        """Read `sources x tokens x dim [x queries]`.

        Raises:
            ValueError: for anything else.
        """
        if not re.fullmatch(r"\d+x\d+x\d+(x\d+)?", text):
            raise ValueError(
                f"a shape is written sources x tokens x dim [x queries], as in 9x8192x7168x16; got {text!r}"
            )
        return Shape(*(int(size) for size in text.split("x")))

    def __str__(self) -> str:
        return f"{self.sources}x{self.tokens}x{self.dim}x{self.queries}"

    def rows(self, dtype: torch.dtype) -> int:
        """Bytes of one row set."""
        return self.tokens * self.dim * dtype.itemsize


@dataclass(frozen=True)
class Operation:
    """One thing to do, whoever does it.

    Args:
        arguments: names of the inputs, in the order in which an implementation takes them.
        reference: the same in plain PyTorch.
        floor: row sets that forward and backward read and write at the least.
    """

    name: str
    arguments: tuple[str, ...]
    reference: Function
    floor: Callable[[Shape], dict[str, int]]

    def bytes(self, shape: Shape, dtype: torch.dtype, direction: str) -> int:
        return self.floor(shape)[direction] * shape.rows(dtype)


def _aggregate(sources, query, key_weight, norm_weight=None):
    return (reference.attn_res(sources, query, key_weight, norm_weight=norm_weight, eps=EPS),)


def _inter(sources, queries, key_weights):
    return reference.attn_res_inter(sources, queries, key_weights, eps=EPS)


def _merge(output, lse, partial, update, query, key_weight, norm_weight):
    return reference.attn_res_merge(
        output, lse, partial, query, key_weight, update=update, norm_weight=norm_weight, eps=EPS
    )


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            "attn_res",
            ("sources", "query", "key_weight"),
            _aggregate,
            lambda shape: {"forward": shape.sources + 1, "backward": 2 * shape.sources + 1},
        ),
        Operation(
            "attn_res+norm",
            ("sources", "query", "key_weight", "norm_weight"),
            _aggregate,
            lambda shape: {"forward": shape.sources + 1, "backward": 2 * shape.sources + 1},
        ),
        Operation(
            "inter",
            ("sources", "queries", "key_weights"),
            _inter,
            lambda shape: {
                "forward": shape.sources + shape.queries,
                "backward": shape.queries + 2 * shape.sources,
            },
        ),
        Operation(
            "merge",
            ("output", "lse", "partial", "update", "query", "key_weight", "norm_weight"),
            _merge,
            lambda shape: {"forward": 5, "backward": 6},
        ),
    )
}


def make_inputs(
    operation: Operation, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> Inputs:
    """Leaves that need gradients. The sources have a component in common, as those of a residual stream do.

    Rows and parameters are of `dtype`, `lse` is float32.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, std: float = 1.0, mean: float = 0.0, kind: torch.dtype = dtype) -> Tensor:
        values = torch.randn(*size, generator=generator, device=device, dtype=torch.float32).mul_(std).add_(mean)
        return values.to(kind)

    rows = (shape.tokens, shape.dim)
    common = normal(*rows)
    made: dict[str, Callable[[], Any]] = {
        "sources": lambda: [normal(*rows) + common for _ in range(shape.sources)],
        "output": lambda: normal(*rows),
        "lse": lambda: normal(shape.tokens, mean=1.0, kind=torch.float32),
        "partial": lambda: normal(*rows) + common,
        "update": lambda: normal(*rows),
        "query": lambda: normal(shape.dim, std=shape.dim**-0.5),
        "queries": lambda: normal(shape.queries, shape.dim, std=shape.dim**-0.5),
        "key_weight": lambda: normal(shape.dim, std=0.1, mean=1.0),
        "key_weights": lambda: normal(shape.queries, shape.dim, std=0.1, mean=1.0),
        "norm_weight": lambda: normal(shape.dim, std=0.1, mean=1.0),
    }
    inputs = {name: made[name]() for name in operation.arguments}
    for leaf in leaves(inputs):
        leaf.requires_grad_()
    return inputs


def leaves(inputs: Inputs) -> list[Tensor]:
    return [x for value in inputs.values() for x in (value if isinstance(value, list) else [value]) if x is not None]


def leaf_names(inputs: Inputs) -> list[str]:
    """One name for each of `leaves`, the same for all sources."""
    return [name for name, value in inputs.items() for _ in (value if isinstance(value, list) else [value])]


def upstream(outputs: Sequence[Tensor], shape: Shape, dtype: torch.dtype, seed: int = 1) -> list[Tensor]:
    """Gradients of the outputs: rows in the storage dtype, statistics in float32."""
    generator = torch.Generator(outputs[0].device).manual_seed(seed)
    kinds = [dtype if out.numel() >= shape.tokens * shape.dim else torch.float32 for out in outputs]
    return [
        torch.randn(out.shape, generator=generator, device=out.device, dtype=torch.float32).to(kind)
        for out, kind in zip(outputs, kinds, strict=True)
    ]


TOLERANCES = {
    torch.float32: {"rows": 1e-5, "parameters": 1e-4},
    torch.bfloat16: {"rows": 1e-2, "parameters": 2e-2},
    torch.float16: {"rows": 2e-3, "parameters": 5e-3},
}
"""Relative errors beyond which a result is reported as wrong: some roundings to the storage dtype, of a gradient too.

They tell wrong from right across implementations that round differently; the tests of blockres itself are stricter.
"""


@dataclass(frozen=True)
class Verdict:
    """Relative errors `|x - reference| / |reference|` of the worst tensor of each kind."""

    dtype: torch.dtype
    errors: dict[str, float]

    @property
    def wrong(self) -> str | None:
        """What is wrong, in words; None where nothing is."""
        allowed = TOLERANCES[self.dtype]
        found = [
            f"{name} off by {error:.1e}, allowed {allowed[_kind(name)]:.0e}"
            for name, error in self.errors.items()
            if not error <= allowed[_kind(name)]
        ]
        return "; ".join(found) or None

    @property
    def worst(self) -> float:
        return max(self.errors.values(), default=0.0)


def _kind(name: str) -> str:
    return "parameters" if re.search("quer|weight", name) else "rows"


Expected = tuple[list[Tensor], list[Tensor]]


@functools.lru_cache(maxsize=1)
def expected(operation: str, shape: Shape, dtype: torch.dtype, device: str) -> Expected:
    """Outputs and gradients in float64, from the same rounded inputs."""
    inputs = make_inputs(OPERATIONS[operation], shape, dtype, device)
    wide: Inputs = {
        name: [_wide(x) for x in value] if isinstance(value, list) else _wide(value) for name, value in inputs.items()
    }
    outputs = OPERATIONS[operation].reference(**wide)
    gradients = torch.autograd.grad(outputs, leaves(wide), [g.double() for g in upstream(outputs, shape, dtype)])
    return [out.detach() for out in outputs], list(gradients)


def _wide(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_()


def verify(operation: Operation, function: Function, shape: Shape, dtype: torch.dtype, device: str) -> Verdict:
    """Run forward and backward once and compare every output and every gradient with float64."""
    inputs = make_inputs(operation, shape, dtype, device)
    outputs = function(**inputs)
    gradients = torch.autograd.grad(outputs, leaves(inputs), _matched(outputs, shape, dtype), allow_unused=True)
    wanted_outputs, wanted_gradients = expected(operation.name, shape, dtype, str(device))
    errors: dict[str, float] = {}
    pairs = [
        *((f"output {i}", out, want) for i, (out, want) in enumerate(zip(outputs, wanted_outputs, strict=True))),
        *(
            (f"gradient of {name}", gradient, want)
            for name, gradient, want in zip(leaf_names(inputs), gradients, wanted_gradients, strict=True)
        ),
    ]
    for name, found, want in pairs:
        errors[name] = max(errors.get(name, 0.0), relative_error(found, want))
    return Verdict(dtype, errors)


def _matched(outputs: Sequence[Tensor], shape: Shape, dtype: torch.dtype) -> list[Tensor]:
    return [g.to(out.dtype) for g, out in zip(upstream(outputs, shape, dtype), outputs, strict=True)]


def relative_error(found: Tensor | None, wanted: Tensor) -> float:
    """`|found - wanted| / |wanted|`, or `|found|` where `wanted` is zero; infinite for no result, or one with a NaN."""
    if found is None:
        return float("inf")
    error = ((found.detach().double() - wanted).norm() / (wanted.norm() or 1.0)).item()
    return float("inf") if error != error else error
