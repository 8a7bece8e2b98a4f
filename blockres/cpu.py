"""The operations for CPU tensors, in PyTorch calls that work through the tokens in chunks which stay in cache.

Letters: N sources, S queries, C tokens of one chunk, D hidden size; `...` are the leading dimensions of the sources.

A whole source is never stacked, copied or converted: the rows of a chunk are widened to the compute dtype where they
are narrower, used while they are hot, and forgotten. What backward is given are the scores and the reciprocal root mean
squares, a few numbers per token; the mixture is formed again from the sources that backward reads anyway.

Whatever decides a token's own result is elementwise, a reduction of single rows, or a batch of products with one token
each. Products over the rows of a chunk serve for parameter gradients only: BLAS chooses its kernel by the number of
rows and treats those at the edge differently, which would let a token's last bit depend on its neighbours.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

# Float32 elements per thread in the rows of one tensor in a chunk: 128 KiB. A source's rows, their product with the
# key, the accumulator and the upstream gradient are live together, 512 KiB: half the L2 cache of a current server core.
# The number is PyTorch's own grain too: with fewer elements per thread its elementwise kernels leave threads idle.
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
    lead, compute = first.shape[:-1], compute_dtype(first.dtype)
    key, gain = _key(query, key_weight, compute), _converted(norm_weight, compute)
    out = first.new_empty(first.shape, dtype=out_dtype)
    lse = first.new_empty(lead, dtype=compute)
    scores, rstd = (first.new_empty((len(sources), *lead), dtype=compute) for _ in range(2))
    scratch = _Scratch(compute)
    for (rows, (out_row,)), (score, r, lse_row) in _chunks([sources, [out]], [scores, rstd, lse[None]]):
        _score(rows, key, eps, scale, scratch, score, r)
        weights, lse_chunk = _softmax(score, 0)
        lse_row.copy_(lse_chunk)
        mix = _mix(rows, weights, scratch)
        out_row.copy_(mix if gain is None else _normalize(mix, gain, norm_eps))
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
    """Gradients of the sources (empty where not needed), of `query * key_weight [D]` and of `norm_weight [D]`."""
    compute = scores.dtype
    key, gain = _key(query, key_weight, compute), _converted(norm_weight, compute)
    dsources = _gradients(sources, needs_grad)
    dkey, dgain = _Total(key), _Total(gain)
    scratch = _Scratch(compute)
    groups = [[grad_out], sources, [d for d, needed in zip(dsources, needs_grad, strict=True) if needed]]
    extra = [grad for grad in (None if grad_lse is None else grad_lse[None], grad_scores) if grad is not None]
    for ((grad_row,), rows, drows), (score, r, *dstats) in _chunks(groups, [scores, rstd, *extra]):
        weights, _ = _softmax(score, 0)
        grad = _widen(grad_row, scratch("grad", grad_row.shape))
        if gain is not None:
            grad = _normalize_backward(grad, _mix(rows, weights, scratch), gain, norm_eps, scratch, dgain)
        dscore = _softmax_backward(weights, _pairs(rows, grad, scratch), 0)
        if grad_lse is not None:
            dscore.addcmul_(weights, dstats[0])
        if grad_scores is not None:
            dscore.add_(dstats[-1])
        on_key, on_value = _score_backward(dscore, score, r, scale, key.numel())
        # Summed over the sources token by token: what they have in common cancels before any sum over tokens grows.
        dkey_rows = scratch("dkey", grad_row.shape).zero_()
        targets = iter(drows)
        for j, row in enumerate(rows):
            value = _widen(row, scratch("value", row.shape))
            dkey_rows.addcmul_(value, on_key[j].unsqueeze(-1))
            if needs_grad[j]:
                total = torch.mul(grad, weights[j].unsqueeze(-1), out=scratch("product", row.shape))
                _add_score_path(total, on_key[j], key, on_value[j], value)
                next(targets).copy_(total)
        dkey.add(dkey_rows.sum(0))
    return dsources, dkey.sum, dgain.sum


def attn_res_inter_forward(
    sources: Sequence[Tensor],
    queries: Tensor,
    key_weights: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    scale: float,
    norm_eps: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Phase 1: `outputs [S, ..., D]`, `lse [S, ...]`, `scores [S, N, ...]` and `rstd [N, ...]`."""
    first, count = sources[0], len(sources)
    lead, compute = first.shape[:-1], compute_dtype(first.dtype)
    keys, gain = _key(queries, key_weights, compute), _converted(norm_weight, compute)
    outputs = first.new_empty((len(keys), *first.shape), dtype=out_dtype)
    lse = first.new_empty((len(keys), *lead), dtype=compute)
    scores = first.new_empty((len(keys), count, *lead), dtype=compute)
    rstd = first.new_empty((count, *lead), dtype=compute)
    scratch = _Scratch(compute)
    stats = [scores.flatten(0, 1), rstd, lse]
    for (rows, out_rows), (score_rows, r_rows, lse_rows) in _chunks([sources, outputs.unbind(0)], stats):
        values = _gather(rows, "values", scratch)
        r = _rstd(values, eps)
        score = _times_rows(values, keys).mul_(r.unsqueeze(-1)).mul_(scale)
        weights, lse_chunk = _softmax(score, 1)
        mix = torch.bmm(weights.mT, values, out=scratch("mix", (len(values), *keys.shape)))
        if gain is not None:
            _normalize(mix[:, 0], gain, norm_eps)
        for target, chunk in ((score_rows, score.mT.flatten(1)), (r_rows, r), (lse_rows, lse_chunk.squeeze(1))):
            target.copy_(chunk[: target.shape[1]].t())
        for s, out_row in enumerate(out_rows):
            out_row.copy_(mix[: len(out_row), s])
    return outputs, lse, scores, rstd


