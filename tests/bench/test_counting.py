"""The ledger against counts made by hand."""

import pytest
import torch
import triton
import triton.language as tl
from torch import nn

from bench.counting import Ledger, next_prime
from bench.interpreter import install

TOKENS, DIM = 7, 16
BF16 = torch.bfloat16

install()


@pytest.fixture
def ledger():
    return Ledger(TOKENS, DIM)


def rows(dtype=BF16):
    return torch.randn(TOKENS, DIM).to(dtype)


@pytest.mark.parametrize(
    ("operation", "units"),
    [
        (lambda x, y: x + y, 3),
        (lambda x, y: x.add_(y), 3),
        (lambda x, y: x.copy_(y), 2),
        (lambda x, y: x.zero_(), 1),
        (lambda x, y: torch.zeros_like(x), 1),
        (lambda x, y: torch.empty_like(x), 0),
        (lambda x, y: x.view(-1).detach(), 0),
        (lambda x, y: torch.stack([x, y]), 4),
        (lambda x, y: x.float(), 3),
        (lambda x, y: x[:1].expand(TOKENS, DIM) + y, 2 + 1 / TOKENS),
        (lambda x, y: torch.add(x, y, out=torch.empty_like(x)), 3),
    ],
)
def test_an_operation_reads_its_arguments_and_writes_its_results_once(ledger, operation, units):
    x, y = rows(), rows()
    with ledger.phase("forward"):
        operation(x, y)
    assert sum(ledger.units(kind, BF16) for kind in ("rows", "parameters")) == pytest.approx(units)


def test_statistics_and_parameters_are_kept_apart(ledger):
    x, weight = rows(torch.float32), torch.ones(DIM)
    with ledger.phase("forward"):
        (x * weight).sum(-1)
    row = TOKENS * DIM
    assert ledger.units("rows", torch.float32) == 3
    assert ledger.units("statistics", torch.float32) == pytest.approx(TOKENS / row)
    assert ledger.units("parameters", torch.float32) == pytest.approx(DIM / row)


def test_autograd_s_accumulation_is_counted_where_it_happens(ledger):
    x, gradient = rows().requires_grad_(), rows()
    with ledger.phase("forward"):
        out = ledger.sublayer(x) + ledger.sublayer(x)
    with ledger.phase("backward"):
        torch.autograd.grad(out, x, gradient)
    assert ledger.parts(BF16) == {("forward", "add"): 3, ("backward", "add"): 3}


def test_the_norm_of_the_baselines_is_one_kernel_each_way_and_right(ledger):
    x, update, weight = rows(torch.float32).requires_grad_(), rows(torch.float32), nn.Parameter(torch.rand(DIM))
    gradients = [rows(torch.float32), rows(torch.float32)]
    with ledger.phase("forward"):
        total, out = ledger.add_rms_norm(x, update, weight)
    with ledger.phase("backward"):
        found = torch.autograd.grad([total, out], [x, weight], gradients)
    assert [ledger.units("rows", torch.float32, phase) for phase in ("forward", "backward")] == [4, 4]
    with ledger.phase("forward"):
        ledger.rms_norm(x, weight)
    assert ledger.units("rows", torch.float32, "forward") == 4 + 2
    wanted_total = x + update
    wanted_out = nn.functional.rms_norm(wanted_total, (DIM,), weight, 1e-6)
    torch.testing.assert_close(out, wanted_out)
    torch.testing.assert_close(found, torch.autograd.grad([wanted_total, wanted_out], [x, weight], gradients))


def test_the_gradient_of_the_norm_is_right(ledger):
    x, weight, g = rows(torch.float32).requires_grad_(), nn.Parameter(torch.rand(DIM)), rows(torch.float32)
    with ledger.phase("forward"):
        out = ledger.rms_norm(x, weight)
    found = torch.autograd.grad(out, [x, weight], g)
    wanted = torch.autograd.grad(nn.functional.rms_norm(x, (DIM,), weight, 1e-6), [x, weight], g)
    torch.testing.assert_close(found, wanted)


def test_what_is_kept_is_what_is_alive(ledger):
    x = rows().requires_grad_()
    with ledger.phase("forward"):
        out = (x * 2).exp() * 3
    assert ledger.kept(BF16) == 2, "exp keeps its result, the last product its own"
    del out
    assert ledger.kept(BF16) == 0


@triton.jit
def _double(source, target, DIM: tl.constexpr):
    lanes = tl.program_id(0) * DIM + tl.arange(0, DIM)
    tl.store(target + lanes, tl.load(source + lanes) * 2)


def test_a_kernel_is_counted_by_what_its_lanes_move_and_nothing_around_it(ledger):
    source, target = rows(torch.float32), torch.empty(TOKENS, DIM)
    with ledger.phase("forward"):
        _double[(TOKENS,)](source, target, DIM=DIM)
    torch.testing.assert_close(target, 2 * source)
    assert ledger.parts(torch.float32) == {("forward", "_double"): 2}
    assert ledger.launches("forward") == (1, 0)


def test_the_number_of_tokens_is_a_prime_that_no_other_size_is_a_multiple_of():
    assert next_prime(11) == 11
    assert next_prime(8, 22, 16) == 13
