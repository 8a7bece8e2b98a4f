"""The residual stream against the definition, walked sublayer by sublayer with `blockres.reference`."""

import copy
import itertools
import pickle
import re

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from bench.live import LiveStorages
from blockres import reference
from blockres.modules import AttnRes, BlockAttnRes

DIM, TOKENS = 12, 5


def network(num_sublayers, sublayers_per_block, *, dtype=torch.float64, **options):
    """A residual with random parameters (zero queries would hide every mistake in a score), sublayers and norms."""
    residual = BlockAttnRes(DIM, num_sublayers, sublayers_per_block, dtype=dtype, **options)
    for parameter in residual.parameters():
        nn.init.normal_(parameter)
    sublayers = [nn.Linear(DIM, DIM, dtype=dtype) for _ in range(num_sublayers)]
    norms = [nn.RMSNorm(DIM, eps=1e-5, dtype=dtype) for _ in range(num_sublayers + 1)]
    for norm in norms:
        nn.init.normal_(norm.weight)
    return residual, sublayers, norms


def walk_definition(residual, sublayers, norms, embedding):
    """Section "Definitions" of the mathematics, one aggregation after the other; returns every aggregation's output."""
    size = residual.sublayers_per_block
    completed, partial, read = [embedding], None, []

    def aggregate(index):
        sources = completed if partial is None else [*completed, partial]
        parameters = residual.aggregations[str(index)]
        return reference.attn_res(
            sources,
            parameters.query,
            parameters.key_weight,
            norm_weight=norms[index].weight,
            norm_eps=norms[index].eps,
        )

    for index, sublayer in enumerate(sublayers):
        read.append(aggregate(index))
        update = sublayer(read[-1])
        partial = update if partial is None else partial + update
        if (index + 1) % size == 0:
            completed, partial = [*completed, partial], None
    return [*read, aggregate(len(sublayers))]


def run_stream(stream, sublayers, norms):
    read = []
    for sublayer, norm in zip(sublayers, norms, strict=True):
        read.append(stream.read(norm))
        stream.write(sublayer(read[-1]))
    return read


def assert_same_gradients(outputs, expected, inputs):
    weights = [torch.randn_like(out) for out in expected]
    got = torch.autograd.grad(outputs, inputs, weights, allow_unused=True, materialize_grads=True)
    want = torch.autograd.grad(expected, inputs, weights, allow_unused=True, materialize_grads=True)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("num_sublayers", "size"), [(1, 1), (5, 1), (6, 2), (7, 3), (8, 4), (4, 6), (3, 3)])
@pytest.mark.parametrize("key_weight", [True, False])
def test_stream_equals_the_definition(num_sublayers, size, key_weight):
    residual, sublayers, norms = network(num_sublayers, size, key_weight=key_weight)
    embedding = torch.randn(2, TOKENS, DIM, dtype=torch.float64, requires_grad=True)
    stream = residual.stream(embedding)
    got = run_stream(stream, sublayers, norms[:-1])
    got.append(stream.read(norms[-1]))
    expected = walk_definition(residual, sublayers, norms, embedding)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    modules = nn.ModuleList([residual, *sublayers, *norms])
    assert_same_gradients(got, expected, [embedding, *modules.parameters()])


@pytest.mark.parametrize("size", [1, 2, 3, 4, None])
@pytest.mark.parametrize("cuts", [[2, 3], [0, 5], [1, 1], [4, 7]])
def test_a_network_split_anywhere_is_the_same_network(size, cuts):
    num_sublayers = 7
    residual, sublayers, norms = network(num_sublayers, size)
    embedding = torch.randn(TOKENS, DIM, dtype=torch.float64, requires_grad=True)
    whole = residual.stream(embedding)
    expected = run_stream(whole, sublayers, norms[:-1])
    expected.append(whole.read(norms[-1]))

    bounds = [0, *cuts, num_sublayers]
    got, stream, parts = [], None, []
    for start, stop in itertools.pairwise(bounds):
        final = len(parts) == len(cuts)
        part = BlockAttnRes(DIM, num_sublayers, size, start=start, stop=stop, final=final, dtype=torch.float64)
        part.load_state_dict({name: residual.state_dict()[name] for name in part.state_dict()})
        parts.append(part)
        if stream is None:
            stream = part.stream(embedding)
        else:
            sources, partial = stream.state()
            stream = part.stream(sources=sources, partial=partial)
        got += run_stream(stream, sublayers[start:stop], norms[start:stop])
    got.append(stream.read(norms[-1]))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)

    names = [name for part in parts for name, _ in part.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in residual.named_parameters())
    own = [embedding, *(p for s in sublayers for p in s.parameters())]
    assert_same_gradients(got, expected, own)


