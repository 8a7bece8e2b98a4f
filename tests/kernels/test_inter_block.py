"""The kernels of phase 1: values to the project's bounds, traffic to the byte, layouts and determinism."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bench.interpreter import count_traffic
from blockres import reference
from blockres_kernels import attn_res_inter_backward, attn_res_inter_forward, launch
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
class Phase1:
    """One call and the gradients that arrive: S of the outputs, of lse, and those that sources have already."""

    sources: list[Tensor]
    queries: Tensor
    key_weights: Tensor | None
    norm_weight: Tensor | None
    grad_outputs: list[Tensor]
    grad_lse: Tensor | None
    existing: list[Tensor | None]
    settings: tuple[float, float, float] = (1e-6, 0.7, 1e-5)

    @property
    def parameters(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.queries, self.key_weights, self.norm_weight

    def forward(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtype = self.grad_outputs[0].dtype
        return attn_res_inter_forward(self.sources, *self.parameters, *self.settings, dtype)

    def backward(self, statistics, needs_grad=None) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        return attn_res_inter_backward(
            self.grad_outputs,
            self.grad_lse,
            self.sources,
            *self.parameters,
            *statistics,
            *self.settings,
            needs_grad or [True] * len(self.sources),
            self.existing,
        )

    def run(self) -> list[Tensor]:
        """Outputs, lse, gradients of queries, key weights and norm weight, gradients of the sources."""
        outputs, lse, scores, rstd = self.forward()
        dsources, *dparameters = self.backward((lse, scores, rstd))
        return [outputs, lse, *dparameters, *dsources]

    def exact(self) -> list[Tensor]:
        """The same by autograd through the definition, in float64."""
        sources, parameters = exact_leaves(*self.sources), exact_leaves(*self.parameters)
        eps, scale, norm_eps = self.settings
        outputs, lse = reference.attn_res_inter(
            sources, *parameters[:2], eps=eps, scale=scale, norm_weight=parameters[2], norm_eps=norm_eps
        )
        total = sum((o * g.cpu().double()).sum() for o, g in zip(outputs, self.grad_outputs, strict=True))
        if self.grad_lse is not None:
            total = total + (lse * self.grad_lse.cpu().double()).sum()
        total.backward()
        pairs = zip(gradients_of(*sources), self.existing, strict=True)
        dsources = [d if e is None else d + e.cpu().double() for d, e in pairs]
        return [outputs.detach(), lse.detach(), *gradients_of(*parameters), *dsources]


def random_phase1(
    sources, queries, shape, device, *, dtype=FP32, common=1.0, norm=True, grad_lse=True, existing=True,
    parameter_dtype=FP32, out_dtype=None,
):  # fmt: skip
    dim = shape[-1]
    return Phase1(
        correlated_sources(sources, shape, common, dtype, device),
        (torch.randn(queries, dim, device=device) * dim**-0.5).to(parameter_dtype),
        (torch.rand(queries, dim, device=device) + 0.5).to(parameter_dtype),
        (torch.rand(dim, device=device) + 0.5).to(parameter_dtype) if norm else None,
        [torch.randn(shape, device=device).to(out_dtype or dtype) for _ in range(queries)],
        torch.randn(queries, *shape[:-1], dtype=torch.promote_types(dtype, FP32), device=device) if grad_lse else None,
        [torch.randn(shape, device=device).to(dtype) if existing and j % 2 == 0 else None for j in range(sources)],
    )


def assert_close(problem: Phase1) -> None:
    (outputs, lse, *gradients), exact = problem.run(), problem.exact()
    if outputs.dtype in (BF16, FP16):
        assert_rounded_once(outputs, exact[0])
    else:
        assert relative_error(outputs.cpu(), exact[0]) <= BOUNDS[outputs.dtype]
    rows = problem.sources[0].dtype
    for gradient, right in zip([lse, *gradients[:3]], exact[1:5], strict=True):
        assert_parameter_gradient(gradient, right, rows)
    for j, (gradient, right) in enumerate(zip(gradients[3:], exact[5:], strict=True)):
        assert relative_error(gradient.cpu(), right) <= BOUNDS[gradient.dtype], f"source {j}"


def is_whole(sources: int, queries: int, dim: int, dtype: torch.dtype, norm: bool, adds: bool) -> bool:
    """Whether one kernel does the whole backward."""
    size = launch.bucket(sources)
    return launch.attn_res_inter_backward(dim, dtype.itemsize, queries, size, norm, adds, launch.lanes()).whole


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(
    ("sources", "queries", "shape"),
    [(1, 1, (5, 96)), (2, 4, (2, 3, 100)), (9, 16, (2, 128)), (5, 3, (2, 768)), (17, 2, (3, 96)), (33, 4, (1, 96))],
)
def test_values_and_gradients(sources, queries, shape, dtype, device):
    assert_close(random_phase1(sources, queries, shape, device, dtype=dtype))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("grad_lse", [False, True])
@pytest.mark.parametrize(("sources", "queries"), [(3, 4), (3, 64)])
def test_with_and_without_norm_and_gradient_of_lse(sources, queries, grad_lse, norm, device):
    assert_close(random_phase1(sources, queries, (2, 128), device, dtype=BF16, norm=norm, grad_lse=grad_lse))


@pytest.mark.parametrize(("sources", "dtype"), [(3, BF16), (9, FP32), (33, BF16)])
def test_as_many_queries_as_a_block_may_have(sources, dtype, device):
    assert_close(random_phase1(sources, 64, (1, 96), device, dtype=dtype))


@pytest.mark.parametrize(("sources", "queries", "dim"), [(65, 2, 16), (1025, 1, 8)])
def test_no_number_of_sources_is_too_large(sources, queries, dim, device):
    problem = random_phase1(sources, queries, (1, dim), device)
    results, exact = problem.run(), problem.exact()
    for got, right in zip(results[:5], exact[:5], strict=True):
        assert relative_error(got.cpu(), right) <= 2e-6
    assert relative_error(torch.stack(results[5:]).cpu(), torch.stack(exact[5:])) <= 2e-6


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("queries", [2, 32])
def test_rows_of_one_element(queries, dtype, device):
    """Normalised they are 1 or -1: gradients through keys cancel nearly, but for those of lse, and outputs are ties."""
    problem = random_phase1(2, queries, (20, 1), device, dtype=dtype, out_dtype=FP32, norm=False, existing=False)
    positive = dataclasses.replace(
        problem,
        sources=[(0.5 + torch.rand(20, 1, device=device)).to(dtype) for _ in range(2)],
        grad_outputs=[x.abs() for x in problem.grad_outputs],
        grad_lse=problem.grad_lse.abs(),
    )
    assert_close(positive)


@pytest.mark.parametrize("common", [3.0, 10.0])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("sources", "queries"), [(4, 3), (9, 24), (17, 2)])
def test_what_sources_have_in_common_costs_no_digits(sources, queries, dtype, common, device):
    assert_close(random_phase1(sources, queries, (3, 256), device, dtype=dtype, common=common))


@pytest.mark.parametrize(("dtype", "out_dtype"), [(FP32, BF16), (BF16, FP32), (FP64, FP64)])
def test_dtypes_are_independent(dtype, out_dtype, device):
    assert_close(random_phase1(3, 4, (3, 96), device, dtype=dtype, out_dtype=out_dtype))


@pytest.mark.parametrize("parameter_dtype", [BF16, FP16, FP64])
def test_parameters_of_any_float_dtype(parameter_dtype, device):
    assert_close(random_phase1(3, 4, (3, 96), device, dtype=BF16, parameter_dtype=parameter_dtype))


@pytest.mark.parametrize("queries", [3, 32])
def test_parameters_that_are_columns_of_a_matrix(queries, device):
    problem = random_phase1(3, queries, (2, 96), device, dtype=BF16)
    strided = dataclasses.replace(
        problem,
        queries=problem.queries.t().contiguous().t(),
        key_weights=problem.key_weights.t().contiguous().t(),
        norm_weight=torch.stack([problem.norm_weight, problem.norm_weight], 1)[:, 0],
    )
    assert not any(parameter.is_contiguous() for parameter in strided.parameters)
    assert all(torch.equal(x, y) for x, y in zip(strided.run(), problem.run(), strict=True))


@pytest.mark.parametrize("dim", [7186, 16384])
def test_wide_rows(dim, device):
    assert_close(random_phase1(3, 2, (4, dim), device, dtype=BF16))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("queries", [1, 4, 64])
def test_one_source_gives_itself_and_no_query_gradient(queries, norm, device):
    assert is_whole(1, queries, 96, BF16, norm, True) == (queries < 64), "both ways backward should be tried"
    problem = random_phase1(1, queries, (2, 96), device, dtype=BF16, norm=norm, grad_lse=False)
    outputs, _, dqueries, dkey_weights, *_ = problem.run()
    assert torch.equal(outputs[norm:], problem.sources[0].expand_as(outputs)[norm:])
    assert not dqueries.any()
    assert not dkey_weights.any()


def test_no_tokens(device):
    outputs, lse, *gradients = random_phase1(3, 4, (2, 0, 96), device).run()
    assert outputs.shape == (4, 2, 0, 96)
    assert lse.shape == (4, 2, 0)
    assert [x.shape for x in gradients] == [(4, 96), (4, 96), (96,), *[(2, 0, 96)] * 3]
    assert not any(x.any() for x in gradients)


def test_sources_of_zeros_and_of_the_largest_halves(device):
    problem = random_phase1(3, 4, (3, 96), device, dtype=FP16, existing=False)
    for extreme in (lambda x: torch.zeros_like(x), lambda x: (x.sign() * 1e4).to(FP16)):
        results = dataclasses.replace(problem, sources=[extreme(x) for x in problem.sources]).run()
        assert all(x.isfinite().all() for x in results)


@pytest.mark.parametrize("sizes", [(0.02, 1, 10), (50, 0.5, 0.5), (1e-3, 1e3, 1e-3), (1e3, 1e-3, 1e-3)])
@pytest.mark.parametrize(("sources", "queries"), [(3, 3), (3, 32), (36, 2)])
def test_sources_of_very_different_size(sources, queries, sizes, device):
    """As an embedding and the blocks after it are. Beside a large row a norm's gradient is ill-conditioned: without."""
    problem = random_phase1(sources, queries, (8, 128), device, existing=False, norm=False)
    scaled = [x * sizes[j % 3] for j, x in enumerate(problem.sources)]
    assert_close(dataclasses.replace(problem, sources=scaled))


