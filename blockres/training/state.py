"""What a rank must keep to go on later as if nothing had happened, as tensors by name."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


def model_and_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Parameters and their optimizer states, by the parameters' names; the tensors themselves, no copies."""
    state: dict[str, Tensor] = {}
    for name, parameter in parameters:
        state[f"model.{name}"] = parameter.detach()
        for slot, value in optimizer.state[parameter].items():
            state[f"optimizer.{name}.{slot}"] = value
    return state


def random_state(rank: int, device: torch.device) -> dict[str, Tensor]:
    """Copies of the states of PyTorch's generators on a rank."""
    state = {f"random.{rank}.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state[f"random.{rank}.cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Tensor], rank: int, device: torch.device) -> None:
    """Put back what `random_state` returned."""
    torch.set_rng_state(state[f"random.{rank}.cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[f"random.{rank}.cuda"], device)
