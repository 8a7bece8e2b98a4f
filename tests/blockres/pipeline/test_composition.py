"""Pipelines whose stages are data-parallel, checkpointed or compiled: the gradients of one process on the batch."""

from functools import partial

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.support.distributed import Check
from tests.support.pipeline import Case, Pipeline, batch_of, build, largest_error, reference

LOOP = Case("Interleaved1F1B", 2, (2, 3, 1, 2), 2, 4)


def replicas_reduce_once_a_step(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    for wrapper, schedule in (
        ("ddp", "Interleaved1F1B"),
        ("ddp", "1F1B"),
        ("fsdp", "Interleaved1F1B"),
        ("fsdp", "InterleavedZeroBubble"),
        ("fsdp", "ZBVZeroBubble"),
    ):
        case = LOOP.but(schedule=schedule, sublayers_per_stage=(4, 4) if schedule == "1F1B" else (2, 3, 1, 2))
        pipeline = build(case, mesh.get_local_rank("pp"), mesh.get_group("pp"))
        for stage in pipeline.stages:
            if wrapper == "ddp":
                stage.submod = DistributedDataParallel(stage.submod, process_group=mesh.get_group("dp"))
            else:
                fully_shard(stage.submod, mesh=mesh["dp"])
        whole = case.but(n_microbatches=2 * case.n_microbatches)
        _, expected = reference(whole)
        _step_on_a_share(pipeline, whole, mesh.get_local_rank("dp"))
        assert len(pipeline.cache) == 0
        assert _error(pipeline, expected) <= 1e-12, f"{wrapper}, {schedule}"


def _step_on_a_share(pipeline: Pipeline, whole: Case, replica: int) -> None:
    inputs, target = (half.chunk(2)[replica] for half in batch_of(whole))
    for _ in range(2):
        for parameter in pipeline.parameters():
            parameter.grad = None
        pipeline.schedule.step(*((inputs,) if pipeline.stages[0].is_first else ()), target=target, return_outputs=False)


def _error(pipeline: Pipeline, expected: dict[str, torch.Tensor]) -> float:
    whole = {
        name.removeprefix("module."): gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        for name, gradient in pipeline.gradients().items()
    }
    assert whole
    return largest_error(whole, expected)


def checkpointed_and_compiled_sublayers_give_the_same(rank: int) -> None:
    for schedule in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"):
        for how in ("checkpoint", "compile"):
            case = LOOP.but(schedule=schedule)
            pipeline = build(case, rank)
            for stage in pipeline.stages:
                for layer in stage.submod.sublayers.values():
                    if how == "checkpoint":
                        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
                    else:
                        layer.compile(backend="aot_eager")
            pipeline.step()
            assert largest_error(pipeline.gradients(), reference(case)[1]) <= 1e-12, f"{how}, {schedule}"


CHECKS: dict[int, list[Check]] = {
    2: [checkpointed_and_compiled_sublayers_give_the_same],
    4: [replicas_reduce_once_a_step],
}


def test_in_real_processes(check_name: str, failures: dict[str, list[str]]) -> None:
    assert not failures[check_name], "\n".join(failures[check_name])
