"""The CPU implementation: errors within the bounds of the mathematics, layouts, sizes, chunks and memory."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blockres import cpu, functional, reference
from tests.support.memory import poisoned_allocations
from tests.support.numerics import correlated_sources, relative_error, round_float64, units_apart
from tests.support.operations import OPERATIONS, differentiate, make_call

NARROW = [torch.bfloat16, torch.float16]
SETTINGS = (1e-6, 1.0, 1e-6)  # eps, scale, norm_eps


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of two tokens or so, and a short last one, where a test's tensors would fit in one."""
    monkeypatch.setattr(cpu, "_BYTES_PER_THREAD", 1024)
    monkeypatch.setattr(cpu, "_MIN_BYTES", 1024)


def compare(call):
    """Outputs and gradients, and those of the float64 reference for the same upstream gradients."""
    exact = call.widened()
    outputs = call(functional)
    upstream = [torch.randn(out.shape).to(out.dtype).double() for out in outputs]
    want, want_grads = differentiate(exact, reference, upstream)
    got, got_grads = differentiate(call, functional, upstream)
    return got, got_grads, want, want_grads


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("common", [0.0, 3.0, 10.0])
@pytest.mark.parametrize(("tokens", "width"), [(300, 100), (100, 1000), (64, 4096)])
def test_float32_errors(name, common, tokens, width):
    call = make_call(name, (tokens, width), sources=8, queries=3, common=common)
    got, got_grads, want, want_grads = compare(call)
    for g, w in zip([*got, *got_grads], [*want, *want_grads], strict=True):
        assert relative_error(g, w) <= 2e-6


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("sizes", [(0.02, 1, 10), (50, 0.5, 0.5), (1e-3, 1e3, 1e-3), (1e3, 1e-3, 1e-3)])
def test_rows_of_very_different_size(name, sizes):
    """As an embedding and the blocks after it are. Beside a large row a norm's gradient is ill-conditioned: without."""
    call, scales = make_call(name, (100, 256), norm=False), iter(sizes)
    leaves = [leaf * next(scales) if leaf.shape == (100, 256) else leaf for leaf in call.leaves]
    got, got_grads, want, want_grads = compare(call.with_leaves([leaf.detach().requires_grad_() for leaf in leaves]))
    for g, w in zip([*got, *got_grads], [*want, *want_grads], strict=True):
        assert relative_error(g, w) <= 2e-6


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("common", [0.0, 10.0])
def test_narrow_errors(name, dtype, common):
    """Outputs rounded once, source gradients to the dtype's precision, parameter gradients as exact as in float32."""
    options = {"dtype": dtype, "parameter_dtype": torch.float32, "common": common, "update": False}
    call = make_call(name, (200, 256), sources=8, queries=3, **options)
    got, got_grads, want, want_grads = compare(call)
    apart = units_apart(got[0], round_float64(want[0], dtype))
    assert (apart == 0).double().mean() >= 0.99
    # Beside zero a unit is smaller than the float32 error of the terms that cancelled.
    assert ((apart <= 1) | ((got[0].double() - want[0]).abs() <= 2e-6 * (1 + common))).all()
    for leaf, g, w in zip(call.leaves, got_grads, want_grads, strict=True):
        assert relative_error(g, w) <= (4e-3 if leaf.dtype == dtype else 2e-6)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("tokens", [0, 1, 2, 7])
