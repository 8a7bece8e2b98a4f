"""The public functions over both implementations: values, gradients, compilation, and what autograd may ask of them."""

import sys
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from blockres import functional, ops, reference
from tests.support.numerics import relative_error
from tests.support.operations import OPERATIONS, differentiate, make_call

MODES = {"eager": None, "compiled": False, "dynamic": True}


def compiled(function, mode):
    if MODES[mode] is None:
        return function
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=MODES[mode], backend="aot_eager")


def random_like(outputs):
    """Upstream gradients that every dtype holds exactly."""
    return [torch.randn(out.shape).bfloat16().double() for out in outputs]


def assert_all_close(got, want, bound=2e-5):
    """Loose enough for a few tokens whose terms happen to cancel; the bounds on the error are in `test_cpu.py`."""
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        assert relative_error(g, w) <= bound


def coarsest(tensors):
    return max(torch.finfo(tensor.dtype).eps for tensor in tensors)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("everything", [True, False])
def test_values_and_gradients(name, everything, backend):
    options = {"key_weight": everything, "norm": everything, "update": everything}
    call = make_call(name, (2, 3, 40), sources=4, queries=3, device=backend, scale=0.5, **options)
    exact = call.widened()
    upstream = random_like(exact(reference))
    want, want_grads = differentiate(exact, reference, upstream)
    got, got_grads = differentiate(call, functional, upstream)
    assert_all_close(got, want)
    assert_all_close(got_grads, want_grads)
    assert [g.dtype for g in got_grads] == [leaf.dtype for leaf in call.leaves]


@pytest.mark.parametrize("mode", ["compiled", "dynamic"])
def test_compiled_is_eager(mode, backend):
    """All operations in one graph: a block opens, two sublayers merge, an aggregation over everything closes it."""

    def network(sources, partial, query, weight, gain):
        outputs, lse, sources = functional.attn_res_inter_chained(
            sources, torch.stack([query, 2 * query]), torch.stack([weight, weight]), eps=1e-5, norm_weight=gain
        )
        h, partial = functional.attn_res_merge(outputs[1], lse[1], partial, query, weight, norm_weight=gain)
        g, partial = functional.attn_res_merge(outputs[0], lse[0], partial, query, weight, update=h)
        out, total, weights = functional.attn_res(
            [*sources, partial, g], query, weight, scale=0.5, return_lse=True, return_weights=True
        )
        return h, out, total, weights

    def run(function, tokens):
        torch.manual_seed(tokens)
        leaves = [torch.randn(tokens, 12, device=backend, requires_grad=True) for _ in range(3)]
        leaves += [torch.randn(12, device=backend, requires_grad=True) for _ in range(3)]
        outputs = function(leaves[:2], *leaves[2:])
        grads = torch.autograd.grad(sum((out * out.sin()).sum() for out in outputs), leaves)
        return [*outputs, *grads]

    function = compiled(network, mode)
    for tokens in (3, 5):
        with torch._dynamo.config.patch(error_on_recompile=mode == "dynamic" and tokens == 5):
            got = run(function, tokens)
        assert_all_close(got, [x.double() for x in run(network, tokens)], 1e-6)


@pytest.mark.parametrize("name", OPERATIONS)
def test_opcheck(name, backend):
    """Schema, fake implementation and autograd registration of the forward and of the backward op."""
    call = make_call(name, (2, 3, 8), sources=2, queries=2, device=backend)
    recorded = []
    with pytest.MonkeyPatch.context() as patch:
        for suffix in ("forward", "backward"):
            op = getattr(ops, f"{name}_{suffix}")
            patch.setattr(ops, f"{name}_{suffix}", lambda *args, op=op: recorded.append((op, args)) or op(*args))
        outputs = call(functional)
        torch.autograd.grad(outputs, call.leaves, [torch.randn_like(out) for out in outputs])
    (forward, arguments), (backward, backward_arguments) = recorded
    torch.library.opcheck(forward, arguments)
    detached = tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, backward_arguments)
    torch.library.opcheck(backward, detached)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_compiled_without_gradients(guard, backend):
    def network(sources, partial, query):
        outputs, lse, sources = functional.attn_res_inter_chained(sources, query[None])
        h, partial = functional.attn_res_merge(outputs[0], lse[0], partial, query)
        return functional.attn_res([*sources, partial], query) + h

    sources = [torch.randn(3, 8, device=backend, requires_grad=True) for _ in range(2)]
    partial, query = torch.randn(3, 8, device=backend, requires_grad=True), torch.randn(8, device=backend)
    with guard():
        assert torch.equal(compiled(network, "compiled")(sources, partial, query), network(sources, partial, query))


