"""A batch divided into microbatches of equally many rows; a padded one cut to the longest row of each microbatch."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec, split_args_kwargs_into_chunks
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

Shape = tuple[int, ...]
ShapeOf = Callable[..., Sequence[int]]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a module, by position and by name."""

SEQUENCE_DIM = 1


@dataclass(frozen=True)
class StepShapes:
    """Of a source, in each microbatch of one step.

    Attributes:
        padded_length: the sequence length before microbatches were cut, 0 where they were not.
    """

    by_microbatch: tuple[Shape, ...]
    padded_length: int = 0

    def padding(self, microbatch: int) -> int:
        """How many elements cutting has taken from one source."""
        shape = self.by_microbatch[microbatch]
        if not self.padded_length:
            return 0
        return math.prod(shape) // shape[SEQUENCE_DIM] * (self.padded_length - shape[SEQUENCE_DIM])


@dataclass(frozen=True)
class Division:
    """Into how many microbatches, and along which dimensions of the inputs: all tensors along the first, by default."""

    count: int
    args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None
    kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Inputs]:
        """Arguments by microbatch. ValueError where the rows do not divide."""
        return self._divide("inputs", args, kwargs, self.args_chunk_spec if args else None, self.kwargs_chunk_spec)

    def targets(self, target: Any) -> list[Any]:
        """Targets by microbatch. ValueError where the rows do not divide."""
        return [args[0] for args, _ in self._divide("targets", (target,), {})]

    def _divide(self, what: str, args: tuple[Any, ...], kwargs: dict[str, Any], *specs: Any) -> list[Inputs]:
        try:
            parts = list(zip(*split_args_kwargs_into_chunks(args, kwargs, self.count, *specs), strict=True))
        except RuntimeError:  # of torch.tensor_split: there are no rows
            parts = []
        shapes = [[tensor.shape for tensor in _tensors(part)] for part in parts]
        if len(parts) != self.count or any(others != shapes[0] for others in shapes):
            whole = " and ".join(str(list(tensor.shape)) for tensor in _tensors((args, kwargs)))
            raise ValueError(
                f"{what} of shape {whole} do not divide into {self.count} microbatches of equally many rows; the "
                f"number of rows must be a multiple of {self.count}"
            )
        return parts


