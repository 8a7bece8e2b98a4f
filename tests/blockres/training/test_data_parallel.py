"""A pipeline's stages under PyTorch's data parallelism: four ranks, two replicas of a pipeline of two.

Gradients equal those of one process on the whole batch, and are reduced once per step.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blockres.models.gpt import GPT, GPTConfig, next_token_loss
from blockres.pipeline import (
    SCHEDULES,
    BlockCache,
    BlockResStage,
    BlockRouting,
    build_schedule,
    schedule_placement,
    split_sublayers,
)
from tests.support.distributed import run_all_well

CONFIG = GPTConfig(vocab_size=13, dim=16, num_layers=2, num_heads=2, num_kv_heads=1, sublayers_per_block=3)
MICROBATCHES, SHAPE = 4, (2, 5, CONFIG.dim)

Wrap = Callable[[GPT, DeviceMesh], nn.Module]


def distributed_data_parallel(part: GPT, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(part, process_group=mesh.get_group("dp"))


def fully_sharded(part: GPT, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(part, mesh=mesh["dp"])


CASES = {f"FSDP2-{name}": (fully_sharded, name, False) for name in SCHEDULES}
CASES |= {f"DDP-{name}": (distributed_data_parallel, name, False) for name in ("1F1B", "Interleaved1F1B")}
CASES |= {f"FSDP2-{name}-checkpointed": (fully_sharded, name, True) for name in ("Interleaved1F1B", "ZBVZeroBubble")}


def tokens_of(replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(replica)
    return torch.randint(CONFIG.vocab_size, (2, MICROBATCHES * SHAPE[0], SHAPE[1]), generator=generator)


def gradients_of_one_process() -> dict[str, Tensor]:
    model = GPT(CONFIG, dtype=torch.float64)
    inputs, targets = torch.cat([tokens_of(0), tokens_of(1)], dim=1)
    next_token_loss(model(inputs), targets).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


class Reductions(TorchDispatchMode):
    """While it is entered, counts the collectives that reduce what can be a gradient."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "reduce" in func.name():
            self.count += any(isinstance(x, Tensor) and x.is_floating_point() for x in tree_leaves(args))
        return func(*args, **(kwargs or {}))


def largest_errors(rank: int) -> Iterator[tuple[float, int]]:
    """For each case the largest relative error of a gradient in two steps, and the reductions in the second."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    expected = gradients_of_one_process()
    for wrap, name, checkpointing in CASES.values():
        stages, schedule = _pipeline(wrap, name, checkpointing, mesh)
        inputs, targets = tokens_of(mesh.get_local_rank("dp"))
        args = [inputs] if stages[0].is_first else []
        schedule.step(*args, target=targets)
        error = _largest_error(stages, expected)
        schedule.eval(*args, target=targets)
        with Reductions() as reductions:
            schedule.step(*args, target=targets)
        yield max(error, _largest_error(stages, expected)), reductions.count


def _largest_error(stages: list[BlockResStage], expected: dict[str, Tensor]) -> float:
    """And leaves no gradient behind."""
    error = 0.0
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            gradient, wanted = parameter.grad, expected[name.removeprefix("module.")]
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            error = max(error, float((whole - wanted).norm() / wanted.norm()))
        stage.submod.zero_grad()
    return error


def _pipeline(wrap: Wrap, name: str, checkpointing: bool, mesh: DeviceMesh):
    virtual = SCHEDULES[name].virtual_stages or 2
    split = split_sublayers(CONFIG.num_sublayers, 2 * virtual)
    routing = BlockRouting(split, CONFIG.block, 2, schedule_placement(name))
    cache, stages = BlockCache(), []
    for index in routing.stages_of(mesh.get_local_rank("pp")):
        run = routing.sublayers(index)
        part = GPT(CONFIG, run.start, run.stop, dtype=torch.float64, activation_checkpointing=checkpointing)
        stages.append(
            BlockResStage(
                wrap(part, mesh), index, routing, device="cpu", cache=cache, microbatch_shape=SHAPE,
                dtype=torch.float64, group=mesh.get_group("pp"),
            )
        )  # fmt: skip
    return stages, build_schedule(name, stages, MICROBATCHES, next_token_loss)


@pytest.fixture(scope="module")
def results() -> dict[str, list[tuple[float, int]]]:
    by_rank = run_all_well(4, largest_errors)
    return {case: [values[position] for values in by_rank] for position, case in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES)
def test_replicas_find_the_whole_batchs_gradients_in_one_reduction(results, case):
    stages_per_rank = SCHEDULES[CASES[case][1]].virtual_stages or 2
    for error, reductions in results[case]:
        assert error < 1e-12
        assert reductions == stages_per_rank
