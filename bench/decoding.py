"""A whole stack for a few tokens, as inference runs it: on a bank, and on a GPU as one CUDA graph.

Sublayers are tensors that are there already, so that the time is of what stands between them. Parameters count: for one
token they are a good part of what is read.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bench.cases import relative_error
from bench.implementations import eager, rms_norm
from bench.streams import BlockresStream, Parameters, StackShape, StandardStream, Stream, open_stream, run
from bench.timing import Work

VARIANTS = ("blockres on a bank", "standard")


def decoding_work(variant: str, shape: StackShape, dtype: torch.dtype, device: str) -> Callable[[int], Work]:
    """Replays of a graph; without a GPU the same calls one by one."""

    def make(_: int) -> Work:
        parameters = Parameters(shape, dtype, device)
        embedding, *updates = torch.randn(9, shape.tokens, shape.dim, device=device).to(dtype).unbind(0)
        bank = parameters.residual(shape.per_block, False).bank(shape.tokens, dtype=dtype, device=device)

        @torch.inference_mode()
        def step(_: object = None) -> Tensor:
            supply = iter(updates * (1 + shape.sublayers // len(updates)))
            stream: Stream = StandardStream(embedding, rms_norm)
            if variant != "standard":
                stream = BlockresStream(parameters, embedding, shape.per_block, False, bank)
            return run(stream, parameters, lambda _: next(supply))

        return Work(step) if device == "cpu" else Work(_captured(step))

    return make


def _captured(step: Callable[[], Tensor]) -> Callable[[object], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    kept = step, result  # whose tensors the graph reads and writes

    def replay(_: object, kept: object = kept) -> None:
        graph.replay()

    return replay


def decoding_bytes(variant: str, shape: StackShape, dtype: torch.dtype) -> int:
    """What a step cannot avoid moving: its row sets, a query, a key weight and a norm weight for every aggregation."""
    if variant == "standard":
        return (4 * shape.tokens + 1) * shape.sublayers * shape.dim * dtype.itemsize
    rows = 2 + 1 + 1  # the embedding goes into the bank; the first read has it alone
    for position in range(1, shape.sublayers + 1):
        completed, added = divmod(position - 1, shape.per_block)
        rows += 1 + completed + (added > 0) + 1 + 2  # sources, the open block, its update; sum and result
    vectors = 3 * shape.sublayers + 2
    return (rows * shape.tokens + vectors) * shape.dim * dtype.itemsize


def verify_decoding(variant: str, shape: StackShape, dtype: torch.dtype, device: str) -> dict[str, float]:
    """The relative error of the output against float64, with linear stand-ins for the sublayers."""
    parameters = Parameters(shape, dtype, device)
    embedding = torch.randn(shape.tokens, shape.dim, device=device).to(dtype)
    bank = parameters.residual(shape.per_block, False).bank(shape.tokens, dtype=dtype, device=device)
    with torch.inference_mode():
        stream: Stream = StandardStream(embedding, rms_norm)
        if variant != "standard":
            stream = BlockresStream(parameters, embedding, shape.per_block, False, bank)
        found = run(stream, parameters, lambda x: 0.5 * x.flip(-1))
    reference = "standard" if variant == "standard" else eager()
    wide = open_stream(reference, parameters.to(torch.float64), embedding.double(), shape.per_block)
    with torch.no_grad():
        return {"output": relative_error(found, run(wide, parameters.to(torch.float64), lambda x: 0.5 * x.flip(-1)))}
