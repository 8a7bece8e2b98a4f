"""The mathematics of Attention Residuals in plain PyTorch: the definition that every faster path is tested against.

Source of the formulas: Kimi Team, *Attention Residuals*, arXiv:2603.15031, and Algorithm 1 there for the two phases.

Letters: N sources, S queries, D hidden size; `...` stands for any leading dimensions (batch, tokens), the same for all.

Everything is computed in float32, or in float64 where a source is float64, and rounded once, to `out_dtype`.
The functions stack and upcast whatever they are given and lean on autograd: clear and slow by intent.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


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
    """One aggregation: softmax over the sources by `<query * key_weight, source / rms(source)>`.

    Args:
        sources: N tensors `[..., D]`, or one tensor `[N, ..., D]`.
        query, key_weight: `[D]`.
        norm_weight: `[D]`; where given, the output is passed through an RMSNorm with this weight and `norm_eps`.
        norm_eps: defaults to `eps`.
        out_dtype: defaults to the sources' dtype.

    Returns:
        `[..., D]`; then, where asked for, `lse [...]` and the softmax weights `[N, ...]`.
    """
    values = _widen(sources if isinstance(sources, Tensor) else torch.stack(tuple(sources)))
    scores = _scores(values, query, key_weight, eps, scale)
    weights = scores.softmax(0)
    out = torch.einsum("n...,n...d->...d", weights, values)
    if norm_weight is not None:
        out = _rms_norm(out, norm_weight, eps if norm_eps is None else norm_eps)
    results = [out.to(out_dtype or sources[0].dtype)]
    if return_lse:
        results.append(scores.logsumexp(0))
    if return_weights:
        results.append(weights)
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
        norm_weight: `[D]`; an RMSNorm on the output of the block's **first** query only, whose output is final: nothing
            is merged into it.

    Returns:
        outputs `[S, ..., D]` in `out_dtype` (default: the sources' dtype) and `lse [S, ...]`.
    """
    values = _widen(sources if isinstance(sources, Tensor) else torch.stack(tuple(sources)))
    scores = torch.stack(
        [_scores(values, q, None if key_weights is None else key_weights[s], eps, scale) for s, q in enumerate(queries)]
    )
    outputs = torch.einsum("sn...,n...d->s...d", scores.softmax(1), values)
    if norm_weight is not None:
        first = _rms_norm(outputs[0], norm_weight, eps if norm_eps is None else norm_eps)
        outputs = torch.cat([first[None], outputs[1:]])
    return outputs.to(out_dtype or sources[0].dtype), scores.logsumexp(1)


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
        update: `[..., D]`, added to `partial` first; the sum is rounded to `partial`'s dtype **before** it is scored,
            so that fused and unfused adds agree.
        query, key_weight, norm_weight: `[D]`.

    Returns:
        `h [..., D]` in `out_dtype` (default: `output`'s dtype) and the new partial in `partial`'s dtype.
    """
    if update is not None:
        partial = (_widen(partial) + _widen(update)).to(partial.dtype)
    value, before = _widen(partial), _widen(output)
    score = _scores(value, query, key_weight, eps, scale)
    h = before + torch.sigmoid(score - lse).unsqueeze(-1) * (value - before)
    if norm_weight is not None:
        h = _rms_norm(h, norm_weight, eps if norm_eps is None else norm_eps)
    return h.to(out_dtype or output.dtype), partial


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scores(values: Tensor, query: Tensor, key_weight: Tensor | None, eps: float, scale: float) -> Tensor:
    key = query.to(values.dtype)
    if key_weight is not None:
        key = key * key_weight.to(values.dtype)
    return scale * (values @ key) * (values.square().mean(-1) + eps).rsqrt()


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(x.dtype)
