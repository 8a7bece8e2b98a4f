"""AdamW, its schedule, and what must be summed over ranks before it steps.

A rank holds some of the model's parts (pipeline stages); a parameter may have a copy in another part, as the embedding
has where the head uses its weights too: the copies' gradients are summed, and it counts once in the gradient's norm.
"""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from blockres.training.config import OptimizerFlags


def make_optimizer(parts: Iterable[nn.Module], flags: OptimizerFlags) -> torch.optim.AdamW:
    """AdamW over the parameters of all parts; vectors (norms, queries, key weights) do not decay."""
    parameters = [p for part in parts for p in part.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": flags.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=flags.learning_rate, betas=(flags.beta1, flags.beta2), fused=True)


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


def average_over_replicas(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replace each gradient by its mean over the group, in one message."""
    size = dist.get_world_size(group)
    if size == 1 or not gradients:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat /= size
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


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
