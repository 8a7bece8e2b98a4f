"""The kernels of phase 2: values to the project's bounds, traffic to the byte, layouts and determinism."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bench.interpreter import count_traffic
from blockres import reference
from blockres_kernels import merge
from tests.support.layouts import ROW_LAYOUTS
from tests.support.memory import assert_only_read, guarded, poisoned_allocations
from tests.support.numerics import (
    assert_parameter_gradient,
    assert_rounded_once,
    correlated_sources,
    exact_leaves,
    gradients_of,
    relative_error,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
counted = pytest.mark.skipif(torch.cuda.is_available(), reason="bytes are counted by the interpreter")
BOUNDS = {FP64: 1e-12, FP32: 2e-6, BF16: 4e-3, FP16: 4e-3}


@dataclass(frozen=True)
class Merge:
    """One call and the gradients that arrive; `update`, `norm_weight` and `grad_partial` are optional."""

    output: Tensor
    lse: Tensor
    partial: Tensor
    update: Tensor | None
    query: Tensor
    key_weight: Tensor | None
    norm_weight: Tensor | None
    grad_h: Tensor
    grad_partial: Tensor | None
    settings: tuple[float, float, float] = (1e-6, 0.7, 1e-5)

    @property
    def parameters(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.query, self.key_weight, self.norm_weight

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        return merge.attn_res_merge_forward(
            self.output, self.lse, self.partial, self.update, *self.parameters, *self.settings, self.grad_h.dtype
        )

    def backward(self, new_partial: Tensor, stats: Tensor) -> tuple[Tensor, ...]:
        summed = self.partial if self.update is None else new_partial
        gradients = (self.grad_h, self.grad_partial)
        return merge.attn_res_merge_backward(
            *gradients, self.output, self.lse, summed, *self.parameters, stats, *self.settings
        )

    def run(self) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        h, new_partial, stats = self.forward()
        return h, new_partial, self.backward(new_partial, stats)

    def exact(self) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """h, the summed partial and the gradients by autograd through the definition, in float64."""
        summed = self.partial
        if self.update is not None:
            summed = (self.partial.double() + self.update.double()).to(self.partial.dtype)
        output, lse, summed = exact_leaves(self.output, self.lse, summed)
        parameters = query, key_weight, norm_weight = exact_leaves(*self.parameters)
        eps, scale, norm_eps = self.settings
        h, partial = reference.attn_res_merge(
            output, lse, summed, query, key_weight, eps=eps, scale=scale, norm_weight=norm_weight, norm_eps=norm_eps
        )
        total = (h * self.grad_h.cpu().double()).sum()
        if self.grad_partial is not None:
            total = total + (partial * self.grad_partial.cpu().double()).sum()
        total.backward()
        return h.detach(), summed.detach(), gradients_of(output, lse, summed, *parameters)


def random_merge(shape, device, *, stream=FP32, narrow=None, common=1.0, norm=True, update=True, parameter_dtype=FP32):
    """`stream` is the dtype of the partial, `narrow` that of everything that sublayers read and write."""
    narrow = narrow or stream
    dim = shape[-1]
    output, partial = correlated_sources(2, shape, common, device=device)
    return Merge(
        output.to(narrow),
        torch.randn(shape[:-1], dtype=torch.promote_types(stream, FP32), device=device),
        partial.to(stream),
        torch.randn(shape, device=device).to(narrow) if update else None,
        (torch.randn(dim, device=device) * dim**-0.5).to(parameter_dtype),
        (torch.rand(dim, device=device) + 0.5).to(parameter_dtype),
        (torch.rand(dim, device=device) + 0.5).to(parameter_dtype) if norm else None,
        torch.randn(shape, device=device).to(narrow),
        torch.randn(shape, device=device).to(stream) if update else None,
    )


def assert_close(problem: Merge) -> None:
    h, new_partial, gradients = problem.run()
    exact_h, exact_partial, exact = problem.exact()
    if problem.update is not None:
        assert torch.equal(new_partial.cpu().double(), exact_partial)
    if h.dtype in (BF16, FP16):
        assert_rounded_once(h, exact_h)
    else:
        assert relative_error(h.cpu(), exact_h) <= BOUNDS[h.dtype]
    doutput, dlse, dpartial, *dparameters = gradients
    assert relative_error(doutput.cpu(), exact[0]) <= BOUNDS[doutput.dtype]
    assert relative_error(dpartial.cpu(), exact[2]) <= BOUNDS[dpartial.dtype]
    for gradient, right in zip([dlse, *dparameters], [exact[1], *exact[3:]], strict=True):
        assert_parameter_gradient(gradient, right, problem.partial.dtype)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("shape", [(11, 96), (2, 5, 100), (10, 2048)])
def test_values_and_gradients(shape, dtype, update, norm, device):
    assert_close(random_merge(shape, device, stream=dtype, norm=norm, update=update))


@pytest.mark.parametrize("common", [3.0, 10.0])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_what_output_and_partial_have_in_common_costs_no_digits(dtype, common, device):
    assert_close(random_merge((16, 512), device, stream=dtype, common=common))


@pytest.mark.parametrize(("stream", "narrow"), [(FP32, BF16), (BF16, FP32), (FP32, FP16), (FP64, FP64)])
def test_dtypes_are_independent(stream, narrow, device):
    assert_close(random_merge((11, 96), device, stream=stream, narrow=narrow))


@pytest.mark.parametrize("parameter_dtype", [BF16, FP16, FP32, FP64])
def test_parameters_of_any_float_dtype(parameter_dtype, device):
    assert_close(random_merge((11, 96), device, stream=BF16, parameter_dtype=parameter_dtype))


def test_parameters_that_are_columns_of_a_matrix(device):
    problem = random_merge((4, 96), device, stream=BF16)
    columns = torch.stack(problem.parameters, 1).unbind(1)
    strided = dataclasses.replace(problem, **dict(zip(("query", "key_weight", "norm_weight"), columns, strict=True)))
    assert not strided.query.is_contiguous()
    got, want = strided.run(), problem.run()
    for x, y in zip([*got[:2], *got[2]], [*want[:2], *want[2]], strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dim", [7186, 16384])
def test_wide_rows(dim, device):
    assert_close(random_merge((10, dim), device, stream=BF16, narrow=BF16))


@pytest.mark.parametrize("shape", [(0, 96), (2, 0, 96)])
def test_no_tokens(shape, device):
    h, _, (doutput, dlse, dpartial, *dparameters) = random_merge(shape, device).run()
    assert h.shape == doutput.shape == dpartial.shape == shape
    assert dlse.shape == shape[:-1]
    assert not any(gradient.any() for gradient in dparameters)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_rows_of_one_element(dtype, device):
    """Of such signs that what tokens add to the key's one gradient does not cancel."""
    problem = random_merge((20, 1), device, stream=dtype, norm=False)
    positive = {name: getattr(problem, name).abs() for name in ("partial", "update", "grad_h", "grad_partial")}
    assert_close(dataclasses.replace(problem, output=-problem.output.abs(), **positive))


