"""What a step of decoding moves, counted, is what the GPU script holds its time against."""

from dataclasses import replace

import pytest
import torch

from bench.decoding import VARIANTS, decoding_bytes, decoding_work, verify_decoding
from bench.interpreted import KernelMode
from bench.interpreter import count_traffic, install
from bench.streams import StackShape

SHAPE = StackShape(sublayers=5, per_block=2, tokens=2, dim=64)

install()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_is_right(variant, dtype):
    assert verify_decoding(variant, SHAPE, dtype, "cpu")["output"] <= (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="bytes are counted by the interpreter")
def test_a_step_of_decoding_moves_what_it_must():
    shape = replace(SHAPE, tokens=1)  # each program reads the parameters, on a GPU from the L2
    work = decoding_work(VARIANTS[0], shape, torch.bfloat16, "cpu")(0)
    with KernelMode(), count_traffic() as traffic:
        work.run(work.prepare())
    copy_of_the_embedding = 2 * shape.dim * 2
    assert traffic.all.total == decoding_bytes(VARIANTS[0], shape, torch.bfloat16) - copy_of_the_embedding
    assert len(traffic.launches) == shape.sublayers + 1
