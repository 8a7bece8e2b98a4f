"""Depth attention: how much each sublayer reads of each source, averaged over tokens."""

import torch
import torch.distributed as dist
from torch import Tensor


class DepthWeights:
    """Means of the softmax weights of all aggregations, filled on every rank for the sublayers that it runs.

    Row l is sublayer l, the last row the final aggregation. Column 0 is the embedding, column n the n-th block: the
    open block's partial sum stands in the column of the source that it will become.

    Args:
        num_sublayers: L of the whole network.
        sublayers_per_block: S.
    """

    def __init__(self, num_sublayers: int, sublayers_per_block: int, device: torch.device) -> None:
        blocks = -(-num_sublayers // sublayers_per_block)
        self._sums = torch.zeros(num_sublayers + 1, blocks + 1, dtype=torch.float64, device=device)
        self._tokens = torch.zeros(num_sublayers + 1, 1, dtype=torch.float64, device=device)

    def add(self, index: int, weights: Tensor) -> None:
        """Count the weights `[N, ...]` of aggregation `index`."""
        per_source = weights.flatten(1)
        self._sums[index, : len(per_source)] += per_source.sum(1, dtype=torch.float64)
        self._tokens[index] += per_source.shape[1]

    def gather(self) -> Tensor:
        """The means `[L + 1, 1 + blocks]` over all ranks, on the CPU; every rank calls this."""
        for counter in (self._sums, self._tokens):
            dist.all_reduce(counter)
        return (self._sums / self._tokens.clamp_min(1)).cpu()
