"""How much a pipeline holds: tensors of the residual stream alive at once on a rank, against PyTorch's own stage.

    torchrun --standalone --nproc-per-node 4 -m bench.pipeline_memory

Interleaved 1F1B on four ranks with four stages each, 16 microbatches, one block per stage, on the CPU. Counted are all
storages of the size of one source [B, T, D] that are alive on a rank at once, whoever holds them, by weak references.
`bare` is a stream whose arithmetic keeps nothing for backward (sums, and products with constants), so that what is
alive is held by the pipeline; `AttnRes` is Block Attention Residuals, where autograd holds the larger part.

Compared: blockres with and without its cache, and `torch.distributed.pipelining.PipelineStage` with the same payload as
without the cache, whose buffers are allocated once for every stage and microbatch and kept. Second steps are measured.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from bench.live import LiveStorages, of_size
from blockres.modules import BlockAttnRes
from blockres.pipeline import BlockCache, BlockResStage, BlockRouting
from blockres.training.launch import end_process

SUBLAYERS_PER_BLOCK = 2
VOCABULARY = 8


class Part(nn.Module):
    """One stage of a model of `num_stages` blocks: sublayers that keep nothing, on a bare stream or on AttnRes."""

    def __init__(self, index: int, num_stages: int, dim: int, attn_res: bool) -> None:
        super().__init__()
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        start, stop = index * SUBLAYERS_PER_BLOCK, (index + 1) * SUBLAYERS_PER_BLOCK
        total = num_stages * SUBLAYERS_PER_BLOCK
        self.embedding = nn.Embedding(VOCABULARY, dim) if self.is_first else None
        self.residual = BlockAttnRes(dim, total, SUBLAYERS_PER_BLOCK, start=start, stop=stop) if attn_res else None
        self.head = nn.Linear(dim, VOCABULARY) if self.is_last else None

    def forward(self, inputs: Any, partial: Tensor | None = None) -> Any:
        sources = (self.embedding(inputs),) if self.embedding is not None else tuple(inputs)
        sources, out = self._attn_res(sources) if self.residual is not None else self._bare(sources)
        return self.head(out) if self.head is not None else (sources, None)

    def _bare(self, sources: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
        partial: Tensor | None = None
        for _ in range(SUBLAYERS_PER_BLOCK):
            update = _sum([*sources] if partial is None else [*sources, partial]) * 0.1
            partial = update if partial is None else partial + update
        assert partial is not None
        return (*sources, partial), _sum([*sources, partial])

    def _attn_res(self, sources: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor | None]:
        assert self.residual is not None
        stream = self.residual.stream(sources=sources) if not self.is_first else self.residual.stream(sources[0])
        for _ in range(SUBLAYERS_PER_BLOCK):
            stream.write(stream.read() * 0.1)
        return stream.state()[0], stream.read() if self.is_last else None


class Flat(nn.Module):
    """A part as PyTorch's stage wants it: tensors in, tensors out."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part

    def forward(self, *inputs: Tensor) -> Any:
        output = self.part(inputs[0]) if self.part.is_first else self.part(inputs)
        return output if self.part.is_last else output[0]


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def _torch_stage(part: Part, index: int, num_stages: int, shape: Sequence[int]) -> PipelineStage:
    unit = torch.empty(*shape, device="meta", requires_grad=True)
    tokens = torch.empty(*shape[:2], dtype=torch.int64, device="meta")
    logits = torch.empty(*shape[:2], VOCABULARY, device="meta", requires_grad=True)
    inputs = (tokens,) if part.is_first else (unit,) * (index + 1)
    outputs = (logits,) if part.is_last else (unit,) * (index + 2)
    return PipelineStage(Flat(part), index, num_stages, torch.device("cpu"), input_args=inputs, output_args=outputs)


def measure(kind: str, attn_res: bool, virtual_stages: int, n_microbatches: int, shape: Sequence[int]) -> int:
    """The most sources alive at once on this rank in a step. `kind`: "cache", "no cache" or "torch"."""
    rank, pp_size = dist.get_rank(), dist.get_world_size()
    num_stages = pp_size * virtual_stages
    routing = BlockRouting([SUBLAYERS_PER_BLOCK] * num_stages, SUBLAYERS_PER_BLOCK, pp_size, cache=kind == "cache")
    cache = BlockCache()
    stages: list[PipelineStage] = []
    for index in routing.stages_of(rank):
        part = Part(index, num_stages, shape[-1], attn_res)
        settings = {"device": "cpu", "cache": cache, "microbatch_shape": shape, "dtype": torch.float32}
        stages.append(
            _torch_stage(part, index, num_stages, shape)
            if kind == "torch"
            else BlockResStage(part, index, routing, **settings)
        )
    schedule = ScheduleInterleaved1F1B(stages, n_microbatches, _loss)
    live = LiveStorages(of_size(torch.Size(shape).numel() * 4))
    with live:
        _step(schedule, stages, n_microbatches, shape)
        live.peak = 0
        _step(schedule, stages, n_microbatches, shape)
    return live.peak


def _step(
    schedule: ScheduleInterleaved1F1B, stages: Sequence[PipelineStage], n_microbatches: int, shape: Sequence[int]
) -> None:
    tokens = torch.randint(VOCABULARY, (n_microbatches * shape[0], shape[1]))
    schedule.step(*((tokens,) if stages[0].is_first else ()), target=tokens, return_outputs=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--virtual-stages", type=int, default=4)
    parser.add_argument("--num-microbatches", type=int, default=16)
    parser.add_argument("--shape", type=int, nargs=3, default=(1, 5, 12), metavar=("B", "T", "D"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not dist.is_torchelastic_launched():
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node 4 -m bench.pipeline_memory")
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        print(f"P={dist.get_world_size()} V={options.virtual_stages} M={options.num_microbatches}, Interleaved 1F1B")
        print("most sources [B, T, D] alive at once, by rank, and the largest in MiB at [1, 8192, 4096] in bfloat16")
    for attn_res in (False, True):
        for kind in ("torch", "no cache", "cache"):
            peak = torch.tensor(
                measure(kind, attn_res, options.virtual_stages, options.num_microbatches, options.shape)
            )
            peaks = [torch.zeros_like(peak) for _ in range(dist.get_world_size())]
            dist.all_gather(peaks, peak)
            if dist.get_rank() == 0:
                counts = [int(count) for count in peaks]
                print(f"{'AttnRes' if attn_res else 'bare':8} {kind:9} {counts} {max(counts) * 64:6} MiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    end_process(0)