@pytest.mark.parametrize("width", [1, 96, 100])
@pytest.mark.parametrize("count", [1, 2, 9, 33])
def test_awkward_sizes(name, tokens, width, count, small_chunks):
    call = make_call(name, (tokens, width), sources=count, queries=min(count, 5))
    got, got_grads, want, want_grads = compare(call)
    for g, w in zip([*got, *got_grads], [*want, *want_grads], strict=True):
        assert g.shape == w.shape
        torch.testing.assert_close(g.double(), w, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("count", [65, 1025])
def test_many_sources(count):
    call = make_call("attn_res", (2, 3, 16), sources=count)
    got, got_grads, want, want_grads = compare(call)
    for g, w in zip([*got, *got_grads], [*want, *want_grads], strict=True):
        assert relative_error(g, w) <= 1e-5


@pytest.mark.parametrize("width", [7186, 16384])
def test_wide_rows(width):
    got, got_grads, want, want_grads = compare(make_call("attn_res", (16, width), sources=5))
    for g, w in zip([*got, *got_grads], [*want, *want_grads], strict=True):
        assert relative_error(g, w) <= 2e-6


LAYOUTS = {
    "padded rows": lambda: [torch.randn(4, 6, 20)[..., :16] for _ in range(3)],
    "every other token": lambda: [torch.randn(4, 12, 16)[:, ::2] for _ in range(3)],
    "a bank": lambda: list(torch.randn(4, 6, 3, 16).unbind(2)),
    "batch and tokens exchanged": lambda: [torch.randn(6, 4, 16).transpose(0, 1) for _ in range(3)],
    "expanded": lambda: [torch.randn(4, 1, 16).expand(4, 6, 16), torch.randn(1, 1, 16).expand(4, 6, 16)],
    "overlapping": lambda: [torch.randn(60).as_strided((4, 6, 16), (6, 1, 1), offset) for offset in (0, 2, 5)],
    "the same memory twice": lambda: [torch.ones(4, 6, 16)] * 2,
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_sources_are_read_where_they_are(layout, small_chunks):
    sources = [source.detach().requires_grad_() for source in LAYOUTS[layout]()]
    dense = [source.detach().contiguous().requires_grad_() for source in sources]
    query, upstream = torch.randn(16, requires_grad=True), torch.randn(4, 6, 16)
    got, want = (functional.attn_res(given, query) for given in (sources, dense))
    assert torch.equal(got, want)
    grads = torch.autograd.grad(got, [*sources, query], upstream)
    dense_grads = torch.autograd.grad(want, [*dense, query], upstream)
    for grad, dense_grad in zip(grads, dense_grads, strict=True):
        torch.testing.assert_close(grad, dense_grad)


@pytest.mark.parametrize("operation", ["attn_res", "attn_res_inter"])
def test_sources_in_one_tensor(operation):
    """Stacked in front, or a view of a bank that holds them side by side."""
    for stacked in (torch.randn(3, 4, 6, 16), torch.randn(4, 6, 3, 16).permute(2, 0, 1, 3)):
        query = torch.randn(16) if operation == "attn_res" else torch.randn(2, 16)
        stacked.requires_grad_()
        got = getattr(functional, operation)(stacked, query)
        want = getattr(functional, operation)(list(stacked.unbind(0)), query)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        first = [x[0] if isinstance(x, tuple) else x for x in (got, want)]
        a, b = (torch.autograd.grad(out.sin().sum(), stacked)[0] for out in first)
        assert torch.equal(a, b)


def test_a_source_given_twice_gets_both_gradients():
    x, y = (torch.randn(5, 8, requires_grad=True) for _ in range(2))
    query = torch.randn(8)
    (got,) = torch.autograd.grad(functional.attn_res([x, y, x], query).sin().sum(), x)
    (want,) = torch.autograd.grad(reference.attn_res([x, y, x], query).sin().sum(), x)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_token_does_not_depend_on_the_others(name, small_chunks):
    """Bit for bit, wherever the token comes in the batch and however many there are."""
    call = make_call(name, (29, 200), sources=5, queries=3)
    with torch.no_grad():
        together = call(functional)
        for chosen in ([0], [28], [3, 7], [17, 4, 4, 20, 1], list(range(28, -1, -1))):
            rows = [leaf[chosen] if leaf.shape[0] == 29 else leaf for leaf in call.leaves]
            alone = call.with_leaves([r.clone().requires_grad_() for r in rows])(functional)
            for part, whole in zip(alone, together, strict=True):
                token = whole.dim() - (2 if whole.shape[-1] == 200 else 1)
                assert torch.equal(part, whole.index_select(token, torch.tensor(chosen)))


@pytest.mark.parametrize("name", OPERATIONS)
def test_two_runs_are_bit_identical(name):
    call = make_call(name, (500, 128), sources=5)
    upstream = [torch.randn_like(out) for out in call(functional)]
    first, second = (differentiate(call, functional, upstream) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip([*first[0], *first[1]], [*second[0], *second[1]], strict=True))


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_nan_stays_in_its_token(name, small_chunks):
    call = make_call(name, (13, 24), sources=4)
    with torch.no_grad():
        call.leaves[1][5, 3] = torch.nan
    outputs = call(functional)
    grads = torch.autograd.grad(outputs, call.leaves, [torch.ones_like(out) for out in outputs])
    for value in [*outputs, *(g for g, leaf in zip(grads, call.leaves, strict=True) if leaf.shape[0] == 13)]:
        token = value.dim() - (2 if value.shape[-1] == 24 else 1)
        touched = value.isnan().movedim(token, 0).reshape(13, -1).any(1)
        assert touched.nonzero().flatten().tolist() in ([5], [])
    assert outputs[0].isnan().any()


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_zeros_and_large_magnitudes_are_finite(name, dtype):
    for size in (0.0, 1e4):
        call = make_call(name, (9, 32), sources=3, dtype=dtype, parameter_dtype=torch.float32)
        with torch.no_grad():
            for leaf in call.leaves:
                if leaf.dtype == dtype and leaf.shape == (9, 32):
                    leaf.copy_(leaf.sign() * size * (0.5 if name == "attn_res_merge" else 1.0))
        outputs = call(functional)
        grads = torch.autograd.grad(outputs, call.leaves, [torch.ones_like(out) for out in outputs])
        assert all(x.isfinite().all() for x in [*outputs, *grads])


def attn_res_directly(sources, vectors, dtype):
    out, *stats = cpu.attn_res_forward(sources, *vectors, *SETTINGS, dtype)
    return out, stats, cpu.attn_res_backward(out, *stats[:2], sources, *vectors, *stats, *SETTINGS, [True, False, True])


def attn_res_inter_directly(sources, vectors, dtype):
    *keys, norm_weight = vectors
    keys = [torch.stack([key] * 2) for key in keys]
    outputs, *stats = cpu.attn_res_inter_forward(sources, *keys, norm_weight, *SETTINGS, dtype)
    return (
        outputs,
        stats,
        cpu.attn_res_inter_backward(
            outputs, stats[0], sources, *keys, norm_weight, *stats, *SETTINGS, [True] * 3, [None, sources[0], None]
        ),
    )


def attn_res_merge_directly(sources, vectors, dtype):
    output, partial, update = sources
    lse = output[:, 0].float()
    h, total, stats = cpu.attn_res_merge_forward(output, lse, partial, update, *vectors, *SETTINGS, dtype)
    return h, total, stats, cpu.attn_res_merge_backward(h, total, output, lse, total, *vectors, stats, *SETTINGS)


DIRECTLY = (attn_res_directly, attn_res_inter_directly, attn_res_merge_directly)


@pytest.mark.parametrize("directly", DIRECTLY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 11])
def test_everything_is_written(directly, dtype, tokens, small_chunks):
    """The functions themselves: inside of a custom op, a dispatch mode sees nothing."""
    sources = correlated_sources(3, (tokens, 20), 0.0, dtype)
    vectors = [torch.randn(20) for _ in ("query", "key weight", "norm weight")]
    with poisoned_allocations() as allocated:
        returned = tree_leaves(directly(sources, vectors, dtype))
    assert all(x.isfinite().all() for x in returned)
    poisoned = {block.tensor.untyped_storage().data_ptr() for block in allocated}
    assert returned[0].untyped_storage().data_ptr() in poisoned


class PeakMemory(TorchDispatchMode):
    """The most bytes alive at one time, not counting those of the tensors given."""

    def __init__(self, *given):
        super().__init__()
        self.alive = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in given}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor.untyped_storage())
        return result

    def _watch(self, storage):
        key = storage._cdata
        if key in self._known or storage.nbytes() == 0:
            return
        self._known.add(key)
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key, size):
        self._known.discard(key)
        self.alive -= size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_beside_the_tensors_themselves(dtype):
    """Forward and backward need what they take and return, the numbers per token, and at most 5% of it besides."""
    sources = correlated_sources(8, (1024, 1024), 0.0, dtype)
    query = torch.randn(1024)
    with PeakMemory(*sources, query) as forward:
        out, *stats = cpu.attn_res_forward(sources, query, None, None, *SETTINGS, dtype)
    with PeakMemory(out, *stats, *sources, query) as backward:
        dsources, *_ = cpu.attn_res_backward(out, None, None, sources, query, None, None, *stats, *SETTINGS, [True] * 8)
    size = lambda tensors: sum(t.nbytes for t in tensors)  # noqa: E731
    taken = size(sources) + size(stats)
    for peak, returned in ((forward.peak, size([out, *stats])), (backward.peak, size(dsources))):
        assert returned <= peak <= returned + 0.05 * (taken + size([out]) + returned)