def test_every_way_through_the_kernels_is_taken_by_the_cases_here():
    """(forward reads sources once, backward reads everything once) for the cases of this file."""
    ways = []
    for sources, queries, dim in [*CASES, (3, 2, 16384)]:
        held = launch.attn_res_inter_forward(dim, 2, queries, launch.bucket(sources), launch.lanes()).held
        ways.append((held, is_whole(sources, queries, dim, BF16, True, True)))
    assert ways == [(True, True), (True, False), (False, False)]


CASES = [(3, 4, 96), (9, 24, 96)]


@pytest.mark.parametrize(("sources", "queries", "dim"), CASES)
def test_two_runs_are_bit_identical_and_a_token_stands_alone(sources, queries, dim, device):
    problem = random_phase1(sources, queries, (5, dim), device, dtype=BF16)
    first, second = problem.run(), problem.run()
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    here = slice(3, 4)
    alone = dataclasses.replace(
        problem,
        sources=[x[here] for x in problem.sources],
        grad_outputs=[x[here] for x in problem.grad_outputs],
        grad_lse=problem.grad_lse[:, here],
        existing=[None if x is None else x[here] for x in problem.existing],
    ).run()
    assert torch.equal(alone[0], first[0][:, here])
    assert torch.equal(alone[1], first[1][:, here])
    assert all(torch.equal(x, y[here]) for x, y in zip(alone[5:], first[5:], strict=True))


