"""Run Triton kernels, blockres's and other packages', on CPU tensors through the interpreter.

TRITON_INTERPRET=1 has to be set before triton is imported; `require_interpreter` does that for a script.

`KernelMode` sends every `blockres::` operation to its Triton implementation instead of the CPU one, and runs the
bodies of other packages' custom ops in place. `peer` lifts, while it lasts, what keeps another package's kernels out
of the interpreter: a check for CUDA tensors, a choice between several configurations (all of which move the same
bytes), loops whose index must be a tensor.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PEER_MODULES = {
    "fla-core": ("fla.ops.attnres.fused",),
    "fla-core level 0": ("fla.ops.attnres.fused",),
    "liger-kernel": ("liger_kernel.ops.attn_res",),
    "flash-attn-res": (
        "flash_attn_res.ops.phase_1",
        "flash_attn_res.ops.phase_2",
        "flash_attn_res.kernels.phase_1",
        "flash_attn_res.kernels.phase_2",
        "flash_attn_res.kernels.reduce",
    ),
    "fast-attnres": ("attnres._kernels.fla_full_sources",),
}


def require_interpreter() -> None:
    """Switch this process to the interpreter and repair it.

    Raises:
        RuntimeError: where triton was imported before, without the interpreter.
    """
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported without the interpreter: set TRITON_INTERPRET=1 before python starts")
    os.environ["TRITON_INTERPRET"] = "1"
    from bench import interpreter

    interpreter.install()


class KernelMode(TorchDispatchMode):
    """Inside, `blockres::` operations run their Triton kernels, whatever device the tensors are on."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        body = _body(func)
        if body is not None:
            with self:
                return body(*args, **(kwargs or {}))
        return self.leaf(func, args, kwargs or {})

    def leaf(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operation that has no body in Python."""
        return func(*args, **kwargs)


def _body(func: Any) -> Callable | None:
    """The Python function behind a custom op; for `blockres::`, the one that launches kernels."""
    namespace, name = func._schema.name.split("::")
    if namespace == "blockres":
        import blockres_kernels

        return getattr(blockres_kernels, name)
    definition = torch._library.custom_ops.OPDEFS.get(f"{namespace}::{name}")
    return None if definition is None else definition._init_fn


def configurations(name: str) -> int:
    """Among how many configurations this implementation's kernels choose at the most."""
    return max((len(kernel.configs) for module in _modules(name) for kernel in _tuned(module)), default=1)


@contextlib.contextmanager
def peer(name: str, configuration: int = 0) -> Iterator[None]:
    """Let the kernels of this implementation take CPU tensors; nothing happens for one without kernels of its own.

    A kernel that chooses between configurations has the one at this place in its list, or the last.
    """
    with contextlib.ExitStack() as stack:
        modules = _modules(name)
        if modules:
            from triton.runtime import interpreter

            stack.enter_context(mock.patch.object(interpreter, "range", _loop_range, create=True))
            stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", property(lambda tensor: True), create=True))
        for module in modules:
            _make_interpretable(module, stack, configuration)
        yield


def _modules(name: str) -> list[ModuleType]:
    return [importlib.import_module(module) for module in PEER_MODULES.get(name, ())]


def _tuned(module: ModuleType) -> list[Any]:
    """The module's kernels that choose between configurations."""
    return [value for value in vars(module).values() if hasattr(value, "configs") and hasattr(value, "fn")]


def _make_interpretable(module: ModuleType, stack: contextlib.ExitStack, configuration: int) -> None:
    stack.enter_context(mock.patch.object(module, "range", _loop_range, create=True))
    for helper, replacement in (("wrap_triton", lambda kernel: kernel), ("_architecture_id", lambda device: 90)):
        if hasattr(module, helper):
            stack.enter_context(mock.patch.object(module, helper, replacement))
    for kernel in _tuned(module):
        stack.enter_context(mock.patch.object(kernel, "configs", kernel.configs[: configuration + 1][-1:]))


class _Index(int):
    """A loop index that, like the tensor that it is on a GPU, can be asked for another dtype, before and after sums."""

    def to(self, dtype: Any) -> "_Index":
        return self

    def __add__(self, other: Any) -> Any:
        return self._keep(int(self).__add__(other))

    def __mul__(self, other: Any) -> Any:
        return self._keep(int(self).__mul__(other))

    def _keep(self, result: Any) -> Any:
        return _Index(result) if type(result) is int else result


def _loop_range(*bounds: Any) -> Iterator[_Index]:
    return map(_Index, range(*(int(bound) for bound in bounds)))