def test_state_names_sources_and_partial():
    residual, _, _ = network(6, 2)
    stream = residual.stream(torch.randn(TOKENS, DIM, dtype=torch.float64))
    held = [(1, False)]
    for _ in range(6):
        stream.write(stream.read())
        sources, partial = stream.state()
        held.append((len(sources), partial is not None))
    assert held == [(1, False), (1, True), (2, False), (2, True), (3, False), (3, True), (4, False)]


def test_the_start_is_a_uniform_average():
    residual = BlockAttnRes(DIM, 4, 2)
    assert all((a.query == 0).all() and (a.key_weight == 1).all() for a in residual.aggregations.values())
    embedding, outputs = torch.randn(TOKENS, DIM), [torch.randn(TOKENS, DIM) for _ in range(4)]
    stream = residual.stream(embedding)
    torch.testing.assert_close(stream.read(), embedding)
    for update in outputs:
        stream.read()
        stream.write(update)
    blocks = [embedding, outputs[0] + outputs[1], outputs[2] + outputs[3]]
    torch.testing.assert_close(stream.read(), sum(blocks) / 3)


def test_weights_are_those_of_the_next_read():
    residual, sublayers, _ = network(5, 2)
    stream = residual.stream(torch.randn(TOKENS, DIM, dtype=torch.float64))
    for sublayer in sublayers:
        weights = stream.weights()
        sources, partial = stream.state()
        readable = torch.stack(sources if partial is None else (*sources, partial))
        read = stream.read()
        torch.testing.assert_close(torch.einsum("nt,ntd->td", weights, readable), read)
        stream.write(sublayer(read))


def test_standard_residual_has_no_parameters_and_adds():
    residual = BlockAttnRes(DIM, 3, None)
    assert not list(residual.parameters())
    x = torch.randn(TOKENS, DIM)
    norm = nn.RMSNorm(DIM, eps=1e-5)
    stream = residual.stream(x)
    for _ in range(3):
        torch.testing.assert_close(stream.read(norm), norm(x))
        x = x + norm(x)
        stream.write(stream.read(norm))
    torch.testing.assert_close(stream.read(), x)
    assert stream.state()[0] == ()


@pytest.mark.parametrize("size", [2, 3, None])
def test_float32_stream_with_bfloat16_sublayers(size):
    residual = BlockAttnRes(DIM, 5, size)
    norms = [nn.RMSNorm(DIM, eps=1e-6) for _ in range(5)]
    sublayers = [nn.Linear(DIM, DIM, dtype=torch.bfloat16) for _ in range(5)]
    stream = residual.stream(torch.randn(TOKENS, DIM, requires_grad=True))
    for sublayer, norm in zip(sublayers, norms, strict=True):
        read = stream.read(norm, out_dtype=torch.bfloat16)
        assert read.dtype == torch.bfloat16
        stream.write(sublayer(read))
    sources, partial = stream.state()
    assert all(t.dtype == torch.float32 for t in (*sources, *([] if partial is None else [partial])))
    stream.read().sum().backward()
    assert all(p.grad is not None for p in residual.parameters())


