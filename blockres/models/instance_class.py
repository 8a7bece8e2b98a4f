"""Other behaviour for single instances of a module: they take a subclass of their class, of the same name.

Neither the class nor the Python module that it is written in changes.
"""

import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn


class InstanceClass(nn.Module):
    """Base of such subclasses; an instance is copied and pickled by what its subclass is made of."""

    _original: type[nn.Module]
    _subclass: type[nn.Module]
    _made_by: tuple[Any, ...]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _revive, type(self)._made_by, vars(self)

    def is_outermost(self) -> bool:
        """Whether the instance still has the class that it took, not one that a wrapper (FSDP2) put around that."""
        return type(self) is type(self)._subclass


def instance_class(
    original: type[nn.Module], base: type[InstanceClass], namespace: Mapping[str, Any], *made_by: Any
) -> Any:
    """A subclass of `original` with the methods of `base` and `namespace` before its own.

    Args:
        made_by: a function and arguments with which it makes this class again; all of them can be pickled.
    """
    origin = {"_original": original, "_made_by": made_by}
    subclass: Any = namesake(original, (base, original), {**namespace, **origin})
    subclass._subclass = subclass
    return subclass


def namesake(
    original: type[nn.Module], bases: tuple[type[nn.Module], ...], namespace: Mapping[str, Any]
) -> type[nn.Module]:
    """A new class that bears the name of `original`."""
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return types.new_class(original.__name__, bases, exec_body=lambda body: body.update({**namespace, **names}))


def take_class(module: Any, kind: type[nn.Module]) -> None:
    """Make `module` an instance of `kind`, a class of the same layout."""
    module.__class__ = kind


def _revive(make: Callable[..., type[nn.Module]], *arguments: Any) -> nn.Module:
    kind = make(*arguments)
    return kind.__new__(kind)
