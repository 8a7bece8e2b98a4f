"""The custom ops behind `blockres.functional`: schemas, fake implementations and autograd formulas.

Letters: N sources, S queries, D hidden size; `...` are the leading dimensions of the sources.

Every operation is two ops, `blockres::<name>_forward` and `blockres::<name>_backward`, named after the functions of
`blockres.cpu` and `blockres_kernels` that implement them; PyTorch's dispatch chooses between the two by device. What is
saved for backward are inputs and a few numbers per token. `blockres::attn_res_step`, for inference, has no backward; it
writes into the memory that it is given.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from blockres import cpu
from blockres.cpu import compute_dtype


def kernels() -> ModuleType:
    """The Triton kernels, imported when the first CUDA tensor arrives."""
    try:
        import blockres_kernels
    except ImportError as error:
        raise RuntimeError(
            f"CUDA tensors go through Triton kernels, and these cannot be imported here: {error}. Install the version "
            f"of triton that PyTorch {torch.__version__} is built for, or move the tensors to the CPU"
        ) from error
    return blockres_kernels


def _operation(name: str, schema: str, mutates: Sequence[str] = ()) -> Any:
    """A custom op whose implementations are the functions of that name in `blockres.cpu` and `blockres_kernels`."""

    def on_cpu(*args: Any) -> Any:
        # Autocast would reach the PyTorch calls that the implementation is made of.
        with torch.autocast("cpu", enabled=False):
            return getattr(cpu, name)(*args)

    def on_cuda(*args: Any) -> Any:
        return getattr(kernels(), name)(*args)

    operation = torch.library.custom_op(
        f"blockres::{name}", on_cpu, mutates_args=mutates, device_types="cpu", schema=schema
    )
    operation.register_kernel("cuda")(on_cuda)
    return operation


attn_res_forward = _operation(
    "attn_res_forward",
    "(Tensor[] sources, Tensor query, Tensor? key_weight, Tensor? norm_weight, float eps, float scale, float norm_eps, "
    "ScalarType out_dtype) -> (Tensor out, Tensor lse, Tensor scores, Tensor rstd)",
)
attn_res_backward = _operation(
    "attn_res_backward",
    "(Tensor grad_out, Tensor? grad_lse, Tensor? grad_scores, Tensor[] sources, Tensor query, Tensor? key_weight, "
    "Tensor? norm_weight, Tensor lse, Tensor scores, Tensor rstd, float eps, float scale, float norm_eps, "
    "bool[] needs_grad) -> (Tensor[] dsources, Tensor dquery, Tensor dkey_weight, Tensor dnorm_weight)",
)


@attn_res_forward.register_fake
def _(sources, query, key_weight, norm_weight, eps, scale, norm_eps, out_dtype):
    first = sources[0]
    lead, compute = first.shape[:-1], compute_dtype(first.dtype)
    return (
        first.new_empty(first.shape, dtype=out_dtype),
        first.new_empty(lead, dtype=compute),
        first.new_empty((len(sources), *lead), dtype=compute),
        first.new_empty((len(sources), *lead), dtype=compute),
    )


@attn_res_backward.register_fake
def _(grad_out, grad_lse, grad_scores, sources, query, key_weight, norm_weight, *others):
    return _fake_gradients(sources, others[-1]), *_fake_parameter_gradients(query, key_weight, norm_weight)


def _save_attn_res(ctx, inputs, output):
    sources, query, key_weight, norm_weight, *ctx.settings, _ = inputs
    _, lse, scores, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(*sources, query, key_weight, norm_weight, lse, scores, rstd)


def _differentiate_attn_res(ctx, grad_out, grad_lse, grad_scores, _):
    *sources, query, key_weight, norm_weight, lse, scores, rstd = ctx.saved_tensors
    needs_grad = ctx.needs_input_grad[0]
    grad_out = _zeros_like(sources[0]) if grad_out is None else grad_out
    parameters = query, key_weight, norm_weight
    saved = (sources, *parameters, lse, scores, rstd)
    dsources, *dparameters = attn_res_backward(grad_out, grad_lse, grad_scores, *saved, *ctx.settings, needs_grad)
    return _only(dsources, needs_grad), *_given(dparameters, parameters), None, None, None, None


attn_res_forward.register_autograd(_differentiate_attn_res, setup_context=_save_attn_res)


attn_res_inter_forward = _operation(
    "attn_res_inter_forward",
    "(Tensor[] sources, Tensor queries, Tensor? key_weights, Tensor? norm_weight, float eps, float scale, "
    "float norm_eps, ScalarType out_dtype) -> (Tensor outputs, Tensor lse, Tensor scores, Tensor rstd)",
)
attn_res_inter_backward = _operation(
    "attn_res_inter_backward",
    "(Tensor[] grad_outputs, Tensor? grad_lse, Tensor[] sources, Tensor queries, Tensor? key_weights, "
    "Tensor? norm_weight, Tensor lse, Tensor scores, Tensor rstd, float eps, float scale, float norm_eps, "
    "bool[] needs_grad, Tensor?[] accumulate) "
    "-> (Tensor[] dsources, Tensor dqueries, Tensor dkey_weights, Tensor dnorm_weight)",
)


@attn_res_inter_forward.register_fake
def _(sources, queries, key_weights, norm_weight, eps, scale, norm_eps, out_dtype):
    first, count = sources[0], queries.shape[0]
    lead, compute = first.shape[:-1], compute_dtype(first.dtype)
    return (
        first.new_empty((count, *first.shape), dtype=out_dtype),
        first.new_empty((count, *lead), dtype=compute),
        first.new_empty((count, len(sources), *lead), dtype=compute),
        first.new_empty((len(sources), *lead), dtype=compute),
    )


@attn_res_inter_backward.register_fake
def _(grad_outputs, grad_lse, sources, queries, key_weights, norm_weight, *others):
    return _fake_gradients(sources, others[-2]), *_fake_parameter_gradients(queries, key_weights, norm_weight)


def _save_inter(ctx, inputs, output):
    sources, queries, key_weights, norm_weight, *ctx.settings, _ = inputs
    _, lse, scores, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(scores, rstd)
    ctx.save_for_backward(*sources, queries, key_weights, norm_weight, lse, scores, rstd)


def _differentiate_inter(ctx, grad_outputs, grad_lse, *_):
    *sources, queries, key_weights, norm_weight, lse, scores, rstd = ctx.saved_tensors
    grads = [None] * len(lse) if grad_outputs is None else grad_outputs.unbind(0)
    saved = (sources, queries, key_weights, norm_weight, lse, scores, rstd)
    needs_grad = ctx.needs_input_grad[0]
    dsources, parameters = _inter_gradients(grads, grad_lse, saved, ctx.settings, needs_grad, [None] * len(sources))
    return dsources, *parameters, None, None, None, None


def _inter_gradients(grad_outputs, grad_lse, saved, settings, needs_grad, accumulate):
    sources, *parameters = saved[:4]
    grad_outputs = [_zeros_like(sources[0]) if grad is None else grad for grad in grad_outputs]
    arguments = grad_outputs, grad_lse, *saved, *settings, needs_grad, accumulate
    dsources, *dparameters = attn_res_inter_backward(*arguments)
    return _only(dsources, needs_grad), _given(dparameters, parameters)


attn_res_inter_forward.register_autograd(_differentiate_inter, setup_context=_save_inter)


class ChainedInter(torch.autograd.Function):
    """`attn_res_inter` that the sources pass through, so that their later readers' gradients come to its backward.

    A custom op may not return its inputs, hence this Function around the ops. Outputs: S outputs `[..., D]`, S lse
    `[...]`, and N sources, which share memory with those that came in. The S outputs stay apart, and so do their
    gradients: nothing is stacked on the way back.
    """

    @staticmethod
    def forward(ctx, queries, key_weights, norm_weight, settings, out_dtype, *sources):
        inputs = (sources, queries, key_weights, norm_weight, *settings, out_dtype)
        outputs, lse, scores, rstd = attn_res_inter_forward(*inputs)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*sources, queries, key_weights, norm_weight, lse, scores, rstd)
        return *outputs.unbind(0), *lse.unbind(0), *(source.view_as(source) for source in sources)

    @staticmethod
    def backward(ctx, *grads):
        *sources, queries, key_weights, norm_weight, lse, scores, rstd = ctx.saved_tensors
        count, needs_grad = len(lse), ctx.needs_input_grad[5:]
        grad_outputs, grad_lse, passed = grads[:count], grads[count : 2 * count], grads[2 * count :]
        if all(grad is None for grad in (*grad_outputs, *grad_lse)):
            return None, None, None, None, None, *passed
        saved = (sources, queries, key_weights, norm_weight, lse, scores, rstd)
        grad_lse = _stacked(grad_lse, lse)
        dsources, parameters = _inter_gradients(grad_outputs, grad_lse, saved, ctx.settings, needs_grad, passed)
        return *parameters, None, None, *dsources


def _stacked(gradients, like):
    """One gradient of all S lse `[S, ...]`, or None where none of them is used."""
    if all(gradient is None for gradient in gradients):
        return None
    pairs = zip(gradients, like.unbind(0), strict=True)
    return torch.stack([torch.zeros_like(row) if gradient is None else gradient for gradient, row in pairs])


attn_res_merge_forward = _operation(
    "attn_res_merge_forward",
    "(Tensor output, Tensor lse, Tensor partial, Tensor? update, Tensor query, Tensor? key_weight, "
    "Tensor? norm_weight, float eps, float scale, float norm_eps, ScalarType out_dtype) "
    "-> (Tensor h, Tensor partial_new, Tensor stats)",
)
attn_res_merge_backward = _operation(
    "attn_res_merge_backward",
    "(Tensor grad_h, Tensor? grad_partial, Tensor output, Tensor lse, Tensor partial_new, Tensor query, "
    "Tensor? key_weight, Tensor? norm_weight, Tensor stats, float eps, float scale, float norm_eps) "
    "-> (Tensor doutput, Tensor dlse, Tensor dpartial, Tensor dquery, Tensor dkey_weight, Tensor dnorm_weight)",
)


@attn_res_merge_forward.register_fake
def _(output, lse, partial, update, query, key_weight, norm_weight, eps, scale, norm_eps, out_dtype):
    compute = compute_dtype(torch.promote_types(output.dtype, partial.dtype))
    return (
        output.new_empty(output.shape, dtype=out_dtype),
        partial.new_empty(0 if update is None else partial.shape),
        output.new_empty((2, *lse.shape), dtype=compute),
    )


@attn_res_merge_backward.register_fake
def _(grad_h, grad_partial, output, lse, partial_new, query, key_weight, norm_weight, stats, *settings):
    return (
        output.new_empty(output.shape),
        lse.new_empty(lse.shape),
        partial_new.new_empty(partial_new.shape),
        *_fake_parameter_gradients(query, key_weight, norm_weight),
    )


def _save_merge(ctx, inputs, output):
    merged, lse, partial, update, query, key_weight, norm_weight, *ctx.settings, _ = inputs
    _, partial_new, stats = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(stats)
    ctx.update_dtype = None if update is None else update.dtype
    summed = partial if update is None else partial_new
    ctx.save_for_backward(merged, lse, summed, query, key_weight, norm_weight, stats)


def _differentiate_merge(ctx, grad_h, grad_partial, _):
    grad_partial = None if ctx.update_dtype is None else grad_partial
    doutput, dlse, dpartial, *parameters = _merge_gradients(ctx, grad_h, grad_partial)
    dupdate = None if ctx.update_dtype is None else dpartial.to(ctx.update_dtype)
    return doutput, dlse, dpartial, dupdate, *parameters, None, None, None, None


def _merge_gradients(ctx, grad_h, grad_partial):
    saved = ctx.saved_tensors
    grad_h = _zeros_like(saved[0]) if grad_h is None else grad_h
    doutput, dlse, dpartial, *dparameters = attn_res_merge_backward(grad_h, grad_partial, *saved, *ctx.settings)
    return doutput, dlse, dpartial, *_given(dparameters, saved[3:6])


attn_res_merge_forward.register_autograd(_differentiate_merge, setup_context=_save_merge)


class MergePassing(torch.autograd.Function):
    """`attn_res_merge` without an update, with the partial passed through: backward adds the gradient it gets later."""

    @staticmethod
    def forward(ctx, output, lse, partial, query, key_weight, norm_weight, settings, out_dtype):
        h, _, stats = attn_res_merge_forward(
            output, lse, partial, None, query, key_weight, norm_weight, *settings, out_dtype
        )
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output, lse, partial, query, key_weight, norm_weight, stats)
        return h, partial.view_as(partial)

    @staticmethod
    def backward(ctx, grad_h, grad_partial):
        if grad_h is None:
            return None, None, grad_partial, None, None, None, None, None
        return *_merge_gradients(ctx, grad_h, grad_partial), None, None


attn_res_step = _operation(
    "attn_res_step",
    "(Tensor bank, Tensor? partial, Tensor? update, Tensor(a!) total, Tensor(b!) out, Tensor query, "
    "Tensor? key_weight, Tensor? norm_weight, float eps, float scale, float norm_eps) -> ()",
    mutates=("total", "out"),
)


@attn_res_step.register_fake
def _(bank, partial, update, total, out, *others):
    return None


def _fake_gradients(sources, needs_grad):
    return [s.new_empty(s.shape if needed else (0,)) for s, needed in zip(sources, needs_grad, strict=True)]


def _fake_parameter_gradients(query, *others):
    return [
        query.new_empty(0) if parameter is None else parameter.new_empty(parameter.shape)
        for parameter in (query, *others)
    ]


def _zeros_like(tensor: Tensor) -> Tensor:
    """The gradient of an output that nothing reads: one row of zeros, seen from every token."""
    return tensor.new_zeros(tensor.shape[-1]).expand(tensor.shape)


def _only(gradients: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
    return [gradient if wanted else None for gradient, wanted in zip(gradients, needed, strict=True)]


def _given(gradients: Sequence[Tensor], parameters: Sequence[Tensor | None]) -> list[Tensor | None]:
    return _only(gradients, [parameter is not None for parameter in parameters])


def _refuse_second_derivative(ctx, *_):
    raise NotImplementedError(
        "blockres operations can be differentiated once: their backward has no derivative. The functions of "
        "blockres.reference, which have the same signatures, can be differentiated any number of times"
    )


for _backward in (attn_res_backward, attn_res_inter_backward, attn_res_merge_backward):
    _backward.register_autograd(_refuse_second_derivative)