def step_gradients(residual, sublayers, norms, embedding):
    """The outputs of a forward and the gradients of everything, with fixed weights on the outputs."""
    stream = residual.stream(embedding)
    read = [*run_stream(stream, sublayers, norms[:-1]), stream.read(norms[-1])]
    parameters = [p for m in (residual, *sublayers, *norms) for p in m.parameters()]
    loss = sum((out * torch.linspace(-1, 1, DIM, dtype=out.dtype)).sum() for out in read)
    return read, torch.autograd.grad(loss, [embedding, *parameters])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_recomputing_phase_1_changes_no_bit(dtype):
    residual, sublayers, norms = network(11, 4, dtype=dtype)
    embedding = torch.randn(TOKENS, DIM, dtype=dtype, requires_grad=True)
    kept = step_gradients(residual, sublayers, norms, embedding)
    residual.recompute = True
    recomputed = step_gradients(residual, sublayers, norms, embedding)
    torch.testing.assert_close(recomputed, kept, rtol=0, atol=0)


def test_recomputing_leaves_activation_checkpointing_its_savings():
    """Hooks on saved tensors shadow each other: those that recompute phase 1 must hand on what is not theirs."""
    embedding = torch.randn(TOKENS, DIM, dtype=torch.float64, requires_grad=True)
    residual, sublayers, norms = network(8, 4)
    alive, gradients = [], []
    for residual.recompute in (False, True):
        with LiveStorages(lambda tensor: tensor.untyped_storage().nbytes() >= TOKENS * DIM * 8) as live:
            out = checkpoint(residual, embedding, sublayers, norms[:-1], use_reentrant=False)
            alive.append(live.count())
        gradients.append(torch.autograd.grad((out * out).sum(), [embedding, *residual.parameters()]))
    assert alive[0] == alive[1]
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.parametrize("recompute", [True, False])
def test_phase_1_outputs_are_kept_only_where_they_are_not_recomputed(recompute):
    residual, sublayers, norms = network(8, 4, recompute=recompute)
    embedding = torch.randn(TOKENS, DIM, dtype=torch.float64, requires_grad=True)
    stream, storages = residual.stream(embedding), []
    for position, (sublayer, norm) in enumerate(zip(sublayers, norms, strict=False)):
        stream.write(sublayer(stream.read(norm)))
        if position % 4 == 0:
            storages.append(StorageWeakRef(stream._phase1[position + 1][0].untyped_storage()))
    out = stream.read(norms[-1])
    assert [storage.expired() for storage in storages] == [recompute] * 2
    out.sum().backward()
    del stream, out
    assert all(storage.expired() for storage in storages)


def test_recomputed_outputs_are_let_go_with_their_block():
    residual, sublayers, norms = network(8, 4, recompute=True)
    embedding = torch.randn(TOKENS, DIM, dtype=torch.float64, requires_grad=True)
    stream = residual.stream(embedding)
    run_stream(stream, sublayers[:6], norms[:6])
    recomputed = stream._recomputed
    sources, partial = stream.state()
    held = []
    sources[0].register_hook(lambda _: held.append(recomputed._outputs is not None))
    embedding.register_hook(lambda _: held.append(recomputed._outputs is not None))
    partial.sum().backward()
    assert held == [True, False]  # sources[0] is what phase 1 passed on: its gradient comes before phase 1's backward
    assert recomputed._outputs is None


def test_recompute_says_that_it_does_not_compile():
    residual, sublayers, _ = network(4, 2, recompute=True)
    embedding = torch.randn(TOKENS, DIM, dtype=torch.float64, requires_grad=True)
    with pytest.raises(Exception, match="recompute=True works through hooks"):
        torch.compile(lambda x: residual(x, sublayers), fullgraph=True)(embedding)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_stream(dynamic):
    residual, sublayers, norms = network(7, 3)
    embedding = torch.randn(TOKENS, DIM, dtype=torch.float64, requires_grad=True)

    def run(x):
        return residual(x, sublayers, norms[:-1])

    inputs = [embedding, *residual.parameters()]
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    got, want = compiled(embedding), run(embedding)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert_same_gradients([got], [want], inputs)


