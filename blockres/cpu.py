"""The operations for CPU tensors, in PyTorch calls that work through the tokens in chunks which stay in cache.

Letters: N sources, S queries, C tokens of one chunk, D hidden size; `...` stands for the leading dimensions of the sources.

A whole source is never stacked, copied or converted: the rows of a chunk are widened to the compute dtype where they are
narrower, used while they are hot, and forgotten. What backward is given are the scores and the reciprocal root mean squares,
a few numbers per token; the mixture is formed again from the sources that backward reads anyway.

Whatever decides a token's own result is elementwise, a reduction of single rows, or a batch of products with one token each.
Products over the rows of a chunk serve for parameter gradients only: BLAS chooses its kernel by the number of rows and
treats those at the edge differently, which would let a token's last bit depend on its neighbours.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Float32 elements per thread in the rows of one tensor in a chunk: 128 KiB. A source's rows, their product with the key, the
# accumulator and the upstream gradient are live together, 512 KiB: half the L2 cache of a current server core. The number
# is PyTorch's own grain too: with fewer elements per thread its elementwise kernels leave threads idle.
_CHUNK_ELEMENTS_PER_THREAD = 32768


def attn_res_forward(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    scale: float,
    norm_eps: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One aggregation: `out [..., D]`, `lse [...]`, `scores [N, ...]` and `rstd [N, ...]`."""
    first = sources[0]
    compute = compute_dtype(first.dtype)
    key, gain = _key(query, key_weight, compute), _converted(norm_weight, compute)
    out = first.new_empty(first.shape, dtype=out_dtype)
    lse = first.new_empty(first.shape[:-1], dtype=compute)
    scores = first.new_empty((len(sources), *first.shape[:-1]), dtype=compute)
    rstd = torch.empty_like(scores)
    scratch = _Scratch(compute)
    for (*rows, out_rows), (score, r, lse_row) in _chunks([*sources, out], [scores, rstd, lse[None]]):
        _score(rows, key, eps, scale, scratch, score, r)
        mix = _mix(rows, _softmax(score, lse_row[0]), scratch)
        if gain is not None:
            mix.mul_(_rstd(mix, norm_eps).unsqueeze(-1)).mul_(gain)
        out_rows.copy_(mix)
    return out, lse, scores, rstd


def attn_res_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    grad_scores: Tensor | None,
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    lse: Tensor,
    scores: Tensor,
    rstd: Tensor,
    eps: float,
    scale: float,
    norm_eps: float,
    needs_grad: Sequence[bool],
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Gradients of the sources (empty where not needed), of `query * key_weight [D]` and of `norm_weight [D]` (or empty)."""
    compute, count = scores.dtype, len(sources)
    key, gain = _key(query, key_weight, compute), _converted(norm_weight, compute)
    dsources = _gradients(sources, needs_grad)
    dkey, dgain = _Total(key), _Total(gain)
    scratch = _Scratch(compute)
    wide = [grad_out, *sources, *(d for d, needed in zip(dsources, needs_grad, strict=True) if needed)]
    extra = [x for x in (None if grad_lse is None else grad_lse[None], grad_scores) if x is not None]
    for (grad_rows, *rows), (score, r, *dstats) in _chunks(wide, [scores, rstd, *extra]):
        rows, dsource_rows = rows[:count], iter(rows[count:])
        weights = _softmax(score)
        grad = _widen(grad_rows, scratch("grad", grad_rows.shape))
        if gain is not None:
            grad = _norm_backward(grad, _mix(rows, weights, scratch), gain, norm_eps, scratch, dgain)
        dscore = _softmax_backward(weights, _pairs(rows, grad, scratch))
        if grad_lse is not None:
            dscore.addcmul_(weights, dstats[0])
        if grad_scores is not None:
            dscore.add_(dstats[-1])
        on_key, on_value = _score_backward(dscore, score, r, scale, rows[0].shape[-1])
        for j, row in enumerate(rows):
            value = _widen(row, scratch("value", row.shape))
            dkey.add(value, on_key[j])
            if needs_grad[j]:
                _source_backward(weights[j], on_key[j], on_value[j], grad, key, value, scratch, next(dsource_rows))
    return dsources, dkey.sum, dgain.sum


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sources of this dtype are computed in: float64 for float64, float32 for everything narrower."""
    return torch.promote_types(dtype, torch.float32)


def leading_strides(tensor: Tensor) -> list[tuple[int, int]]:
    """The leading dimensions as (size, stride) pairs, neighbours joined wherever one stride covers both."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged


class _Scratch:
    """Buffers by name, made when first asked for and used again by every later chunk."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, shape: Sequence[int]) -> Tensor:
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=self._dtype)
        return self._buffers[name][:size].view(shape)


class _Total:
    """A parameter's gradient, `Σ coefficient · row` over all tokens; empty where there is no such parameter.

    Each chunk is summed in the compute dtype and added to a float64 total, so that the error does not grow with the tokens.
    """

    def __init__(self, parameter: Tensor | None) -> None:
        self._dtype = torch.float32 if parameter is None else parameter.dtype
        self._total = torch.zeros(0 if parameter is None else parameter.shape, dtype=torch.float64)

    def add(self, rows: Tensor, coefficients: Tensor) -> None:
        self._total.add_(torch.mv(rows.t(), coefficients))

    @property
    def sum(self) -> Tensor:
        return self._total.to(self._dtype)