def attn_res_inter_backward(
    grad_outputs: Sequence[Tensor] | Tensor,
    grad_lse: Tensor | None,
    sources: Sequence[Tensor],
    queries: Tensor,
    key_weights: Tensor | None,
    norm_weight: Tensor | None,
    lse: Tensor,
    scores: Tensor,
    rstd: Tensor,
    eps: float,
    scale: float,
    norm_eps: float,
    needs_grad: Sequence[bool],
    accumulate: Sequence[Tensor | None],
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Gradients of the sources (empty where not needed), of `queries * key_weights [S, D]` and of `norm_weight [D]`.

    Args:
        grad_outputs: S tensors `[..., D]`, as a sequence or stacked.
        accumulate: for each source a gradient `[..., D]` to which its own is added, or None. The sum goes to fresh
            memory: autograd may hand the same gradient to others.
    """
    compute = scores.dtype
    keys, gain = _key(queries, key_weights, compute), _converted(norm_weight, compute)
    dsources = _gradients(sources, needs_grad)
    dkeys, dgain = _Total(keys), _Total(gain)
    scratch = _Scratch(compute)
    wanted = [j for j, needed in enumerate(needs_grad) if needed]
    existing = [accumulate[j] for j in wanted]
    groups = [sources, list(grad_outputs), [dsources[j] for j in wanted], [x for x in existing if x is not None]]
    stats = [scores.flatten(0, 1), rstd, *([] if grad_lse is None else [grad_lse])]
    for (rows, grad_rows, drows, old_rows), (score_rows, r_rows, *dlse_rows) in _chunks(groups, stats):
        values, grads = _gather(rows, "values", scratch), _gather(grad_rows, "grads", scratch)
        score = _padded(score_rows.t()).unflatten(1, (len(keys), len(rows))).mT
        weights, _ = _softmax(score, 1)
        if gain is not None:
            mix = torch.bmm(weights[:, :, :1].mT, values).squeeze(1)
            grads[:, 0] = _normalize_backward(grads[:, 0], mix, gain, norm_eps, scratch, dgain)
        dscore = _softmax_backward(weights, torch.bmm(values, grads.mT), 1)
        if dlse_rows:
            dscore.addcmul_(weights, _padded(dlse_rows[0].t()).unsqueeze(1))
        on_key, on_value = _score_backward(dscore, score, _padded(r_rows.t()).unsqueeze(-1), scale, keys.shape[1])
        dkeys.add(on_key.flatten(0, 1).t() @ values.flatten(0, 1))
        values.mul_(on_value.sum(-1, keepdim=True)).baddbmm_(weights, grads)
        values.baddbmm_(on_key, _per_token(keys, values))
        olds = iter(old_rows)
        for j, drow, old in zip(wanted, drows, existing, strict=True):
            total = values[: len(drow), j]
            drow.copy_(total if old is None else total.add_(next(olds)))
    return dsources, dkeys.sum, dgain.sum


def attn_res_merge_forward(
    output: Tensor,
    lse: Tensor,
    partial: Tensor,
    update: Tensor | None,
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    scale: float,
    norm_eps: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Phase 2: `h [..., D]`, the new partial (empty without an update), and `stats [2, ...]`: its score and rstd."""
    compute = compute_dtype(torch.promote_types(output.dtype, partial.dtype))
    key, gain = _key(query, key_weight, compute), _converted(norm_weight, compute)
    h = output.new_empty(output.shape, dtype=out_dtype)
    partial_new = partial.new_empty(0 if update is None else partial.shape)
    stats = output.new_empty((2, *lse.shape), dtype=compute)
    scratch = _Scratch(compute)
    sums = [partial] if update is None else [partial_new, partial, update]
    for ((h_row, output_row), (row, *added)), (score, r, lse_row) in _chunks(
        [[h, output], sums], [stats[:1], stats[1:], lse[None]]
    ):
        if added:
            torch.add(*added, out=row)
        _score([row], key, eps, scale, scratch, score, r)
        weight = torch.sigmoid(score - lse_row).mT
        value, before = _widen(row, scratch("value", row.shape)), _widen(output_row, scratch("before", row.shape))
        mix = torch.lerp(before, value, weight, out=scratch("mix", row.shape))
        h_row.copy_(mix if gain is None else _normalize(mix, gain, norm_eps))
    return h, partial_new, stats


def attn_res_merge_backward(
    grad_h: Tensor,
    grad_partial: Tensor | None,
    output: Tensor,
    lse: Tensor,
    partial_new: Tensor,
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    stats: Tensor,
    eps: float,
    scale: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of output, lse, partial and update (one for both), `query * key_weight [D]` and `norm_weight [D]`."""
    compute = stats.dtype
    key, gain = _key(query, key_weight, compute), _converted(norm_weight, compute)
    doutput, dlse = output.new_empty(output.shape), torch.empty_like(lse, memory_format=torch.contiguous_format)
    dpartial = partial_new.new_empty(partial_new.shape)
    dkey, dgain = _Total(key), _Total(gain)
    scratch = _Scratch(compute)
    groups = [[output, partial_new, grad_h, doutput, dpartial], [] if grad_partial is None else [grad_partial]]
    for ((output_row, row, grad_row, doutput_row, dpartial_row), passed), (score, r, lse_row, dlse_row) in _chunks(
        groups, [stats[:1], stats[1:], lse[None], dlse[None]]
    ):
        value, before = _widen(row, scratch("value", row.shape)), _widen(output_row, scratch("before", row.shape))
        grad = _widen(grad_row, scratch("grad", row.shape))
        weight, rest = torch.sigmoid(score - lse_row), torch.sigmoid(lse_row - score)
        if gain is not None:
            mix = torch.lerp(before, value, weight.mT, out=scratch("mix", row.shape))
            grad = _normalize_backward(grad, mix, gain, norm_eps, scratch, dgain)
        difference = torch.sub(value, before, out=scratch("before", row.shape))
        dscore = (weight * rest).mul_(_dot(grad, difference, scratch))
        dlse_row.copy_(dscore).neg_()
        doutput_row.copy_(torch.mul(grad, rest.mT, out=scratch("product", row.shape)))
        on_key, on_value = _score_backward(dscore, score, r, scale, key.numel())
        dkey.add(on_key[0] @ value)
        total = torch.mul(grad, weight.mT, out=scratch("product", row.shape))
        _add_score_path(total, on_key[0], key, on_value[0], value)
        dpartial_row.copy_(total.add_(passed[0]) if passed else total)
    return doutput, dlse, dpartial, dkey.sum, dgain.sum


def pack(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The elements of all tensors, one tensor after the other, in one flat buffer of `dtype`."""
    sizes = [t.numel() for t in tensors]
    buffer = torch.empty(sum(sizes), dtype=dtype, device="cpu")
    for part, tensor in zip(buffer.split(sizes), tensors, strict=True):
        part.view(tensor.shape).copy_(tensor)
    return buffer


def unpack(buffer: Tensor, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """What was packed, in shapes and dtypes of one's own; views of the buffer where no cast is needed."""
    parts = buffer.split([math.prod(shape) for shape in shapes])
    return [part.view(*shape).to(dtype) for part, shape, dtype in zip(parts, shapes, dtypes, strict=True)]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sources of this dtype are computed in: float64 for float64, float32 for everything narrower."""
    return torch.promote_types(dtype, torch.float32)


class _Scratch:
    """Buffers by name, made when first asked for and used again by every later chunk."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, shape: Sequence[int]) -> Tensor:
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=self._dtype, device="cpu")
        return self._buffers[name][:size].view(shape)


class _Total:
    """A parameter's gradient, summed over the chunks; empty where there is no such parameter.

    A chunk's sum is in the compute dtype, the total in float64: the error does not grow with the number of tokens.
    """

    def __init__(self, parameter: Tensor | None) -> None:
        self._dtype = torch.float32 if parameter is None else parameter.dtype
        self._total = torch.zeros(0 if parameter is None else parameter.shape, dtype=torch.float64, device="cpu")

    def add(self, chunk: Tensor) -> None:
        self._total.add_(chunk)

    @property
    def sum(self) -> Tensor:
        return self._total.to(self._dtype)


def _chunks(groups: Sequence[Sequence[Tensor]], stats: Sequence[Tensor]) -> Iterator[tuple[list, Sequence[Tensor]]]:
    """Cut groups of tensors `[..., D]` and tensors `[K, ...]` into rows `[C, D]` and `[K, C]` of the same tokens."""
    *lead, width = groups[0][0].shape
    tokens = math.prod(lead)
    if tokens == 0:
        return
    if not all(_has_one_stride(t) for group in groups for t in group):
        for i in range(lead[0]):
            yield from _chunks([[t[i] for t in group] for group in groups], [s[:, i] for s in stats])
        return
    size = max(1, _CHUNK_ELEMENTS_PER_THREAD * torch.get_num_threads() // width)
    size = math.ceil(tokens / math.ceil(tokens / size))
    rows = [[t.view(tokens, width).split(size) for t in group] for group in groups]
    columns = [s.reshape(s.shape[0], tokens).split(size, 1) for s in stats]
    for i in range(math.ceil(tokens / size)):
        yield [[row[i] for row in group] for group in rows], [column[i] for column in columns]


def _has_one_stride(tensor: Tensor) -> bool:
    kept = [(n, stride) for n, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n != 1]
    return all(outer == n * inner for (_, outer), (n, inner) in pairwise(kept))


def _converted(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if parameter is None else parameter.to(dtype)


def _key(query: Tensor, key_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    return query.to(dtype) if key_weight is None else query.to(dtype) * key_weight.to(dtype)


def _gradients(sources: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor]:
    return [s.new_empty(s.shape if wanted else (0,)) for s, wanted in zip(sources, needed, strict=True)]


def _widen(rows: Tensor, buffer: Tensor) -> Tensor:
    return rows if rows.dtype == buffer.dtype else buffer.copy_(rows)


def _gather(rows: Sequence[Tensor], name: str, scratch: _Scratch) -> Tensor:
    """`[C, K, D]` from K tensors `[C, D]`; a lone token gets a zero token beside it, see `_padded`."""
    tokens, width = rows[0].shape
    gathered = scratch(name, (max(tokens, 2), len(rows), width))
    for j, row in enumerate(rows):
        gathered[:tokens, j] = row
    gathered[tokens:] = 0
    return gathered


def _padded(rows: Tensor) -> Tensor:
    """At least two tokens: a batch of one is not run as a batch, and its last bits would differ."""
    return rows if len(rows) > 1 else torch.cat([rows, torch.zeros_like(rows)])


def _per_token(matrix: Tensor, values: Tensor) -> Tensor:
    return matrix.expand(len(values), *matrix.shape)


def _times_rows(values: Tensor, keys: Tensor) -> Tensor:
    return torch.bmm(values, _per_token(keys.t(), values))


def _rstd(rows: Tensor, eps: float) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=-1).square_().div_(rows.shape[-1]).add_(eps).rsqrt_()


def _dot(a: Tensor, b: Tensor, scratch: _Scratch, out: Tensor | None = None) -> Tensor:
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
    rstd.copy_(norms.square_().div_(key.numel()).add_(eps).rsqrt_())
    score.copy_(dots.mul_(rstd).mul_(scale))


def _softmax(score: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The weights, and the log of the sum of exponentials."""
    top = score.amax(dim, keepdim=True)
    weights = (score - top).exp_()
    total = weights.sum(dim, keepdim=True)
    return weights.div_(total), total.log().add_(top)


def _mix(rows: Sequence[Tensor], weights: Tensor, scratch: _Scratch) -> Tensor:
    mix, wide = scratch("mix", rows[0].shape), scratch("value", rows[0].shape)
    torch.mul(_widen(rows[0], wide), weights[0].unsqueeze(-1), out=mix)
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        mix.addcmul_(_widen(row, wide), weight.unsqueeze(-1))
    return mix


def _normalize(mix: Tensor, gain: Tensor, eps: float) -> Tensor:
    return mix.mul_(_rstd(mix, eps).unsqueeze(-1)).mul_(gain)


def _normalize_backward(
    grad: Tensor, mix: Tensor, gain: Tensor, eps: float, scratch: _Scratch, dgain: _Total
) -> Tensor:
    """The gradient of h, where `y = h / rms(h) * gain` and `grad` is that of y."""
    rstd = _rstd(mix, eps)
    dgain.add(rstd @ torch.mul(grad, mix, out=scratch("product", mix.shape)))
    grad = torch.mul(grad, gain, out=scratch("grad", mix.shape))
    along = _dot(grad, mix, scratch).mul_(rstd.pow(3)).div_(mix.shape[-1])
    return grad.mul_(rstd.unsqueeze(-1)).addcmul_(mix, along.unsqueeze(-1), value=-1)


def _pairs(rows: Sequence[Tensor], grad: Tensor, scratch: _Scratch) -> Tensor:
    pairs = grad.new_empty(len(rows), grad.shape[0])
    wide = scratch("value", grad.shape)
    for row, pair in zip(rows, pairs, strict=True):
        _dot(_widen(row, wide), grad, scratch, pair)
    return pairs


def _softmax_backward(weights: Tensor, pairs: Tensor, dim: int) -> Tensor:
    """`a_j (<g, v_j> - δ)`, with δ from the same pair products: a rounded output would be off by far more.

    These sum to zero over j. What rounding leaves of the sum is taken out again, because in the query's gradient it is
    multiplied by what the sources have in common, which is most of them in a residual stream.
    """
    dscore = pairs.sub_((weights * pairs).sum(dim, keepdim=True)).mul_(weights)
    return dscore.addcmul_(weights, dscore.sum(dim, keepdim=True), value=-1)


def _score_backward(dscore: Tensor, score: Tensor, rstd: Tensor, scale: float, width: int) -> tuple[Tensor, Tensor]:
    """What the key and the source's own rows are multiplied by in the source's gradient."""
    on_key = (dscore * rstd).mul_(scale)
    on_value = dscore.mul_(score).mul_(rstd).mul_(rstd).div_(-width)
    return on_key, on_value


def _add_score_path(total: Tensor, on_key: Tensor, key: Tensor, on_value: Tensor, value: Tensor) -> None:
    total.addcmul_(key, on_key.unsqueeze(-1)).addcmul_(value, on_value.unsqueeze(-1))
