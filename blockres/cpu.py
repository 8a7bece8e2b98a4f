"""The operations for CPU tensors, in PyTorch calls that work through the tokens in chunks which stay in cache.

Letters: N sources, S queries, T tokens (`...`, the leading dimensions of the sources, as one), C tokens of a chunk, D
hidden size. Chunks are laid out token by token, `[C, N, D]`, and so are the numbers that belong to them, `[C, N, S]`.

A whole source is never stacked, copied or converted: the rows of a chunk are gathered, in the compute dtype, used while
they are hot, and forgotten. What backward is given are the scores and the reciprocal root mean squares, a few numbers
per token; the mixture is formed again from the sources that backward reads anyway.

Whatever decides a token's own result is elementwise, a reduction of single rows, or a batch of products with one token
each. Products over the rows of a chunk serve for parameter gradients only: BLAS chooses its kernel by the number of
rows and treats those at the edge differently, which would let a token's last bit depend on its neighbours.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

# Bytes of the buffers of a chunk. Per thread at most the L2 cache of a current server core, or its share of the L3; in
# all at most this share of the tensors themselves; but never so little that the calls cost more than the work.
_BYTES_PER_THREAD = 2 << 20
_SHARE = 0.04
_MIN_BYTES = 768 << 10
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
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Gradients of the sources, of query, key weight and norm weight, in their dtypes.

    `(0,)` for a source that needs none, and for a parameter that is not given.
    """
    dsources, dkeys, dgain = _backward(
        [grad_out],
        _one(grad_lse),
        _one(grad_scores),
        sources,
        _keys(query[None], _one(key_weight), scale, scores.dtype),
        _converted(norm_weight, scores.dtype),
        scores[None],
        rstd,
        norm_eps,
        needs_grad,
        [None] * len(sources),
    )
    return dsources, *_parameter_gradients(dkeys[0] * scale, dgain, query, key_weight, norm_weight)


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
    first, lead = sources[0], sources[0].shape[:-1]
    compute = compute_dtype(first.dtype)
    keys, gain = _keys(queries, key_weights, scale, compute), _converted(norm_weight, compute)
    outputs = first.new_empty((len(keys), *first.shape), dtype=out_dtype)
    score = first.new_empty((_tokens(lead), len(sources), len(keys)), dtype=compute)
    r = first.new_empty((_tokens(lead), len(sources), 1), dtype=compute)
    scratch = _Scratch(compute)
    for part, rows, out_rows in _chunks(sources, outputs.unbind(0), buffers=len(sources) + len(keys)):
        values = _gather(rows, "values", scratch)
        chunk_score = torch.mul(_products(values, keys), _rstd(values, eps, r[part]), out=score[part])
        mix = torch.bmm(chunk_score.softmax(1).mT, values, out=scratch("mix", (len(values), *keys.shape)))
        if gain is not None:
            _normalize(mix[:, 0], gain, norm_eps)
        for out_row, row in zip(out_rows, mix[: len(out_rows[0])].unbind(1), strict=True):
            out_row.copy_(row)
    tokens = math.prod(lead)
    lse = score[:tokens].logsumexp(1)
    return outputs, _by_query(lse, lead), _by_query(score[:tokens], lead), _by_query(r[:tokens].squeeze(2), lead)


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
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Gradients of the sources, of queries, key weights and norm weight, in their dtypes.

    `(0,)` for a source that needs none, and for a parameter that is not given.

    Args:
        grad_outputs: S tensors `[..., D]`, as a sequence or stacked.
        accumulate: for each source a gradient `[..., D]` to which its own is added, or None. The sum goes to fresh
            memory: autograd may hand the same gradient to others.
    """
    keys = _keys(queries, key_weights, scale, scores.dtype)
    gain = _converted(norm_weight, scores.dtype)
    dsources, dkeys, dgain = _backward(
        list(grad_outputs), grad_lse, None, sources, keys, gain, scores, rstd, norm_eps, needs_grad, accumulate
    )
    return dsources, *_parameter_gradients(dkeys * scale, dgain, queries, key_weights, norm_weight)


def _backward(
    grad_outputs: Sequence[Tensor],
    grad_lse: Tensor | None,
    grad_scores: Tensor | None,
    sources: Sequence[Tensor],
    keys: Tensor,
    gain: Tensor | None,
    scores: Tensor,
    rstd: Tensor,
    norm_eps: float,
    needs_grad: Sequence[bool],
    accumulate: Sequence[Tensor | None],
) -> tuple[list[Tensor], Tensor, Tensor]:
    """`attn_res_inter_backward`, with gradients of the scores `[S, N, ...]` as well, and `keys` already scaled.

    Of the parameters it returns what the keys `[S, D]` and the norm weight get, in the compute dtype.

    The softmax does not feel what all sources have in common. Most of it is taken out of the rows, one source of every
    token from all of them, before they are multiplied: it would only add its rounding to the query's gradient. Nothing
    is taken out where one source is more than twice another: a large one would itself add its rounding to the others.
    """
    dsources = [s.new_empty(s.shape if needed else (0,)) for s, needed in zip(sources, needs_grad, strict=True)]
    wanted = [j for j, needed in enumerate(needs_grad) if needed]
    existing = {j: old for j in wanted if (old := accumulate[j]) is not None}
    dkeys, dgain = _Total(keys), _Total(gain)
    scratch = _Scratch(scores.dtype)
    score, r = _by_token(scores, sources[0]), _by_token(rstd, sources[0]).unsqueeze(2)
    weights = score.softmax(1)
    upstream = _score_gradient(weights, grad_lse, grad_scores, sources[0])
    on_value = score.mul_(r).mul_(r).div_(-keys.shape[1])
    groups = (sources, grad_outputs, [dsources[j] for j in wanted], list(existing.values()))
    for part, rows, grad_rows, drows, old_rows in _chunks(*groups, buffers=len(sources) + len(keys) + 2):
        values, weight = _gather(rows, "values", scratch), weights[part]
        center = values[:, len(rows) // 2] * _alike(r[part])
        beside = _gather([*grad_rows, center[: len(rows[0])]], "beside", scratch)
        grads = beside[:, :-1]
        if gain is not None:
            mix = torch.bmm(weight[:, :, :1].mT, values).squeeze(1)
            grads[:, 0] = _normalize_backward(grads[:, 0], mix, gain, norm_eps, scratch, dgain)
        dscore = _softmax_backward(weight, _products(values.sub_(center.unsqueeze(1)), grads))
        if upstream is not None:
            dscore += upstream[part]
        on_key = dscore * r[part]
        dkeys.add(on_key.flatten(0, 1).t() @ values.flatten(0, 1) + on_key.sum(1).t() @ center)
        if wanted:
            on_center = dscore.mul_(on_value[part]).sum(2, keepdim=True)
            values.mul_(on_center).baddbmm_(torch.cat([weight, on_center], 2), beside)
            values.baddbmm_(on_key, keys.expand(len(values), *keys.shape))
            dvalues = values[: len(rows[0])].unbind(1)
            for j, old in zip(existing, old_rows, strict=True):
                dvalues[j].add_(old)
            for j, drow in zip(wanted, drows, strict=True):
                drow.copy_(dvalues[j])
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
    key, gain = _keys(query, key_weight, scale, compute), _converted(norm_weight, compute)
    h = output.new_empty(output.shape, dtype=out_dtype)
    partial_new = partial.new_empty(0 if update is None else partial.shape)
    stats = output.new_empty((2, *lse.shape), dtype=compute)
    score, r = stats.view(2, lse.numel(), 1)
    lse_by_token = lse.reshape(lse.numel(), 1)
    scratch = _Scratch(compute)
    sums = [partial] if update is None else [partial_new, partial, update]
    for part, (h_row, output_row), (row, *added) in _chunks([h, output], sums, buffers=4):
        if added:
            torch.add(*added, out=row)
        value, before = _widen(row, "value", scratch), _widen(output_row, "before", scratch)
        chunk_score = torch.mul(_dot(value, key, scratch), _rstd(value, eps, r[part]), out=score[part])
        weight = torch.sigmoid(chunk_score - lse_by_token[part])
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
) -> tuple[Tensor, ...]:
    """Gradients of output, lse, partial and update (one for both), query, key weight and norm weight.

    Those of parameters that are not given are `(0,)`.
    """
    compute = stats.dtype
    key, gain = _keys(query, key_weight, scale, compute), _converted(norm_weight, compute)
    doutput, dpartial = output.new_empty(output.shape), partial_new.new_empty(partial_new.shape)
    dscore_by_token = stats.new_empty(lse.numel(), 1)
    score, r = stats.view(2, lse.numel(), 1)
    advance = score - lse.reshape(lse.numel(), 1)
    weights, rests = torch.sigmoid(advance), torch.sigmoid(-advance)
    on_value = (score * r).mul_(r).div_(-key.numel())
    dkey, dgain = _Total(key), _Total(gain)
    scratch = _Scratch(compute)
    passed = [] if grad_partial is None else [grad_partial]
    for part, (output_row, row, grad_row), (doutput_row, dpartial_row), passed_row in _chunks(
        [output, partial_new, grad_h], [doutput, dpartial], passed, buffers=5
    ):
        value, before = _widen(row, "value", scratch), _widen(output_row, "before", scratch)
        grad, weight, rest = _widen(grad_row, "grad", scratch), weights[part], rests[part]
        if gain is not None:
            mix = torch.lerp(before, value, weight, out=scratch("mix", row.shape))
            grad = _normalize_backward(grad, mix, gain, norm_eps, scratch, dgain)
        difference = torch.sub(value, before, out=scratch("before", row.shape))
        dscore = torch.mul(weight * rest, _dot(grad, difference, scratch), out=dscore_by_token[part])
        _store(torch.mul(grad, rest, out=_buffer(doutput_row, "product", scratch)), doutput_row)
        on_key = dscore * r[part]
        dkey.add(torch.mul(value, on_key, out=scratch("product", row.shape)).sum(0))
        total = torch.mul(grad, weight, out=_buffer(dpartial_row, "product", scratch))
        total.addcmul_(key, on_key).addcmul_(value, dscore * on_value[part])
        _store(total.add_(passed_row[0]) if passed else total, dpartial_row)
    dlse = dscore_by_token.neg_().view(lse.shape).to(lse.dtype)
    parameters = _parameter_gradients(dkey.sum * scale, dgain.sum, query, key_weight, norm_weight)
    return doutput, dlse, dpartial, *parameters


def attn_res_step(
    bank: Tensor,
    partial: Tensor | None,
    update: Tensor | None,
    total: Tensor,
    out: Tensor,
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    scale: float,
    norm_eps: float,
) -> None:
    """Write `partial + update` into `total`, where there is an update, and the aggregation into `out`."""
    compute = compute_dtype(bank.dtype)
    keys, gain = _keys(query[None], _one(key_weight), scale, compute), _converted(norm_weight, compute)
    sums = [x for x in (None if update is None else total, partial, update) if x is not None]
    scratch = _Scratch(compute)
    for _, slots, (out_row,), sum_rows in _chunks(bank.unbind(0), [out], sums, buffers=len(bank) + 2):
        if update is not None:
            _add(*sum_rows)
        values = _gather([*slots, *sum_rows[:1]], "values", scratch)
        score = _products(values, keys).mul_(_rstd(values, eps))
        mix = torch.bmm(score.softmax(1).mT, values, out=scratch("mix", (len(values), *keys.shape))).squeeze(1)
        out_row.copy_((mix if gain is None else _normalize(mix, gain, norm_eps))[: len(out_row)])


def _add(total: Tensor, *terms: Tensor) -> None:
    if len(terms) == 1:
        total.copy_(terms[0])
    else:
        torch.add(*terms, out=total)


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
        shape = (0,) if parameter is None else parameter.shape
        self._total = torch.zeros(shape, dtype=torch.float64, device="cpu")

    def add(self, chunk: Tensor) -> None:
        self._total.add_(chunk)

    @property
    def sum(self) -> Tensor:
        return self._total.to(self._dtype)


def _chunks(*groups: Sequence[Tensor], buffers: int, start: int = 0) -> Iterator[tuple]:
    """Cut groups of tensors `[..., D]` into rows `[C, D]`, beginning at token `start`.

    Yields the chunk's place among all tokens as a slice, then each group's rows. A chunk has two tokens or more; only
    where there is no second one the slice is two long and the rows are one, see `_tokens`.

    Args:
        buffers: how many rows `[D]` the caller's buffers hold for a token.
    """
    *lead, width = groups[0][0].shape
    tokens = math.prod(lead)
    if tokens == 0:
        return
    if not all(_has_one_stride(t) for group in groups for t in group):
        for i in range(lead[0]):
            inner = [[t[i] for t in group] for group in groups]
            yield from _chunks(*inner, buffers=buffers, start=start + i * tokens // lead[0])
        return
    sizes = _chunk_sizes(tokens, width, [t.element_size() for group in groups for t in group], buffers)
    split = [[t.view(tokens, width).split_with_sizes(sizes) for t in group] for group in groups]
    for i, size in enumerate(sizes):
        yield slice(start, start + max(size, 2)), *([rows[i] for rows in group] for group in split)
        start += size


def _chunk_sizes(tokens: int, width: int, element_sizes: Sequence[int], buffers: int) -> list[int]:
    """Tokens of each chunk, as even as can be and at least two."""
    limit = min(_BYTES_PER_THREAD * max(torch.get_num_threads(), 2), _SHARE * tokens * width * sum(element_sizes))
    size = int(max(limit, _MIN_BYTES)) // (buffers * width * max(4, *element_sizes))
    count = min(math.ceil(tokens / max(size, 2)), max(tokens // 2, 1))
    return [tokens // count + (i < tokens % count) for i in range(count)]


def _has_one_stride(tensor: Tensor) -> bool:
    kept = [(n, stride) for n, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n != 1]
    return all(outer == n * inner for (_, outer), (n, inner) in pairwise(kept))


def _tokens(lead: Sequence[int]) -> int:
    """T, but two for a lone token: BLAS runs a batch of one in another way than a batch, with other last bits."""
    return max(math.prod(lead), 2)


def _by_token(numbers: Tensor, source: Tensor) -> Tensor:
    """`[T, N]` or `[T, N, S]` from `[N, ...]` or `[S, N, ...]`; zero for a token that is not there, see `_tokens`."""
    *lead, _ = source.shape
    count = numbers.dim() - len(lead)
    turned = numbers.reshape(*numbers.shape[:count], math.prod(lead)).permute(*range(count, -1, -1))
    by_token = numbers.new_zeros((_tokens(lead), *turned.shape[1:]))
    by_token[: len(turned)] = turned
    return by_token


def _by_query(numbers: Tensor, lead: Sequence[int]) -> Tensor:
    """The inverse of `_by_token`."""
    turned = numbers.permute(*reversed(range(numbers.dim()))).clone(memory_format=torch.contiguous_format)
    return turned.view(*turned.shape[:-1], *lead)


def _one(tensor: Tensor | None) -> Tensor | None:
    """The same as one row of a stack."""
    return None if tensor is None else tensor[None]


def _converted(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if parameter is None else parameter.to(dtype)


def _keys(queries: Tensor, key_weights: Tensor | None, scale: float, dtype: torch.dtype) -> Tensor:
    keys = queries.to(dtype) * scale
    return keys if key_weights is None else keys * key_weights.to(dtype)


def _gather(rows: Sequence[Tensor], name: str, scratch: _Scratch) -> Tensor:
    """`[C, K, D]` from K tensors `[C, D]`, with a token of zeros beside a lone one."""
    tokens, width = rows[0].shape
    gathered = scratch(name, (max(tokens, 2), len(rows), width))
    for target, row in zip(gathered[:tokens].unbind(1), rows, strict=True):
        target.copy_(row)
    if tokens < 2:
        gathered[tokens:] = 0
    return gathered


def _widen(rows: Tensor, name: str, scratch: _Scratch) -> Tensor:
    """The rows in the compute dtype, in a buffer of this name where they are not."""
    return rows if rows.dtype == scratch.dtype else scratch(name, rows.shape).copy_(rows)


def _buffer(target: Tensor, name: str, scratch: _Scratch) -> Tensor:
    """Where to compute what `_store` then puts into the target: there itself if its dtype is the compute dtype."""
    return target if target.dtype == scratch.dtype else scratch(name, target.shape)


def _store(rows: Tensor, target: Tensor) -> None:
    if rows is not target:
        target.copy_(rows)


def _rstd(rows: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """`[C, ..., 1]`: one over the root mean square of each row."""
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, out=out)
    return norm.square_().div_(rows.shape[-1]).add_(eps).rsqrt_()


def _dot(a: Tensor, b: Tensor, scratch: _Scratch) -> Tensor:
    """`[C, 1]`: row by row `<a, b>`. BLAS would be quicker, but see the head of this file."""
    return torch.mul(a, b, out=scratch("product", a.shape)).sum(-1, keepdim=True)


def _products(values: Tensor, others: Tensor) -> Tensor:
    """`[C, N, S]`: every row `[C, N, D]` times every row `[C, S, D]` of its token, or every row `[S, D]`."""
    others = others.expand(len(values), *others.shape[-2:])
    pieces = zip(values.split(_STRETCH, -1), others.split(_STRETCH, -1), strict=True)
    partial = [torch.bmm(a, b.mT) for a, b in pieces]
    return partial[0] if len(partial) == 1 else torch.stack(partial).sum(0)


def _parameter_gradients(
    dkey: Tensor, dgain: Tensor, query: Tensor, key_weight: Tensor | None, norm_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient of `query * key_weight` to those of its factors; each in its parameter's dtype."""
    dnorm_weight = query.new_empty(0) if norm_weight is None else dgain.to(norm_weight.dtype, copy=True)
    if key_weight is None:
        return dkey.to(query.dtype, copy=True), query.new_empty(0), dnorm_weight
    return (dkey * key_weight).to(query.dtype), (dkey * query).to(key_weight.dtype), dnorm_weight