def test_compiled_to_machine_code():
    """The default backend of torch.compile around an op, once; the other tests stop short of its C++ compiler."""
    torch._dynamo.reset()
    sources = [torch.randn(4, 8, requires_grad=True) for _ in range(2)]
    query = torch.randn(8, requires_grad=True)
    want = functional.attn_res(sources, query)
    got = torch.compile(functional.attn_res, fullgraph=True)(sources, query)
    leaves, upstream = [*sources, query], torch.randn(4, 8)
    assert_all_close([got], [want.double()])
    assert_all_close(
        torch.autograd.grad(got, leaves, upstream), [x.double() for x in torch.autograd.grad(want, leaves, upstream)]
    )


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(
    ("dtype", "parameter_dtype", "out_dtype"),
    [
        (torch.float32, torch.float64, None),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float32, None),
        (torch.bfloat16, torch.float32, None),
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.float16, torch.float32, torch.bfloat16),
    ],
)
def test_dtypes_are_independent(name, dtype, parameter_dtype, out_dtype, backend):
    call = make_call(name, (3, 12), dtype=dtype, parameter_dtype=parameter_dtype, device=backend, sources=2, queries=2)
    call.named["out_dtype"] = out_dtype
    exact = call.widened()
    upstream = random_like(exact(reference))
    want, want_grads = differentiate(exact, reference, upstream)
    got, got_grads = differentiate(call, functional, upstream)
    assert got[0].dtype == (dtype if out_dtype is None else out_dtype)
    assert [g.dtype for g in got_grads] == [leaf.dtype for leaf in call.leaves]
    assert_all_close(got, want, 2e-5 + coarsest(got))
    assert_all_close(got_grads, want_grads, 2e-5 + 2 * coarsest([*got, *got_grads]))


@pytest.mark.parametrize("partial_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("update_dtype", [torch.float32, torch.bfloat16])
def test_a_merge_of_several_dtypes(partial_dtype, update_dtype, backend):
    """A float32 residual stream with bf16 sublayers, and any other mixture."""
    output, partial, update = (torch.randn(6, 16, device=backend) for _ in range(3))
    output = output.bfloat16().requires_grad_()
    partial, update = partial.to(partial_dtype).requires_grad_(), update.to(update_dtype).requires_grad_()
    lse, query = torch.randn(6, device=backend), torch.randn(16, device=backend)
    h, new = functional.attn_res_merge(output, lse, partial, query, update=update, out_dtype=torch.float32)
    want, want_new = reference.attn_res_merge(output, lse, partial, query, update=update, out_dtype=torch.float32)
    assert torch.equal(new, want_new)
    torch.testing.assert_close(h, want)
    leaves = (output, partial, update)
    got = torch.autograd.grad((h.sin().sum() + new.sum().float()), leaves)
    expected = torch.autograd.grad((want.sin().sum() + want_new.sum().float()), leaves)
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == e.dtype
        torch.testing.assert_close(g, e, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (1, 2)])
