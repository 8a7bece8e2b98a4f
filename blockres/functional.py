"""Attention Residuals as functions: one aggregation, the same in two phases, and a step of inference.

Letters: N sources, S queries, D hidden size; `...` are the leading dimensions of the sources, alike for all of them.
Formulas: `blockres.reference`, whose functions have the same signatures; `attn_res_step` is its `attn_res` over a bank
and a running sum, written into memory that is given. Source: Kimi Team, *Attention Residuals*, arXiv:2603.15031.

All functions compute in float32 (float64 where a source is float64), whatever the dtypes of sources, parameters and
results, and round once. `torch.autocast` changes nothing here: dtypes are as given. CPU tensors go through
`blockres.cpu`, CUDA tensors through the Triton kernels of `blockres_kernels`. Gradients exist for every tensor
argument but those of `attn_res_step`, in reverse mode and once; `torch.compile` takes all functions whole.

A kernel is compiled for a width, dtypes, a number of queries and a bucket of numbers of sources, and for `eps`, `scale`
and `norm_eps`, which are constants in it: to change a scale from step to step, scale the query. The number of tokens
does not matter where rows are contiguous; `pack` is compiled twice, for sizes that are multiples of 16 and for others.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from blockres import checks, cpu, ops


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
        sources: N tensors `[..., D]` of one shape, dtype and device, D at most 16384; or one tensor `[N, ..., D]`. They
            are read where they are: the last dimension must be contiguous, the leading ones must reduce to at most two
            strides, which may be 0. The same memory may appear more than once.
        query, key_weight: `[D]`, of any float dtype.
        eps: added to the mean square of a source before the root.
        scale: factor of the scores; the paper's is 1.
        norm_weight: `[D]`; where given, the output is passed through an RMSNorm with this weight and `norm_eps`.
        norm_eps: defaults to `eps`.
        out_dtype: defaults to the sources' dtype.

    Returns:
        `[..., D]`; then, where asked for, `lse [...]`, the log of the sum of exponentials of the scores, and the
        softmax weights `[N, ...]`, both float32 (float64 for float64 sources).

    Raises:
        TypeError: an argument that is not a plain tensor of float32, bfloat16, float16 or float64.
        ValueError: shapes, devices, strides or numbers that do not fit.
    """
    sources = checks.source_list(sources)
    first = sources[0]
    checks.tensor("query", query)
    for name, parameter in (("query", query), ("key_weight", key_weight), ("norm_weight", norm_weight)):
        checks.parameter(name, parameter, first.shape[-1:], first)
    norm_eps = checks.numbers(eps, scale, norm_eps, norm_weight)
    out_dtype = checks.result_dtype(out_dtype, first.dtype)
    out, lse, scores, _ = ops.attn_res_forward(sources, query, key_weight, norm_weight, eps, scale, norm_eps, out_dtype)
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
        queries, key_weights: `[S, D]`, of any float dtype.
        norm_weight: `[D]`; an RMSNorm on the output of the block's **first** query only, whose output is final: nothing
            is merged into it.
        eps, scale, norm_eps, out_dtype: as in `attn_res`.

    Returns:
        outputs `[S, ..., D]` in `out_dtype` (default: the sources' dtype) and `lse [S, ...]` in float32 (float64 for
        float64 sources).

    Raises:
        TypeError, ValueError: as `attn_res`.
    """
    sources, *others = _inter_arguments(sources, queries, key_weights, eps, scale, norm_weight, norm_eps, out_dtype)
    outputs, lse, _, _ = ops.attn_res_inter_forward(sources, queries, key_weights, norm_weight, *others)
    return outputs, lse


def attn_res_inter_chained(
    sources: Sequence[Tensor] | Tensor,
    queries: Tensor,
    key_weights: Tensor | None = None,
    *,
    eps: float = 1e-6,
    scale: float = 1.0,
    norm_weight: Tensor | None = None,
    norm_eps: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """`attn_res_inter` for a stream whose blocks are read again and again: the sources pass through it.

    Whoever reads a source after this call should read the one returned here. Its gradient then arrives at this call's
    backward, which adds its own part as it writes; autograd would otherwise add the two in a pass of its own, for every
    block that follows. Reading the source that went in is right too, only slower. Arguments as in `attn_res_inter`.

    Returns:
        S outputs `[..., D]`, S lse `[...]`, and the N sources, in the memory of those given. Outputs and lse are slices
        of one tensor each; the gradients of the outputs are never stacked.
    """
    sources, *settings, out_dtype = _inter_arguments(
        sources, queries, key_weights, eps, scale, norm_weight, norm_eps, out_dtype
    )
    inputs = (*sources, queries, key_weights, norm_weight)
    if not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)):
        outputs, lse, _, _ = ops.attn_res_inter_forward(
            sources, queries, key_weights, norm_weight, *settings, out_dtype
        )
        return outputs.unbind(0), lse.unbind(0), tuple(sources)
    results = ops.ChainedInter.apply(queries, key_weights, norm_weight, tuple(settings), out_dtype, *sources)
    count = queries.shape[0]
    passed = (p if s.requires_grad else s for p, s in zip(results[2 * count :], sources, strict=True))
    return results[:count], results[count : 2 * count], tuple(passed)


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

    The dtypes of output, partial, update and parameters are independent of each other.

    Args:
        output, lse: `[..., D]` and `[...]`, one query's part of what `attn_res_inter` returned.
        partial: `[..., D]`, the running sum of the open block.
        update: `[..., D]`, added to `partial` first; the sum is rounded to `partial`'s dtype **before** it is scored,
            so that fused and unfused adds agree.
        query, key_weight, norm_weight: `[D]`, of any float dtype.
        eps, scale, norm_eps, out_dtype: as in `attn_res`; `out_dtype` defaults to `output`'s.

    Returns:
        `h [..., D]` in `out_dtype` and the new partial in `partial`'s dtype. Without an update that is `partial`, in
        the same memory: the next merge should take the one returned, whose gradient comes back without an add.

    Raises:
        TypeError, ValueError: as `attn_res`.
    """
    for name, needed in (("output", output), ("lse", lse), ("partial", partial), ("query", query)):
        checks.tensor(name, needed)
    for name, value in (("output", output), ("partial", partial), ("update", update)):
        if value is not None:
            checks.rows(name, value)
            checks.one_cut(name, [value])
            checks.same_shape(name, value, "output", output)
            checks.same_device(name, value, output)
    checks.parameter("lse", lse, output.shape[:-1], output)
    for name, parameter in (("query", query), ("key_weight", key_weight), ("norm_weight", norm_weight)):
        checks.parameter(name, parameter, output.shape[-1:], output)
    settings = (eps, scale, checks.numbers(eps, scale, norm_eps, norm_weight))
    out_dtype = checks.result_dtype(out_dtype, output.dtype)
    lse = lse.to(cpu.compute_dtype(torch.promote_types(output.dtype, partial.dtype)))
    if update is None and partial.requires_grad and torch.is_grad_enabled():
        return ops.MergePassing.apply(output, lse, partial, query, key_weight, norm_weight, settings, out_dtype)
    h, partial_new, _ = ops.attn_res_merge_forward(
        output, lse, partial, update, query, key_weight, norm_weight, *settings, out_dtype
    )
    return h, partial if update is None else partial_new