def test_checkpointed_sublayers():
    residual, sublayers, norms = network(7, 3)
    embedding = torch.randn(TOKENS, DIM, dtype=torch.float64, requires_grad=True)
    plain = step_gradients(residual, sublayers, norms, embedding)
    checkpointed = [lambda x, f=f: checkpoint(f, x, use_reentrant=False) for f in sublayers]
    for recompute in (False, True):
        residual.recompute = recompute
        stream = residual.stream(embedding)
        read = [*run_stream(stream, checkpointed, norms[:-1]), stream.read(norms[-1])]
        loss = sum((out * torch.linspace(-1, 1, DIM, dtype=out.dtype)).sum() for out in read)
        parameters = [p for m in (residual, *sublayers, *norms) for p in m.parameters()]
        got = torch.autograd.grad(loss, [embedding, *parameters])
        torch.testing.assert_close(got, plain[1], rtol=1e-12, atol=1e-12)


def test_without_gradients_the_stream_reads_the_same():
    residual, sublayers, norms = network(9, 4)
    embedding = torch.randn(TOKENS, DIM, dtype=torch.float64)
    with_gradients = run_stream(residual.stream(embedding), sublayers, norms[:-1])
    with torch.no_grad():
        without = run_stream(residual.stream(embedding), sublayers, norms[:-1])
    with torch.inference_mode():
        inferred = run_stream(residual.stream(embedding), sublayers, norms[:-1])
    torch.testing.assert_close(without, with_gradients, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(inferred, with_gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("frozen", [1, 3, 4, 5, 8])
def test_gradients_that_are_turned_on_within_a_block(frozen, recompute):
    """The lowest sublayers run without gradients; what is trained is as if the frozen part's outputs were given."""
    residual, sublayers, norms = network(9, 4, recompute=recompute)
    embedding = torch.randn(TOKENS, DIM, dtype=torch.float64)
    stream = residual.stream(embedding)
    with torch.no_grad():
        run_stream(stream, sublayers[:frozen], norms[:frozen])
        if frozen % 4:
            stream.read(norms[frozen])  # opens phase 1 for a read that is trained, too
        sources, partial = stream.state()
    got = run_rest(stream, sublayers[frozen:], norms[frozen:])
    rebuilt = BlockAttnRes(DIM, 9, 4, start=frozen, stop=9, dtype=torch.float64)
    rebuilt.aggregations.update({name: residual.aggregations[name] for name in rebuilt.aggregations})
    want = run_rest(rebuilt.stream(sources=sources, partial=partial), sublayers[frozen:], norms[frozen:])
    assert_same_gradients([got], [want], list(rebuilt.parameters()))


def run_rest(stream, sublayers, norms):
    run_stream(stream, sublayers, norms[:-1])
    return stream.read(norms[-1])


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_to_the_other_half_changes_nothing(half):
    residual = BlockAttnRes(8, 5, 2, dtype=half)
    embedding = torch.randn(3, 8).to(half)
    want = residual(embedding, [torch.tanh] * 5)
    other = torch.float16 if half == torch.bfloat16 else torch.bfloat16
    with torch.autocast("cpu", other):
        assert torch.equal(residual(embedding, [torch.tanh] * 5), want)


@pytest.mark.parametrize("gradients", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_tensors_without_data(gradients):
    for without_data in (FakeTensorMode(), torch.device("meta")):
        with without_data, gradients():
            residual = BlockAttnRes(8, 5, 2)
            out = residual(torch.randn(3, 8), [torch.tanh] * 5)
            assert out.shape == (3, 8)
            if gradients is torch.enable_grad:
                out.sum().backward()
                assert residual.aggregations["3"].query.grad.shape == (8,)


def test_hooks_on_calls_that_a_stream_does_not_make_are_refused():
    for register in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        residual = BlockAttnRes(8, 2, 2)
        getattr(residual.aggregations["1"], f"register_{register}")(lambda *_: None)
        with pytest.raises(ValueError, match="aggregation 1 has hooks"):
            residual.stream(torch.ones(1, 8))


def test_a_frozen_embedding_costs_no_stack_of_gradients():
    residual, _, norms = network(4, 4)
    stream = residual.stream(torch.randn(TOKENS, DIM, dtype=torch.float64))
    assert stream.read(norms[0]).grad_fn.name() == "ChainedInterBackward"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1, 2, None])
def test_a_norm_without_eps_has_the_eps_that_it_has_alone(dtype, size):
    x = 1e-3 * torch.randn(TOKENS, 64, dtype=dtype)
    norm = nn.RMSNorm(64, dtype=dtype)
    fused = BlockAttnRes(64, 2, size, dtype=dtype).stream(x).read(norm)
    torch.testing.assert_close(fused, norm(x))


@pytest.mark.parametrize("size", [2, None])
def test_a_norm_is_rounded_once(size):
    x = torch.randn(TOKENS, DIM, dtype=torch.bfloat16)
    norm = nn.RMSNorm(DIM, eps=1e-6)
    nn.init.normal_(norm.weight)
    fused = BlockAttnRes(DIM, 2, size).stream(x).read(norm, out_dtype=torch.float32)
    torch.testing.assert_close(fused, norm(x.float()), rtol=1e-6, atol=1e-6)


def test_a_second_read_may_ask_for_another_norm():
    residual, sublayers, norms = network(6, 3)
    stream = residual.stream(torch.randn(TOKENS, DIM, dtype=torch.float64))
    for sublayer, norm in zip(sublayers, norms, strict=False):
        plain = stream.read()
        torch.testing.assert_close(stream.read(norm), norm(plain))
        torch.testing.assert_close(stream.read(), plain)
        stream.write(sublayer(plain))


@pytest.mark.parametrize("size", [1, 2, None])
def test_modules_copy_and_pickle(size):
    residual, sublayers, _ = network(4, size)
    x = torch.randn(TOKENS, DIM, dtype=torch.float64)
    expected = residual(x, sublayers)
    for twin in (copy.deepcopy(residual), pickle.loads(pickle.dumps(residual))):
        torch.testing.assert_close(twin(x, sublayers), expected, rtol=0, atol=0)


def test_forward_with_norms_is_the_stream_with_norms():
    residual, sublayers, norms = network(4, 2)
    x = torch.randn(TOKENS, DIM, dtype=torch.float64)
    stream = residual.stream(x)
    run_stream(stream, sublayers, norms[:-1])
    torch.testing.assert_close(residual(x, sublayers, norms[:-1]), stream.read(), rtol=0, atol=0)


def watched(module):
    module.register_full_backward_hook(lambda *_: None)
    return module


def hooked(module):
    module.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: BlockAttnRes(8, 4, 0), "sublayers_per_block must be at least 1"),
        (lambda: BlockAttnRes(0, 4, 2), "dim and num_sublayers must be at least 1"),
        (lambda: BlockAttnRes(8, 4, 2, start=3, stop=2), "start=3, stop=2"),
        (lambda: BlockAttnRes(8, 4, 2, stop=5), "stop=5"),
        (lambda: BlockAttnRes(8, 4, 2, stop=3, final=True), "final=True with stop=3"),
        (lambda: BlockAttnRes(8, 4, 2).stream(), "either the embedding, or the sources"),
        (lambda: BlockAttnRes(8, 4, None).stream(torch.ones(8), partial=torch.ones(8)), "either the embedding, or"),
        (lambda: AttnRes(8)([]), "at least one source"),
        (lambda: BlockAttnRes(8, 4, 2, start=3).stream(torch.ones(1, 8)), "2 sources and a partial, got 1 and no"),
        (lambda: BlockAttnRes(8, 4, None).stream(sources=[torch.ones(1, 8)]), "standard residual stream is rebuilt"),
        (lambda: BlockAttnRes(8, 4, 2)(torch.ones(1, 8), [nn.Identity()] * 3), "has 4 sublayers, got 3"),
        (lambda: BlockAttnRes(8, 4, 2)(torch.ones(1, 8), [nn.Identity()] * 5), "all of its sublayers"),
        (lambda: BlockAttnRes(8, 4, 2).stream(torch.ones(1, 8)).write(torch.ones(2, 8)), r"wrote \(2, 8\)"),
        (lambda: AttnRes(0), "dim must be at least 1 and at most 16384, got 0"),
        (lambda: BlockAttnRes(16385, 4, 2), "at most 16384, got 16385"),
        (lambda: BlockAttnRes(8, 4, 2, eps=-1.0), "eps must be a positive number, got -1.0"),
        (lambda: AttnRes(8, scale=float("nan")), "scale must be a finite number, got nan"),
        (lambda: AttnRes(8)([torch.ones(1, 8)], norm=hooked(nn.RMSNorm(8))), "has hooks"),
        (lambda: AttnRes(8)([torch.ones(1, 8)], norm=watched(nn.RMSNorm(8))), "has hooks"),
        (
            lambda: BlockAttnRes(8, 2, 2).apply(hooked).stream(torch.ones(1, 8)).read(),
            "aggregation 0 has hooks",
        ),
        (
            lambda: BlockAttnRes(8, 4, 2)(torch.ones(1, 8), [nn.Identity()] * 4, [None] * 3),
            "got 4 sublayers and 3 norms",
        ),
        (
            lambda: BlockAttnRes(8, 4, None)(torch.ones(1, 8), [nn.Identity()] * 4, [None] * 5),
            "got 4 sublayers and 5 norms",
        ),
        (lambda: AttnRes(8)([torch.ones(1, 8)], norm=nn.RMSNorm(4)), r"has a weight \[8\]"),
        (lambda: AttnRes(8)([torch.ones(1, 8)], norm=nn.RMSNorm(8, elementwise_affine=False)), r"has a weight \[8\]"),
    ],
)
def test_mistakes_are_explained(act, message):
    with pytest.raises(ValueError, match=message):
        act()


