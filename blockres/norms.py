"""The norm that a read fuses into its aggregation."""

import torch
from torch import Tensor, nn

from blockres.checks import has_hooks, kind

Norm = nn.RMSNorm | tuple[Tensor, float]


def norm_arguments(norm: Norm | None, dim: int, dtype: torch.dtype) -> tuple[Tensor | None, float | None]:
    """Weight `[dim]` and epsilon; `dtype` is that of the rows.

    Raises:
        TypeError, ValueError: for a norm that cannot be fused.
    """
    if norm is None:
        return None, None
    if isinstance(norm, tuple):
        if len(norm) != 2 or not isinstance(norm[0], Tensor) or not isinstance(norm[1], (int, float)):
            raise TypeError(f"a norm as a tuple is (weight [{dim}], eps), got ({', '.join(map(kind, norm))})")
        return norm
    if not isinstance(norm, nn.RMSNorm) or type(norm).forward is not nn.RMSNorm.forward:
        raise TypeError(
            f"the norm fused into an aggregation is an nn.RMSNorm or a tuple (weight, eps), got {type(norm).__name__}; "
            f"apply any other norm to what read() returns"
        )
    if has_hooks(norm):
        raise ValueError("the norm has hooks, which a fused one does not run: apply it to what read() returns")
    if norm.weight is None or tuple(norm.normalized_shape) != (dim,):
        raise ValueError(
            f"the norm fused into an aggregation has a weight [{dim}], got {norm}; apply it to what read() returns"
        )
    # nn.RMSNorm's own default is the epsilon of the dtype that it computes in, float32 for the narrower ones.
    default = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return norm.weight, default if norm.eps is None else norm.eps
