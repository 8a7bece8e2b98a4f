"""What travels between pipeline ranks: payloads in one dtype, a header with each forward hop, a start-up agreement.

A forward hop is one int64 header and the state of the residual stream: sources in order, then the partial sum. Every
tensor of the stream has the wire dtype there, in both directions, whatever the dtype of the tensor or of its gradient.
A tally, where the stages keep one, comes last and is float32 both ways: it is small, and it counts.
Where that means a cast, all tensors of a hop travel in one contiguous buffer; where it does not, each travels as it is
and nothing is copied. Both ends know the format from their settings alone, and agree on those before the first send.
Nothing on the wire is ever unpickled.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from blockres.functional import pack, unpack

Shape = Sequence[int]

TALLY_DTYPE = torch.float32


@dataclass(frozen=True)
class HopFormat:
    """How the stream travels: the dtype that its tensors have in the stages and the one that they have on the wire."""

    dtype: torch.dtype
    wire_dtype: torch.dtype

    @property
    def packed(self) -> bool:
        return self.dtype != self.wire_dtype

    def messages(self, tensors: Sequence[Tensor], *tally: Tensor) -> list[Tensor]:
        """What to send for some tensors of any floating dtypes: contiguous, in the wire dtype, copied only to be so."""
        uncast = [tensor.to(TALLY_DTYPE).contiguous() for tensor in tally]
        if self.packed and tensors:
            return [pack(tensors, self.wire_dtype), *uncast]
        return [*(tensor.to(self.wire_dtype).contiguous() for tensor in tensors), *uncast]

    def receive(self, shapes: Sequence[Shape], device: torch.device, *tally: Shape) -> "Incoming":
        """Buffers for what `messages` makes of tensors of these shapes, and of a tally of that one, allocated now."""
        return Incoming(self, shapes, device, tally)


class Incoming:
    """The receive buffers of one hop."""

    def __init__(
        self, format_: HopFormat, shapes: Sequence[Shape], device: torch.device, tally: Sequence[Shape] = ()
    ) -> None:
        self._format, self._shapes = format_, shapes
        sizes: list[Shape] = list(shapes)
        if format_.packed and shapes:
            sizes = [(sum(torch.Size(shape).numel() for shape in shapes),)]
        self.messages = [torch.empty(size, dtype=format_.wire_dtype, device=device) for size in sizes]
        self.messages += [torch.empty(shape, dtype=TALLY_DTYPE, device=device) for shape in tally]

    def tensors(self) -> list[Tensor]:
        """The tensors that came in, in the dtype that they have in the stages."""
        if self._format.packed and self._shapes:
            packed, *tally = self.messages
            return [*unpack(packed, self._shapes, [self._format.dtype] * len(self._shapes)), *tally]
        return self.messages


class Header(NamedTuple):
    """What a forward hop says about itself.

    `wants_gradient` has one flag per tensor of the hop: only for those a gradient travels back.
    """

    step: int
    microbatch: int
    sending_stage: int
    sources_in_hop: int
    sources_that_exist: int
    has_partial: int
    elements: int
    wants_gradient: tuple[bool, ...]

    @staticmethod
    def length(units: int) -> int:
        """Numbers in the header of a hop of so many tensors."""
        return len(Header._fields) - 1 + units

    @staticmethod
    def decode(tensor: Tensor) -> "Header":
        numbers = tensor.tolist()
        fixed = len(Header._fields) - 1
        return Header._make([*numbers[:fixed], tuple(bool(flag) for flag in numbers[fixed:])])

    def encode(self, device: torch.device) -> Tensor:
        return torch.tensor([*self[:-1], *self.wants_gradient], dtype=torch.int64, device=device)

    def check(self, expected: "Header", receiving_stage: int) -> None:
        """Raise RuntimeError where this header, just received, is not the expected one (gradient flags aside)."""
        for field, got, want in zip(Header._fields[:-1], self, expected, strict=False):
            if got != want:
                raise RuntimeError(
                    f"stage {receiving_stage}, microbatch {expected.microbatch}: the hop that came in says "
                    f"{field.replace('_', ' ')} = {got}, expected {want}; the ranks no longer run the same pipeline"
                )


@dataclass(frozen=True)
class Link:
    """One neighbour in the pipeline's group."""

    peer: int
    group: dist.ProcessGroup | None

    def send_operations(self, messages: Sequence[Tensor]) -> list[dist.P2POp]:
        return [dist.P2POp(dist.isend, message, group=self.group, group_peer=self.peer) for message in messages]

    def receive_operations(self, messages: Sequence[Tensor]) -> list[dist.P2POp]:
        return [dist.P2POp(dist.irecv, message, group=self.group, group_peer=self.peer) for message in messages]


def post(operations: Sequence[dist.P2POp]) -> list[dist.Work]:
    """Start sends or receives, in order."""
    return [_post(operation) for operation in operations]


