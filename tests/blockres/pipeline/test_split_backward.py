"""The two halves of a backward pass against the whole one, on graphs whose parameters are read in awkward places."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from blockres.modules import BlockAttnRes
from blockres.pipeline.split_backward import backward_inputs, backward_weights
from tests.support.numerics import relative_error

DIM = 6


class Chain(nn.Module):
    """Two inputs, two outputs; one matrix is read twice, at different depths, and vectors are read everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = (nn.Linear(DIM, DIM) for _ in range(3))
        self.norm = nn.RMSNorm(DIM)
        self.position = nn.Parameter(torch.randn(4, DIM))
        self.unused = nn.Linear(DIM, DIM)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.shared(self.norm(self.first(x)))) + self.position
        return self.last(torch.tanh(self.shared(self.norm(x)))), x * y + self.position


class Residual(nn.Module):
    """A residual stream that starts in the middle of a block: queries are read in both phases."""

    def __init__(self) -> None:
        super().__init__()
        self.residual = BlockAttnRes(DIM, 8, 3, start=1, stop=6)
        self.sublayers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(5))
        self.double()
        for parameter in self.residual.parameters():
            nn.init.normal_(parameter)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        stream = self.residual.stream(sources=[x], partial=y)
        for sublayer in self.sublayers:
            stream.write(torch.tanh(sublayer(stream.read())))
        return stream.state()[0]


def whole(module: nn.Module, inputs: list[Tensor], gradients: list[Tensor]) -> dict[str, Tensor | None]:
    outputs = module(*inputs)
    pairs = [pair for pair in zip(outputs, gradients, strict=False) if pair[0].requires_grad]
    torch.autograd.backward(*zip(*pairs, strict=True))
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("make", [Chain, Residual])
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("frozen", [False, True])
def test_two_halves_make_a_whole(make: Callable[[], nn.Module], wanted: tuple[bool, bool], frozen: bool) -> None:
    module = make()
    if frozen:
        next(module.parameters()).requires_grad_(False)
    data = [torch.randn(4, DIM, dtype=torch.float64) for _ in wanted]
    gradients = [torch.randn(4, DIM, dtype=torch.float64) for _ in range(3)]
    expected_inputs = [x.clone().requires_grad_(flag) for x, flag in zip(data, wanted, strict=True)]
    expected = whole(module, expected_inputs, gradients)
    module.zero_grad()
    for times in (1, 2):
        inputs = [x.clone().requires_grad_(flag) for x, flag in zip(data, wanted, strict=True)]
        outputs = module(*inputs)
        found, deferred = backward_inputs(outputs, gradients[: len(outputs)], inputs, module.parameters())
        assert bool(deferred) == any(wanted)
        for got, want in zip(found, expected_inputs, strict=True):
            assert (got is None) == (want.grad is None)
            assert got is None or relative_error(got, want.grad) < 1e-14
        backward_weights(deferred)
        for name, parameter in module.named_parameters():
            assert (parameter.grad is None) == (expected[name] is None), name
            assert parameter.grad is None or relative_error(parameter.grad, times * expected[name]) < 1e-14, name


def test_matrices_wait_and_nothing_else_does() -> None:
    module = Residual()
    x = torch.randn(4, DIM, dtype=torch.float64, requires_grad=True)
    outputs = module(x, x.detach())
    _, deferred = backward_inputs(outputs, [torch.ones_like(o) for o in outputs], [x], module.parameters())
    waiting = {id(parameter) for group in deferred for parameter in group.parameters}
    assert waiting == {id(sublayer.weight) for sublayer in module.sublayers}
    for name, parameter in module.named_parameters():
        assert (parameter.grad is None) == name.endswith(".weight"), name


def test_no_output_wants_a_gradient() -> None:
    x = torch.randn(2, requires_grad=True)
    assert backward_inputs([], [], [x], []) == ((None,), [])
    assert backward_inputs([torch.ones(2)], [torch.ones(2)], [x], []) == ((None,), [])
    assert backward_inputs([x * 2], [torch.ones(2)], [x.detach()], []) == ((None,), [])


def test_the_second_half_lets_go_of_the_graph() -> None:
    module = Chain()
    x = torch.randn(4, DIM, dtype=torch.float64, requires_grad=True)
    kept = x * 1
    memory = weakref.ref(kept.untyped_storage())
    outputs = module(kept, x)
    del kept
    _, deferred = backward_inputs(outputs, [torch.ones_like(o) for o in outputs], [x], module.parameters())
    del outputs
    assert memory() is not None
    backward_weights(deferred)
    del deferred
    assert memory() is None


def test_hooks_on_tensors_run_once():
    """The weight half starts from gradients that the hooks have seen already."""
    linear = nn.Linear(DIM, DIM).double()
    x, gradient = (torch.randn(4, DIM, dtype=torch.float64) for _ in range(2))
    x.requires_grad_()

    def doubled() -> Tensor:
        y = linear(x)
        y.register_hook(lambda g: 2 * g)
        return torch.tanh(y)

    torch.autograd.backward(doubled(), gradient)
    expected, linear.weight.grad, linear.bias.grad = linear.weight.grad, None, None
    _, deferred = backward_inputs([doubled()], [gradient], [x], linear.parameters())
    backward_weights(deferred)
    torch.testing.assert_close(linear.weight.grad, expected, rtol=1e-12, atol=1e-12)
