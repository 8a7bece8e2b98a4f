"""One call of each operation with everything in it, for tests that hold an implementation against the reference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.support.numerics import correlated_sources

OPERATIONS = ("attn_res", "attn_res_inter", "attn_res_merge")


@dataclass
class Call:
    """Arguments of one operation; `leaves` are those that it is differentiated by."""

    name: str
    positional: tuple
    named: dict[str, Any] = field(default_factory=dict)

    def __call__(self, module: ModuleType) -> tuple[Tensor, ...]:
        results = getattr(module, self.name)(*self.positional, **self.named)
        return results if isinstance(results, tuple) else (results,)

    @property
    def leaves(self) -> list[Tensor]:
        found: list[Tensor] = []
        self._mapped(lambda x: found.append(x) if x.requires_grad else None)
        return found

    def with_leaves(self, values: Sequence[Tensor]) -> "Call":
        """The same call on other leaves, in the order of `leaves`."""
        supply = iter(values)
        return self._mapped(lambda x: next(supply) if x.requires_grad else x)

    def widened(self) -> "Call":
        """The same call in float64 on the CPU, on leaves of its own; `out_dtype` is left out."""
        call = self._mapped(lambda x: x.detach().to("cpu", torch.float64, copy=True).requires_grad_(x.requires_grad))
        call.named.pop("out_dtype", None)
        return call

    def _mapped(self, function: Callable[[Tensor], Any]) -> "Call":
        def mapped(value: Any) -> Any:
            if isinstance(value, list):
                return [function(x) for x in value]
            return function(value) if isinstance(value, Tensor) else value

        named = {key: mapped(value) for key, value in self.named.items()}
        return Call(self.name, tuple(mapped(x) for x in self.positional), named)


def make_call(
    name: str,
    shape: tuple[int, ...] = (2, 5, 24),
    *,
    sources: int = 3,
    queries: int = 4,
    dtype: torch.dtype = torch.float32,
    parameter_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    key_weight: bool = True,
    norm: bool = True,
    update: bool = True,
    common: float = 0.0,
    eps: float = 1e-5,
    scale: float = 1.0,
) -> Call:
    """Random arguments of the operation `name`, all of which need a gradient."""
    width = shape[-1]
    parameter_dtype = dtype if parameter_dtype is None else parameter_dtype

    def parameter(*size: int, around: float = 0.0, spread: float = 1.0) -> Tensor:
        return (around + spread * torch.randn(*size)).to(device, parameter_dtype).requires_grad_()

    rows = [x.requires_grad_() for x in correlated_sources(max(sources, 2), shape, common, dtype, device)]
    size = (queries, width) if name == "attn_res_inter" else (width,)
    query = parameter(*size, spread=1.5 / width**0.5)
    weight = parameter(*size, around=1.0, spread=0.2) if key_weight else None
    named: dict[str, Any] = {"eps": eps, "scale": scale}
    if norm:
        named |= {"norm_weight": parameter(width, around=1.0, spread=0.2), "norm_eps": 1e-3}
    if name == "attn_res_merge":
        lse = torch.randn(shape[:-1], dtype=torch.promote_types(dtype, torch.float32)).to(device).requires_grad_()
        named["update"] = torch.randn(shape).to(device, dtype).requires_grad_() if update else None
        return Call(name, (rows[0], lse, rows[1], query, weight), named)
    return Call(name, (rows[:sources], query, weight), named)


def differentiate(call: Call, module: ModuleType, upstream: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and the gradient of every leaf for these upstream gradients."""
    outputs = call(module)
    upstream = [grad.to(out.device, out.dtype) for grad, out in zip(upstream, outputs, strict=True)]
    grads = torch.autograd.grad(outputs, call.leaves, upstream)
    return [out.detach() for out in outputs], list(grads)