@pytest.mark.parametrize("size", [2.5, 4.0, "4", True, torch.ones(())], ids=str)
@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("dim", AttnRes),
        ("dim", lambda size: BlockAttnRes(size, 8, 2)),
        ("num_sublayers", lambda size: BlockAttnRes(8, size, 2)),
        ("sublayers_per_block", lambda size: BlockAttnRes(8, 8, size)),
        ("start", lambda size: BlockAttnRes(8, 8, 2, start=size)),
        ("stop", lambda size: BlockAttnRes(8, 8, 2, stop=size)),
        ("max_tokens", lambda size: BlockAttnRes(8, 8, 2).bank(size)),
    ],
)
def test_sizes_are_integers(name, build, size):
    with pytest.raises(TypeError, match=f"{name} must be an integer, got {re.escape(repr(size))}"):
        build(size)


@pytest.fixture(params=[(2, False), (2, True), (None, False)], ids=["training", "inference", "standard"])
def any_residual(request):
    """A residual of width 8, with streams of each kind."""
    size, infers = request.param
    with torch.inference_mode(infers):
        yield BlockAttnRes(8, 4, size)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (
            (torch.ones(1, 8), None),
            r"sublayer 1 wrote a tuple; a tensor \[\.\.\., 8\] .* \(write its first element\?\)",
        ),
        ([torch.ones(1, 8)], r"wrote a list; .* \(write its first element\?\)"),
        (None, "wrote None; .* is expected$"),
        (3, "wrote an int; .* is expected$"),
        (torch.ones(1, 8, dtype=torch.complex64), "wrote torch.complex64; updates are floating point numbers"),
    ],
)
def test_what_is_written_is_a_tensor(any_residual, update, message):
    stream = any_residual.stream(torch.ones(1, 8))
    stream.write(stream.read())
    with pytest.raises(TypeError, match=message):
        stream.write(update)
    stream.write(stream.read())
    assert stream.position == 2


