"""Which memory is alive, by weak references to storages: counted, not trusted."""

import weakref
from collections.abc import Callable

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """While it is entered, the storage of every tensor that an operation returns and `of` picks is remembered, weakly.

    `peak` is the most that were alive at once after an operation.
    """

    def __init__(self, of: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._picks = of
        self._known: dict[int, weakref.ref] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and self._picks(tensor):
                storage = tensor.untyped_storage()
                self._known[storage._cdata] = weakref.ref(storage)
        self.peak = max(self.peak, self.count())
        return result

    def count(self) -> int:
        """How many of the storages are alive now."""
        self._known = {address: found for address, found in self._known.items() if found() is not None}
        return len(self._known)


def memory_of(tensor: Tensor) -> weakref.ref:
    """Dead once nothing holds the tensor's memory any more."""
    return weakref.ref(tensor.untyped_storage())


def of_size(nbytes: int) -> Callable[[Tensor], bool]:
    """For `LiveStorages`: those of so many bytes."""
    return lambda tensor: tensor.untyped_storage().nbytes() == nbytes
