"""Checkpoints of a pipelined model that load under any other split, through torch.distributed.checkpoint."""

import os
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn


def training_state(parts: Iterable[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything that a rank must keep: parameters and their optimizer states by the parameters' names.

    Names are those of the unsplit model. A copy of a parameter on two ranks is the same entry: they are equal.
    """
    state: dict[str, Tensor] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            state[f"model.{name}"] = parameter.detach()
            for slot, value in optimizer.state[parameter].items():
                state[f"optimizer.{name}.{slot}"] = value
    return state


def save_checkpoint(directory: Path, state: dict[str, Tensor]) -> None:
    """Write the ranks' states to `directory`; it appears under that name only once it is complete. All ranks call this.

    Raises:
        OSError: where the directory cannot be written.
    """
    unfinished = directory.with_name(f".unfinished-{directory.name}")
    dcp.save(state, checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        os.replace(unfinished, directory)
    dist.barrier()