def _chunks(wide: Sequence[Tensor], stats: Sequence[Tensor]) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Cut tensors `[..., D]` and `[K, ...]` into chunks `[C, D]` and `[K, C]` along the same tokens, without a copy."""
    tokens, width = wide[0].shape[:-1].numel(), wide[0].shape[-1]
    if tokens == 0:
        return
    if any(len(leading_strides(t)) > 1 for t in wide):
        for i in range(wide[0].shape[0]):
            yield from _chunks([t[i] for t in wide], [s[:, i] for s in stats])
        return
    size = max(1, _CHUNK_ELEMENTS_PER_THREAD * torch.get_num_threads() // width)
    size = math.ceil(tokens / math.ceil(tokens / size))
    wide_chunks = zip(*(t.view(tokens, width).split(size) for t in wide), strict=True)
    stat_chunks = zip(*(s.view(s.shape[0], tokens).split(size, 1) for s in stats), strict=True)
    yield from zip(wide_chunks, stat_chunks, strict=True)


def _converted(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if parameter is None else parameter.to(dtype)


def _key(query: Tensor, key_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    return query.to(dtype) if key_weight is None else query.to(dtype) * key_weight.to(dtype)


def _gradients(sources: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor]:
    return [s.new_empty(s.shape if wanted else (0,)) for s, wanted in zip(sources, needed, strict=True)]


def _widen(rows: Tensor, buffer: Tensor) -> Tensor:
    return rows if rows.dtype == buffer.dtype else buffer.copy_(rows)


def _rstd(rows: Tensor, eps: float) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=-1).square_().div_(rows.shape[-1]).add_(eps).rsqrt_()


def _dot(a: Tensor, b: Tensor, scratch: _Scratch, out: Tensor) -> Tensor:
    """Row by row `<a, b>`; BLAS would be quicker, but see the head of this file."""
    return torch.sum(torch.mul(a, b, out=scratch("product", a.shape)), -1, out=out)


def _score(
    rows: Sequence[Tensor], key: Tensor, eps: float, scale: float, scratch: _Scratch, score: Tensor, rstd: Tensor
) -> None:
    norms, dots = scratch("norms", score.shape), scratch("dots", score.shape)
    wide = scratch("value", rows[0].shape)
    for row, norm, dot in zip(rows, norms, dots, strict=True):
        value = _widen(row, wide)
        torch.linalg.vector_norm(value, dim=-1, out=norm)
        _dot(value, key, scratch, dot)
    rstd.copy_(norms.square_().div_(key.shape[-1]).add_(eps).rsqrt_())
    score.copy_(dots.mul_(rstd).mul_(scale))


def _softmax(score: Tensor, lse: Tensor | None = None) -> Tensor:
    top = score.amax(0)
    weights = (score - top).exp_()
    total = weights.sum(0)
    if lse is not None:
        lse.copy_(total.log().add_(top))
    return weights.div_(total)


def _mix(rows: Sequence[Tensor], weights: Tensor, scratch: _Scratch) -> Tensor:
    mix, wide = scratch("mix", rows[0].shape), scratch("value", rows[0].shape)
    torch.mul(_widen(rows[0], wide), weights[0].unsqueeze(-1), out=mix)
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        mix.addcmul_(_widen(row, wide), weight.unsqueeze(-1))
    return mix


def _norm_backward(grad: Tensor, mix: Tensor, gain: Tensor, eps: float, scratch: _Scratch, dgain: _Total) -> Tensor:
    """The gradient of h, where `y = h / rms(h) * gain` and grad is the gradient of y."""
    rstd = _rstd(mix, eps)
    dgain.add(torch.mul(grad, mix, out=scratch("product", mix.shape)), rstd)
    grad = torch.mul(grad, gain, out=scratch("grad", mix.shape))
    along = _dot(grad, mix, scratch, torch.empty_like(rstd)).mul_(rstd.pow(3)).div_(mix.shape[-1])
    return grad.mul_(rstd.unsqueeze(-1)).addcmul_(mix, along.unsqueeze(-1), value=-1)


def _pairs(rows: Sequence[Tensor], grad: Tensor, scratch: _Scratch) -> Tensor:
    pairs = grad.new_empty(len(rows), grad.shape[0])
    wide = scratch("value", grad.shape)
    for row, pair in zip(rows, pairs, strict=True):
        _dot(_widen(row, wide), grad, scratch, pair)
    return pairs


def _softmax_backward(weights: Tensor, pairs: Tensor) -> Tensor:
    """`a_j (<g, v_j> - δ)`, δ from the pair products themselves: a rounded output would not make the sum over j vanish."""
    return pairs.sub_((weights * pairs).sum(0)).mul_(weights)


def _score_backward(dscore: Tensor, score: Tensor, rstd: Tensor, scale: float, width: int) -> tuple[Tensor, Tensor]:
    """What the key and the source itself are multiplied by in the source's gradient (`scale · r <key, v>` is the score)."""
    on_key = (dscore * rstd).mul_(scale)
    on_value = dscore.mul_(score).mul_(rstd).mul_(rstd).div_(-width)
    return on_key, on_value


def _source_backward(
    weight: Tensor,
    on_key: Tensor,
    on_value: Tensor,
    grad: Tensor,
    key: Tensor,
    value: Tensor,
    scratch: _Scratch,
    out: Tensor,
) -> None:
    total = out if out.dtype == grad.dtype else scratch("product", out.shape)
    torch.mul(grad, weight.unsqueeze(-1), out=total)
    total.addcmul_(key, on_key.unsqueeze(-1)).addcmul_(value, on_value.unsqueeze(-1))
    if total is not out:
        out.copy_(total)