def test_gradients_through_some_outputs_alone(used, backend):
    call = make_call("attn_res", (3, 20), sources=3, device=backend)
    call.named |= {"return_lse": True, "return_weights": True}
    exact = call.widened()
    upstream = random_like(exact(reference))

    def grads(of, module):
        pairs = [(out, grad.to(out)) for out, grad in zip(of(module), upstream, strict=True)]
        outputs, chosen = zip(*(pairs[i] for i in used), strict=True)
        return torch.autograd.grad(outputs, of.leaves, chosen, allow_unused=True, materialize_grads=True)

    assert_all_close(grads(call, functional), grads(exact, reference))


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("kept", ["first source", "all but the first source", "parameters", "nothing"])
def test_only_what_needs_a_gradient_gets_one(name, kept, backend):
    call = make_call(name, (3, 20), sources=3, device=backend)
    leaves = call.leaves
    narrow = [leaf for leaf in leaves if leaf.dim() == 1 or leaf.shape[0] == 4]
    wanted = {
        "first source": leaves[:1],
        "all but the first source": leaves[1:],
        "parameters": narrow,
        "nothing": [],
    }[kept]
    exact = call.widened()
    upstream = random_like(exact(reference))
    _, want = differentiate(exact, reference, upstream)
    for leaf in leaves:
        leaf.requires_grad_(any(leaf is w for w in wanted))
    outputs = call(functional)
    assert outputs[0].requires_grad == bool(wanted)
    pairs = [(out, grad.to(out)) for out, grad in zip(outputs, upstream, strict=True) if out.requires_grad]
    if pairs:
        torch.autograd.backward(*zip(*pairs, strict=True))
    for leaf, expected in zip(leaves, want, strict=True):
        assert (leaf.grad is not None) == leaf.requires_grad
        if leaf.requires_grad:
            assert relative_error(leaf.grad, expected) <= 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_source_gives_zero_gradients_not_none(dtype, backend):
    call = make_call("attn_res", (7, 32), sources=1, dtype=dtype, device=backend, norm=False)
    sources, query, weight = call.positional
    upstream = torch.randn(7, 32, device=backend, dtype=dtype)
    out = functional.attn_res(sources, query, weight)
    assert torch.equal(out, sources[0])
    out.backward(upstream)
    assert torch.equal(query.grad, torch.zeros_like(query))
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert torch.equal(sources[0].grad, upstream)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_second_derivative_is_refused(name, backend):
    call = make_call(name, (3, 8), device=backend)
    grads = torch.autograd.grad(sum(out.sin().sum() for out in call(functional)), call.leaves, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"differentiated once.*blockres\.reference"):
        sum(g.square().sum() for g in grads).backward()


def chain(sources, queries, gain, chained):
    """Three blocks that read all earlier sources, with readers beside the chain; block 1 uses no output at all."""
    total = sources[0].sin().sum()
    for block, query in enumerate(queries):
        if chained:
            outputs, lse, sources = functional.attn_res_inter_chained(sources, query, norm_weight=gain)
        else:
            outputs, lse = functional.attn_res_inter(sources, query, norm_weight=gain)
        if block != 1:
            total = total + outputs[0].square().sum() + lse[2].sin().sum()
        sources = [*sources, (sources[-1] if block == 1 else outputs[1]) * 2]
    return total + functional.attn_res(sources, queries[0][0]).square().sum()


@pytest.mark.parametrize(
    ("mode", "needed"),
    [("eager", (True, True)), ("eager", (False, True)), ("eager", (False, False)), ("compiled", (False, True))],
)
def test_chained_sources_get_the_same_gradients(mode, needed, backend):
    start = [torch.randn(4, 12, device=backend).requires_grad_(flag) for flag in needed]
    queries = [torch.randn(3, 12, device=backend, requires_grad=True) for _ in range(3)]
    gain = torch.randn(12, device=backend, requires_grad=True)
    leaves = [x for x in [*start, *queries, gain] if x.requires_grad]
    unused = {"allow_unused": True, "materialize_grads": True}
    want = torch.autograd.grad(chain(start, queries, gain, chained=False), leaves, **unused)
    got = torch.autograd.grad(compiled(chain, mode)(start, queries, gain, True), leaves, **unused)
    assert_all_close(got, [w.double() for w in want])


