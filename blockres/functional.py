"""Attention Residuals as functions: arguments checked, custom ops behind them, gradients for everything differentiable.

Letters: N sources, S queries, D hidden size; `...` are the leading dimensions of the sources, alike for all of them.
The formulas are those of `blockres.reference`, which has the same signatures.
"""

from collections.abc import Sequence
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
    out, lse, scores, _ = _attn_res_forward(
        sources, query, key_weight, norm_weight, eps, scale, norm_eps, out_dtype or sources[0].dtype
    )
    results = [out]
    if return_lse:
        results.append(lse)
    if return_weights:
        results.append((scores - lse).exp())
    return results[0] if len(results) == 1 else tuple(results)


def attn_res_inter(
    sources: Sequence[Tensor] | Tensor,
    queries: Tensor,
    key_weights: Tensor | None = None,
    *,
    eps: float = 1e-6,
    scale: float = 1.0,
    norm_weight: Tensor | None = None,
    norm_eps: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Phase 1: the aggregations of all S queries of a block over the same completed sources.

    Args:
        sources: as in `attn_res`.
        queries, key_weights: `[S, D]`.
        norm_weight: `[D]`; an RMSNorm on the output of the block's **first** query only, whose output is final.

    Returns:
        outputs `[S, ..., D]` in `out_dtype` (default: the sources' dtype) and `lse [S, ...]`.
    """
    sources = list(sources.unbind(0) if isinstance(sources, Tensor) else sources)
    norm_eps = eps if norm_eps is None else norm_eps
    outputs, lse, _, _ = _attn_res_inter_forward(
        sources, queries, key_weights, norm_weight, eps, scale, norm_eps, out_dtype or sources[0].dtype
    )
    return outputs, lse


def attn_res_merge(
    output: Tensor,
    lse: Tensor,
    partial: Tensor,
    query: Tensor,
    key_weight: Tensor | None = None,
    *,
    update: Tensor | None = None,
    eps: float = 1e-6,
    scale: float = 1.0,
    norm_weight: Tensor | None = None,
    norm_eps: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Phase 2: merge the open block's running sum into one query's phase-1 result.

    Args:
        output, lse: `[..., D]` and `[...]`, one query's part of what `attn_res_inter` returned.
        partial: `[..., D]`, the running sum of the open block.
        update: `[..., D]`, added to `partial` first; the sum is rounded to `partial`'s dtype before it is scored.
        query, key_weight, norm_weight: `[D]`.

    Returns:
        `h [..., D]` in `out_dtype` (default: `output`'s dtype) and the new partial in `partial`'s dtype; without an
        update that is `partial` itself.
    """
    norm_eps = eps if norm_eps is None else norm_eps
    h, partial_new, _ = _attn_res_merge_forward(
        output, lse, partial, update, query, key_weight, norm_weight, eps, scale, norm_eps, out_dtype or output.dtype
    )
    return h, partial if update is None else partial_new


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
_attn_res_inter_forward = _operation(
    "attn_res_inter_forward",
    "(Tensor[] sources, Tensor queries, Tensor? key_weights, Tensor? norm_weight, float eps, float scale, "
    "float norm_eps, ScalarType out_dtype) -> (Tensor outputs, Tensor lse, Tensor scores, Tensor rstd)",
)
_attn_res_inter_backward = _operation(
    "attn_res_inter_backward",
    "(Tensor[] grad_outputs, Tensor? grad_lse, Tensor[] sources, Tensor queries, Tensor? key_weights, "
    "Tensor? norm_weight, Tensor lse, Tensor scores, Tensor rstd, float eps, float scale, float norm_eps, "
    "bool[] needs_grad, Tensor?[] accumulate) -> (Tensor[] dsources, Tensor dkeys, Tensor dnorm_weight)",
)
_attn_res_merge_forward = _operation(
    "attn_res_merge_forward",
    "(Tensor output, Tensor lse, Tensor partial, Tensor? update, Tensor query, Tensor? key_weight, "
    "Tensor? norm_weight, float eps, float scale, float norm_eps, ScalarType out_dtype) "
    "-> (Tensor h, Tensor partial_new, Tensor stats)",
)
_attn_res_merge_backward = _operation(
    "attn_res_merge_backward",
    "(Tensor grad_h, Tensor? grad_partial, Tensor output, Tensor lse, Tensor partial_new, Tensor query, "
    "Tensor? key_weight, Tensor? norm_weight, Tensor stats, float eps, float scale, float norm_eps) "
    "-> (Tensor doutput, Tensor dlse, Tensor dpartial, Tensor dkey, Tensor dnorm_weight)",
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
    return _fake_gradients(sources, needs_grad, query, norm_weight, scores.dtype)


@_attn_res_inter_forward.register_fake
def _(sources, queries, key_weights, norm_weight, eps, scale, norm_eps, out_dtype):
    first, count = sources[0], queries.shape[0]
    lead, compute = first.shape[:-1], compute_dtype(first.dtype)
    return (
        first.new_empty((count, *first.shape), dtype=out_dtype),
        first.new_empty((count, *lead), dtype=compute),
        first.new_empty((count, len(sources), *lead), dtype=compute),
        first.new_empty((len(sources), *lead), dtype=compute),
    )


@_attn_res_inter_backward.register_fake
def _(
    grad_outputs,
    grad_lse,
    sources,
    queries,
    key_weights,
    norm_weight,
    lse,
    scores,
    rstd,
    eps,
    scale,
    norm_eps,
    needs_grad,
    accumulate,
):
    return _fake_gradients(sources, needs_grad, queries, norm_weight, scores.dtype)


@_attn_res_merge_forward.register_fake
def _(output, lse, partial, update, query, key_weight, norm_weight, eps, scale, norm_eps, out_dtype):
    compute = compute_dtype(torch.promote_types(output.dtype, partial.dtype))
    return (
        output.new_empty(output.shape, dtype=out_dtype),
        partial.new_empty(0 if update is None else partial.shape),
        output.new_empty((2, *lse.shape), dtype=compute),
    )


@_attn_res_merge_backward.register_fake
def _(grad_h, grad_partial, output, lse, partial_new, query, key_weight, norm_weight, stats, eps, scale, norm_eps):
    return (
        output.new_empty(output.shape),
        lse.new_empty(lse.shape),
        partial_new.new_empty(partial_new.shape),
        *_fake_parameter_gradients(query, norm_weight, stats.dtype),
    )


def _fake_gradients(sources, needs_grad, query, norm_weight, compute):
    dsources = [s.new_empty(s.shape if needed else (0,)) for s, needed in zip(sources, needs_grad, strict=True)]
    return dsources, *_fake_parameter_gradients(query, norm_weight, compute)


def _fake_parameter_gradients(query, norm_weight, compute):
    dnorm_weight = query.new_empty(0 if norm_weight is None else norm_weight.shape, dtype=compute)
    return query.new_empty(query.shape, dtype=compute), dnorm_weight


def _save_attn_res(ctx, inputs, output):
    sources, query, key_weight, norm_weight, *ctx.settings, _ = inputs
    _, lse, scores, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(*sources, query, key_weight, norm_weight, lse, scores, rstd)


def _differentiate_attn_res(ctx, grad_out, grad_lse, grad_scores, _):
    *sources, query, key_weight, norm_weight, lse, scores, rstd = ctx.saved_tensors
    needs_grad = ctx.needs_input_grad[0]
    dsources, dkey, dnorm_weight = _attn_res_backward(
        _zeros_like(sources[0]) if grad_out is None else grad_out,
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
        needs_grad,
    )
    parameters = _parameter_gradients(dkey, dnorm_weight, query, key_weight, norm_weight)
    return _only(dsources, needs_grad), *parameters, None, None, None, None


def _save_inter(ctx, inputs, output):
    sources, queries, key_weights, norm_weight, *ctx.settings, _ = inputs
    _, lse, scores, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(scores, rstd)
    ctx.save_for_backward(*sources, queries, key_weights, norm_weight, lse, scores, rstd)


def _differentiate_inter(ctx, grad_outputs, grad_lse, *_):
    *sources, queries, key_weights, norm_weight, lse, scores, rstd = ctx.saved_tensors
    needs_grad = ctx.needs_input_grad[0]
    dsources, dkeys, dnorm_weight = _attn_res_inter_backward(
        [_zeros_like(sources[0])] * len(queries) if grad_outputs is None else list(grad_outputs.unbind(0)),
        grad_lse,
        sources,
        queries,
        key_weights,
        norm_weight,
        lse,
        scores,
        rstd,
        *ctx.settings,
        needs_grad,
        [None] * len(sources),
    )
    parameters = _parameter_gradients(dkeys, dnorm_weight, queries, key_weights, norm_weight)
    return _only(dsources, needs_grad), *parameters, None, None, None, None


def _save_merge(ctx, inputs, output):
    merged, lse, partial, update, query, key_weight, norm_weight, *ctx.settings, _ = inputs
    _, partial_new, stats = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(stats)
    ctx.update_dtype = None if update is None else update.dtype
    ctx.save_for_backward(
        merged, lse, partial if update is None else partial_new, query, key_weight, norm_weight, stats
    )


def _differentiate_merge(ctx, grad_h, grad_partial, _):
    output, lse, partial, query, key_weight, norm_weight, stats = ctx.saved_tensors
    doutput, dlse, dpartial, dkey, dnorm_weight = _attn_res_merge_backward(
        _zeros_like(output) if grad_h is None else grad_h,
        None if ctx.update_dtype is None else grad_partial,
        output,
        lse,
        partial,
        query,
        key_weight,
        norm_weight,
        stats,
        *ctx.settings,
    )
    dupdate = None if ctx.update_dtype is None else dpartial.to(ctx.update_dtype)
    parameters = _parameter_gradients(dkey, dnorm_weight, query, key_weight, norm_weight)
    return doutput, dlse, dpartial, dupdate, *parameters, None, None, None, None


def _zeros_like(tensor: Tensor) -> Tensor:
    """The gradient of an output that nothing reads: one row of zeros, seen from every token."""
    return tensor.new_zeros(tensor.shape[-1]).expand(tensor.shape)


def _only(gradients: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
    return [gradient if wanted else None for gradient, wanted in zip(gradients, needed, strict=True)]


def _parameter_gradients(
    dkey: Tensor, dnorm_weight: Tensor, query: Tensor, key_weight: Tensor | None, norm_weight: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """From the gradient of `query * key_weight` to those of its factors; each in its parameter's dtype."""
    dnorm_weight_cast = None if norm_weight is None else dnorm_weight.to(norm_weight.dtype)
    if key_weight is None:
        return dkey.to(query.dtype), None, dnorm_weight_cast
    return (dkey * key_weight).to(query.dtype), (dkey * query).to(key_weight.dtype), dnorm_weight_cast


_attn_res_forward.register_autograd(_differentiate_attn_res, setup_context=_save_attn_res)
_attn_res_inter_forward.register_autograd(_differentiate_inter, setup_context=_save_inter)
_attn_res_merge_forward.register_autograd(_differentiate_merge, setup_context=_save_merge)
