"""The kernels of one aggregation: values to the project's bounds, traffic to the byte, and traps that bit others."""

import dataclasses

import pytest
import torch

from bench.interpreter import count_traffic
from blockres_kernels import launch
from tests.support.aggregation import (
    SOURCE_GRADIENT_BOUNDS,
    Gradients,
    assert_gradients_close,
    random_problem,
)
from tests.support.memory import assert_only_read, guarded, poisoned_allocations
from tests.support.numerics import assert_parameter_gradient, assert_rounded_once, relative_error

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
counted = pytest.mark.skipif(torch.cuda.is_available(), reason="bytes are counted by the interpreter")


def assert_equal(a: Gradients, b: Gradients) -> None:
    for x, y in zip([*a.sources, *a.parameters], [*b.sources, *b.parameters], strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(
    ("count", "shape"), [(1, (7, 96)), (2, (2, 3, 100)), (5, (7, 128)), (9, (2, 768)), (33, (1, 96))]
)
def test_values_and_gradients(count, shape, dtype, norm, device):
    problem = random_problem(count, shape, dtype, norm=norm, extra=count > 1, scale=0.7, device=device)
    out, lse, gradients = problem.run()
    exact_out, exact_lse, exact = problem.exact()
    if dtype == FP32:
        assert relative_error(out.cpu(), exact_out) <= 2e-6
    else:
        assert_rounded_once(out, exact_out)
    assert (lse.cpu() - exact_lse).abs().max() <= 2e-6 * (1 + exact_lse.abs().max())
    assert_gradients_close(gradients, exact, dtype)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_rows_of_one_element(dtype, device):
    """Normalised they are 1 or -1, so gradients that flow through keys cancel nearly, but for those of the scores."""
    problem = random_problem(2, (20, 1), dtype, extra=True, device=device)
    positive = [(0.5 + torch.rand(20, 1, device=device)).to(dtype) for _ in range(2)]
    problem = dataclasses.replace(
        problem, sources=positive, grad_lse=problem.grad_lse.abs(), grad_scores=problem.grad_scores.abs()
    )
    out, _, gradients = problem.run()
    exact_out, _, exact = problem.exact()
    assert relative_error(out.cpu(), exact_out) <= SOURCE_GRADIENT_BOUNDS[dtype]
    assert_gradients_close(gradients, exact, dtype)


@pytest.mark.parametrize("dim", [7186, 8200])
def test_rows_that_are_far_from_a_power_of_two_and_rows_in_slices(dim, device):
    problem = random_problem(2, (8, dim), BF16, norm=True, extra=True, device=device)
    out, _, gradients = problem.run()
    exact_out, _, exact = problem.exact()
    assert_rounded_once(out, exact_out)
    assert_gradients_close(gradients, exact, BF16)


def test_the_widest_rows(device):
    problem = random_problem(3, (5, 16384), FP32, norm=False, device=device)
    assert launch.attn_res_backward(16384, 4, 3, False, 32).slices > 1
    out, _, gradients = problem.run()
    exact_out, _, exact = problem.exact()
    assert relative_error(out.cpu(), exact_out) <= 2e-6
    assert_gradients_close(gradients, exact, FP32)


@pytest.mark.parametrize("norm", [False, True])
def test_float64_is_computed_in_float64(norm, device):
    problem = random_problem(3, (4, 100), FP64, norm=norm, parameter_dtype=FP64, device=device)
    out, lse, gradients = problem.run()
    exact_out, exact_lse, exact = problem.exact()
    assert relative_error(out.cpu(), exact_out) <= 1e-14
    assert relative_error(lse.cpu(), exact_lse) <= 1e-14
    assert_gradients_close(gradients, exact, FP64)


@pytest.mark.parametrize(("count", "norm"), [(4, False), (4, True), (17, False), (17, True)])
@pytest.mark.parametrize(("dtype", "common"), [(FP32, 3.0), (FP32, 10.0), (BF16, 3.0), (BF16, 10.0)])
def test_what_sources_have_in_common_costs_no_digits(common, dtype, norm, count, device):
    held = [launch.attn_res_backward(512, dtype.itemsize, launch.bucket(n), norm, 32).held for n in (4, 17)]
    assert held == [True, False], "both ways to read the sources should be tried"
    problem = random_problem(count, (3, 512), dtype, common=common, norm=norm, device=device)
    assert_gradients_close(problem.run()[2], problem.exact()[2], dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_sources_of_very_different_size(dtype, device):
    problem = random_problem(4, (3, 96), dtype, extra=True, device=device)
    sizes = (1e4, 1e-3, 1.0, 50.0)
    problem = problem.with_sources((size * x) for size, x in zip(sizes, problem.sources, strict=True))
    assert_gradients_close(problem.run()[2], problem.exact()[2], dtype)


def test_sources_that_cancel(device):
    problem = random_problem(2, (8, 96), FP32, extra=True, device=device)
    problem = dataclasses.replace(problem, query=torch.zeros_like(problem.query))
    problem = problem.with_sources([problem.sources[0], -problem.sources[0]])
    out, _, gradients = problem.run()
    assert torch.equal(out, torch.zeros_like(out))
    assert_gradients_close(gradients, problem.exact()[2], FP32)


@pytest.mark.parametrize(("source_dtype", "out_dtype"), [(BF16, FP32), (FP32, BF16), (FP16, BF16), (FP32, FP16)])
def test_output_has_a_dtype_of_its_own(source_dtype, out_dtype, device):
    problem = random_problem(3, (5, 96), source_dtype, norm=True, device=device, out_dtype=out_dtype)
    problem = dataclasses.replace(problem, grad_out=problem.grad_out.to(out_dtype))
    out, _, gradients = problem.run()
    exact_out, _, exact = problem.exact()
    assert out.dtype == out_dtype
    if out_dtype == FP32:
        assert relative_error(out.cpu(), exact_out) <= 2e-6
    else:
        assert_rounded_once(out, exact_out)
    assert_gradients_close(gradients, exact, source_dtype)


@pytest.mark.parametrize("parameter_dtype", [BF16, FP16, FP32, FP64])
def test_parameters_of_any_float_dtype(parameter_dtype, device):
    problem = random_problem(3, (3, 96), BF16, norm=True, parameter_dtype=parameter_dtype, device=device)
    out, _, gradients = problem.run()
    exact_out, _, exact = problem.exact()
    assert_rounded_once(out, exact_out)
    assert all(gradient.dtype == parameter_dtype for gradient in gradients.parameters)
    assert_gradients_close(gradients, exact, BF16)


def test_parameters_that_are_columns_of_a_matrix(device):
    problem = random_problem(3, (3, 96), FP32, norm=True, device=device)
    columns = torch.stack([problem.query, problem.key_weight, problem.norm_weight], 1).unbind(1)
    strided = dataclasses.replace(problem, **dict(zip(("query", "key_weight", "norm_weight"), columns, strict=True)))
    assert not strided.query.is_contiguous()
    assert_equal(strided.run()[2], problem.run()[2])


def test_without_key_weight(device):
    problem = random_problem(3, (3, 96), FP32, key_weight=False, device=device)
    out, _, gradients = problem.run()
    exact_out, _, exact = problem.exact()
    assert relative_error(out.cpu(), exact_out) <= 2e-6
    assert_gradients_close(gradients, exact, FP32)


@pytest.mark.parametrize(("count", "dim", "launches"), [(33, 96, 2), (65, 32, 3), (1025, 8, 33)])
def test_no_number_of_sources_is_too_large(count, dim, launches, device):
    assert len(launch.groups(count)) == launches
    problem = random_problem(count, (1 if count > 100 else 2, dim), FP32, norm=True, extra=count < 100, device=device)
    out, lse, gradients = problem.run()
    exact_out, exact_lse, exact = problem.exact()
    assert relative_error(out.cpu(), exact_out) <= 2e-6
    assert relative_error(lse.cpu(), exact_lse) <= 2e-6
    assert relative_error(torch.stack(gradients.sources).cpu(), torch.stack(exact.sources)) <= 2e-6
    for gradient, right in zip(gradients.parameters, exact.parameters, strict=True):
        assert_parameter_gradient(gradient, right, FP32)


@pytest.mark.parametrize("count", [1, 2, 33])
def test_no_tokens(count, device):
    problem = random_problem(count, (2, 0, 96), BF16, norm=True, extra=True, device=device)
    out, lse, gradients = problem.run()
    assert out.shape == (2, 0, 96)
    assert lse.shape == (2, 0)
    assert [x.shape for x in gradients.sources] == [(2, 0, 96)] * count
    assert all(torch.equal(gradient.cpu(), torch.zeros(96)) for gradient in gradients.parameters)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("norm", [False, True])
def test_one_source_gives_itself_and_no_query_gradient(dtype, norm, device):
    problem = random_problem(1, (5, 100), dtype, norm=norm, device=device)
    out, _, gradients = problem.run()
    if not norm:
        assert torch.equal(out, problem.sources[0])
        assert torch.equal(gradients.sources[0], problem.grad_out)
    assert torch.equal(gradients.query.cpu(), torch.zeros(100))
    assert torch.equal(gradients.key_weight.cpu(), torch.zeros(100))


def test_sources_of_zeros_and_of_the_largest_halves(device):
    problem = random_problem(3, (4, 96), FP16, norm=True, device=device)
    zeros = problem.with_sources(torch.zeros_like(x) for x in problem.sources)
    large = problem.with_sources((x.sign() * 1e4).to(FP16) for x in problem.sources)
    for extreme in (zeros, large):
        out, _, gradients = extreme.run()
        exact_out, _, exact = extreme.exact()
        assert relative_error(out.cpu(), exact_out) <= 1e-3
        assert all(x.isfinite().all() for x in gradients.sources)
        assert_parameter_gradient(gradients.query, exact.query, FP16)


def test_a_nan_stays_in_its_token(device):
    problem = random_problem(3, (5, 96), BF16, norm=True, device=device)
    clean_out, clean_lse, clean = problem.run()
    sources = [x.clone() for x in problem.sources]
    sources[1][2, 7] = torch.nan
    out, lse, gradients = problem.with_sources(sources).run()
    others = [0, 1, 3, 4]
    assert out[2].isnan().all()
    assert torch.equal(out[others], clean_out[others])
    assert torch.equal(lse[others], clean_lse[others])
    for gradient, right in zip(gradients.sources, clean.sources, strict=True):
        assert torch.equal(gradient[others], right[others])


@pytest.mark.parametrize("count", [5, 17])
def test_a_token_does_not_depend_on_the_others(count, device):
    problem = random_problem(count, (7, 96), BF16, norm=True, extra=True, device=device)
    out, lse, gradients = problem.run()
    alone = dataclasses.replace(
        problem,
        sources=[x[3:4] for x in problem.sources],
        grad_out=problem.grad_out[3:4],
        grad_lse=problem.grad_lse[3:4],
        grad_scores=problem.grad_scores[:, 3:4],
    )
    alone_out, alone_lse, alone_gradients = alone.run()
    assert torch.equal(alone_out, out[3:4])
    assert torch.equal(alone_lse, lse[3:4])
    for gradient, all_tokens in zip(alone_gradients.sources, gradients.sources, strict=True):
        assert torch.equal(gradient, all_tokens[3:4])


@pytest.mark.parametrize("count", [5, 17, 33])
def test_two_runs_are_bit_identical(count, device):
    problem = random_problem(count, (3, 128), BF16, norm=True, device=device)
    first_out, _, first = problem.run()
    second_out, _, second = problem.run()
    assert torch.equal(first_out, second_out)
    assert_equal(first, second)


@pytest.mark.parametrize(("count", "shape"), [(3, (5, 100)), (17, (2, 96)), (34, (2, 32)), (2, (1, 8200))])
def test_outputs_are_written_in_full_and_nothing_else_is(count, shape, device):
    problem = random_problem(count, shape, BF16, norm=True, device=device)
    out, lse, gradients = problem.run()
    blocks = [guarded(x) for x in problem.sources]
    surrounded = problem.with_sources(block.tensor for block in blocks)
    with poisoned_allocations() as allocated:
        poisoned_out, poisoned_lse, poisoned_gradients = surrounded.run()
    assert len(allocated) > 4
    assert torch.equal(out, poisoned_out)
    assert torch.equal(lse, poisoned_lse)
    assert_equal(gradients, poisoned_gradients)
    assert_only_read(blocks, problem.sources)


def _padded(x):
    return torch.nn.functional.pad(x, (0, 13))[..., :-13]


LAYOUTS = {
    "stacked": lambda x: torch.stack([x, x + 1, x * 2]).unbind(0),
    "bank": lambda x: torch.stack([x, x + 1, x * 2], dim=2).unbind(2),
    "padded rows": lambda x: [_padded(x), x + 1, _padded(x * 2)],
    "every other row": lambda x: [x.repeat_interleave(2, 1)[:, ::2], x + 1, x * 2],
    "transposed": lambda x: [x.transpose(0, 1).contiguous().transpose(0, 1), x + 1, _padded(x)],
    "part of a longer sequence": lambda x: [torch.cat([x, x], 1)[:, 3:-1], torch.cat([x + 1, x], 1)[:, 2:-2], x],
    "one token for all": lambda x: [x[:1, :1].expand_as(x), x + 1, x[:1].expand_as(x)],
    "overlapping rows": lambda x: [x, x.flatten()[: 64 + 100 * 11].unfold(0, 100, 8)[:12].view(3, 4, 100), x * 2],
    "one storage twice": lambda x: [x, x, x * 2],
    "unaligned": lambda x: [torch.cat([x.flatten(), x.flatten()[:1]])[1:].view_as(x), x + 1, x * 2],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_read_where_they_lie(name, device):
    x = torch.randn(3, 4, 100, device=device).to(BF16)
    sources = list(LAYOUTS[name](x))
    problem = random_problem(3, (3, 4, 100), BF16, norm=True, device=device).with_sources(sources)
    compact = problem.with_sources(s.contiguous() for s in sources)
    out, lse, gradients = problem.run()
    compact_out, compact_lse, compact_gradients = compact.run()
    assert torch.equal(out, compact_out)
    assert torch.equal(lse, compact_lse)
    assert_equal(gradients, compact_gradients)


@pytest.mark.parametrize("count", [2, 17])
def test_offsets_beyond_two_to_the_31(count, device):
    stride = 2**30 + 8  # 4 GiB of address space, of which a few pages are touched
    far = torch.empty(2 * stride + 64, dtype=BF16, device=device).as_strided((3, 64), (stride, 1))
    near = random_problem(count, (3, 64), BF16, device=device)
    far.copy_(near.sources[0])
    problem = near.with_sources([far, *near.sources[1:]])
    out, _, gradients = problem.run()
    near_out, _, near_gradients = near.run()
    assert torch.equal(out, near_out)
    assert_equal(gradients, near_gradients)


def test_rows_that_do_not_reduce_to_two_strides_are_refused(device):
    problem = random_problem(2, (2, 3, 4, 8), FP32, device=device)
    x = torch.randn(2, 5, 3, 6, 4, 8, device=device)[:, 1, :, 2]
    with pytest.raises(ValueError, match=r"two strides.*\(2, 3, 4, 8\)"):
        problem.with_sources([x[:, :, ::1].transpose(0, 2).contiguous().transpose(0, 2), x[:, :, :]]).forward()
    with pytest.raises(ValueError, match="last dimension must be contiguous"):
        problem.with_sources([torch.randn(2, 3, 8, 4, device=device).transpose(2, 3)] * 2).forward()


@pytest.mark.parametrize(
    "change",
    [
        lambda g: torch.ones((), dtype=g.dtype, device=g.device).expand_as(g),
        lambda g: g.transpose(0, 1).contiguous().transpose(0, 1),
        lambda g: g[:1].expand_as(g),
        _padded,
        lambda g: g.transpose(1, 2).contiguous().transpose(1, 2),
    ],
)
def test_upstream_gradients_of_any_layout(change, device):
    problem = random_problem(3, (3, 4, 96), BF16, norm=True, device=device)
    problem = dataclasses.replace(problem, grad_out=change(problem.grad_out))
    compact = dataclasses.replace(problem, grad_out=problem.grad_out.contiguous())
    assert_equal(problem.run()[2], compact.run()[2])


def test_expanded_gradients_of_lse_and_scores(device):
    problem = random_problem(3, (2, 3, 96), FP32, extra=True, device=device)
    problem = dataclasses.replace(
        problem,
        grad_lse=problem.grad_lse[:1, :1].expand(2, 3),
        grad_scores=problem.grad_scores.transpose(1, 2).contiguous().transpose(1, 2),
    )
    assert_gradients_close(problem.run()[2], problem.exact()[2], FP32)


@counted
@pytest.mark.parametrize("count", [3, 17])
@pytest.mark.parametrize("wanted", [0, 2, None])
def test_a_source_that_needs_no_gradient_is_not_written(count, wanted, device):
    needs_grad = [j == wanted for j in range(count)]
    problem = random_problem(count, (3, 96), BF16, device=device)
    _, *statistics = problem.forward()
    everything = problem.backward(statistics)
    with count_traffic() as traffic:
        gradients = problem.backward(statistics, needs_grad)
    assert torch.equal(gradients.query, everything.query)
    for j, gradient in enumerate(gradients.sources):
        assert torch.equal(gradient, everything.sources[j]) if needs_grad[j] else gradient.shape == (0,)
    assert traffic.moved("grad_sources").write == sum(needs_grad) * 3 * 96 * 2


SUMS = ("key_rows", "norm_rows", "dquery", "dkey_weight", "dnorm_weight")
APART = ("statistics", "tables", "scratch", "query", "key_weight", "norm_weight", *SUMS)


def _assert_rows_moved(traffic, units, unit, problem):
    """Rows move exactly so many units; what else moves are statistics, parameters, tables and sums of parameters."""
    rows = traffic.moved("sources", "out", "grad_out", "grad_sources")
    assert rows.total == units * unit
    assert rows.total + traffic.moved(*APART).total == traffic.all.total
    assert traffic.moved("statistics").total <= 4 * problem.grad_out.shape[0] * (5 * len(problem.sources) + 2)
    assert traffic.atomic == 0


@counted
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("dim", [128, 2048])
@pytest.mark.parametrize("count", [1, 2, 9, 17])
def test_rows_are_moved_as_often_as_promised(count, dim, dtype, norm, device):
    problem = random_problem(count, (2, dim), dtype, norm=norm, device=device)
    unit = problem.grad_out.numel() * dtype.itemsize
    with count_traffic() as forward:
        _, *statistics = problem.forward()
    _assert_rows_moved(forward, count + 1, unit, problem)
    with count_traffic() as backward:
        problem.backward(statistics)
    held = launch.attn_res_backward(dim, dtype.itemsize, launch.bucket(count), norm, 32).held
    _assert_rows_moved(backward, (2 if held else 3) * count + 1, unit, problem)
    assert held == (count <= 9)
    assert [x.kernel for x in forward.launches] == ["_attn_res_forward"]
    assert len(backward.launches) == 2


@counted
def test_launches_follow_the_sources_and_there_is_one_for_all_parameters():
    for count, tokens, launches in [(5, 2, 1 + 1), (33, 2, 2 + 2 + 2), (5, 0, 0)]:
        problem = random_problem(count, (tokens, 32), FP32)
        with count_traffic() as traffic:
            problem.run()
        assert [x.kernel for x in traffic.launches].index("_parameter_gradients") == launches
        assert len(traffic.launches) == launches + 1