class CountCalls(TorchDispatchMode):
    """How often each PyTorch operation is called."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("chained", [True, False])
def test_a_chain_spares_autograd_its_additions(chained, backend):
    """Four blocks and a last reader: without the chain autograd adds up five gradients of the source by itself."""
    source = torch.randn(4, 12, device=backend, requires_grad=True)
    passed, loss = [source], 0
    for _ in range(4):
        if chained:
            outputs, _, passed = functional.attn_res_inter_chained(passed, torch.randn(1, 12, device=backend))
        else:
            outputs, _ = functional.attn_res_inter(passed, torch.randn(1, 12, device=backend))
        loss = loss + outputs[0].sum()
    loss = loss + (2 * passed[0]).sum()
    with CountCalls() as count:
        loss.backward()
    assert count.calls[torch.ops.aten.add] + count.calls[torch.ops.aten.add_] == (0 if chained else 4)
    torch.testing.assert_close(source.grad, torch.full_like(source, 6.0))


def test_a_merge_passes_its_partial_through(backend):
    """Without an update the gradient that the partial gets later is added inside the merge."""
    call = make_call("attn_res_merge", (4, 12), device=backend, update=False)
    exact = call.widened()

    def twice(of, module):
        h, partial = of(module)
        g, last = module.attn_res_merge(*of.positional[:2], partial, of.positional[3], update=h)
        return torch.autograd.grad(h.sin().sum() + g.sin().sum() + last.square().sum(), of.leaves)

    assert call(functional)[1].data_ptr() == call.positional[2].data_ptr()
    assert_all_close(twice(call, functional), twice(exact, reference))


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_saved_for_backward(name, backend):
    """Inputs, the new partial sum, and a few numbers per token: nothing else of the size of a source."""
    call = make_call(name, (8, 256), device=backend)
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.setdefault(x.data_ptr(), x), lambda x: x):
        outputs = call(functional)
    for leaf in call.leaves:
        saved.pop(leaf.data_ptr(), None)
    if name == "attn_res_merge":
        del saved[outputs[1].data_ptr()]
    numbers = sum(x.numel() for x in saved.values())
    assert numbers <= 8 * {"attn_res": 1 + 2 * 3, "attn_res_inter": 4 + 4 * 3 + 3, "attn_res_merge": 2}[name]


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(name, reentrant, backend):
    call = make_call(name, (4, 12), device=backend)
    want = torch.autograd.grad(sum(out.sin().sum() for out in call(functional)), call.leaves)

    def segment(*leaves):
        return sum(out.sin().sum() for out in call.with_leaves(leaves)(functional))

    got = call.leaves
    checkpoint(segment, *got, use_reentrant=reentrant).backward()
    for leaf, expected in zip(got, want, strict=True):
        assert torch.equal(leaf.grad, expected)


@pytest.mark.parametrize("name", OPERATIONS)
def test_inference_and_autocast_leave_results_as_they_are(name, backend):
    call = make_call(name, (4, 12), device=backend)
    with torch.no_grad():
        want = call(functional)
    with torch.inference_mode():
        inferred = call.with_leaves([leaf.clone() for leaf in call.leaves])(functional)
    with torch.autocast(backend.type, dtype=torch.bfloat16):
        cast = call(functional)
        torch.autograd.grad(sum(out.sin().sum() for out in cast), call.leaves)
    for w, i, c in zip(want, inferred, cast, strict=True):
        assert torch.equal(w, i)
        assert torch.equal(w, c.detach())
        assert w.dtype == c.dtype


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("upstream", ["expanded", "transposed", "every other token", "one number"])
def test_upstream_gradients_of_any_layout(name, upstream, backend):
    call = make_call(name, (2, 3, 12), sources=2, queries=2, device=backend)
    outputs = call(functional)
    grads = []
    for out in outputs:
        dense = torch.randn(out.shape, device=backend)
        grads.append(
            {
                "expanded": dense[..., :1, :1].expand(out.shape),
                "transposed": dense.transpose(0, -1).contiguous().transpose(0, -1),
                "every other token": dense.repeat_interleave(2, dim=-2)[..., ::2, :],
                "one number": torch.tensor(0.5, device=backend).expand(out.shape),
            }[upstream]
        )
    got = torch.autograd.grad(outputs, call.leaves, grads)
    want = torch.autograd.grad(call(functional), call.leaves, [grad.contiguous() for grad in grads])
    assert_all_close(got, [w.double() for w in want], 1e-6)


def test_meta_tensors_have_the_shapes(backend):
    for name in OPERATIONS:
        call = make_call(name, (2, 3, 12), device=backend)
        meta = call.with_leaves([leaf.detach().to("meta").requires_grad_() for leaf in call.leaves])
        for real, fake in zip(call(functional), meta(functional), strict=True):
            assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())


def test_without_triton_the_error_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "blockres_kernels", None)
    with pytest.raises(
        RuntimeError, match=r"Triton kernels.*Install the version of triton.*move the tensors to the CPU"
    ):
        ops.kernels()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_and_unpacking(dtype, backend):
    tensors = [torch.randn(3, 5), torch.randn(2, 4).t(), torch.randn(0, 7), torch.randn(6).bfloat16(), torch.randn(())]
    tensors = [x.to(backend) for x in tensors]
    buffer = functional.pack(tensors, dtype)
    assert buffer.dtype == dtype
    assert torch.equal(buffer, torch.cat([x.to(dtype).flatten() for x in tensors]))
    parts = functional.unpack(buffer, [x.shape for x in tensors], [x.dtype for x in tensors])
    for part, tensor in zip(parts, tensors, strict=True):
        assert part.dtype == tensor.dtype
        assert torch.equal(part, tensor.to(dtype).to(tensor.dtype))
        if part.dtype == dtype and part.numel():
            assert part.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
