"""Models whose layers call a foreign Attention Residual function, routed to blockres instance by instance."""

import dataclasses
import inspect
from types import FunctionType
from typing import Any

from torch import nn

from blockres.models.foreign_calls import FORMS, Form, find_calls, is_foreign
from blockres.models.instance_class import InstanceClass, instance_class, take_class


@dataclasses.dataclass(frozen=True)
class Replaced:
    """One method of one module that `replace_attn_res` has routed to blockres."""

    module: str
    method: str
    owner: str


def replace_attn_res(model: nn.Module) -> list[Replaced]:
    """Route every layer of a model that aggregates by a foreign Attention Residual function to blockres, in place.

    Such layers are found by what their methods call, static and class methods and properties among them: Kimi K3's
    `_apply_attn_res`, flash-linear-attention's `fused_attnres`, Liger's `liger_attn_res` or `LigerAttnResFunction`, as
    a global name of the module in which the method is written. Each takes a subclass of its class, of the same name,
    whose methods see the blockres function under that name. Neither the class nor the Python module changes, and
    parameters keep their names; `restore_attn_res` undoes it. A Kimi K3 function, which is part of the model's own
    code, is first compared with the formula on numbers.

    A call one step further away (in a decorator, a base class's method behind `super()`, a function that the method
    names) is an error. What is further away, or picked while the model runs, is not found.

    Returns:
        What was routed, module by module.

    Raises:
        ValueError: where no such layer is found, or one that calls such a function cannot be routed.
    """
    kinds = {type(module) for module in model.modules() if not isinstance(module, _Rerouted)}
    calls = {kind: found for kind in kinds if (found := find_calls(kind))}
    classes = {kind: _rerouted_class(kind) for kind in calls}
    replaced = []
    for name, module in model.named_modules():
        kind = type(module)
        if kind in classes:
            take_class(module, classes[kind])
            replaced += [Replaced(name, attribute, form.owner) for attribute, form in calls[kind]]
    if not replaced:
        raise ValueError(
            f"no layer of {type(model).__name__} calls an Attention Residual function that is known here "
            f"({', '.join(form.name for form in FORMS)}). For a model with its standard residual there is "
            f"blockres.models.apply_attn_res"
        )
    return replaced


def restore_attn_res(model: nn.Module) -> nn.Module:
    """Undo `replace_attn_res`.

    Raises:
        ValueError: where nothing of it is found, or a wrapper has been put around a layer since.
    """
    rerouted = [module for module in model.modules() if isinstance(module, _Rerouted)]
    if not rerouted:
        raise ValueError(f"no layer of {type(model).__name__} has been routed to blockres")
    if not all(module.is_outermost() for module in rerouted):
        raise ValueError(
            f"layers of {type(model).__name__} have been wrapped since they were routed: "
            f"remove what was added last first"
        )
    for module in rerouted:
        take_class(module, module._original)
    return model


class _Rerouted(InstanceClass):
    """A module that has taken a subclass with rerouted methods."""


def _rerouted_class(original: type[nn.Module]) -> Any:
    namespace: dict[str, Any] = {}
    for attribute, form in find_calls(original):
        member = namespace.get(attribute, inspect.getattr_static(original, attribute))
        namespace[attribute] = _rerouted_member(member, form)
    return instance_class(original, _Rerouted, namespace, _rerouted_class, original)


def _rerouted_member(member: Any, form: Form) -> Any:
    def reroute(function: Any) -> Any:
        return _with_global(function, form.name, form.replacement) if is_foreign(function, form) else function

    if isinstance(member, (staticmethod, classmethod)):
        return type(member)(reroute(member.__func__))
    if isinstance(member, property):
        return type(member)(reroute(member.fget), reroute(member.fset), reroute(member.fdel), member.__doc__)
    return reroute(member)


def _with_global(method: FunctionType, name: str, value: Any) -> FunctionType:
    """A copy of a method that sees `value` under the global `name`.

    Without its module's name among its globals: torch.compile would look the global up in that module.
    """
    scope = {key: entry for key, entry in method.__globals__.items() if key != "__name__"} | {name: value}
    copied = FunctionType(method.__code__, scope, method.__name__, method.__defaults__, method.__closure__)
    copied.__kwdefaults__, copied.__doc__ = method.__kwdefaults__, method.__doc__
    copied.__module__, copied.__qualname__ = method.__module__, method.__qualname__
    return copied
