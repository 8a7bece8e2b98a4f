"""A backward pass in two halves: the gradients of inputs now, those of weight matrices when the schedule has time.

Zero-bubble schedules send the input gradients on before they turn to the weights. Only a matrix multiplication's weight
is worth the wait: its gradient is a product of its own. So a parameter is deferred where it is a matrix (or more) that
joins the paths from the inputs at exactly one autograd node; the rest comes out of the first half, where the node that
gives it runs in any case. A query of the residual stream is read in both of its phases, for one, and its gradient falls
off while those of the sources are computed.

PyTorch's own halves group parameters that share nodes and run each group's part of the graph by itself; where a
parameter is read twice, one group's part contains another's, and the second run finds the graph freed.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass
class Deferred:
    """Parameters whose gradients are still to come: from one node, given the gradients that reached it."""

    node: Node
    parameters: list[Tensor]
    gradients: Sequence[Tensor | None] = ()


def backward_inputs(
    outputs: Sequence[Tensor],
    output_gradients: Sequence[Tensor | None] | None,
    inputs: Sequence[Tensor],
    parameters: Iterable[Tensor],
) -> tuple[tuple[Tensor | None, ...], list[Deferred]]:
    """The first half.

    Args:
        outputs: those that want no gradient are passed over.
        output_gradients: None for scalars whose gradient is 1.
        inputs: leaves.
        parameters: of the module in between; gradients that are not deferred are added to their `.grad`.

    Returns:
        One gradient or None per input, and what `backward_weights` needs.
    """
    given = output_gradients if output_gradients is not None else [torch.ones_like(output) for output in outputs]
    pairs = [(output, gradient) for output, gradient in zip(outputs, given, strict=True) if output.requires_grad]
    if not pairs:
        return (None,) * len(inputs), []
    deferred, immediate = _sort_parameters([output for output, _ in pairs], inputs, parameters)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    with _Capture(deferred):
        found = _gradients(pairs, [*wanted, *immediate])
    _add_to(immediate, found[len(wanted) :])
    by_input = dict(zip(map(id, wanted), found, strict=False))
    return tuple(by_input.get(id(tensor)) for tensor in inputs), deferred


def backward_weights(deferred: Sequence[Deferred]) -> None:
    """The second half: adds to the `.grad` of the parameters that the first one deferred. Frees the graph."""
    for group in deferred:
        edges = [
            (GradientEdge(group.node, index), gradient)
            for index, gradient in enumerate(group.gradients)
            if gradient is not None
        ]
        if edges:
            roots, gradients = zip(*edges, strict=True)
            # What was captured has been through the hooks of the node's tensors, which run here once more.
            again = group.node.register_prehook(lambda _, captured=group.gradients: tuple(captured))
            try:
                found = torch.autograd.grad(roots, group.parameters, gradients, allow_unused=True)
            finally:
                again.remove()
            _add_to(group.parameters, found)


def _gradients(pairs: Sequence[tuple[Tensor, Tensor | None]], wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
    roots, gradients = zip(*pairs, strict=True)
    return () if not wanted else torch.autograd.grad(roots, wanted, gradients, retain_graph=True, allow_unused=True)


def _sort_parameters(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], parameters: Iterable[Tensor]
) -> tuple[list[Deferred], list[Tensor]]:
    readers = _readers([get_gradient_edge(output).node for output in outputs])
    on_paths = _above([get_gradient_edge(tensor).node for tensor in inputs if tensor.requires_grad], readers)
    by_node: dict[Node, list[Tensor]] = defaultdict(list)
    immediate = []
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        joins = _first_in(on_paths, get_gradient_edge(parameter).node, readers)
        if parameter.ndim >= 2 and len(joins) == 1:
            by_node[joins.pop()].append(parameter)
        else:
            immediate.append(parameter)
    return [Deferred(node, found) for node, found in by_node.items()], immediate


def _readers(roots: Iterable[Node]) -> dict[Node, set[Node]]:
    """For each node of the graph under some roots, the nodes that it gets gradients from."""
    readers: dict[Node, set[Node]] = {}
    pending = list(roots)
    for root in pending:
        readers.setdefault(root, set())
    while pending:
        node = pending.pop()
        for below, _ in node.next_functions:
            if below is None:
                continue
            if below not in readers:
                readers[below] = set()
                pending.append(below)
            readers[below].add(node)
    return readers


def _above(nodes: Iterable[Node], readers: dict[Node, set[Node]]) -> set[Node]:
    """All nodes on paths from the roots to some nodes, these included."""
    found: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(readers.get(node, ()))
    return found


def _first_in(targets: set[Node], start: Node, readers: dict[Node, set[Node]]) -> set[Node]:
    """The first of some target nodes on each way up from a node."""
    found: set[Node] = set()
    passed = {start}
    pending = [start]
    while pending:
        for above in readers.get(pending.pop(), ()):
            if above in targets:
                found.add(above)
            elif above not in passed:
                passed.add(above)
                pending.append(above)
    return found


class _Capture:
    """While it lasts, what reaches the nodes of some groups is kept for the second half."""

    def __init__(self, groups: Sequence[Deferred]) -> None:
        self._groups = groups
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for group in self._groups:
            self._handles.append(group.node.register_prehook(self._hook(group)))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    @staticmethod
    def _hook(group: Deferred) -> Any:
        def keep(gradients: tuple[Tensor | None, ...]) -> None:
            group.gradients = gradients

        return keep


def _add_to(parameters: Sequence[Tensor], gradients: Iterable[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is None:
            # Copied since autograd may have handed this tensor out twice, and its strides may not be the parameter's.
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        else:
            parameter.grad += gradient