@pytest.mark.parametrize(("sources", "queries", "dim"), CASES)
def test_a_nan_stays_in_its_token(sources, queries, dim, device):
    problem = random_phase1(sources, queries, (4, dim), device, dtype=BF16)
    clean = problem.run()
    spoilt = [x.clone() for x in problem.sources]
    spoilt[1][2, 7] = torch.nan
    dirty = dataclasses.replace(problem, sources=spoilt).run()
    others = [0, 1, 3]
    assert dirty[0][:, 2].isnan().all()
    assert torch.equal(dirty[0][:, others], clean[0][:, others])
    assert all(torch.equal(x[others], y[others]) for x, y in zip(dirty[5:], clean[5:], strict=True))


@pytest.mark.parametrize(("sources", "queries", "dim"), CASES)
def test_results_are_written_in_full_and_nothing_else_is(sources, queries, dim, device):
    problem = random_phase1(sources, queries, (3, dim), device, dtype=BF16)
    clean = problem.run()
    blocks = [guarded(x) for x in (*problem.sources, *problem.grad_outputs)]
    surrounded = dataclasses.replace(
        problem,
        sources=[block.tensor for block in blocks[:sources]],
        grad_outputs=[block.tensor for block in blocks[sources:]],
    )
    with poisoned_allocations() as allocated:
        poisoned = surrounded.run()
    assert len(allocated) > 4
    assert all(torch.equal(x, y) for x, y in zip(clean, poisoned, strict=True))
    assert_only_read(blocks, [*problem.sources, *problem.grad_outputs])


LAYOUTS = {
    "stacked": lambda x: torch.stack([x, x + 1, x * 2]).unbind(0),
    "bank": lambda x: torch.stack([x, x + 1, x * 2], dim=2).unbind(2),
    "padded": lambda x: [torch.nn.functional.pad(y, (0, 13))[..., :-13] for y in (x, x + 1, x * 2)],
    "transposed": lambda x: [x.transpose(0, 1).contiguous().transpose(0, 1), x + 1, x * 2],
    "one token for all": lambda x: [x[:1, :1].expand_as(x), x + 1, x[:1].expand_as(x)],
    "one storage twice": lambda x: [x, x, x * 2],
    "overlapping rows": lambda x: [x.flatten()[: 96 + 3 * 8].unfold(0, 96, 8).view(2, 2, 96), x + 1, x * 2],
    "unaligned": lambda x: [torch.cat([x.flatten(), x.flatten()[:1]])[1:].view_as(x), x + 1, x * 2],
}


