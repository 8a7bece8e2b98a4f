"""The kernel of an inference step: values to the project's bounds, traffic to the byte, layouts, compilations."""

import dataclasses
import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bench.interpreter import count_traffic
from bench.resources import Shape, measure
from blockres import reference
from blockres_kernels import launch, step
from blockres_kernels.sources import rows_of
from tests.support.layouts import ROW_LAYOUTS
from tests.support.memory import Allocations, guarded
from tests.support.numerics import assert_rounded_once, correlated_sources, relative_error

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
counted = pytest.mark.skipif(torch.cuda.is_available(), reason="bytes are counted by the interpreter")
BOUNDS = {FP64: 1e-12, FP32: 2e-6}
OPEN = {"nothing open": (False, False), "nothing new": (True, False), "opens": (False, True), "adds": (True, True)}


@dataclass(frozen=True)
class Step:
    """One call. `total` and `out` are written; the sum goes where partial lies unless the test has it elsewhere."""

    bank: Tensor  # [N, ..., D]
    partial: Tensor | None
    update: Tensor | None
    total: Tensor
    out: Tensor
    query: Tensor
    key_weight: Tensor | None
    norm_weight: Tensor | None
    settings: tuple[float, float, float] = (1e-6, 0.7, 1e-5)

    def run(self) -> tuple[Tensor, Tensor]:
        """What is read, and the open block's sum, as copies."""
        step.attn_res_step(*(getattr(self, field.name) for field in dataclasses.fields(self)[:-1]), *self.settings)
        return self.out.clone(), self.total.clone()

    def exact(self) -> tuple[Tensor, Tensor | None]:
        """The same by the definition, in float64; to be asked before `run`, which may write where it has read."""
        terms = [x.cpu().double() for x in (self.partial, self.update) if x is not None]
        sources = list(self.bank.cpu().double())
        total = None
        if terms:
            total = sum(terms[1:], start=terms[0]).to(self.bank.dtype)
            sources.append(total.double())
        eps, scale, norm_eps = self.settings
        query, key_weight, norm_weight = (
            None if x is None else x.cpu().double() for x in (self.query, self.key_weight, self.norm_weight)
        )
        norm = {} if norm_weight is None else {"norm_weight": norm_weight, "norm_eps": norm_eps}
        return reference.attn_res(sources, query, key_weight, eps=eps, scale=scale, **norm), total


def random_step(
    count,
    shape,
    device,
    *,
    stream=FP32,
    narrow=None,
    case="adds",
    norm=True,
    key_weight=True,
    parameter_dtype=FP32,
    common=1.0,
):
    """`stream` is the dtype of the bank, `narrow` that of what sublayers read and write."""
    dim, narrow = shape[-1], narrow or stream
    slots = torch.stack(correlated_sources(count + 1, shape, common, stream, device))
    update = torch.randn(shape, device=device)
    if dim == 1:  # a single element that happens to cancel has no relative error to speak of
        slots, update = slots.abs(), update.abs()
    has_partial, has_update = OPEN[case]
    return Step(
        slots[:count],
        slots[count] if has_partial else None,
        update.to(narrow) if has_update else None,
        slots[count] if has_update else slots[:0],
        torch.full(shape, torch.nan, dtype=narrow, device=device),
        (torch.randn(dim, device=device) * dim**-0.5).to(parameter_dtype),
        (torch.rand(dim, device=device) + 0.5).to(parameter_dtype) if key_weight else None,
        (torch.rand(dim, device=device) + 0.5).to(parameter_dtype) if norm else None,
    )


def assert_right(problem: Step) -> None:
    exact_out, exact_total = problem.exact()
    out, total = problem.run()
    if problem.update is not None:
        assert torch.equal(total.cpu(), exact_total)
    if out.dtype in BOUNDS and problem.bank.dtype in BOUNDS:
        assert relative_error(out.cpu(), exact_out) <= max(BOUNDS[out.dtype], BOUNDS[problem.bank.dtype])
    elif out.dtype in BOUNDS:
        assert relative_error(out.cpu(), exact_out) <= BOUNDS[FP32]
    else:
        assert_rounded_once(out, exact_out)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("case", OPEN)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(("count", "shape"), [(1, (7, 96)), (2, (2, 3, 100)), (9, (1, 1)), (5, (2, 2048))])
def test_values(count, shape, dtype, case, norm, device):
    assert_right(random_step(count, shape, device, stream=dtype, case=case, norm=norm))


@pytest.mark.parametrize("case", OPEN)
@pytest.mark.parametrize(("stream", "narrow"), [(FP32, BF16), (BF16, FP32), (FP32, FP16), (FP64, FP64), (FP64, BF16)])
def test_dtypes_are_independent(stream, narrow, case, device):
    assert_right(random_step(3, (5, 100), device, stream=stream, narrow=narrow, case=case))


@pytest.mark.parametrize("parameter_dtype", [BF16, FP16, FP32, FP64])
def test_parameters_of_any_float_dtype(parameter_dtype, device):
    assert_right(random_step(3, (4, 96), device, stream=BF16, parameter_dtype=parameter_dtype))


