"""What the public functions refuse, and how they say so.

Every check is plain Python on shapes, strides and dtypes, so that `torch.compile` traces through it.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.forward_ad import unpack_dual

MAX_WIDTH = 16384
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def source_list(sources: Sequence[Tensor] | Tensor) -> list[Tensor]:
    """The N sources `[..., D]`, alike and readable in place.

    Raises:
        TypeError: for anything but tensors of one of the four float dtypes.
        ValueError: for no source, or for sources that differ or cannot be read where they are.
    """
    if isinstance(sources, Tensor):
        tensor("sources", sources)
        if sources.dim() < 2:
            raise ValueError(
                f"sources as one tensor are stacked as [N, ..., D], got shape {tuple(sources.shape)}; "
                "pass a single source as [source]"
            )
        sources = sources.unbind(0)
    elif not isinstance(sources, Sequence):
        raise TypeError(
            f"sources must be a sequence of tensors [..., D] or one tensor [N, ..., D], got {type(sources).__name__}"
        )
    if len(sources) == 0:
        raise ValueError("sources is empty: an aggregation needs at least one source (the embedding)")
    for j, source in enumerate(sources):
        rows(f"source {j}", source)
        if j > 0:
            _alike(f"source {j}", source, "source 0", sources[0])
    one_cut("sources", sources)
    return list(sources)


def rows(name: str, value: Tensor) -> None:
    """A tensor `[..., D]`, `1 <= D <= 16384`, with a contiguous last dimension."""
    tensor(name, value)
    if value.dim() < 1:
        raise ValueError(f"{name} must have a last dimension D, got a tensor without dimensions")
    if not 1 <= value.shape[-1] <= MAX_WIDTH:
        raise ValueError(f"{name} has D = {value.shape[-1]}; D must be between 1 and {MAX_WIDTH}")
    if value.stride(-1) != 1 and value.shape[-1] > 1:
        raise ValueError(
            f"the last dimension of {name} must be contiguous, got shape {tuple(value.shape)} with strides "
            f"{tuple(value.stride())}; call .contiguous() on it first"
        )


def one_cut(name: str, tensors: Sequence[Tensor]) -> None:
    """The leading dimensions of all tensors reduce to two strides (outer, row), cut at one place."""
    if all(t.is_contiguous() for t in tensors):
        return
    lead = tensors[0].dim() - 1
    for cut in range(max(lead, 1)):
        if all(_one_stride(t, 0, cut) and _one_stride(t, cut, lead) for t in tensors):
            return
    raise ValueError(
        f"the leading dimensions of {name} must reduce to two strides, cut at one place for all; got shape "
        f"{tuple(tensors[0].shape)} with strides {[tuple(t.stride()) for t in tensors]}; "
        "call .contiguous() on them first"
    )


def one_stride(name: str, value: Tensor) -> None:
    """Rows that are one stride apart, over all leading dimensions."""
    if not value.is_contiguous() and not _one_stride(value, 0, value.dim() - 1):
        raise ValueError(
            f"the leading dimensions of {name} must reduce to one stride, got shape {tuple(value.shape)} with strides "
            f"{tuple(value.stride())}; call .contiguous() on it first"
        )


def same_dtype(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    if value.dtype != other.dtype:
        raise ValueError(f"{name} is {value.dtype}, {other_name} is {other.dtype}; they must be the same")


def no_gradient(name: str, *values: Tensor | None) -> None:
    """What has no backward is not asked for one."""
    if torch.is_grad_enabled() and any(value is not None and value.requires_grad for value in values):
        raise RuntimeError(
            f"{name} has no gradient, and one of its arguments requires one: call it under torch.inference_mode() or "
            f"torch.no_grad(), or use attn_res, attn_res_inter and attn_res_merge, which are differentiated"
        )


def same_shape(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    if value.shape != other.shape:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, {other_name} has {tuple(other.shape)}; they must be the same"
        )


def writable(name: str, value: Tensor, bank: Tensor) -> None:
    """Rows `[..., D]` that do not overlap and do not begin where one of the slots `bank [N, ..., D]` does, all read."""
    if any(
        size > 1 and stride < value.shape[-1] for size, stride in zip(value.shape, value.stride()[:-1], strict=False)
    ):
        raise ValueError(
            f"the rows of {name} overlap and cannot be written, got shape {tuple(value.shape)} with strides "
            f"{tuple(value.stride())}"
        )
    if torch.compiler.is_compiling() or value.is_meta or isinstance(value, FakeTensor) or not value.numel():
        return  # there is no memory to compare
    offset, stride = value.data_ptr() - bank.data_ptr(), bank.stride(0) * bank.element_size()
    if any(offset == slot * stride for slot in range(len(bank))):
        raise ValueError(f"{name} is one of the slots that are read; give a slot past them, or memory of its own")


def has_hooks(module: nn.Module) -> bool:
    """Whether something is to happen at a call of the module that nothing else would do."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def integers(**sizes: Any) -> None:
    """Numbers that count something; a bool is none."""
    for name, size in sizes.items():
        if not isinstance(size, Integral) or isinstance(size, bool):
            raise TypeError(f"{name} must be an integer, got {size!r} ({type(size).__name__})")