@pytest.mark.parametrize(
    ("embedding", "error", "message"),
    [
        ([torch.ones(1, 8)], TypeError, r"the embedding must be a tensor \[\.\.\., 8\], got a list"),
        (torch.ones(1, 8, dtype=torch.long), TypeError, "the embedding must be one of float32.*got torch.int64"),
        (torch.ones(2, 9), ValueError, r"the embedding must be \[\.\.\., 8\].*got shape \(2, 9\)"),
        (torch.ones(2, 1), ValueError, r"got shape \(2, 1\)"),
        (torch.ones(()), ValueError, r"got shape \(\)"),
    ],
)
def test_a_stream_is_opened_with_rows_of_its_width(any_residual, embedding, error, message):
    with pytest.raises(error, match=message):
        any_residual.stream(embedding)


@pytest.mark.parametrize("size", [2, None])
def test_a_stream_is_rebuilt_from_rows_of_its_width(size):
    part = BlockAttnRes(8, 4, size, start=1)
    right, wrong = torch.ones(1, 8), torch.ones(1, 9)
    sources = [] if size is None else [right]
    with pytest.raises(ValueError, match=r"the partial sum must be \[\.\.\., 8\].*got shape \(1, 9\)"):
        part.stream(sources=sources, partial=wrong)
    with pytest.raises(TypeError, match=r"sources must be a sequence of tensors.*got one tensor"):
        part.stream(sources=right[None], partial=right)
    with pytest.raises(TypeError, match="the partial sum must be a tensor"):
        part.stream(sources=sources, partial=[right])
    with pytest.raises(ValueError, match=r"source 0 must be \[\.\.\., 8\]"):
        part.stream(sources=[wrong], partial=right)
    if sources:
        with pytest.raises(ValueError, match=r"the partial sum is torch.float64, source 0 is torch.float32"):
            part.stream(sources=sources, partial=right.double())


