"""Random sources, errors relative to a float64 reference, and roundings counted bit by bit."""

from collections.abc import Sequence

import torch
from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """`|actual - expected| / |expected|` in float64; where `expected` is zero, the norm of `actual`."""
    wide = expected.double()
    error = (actual.double().to(wide.device) - wide).norm()
    return (error / wide.norm()).item() if wide.norm() > 0 else error.item()


def exact_leaves(*tensors: Tensor | None) -> list[Tensor | None]:
    """The same in float64 on the CPU, for the definition to be differentiated with respect to."""
    return [None if x is None else x.detach().cpu().double().requires_grad_() for x in tensors]


def gradients_of(*leaves: Tensor | None) -> list[Tensor]:
    """Their gradients, as the kernels return them: `(0,)` for what is not there."""
    return [torch.empty(0) if x is None else torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


def correlated_sources(
    count: int,
    shape: Sequence[int],
    common: float,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """Unit normal sources that share one component `common` times as large as what is their own."""
    shared = common * torch.randn(*shape)
    return [(shared + torch.randn(*shape)).to(device, dtype) for _ in range(count)]


def units_apart(actual: Tensor, expected: Tensor) -> Tensor:
    """How many representable numbers lie between two bf16 or fp16 tensors of one dtype, element by element."""
    assert actual.dtype == expected.dtype
    return (_ordinal(actual) - _ordinal(expected)).abs()


def assert_parameter_gradient(actual: Tensor, exact: Tensor, rows: torch.dtype) -> None:
    """The project's bound, which depends on the dtype of the rows, not on the parameter's: that is rounded to last.

    It holds for gradients that are not small by chance: with few sources, give each query several tokens. A token adds
    its gradient times what one source has over another, and where all of these are nearly zero beside their rounding,
    the relative error may be anything.
    """
    assert actual.shape == exact.shape
    if actual.dtype in (torch.bfloat16, torch.float16):
        assert_rounded_once(actual, exact)
    else:
        assert relative_error(actual.cpu(), exact) <= (1e-12 if rows == actual.dtype == torch.float64 else 2e-6)


def assert_rounded_once(actual: Tensor, exact: Tensor, share: float = 0.99) -> None:
    """At least `share` of `actual` equals float64 `exact` rounded to nearest even, and the rest is one unit away.

    Two elements may be off however few there are: a share of less than 200 says little. Beside zero, where sources
    cancel, a unit is smaller than float32's error in the sum, which is what bounds the distance there.
    """
    exact = exact.cpu()
    apart = units_apart(actual.cpu(), round_float64(exact, actual.dtype))
    beside_zero = (actual.cpu().double() - exact).abs() <= 1e-6 * exact.abs().max()
    off = int((apart != 0).sum())
    farthest = apart.masked_fill(beside_zero, 0).max()
    assert farthest <= 1, f"an element is {farthest.item()} units in the last place away"
    assert off <= max((1 - share) * apart.numel(), 2), f"{off} of {apart.numel()} are not rounded to nearest even"


def round_float64(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 to bf16 or fp16 once, without stopping at float32 on the way.

    Where float32 lands on a tie that float64 is not on, the float32 is moved off it towards the float64.
    """
    single = exact.float()
    down, up = (torch.nextafter(single, torch.full_like(single, to)) for to in (-torch.inf, torch.inf))
    odd = single.view(torch.int32) % 2 != 0
    inexact = single.double() != exact
    towards = torch.where(exact > single.double(), up, down)
    return torch.where(inexact & ~odd, towards, single).to(dtype)


def _ordinal(x: Tensor) -> Tensor:
    bits = x.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)