def stream_rows(name: str, value: Tensor, dim: int) -> None:
    """What a residual stream of width `dim` is opened with."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor [..., {dim}], got {kind(value)}")
    if value.dtype not in FLOATS:
        raise TypeError(f"{name} must be one of {_names(FLOATS)}, got {value.dtype}")
    if value.dim() < 1 or value.shape[-1] != dim:
        raise ValueError(f"{name} must be [..., {dim}], the width of this residual; got shape {tuple(value.shape)}")


def kind(value: Any) -> str:
    """A value's type with its article, for a sentence that says what was received."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def parameter(name: str, value: Tensor | None, shape: Sequence[int], like: Tensor) -> None:
    """An optional tensor of this shape, of any float dtype, on the device of `like`."""
    if value is None:
        return
    tensor(name, value)
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(value.shape)}")
    same_device(name, value, like)


def same_device(name: str, value: Tensor, like: Tensor) -> None:
    if value.device != like.device:
        raise ValueError(f"{name} is on {value.device}, the rows are on {like.device}; move one to the other's device")


def numbers(eps: float, scale: float, norm_eps: float | None, norm_weight: Tensor | None) -> float:
    """The numbers of a call; returns the eps of the output norm."""
    for name, value in (("eps", eps), ("scale", scale), ("norm_eps", norm_eps)):
        if not isinstance(value, (int, float)) and (value is not None or name != "norm_eps"):
            raise TypeError(f"{name} must be a Python number, got {kind(value)}")
    for name, value in (("eps", eps), ("norm_eps", norm_eps)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive number, got {value}")
    if not -math.inf < scale < math.inf:
        raise ValueError(f"scale must be a finite number, got {scale}")
    if norm_eps is not None and norm_weight is None:
        raise ValueError(f"norm_eps = {norm_eps} without norm_weight: the output norm is applied where it has a weight")
    return eps if norm_eps is None else norm_eps


def result_dtype(out_dtype: torch.dtype | None, default: torch.dtype) -> torch.dtype:
    if out_dtype is None:
        return default
    if out_dtype not in FLOATS:
        raise TypeError(f"out_dtype must be one of {_names(FLOATS)}, got {out_dtype}")
    return out_dtype


def tensor(name: str, value: Tensor) -> None:
    """A plain, dense tensor of one of the four float dtypes."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if not torch.compiler.is_compiling():
        _transforms(name, value)
    if hasattr(value, "to_local"):
        raise TypeError(
            f"{name} is a DTensor; blockres works on the tensors of one device. Call .to_local() where D is whole "
            "there, else .full_tensor()"
        )
    if value.layout != torch.strided or value.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got layout {value.layout}; call .to_dense() on it first")
    if value.dtype not in FLOATS:
        raise TypeError(f"{name} must be one of {_names(FLOATS)}, got {value.dtype}")


def _transforms(name: str, value: Tensor) -> None:
    """Refuse what has no rule here; forward mode would otherwise drop the tangent without a word."""
    if unpack_dual(value).tangent is not None or torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"blockres operations are differentiated in reverse mode, by torch.autograd; {name} came through forward "
            "mode or a torch.func transform. blockres.reference has functions of the same signatures that take both"
        )


def _alike(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    same_shape(name, value, other_name, other)
    for what in ("dtype", "device"):
        got, want = getattr(value, what), getattr(other, what)
        if got != want:
            raise ValueError(f"{name} has {what} {got}, {other_name} has {want}; all sources must have the same")


def _one_stride(value: Tensor, start: int, stop: int) -> bool:
    """One stride walks through the dimensions start … stop - 1 in order."""
    steps = [(value.shape[d], value.stride(d)) for d in range(start, stop) if value.shape[d] != 1]
    return all(outer == size * inner for (_, outer), (size, inner) in pairwise(steps))


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
