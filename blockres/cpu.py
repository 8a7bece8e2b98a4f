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

# Elements of all tensors of a chunk together, per thread: 2 MiB in float32, the L2 cache of a current server core or
# its share of the L3. A chunk is also at most a fortieth of the tensors, so that its buffers add a few percent to
# them; below a quarter of a million elements that is not worth the calls it takes.
_ELEMENTS_PER_THREAD = 2**19
_MIN_ELEMENTS = 2**18
_CHUNKS = 40
# Terms that BLAS adds up one after the other in a product of two rows, whose error grows with their number.
_STRETCH = 1024


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
    outputs, lse, scores, rstd = attn_res_inter_forward(
        sources, query[None], _one(key_weight), norm_weight, eps, scale, norm_eps, out_dtype
    )
    return outputs[0], lse[0], scores[0], rstd


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
    keys, gain = _key(query[None], _one(key_weight), scores.dtype), _converted(norm_weight, scores.dtype)
    dsources, dkeys, dgain = _backward(
        [grad_out],
        _one(grad_lse),
        _one(grad_scores),
        sources,
        keys,
        gain,
        scores[None],
        rstd,
        scale,
        norm_eps,
        needs_grad,
        [None] * len(sources),
    )
    return dsources, dkeys[0], dgain


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
    for (rows, out_rows), (score_rows, r_rows, lse_rows) in _chunks(
        [sources, outputs.unbind(0)], [scores.flatten(0, 1), rstd, lse]
    ):
        values = _gather(rows, "values", scratch)
        r = _rstd(values, eps)
        score = _products(values, _per_token(keys, values)).mul_(r.unsqueeze(-1)).mul_(scale)
        weights, lse_chunk = _softmax(score)
        mix = torch.bmm(weights.mT, values, out=scratch("mix", (len(values), *keys.shape)))
        if gain is not None:
            _normalize(mix[:, 0], gain, norm_eps)
        _scatter(mix.unbind(1), out_rows)
        for target, chunk in ((score_rows, score.mT.flatten(1)), (r_rows, r), (lse_rows, lse_chunk)):
            target.copy_(chunk[: target.shape[1]].t())
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
    keys, gain = _key(queries, key_weights, scores.dtype), _converted(norm_weight, scores.dtype)
    grads = list(grad_outputs)
    return _backward(grads, grad_lse, None, sources, keys, gain, scores, rstd, scale, norm_eps, needs_grad, accumulate)