def _normalize(mix: Tensor, gain: Tensor, eps: float) -> Tensor:
    return mix.mul_(_rstd(mix, eps)).mul_(gain)


def _normalize_backward(
    grad: Tensor, mix: Tensor, gain: Tensor, eps: float, scratch: _Scratch, dgain: _Total
) -> Tensor:
    """The gradient of h, where `y = h / rms(h) * gain` and `grad` is that of y."""
    rstd = _rstd(mix, eps)
    dgain.add(rstd.squeeze(1) @ torch.mul(grad, mix, out=scratch("product", mix.shape)))
    grad = torch.mul(grad, gain, out=scratch("grad", mix.shape))
    along = _dot(grad, mix, scratch).mul_(rstd.pow(3)).div_(mix.shape[-1])
    return grad.mul_(rstd).addcmul_(mix, along, value=-1)


def _alike(rstd: Tensor) -> Tensor:
    """`[C, 1]` from `[C, N, 1]`: 1 where a token's sources are all within a factor of two in size, else 0."""
    return (rstd.amax(1) <= 2 * rstd.amin(1)).to(rstd.dtype)


def _softmax_backward(weights: Tensor, pairs: Tensor) -> Tensor:
    """`a_j (<g, v_j> - δ)`, with δ from the same pair products: a rounded output would be off by far more.

    These sum to zero over j. What rounding leaves of the sum is taken out again: the query's gradient multiplies it by
    what the sources have in common.
    """
    dscore = pairs.sub_((weights * pairs).sum(1, keepdim=True)).mul_(weights)
    return dscore.addcmul_(weights, dscore.sum(1, keepdim=True), value=-1)


def _score_gradient(
    weights: Tensor, grad_lse: Tensor | None, grad_scores: Tensor | None, source: Tensor
) -> Tensor | None:
    """What the scores `[T, N, S]` get through the outputs `lse` and `scores`."""
    through_scores = None if grad_scores is None else _by_token(grad_scores, source)
    if grad_lse is None:
        return through_scores
    through_lse = weights * _by_token(grad_lse, source).unsqueeze(1)
    return through_lse if through_scores is None else through_lse.add_(through_scores)
