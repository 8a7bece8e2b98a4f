"""Other people's Attention Residuals through blockres: their signatures, their formulas, our operations.

Each function takes what its namesake takes and returns what it returns, computed in float32 (float64 for float64
tensors) and rounded once. Sources are read where they are, banks through their strides; nothing is stacked or
concatenated on the way in. `replace_attn_res` routes the layers of a model that call one of the namesakes here.

Letters: N sources, T tokens, H or D hidden size, NB blocks in a bank.
"""

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType, SimpleNamespace, new_class
from typing import Any

import torch
from torch import Tensor, nn

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


class _LigerFunction:
    """In place of Liger's autograd function, which its module calls."""

    apply = staticmethod(liger_attn_res)


@dataclasses.dataclass(frozen=True)
class _Form:
    """A name that foreign layers call, and what takes its place."""

    name: str
    owner: str
    replacement: Any
    parameters: tuple[str, ...] | None  # of the function of that name; None for a class


_FORMS = (
    _Form("_apply_attn_res", "Kimi K3", kimi_k3_attn_res, ("prefix_sum", "block_residual", "proj", "norm")),
    _Form("fused_attnres", "flash-linear-attention", fused_attnres, tuple(inspect.signature(fused_attnres).parameters)),
    _Form("liger_attn_res", "Liger-Kernel", liger_attn_res, tuple(inspect.signature(liger_attn_res).parameters)),
    _Form("LigerAttnResFunction", "Liger-Kernel", _LigerFunction, None),
)


@dataclasses.dataclass(frozen=True)
class Replaced:
    """One method of one module that `replace_attn_res` has routed to blockres."""

    module: str
    method: str
    owner: str


def replace_attn_res(model: nn.Module) -> list[Replaced]:
    """Route every layer of a model that aggregates by a foreign Attention Residual function to blockres, in place.

    Such layers are found by what their methods call: Kimi K3's `_apply_attn_res`, flash-linear-attention's
    `fused_attnres`, Liger's `liger_attn_res` or `LigerAttnResFunction`, as a global name of the module in which the
    method is written. Each takes a subclass of its class, of the same name, whose methods see the blockres function
    under that name. Neither the class nor the Python module changes, and parameters keep their names;
    `restore_attn_res` undoes it. A Kimi K3 function, which is part of the model's own code, is first compared with the
    formula on numbers.

    Returns:
        What was routed, module by module.

    Raises:
        ValueError: where no such layer is found, or one that calls such a function cannot be routed.
    """
    calls = {kind: list(_calls(kind)) for kind in {type(module) for module in model.modules()}}
    classes = {kind: _rerouted_class(kind, found) for kind, found in calls.items() if found}
    replaced = []
    for name, module in model.named_modules():
        kind = type(module)
        if kind in classes:
            _take_class(module, classes[kind])
            replaced += [Replaced(name, attribute, form.owner) for attribute, _, form in calls[kind]]
    if not replaced:
        raise ValueError(
            f"no layer of {type(model).__name__} calls an Attention Residual function that is known here "
            f"({', '.join(form.name for form in _FORMS)}). For a model with its standard residual there is "
            f"blockres.models.apply_attn_res"
        )
    return replaced


def restore_attn_res(model: nn.Module) -> nn.Module:
    """Undo `replace_attn_res`.

    Raises:
        ValueError: where nothing of it is found.
    """
    rerouted = [module for module in model.modules() if isinstance(module, _Rerouted)]
    if not rerouted:
        raise ValueError(f"no layer of {type(model).__name__} has been routed to blockres")
    for module in rerouted:
        _take_class(module, module._original)
    return model


def _take_class(module: Any, kind: type[nn.Module]) -> None:
    module.__class__ = kind


class _Rerouted(nn.Module):
    """A module that has taken a subclass with rerouted methods; it is copied and pickled by its original class."""

    _original: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _revive, (type(self)._original,), vars(self)


def _revive(original: type[nn.Module]) -> nn.Module:
    rerouted = _rerouted_class(original, list(_calls(original)))
    return rerouted.__new__(rerouted)


def _calls(kind: type[nn.Module]) -> Iterator[tuple[str, FunctionType, _Form]]:
    """The methods of a class that call a known function: attribute, method, form."""
    if issubclass(kind, _Rerouted):
        return
    for attribute in dir(kind):
        method = inspect.getattr_static(kind, attribute)
        if not isinstance(method, FunctionType):
            continue
        names = _names(inspect.unwrap(method).__code__)
        for form in _FORMS:
            if form.name in names and method.__globals__.get(form.name) is not form.replacement:
                _check_reachable(f"{kind.__name__}.{attribute}", method, form)
                yield attribute, method, form


def _names(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _check_reachable(where: str, method: FunctionType, form: _Form) -> None:
    if inspect.unwrap(method) is not method:
        raise ValueError(
            f"{where} calls {form.name} inside a decorator, where it cannot be replaced for one instance: "
            f"move the call into a method of its own"
        )
    function = method.__globals__.get(form.name)
    if not callable(function) and not hasattr(function, "apply"):
        raise ValueError(
            f"{where} uses {form.name}, which is no global name of {method.__module__}: import it there by that name"
        )
    if form.parameters is None:
        return
    parameters = tuple(inspect.signature(function).parameters)
    if parameters != form.parameters:
        raise ValueError(
            f"{where} calls a {form.name}({', '.join(parameters)}); {form.owner}'s is "
            f"{form.name}({', '.join(form.parameters)})"
        )
    if form.replacement is kimi_k3_attn_res:
        _check_formula(where, function)


def _check_formula(where: str, function: Any) -> None:
    """Kimi K3's function comes with the model's code, where it may have been changed: compare it on a sample."""
    proj = SimpleNamespace(weight=torch.linspace(-1, 2, 6)[None])
    norm = SimpleNamespace(weight=torch.linspace(0.5, 1.5, 6), variance_epsilon=1e-5, eps=1e-5)
    grid = torch.linspace(-2, 3, 4 * 3 * 6).reshape(4, 3, 6)
    bank, prefix = grid[:, :2], grid[:, 2].cos()
    theirs, ours = function(prefix, bank, proj, norm), kimi_k3_attn_res(prefix, bank, proj, norm)
    if not torch.allclose(theirs, ours, rtol=1e-5, atol=1e-5):
        error = float((theirs - ours).abs().max())
        raise ValueError(f"{where} calls an _apply_attn_res with another formula than Kimi K3's: off by {error:.2g}")


def _rerouted_class(original: type[nn.Module], calls: Sequence[tuple[str, FunctionType, _Form]]) -> type[nn.Module]:
    def fill(namespace: dict[str, Any]) -> None:
        namespace.update(__module__=original.__module__, __qualname__=original.__qualname__, _original=original)
        for attribute, method, form in calls:
            namespace[attribute] = _with_global(namespace.get(attribute, method), form.name, form.replacement)

    return new_class(original.__name__, (_Rerouted, original), exec_body=fill)


def _with_global(method: FunctionType, name: str, value: Any) -> FunctionType:
    """A copy of a method that sees `value` under the global `name`.

    Without its module's name among its globals: torch.compile would look the global up in that module.
    """
    scope = {key: entry for key, entry in method.__globals__.items() if key != "__name__"} | {name: value}
    copied = FunctionType(method.__code__, scope, method.__name__, method.__defaults__, method.__closure__)
    copied.__kwdefaults__, copied.__doc__ = method.__kwdefaults__, method.__doc__
    copied.__module__, copied.__qualname__ = method.__module__, method.__qualname__
    return copied
