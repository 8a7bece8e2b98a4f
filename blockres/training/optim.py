"""AdamW, its schedule, and what must be summed over ranks before it steps.

A rank holds some of the model's parts (pipeline stages); a parameter may have a copy in another part, as the embedding
has where the head uses its weights too: the copies' gradients are summed, and it counts once in the gradient's norm.
"""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from blockres.training.config import OptimizerFlags


def make_optimizer(parts: Iterable[nn.Module], flags: OptimizerFlags) -> torch.optim.AdamW:
    """AdamW over the parameters of all parts; vectors (norms, queries, key weights) do not decay.

    Its state is there from the start, so that it can be saved and loaded before any step.
    """
    parameters = [p for part in parts for p in part.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": flags.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(flags.beta1, flags.beta2), fused=True)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # which changes nothing at a rate of 0, but counts
    optimizer.zero_grad()
    for parameter in parameters:
        optimizer.state[parameter]["step"].zero_()
    set_learning_rate(optimizer, flags.learning_rate)
    return optimizer


def learning_rate(step: int, steps: int, flags: OptimizerFlags) -> float:
    """Of the step with this index, counted from 0: linear up over the warm-up, then half a cosine down to the last."""
    if step < flags.warmup_steps:
        return flags.learning_rate * (step + 1) / flags.warmup_steps
    progress = (step - flags.warmup_steps) / max(1, steps - 1 - flags.warmup_steps)
    share = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return flags.min_learning_rate + share * (flags.learning_rate - flags.min_learning_rate)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory; all of it where it is not sharded over replicas."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sum_with_peer(gradient: Tensor, peer: int, group: dist.ProcessGroup) -> None:
    """Add the gradient that the copy of this parameter on `peer` (its rank in `group`) has; both call this."""
    other = torch.empty_like(gradient)
    work = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, gradient, group=group, group_peer=peer),
            dist.P2POp(dist.irecv, other, group=group, group_peer=peer),
        ]
    )
    for request in work:
        request.wait()
    gradient += other


def squared_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of all squares, a float64 scalar on `device`."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    return nn.utils.get_total_norm(list(gradients)).double().square()


def clip(gradients: Sequence[Tensor], norm: float, longest: float) -> None:
    """Scale all gradients down by the same factor where `norm`, that of all stages together, exceeds `longest`."""
    if norm > longest:
        torch._foreach_mul_(list(gradients), longest / norm)
