"""How all ranks begin a step together: the shapes of its microbatches travel once, and any rank can refuse its batch.

That takes one all-reduce of a few integers: the first stage's rank adds the shapes, the last one's the length of its
targets, and each of them whether it refuses. Where nobody does, nothing else is exchanged, and all ranks size this
step's buffers by the same table. Where somebody does, the reason goes to all of them, and all fail alike before
anything of the step has been sent. The integers stay off a GPU if the group has a backend for CPU tensors
("cpu:gloo,cuda:nccl"); with NCCL alone the host waits for them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blockres.pipeline.batches import (
    SEQUENCE_DIM,
    Batch,
    Division,
    Inputs,
    Shape,
    ShapeOf,
    StepShapes,
    cut,
    leading_shape,
    longest_rows,
    sequence_length,
)
from blockres.pipeline.stage import BlockResStage
from blockres.pipeline.wire import gather_texts, lost_neighbour


@dataclass
class Microbatches:
    """One rank's share of a step: args are empty but on the first stage's rank, targets None but on the last's.

    Attributes:
        shapes: of a source in each; zeros where this is not known yet.
        padded_length: before they were cut, 0 where they were not or where this is not known yet.
    """

    inputs: list[Inputs]
    shapes: list[Shape]
    padded_length: int = 0
    targets: list[Any] | None = None

    @property
    def args(self) -> list[tuple[Any, ...]]:
        return [args for args, _ in self.inputs]

    @property
    def kwargs(self) -> list[dict[str, Any]]:
        return [kwargs for _, kwargs in self.inputs]


class StepStart:
    """Begins each step of a pipeline, training or evaluation, on all ranks alike.

    Args:
        stages: all of this rank's.
        division: into microbatches, the same number on all ranks.
        shape_of: called on the first stage's rank with a microbatch's inputs, as that stage's module is; the shape that
            a source has for them. Default: the leading dimensions of the first tensor.
        needs_target: a training step needs a target on the last stage's rank.
    """

    def __init__(
        self,
        stages: Sequence[BlockResStage],
        division: Division,
        shape_of: ShapeOf | None = None,
        needs_target: bool = False,
    ) -> None:
        self.stages = stages
        self._division, self._needs_target = division, needs_target
        self._dims, self._width = len(stages[0].microbatch_shape), stages[0].microbatch_shape[-1]
        self._shape_of = shape_of or leading_shape(self._dims, self._width)
        self._agreed = False

    @contextmanager
    def step(self, batch: Batch, training: bool) -> Iterator[Microbatches]:
        """While it lasts, the stages have the shapes of the step.

        Raises:
            ValueError: on all ranks alike, where they were given different settings, where one refuses its batch, or
                where some train and others evaluate.
        """
        try:
            self._agree(training)
            microbatches, shapes = self._exchange(batch, training)
        except RuntimeError as error:
            if not lost_neighbour(error):
                raise
            raise RuntimeError(
                f"pipeline rank {self.stages[0].group_rank} lost another rank at the start of a step; the cause is in "
                "what that rank printed last"
            ) from error
        for stage in self.stages:
            stage.step_shapes = shapes
        try:
            yield microbatches
        finally:
            for stage in self.stages:
                stage.step_shapes = None

    def _agree(self, training: bool) -> None:
        """Once: what changes from step to step is exchanged at the start of each."""
        for stage in self.stages:
            stage.has_backward = training
        if not self._agreed:
            self.stages[0].agree_on_settings(self._division.count)
            self._agreed = True

    def _exchange(self, batch: Batch, training: bool) -> tuple[Microbatches, StepShapes]:
        mine, refusal = self._divide(batch, training)
        counts = (refusal is not None, training, mine.padded_length, sequence_length(mine.targets))
        total = self._sum([*counts, *(size for shape in mine.shapes for size in shape)])
        refused, trained, padded_length, target_length = total[: len(counts)]
        if refused:
            raise self._refusal(refusal) from refusal
        self._check_alike(trained, padded_length, target_length)
        sizes = iter(total[len(counts) :])
        shapes = StepShapes(tuple(zip(*[sizes] * self._dims, strict=True)), padded_length)
        if padded_length:
            lengths = [shape[SEQUENCE_DIM] for shape in shapes.by_microbatch]
            # Once more where it was measured, which changes nothing.
            mine.inputs = _cut_all(mine.inputs, padded_length, lengths)
            mine.targets = mine.targets and _cut_all(mine.targets, padded_length, lengths)
        return mine, shapes

    def _divide(self, batch: Batch, training: bool) -> tuple[Microbatches, Exception | None]:
        """This rank's share of the batch, or why it cannot have one."""
        mine = Microbatches([], [(0,) * self._dims] * self._division.count)
        is_first, is_last = any(stage.is_first for stage in self.stages), any(stage.is_last for stage in self.stages)
        try:
            mine.inputs = batch.inputs(self._division, with_args=is_first)
            if is_last:
                mine.targets = batch.targets(self._division)
                if mine.targets is None and training and self._needs_target:
                    raise ValueError("the last stage runs on this rank, which was given no target for the loss")
            if is_first:
                self._measure(mine, batch.row_lengths)
        except Exception as error:  # whatever a user's shape_of raises: the others wait to hear of it
            return mine, error
        return mine, None

    def _measure(self, mine: Microbatches, row_lengths: Tensor | None) -> None:
        """On the first stage's rank: cut the inputs if they are padded, and find the shapes."""
        if row_lengths is not None:
            mine.padded_length = sequence_length(mine.inputs[0])
            mine.inputs = _cut_all(mine.inputs, mine.padded_length, longest_rows(mine.inputs, row_lengths))
        mine.shapes = [self._shape(*inputs) for inputs in mine.inputs]
        if row_lengths is not None:
            self._check_cut(mine)

    def _shape(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shape:
        shape = tuple(self._shape_of(*args, **kwargs))
        if len(shape) != self._dims or min(shape) < 1 or shape[-1] != self._width:
            raise ValueError(
                f"a source would have the shape {list(shape)} for these inputs; the stages were set up for "
                f"{self._dims} dimensions, all of them positive, with {self._width} in the last"
            )
        return shape

    def _check_cut(self, microbatches: Microbatches) -> None:
        for inputs, shape in zip(microbatches.inputs, microbatches.shapes, strict=True):
            if self._dims <= SEQUENCE_DIM + 1 or shape[SEQUENCE_DIM] != sequence_length(inputs):
                raise ValueError(
                    f"variable_seq_lengths needs sources [B, T, …, {self._width}] as long as the inputs, of which one "
                    f"has the length {sequence_length(inputs)} in a microbatch with sources {list(shape)}"
                )

    def _sum(self, numbers: list[int]) -> list[int]:
        message = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        dist.all_reduce(message, group=self._group)
        return [int(number) for number in message.tolist()]

    def _refusal(self, own: Exception | None) -> ValueError:
        texts = gather_texts("" if own is None else _in_words(own), self._group, self._device)
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
        return ValueError(f"pipeline rank {rank} refused the batch, and no rank has begun the step: {text}")

    def _check_alike(self, trained: int, padded_length: int, target_length: int) -> None:
        ranks = dist.get_world_size(self._group)
        if trained not in (0, ranks):
            raise ValueError(
                f"{trained} of the pipeline's {ranks} ranks began a training step, the others an evaluation; all must "
                "do the same"
            )
        if padded_length and target_length not in (0, padded_length):
            raise ValueError(
                f"the inputs are padded to {padded_length}, the targets to {target_length}; with variable_seq_lengths "
                "both are cut alike, so they must be equally long"
            )

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self.stages[0].group

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu") if "cpu:" in dist.get_backend_config(self._group) else self.stages[0].device


def _cut_all(values: list[Any], padded: int, lengths: list[int]) -> list[Any]:
    return [cut(value, padded, length) for value, length in zip(values, lengths, strict=True)]


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) and str(error) else f"{type(error).__name__}: {error}"