@pytest.mark.parametrize("queries", [3, 32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_read_where_they_lie(layout, queries, device):
    assert is_whole(3, queries, 96, BF16, True, True) == (queries == 3), "both ways backward should be tried"
    problem = random_phase1(3, queries, (2, 2, 96), device, dtype=BF16)
    gradient = LAYOUTS[layout](torch.randn(2, 2, 96, device=device).to(BF16))
    strided = dataclasses.replace(
        problem,
        sources=list(LAYOUTS[layout](problem.sources[0])),
        grad_outputs=[gradient[s % 3] for s in range(queries)],
    )
    compact = dataclasses.replace(
        strided,
        sources=[x.contiguous() for x in strided.sources],
        grad_outputs=[x.contiguous() for x in strided.grad_outputs],
    )
    assert all(torch.equal(x, y) for x, y in zip(strided.run(), compact.run(), strict=True))


@pytest.mark.parametrize("queries", [3, 32])
@pytest.mark.parametrize("layout", ["unaligned", "transposed", "one token for all"])
def test_gradients_to_add_to_of_any_layout(layout, queries, device):
    problem = random_phase1(3, queries, (2, 2, 96), device, dtype=BF16)
    strided = dataclasses.replace(problem, existing=[*LAYOUTS[layout](problem.existing[0])[:2], None])
    compact = dataclasses.replace(strided, existing=[x if x is None else x.clone() for x in strided.existing])
    assert all(torch.equal(x, y) for x, y in zip(strided.run(), compact.run(), strict=True))


@pytest.mark.parametrize("queries", [3, 64])
def test_offsets_beyond_two_to_the_31(queries, device):
    stride = 2**30 + 8
    far = torch.empty(2 * stride + 64, dtype=BF16, device=device).as_strided((3, 64), (stride, 1))
    near = random_phase1(3, queries, (3, 64), device, dtype=BF16)
    far.copy_(near.sources[0])
    got = dataclasses.replace(near, sources=[far, *near.sources[1:]]).run()
    assert all(torch.equal(x, y) for x, y in zip(got, near.run(), strict=True))


@pytest.mark.parametrize("queries", [3, 64])
def test_a_source_that_needs_no_gradient(queries, device):
    problem = random_phase1(3, queries, (2, 96), device, dtype=BF16, existing=False)
    _, *statistics = problem.forward()
    everything = problem.backward(statistics)
    dsources, dqueries, *_ = problem.backward(statistics, [False, True, False])
    assert torch.equal(dqueries, everything[1])
    assert torch.equal(dsources[1], everything[0][1])
    assert dsources[0].shape == dsources[2].shape == (0,)


@counted
@pytest.mark.parametrize(("norm", "existing"), [(False, False), (True, True)])
@pytest.mark.parametrize(
    ("sources", "queries", "dim", "held", "whole"),
    [(3, 4, 128, True, True), (9, 16, 128, True, True), (3, 4, 2048, True, True), (9, 16, 2048, True, False),
     (3, 64, 128, True, False), (17, 2, 2048, False, False)],
)  # fmt: skip
def test_rows_are_moved_as_often_as_promised(sources, queries, dim, held, whole, norm, existing, device):
    tokens = 1 if sources * dim > 20000 else 2  # the kernels take long to interpret, and tokens are all alike
    problem = random_phase1(sources, queries, (tokens, dim), device, dtype=BF16, norm=norm, existing=existing)
    unit, added = tokens * dim * 2, sum(x is not None for x in problem.existing)
    with count_traffic() as forward:
        _, *statistics = problem.forward()
    with count_traffic() as backward:
        problem.backward(statistics)
    size = launch.bucket(sources)
    assert launch.attn_res_inter_forward(dim, 2, queries, size, launch.lanes()).held == held
    assert is_whole(sources, queries, dim, BF16, norm, existing) == whole
    assert forward.moved("sources", "outputs").total == ((1 if held else 2) * sources + queries) * unit
    times = (1, 2) if whole else (2, 3)
    moved = backward.moved("grads", "sources", "dsources", "existing").total
    assert moved == (times[0] * queries + times[1] * sources + added) * unit
    assert len(forward.launches) == 1
    assert [x.kernel.removeprefix("_attn_res_inter_backward_") for x in backward.launches] == [
        *(["whole"] if whole else ["pairs", "terms", "slices"]),
        *["_parameter_gradients"],
    ]
    assert forward.atomic == backward.atomic == 0