def test_zeros_and_the_largest_halves(device):
    problem = random_merge((4, 96), device, stream=FP16)
    for extreme in (torch.zeros_like, lambda x: (x.sign() * 1e4).to(FP16)):
        rows = {name: extreme(getattr(problem, name)) for name in ("output", "partial", "update")}
        h, new_partial, gradients = dataclasses.replace(problem, **rows).run()
        assert all(x.isfinite().all() for x in (h, new_partial, *gradients))


def test_two_runs_are_bit_identical_and_a_token_stands_alone(device):
    problem = random_merge((7, 96), device, stream=BF16)
    first, second = problem.run(), problem.run()
    for x, y in zip([*first[:2], *first[2]], [*second[:2], *second[2]], strict=True):
        assert torch.equal(x, y)
    names = ("output", "lse", "partial", "update", "grad_h", "grad_partial")
    alone = dataclasses.replace(problem, **{name: getattr(problem, name)[3:4] for name in names}).run()
    for x, y in zip([*alone[:2], *alone[2][:3]], [*first[:2], *first[2][:3]], strict=True):
        assert torch.equal(x, y[3:4])


def test_a_nan_stays_in_its_token(device):
    problem = random_merge((5, 96), device)
    clean = problem.run()
    partial = problem.partial.clone()
    partial[2, 7] = torch.nan
    dirty = dataclasses.replace(problem, partial=partial).run()
    others = [0, 1, 3, 4]
    assert dirty[0][2].isnan().all()
    for x, y in zip([*dirty[:2], *dirty[2][:3]], [*clean[:2], *clean[2][:3]], strict=True):
        assert torch.equal(x[others], y[others])


