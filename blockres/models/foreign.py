"""Other people's Attention Residuals through blockres: their signatures, their formulas, our operations.

Each function takes what its namesake takes and returns what it returns, computed in float32 (float64 for float64
tensors) and rounded once. Sources are read where they are, banks through their strides; nothing is stacked or
concatenated on the way in. `replace_attn_res` routes the layers of a model that call one of the namesakes here.

Letters: N sources, T tokens, H or D hidden size, NB blocks in a bank.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from blockres.functional import attn_res


def kimi_k3_attn_res(prefix_sum: Tensor, block_residual: Tensor, proj: Any, norm: Any) -> Tensor:
    """Kimi K3's aggregation, as in its Hugging Face code (there: `_apply_attn_res`).

    The rows `v_j` of the bank and the prefix sum, weighed by `softmax_j(<norm.weight * proj.weight, v_j / rms(v_j)>)`.

    Args:
        prefix_sum: `[..., H]`, the sum of the open block.
        block_residual: `[..., NB, H]`, the bank of completed blocks; NB may be 0. Its slots are read through the bank's
            strides. Its gradient is one tensor of its shape, into which the slots' gradients are gathered.
        proj: has `weight [1, H]`.
        norm: has `weight [H]` and `variance_epsilon` (or `eps`).

    Returns:
        `[..., H]`.
    """
    eps = float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)
    out = attn_res([*block_residual.unbind(-2), prefix_sum], proj.weight.reshape(-1), norm.weight, eps=eps)
    assert isinstance(out, Tensor)
    return out


def fused_attnres(
    query: Tensor,
    residuals: Sequence[Tensor] | Tensor,
    rms_weight: Tensor,
    output_rms_weight: Tensor | None = None,
    rms_eps: float = 1e-6,
    scale: float = 1.0,
    return_weights: bool = False,
    checkpoint_level: int = 1,
) -> Tensor | tuple[Tensor, ...]:
    """flash-linear-attention's `fla.ops.attnres.fused_attnres`.

    Args:
        query: D elements in any shape: `[D]`, `[D, 1]`, or the `[1, D]` weight of a linear layer.
        residuals: N tensors `[..., D]`, or one `[N, ..., D]`.
        rms_weight: `[D]`, the weight of the key norm.
        output_rms_weight: `[D]`; where given, the output is normalised with it, with `rms_eps`.
        return_weights: return the softmax weights `[N, ...]` as well.
        checkpoint_level: 0 or 1, for the callers' sake: blockres saves the sources and a few floats per token for
            backward under both, never the mixed output.
    """
    if checkpoint_level not in (0, 1):
        raise ValueError(f"checkpoint_level must be 0 or 1, got {checkpoint_level}")
    return attn_res(
        residuals,
        query.reshape(-1),
        rms_weight.reshape(-1),
        eps=rms_eps,
        scale=scale,
        norm_weight=output_rms_weight,
        return_weights=return_weights,
    )


def liger_attn_res(V: Tensor | Sequence[Tensor], w_query: Tensor, w_norm: Tensor, eps: float = 1e-6) -> Tensor:
    """Liger-Kernel's `liger_attn_res`.

    Liger rounds the normalised keys to the storage dtype before it scores them; here the scores come from the unrounded
    keys. In float32 the two agree to rounding, in bfloat16 to bfloat16's.

    Args:
        V: `[N, B, T, D]`, or N tensors `[B, T, D]`.
        w_query, w_norm: `[D]`.
    """
    out = attn_res(V, w_query, w_norm, eps=eps)
    assert isinstance(out, Tensor)
    return out
