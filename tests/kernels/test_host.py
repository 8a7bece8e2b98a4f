"""What happens around a launch on the host: memory is allocated, and nothing else is waited for or copied."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from bench.launches import OPERATIONS, Shape

FREE = {
    "empty",
    "new_empty",
    "empty_like",
    "detach",
    "alias",
    "view",
    "slice",
    "split_with_sizes",
    "select",
    "unbind",
    "expand",
    "promote_types",
}
PARAMETERS = {"mul", "_to_copy"}  # phase 1 multiplies its queries by their key weights, [S, D]


class Called(TorchDispatchMode):
    """The names of PyTorch's operations, with the size of the largest tensor that each returned."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.largest[name] = max(self.largest[name], *sizes, 0)
        return result


@pytest.mark.parametrize("queries", [2, 32])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_only_allocates_and_launches(operation, queries, monkeypatch):
    """`lift_fresh` or `copy_` would be numbers made on the host, on their way to the device at every launch."""
    for kind in (InterpretedFunction, JITFunction):
        monkeypatch.setattr(kind, "run", lambda *args, **kwargs: None)
    shape = Shape(32, 3, queries=queries, tokens=5)
    with Called() as called:
        OPERATIONS[operation](shape)
    others = {name: size for name, size in called.largest.items() if name not in FREE}
    assert set(others) <= PARAMETERS
    assert all(size <= queries * 32 for size in others.values())