def _backward(
    grad_outputs: Sequence[Tensor],
    grad_lse: Tensor | None,
    grad_scores: Tensor | None,
    sources: Sequence[Tensor],
    keys: Tensor,
    gain: Tensor | None,
    scores: Tensor,
    rstd: Tensor,
    scale: float,
    norm_eps: float,
    needs_grad: Sequence[bool],
    accumulate: Sequence[Tensor | None],
) -> tuple[list[Tensor], Tensor, Tensor]:
    """`attn_res_inter_backward`, with gradients of the scores `[S, N, ...]` as well."""
    dsources = [s.new_empty(s.shape if needed else (0,)) for s, needed in zip(sources, needs_grad, strict=True)]
    dkeys, dgain = _Total(keys), _Total(gain)
    scratch = _Scratch(scores.dtype)
    wanted = [j for j, needed in enumerate(needs_grad) if needed]
    added = [j for j in wanted if accumulate[j] is not None]
    groups = [sources, grad_outputs, [dsources[j] for j in wanted], _given(*(accumulate[j] for j in added))]
    stats = [scores.flatten(0, 1), rstd, *_given(grad_lse, None if grad_scores is None else grad_scores.flatten(0, 1))]
    for (rows, grad_rows, drows, old_rows), (score_rows, r_rows, *dstats) in _chunks(groups, stats):
        values, grads = _gather(rows, "values", scratch), _gather(grad_rows, "grads", scratch)
        score = _by_token(score_rows).unflatten(1, (len(keys), len(rows))).mT
        weights, _ = _softmax(score)
        if gain is not None:
            mix = torch.bmm(weights[:, :, :1].mT, values).squeeze(1)
            grads[:, 0] = _normalize_backward(grads[:, 0], mix, gain, norm_eps, scratch, dgain)
        center = values.mean(1, keepdim=True)
        dscore = _softmax_backward(weights, _products(values.sub_(center), grads))
        if grad_lse is not None:
            dscore.addcmul_(weights, _by_token(dstats[0]).unsqueeze(1))
        if grad_scores is not None:
            dscore.add_(_by_token(dstats[-1]).unflatten(1, (len(keys), len(rows))).mT)
        on_key, on_value = _score_backward(dscore, score, _by_token(r_rows).unsqueeze(-1), scale, keys.shape[1])
        dkeys.add(on_key.flatten(0, 1).t() @ values.flatten(0, 1))
        dkeys.add(on_key.sum(1).t() @ center.squeeze(1))
        if wanted:
            values.add_(center).mul_(on_value.sum(-1, keepdim=True))
            values.baddbmm_(weights, grads).baddbmm_(on_key, _per_token(keys, values))
            for j, old in zip(added, old_rows, strict=True):
                values[: len(old), j] += old
            _scatter([values[:, j] for j in wanted], drows)
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
    for ((h_row, output_row), (row, *added)), (score_row, r_row, lse_row) in _chunks(
        [[h, output], sums], [stats[:1], stats[1:], lse[None]]
    ):
        if added:
            torch.add(*added, out=row)
        value, before = _widen(row, "value", scratch), _widen(output_row, "before", scratch)
        r_row.copy_(_rstd(value, eps))
        score_row.copy_(_dot(value, key, scratch)).mul_(r_row).mul_(scale)
        weight = torch.sigmoid(score_row - lse_row).mT
        mix = torch.lerp(before, value, weight, out=_buffer(h_row, "mix", scratch))
        _store(mix if gain is None else _normalize(mix, gain, norm_eps), h_row)
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
    for ((output_row, row, grad_row, doutput_row, dpartial_row), passed), (
        score_row,
        r_row,
        lse_row,
        dlse_row,
    ) in _chunks(groups, [stats[:1], stats[1:], lse[None], dlse[None]]):
        value, before = _widen(row, "value", scratch), _widen(output_row, "before", scratch)
        grad = _widen(grad_row, "grad", scratch)
        weight, rest = torch.sigmoid(score_row - lse_row), torch.sigmoid(lse_row - score_row)
        if gain is not None:
            mix = torch.lerp(before, value, weight.mT, out=scratch("mix", row.shape))
            grad = _normalize_backward(grad, mix, gain, norm_eps, scratch, dgain)
        difference = torch.sub(value, before, out=scratch("before", row.shape))
        dscore = (weight * rest).mul_(_dot(grad, difference, scratch))
        dlse_row.copy_(dscore).neg_()
        _store(torch.mul(grad, rest.mT, out=_buffer(doutput_row, "product", scratch)), doutput_row)
        on_key, on_value = _score_backward(dscore, score_row, r_row, scale, key.numel())
        dkey.add(torch.mul(value, on_key.mT, out=scratch("product", row.shape)).sum(0))
        total = torch.mul(grad, weight.mT, out=_buffer(dpartial_row, "product", scratch))
        total.addcmul_(key, on_key.mT).addcmul_(value, on_value.mT)
        _store(total.add_(passed[0]) if passed else total, dpartial_row)
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
    return [part.view(tuple(shape)).to(dtype) for part, shape, dtype in zip(parts, shapes, dtypes, strict=True)]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sources of this dtype are computed in: float64 for float64, float32 for everything narrower."""
    return torch.promote_types(dtype, torch.float32)


class _Scratch:
    """Buffers by name, made when first asked for and used again by every later chunk."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, shape: Sequence[int]) -> Tensor:
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=self.dtype, device="cpu")
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


def _chunks(groups: Sequence[Sequence[Tensor]], stats: Sequence[Tensor]) -> Iterator[tuple[list, list[Tensor]]]:
    """Cut groups of tensors `[..., D]` and tensors `[K, ...]` into rows `[C, D]` and `[K, C]` of the same tokens."""
    *lead, width = groups[0][0].shape
    tokens = math.prod(lead)
    if tokens == 0:
        return
    if not all(_has_one_stride(t) for group in groups for t in group):
        for i in range(lead[0]):
            yield from _chunks([[t[i] for t in group] for group in groups], [s[:, i] for s in stats])
        return
    size = _chunk_size(tokens, width * sum(map(len, groups)))
    rows = [[t.view(tokens, width).split(size) for t in group] for group in groups]
    columns = [s.reshape(s.shape[0], tokens).split(size, 1) for s in stats]
    for i in range(math.ceil(tokens / size)):
        yield [[row[i] for row in group] for group in rows], [column[i] for column in columns]