@dataclass(frozen=True)
class Batch:
    """What a rank was given for a step: a whole batch, or microbatches that the caller has divided.

    Attributes:
        args: the input of the first stage's module; of no account on other ranks.
        kwargs: for the modules of all of the rank's stages.
        target: of no account but on the last stage's rank.
        row_lengths: on the first stage's rank, how much of each row of padded inputs is real; `[rows]`, integers.
        arg_mbs, kwarg_mbs, target_mbs: instead of `args`, `kwargs` and `target`, one for each microbatch.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: Any = None
    row_lengths: Tensor | None = None
    arg_mbs: Sequence[tuple[Any, ...]] | None = None
    kwarg_mbs: Sequence[dict[str, Any]] | None = None
    target_mbs: Sequence[Any] | None = None

    def inputs(self, division: Division, with_args: bool) -> list[Inputs]:
        """Arguments by microbatch, those by position only where a rank needs them.

        Raises:
            ValueError: where the rows do not divide, or where there are not as many microbatches as there must be.
        """
        self._check_divided(division.count)
        if self.arg_mbs is None and self.kwarg_mbs is None:
            return division.inputs(self.args if with_args else (), self.kwargs)
        args = self.arg_mbs if with_args and self.arg_mbs is not None else [()] * division.count
        return list(zip(args, self.kwarg_mbs or [{}] * division.count, strict=True))

    def targets(self, division: Division) -> list[Any] | None:
        """Targets by microbatch, None where there are none. ValueError where the rows do not divide."""
        if self.target_mbs is not None:
            return list(self.target_mbs)
        return None if self.target is None else division.targets(self.target)

    def _check_divided(self, count: int) -> None:
        divided = {"arg_mbs": self.arg_mbs, "kwarg_mbs": self.kwarg_mbs, "target_mbs": self.target_mbs}
        for name, microbatches in divided.items():
            if microbatches is not None and len(microbatches) != count:
                raise ValueError(f"{name} has {len(microbatches)} microbatches, the schedule was built for {count}")
        is_whole = bool(self.args) or bool(self.kwargs) or self.target is not None or self.row_lengths is not None
        if is_whole and any(microbatches is not None for microbatches in divided.values()):
            raise ValueError(
                "arg_mbs, kwarg_mbs and target_mbs are microbatches that are divided, and cut, already; what they come "
                "with must not be a whole batch or variable_seq_lengths"
            )


def sequence_length(values: Any) -> int:
    """The length T of the first tensor [B, T, …] among some values, 0 where there is no such dimension."""
    first = next(_tensors(values), None)
    return 0 if first is None or first.ndim <= SEQUENCE_DIM else first.shape[SEQUENCE_DIM]


def longest_rows(inputs: Sequence[Inputs], row_lengths: Tensor) -> list[int]:
    """The length of each microbatch's longest row, at least 1.

    Raises:
        ValueError: where inputs are not `[B, T, …]`, or where there is not one length from 0 to T for each row.
    """
    padded = sequence_length(inputs[0])
    if not padded:
        raise ValueError("variable_seq_lengths is for inputs [B, T, …]; the first input has no sequence dimension")
    rows = next(_tensors(inputs[0])).shape[0]
    lengths = _check_lengths(row_lengths, rows * len(inputs), padded)
    return [max(1, *lengths[start : start + rows]) for start in range(0, len(lengths), rows)]


def cut(values: Any, padded: int, length: int) -> Any:
    """Every tensor [B, padded, …] among some values as [B, length, …], contiguous; all else as it is."""
    return tree_map(lambda value: _cut(value, padded, length), values, is_leaf=_is_mask)


def level(outputs: Sequence[Any]) -> list[Any]:
    """Tensors [B, T, …] of different lengths T among outputs, padded with zeros to the longest; all else as it is."""
    leaves, structures = zip(*map(tree_flatten, outputs), strict=True) if outputs else ((), ())
    columns = [_level(column) for column in zip(*leaves, strict=True)]
    return [tree_unflatten([column[i] for column in columns], spec) for i, spec in enumerate(structures)]


def leading_shape(dims: int, width: int) -> Callable[..., Shape]:
    """A function from the first stage's arguments to a source's shape `[B, T, …, width]` of so many dimensions.

    All but the last are the leading dimensions of the first tensor.
    """

    def shape_of(*args: Any, **kwargs: Any) -> Shape:
        first = next(_tensors((args, kwargs)), None)
        if first is None:
            raise ValueError("the first stage runs on this rank, which was given no tensor as its input")
        if first.ndim < dims - 1:
            raise ValueError(
                f"the first input's shape {list(first.shape)} does not begin with the {dims - 1} leading dimensions of "
                "a source; say with shape_of which shape a source has for given inputs"
            )
        return (*first.shape[: dims - 1], width)

    return shape_of


def _check_lengths(row_lengths: Tensor, rows: int, padded: int) -> list[int]:
    if not isinstance(row_lengths, Tensor):
        raise ValueError(f"variable_seq_lengths must be a tensor of {rows} integers, got {type(row_lengths).__name__}")
    if row_lengths.shape != (rows,) or row_lengths.is_floating_point():
        raise ValueError(
            f"variable_seq_lengths must be one integer for each row of the batch, shape [{rows}]; got shape "
            f"{list(row_lengths.shape)}, {row_lengths.dtype}"
        )
    lengths: list[int] = row_lengths.tolist()
    for row, length in enumerate(lengths):
        if not 0 <= length <= padded:
            raise ValueError(f"variable_seq_lengths says {length} for row {row}; the inputs are padded to {padded}")
    return lengths


def _cut(value: Any, padded: int, length: int) -> Any:
    if not isinstance(value, Tensor) or value.ndim <= SEQUENCE_DIM or value.shape[SEQUENCE_DIM] != padded:
        return value
    return value.narrow(SEQUENCE_DIM, 0, length).contiguous()


def _pad(output: Tensor, length: int) -> Tensor:
    missing = length - output.shape[SEQUENCE_DIM]
    return nn.functional.pad(output, (0, 0) * (output.ndim - SEQUENCE_DIM - 1) + (0, missing)) if missing else output


def _level(outputs: Sequence[Any]) -> Sequence[Any]:
    if not all(isinstance(output, Tensor) and output.ndim > SEQUENCE_DIM for output in outputs):
        return outputs
    longest = max(output.shape[SEQUENCE_DIM] for output in outputs)
    return [_pad(output, longest) for output in outputs]


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values, is_leaf=_is_mask) if isinstance(leaf, torch.Tensor))


def _is_mask(value: Any) -> bool:
    return isinstance(value, BlockMask)
