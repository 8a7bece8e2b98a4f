"""One rank's part of a run: its stages, the schedule, and what a step does around them."""

import dataclasses
import math
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from blockres.models import causal_lm_loss
from blockres.models.gpt import GPT, probe_depth
from blockres.pipeline import (
    BlockCache,
    BlockResStage,
    BlockRouting,
    Traffic,
    build_schedule,
    schedule_placement,
    split_sublayers,
)
from blockres.training import optim
from blockres.training.checkpoint import Checkpoint
from blockres.training.config import TrainConfig
from blockres.training.data import Split
from blockres.training.depth import DepthWeights
from blockres.training.networks import build_parts
from blockres.training.state import model_and_optimizer, random_state, set_random_state

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""What a rank may be asked to stop by; where ranks have got different ones, the first counts for all."""


@dataclass(frozen=True)
class StepReport:
    """A step over all ranks, equal on all: mean cross-entropy in nats per token, gradient norm before clipping.

    A loss that balances experts is in the gradient alone. `stop` is the signal by which any rank was asked to stop
    before the end of the step.
    """

    loss: float
    grad_norm: float
    stop: signal.Signals | None = None

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient are numbers, so that the parameters were changed."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Trainer:
    """Builds this rank's part of the model and runs steps and evaluations on it.

    Every method is a collective: all ranks call it with the same arguments. The process group is open.
    """

    def __init__(self, config: TrainConfig, split: Split, device: torch.device) -> None:
        self.config, self.split, self.device = config, split, device
        dp_size, world_size = config.parallel.dp_size, dist.get_world_size()
        self.mesh = init_device_mesh(device.type, (dp_size, world_size // dp_size), mesh_dim_names=("dp", "pp"))
        self.pp = self.mesh.get_group("pp")
        self.dp_rank, self.pp_rank = self.mesh.get_local_rank("dp"), self.mesh.get_local_rank("pp")
        num_stages = self.pp.size() * config.parallel.virtual_stages
        self.routing = BlockRouting(
            split_sublayers(config.model.num_sublayers, num_stages),
            config.model.block,
            self.pp.size(),
            schedule_placement(config.parallel.schedule),
            cache=config.parallel.cache,
        )
        self.cache = BlockCache()
        self.my_stages = self.routing.stages_of(self.pp_rank)
        self.has_first, self.has_last = 0 in self.my_stages, num_stages - 1 in self.my_stages
        self.parts = build_parts(config, self.routing, self.my_stages, device)
        if dp_size > 1:
            self._shard_parts()
        self.stages = [self._build_stage(part, index) for part, index in zip(self.parts, self.my_stages, strict=True)]
        self.schedule = build_schedule(
            config.parallel.schedule, self.stages, config.parallel.num_microbatches, self._loss
        )
        self._cross_entropies: list[Tensor] = []
        self.optimizer = optim.make_optimizer(self.parts, config.optimizer)

    @property
    def microbatch_shape(self) -> tuple[int, int, int]:
        """`(B, T, D)` of one microbatch."""
        pieces = self.config.parallel.dp_size * self.config.parallel.num_microbatches
        return self.config.data.batch_size // pieces, self.config.data.sequence_length, self.config.model.dim

    @property
    def num_eval_batches(self) -> int:
        available = self.split.num_validation_batches
        return min(available, self.config.data.eval_batches or available)

    def train_step(self, step: int, asked_to_stop: Callable[[], signal.Signals | None] = lambda: None) -> StepReport:
        """Run step `step`, counted from 0. Where loss or gradient are not finite, the parameters stay as they were.

        `asked_to_stop` tells near the end of the step what this rank has been asked; the answer may differ by rank.
        """
        optim.set_learning_rate(self.optimizer, optim.learning_rate(step, self.config.run.steps, self.config.optimizer))
        self.optimizer.zero_grad()
        for stage in self.stages:
            stage.reset_traffic()
        loss = self._run(self.schedule.step, self.split.training_batch(self.config.run.seed, step))
        self._sum_tied_gradients()
        squares = optim.squared_norm(self._gradients(copies=False), self.device)
        asked = asked_to_stop()
        votes = [torch.tensor(float(asked == stop_signal)) for stop_signal in STOP_SIGNALS]
        total_loss, total_squares, *total_votes = self._sum_over_ranks(loss, squares, *votes)
        report = StepReport(total_loss, math.sqrt(total_squares), _first_voted_for(total_votes))
        if report.is_finite:
            optim.clip(self._gradients(), report.grad_norm, self.config.optimizer.clip_norm)
            self.optimizer.step()
        return report

    def evaluate(self, depth: DepthWeights | None = None) -> float:
        """Mean cross-entropy over the validation batches in nats per token, equal on all ranks.

        `depth` notes the softmax weights.
        """
        with probe_depth(self.parts, depth.add) if depth else nullcontext():
            losses = [
                self._run(self.schedule.eval, self.split.validation_batch(index))
                for index in range(self.num_eval_batches)
            ]
        for part in self.parts:
            if isinstance(part, FSDPModule):
                part.reshard()  # after a forward alone the parameters would stay whole
        (total,) = self._sum_over_ranks(torch.stack(losses).sum())
        return total / len(losses)

    def state_to_save(self) -> dict[str, Tensor]:
        """This rank's part of what a checkpoint holds; names are those of the unsplit model."""
        state = model_and_optimizer(self._named_parameters(copies=False), self.optimizer)
        own = {name: value for name, value in state.items() if self.dp_rank == 0 or isinstance(value, DTensor)}
        return own | random_state(dist.get_rank(), self.device)

    def load(self, checkpoint: Checkpoint) -> None:
        """Take over a checkpoint, however its run was split; random states where it had the same ranks and devices.

        Raises:
            ValueError: where the checkpoint lacks something, or has it in another shape.
        """
        for part in self.parts:
            checkpoint.load(model_and_optimizer(part.named_parameters(), self.optimizer))
        same_device = checkpoint.settings.get("device") == self.device.type
        if same_device and checkpoint.num_ranks == dist.get_world_size():
            states = random_state(dist.get_rank(), self.device)
            checkpoint.load(states)
            set_random_state(states, dist.get_rank(), self.device)

    def new_depth_weights(self) -> DepthWeights | None:
        """To be filled by an evaluation; None for a standard residual, which weighs nothing."""
        block = self.config.model.block
        return DepthWeights(self.config.model.num_sublayers, block, self.device) if block else None

    def num_parameters(self) -> int:
        """Of the whole model."""
        own = sum(optim.local(parameter).numel() for _, parameter in self._named_parameters(copies=False))
        (count,) = self._sum_over_ranks(torch.tensor(own))
        return int(count)

    def ranks_with_broken_gradients(self) -> list[int]:
        """The ranks on whose stages the last step left gradients that are not finite."""
        broken = [not bool(gradient.isfinite().all()) for gradient in self._gradients()]
        flags = torch.zeros(dist.get_world_size(), device=self.device)
        flags[dist.get_rank()] = any(broken)
        dist.all_reduce(flags)
        return flags.nonzero().flatten().tolist()

    def step_traffic(self) -> Traffic:
        """What all ranks' stages have sent since the last training step began."""
        mine = sum((stage.traffic() for stage in self.stages), start=Traffic())
        counts = torch.tensor(dataclasses.astuple(mine), device=self.device)
        dist.all_reduce(counts)
        return Traffic(*counts.tolist())

    def cache_peak(self) -> tuple[int, int]:
        """The most sources, and the most bytes of them, that any rank's cache has held."""
        peak = torch.tensor([self.cache.peak.entries, self.cache.peak.bytes], device=self.device)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        entries, size = peak.tolist()
        return entries, size

    def _shard_parts(self) -> None:
        # DistributedDataParallel would not see backwards that run in halves. The part is one unit since its sublayers'
        # norms are read outside of them, in the aggregation. The embedding's rows, which it returns, are a view, and
        # FSDP warns of writing into such in place, which nobody does.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        for part in self.parts:
            fully_shard(part, mesh=self.mesh["dp"])

    def _build_stage(self, part: nn.Module, index: int) -> BlockResStage:
        return BlockResStage(
            part,
            index,
            self.routing,
            device=self.device,
            cache=self.cache,
            microbatch_shape=self.microbatch_shape,
            dtype=self.config.dtype,
            pipeline_dtype=self.config.pipeline_dtype,
            group=self.pp,
            tally_shape=getattr(part, "tally_shape", None),
        )

    def _loss(self, output: Tensor | tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        """What is minimised, of one microbatch: `causal_lm_loss`; its cross-entropy is noted apart."""
        cross_entropy = causal_lm_loss(output, targets, router_loss=False)
        self._cross_entropies.append(cross_entropy.detach())
        return cross_entropy if isinstance(output, Tensor) else cross_entropy + output[1].sum()

    def _run(self, run: Callable[..., Any], batch: tuple[Tensor, Tensor]) -> Tensor:
        """Put this replica's share of a batch through the pipeline.

        Returns what it adds to the mean cross-entropy over all replicas; 0 on ranks that do not know it.
        """
        size = self.config.data.batch_size // self.config.parallel.dp_size
        share = slice(self.dp_rank * size, (self.dp_rank + 1) * size)
        inputs, targets = (half[share].to(self.device) for half in batch)
        self._cross_entropies.clear()
        run(*([inputs] if self.has_first else []), target=targets if self.has_last else None, return_outputs=False)
        noted = self._cross_entropies
        mean = torch.stack(noted).mean() if noted else torch.zeros((), device=self.device)
        return mean / self.config.parallel.dp_size

    @property
    def _has_tied_copy(self) -> bool:
        """Whether the last stage has a copy of the first one's embedding."""
        return self.config.model.tie_weights and self.routing.num_stages > 1

    def _sum_tied_gradients(self) -> None:
        """Add what the copies of a tied embedding have each found."""
        if not self._has_tied_copy:
            return
        if self.has_first and self.has_last:
            first, last = _embedding_gradient(self.parts[0]), _embedding_gradient(self.parts[-1])
            last.copy_(first.add_(last))
        elif self.has_first:
            last_rank = self.routing.rank_of(self.routing.num_stages - 1)
            optim.sum_with_peer(_embedding_gradient(self.parts[0]), last_rank, self.pp)
        elif self.has_last:
            optim.sum_with_peer(_embedding_gradient(self.parts[-1]), self.routing.rank_of(0), self.pp)

    def _named_parameters(self, copies: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Of this rank's parts; without `copies`, those that do not count on another stage."""
        tied_copy = self.parts[-1].embedding if self.has_last and self._has_tied_copy else None
        for part in self.parts:
            for name, parameter in part.named_parameters():
                if copies or tied_copy is None or parameter is not tied_copy.weight:
                    yield name, parameter

    def _gradients(self, copies: bool = True) -> list[Tensor]:
        """This rank's parts of them; what is written into these is written into the gradients."""
        gradients = [parameter.grad for _, parameter in self._named_parameters(copies)]
        return [optim.local(gradient) for gradient in gradients if gradient is not None]

    def _sum_over_ranks(self, *values: Tensor) -> list[float]:
        stacked = torch.stack([value.to(self.device, torch.float64) for value in values])
        dist.all_reduce(stacked)
        return stacked.tolist()


def _first_voted_for(votes: list[float]) -> signal.Signals | None:
    return next((stop_signal for stop_signal, count in zip(STOP_SIGNALS, votes, strict=True) if count), None)


def _embedding_gradient(part: GPT) -> Tensor:
    assert part.embedding is not None
    assert part.embedding.weight.grad is not None
    return optim.local(part.embedding.weight.grad)
