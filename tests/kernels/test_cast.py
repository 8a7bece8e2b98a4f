"""The wire's kernel: values as PyTorch casts them, one read and one write, one launch a hop."""

import pytest
import torch

from bench.interpreter import count_traffic
from blockres_kernels.cast import pack, unpack
from tests.support.memory import guarded, poisoned_allocations

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
counted = pytest.mark.skipif(torch.cuda.is_available(), reason="bytes are counted by the interpreter")

EDGES = torch.tensor([0.0, -0.0, 1e-45, 65504.0, 65520.0, 1e5, -1e30, 3e38, torch.inf, -torch.inf, torch.nan])


@pytest.mark.parametrize("wire", [BF16, FP16, FP32, FP64])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64])
@pytest.mark.parametrize("shapes", [[(2, 3, 100)] * 3, [(7, 96)], [(5000,), (5000,), (3,), (0,), (2, 1)]])
def test_there_and_back(shapes, dtype, wire, device):
    tensors = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    tensors[0].view(-1)[: len(EDGES)] = EDGES.to(device, dtype)
    blocks = [guarded(x) for x in tensors]
    with poisoned_allocations():
        buffer = pack([block.tensor for block in blocks], wire)
        back = unpack(buffer, shapes, [dtype] * len(shapes))
    for block in blocks:
        block.check()
    expected = torch.cat([x.flatten() for x in tensors]).to(wire)
    torch.testing.assert_close(buffer, expected, rtol=0, atol=0, equal_nan=True)
    for got, part, shape in zip(back, expected.split([x.numel() for x in tensors]), shapes, strict=True):
        assert got.shape == shape
        torch.testing.assert_close(got, part.view(shape).to(dtype), rtol=0, atol=0, equal_nan=True)


def test_dtypes_may_differ_within_a_hop(device):
    tensors = [torch.randn(4, 96, device=device).to(dtype) for dtype in (FP32, BF16, FP16)]
    buffer = pack(tensors, BF16)
    assert torch.equal(buffer, torch.cat([x.flatten().to(BF16) for x in tensors]))
    back = unpack(buffer, [x.shape for x in tensors], [x.dtype for x in tensors])
    assert [x.dtype for x in back] == [FP32, BF16, FP16]
    assert all(torch.equal(x, y.to(BF16).to(y.dtype)) for x, y in zip(back, tensors, strict=True))


def test_where_no_cast_is_needed_the_receiver_looks_into_the_buffer(device):
    buffer = torch.randn(2 * 12, device=device)
    views = unpack(buffer, [(3, 4), (3, 4)], [FP32, BF16])
    assert views[0].data_ptr() == buffer.data_ptr()
    assert torch.equal(views[1], buffer[12:].view(3, 4).to(BF16))


def test_strided_tensors(device):
    x = torch.randn(4, 6, 10, device=device)
    tensors = [x.transpose(0, 1), x[:, ::2], x[:1].expand_as(x)]
    assert torch.equal(pack(tensors, BF16), torch.cat([t.flatten() for t in tensors]).to(BF16))


@counted
def test_one_launch_reads_and_writes_everything_once(device):
    tensors = [torch.randn(2, 5, 128, device=device) for _ in range(7)]
    numel = 7 * tensors[0].numel()
    with count_traffic() as packing:
        buffer = pack(tensors, BF16)
    with count_traffic() as unpacking:
        unpack(buffer, [x.shape for x in tensors], [FP32] * 7)
    assert (packing.read, packing.write, len(packing.launches)) == (4 * numel, 2 * numel, 1)
    assert (unpacking.read, unpacking.write, len(unpacking.launches)) == (2 * numel, 4 * numel, 1)


@counted
def test_more_tensors_than_one_launch_takes(device):
    tensors = [torch.randn(3, device=device) for _ in range(65)]
    with count_traffic() as traffic:
        buffer = pack(tensors, FP16)
    assert len(traffic.launches) == 3
    assert torch.equal(buffer, torch.cat(tensors).half())


@counted
def test_nothing_to_do_launches_nothing(device):
    with count_traffic() as traffic:
        buffer = pack([torch.empty(0, 4, device=device)], BF16)
        assert unpack(buffer, [(0, 4)], [FP32])[0].shape == (0, 4)
    assert not traffic.launches
