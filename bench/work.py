"""What is timed: an operation or a whole stack, forward or backward, by one implementation."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from bench.cases import (
    OPERATIONS,
    Shape,
    Verdict,
    leaves,
    make_inputs,
    relative_error,
    upstream,
    verify,
)
from bench.implementations import Implementation, eager, rms_norm
from bench.streams import Parameters, StackShape, open_stream, run
from bench.timing import Work


def operation_work(
    name: str, implementation: Implementation, direction: str, shape: Shape, dtype: torch.dtype, device: str
) -> Callable[[int], Work]:
    """For a seed: the forward, as training runs it, or the backward after an untimed forward."""
    operation, function = OPERATIONS[name], implementation.operation(name)
    assert function is not None

    def make(seed: int) -> Work:
        inputs = make_inputs(operation, shape, dtype, device, seed)
        if direction == "forward":
            return Work(lambda _: function(**inputs))
        outputs = function(**inputs)
        gradients = [g.to(out.dtype) for g, out in zip(upstream(outputs, shape, dtype), outputs, strict=True)]
        del outputs
        return Work(lambda outputs: torch.autograd.grad(outputs, leaves(inputs), gradients), lambda: function(**inputs))

    return make


@functools.lru_cache(maxsize=64)
def verify_operation(
    name: str, implementation: Implementation, shape: Shape, dtype: torch.dtype, device: str
) -> Verdict:
    function = implementation.operation(name)
    assert function is not None
    return verify(OPERATIONS[name], function, shape, dtype, device)


class _Preset(torch.autograd.Function):
    """A sublayer that takes no time: forward and backward hand out tensors that are there already."""

    @staticmethod
    def forward(ctx, x: Tensor, update: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return update.detach()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient.detach(), None, None


class PresetSublayers:
    """Stand-ins for all sublayers of a stack: several tensors in turn, so that they do not stay in a cache."""

    def __init__(self, shape: StackShape, dtype: torch.dtype, device: str, different: int = 8) -> None:
        size = (shape.tokens, shape.dim)
        self._tensors = [torch.randn(size, device=device).to(dtype) for _ in range(2 * different)]
        self._calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self._calls += 1
        i = self._calls % (len(self._tensors) // 2)
        return _Preset.apply(x, self._tensors[2 * i], self._tensors[2 * i + 1])


def stack_work(
    implementation: Implementation | str,
    direction: str,
    shape: StackShape,
    dtype: torch.dtype,
    device: str,
    *,
    recompute: bool = False,
) -> Callable[[int], Work]:
    """A whole stack between free sublayers; the seed is not used: a stack is larger than any cache."""

    def make(_: int) -> Work:
        parameters = Parameters(shape, dtype, device)
        embedding = torch.randn(shape.tokens, shape.dim, device=device).to(dtype).requires_grad_()
        gradient = torch.randn(shape.tokens, shape.dim, device=device).to(dtype)
        sublayers = PresetSublayers(shape, dtype, device)
        used = [embedding, *parameters.used_by(implementation)]

        def forward(_: object = None) -> Tensor:
            stream = open_stream(implementation, parameters, embedding, shape.per_block, recompute=recompute)
            return run(stream, parameters, sublayers)

        if direction == "forward":
            return Work(forward)
        return Work(lambda out: torch.autograd.grad(out, used, gradient), forward)

    return make


def stack_floor(shape: StackShape, direction: str) -> int:
    """Row sets that the two-phase design moves: phase 1 once per block, phase 2 once per sublayer, one last
    aggregation.

    With k sources at the opening of a block: phase 1 k + S forward and 3 k + S backward (it adds into gradients that
    exist), phase 2 5 and 6.
    """
    blocks = range(0, shape.sublayers, shape.per_block)
    opening = sum(1 + start // shape.per_block for start in blocks)
    last = 1 + len(blocks)
    if direction == "forward":
        return opening + 6 * shape.sublayers + last + 1
    return 3 * opening + 7 * shape.sublayers + 3 * last + 1


def standard_floor(shape: StackShape, direction: str) -> int:
    """Row sets that the standard residual moves where the add and the norm are one kernel."""
    return 4 * shape.sublayers


@functools.lru_cache(maxsize=64)
def verify_stack(
    implementation: Implementation | str, shape: StackShape, dtype: torch.dtype, device: str, *, recompute: bool = False
) -> dict[str, float]:
    """Relative errors of the output and of the gradients, parameters of one kind together, against float64.

    Sublayers are linear stand-ins here.
    """

    def outcome(
        who: Implementation | str, parameters: Parameters, embedding: Tensor, gradient: Tensor
    ) -> dict[str, Tensor]:
        fewer_saved = recompute and who is implementation
        stream = open_stream(who, parameters, embedding, shape.per_block, rms_norm, recompute=fewer_saved)
        out = run(stream, parameters, lambda x: 0.5 * x.flip(-1))
        kinds = {"embedding": [embedding]} | parameters.by_kind(norms_only=who == "standard")
        gradients = iter(torch.autograd.grad(out, [x for kind in kinds.values() for x in kind], gradient))
        return {"output": out.detach()} | {
            f"gradient of {name}": torch.stack([next(gradients) for _ in kind]) for name, kind in kinds.items()
        }

    parameters = Parameters(shape, dtype, device)
    embedding = torch.randn(shape.tokens, shape.dim, device=device).to(dtype).requires_grad_()
    gradient = torch.randn(shape.tokens, shape.dim, device=device).to(dtype)
    found = outcome(implementation, parameters, embedding, gradient)
    reference = "standard" if implementation == "standard" else eager()
    wide = embedding.detach().double().requires_grad_()
    wanted = outcome(reference, parameters.to(torch.float64), wide, gradient.double())
    return {name: relative_error(found[name], wanted[name]) for name in found}


def wrong_stack(errors: dict[str, float], dtype: torch.dtype) -> str | None:
    """What is wrong, in words; None where nothing is. Roundings to the storage dtype add up over the sublayers."""
    allowed = {torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}[dtype]
    found = [
        f"{name} off by {error:.1e}, allowed {allowed:.0e}" for name, error in errors.items() if not error <= allowed
    ]
    return "; ".join(found) or None