def attn_res_step(
    bank: Tensor,
    query: Tensor,
    key_weight: Tensor | None = None,
    *,
    partial: Tensor | None = None,
    update: Tensor | None = None,
    total: Tensor | None = None,
    out: Tensor | None = None,
    eps: float = 1e-6,
    scale: float = 1.0,
    norm_weight: Tensor | None = None,
    norm_eps: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A sublayer's input for inference, in one pass: the pending add, the aggregation, the norm and the cast.

    It aggregates over the N sources in `bank` and, where a block is open, over its running sum `partial + update`. The
    update alone opens a block. On a GPU this is one launch, which allocates nothing where `total` and `out` are given.
    There is no gradient.

    Args:
        bank: `[N, ..., D]`, N at least 1 and of any size; a stride apart from each other (`slots[:n]` of a longer one).
        query, key_weight, norm_weight: `[D]`, of any float dtype.
        partial: `[..., D]` in the bank's dtype.
        update: `[..., D]` of any float dtype; the sum is rounded to the bank's dtype before it is scored.
        total: where the sum goes, in the bank's dtype. It may be `partial` itself, or a slot of the same tensor that is
            not among the N; fresh by default.
        out: where the result goes, of any float dtype; fresh by default, in `out_dtype`. It must not overlap what is
            read, but for `update` as a whole.
        eps, scale, norm_eps, out_dtype: as in `attn_res`; `out_dtype` defaults to the bank's, or is that of `out`.

    Rows of bank, partial, total and out must be one stride apart; those of `update` may have two.

    Returns:
        The result `[..., D]`, and the running sum: `total`, or `partial` where there is no update, or None.

    Raises:
        TypeError, ValueError: as `attn_res`.
        RuntimeError: where a gradient is required.
    """
    checks.tensor("bank", bank)
    checks.tensor("query", query)
    if bank.dim() < 2 or len(bank) < 1:
        raise ValueError(f"the bank must be [N, ..., D] with N at least 1, got shape {tuple(bank.shape)}")
    checks.no_gradient("attn_res_step", bank, partial, update, query, key_weight, norm_weight, total, out)
    slot = bank[0]
    for name, parameter in (("query", query), ("key_weight", key_weight), ("norm_weight", norm_weight)):
        checks.parameter(name, parameter, slot.shape[-1:], slot)
    norm_eps = checks.numbers(eps, scale, norm_eps, norm_weight)
    if update is None and total is not None:
        raise ValueError("total is where partial + update goes, and there is no update")
    if out is not None and out_dtype not in (None, out.dtype):
        raise ValueError(f"out is {out.dtype}, out_dtype says {out_dtype}; give one of them")
    if out is None:
        out = slot.new_empty(slot.shape, dtype=checks.result_dtype(out_dtype, slot.dtype))
    if total is None:
        total = slot.new_empty(0 if update is None else slot.shape)
    _check_step_rows(bank, partial, update, total, out)
    ops.attn_res_step(bank, partial, update, total, out, query, key_weight, norm_weight, eps, scale, norm_eps)
    return out, partial if update is None else total


def _check_step_rows(bank: Tensor, partial: Tensor | None, update: Tensor | None, total: Tensor, out: Tensor) -> None:
    slot = bank[0]
    for name, rows, alike in (
        ("a slot of the bank", slot, True),
        ("partial", partial, True),
        ("total", None if update is None else total, True),
        ("out", out, False),
    ):
        _check_row_set(name, rows, slot, alike)
    for name, written in (("total", total), ("out", out)):
        checks.writable(name, written, bank)
    if total is out:
        raise ValueError("total and out must be apart: both are written")
    if update is not None:
        checks.rows("update", update)
        checks.one_cut("update", [update])
        checks.same_shape("update", update, "a slot of the bank", slot)
        checks.same_device("update", update, slot)


def _check_row_set(name: str, value: Tensor | None, slot: Tensor, alike: bool) -> None:
    """Rows a stride apart, of the shape and on the device of the bank's; where `alike`, of its dtype too."""
    if value is None:
        return
    checks.rows(name, value)
    checks.one_stride(name, value)
    checks.same_shape(name, value, "a slot of the bank", slot)
    checks.same_device(name, value, slot)
    if alike:
        checks.same_dtype(name, value, "the bank", slot)


def pack(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The elements of all tensors, one tensor after the other, in one flat buffer of `dtype`. Not differentiable.

    The tensors are on one device; each is read once, with the cast on the way.

    Raises:
        TypeError: for anything but a dense tensor of float32, bfloat16, float16 or float64.
        ValueError: without a tensor.
    """
    if not tensors:
        raise ValueError("pack takes at least one tensor: the buffer is made where the first one is")
    for j, tensor in enumerate(tensors):
        checks.tensor(f"tensor {j}", tensor)
    return _implementation(tensors[0]).pack(tensors, dtype)


def unpack(buffer: Tensor, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """What was packed, in the given shapes and dtypes: views of the buffer where no cast is needed."""
    return _implementation(buffer).unpack(buffer, shapes, dtypes)


def _implementation(tensor: Tensor):
    return ops.kernels() if tensor.is_cuda else cpu


def _inter_arguments(
    sources: Sequence[Tensor] | Tensor,
    queries: Tensor,
    key_weights: Tensor | None,
    eps: float,
    scale: float,
    norm_weight: Tensor | None,
    norm_eps: float | None,
    out_dtype: torch.dtype | None,
) -> tuple[list[Tensor], float, float, float, torch.dtype]:
    sources = checks.source_list(sources)
    first = sources[0]
    checks.tensor("queries", queries)
    if queries.dim() != 2 or queries.shape[0] < 1:
        raise ValueError(f"queries must be [S, D] with S at least 1, got shape {tuple(queries.shape)}")
    checks.parameter("queries", queries, (queries.shape[0], first.shape[-1]), first)
    checks.parameter("key_weights", key_weights, queries.shape, first)
    checks.parameter("norm_weight", norm_weight, first.shape[-1:], first)
    norm_eps = checks.numbers(eps, scale, norm_eps, norm_weight)
    return sources, eps, scale, norm_eps, checks.result_dtype(out_dtype, first.dtype)