def _chunk_size(tokens: int, elements_per_token: int) -> int:
    """Tokens of a chunk; the last one may be shorter."""
    elements = min(_ELEMENTS_PER_THREAD * max(torch.get_num_threads(), 2), tokens * elements_per_token // _CHUNKS)
    size = max(1, max(elements, _MIN_ELEMENTS) // elements_per_token)
    return math.ceil(tokens / math.ceil(tokens / size))


def _has_one_stride(tensor: Tensor) -> bool:
    kept = [(n, stride) for n, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n != 1]
    return all(outer == n * inner for (_, outer), (n, inner) in pairwise(kept))


def _converted(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if parameter is None else parameter.to(dtype)


def _key(query: Tensor, key_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    return query.to(dtype) if key_weight is None else query.to(dtype) * key_weight.to(dtype)


def _one(tensor: Tensor | None) -> Tensor | None:
    """The same as one row of a stack."""
    return None if tensor is None else tensor[None]


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _widen(rows: Tensor, name: str, scratch: _Scratch) -> Tensor:
    """The rows in the compute dtype, in a buffer of this name where they are not."""
    return rows if rows.dtype == scratch.dtype else scratch(name, rows.shape).copy_(rows)


def _buffer(target: Tensor, name: str, scratch: _Scratch) -> Tensor:
    """Where to compute what `_store` then puts into the target: there itself if its dtype is the compute dtype."""
    return target if target.dtype == scratch.dtype else scratch(name, target.shape)


def _store(rows: Tensor, target: Tensor) -> None:
    if rows is not target:
        target.copy_(rows)


def _gather(rows: Sequence[Tensor], name: str, scratch: _Scratch) -> Tensor:
    """`[C, K, D]` from K tensors `[C, D]`; a lone token gets a token of zeros beside it, see `_by_token`."""
    tokens, width = rows[0].shape
    gathered = scratch(name, (max(tokens, 2), len(rows), width))
    for j, row in enumerate(rows):
        gathered[:tokens, j] = row
    gathered[tokens:] = 0
    return gathered


def _scatter(rows: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for row, target in zip(rows, targets, strict=True):
        target.copy_(row[: len(target)])


def _by_token(columns: Tensor) -> Tensor:
    """`[C, K]` from `[K, C]`, of two tokens at least: a batch of one product is not run as a batch, and its last bits
    would not be those of the same token among others."""
    rows = columns.t()
    return rows.contiguous() if len(rows) > 1 else torch.cat([rows, torch.zeros_like(rows)])


def _per_token(matrix: Tensor, values: Tensor) -> Tensor:
    return matrix.expand(len(values), *matrix.shape)


def _rstd(rows: Tensor, eps: float) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=-1).square_().div_(rows.shape[-1]).add_(eps).rsqrt_()


def _products(values: Tensor, others: Tensor) -> Tensor:
    """`[C, N, S]`: the products of every row `[C, N, D]` with every row `[C, S, D]` of the same token."""
    pieces = zip(values.split(_STRETCH, -1), others.split(_STRETCH, -1), strict=True)
    partial = [torch.bmm(a, b.mT) for a, b in pieces]
    return partial[0] if len(partial) == 1 else torch.stack(partial).sum(0)


def _dot(a: Tensor, b: Tensor, scratch: _Scratch) -> Tensor:
    """Row by row `<a, b>`; BLAS would be quicker, but see the head of this file."""
    return torch.mul(a, b, out=scratch("product", a.shape)).sum(-1)


def _softmax(score: Tensor) -> tuple[Tensor, Tensor]:
    """Over the sources of `[C, N, S]`: the weights, and the log `[C, S]` of the sum of exponentials."""
    top = score.amax(1, keepdim=True)
    weights = (score - top).exp_()
    total = weights.sum(1, keepdim=True)
    return weights.div_(total), total.log().add_(top).squeeze(1)


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


def _softmax_backward(weights: Tensor, pairs: Tensor) -> Tensor:
    """`a_j (<g, v_j> - δ)`, with δ from the same pair products: a rounded output would be off by far more.

    These sum to zero over j. What rounding leaves of the sum is taken out again: the query's gradient multiplies it by
    what the sources have in common.
    """
    dscore = pairs.sub_((weights * pairs).sum(1, keepdim=True)).mul_(weights)
    return dscore.addcmul_(weights, dscore.sum(1, keepdim=True), value=-1)


def _score_backward(dscore: Tensor, score: Tensor, rstd: Tensor, scale: float, width: int) -> tuple[Tensor, Tensor]:
    """What the key and the source's own rows are multiplied by in the source's gradient."""
    on_key = (dscore * rstd).mul_(scale)
    on_value = dscore.mul_(score).mul_(rstd).mul_(rstd).div_(-width)
    return on_key, on_value
