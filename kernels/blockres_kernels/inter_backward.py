"""Phase 1, backward. See `inter_forward` for the operation and the letters; g_s is the gradient of h_s.

For a token, with u = grad_output_0 * norm_weight. The gradient of h_0 is g_0 = rho u - beta h_0 with
beta = rho^3 <u, h_0> / D where the norm is fused, else grad_output_0:

    p_sj = <g_s, v_j>                        delta_s = sum_j a_sj p_sj
    ds_sj = a_sj (p_sj - delta_s + dlse_s)
    dv_j = sum_s a_sj g_s + sum_s e_sj key_s - f_j v_j
    dkey_s = sum over tokens of sum_j e_sj v_j,   e_sj = scale ds_sj r_j,   f_j = r_j^2 / D sum_s ds_sj s_sj

`sum_j a_sj (p_sj - delta_s)` is zero; what rounding leaves of it would be multiplied by all that the sources have in
common, and is taken out again in proportion to a_sj. For the same reason sources are taken relative to the first one:
products with v_j - v_0 make up p_sj, and sums of e_sj (v_j - z v_0) and of z (sum_j e_sj) v_0 make up dkey_s. z is 1
where all sources are alike in size, and 0 where one is more than twice another: a large v_0 would then only cancel. In
p_sj it does no harm, since delta_s has it in any case.

No gradient of a source is known before all p_sj of its token are. Where S rows of gradients, S of sums for dkey and N
of sources fit into one program, it does everything at one read of each (`inter_backward_whole`). Where they do not, one
launch finds the products, a small one makes a, e and f of them, and a third reads everything again, cut along D
(`inter_backward_slices`). The sums are written as one row per program and added in a fixed order.

Above `launch.MAX_SOURCES` sources there are launches for products and for slices for each group of sources; a, e and f
are made of all groups' products by PyTorch: they are small.
"""

import functools

import torch
from torch import Tensor

from . import launch
from .inter_backward_slices import launch_slices
from .inter_backward_terms import Work
from .inter_backward_whole import launch_whole
from .inter_forward import attn_res_inter_forward
from .inter_tiles import keys_of, uniform
from .parameters import parameter_gradients
from .rows import Formula
from .sources import Rows, on_device, rows_of, triton_dtype, vectors


def attn_res_inter_backward(
    grad_outputs: list[Tensor] | Tensor,
    grad_lse: Tensor | None,
    sources: list[Tensor],
    queries: Tensor,
    key_weights: Tensor | None,
    norm_weight: Tensor | None,
    lse: Tensor,
    scores: Tensor,
    rstd: Tensor,
    eps: float,
    scale: float,
    norm_eps: float,
    needs_grad: list[bool],
    accumulate: list[Tensor | None],
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Gradients of the sources, of queries, key weights and norm weight, in their dtypes.

    `(0,)` for a source that needs none, and for a parameter that is not given.

    Args:
        grad_outputs: S tensors `[..., D]`, as a sequence or stacked; copied only where their rows cannot be read in
            place with one pair of strides for all.
        accumulate: for each source a gradient `[..., D]` to which its own is added, or None. The sum goes to fresh
            memory: autograd may hand the same gradient to others.
    """
    dsources = [x.new_empty(x.shape if needed else (0,)) for x, needed in zip(sources, needs_grad, strict=True)]
    parameters = queries, key_weights, norm_weight = vectors(queries, key_weights, norm_weight)
    if not sources[0].numel():
        nothing = scores.new_empty(0, *queries.shape)
        with on_device(sources[0]):
            return dsources, *parameter_gradients(nothing, nothing[:, 0], *parameters)
    work = Work(
        _gradient_rows(list(grad_outputs)),
        rows_of(sources),
        _same_dtype([None if x is None else x.contiguous() for x in accumulate]),
        dsources,
        needs_grad,
        keys_of(queries, key_weights, scores.dtype),
        norm_weight,
        scores,
        rstd,
        None if grad_lse is None else grad_lse.to(scores.dtype).contiguous(),
        Formula(eps, scale, norm_eps, triton_dtype(scores.dtype)),
    )
    with on_device(sources[0]):
        if work.plan.whole and len(sources) <= launch.MAX_SOURCES:
            dkey_rows, dnorm_rows = launch_whole(work)
        else:
            mixed = None
            if norm_weight is not None and len(sources) > launch.MAX_SOURCES:
                head = None if key_weights is None else key_weights[:1]
                mixed = attn_res_inter_forward(sources, queries[:1], head, None, eps, scale, norm_eps, scores.dtype)[0]
            dkey_rows, dnorm_rows = launch_slices(work, mixed)
        return dsources, *parameter_gradients(dkey_rows, dnorm_rows, *parameters)


def _gradient_rows(grads: list[Tensor]) -> Rows:
    """Rows with one pair of strides for all tensors; copied where they have none."""
    grads = _same_dtype(grads)
    try:
        rows = rows_of(grads)
    except ValueError:
        return rows_of([x.contiguous() for x in grads])
    return rows if uniform(rows) else rows_of([x.contiguous() for x in grads])


def _same_dtype(tensors: list) -> list:
    given = [x.dtype for x in tensors if x is not None]
    widest = functools.reduce(torch.promote_types, given) if given else None
    return [x if x is None else x.to(widest) for x in tensors]