def test_parameters_that_are_columns_of_a_matrix(device):
    problem = random_step(3, (4, 96), device, key_weight=False)
    columns = torch.stack([problem.query, problem.norm_weight], 1).unbind(1)
    assert_right(dataclasses.replace(problem, query=columns[0], norm_weight=columns[1]))


@pytest.mark.parametrize("common", [3.0, 10.0])
def test_what_the_sources_have_in_common_costs_no_digits(common, device):
    assert_right(random_step(5, (4, 512), device, common=common))


@pytest.mark.parametrize(("dim", "dtype"), [(7186, BF16), (16384, FP32)])
def test_wide_rows(dim, dtype, device):
    assert_right(random_step(3, (2, dim), device, stream=dtype))


@counted
@pytest.mark.parametrize("count", [32, 33, 65, 257])
def test_any_number_of_slots_in_one_launch(count, device):
    problem = random_step(count, (2, 32), device)
    with count_traffic() as traffic:
        assert_right(problem)
    assert [launched.kernel for launched in traffic.launches] == ["_attn_res_step"]


@counted
@pytest.mark.parametrize("shape", [(0, 96), (2, 0, 96)])
def test_nothing_is_launched_for_no_tokens(shape, device):
    with count_traffic() as traffic:
        out, _ = random_step(3, shape, device).run()
    assert out.shape == shape
    assert not traffic.launches


def test_sources_of_zeros_and_of_the_largest_halves(device):
    problem = random_step(3, (4, 96), device, stream=FP16)
    for change in (torch.zeros_like, lambda x: (x.sign() * 1e4).to(FP16)):
        bank, partial, update = (change(x) for x in (problem.bank, problem.partial, problem.update))
        extreme = dataclasses.replace(problem, bank=bank, partial=partial, update=update)
        exact_out, _ = extreme.exact()
        assert relative_error(extreme.run()[0].cpu(), exact_out) <= 1e-3


@pytest.mark.parametrize("where", ["bank", "partial", "update"])
def test_a_nan_stays_in_its_token(where, device):
    problem = random_step(3, (5, 96), device, stream=BF16)
    values = {name: getattr(problem, name).clone() for name in ("bank", "partial", "update")}
    clean_out, clean_total = dataclasses.replace(problem, **values).run()
    values[where][..., 2, 7] = torch.nan
    out, total = dataclasses.replace(problem, **values).run()
    others = [0, 1, 3, 4]
    assert out[2].isnan().all()
    assert torch.equal(out[others], clean_out[others])
    assert torch.equal(total[others], clean_total[others])


@pytest.mark.parametrize("tokens", [7, 40])
def test_a_token_does_not_depend_on_the_others(tokens, device):
    problem = random_step(5, (tokens, 32), device, stream=BF16)
    alone = dataclasses.replace(
        problem,
        bank=problem.bank[:, 3:4].clone(),
        **{name: getattr(problem, name)[3:4].clone() for name in ("partial", "update", "total", "out")},
    )
    together, again = problem.run(), alone.run()
    for x, y in zip(together, again, strict=True):
        assert torch.equal(x[3:4], y)


def test_results_are_written_in_full_and_nothing_else_is(device):
    problem = random_step(4, (5, 100), device, stream=BF16)
    buffers = {name: guarded(getattr(problem, name)) for name in ("bank", "partial", "update", "total", "out")}
    surrounded = dataclasses.replace(problem, **{name: buffer.tensor for name, buffer in buffers.items()})
    before = {name: buffers[name].tensor.clone() for name in ("bank", "partial", "update")}
    got, want = surrounded.run(), problem.run()
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)
    for buffer in buffers.values():
        buffer.check()
    assert all(torch.equal(buffers[name].tensor, value) for name, value in before.items())


def test_a_sum_and_a_result_may_take_the_place_of_what_they_are_made_of(device):
    apart = random_step(4, (5, 96), device, stream=BF16)
    apart = dataclasses.replace(apart, total=torch.empty_like(apart.out), partial=apart.partial.clone())
    update = apart.update.clone()
    partial = apart.partial.clone()
    in_place = dataclasses.replace(apart, partial=partial, total=partial, update=update, out=update)
    for x, y in zip(apart.run(), in_place.run(), strict=True):
        assert torch.equal(x, y)


BANKS = {
    "the front of a longer bank": lambda x: torch.nn.functional.pad(x, (0, 0, 0, 3))[:, : x.shape[1]],
    "by token, as Kimi K3 has it": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "padded rows": lambda x: torch.nn.functional.pad(x, (0, 13))[..., : x.shape[2]],
    "every other slot": lambda x: x.repeat_interleave(2, 0)[::2],
    "one token for all": lambda x: x[:, :1].expand_as(x),
    "unaligned": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view_as(x),
}


@pytest.mark.parametrize("layout", BANKS)
def test_slots_are_read_where_they_lie(layout, device):
    problem = random_step(3, (4, 100), device, stream=BF16)
    strided = dataclasses.replace(problem, bank=BANKS[layout](problem.bank))
    compact = dataclasses.replace(strided, bank=strided.bank.contiguous(), partial=problem.partial.clone())
    strided = dataclasses.replace(strided, partial=problem.partial.clone())
    for x, y in zip(strided.run(), compact.run(), strict=True):
        assert torch.equal(x, y)


