"""Attention Residuals as functions: arguments checked, custom ops behind them, gradients for everything differentiable.

Letters: N sources, S queries, D hidden size; `...` stands for the leading dimensions of the sources, alike for all of them.
The formulas are those of `blockres.reference`, which has the same signatures.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from blockres import cpu
from blockres.cpu import compute_dtype


def attn_res(
    sources: Sequence[Tensor] | Tensor,
    query: Tensor,
    key_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    scale: float = 1.0,
    norm_weight: Tensor | None = None,
    norm_eps: float | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """One aggregation: softmax over the sources by `scale * <query * key_weight, source / rms(source)>`.

    Args:
        sources: N tensors `[..., D]`, or one tensor `[N, ..., D]`.
        query, key_weight: `[D]`.
        norm_weight: `[D]`; where given, the output is passed through an RMSNorm with this weight and `norm_eps`.
        norm_eps: defaults to `eps`.
        out_dtype: defaults to the sources' dtype.

    Returns:
        `[..., D]`; then, where asked for, `lse [...]` and the softmax weights `[N, ...]`.
    """
    sources = list(sources.unbind(0) if isinstance(sources, Tensor) else sources)
    norm_eps = eps if norm_eps is None else norm_eps
    out_dtype = out_dtype or sources[0].dtype
    out, lse, scores, _ = _attn_res_forward(sources, query, key_weight, norm_weight, eps, scale, norm_eps, out_dtype)
    results = [out]
    if return_lse:
        results.append(lse)
    if return_weights:
        results.append((scores - lse).exp())
    return results[0] if len(results) == 1 else tuple(results)


def _kernels() -> ModuleType:
    try:
        import blockres_kernels
    except ImportError as error:
        raise RuntimeError(
            f"blockres runs CUDA tensors through Triton kernels, and these cannot be imported here: {error}. "
            "Install the triton that your PyTorch names, or move the tensors to the CPU."
        ) from error
    return blockres_kernels


def _operation(name: str, schema: str) -> Any:
    """A custom op whose implementations are the functions of that name in `blockres.cpu` and `blockres_kernels`."""

    def on_cpu(*args: Any) -> Any:
        return getattr(cpu, name)(*args)

    def on_cuda(*args: Any) -> Any:
        return getattr(_kernels(), name)(*args)

    operation = torch.library.custom_op(f"blockres::{name}", on_cpu, mutates_args=(), device_types="cpu", schema=schema)
    operation.register_kernel("cuda")(on_cuda)
    return operation


_attn_res_forward = _operation(
    "attn_res_forward",
    "(Tensor[] sources, Tensor query, Tensor? key_weight, Tensor? norm_weight, float eps, float scale, float norm_eps, "
    "ScalarType out_dtype) -> (Tensor out, Tensor lse, Tensor scores, Tensor rstd)",
)
_attn_res_backward = _operation(
    "attn_res_backward",
    "(Tensor grad_out, Tensor? grad_lse, Tensor? grad_scores, Tensor[] sources, Tensor query, Tensor? key_weight, "
    "Tensor? norm_weight, Tensor lse, Tensor scores, Tensor rstd, float eps, float scale, float norm_eps, "
    "bool[] needs_grad) -> (Tensor[] dsources, Tensor dkey, Tensor dnorm_weight)",
)


@_attn_res_forward.register_fake
def _(sources, query, key_weight, norm_weight, eps, scale, norm_eps, out_dtype):
    first = sources[0]
    lead, compute = first.shape[:-1], compute_dtype(first.dtype)
    return (
        first.new_empty(first.shape, dtype=out_dtype),
        first.new_empty(lead, dtype=compute),
        first.new_empty((len(sources), *lead), dtype=compute),
        first.new_empty((len(sources), *lead), dtype=compute),
    )


@_attn_res_backward.register_fake
def _(
    grad_out,
    grad_lse,
    grad_scores,
    sources,
    query,
    key_weight,
    norm_weight,
    lse,
    scores,
    rstd,
    eps,
    scale,
    norm_eps,
    needs_grad,
):
    width = query.shape[0]
    return (
        [s.new_empty(s.shape if needed else (0,)) for s, needed in zip(sources, needs_grad, strict=True)],
        scores.new_empty(width),
        scores.new_empty(0 if norm_weight is None else width),
    )


def _attn_res_setup(ctx, inputs, output):
    sources, query, key_weight, norm_weight, *ctx.settings, _ = inputs
    _, lse, scores, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(*sources, query, key_weight, norm_weight, lse, scores, rstd)


def _attn_res_autograd(ctx, grad_out, grad_lse, grad_scores, _):
    *sources, query, key_weight, norm_weight, lse, scores, rstd = ctx.saved_tensors
    needs_grad = ctx.needs_input_grad[0]
    if grad_out is None:
        grad_out = sources[0].new_zeros(sources[0].shape[-1]).expand_as(sources[0])
    dsources, dkey, dnorm_weight = _attn_res_backward(
        grad_out,
        grad_lse,
        grad_scores,
        sources,
        query,
        key_weight,
        norm_weight,
        lse,
        scores,
        rstd,
        *ctx.settings,
        list(needs_grad),
    )
    dsources = [d if needed else None for d, needed in zip(dsources, needs_grad, strict=True)]
    return (
        dsources,
        *_parameter_gradients(dkey, query, key_weight),
        None if norm_weight is None else dnorm_weight.to(norm_weight.dtype),
        None,
        None,
        None,
        None,
    )


def _parameter_gradients(dkey: Tensor, query: Tensor, key_weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """From the gradient of `query * key_weight` to those of its factors."""
    if key_weight is None:
        return dkey.to(query.dtype), None
    return (dkey * key_weight).to(query.dtype), (dkey * query).to(key_weight.dtype)


torch.library.register_autograd("blockres::attn_res_forward", _attn_res_autograd, setup_context=_attn_res_setup)