@pytest.mark.parametrize("shape", [(5, 100), (2, 2048)])
def test_results_are_written_in_full_and_nothing_else_is(shape, device):
    problem = random_merge(shape, device, stream=BF16)
    names = ("output", "partial", "update", "grad_h", "grad_partial")
    blocks = [guarded(getattr(problem, name)) for name in names]
    surrounded = dataclasses.replace(problem, **{n: block.tensor for n, block in zip(names, blocks, strict=True)})
    clean = problem.run()
    with poisoned_allocations() as allocated:
        poisoned = surrounded.run()
    assert len(allocated) > 4
    for x, y in zip([*clean[:2], *clean[2]], [*poisoned[:2], *poisoned[2]], strict=True):
        assert torch.equal(x, y)
    assert_only_read(blocks, [getattr(problem, name) for name in names])


@pytest.mark.parametrize("layout", ROW_LAYOUTS)
def test_rows_of_any_layout(layout, device):
    problem = random_merge((3, 4, 96), device, stream=BF16)
    names = ("output", "partial", "update", "grad_h", "grad_partial")
    strided = dataclasses.replace(problem, **{name: ROW_LAYOUTS[layout](getattr(problem, name)) for name in names})
    compact = dataclasses.replace(strided, **{name: getattr(strided, name).contiguous() for name in names})
    got, want = strided.run(), compact.run()
    for x, y in zip([*got[:2], *got[2]], [*want[:2], *want[2]], strict=True):
        assert torch.equal(x, y)


def test_offsets_beyond_two_to_the_31(device):
    stride = 2**30 + 8
    far = torch.empty(2 * stride + 64, dtype=BF16, device=device).as_strided((3, 64), (stride, 1))
    near = random_merge((3, 64), device, stream=BF16)
    far.copy_(near.partial)
    got, want = dataclasses.replace(near, partial=far).run(), near.run()
    for x, y in zip([*got[:2], *got[2]], [*want[:2], *want[2]], strict=True):
        assert torch.equal(x, y)


@counted
@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dim", [128, 2048])
def test_rows_are_moved_as_often_as_promised(dim, norm, update, device):
    problem = random_merge((3, dim), device, stream=BF16, norm=norm, update=update)
    unit = 3 * dim * 2
    with count_traffic() as forward:
        _, new_partial, stats = problem.forward()
    with count_traffic() as backward:
        problem.backward(new_partial, stats)
    rows = forward.moved("output", "partial", "update", "h", "new_partial").total
    assert rows == (5 if update else 3) * unit
    assert rows + forward.moved("lse", "stats", "query", "key_weight", "norm_weight").total == forward.all.total
    assert len(forward.launches) == 1
    moved = backward.launches[0].arguments
    names = ("grad_h", "grad_partial", "output", "partial", "doutput", "dpartial")
    rows = sum(moved[name].total for name in names if name in moved)
    assert rows == (6 if update else 5) * unit
    assert [launch.kernel for launch in backward.launches] == ["_attn_res_merge_backward", "_parameter_gradients"]
    assert forward.atomic == backward.atomic == 0