def test_no_more_alignment_is_promised_than_every_slot_has():
    """Slots apart by an odd number of elements, though the first one and its rows lie at multiples of 16 bytes."""
    apart = torch.empty(3, 2 * 96 + 1, dtype=torch.bfloat16)[:, :192].unflatten(1, (2, 96))
    even = torch.empty(3, 2, 96, dtype=torch.bfloat16)
    assert [step._alignments(bank, *5 * [rows_of([bank[0]])]).bank for bank in (apart, even)] == [2, 16]


@pytest.mark.parametrize("layout", ROW_LAYOUTS)
def test_updates_of_any_layout(layout, device):
    problem = random_step(3, (3, 4, 96), device, stream=BF16)
    strided = dataclasses.replace(problem, update=ROW_LAYOUTS[layout](problem.update), partial=problem.partial.clone())
    compact = dataclasses.replace(strided, update=strided.update.contiguous())
    for x, y in zip(strided.run(), compact.run(), strict=True):
        assert torch.equal(x, y)


def test_rows_that_are_not_one_stride_apart_are_refused(device):
    problem = random_step(3, (3, 4, 96), device)
    turned = problem.out.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match="rows of out must be one stride apart"):
        dataclasses.replace(problem, out=turned).run()


def test_offsets_beyond_two_to_the_31(device):
    slot = 2**30 + 16  # 4 GiB of address space, of which a few pages are touched
    far = torch.empty(2 * slot + 256, dtype=BF16, device=device).as_strided((3, 3, 64), (slot, 64, 1))
    near = random_step(3, (3, 64), device, stream=BF16)
    near = dataclasses.replace(near, partial=near.partial.clone())
    far.copy_(near.bank)
    for x, y in zip(dataclasses.replace(near, bank=far).run(), near.run(), strict=True):
        assert torch.equal(x, y)


@counted
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("case", OPEN)
@pytest.mark.parametrize(("stream", "narrow"), [(BF16, BF16), (FP32, BF16)])
@pytest.mark.parametrize("dim", [128, 2048])
@pytest.mark.parametrize("count", [1, 8])
def test_rows_are_moved_as_often_as_promised(count, dim, stream, narrow, case, norm, device):
    """Every source and the update are read once, sum and result are written once; the rest are parameters."""
    problem = random_step(count, (3, dim), device, stream=stream, narrow=narrow, case=case, norm=norm)
    problem = dataclasses.replace(problem, partial=None if problem.partial is None else problem.partial.clone())
    wide, slim = 3 * dim * stream.itemsize, 3 * dim * narrow.itemsize
    has_partial, has_update = OPEN[case]
    with count_traffic() as traffic:
        problem.run()
    assert traffic.moved("bank").read == count * wide
    assert traffic.moved("partial").read == has_partial * wide
    assert traffic.moved("update").read == has_update * slim
    assert traffic.moved("total").write == has_update * wide
    assert traffic.moved("out").write == slim
    rows = traffic.moved("bank", "partial", "update", "total", "out").total
    assert rows == (count + has_partial + has_update) * wide + (1 + has_update) * slim
    assert rows + traffic.moved("query", "key_weight", "norm_weight").total == traffic.all.total
    assert traffic.atomic == 0
    assert len(traffic.launches) == 1


@pytest.mark.parametrize("case", OPEN)
def test_nothing_is_allocated(case, device, monkeypatch):
    problem = random_step(3, (4, 96), device, stream=BF16, case=case)
    arguments = [getattr(problem, field.name) for field in dataclasses.fields(problem)[:-1]]
    launched = []  # the interpreter copies what a kernel is given: it is left out
    monkeypatch.setattr(step, "_attn_res_step", {(4,): lambda *args, **options: launched.append(args)})
    with Allocations() as allocations:
        step.attn_res_step(*arguments, *problem.settings)
    assert len(launched) == 1
    assert allocations.elements == []


@pytest.mark.parametrize(("dim", "dtype"), [(96, "bfloat16"), (100, "bfloat16"), (100, "float32")])
def test_nothing_is_compiled_again_for_other_numbers_of_tokens_and_sources(dim, dtype):
    shapes = [
        ("attn_res_step", Shape(dim, sources, dtype, tokens=tokens))
        for sources, tokens in itertools.product((2, 3, 9, 33), (1, 2, 7, 16, 17, 100))
    ]
    assert [usage.kernel for usage in measure(shapes, ["sm_90"])] == ["_attn_res_step"]


def test_narrow_rows_beside_wide_ones_are_16_bytes_a_thread_too():
    wide, mixed = launch.attn_res_step(4096, 4, 4, 32), launch.attn_res_step(4096, 4, 2, 32)
    assert mixed.tile.width == 2 * wide.tile.width
    assert len(mixed.tile.chunks) * mixed.tile.width == len(wide.tile.chunks) * wide.tile.width