class Outbox:
    """The sends of one stage that are under way, and with them the memory that they send from.

    A schedule keeps the handles of its sends, and so every tensor sent, until the step is over. Here a hop is let go of
    once it is known to have arrived, or else when the next one is posted: on the CPU by waiting for it, which cannot
    deadlock since schedules order sends and receives as if every send blocked; on a GPU by asking, without stopping the
    host.
    """

    def __init__(self, device: torch.device) -> None:
        self._waits_for_previous = device.type == "cpu"
        self._pending: list[_Send] = []

    def post(self, operations: Sequence[dist.P2POp], microbatch: int | None = None) -> None:
        """Send; with `microbatch`, so that `arrived` can name it."""
        if self._waits_for_previous:
            self.flush()
        self._pending = [send for send in self._pending if not send.work.is_completed()]
        works = post(operations)
        self._pending += [
            _Send(work, operation.tensor, microbatch) for work, operation in zip(works, operations, strict=True)
        ]

    def arrived(self, microbatch: int) -> None:
        """The receiver has answered for this microbatch, so its sends are over."""
        for send in self._pending:
            if send.microbatch == microbatch:
                send.work.wait()
        self._pending = [send for send in self._pending if send.microbatch != microbatch]

    def flush(self) -> None:
        """Wait for all sends."""
        pending, self._pending = self._pending, []
        for send in pending:
            send.work.wait()

    def abandon(self) -> None:
        """Forget all sends, after a failure: the peer may never receive them."""
        self._pending = []


class _Send(NamedTuple):
    work: dist.Work
    message: Tensor  # the backend need not keep it
    microbatch: int | None


@dataclass(frozen=True)
class Traffic:
    """What a stage has sent since it was built or since `reset_traffic`.

    Forward goes to the next stage, backward to the one before. A unit is one tensor `[B, T, D]`; bytes are those of the
    payload, a tally's included; headers are counted apart, and so are the bytes of payload that were not sent since
    microbatches had been cut to their longest row (`variable_seq_lengths`).
    """

    forward_hops: int = 0
    forward_units: int = 0
    forward_bytes: int = 0
    backward_hops: int = 0
    backward_units: int = 0
    backward_bytes: int = 0
    header_bytes: int = 0
    saved_bytes: int = 0

    @property
    def bytes(self) -> int:
        """All that was sent."""
        return self.forward_bytes + self.backward_bytes + self.header_bytes

    def sent_forward(self, units: int, messages: Sequence[Tensor], header: Tensor, saved_bytes: int) -> "Traffic":
        return replace(
            self,
            forward_hops=self.forward_hops + 1,
            forward_units=self.forward_units + units,
            forward_bytes=self.forward_bytes + _bytes(messages),
            header_bytes=self.header_bytes + header.nbytes,
            saved_bytes=self.saved_bytes + saved_bytes,
        )

    def sent_backward(self, units: int, messages: Sequence[Tensor], saved_bytes: int) -> "Traffic":
        return replace(
            self,
            backward_hops=self.backward_hops + 1,
            backward_units=self.backward_units + units,
            backward_bytes=self.backward_bytes + _bytes(messages),
            saved_bytes=self.saved_bytes + saved_bytes,
        )

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))


def agree(settings: Mapping[str, Any], group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Make sure that all ranks of a group were given the same settings.

    A collective: every rank of the group calls it, and all come to the same end.

    Args:
        settings: what JSON can express, by name.

    Raises:
        ValueError: with the same message on every rank, naming the first setting that differs and both values.
    """
    texts = gather_texts(json.dumps(settings), group, device)
    expected = json.loads(texts[0])
    for rank, text in enumerate(texts):
        given = json.loads(text)
        for name in expected | given:
            here, there = (repr(settings[name]) if name in settings else "not set" for settings in (expected, given))
            if here != there:
                raise ValueError(
                    f"the pipeline's ranks were given different settings: {name} is {here} on rank 0 "
                    f"and {there} on rank {rank}; start all ranks with the same ones"
                )


def lost_neighbour(error: BaseException) -> bool:
    """Whether an exception says that a peer is gone, so that the cause is to be found there."""
    signs = ("closed by peer", "connection reset", "broken pipe", "timed out", "remote process exited")
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs)


def gather_texts(text: str, group: dist.ProcessGroup | None, device: torch.device) -> list[str]:
    """A text from each rank of a group, in order; a collective."""
    own = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    ranks = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(lengths, torch.tensor([own.numel()], dtype=torch.int64, device=device), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: own.numel()] = own
    gathered = [torch.zeros_like(padded) for _ in range(ranks)]
    dist.all_gather(gathered, padded, group=group)
    return [bytes(row[: int(length)].tolist()).decode() for row, length in zip(gathered, lengths, strict=True)]


def _post(operation: dist.P2POp) -> dist.Work:
    peer = {"group_dst" if operation.op is dist.isend else "group_src": operation.group_peer}
    return operation.op(operation.tensor, group=operation.group, tag=operation.tag, **peer)


def _bytes(messages: Sequence[Tensor]) -> int:
    return sum(message.nbytes for message in messages)


def _values(traffic: Traffic) -> tuple[int, ...]:
    return tuple(getattr(traffic, name) for name in Traffic.__dataclass_fields__)
