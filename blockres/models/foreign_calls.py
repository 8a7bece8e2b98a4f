"""Where the methods of a class call a foreign Attention Residual function, and whether the call can be replaced.

A method of one instance sees other functions if it is a copy with other globals. So a call can be replaced where a
method makes it itself, by the name of the function; one step further away it cannot, which is an error here rather
than a layer that goes on calling what it called before.
"""

import dataclasses
import dis
import functools
import inspect
from collections.abc import Iterator
from itertools import pairwise
from types import CellType, CodeType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from blockres.models.foreign import fused_attnres, kimi_k3_attn_res, liger_attn_res


class _LigerFunction:
    """In place of Liger's autograd function, which its module calls."""

    apply = staticmethod(liger_attn_res)


@dataclasses.dataclass(frozen=True)
class Form:
    """A name that foreign layers call, and what takes its place."""

    name: str
    owner: str
    replacement: Any
    parameters: tuple[str, ...] | None  # of the function of that name; None for a class


FORMS = (
    Form("_apply_attn_res", "Kimi K3", kimi_k3_attn_res, ("prefix_sum", "block_residual", "proj", "norm")),
    Form("fused_attnres", "flash-linear-attention", fused_attnres, tuple(inspect.signature(fused_attnres).parameters)),
    Form("liger_attn_res", "Liger-Kernel", liger_attn_res, tuple(inspect.signature(liger_attn_res).parameters)),
    Form("LigerAttnResFunction", "Liger-Kernel", _LigerFunction, None),
)
_NAMES = {form.name for form in FORMS}


def find_calls(kind: type[nn.Module]) -> list[tuple[str, Form]]:
    """The methods, static and class methods and properties of a class that call a known function.

    Raises:
        ValueError: where such a call cannot be replaced.
    """
    own = [name for name in dir(kind) if not _is_everybodys(inspect.getattr_static(kind, name), name)]
    _check_overridden(kind)
    return [(name, form) for name in own for form in _forms_called(kind, name)]


def is_foreign(function: Any, form: Form) -> bool:
    """Whether a function, or the one inside its decorators, calls what `form` replaces."""
    inner = _innermost(function)
    if not isinstance(inner, FunctionType) or form.name not in _names(inner):
        return False
    return inner.__globals__.get(form.name) is not form.replacement


def _forms_called(kind: type[nn.Module], attribute: str) -> list[Form]:
    where, functions = f"{kind.__name__}.{attribute}", _functions(inspect.getattr_static(kind, attribute))
    for function in functions:
        _check_next_step(where, function)
    found = [(form, function) for form in FORMS for function in functions if is_foreign(function, form)]
    for form, function in found:
        _check_reachable(where, function, form)
    return list(dict.fromkeys(form for form, _ in found))


def _is_everybodys(member: Any, attribute: str) -> bool:
    return member is inspect.getattr_static(nn.Module, attribute, None)


def _functions(member: Any) -> list[Any]:
    """The functions that a class's attribute consists of, in their decorators."""
    found: tuple[Any, ...] = (member,)
    if isinstance(member, (staticmethod, classmethod)):
        found = (member.__func__,)
    elif isinstance(member, property):
        found = (member.fget, member.fset, member.fdel)
    return [function for function in found if isinstance(_innermost(function), FunctionType)]


def _innermost(function: Any) -> Any:
    """What is inside decorators, partial functions and cached properties."""
    while True:
        inner = function
        if isinstance(function, (functools.cached_property, functools.partial, functools.partialmethod)):
            inner = function.func
        elif callable(function) and not isinstance(function, type):
            inner = inspect.unwrap(function)
        if inner is function:
            return function
        function = inner


def _names(function: FunctionType) -> set[str]:
    return {name for code in _codes(function.__code__) for name in code.co_names}


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of the functions written inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _check_next_step(where: str, function: Any) -> None:
    named = list(_named_by(_innermost(function)))
    for form in FORMS:
        aliases = [name for name, value in [(where, function), *named] if _is_alias(value, form)]
        indirect = [name for name, value in named if any(is_foreign(reached, form) for reached in _functions(value))]
        if through := aliases + indirect:
            raise ValueError(
                f"{where} gets to {form.name} through {through[0]}, where it cannot be replaced for one instance: "
                f"let a method of the layer call {form.name} itself, by that name"
            )


def _is_alias(value: Any, form: Form) -> bool:
    inner = _innermost(value)
    return isinstance(inner, (FunctionType, type)) and inner.__qualname__ == form.name and inner is not form.replacement


def _named_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function names: globals, attributes of globals, what it closes over. The known names aside."""
    for code in _codes(function.__code__):
        instructions = (found for found in dis.get_instructions(code) if found.opname != "EXTENDED_ARG")
        for this, following in pairwise(instructions):
            if this.opname != "LOAD_GLOBAL" or this.argval in _NAMES:
                continue
            value = function.__globals__.get(this.argval)
            yield this.argval, value
            if following.opname in ("LOAD_ATTR", "LOAD_METHOD") and following.argval not in _NAMES:
                yield f"{this.argval}.{following.argval}", inspect.getattr_static(value, following.argval, None)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield name, _content(cell)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty as yet
        return None


def _check_overridden(kind: type[nn.Module]) -> None:
    """What `super()` leads to belongs to a base class, and a subclass of `kind` cannot exchange it."""
    bases = [base for base in kind.__mro__ if not issubclass(nn.Module, base)]
    members = [
        (base, name, function) for base in bases for name in vars(base) for function in _functions(vars(base)[name])
    ]
    uses = [_names(_innermost(function)) for _, _, function in members]
    behind_super = set().union(*(names for names in uses if "super" in names))
    for base, name, function in members:
        if name not in behind_super or inspect.getattr_static(kind, name) is vars(base)[name]:
            continue
        for form in FORMS:
            if is_foreign(function, form):
                raise ValueError(
                    f"{kind.__name__} gets to {form.name} through super() and {base.__name__}.{name}, where it cannot "
                    f"be replaced for one instance: move the call into a method of its own"
                )


def _check_reachable(where: str, method: Any, form: Form) -> None:
    if not isinstance(method, FunctionType) or _innermost(method) is not method:
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