class Doubled(nn.RMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (nn.LayerNorm(8), "LayerNorm"),
        (Doubled(8), "got Doubled; apply any other norm to what read"),
        ((torch.ones(8), 1e-6, 1), r"a norm as a tuple is \(weight \[8\], eps\), got \(a Tensor, a float, an int\)"),
        ((None, 1e-6), r"got \(None, a float\)"),
    ],
)
@pytest.mark.parametrize("size", [2, None])
def test_another_norm_is_refused(size, norm, message):
    with pytest.raises(TypeError, match=message):
        BlockAttnRes(8, 4, size).stream(torch.ones(1, 8)).read(norm)


def test_recomputing_from_copies_that_hooks_on_saved_tensors_keep():
    """Copies have versions of their own: sources that were written in place before the forward are no mistake."""
    residual, embedding = BlockAttnRes(8, 6, 3, recompute=True), torch.zeros(3, 8)
    update = torch.randn(3, 8, requires_grad=True)
    gradients = []
    for pack in (lambda x: x, lambda x: x.clone()):
        embedding.copy_(torch.ones(3, 8))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            stream = residual.stream(embedding)
            stream.read()
            stream.write(update)
            gradients.append(torch.autograd.grad(stream.read().square().sum(), update)[0])
    assert torch.equal(*gradients)


@pytest.mark.parametrize("infers", [False, True])
def test_an_update_that_cannot_be_read_in_place_leaves_the_stream_as_it_was(infers):
    with torch.inference_mode(infers):
        stream = BlockAttnRes(8, 4, 4).stream(torch.ones(3, 8))
        for _ in range(2):
            stream.write(stream.read())
        with pytest.raises(ValueError, match="what sublayer 2 wrote must be contiguous"):
            stream.write(torch.ones(8, 3).t())
        stream.write(torch.ones(3, 8))
        assert stream.position == 3
        assert torch.equal(stream.state()[1], torch.full((3, 8), 3.0))


def test_the_aggregations_of_a_block_compute_alike():
    residual = BlockAttnRes(8, 4, 4)
    residual.aggregation(1).scale = 3.0
    with pytest.raises(ValueError, match=r"one eps, one scale.*scale=1.0.*scale=3.0|scale=3.0.*scale=1.0"):
        residual.stream(torch.ones(1, 8)).read()


def test_sources_that_were_changed_are_not_recomputed_from():
    residual = BlockAttnRes(8, 6, 3, recompute=True)
    embedding, update = torch.randn(3, 8), torch.randn(3, 8, requires_grad=True)
    stream = residual.stream(embedding)
    stream.read()
    stream.write(update)
    h = stream.read()
    embedding.mul_(5)
    with pytest.raises(RuntimeError, match="has been changed in place since the forward"):
        torch.autograd.grad(h.sum(), update)


def test_a_part_without_the_next_aggregation_says_who_has_it():
    residual = BlockAttnRes(8, 4, 2, stop=2)
    stream = residual.stream(torch.ones(1, 8))
    for _ in range(2):
        stream.write(stream.read())
    with pytest.raises(ValueError, match="does not own aggregation 2"):
        stream.read()
