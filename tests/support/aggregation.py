"""One aggregation with everything that goes into it, run through the kernels and through the float64 definition."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockres import reference
from blockres_kernels import aggregate
from tests.support.numerics import (
    assert_parameter_gradient,
    correlated_sources,
    exact_leaves,
    gradients_of,
    relative_error,
)


@dataclass(frozen=True)
class Gradients:
    """Those of parameters that are not there are `(0,)`."""

    sources: list[Tensor]
    query: Tensor
    key_weight: Tensor
    norm_weight: Tensor

    @property
    def parameters(self) -> list[Tensor]:
        return [self.query, self.key_weight, self.norm_weight]


@dataclass(frozen=True)
class Problem:
    """Sources `[..., D]`, parameters, and the gradients that arrive; `grad_lse` and `grad_scores` are optional."""

    sources: list[Tensor]
    query: Tensor
    key_weight: Tensor | None
    norm_weight: Tensor | None
    grad_out: Tensor
    grad_lse: Tensor | None = None
    grad_scores: Tensor | None = None
    eps: float = 1e-6
    scale: float = 1.0
    norm_eps: float = 1e-5
    out_dtype: torch.dtype | None = None

    def with_sources(self, sources: Sequence[Tensor]) -> "Problem":
        return dataclasses.replace(self, sources=list(sources))

    def forward(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Output, lse, scores and rstd of the kernels."""
        return aggregate.attn_res_forward(
            self.sources,
            self.query,
            self.key_weight,
            self.norm_weight,
            self.eps,
            self.scale,
            self.norm_eps,
            self.out_dtype or self.sources[0].dtype,
        )

    def backward(self, statistics: tuple[Tensor, ...], needs_grad: list[bool] | None = None) -> Gradients:
        """The kernels' gradients; `statistics` is what `forward` returned after the output."""
        return Gradients(
            *aggregate.attn_res_backward(
                self.grad_out,
                self.grad_lse,
                self.grad_scores,
                self.sources,
                self.query,
                self.key_weight,
                self.norm_weight,
                *statistics,
                self.eps,
                self.scale,
                self.norm_eps,
                needs_grad or [True] * len(self.sources),
            )
        )

    def run(self) -> tuple[Tensor, Tensor, Gradients]:
        """Output, lse and gradients of the kernels."""
        out, lse, scores, rstd = self.forward()
        return out, lse, self.backward((lse, scores, rstd))

    def exact(self) -> tuple[Tensor, Tensor, Gradients]:
        """The same by autograd through the definition, in float64."""
        sources = [x.detach().cpu().double().requires_grad_() for x in self.sources]
        query, key_weight, norm_weight = exact_leaves(self.query, self.key_weight, self.norm_weight)
        out, lse, weights = reference.attn_res(
            sources,
            query,
            key_weight,
            eps=self.eps,
            scale=self.scale,
            norm_weight=norm_weight,
            norm_eps=self.norm_eps,
            return_lse=True,
            return_weights=True,
        )
        total = (out * self.grad_out.cpu().double()).sum()
        if self.grad_lse is not None:
            total = total + (lse * self.grad_lse.cpu().double()).sum()
        if self.grad_scores is not None:
            total = total + ((weights.log() + lse) * self.grad_scores.cpu().double()).sum()
        total.backward()
        dsources = [torch.zeros_like(x) if x.grad is None else x.grad for x in sources]
        return out.detach(), lse.detach(), Gradients(dsources, *gradients_of(query, key_weight, norm_weight))


def random_problem(
    count: int,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    common: float = 1.0,
    norm: bool = False,
    key_weight: bool = True,
    extra: bool = False,
    parameter_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **changes: object,
) -> Problem:
    """Sources that share a component `common` times as large as their own; scores of order one.

    `extra`: gradients of lse and of the scores arrive as well.
    """
    *leading, dim = shape
    problem = Problem(
        correlated_sources(count, shape, common, dtype, device),
        (torch.randn(dim) * dim**-0.5).to(device, parameter_dtype),
        (torch.rand(dim) + 0.5).to(device, parameter_dtype) if key_weight else None,
        (torch.rand(dim) + 0.5).to(device, parameter_dtype) if norm else None,
        torch.randn(*shape).to(device, dtype),
        torch.randn(*leading, device=device) if extra else None,
        torch.randn(count, *leading, device=device) if extra else None,
    )
    return dataclasses.replace(problem, **changes)


SOURCE_GRADIENT_BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 4e-3}


def assert_gradients_close(actual: Gradients, exact: Gradients, dtype: torch.dtype) -> None:
    """The bounds of the project: parameters 2e-6 whatever the sources' dtype, sources by their dtype."""
    for j, (gradient, right) in enumerate(zip(actual.sources, exact.sources, strict=True)):
        assert relative_error(gradient.cpu(), right) <= SOURCE_GRADIENT_BOUNDS[dtype], f"source {j}"
    for gradient, right in zip(actual.parameters, exact.parameters, strict=True):
        assert_parameter_gradient(gradient, right, dtype)
