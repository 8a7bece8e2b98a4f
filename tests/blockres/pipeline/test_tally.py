"""Sums that travel beside the residual stream: never cast, checked like the stream, and there in evaluation too.

That gradients come back through them is tested with all other gradients.
"""

from collections.abc import Iterator

import pytest
import torch

from blockres.pipeline.wire import HopFormat
from tests.support.distributed import run_all_well
from tests.support.pipeline import TALLY_SHAPE, Case, batch_of, build, loss_fn, sent_messages, whole_model

CASE = Case("Interleaved1F1B", 2, (2, 3, 1, 2), 2, 4, model={"tally": True})
NARROW = CASE.but(dtype=torch.float32, pipeline_dtype=torch.bfloat16)


def tallies_of_rank(rank: int) -> Iterator[object]:
    yield from _sent_in_bfloat16(rank)
    yield _evaluated(rank)
    yield _refused(rank)


def _sent_in_bfloat16(rank: int) -> Iterator[tuple[int, int]]:
    """What the rank has sent in a step: tallies, and everything else that is float32."""
    pipeline = build(NARROW, rank)
    with sent_messages() as sent:
        pipeline.step()
    exact = [message.content.shape for message in sent if message.content.dtype == torch.float32]
    yield exact.count(TALLY_SHAPE), len(exact)
    traffic = pipeline.traffic()
    payload = sum(message.content.nbytes for message in sent if message.is_payload)
    yield traffic.forward_bytes + traffic.backward_bytes, payload


def _evaluated(rank: int) -> list[list[float]] | None:
    """The tallies of all microbatches, as the whole batch's output has them."""
    pipeline = build(CASE, rank)
    inputs, target = batch_of(CASE)
    losses: list[torch.Tensor] = []
    output = pipeline.schedule.eval(*[inputs] if rank == 0 else [], target=target, losses=losses)
    if output is None:
        return None
    logits, sums = output
    parts = zip(logits.chunk(4), sums.split(1), target.chunk(4), losses, strict=True)
    assert all(loss_fn((logit, part), aim) == loss for logit, part, aim, loss in parts)
    return sums.tolist()


def _refused(rank: int) -> str:
    """What is said of a module that adds to the tally in another dtype."""
    pipeline = build(CASE.but(sublayers_per_stage=(4, 4)), rank)
    if rank == 1:
        return ""
    stage = pipeline.stages[0]
    stage.submod.register_forward_hook(lambda _, __, output: (*output[:2], output[2].double()))
    stage.has_backward = True
    with pytest.raises(ValueError, match="the tally with dtype") as caught:
        stage.forward_one_chunk(0, (batch_of(CASE)[0][:2],))
    return str(caught.value)


def test_a_tally_is_neither_cast_nor_lost():
    first, last = run_all_well(2, tallies_of_rank)
    hops = {rank: sum(stage + 1 < 4 for stage in CASE.routing.stages_of(rank)) for rank in (0, 1)}
    for rank, (tallies, (counted, payload), *_) in enumerate((first, last)):
        back = sum(stage > 0 for stage in CASE.routing.stages_of(rank))
        assert tallies == (4 * (hops[rank] + back),) * 2
        assert counted == payload
    with torch.no_grad():
        _, expected = zip(*map(whole_model(CASE), batch_of(CASE)[0].chunk(4)), strict=True)
    torch.testing.assert_close(torch.tensor(last[2]), torch.cat(expected), rtol=1e-6, atol=0)
    assert first[3] == "stage 0 returned the tally with dtype torch.float64, it was set up for torch.float32"


@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("units", [0, 2])
def test_a_hop_with_a_tally(units, wire_dtype):
    hop = HopFormat(torch.float32, wire_dtype)
    tensors, tally = [torch.arange(6.0).view(2, 3) for _ in range(units)], torch.tensor([1e8 + 8, 1 / 3])
    incoming = hop.receive([(2, 3)] * units, torch.device("cpu"), (2,))
    for buffer, message in zip(incoming.messages, hop.messages(tensors, tally.double()), strict=True):
        assert (buffer.dtype, buffer.shape) == (message.dtype, message.shape)
        buffer.copy_(message)
    for got, sent in zip(incoming.tensors(), [*tensors, tally], strict=True):
        assert torch.equal(got, sent)
