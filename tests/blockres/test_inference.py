"""The inference stream against the definition and against training's: values, memory, launches, lifetimes."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

from bench.interpreter import count_traffic
from bench.live import LiveStorages, of_size
from blockres import functional, ops, reference
from blockres.inference import InferenceStream
from blockres.modules import BlockAttnRes
from blockres.streams import BlockStream, StandardStream
from tests.support.memory import Allocations
from tests.support.numerics import assert_rounded_once, relative_error

DIM, TOKENS = 12, 5
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="launches are counted by the interpreter")


@pytest.fixture
def inference():
    with torch.inference_mode():
        yield


def network(num_sublayers, sublayers_per_block, *, dim=DIM, dtype=FP64, device="cpu", **options):
    """A residual with random parameters, sublayers, and a norm for every aggregation."""
    residual = BlockAttnRes(dim, num_sublayers, sublayers_per_block, dtype=dtype, device=device, **options)
    for parameter in residual.parameters():
        nn.init.normal_(parameter, std=dim**-0.5)
    sublayers = [nn.Linear(dim, dim, dtype=dtype, device=device) for _ in range(num_sublayers)]
    norms = [nn.RMSNorm(dim, eps=1e-5, dtype=dtype, device=device) for _ in range(num_sublayers + 1)]
    for norm in norms:
        nn.init.normal_(norm.weight, mean=1.0, std=0.3)
    return residual, sublayers, norms


def run(stream, sublayers, norms, out_dtype=None):
    """Everything that is read, as copies; the last norm, where there is one more, is for the output state."""
    read = []
    for sublayer, norm in zip(sublayers, norms, strict=False):
        state = stream.read(norm, out_dtype)
        read.append(state.clone())
        stream.write(sublayer(state))
    if len(norms) > len(sublayers):
        read.append(stream.read(norms[-1], out_dtype).clone())
    return read


def sources_at(residual, position, embedding, updates):
    """What sublayer `position` reads, rounded as the stream rounds it."""
    sources, size = [embedding], residual.sublayers_per_block
    for start in range(0, position, size):
        total = updates[start].to(embedding.dtype)
        for update in updates[start + 1 : min(start + size, position)]:
            total = (total.double() + update.double()).to(embedding.dtype)
        sources.append(total)
    return sources


def definition(residual, position, embedding, updates, norm):
    sources = [x.cpu().double() for x in sources_at(residual, position, embedding, updates)]
    aggregation = residual.aggregations[str(position)]
    named = {} if norm is None else {"norm_weight": norm.weight.detach().cpu().double(), "norm_eps": norm.eps}
    query, key_weight = (x.detach().cpu().double() for x in (aggregation.query, aggregation.key_weight))
    return reference.attn_res(sources, query, key_weight, **named)


CASES = [
    (FP64, FP64, (2, 3, 1)),
    (FP32, FP32, (7, 96)),
    (BF16, BF16, (3, 100)),
    (FP32, BF16, (1, 96)),
]


@pytest.mark.parametrize(
    ("size", "fused", "in_bank"), [(1, True, False), (2, False, True), (3, True, True), (7, False, False)]
)
@pytest.mark.parametrize(("stream_dtype", "narrow", "shape"), CASES)
def test_reads_are_what_the_definition_says(stream_dtype, narrow, shape, size, fused, in_bank, backend, inference):
    """Updates that do not depend on what was read, so that each read is held to one rounding."""
    residual, _, norms = network(7, size, dim=shape[-1], dtype=FP32, device=backend)
    embedding = torch.randn(shape, device=backend).to(stream_dtype)
    updates = [torch.randn(shape, device=backend).to(narrow) for _ in range(7)]
    bank = residual.bank(8, dtype=stream_dtype) if in_bank else None
    stream = residual.stream(embedding, bank=bank)
    for position in range(8):
        norm = norms[position] if fused else None
        read = stream.read(norm, narrow)
        exact = definition(residual, position, embedding, updates, norm)
        assert read.dtype == narrow
        if narrow == BF16:
            assert_rounded_once(read, exact)
        else:
            assert relative_error(read.cpu(), exact) <= (1e-12 if narrow == FP64 else 2e-6)
        if position < 7:
            stream.write(updates[position])


@pytest.mark.parametrize("in_bank", [False, True])
@pytest.mark.parametrize(("num_sublayers", "size"), [(1, 1), (5, 1), (6, 2), (7, 3), (8, 4), (4, 6)])
def test_a_network_computes_what_it_does_in_training(num_sublayers, size, in_bank):
    residual, sublayers, norms = network(num_sublayers, size)
    embedding = torch.randn(2, TOKENS, DIM, dtype=FP64)
    expected = run(residual.stream(embedding), sublayers, norms)
    with torch.inference_mode():
        bank = residual.bank(2 * TOKENS) if in_bank else None
        got = run(residual.stream(embedding, bank=bank), sublayers, norms)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("cuts", [[2, 3], [0, 5], [1, 1], [4, 7]])
def test_a_network_split_anywhere_is_the_same_network(size, cuts):
    num_sublayers = 7
    residual, sublayers, norms = network(num_sublayers, size)
    embedding = torch.randn(TOKENS, DIM, dtype=FP64)
    expected = run(residual.stream(embedding), sublayers, norms)
    got, stream = [], None
    with torch.inference_mode():
        for start, stop in itertools.pairwise([0, *cuts, num_sublayers]):
            final = stop == num_sublayers and start == cuts[-1]
            part = BlockAttnRes(DIM, num_sublayers, size, start=start, stop=stop, final=final, dtype=FP64)
            part.load_state_dict({name: residual.state_dict()[name] for name in part.state_dict()})
            if stream is None:
                stream = part.stream(embedding)
            else:
                sources, partial = stream.state()
                before = [x.clone() for x in (*sources, partial) if x is not None]
                stream = part.stream(sources=sources, partial=partial)
            got += run(stream, sublayers[start:stop], norms[start : stop + final])
            if start > 0:
                after = [x for x in (*sources, partial) if x is not None]
                assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))  # what came in is only read
                assert all(x is y for x, y in zip(stream.state()[0], sources, strict=False))
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


def test_more_sources_than_a_table_of_pointers_would_hold(backend, inference):
    residual, _, norms = network(40, 1, dtype=FP32, device=backend)
    embedding, *updates = torch.randn(41, 2, DIM, device=backend).unbind(0)
    stream = residual.stream(embedding)
    for update in updates:
        stream.write(update)
    assert relative_error(stream.read(norms[0]).cpu(), definition(residual, 40, embedding, updates, norms[0])) <= 2e-6
    assert stream._memory.slots.shape[0] == 41


@pytest.mark.parametrize("in_bank", [False, True])
def test_no_tokens(in_bank, backend, inference):
    residual, sublayers, norms = network(5, 2, device=backend)
    bank = residual.bank(4) if in_bank else None
    read = run(residual.stream(torch.randn(2, 0, DIM, dtype=FP64, device=backend), bank=bank), sublayers, norms)
    assert all(x.shape == (2, 0, DIM) for x in read)


def test_a_nan_stays_in_its_token(backend, inference):
    residual, sublayers, norms = network(5, 2, device=backend)
    embedding = torch.randn(TOKENS, DIM, dtype=FP64, device=backend)
    clean = run(residual.stream(embedding), sublayers, norms)
    embedding[3, 1] = torch.nan
    dirty = run(residual.stream(embedding), sublayers, norms)
    others = [0, 1, 2, 4]
    for x, y in zip(clean, dirty, strict=True):
        assert y[3].isnan().all()
        assert torch.equal(x[others], y[others])


@interpreted
@pytest.mark.parametrize("in_bank", [False, True])
@pytest.mark.parametrize("size", [1, 2, 6])
def test_one_launch_for_each_sublayer(size, in_bank, inference, monkeypatch):
    monkeypatch.setattr(ops, "cpu", ops.kernels())
    residual, _, norms = network(6, size, dtype=BF16)
    x = torch.randn(2, DIM, dtype=BF16)
    stream = residual.stream(x, bank=residual.bank(2) if in_bank else None)
    for position in range(7):
        with count_traffic() as traffic:
            stream.read(norms[position])
        assert [launch.kernel for launch in traffic.launches] == ["_attn_res_step"]
        if position < 6:
            with count_traffic() as traffic:
                stream.write(x)
            assert traffic.launches == []


@pytest.mark.parametrize("guard", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_nothing_is_allocated_on_a_bank(size, guard):
    """And everything lies where it lay before, which a CUDA graph relies on."""
    residual, _, norms = network(6, size, dtype=FP32)
    bank, addresses = residual.bank(8), []
    with guard():
        for _ in range(2):
            x = torch.randn(8, DIM)
            with Allocations() as made:
                stream, read = residual.stream(x, bank=bank), []
                for norm in norms[:-1]:
                    read.append(stream.read(norm))
                    stream.write(read[-1])
                read.append(stream.read(norms[-1]))
            assert not any(made.elements)
            addresses.append([x.data_ptr() for x in read])
    assert addresses[0] == addresses[1]
    assert len(set(addresses[0])) == 2


@pytest.mark.parametrize("size", [1, 8, 32])
def test_beside_the_bank_only_what_is_at_work_is_alive(size, inference):
    """The embedding, an input, an update, and the running sum before and after it: no outputs of a phase 1."""
    residual, _, norms = network(32, size)
    with LiveStorages(of_size(TOKENS * DIM * 8)) as live:
        stream = residual.stream(torch.randn(TOKENS, DIM, dtype=FP64))
        for norm in norms[:-1]:
            stream.write(2 * stream.read(norm))
        stream.read(norms[-1])
    assert live.peak <= 5


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_sublayer_may_return_its_input(size, backend, inference):
    residual, _, norms = network(5, size, device=backend)
    x = torch.randn(TOKENS, DIM, dtype=FP64, device=backend)
    given = [run(residual.stream(x, bank=bank), [nn.Identity()] * 5, norms) for bank in (None, residual.bank(TOKENS))]
    torch.testing.assert_close(given[1], given[0], rtol=0, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_of_decoding_is_captured_in_a_graph():
    residual, sublayers, norms = network(7, 3, dtype=BF16, device="cuda")
    bank, x = residual.bank(4), torch.randn(4, DIM, dtype=BF16, device="cuda")

    def step():
        stream = residual.stream(x, bank=bank)
        for sublayer, norm in zip(sublayers, norms, strict=False):
            stream.write(sublayer(stream.read(norm)))
        return stream.read(norms[-1])

    with torch.inference_mode():
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        x.copy_(torch.randn_like(x))
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, step())


@pytest.mark.parametrize("shape", [(1,), (2, 3), (8,), (2, 2, 2)])
def test_any_number_of_tokens_fits_into_a_larger_bank(shape, inference):
    residual, sublayers, norms = network(5, 2)
    bank = residual.bank(8)
    x = torch.randn(*shape, DIM, dtype=FP64)
    expected = run(residual.stream(x), sublayers, norms)
    torch.testing.assert_close(run(residual.stream(x, bank=bank), sublayers, norms), expected, rtol=0, atol=0)


def test_a_prompt_in_chunks_is_the_same_prompt(inference):
    residual, sublayers, norms = network(7, 3)
    prompt, bank = torch.randn(2, 23, DIM, dtype=FP64), residual.bank(2 * 5)
    whole = run(residual.stream(prompt), sublayers, norms)[-1]
    chunks = [run(residual.stream(x, bank=bank), sublayers, norms)[-1] for x in prompt.split(5, 1)]
    torch.testing.assert_close(torch.cat(chunks, 1), whole, rtol=1e-12, atol=1e-12)  # sublayers see other shapes


def test_what_was_read_without_a_bank_stays_as_it_was(inference):
    residual, sublayers, norms = network(6, 3)
    stream = residual.stream(torch.randn(TOKENS, DIM, dtype=FP64))
    kept = []
    for sublayer, norm in zip(sublayers, norms, strict=False):
        state = stream.read(norm)
        sources, partial = stream.state()
        held = [state, *sources, *([] if partial is None else [partial])]
        kept.append([(x, x.clone()) for x in held])
        stream.write(sublayer(state))
    stream.read()
    assert all(torch.equal(x, then) for held in kept for x, then in held)


def test_a_stream_that_is_held_reads_the_same_after_another_has_gone_on(inference):
    """Recorded hidden states are streams that are read later; what goes on from one must not reach the others."""
    residual, sublayers, _ = network(6, 2)
    stream = residual.stream(torch.randn(TOKENS, DIM, dtype=FP64))
    held, expected = [], []
    for sublayer in sublayers:
        twin = copy.copy(stream)
        expected.append(stream.read())
        held.append(twin)
        stream.write(sublayer(expected[-1]))
    for twin, then in zip(held, expected, strict=True):
        torch.testing.assert_close(twin.read(), then, rtol=0, atol=0)
    end = stream.read().clone()
    for position, twin in enumerate(held):  # each now writes a block of its own where the first one wrote
        for _ in range(position, 6):
            twin.write(torch.ones(TOKENS, DIM, dtype=FP64))
        twin.read()
    torch.testing.assert_close(stream.read(), end, rtol=0, atol=0)


@pytest.mark.parametrize("in_bank", [False, True])
def test_weights_state_and_second_reads(in_bank, inference):
    residual, sublayers, norms = network(7, 3)
    embedding = torch.randn(TOKENS, DIM, dtype=FP64)
    stream = residual.stream(embedding, bank=residual.bank(TOKENS) if in_bank else None)
    held = []
    for position in range(8):
        weights = stream.weights()
        sources, partial = stream.state()
        held.append((len(sources), partial is not None))
        readable = torch.stack(sources if partial is None else (*sources, partial))
        plain = stream.read().clone()
        torch.testing.assert_close(torch.einsum("nt,ntd->td", weights, readable), plain)
        torch.testing.assert_close(stream.read(norms[position]), norms[position](plain))
        torch.testing.assert_close(stream.read(), plain, rtol=0, atol=0)
        if position < 7:
            stream.write(sublayers[position](plain))
    assert held == [(1, False), (1, True), (1, True), (2, False), (2, True), (2, True), (3, False), (3, True)]
    assert sources[0] is embedding


def test_writes_without_reads_between_them(inference):
    residual, _, _ = network(7, 3)
    embedding, *updates = torch.randn(8, TOKENS, DIM, dtype=FP64).unbind(0)
    for bank in (None, residual.bank(TOKENS)):
        stream = residual.stream(embedding, bank=bank)
        for update in updates:
            stream.write(update)
        exact = definition(residual, 7, embedding, updates, None)
        torch.testing.assert_close(stream.read(), exact, rtol=1e-12, atol=1e-12)


def test_which_stream_is_opened_when():
    residual, x = BlockAttnRes(DIM, 4, 2), torch.randn(TOKENS, DIM)
    bank = residual.bank(TOKENS)
    assert type(residual.stream(x)) is BlockStream
    with torch.no_grad():
        assert type(residual.stream(x)) is BlockStream
        assert type(residual.stream(x, bank=bank)) is InferenceStream
    with torch.inference_mode():
        assert type(residual.stream(x)) is InferenceStream
        assert type(BlockAttnRes(DIM, 4, None).stream(x)) is StandardStream
        with torch.no_grad():
            assert type(residual.stream(x)) is InferenceStream
        with torch.enable_grad():
            assert type(residual.stream(x)) is BlockStream


def test_the_standard_residual_runs_under_inference_mode(inference):
    residual, sublayers, norms = network(3, None)
    x = torch.randn(TOKENS, DIM, dtype=FP64)
    read = run(residual.stream(x), sublayers, norms)
    for sublayer, norm, state in zip(sublayers, norms, read, strict=False):
        torch.testing.assert_close(state, norm(x))
        x = x + sublayer(state)
    torch.testing.assert_close(read[-1], norms[-1](x))


@pytest.mark.parametrize("in_bank", [False, True])
@pytest.mark.parametrize("guard", [torch.inference_mode, torch.no_grad])
def test_compiled(guard, in_bank):
    residual, sublayers, norms = network(3, 2)

    def forward(x, bank):
        stream = residual.stream(x, bank=bank)
        for sublayer, norm in zip(sublayers, norms, strict=False):
            stream.write(sublayer(stream.read(norm)))
        return stream.read(norms[-1]).clone()

    torch.compiler.reset()
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    with guard():
        bank = residual.bank(8) if in_bank else None
        for tokens in (5, 3, 4):  # from the second on, for any number of tokens
            x = torch.randn(tokens, DIM, dtype=FP64)
            torch.testing.assert_close(compiled(x, bank), forward(x, bank), rtol=1e-12, atol=1e-12)


def test_modules_copy_save_and_pickle_as_before(inference):
    residual, sublayers, norms = network(4, 2)
    names, bank = list(residual.state_dict()), residual.bank(TOKENS)
    x = torch.randn(TOKENS, DIM, dtype=FP64)
    expected = run(residual.stream(x, bank=bank), sublayers, norms)
    assert list(residual.state_dict()) == names
    for twin in (copy.deepcopy(residual), pickle.loads(pickle.dumps(residual))):
        torch.testing.assert_close(run(twin.stream(x), sublayers, norms), expected, rtol=0, atol=0)


def test_a_bank_made_under_inference_mode_serves_outside_of_it():
    residual, sublayers, norms = network(4, 2)
    x = torch.randn(TOKENS, DIM, dtype=FP64)
    with torch.inference_mode():
        bank = residual.bank(TOKENS)
        expected = run(residual.stream(x, bank=bank), sublayers, norms)
    with torch.no_grad():
        torch.testing.assert_close(run(residual.stream(x, bank=bank), sublayers, norms), expected, rtol=0, atol=0)


def test_a_bank_has_the_size_that_a_part_needs():
    assert BlockAttnRes(8, 7, 3).bank(5).slots.shape == (4, 5, 8)
    assert BlockAttnRes(8, 7, 3, start=1, stop=4).bank(5).slots.shape == (3, 5, 8)
    assert BlockAttnRes(8, 7, 1, dtype=BF16).bank(5).slots.dtype == BF16
    assert BlockAttnRes(8, 7, 1).bank(5, dtype=BF16).max_tokens == 5


SMALL = BlockAttnRes(8, 4, 2)


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda: SMALL.bank(0), ValueError, "max_tokens must be at least 1, got 0"),
        (lambda: BlockAttnRes(8, 4, None).bank(3), ValueError, "needs no bank"),
        (lambda: BlockAttnRes(8, 4, None).stream(torch.ones(8), bank=SMALL.bank(1)), ValueError, "takes no bank"),
        (
            lambda: SMALL.stream(torch.ones(3, 8), bank=SMALL.bank(2)),
            ValueError,
            "3 tokens, the bank is for at most 2",
        ),
        (lambda: SMALL.stream(torch.ones(1, 8).bfloat16(), bank=SMALL.bank(2)), ValueError, "dtype=torch.bfloat16"),
        (lambda: SMALL.stream(torch.ones(1, 8, device="meta"), bank=SMALL.bank(2)), ValueError, "device='meta'"),
        (
            lambda: SMALL.stream(torch.ones(1, 8), bank=BlockAttnRes(8, 2, 2).bank(2)),
            ValueError,
            "needs 3 slots of D = 8",
        ),
        (lambda: SMALL.stream(torch.ones(1, 8), bank=BlockAttnRes(4, 4, 2).bank(2)), ValueError, "has 3 of D = 4"),
        (
            lambda: SMALL.stream(torch.ones(1, 8), bank=SMALL.bank(2)).read(out_dtype=FP64),
            ValueError,
            "no room to read torch.float64",
        ),
        (lambda: SMALL.stream(torch.ones(1, 8)).write(torch.ones(2, 8)), ValueError, r"wrote \(2, 8\)"),
    ],
)
def test_mistakes_are_explained(act, error, message, inference):
    with pytest.raises(error, match=message):
        act()


def test_a_stream_whose_bank_went_to_another_one_is_refused(inference):
    bank = SMALL.bank(2)
    first = SMALL.stream(torch.ones(1, 8), bank=bank)
    first.write(first.read())
    first.state()
    SMALL.stream(torch.ones(2, 8), bank=bank)
    for act in (first.read, first.weights, first.state, lambda: first.write(torch.ones(1, 8))):
        with pytest.raises(RuntimeError, match="serves one at a time"):
            act()


@pytest.mark.parametrize("guard", [torch.enable_grad, torch.inference_mode])
def test_a_partial_sum_of_another_shape_is_refused(guard):
    part = BlockAttnRes(8, 4, 2, start=1)
    with guard(), pytest.raises(ValueError, match=r"the partial sum has shape \(1, 8\), source 0 has \(5, 8\)"):
        part.stream(sources=[torch.ones(5, 8)], partial=torch.ones(1, 8))


def test_a_bank_is_refused_where_gradients_are_on():
    with pytest.raises(RuntimeError, match="has no gradients"):
        SMALL.stream(torch.ones(1, 8), bank=SMALL.bank(2))


STEP, SHARED = torch.ones(3, 5, 8), torch.empty(5, 8)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"bank": torch.ones(8)}, ValueError, r"must be \[N, ..., D\]"),
        ({"bank": torch.ones(0, 5, 8)}, ValueError, "N at least 1"),
        ({"bank": STEP.transpose(1, 2).contiguous().transpose(1, 2)}, ValueError, "must be contiguous"),
        ({"bank": torch.ones(2, 5, 3, 8).transpose(1, 2)}, ValueError, "must reduce to one stride"),
        ({"query": torch.ones(4)}, ValueError, r"query must have shape \(8,\)"),
        ({"query": nn.Parameter(torch.ones(8))}, RuntimeError, "has no gradient"),
        ({"partial": torch.ones(5, 8, dtype=BF16)}, ValueError, "partial is torch.bfloat16, the bank is torch.float32"),
        ({"partial": torch.ones(4, 8)}, ValueError, "partial has shape"),
        ({"update": torch.ones(4, 8)}, ValueError, "update has shape"),
        ({"total": torch.ones(5, 8)}, ValueError, "there is no update"),
        ({"update": torch.ones(5, 8), "total": torch.ones(4, 8)}, ValueError, "total has shape"),
        ({"out": torch.ones(4, 8)}, ValueError, "out has shape"),
        ({"out": torch.ones(5, 8), "out_dtype": BF16}, ValueError, "out_dtype says torch.bfloat16"),
        ({"norm_eps": 1e-5}, ValueError, "without norm_weight"),
        ({"out": STEP[1]}, ValueError, "out is one of the slots that are read"),
        ({"update": torch.ones(5, 8), "total": STEP[0]}, ValueError, "total is one of the slots that are read"),
        ({"out": nn.Parameter(torch.ones(5, 8))}, RuntimeError, "has no gradient"),
        ({"out": torch.empty(64).as_strided((5, 8), (2, 1))}, ValueError, "rows of out overlap and cannot be written"),
        ({"update": torch.ones(5, 8), "total": SHARED, "out": SHARED}, ValueError, "total and out must be apart"),
    ],
)
def test_mistakes_in_a_step_are_explained(arguments, error, message):
    given = {"bank": STEP, "query": torch.ones(8), **arguments}
    with pytest.raises(error, match=message):
        functional.attn_res_step(given.pop("bank"), given.pop("query"), **given)


@pytest.mark.parametrize("where", ["apart", "in the bank"])
@pytest.mark.parametrize("narrow", [FP32, BF16])
def test_opcheck(narrow, where, backend):
    bank = torch.randn(4, 5, 8, device=backend)
    total = bank[3] if where == "in the bank" else torch.empty(5, 8, device=backend)
    update, out = (torch.randn(5, 8, device=backend).to(narrow) for _ in range(2))
    query, weight, norm = torch.randn(3, 8, device=backend).unbind(0)
    for partial in (None, torch.randn(5, 8, device=backend)):
        arguments = (bank[:3], partial, update, total, out, query, weight, norm, 1e-6, 1.0, 1e-6)
        torch.library.opcheck(ops.attn_res_step, arguments)


def test_a_step_without_data_is_no_mistake():
    bank, query = torch.ones(3, 5, 8, device="meta"), torch.ones(8, device="meta")
    assert functional.attn_res_step(bank, query)[0].shape == (5, 8)


def test_autocast_changes_nothing():
    bank, update, query = torch.randn(3, 5, 64), torch.randn(5, 64), torch.randn(64)
    plain = functional.attn_res_step(bank, query, update=update)
    with torch.autocast("cpu", BF16):
        cast = functional.attn_res_step(bank, query, update=update)
    assert all(torch.equal(x, y) for x, y in zip(plain, cast, strict=True))
