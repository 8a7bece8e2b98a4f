"""The residual stream for inference: one launch a sublayer, over a bank that is allocated once.

Attention Residuals attend over depth, each token by itself, so nothing is kept from one token to the next. What is
allocated ahead is the memory of one forward, the bank: a slot for the embedding and for each block. Sources are written
there once and are not moved again.

Every read is one `blockres.functional.attn_res_step`: n + 3 [T, D] reads and writes per sublayer, with n sources, where
the two phases of training make N / S + 5 on average, since they read a completed block once for all S sublayers of the
next. One step is the path for any number of tokens all the same. In decoding, a token's rows are few, and a launch
costs more than reading them. In a prefill, memory is what is short: this needs the bank and two rows a token, where
phase 1 holds outputs for all S sublayers of a block. And a token's result does not depend on how many are beside it.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockres import checks
from blockres.functional import attn_res_step
from blockres.norms import Norm, norm_arguments
from blockres.streams import Stream

if TYPE_CHECKING:
    from blockres.modules import BlockAttnRes


class Bank:
    """The memory of an inference stream, for up to `max_tokens` tokens; made by `BlockAttnRes.bank`.

    A stream opened on it allocates nothing: its sources, its running sum and what it reads lie here, at addresses that
    follow from the number of tokens alone. It serves one stream at a time, any number of them one after the other; an
    older stream is refused when a newer one has been opened.

    What a stream returns is overwritten later: a sublayer's input by the second read after it (or by another one at the
    same sublayer), the partial of `state()` by the next write, and all of it, the output state too, by the next stream.
    Clone what is to be kept. A sublayer may return its input as its update.

    Not part of the module's state: it is neither saved nor moved with it.
    """

    def __init__(
        self, num_slots: int, max_tokens: int, dim: int, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        with torch.inference_mode(False):  # memory made under inference mode could not be used outside of it
            self.slots = torch.empty(num_slots, max_tokens, dim, dtype=dtype, device=device)
            self._inputs = [torch.empty(max_tokens * dim, dtype=dtype, device=device) for _ in range(2)]
        self._streams = 0

    @property
    def max_tokens(self) -> int:
        return self.slots.shape[1]

    def open(self, leading: Sequence[int], num_slots: int, like: Tensor) -> "_InBank":
        """Memory for a stream of rows `[*leading, D]`.

        Raises:
            ValueError: where the stream does not fit into this bank.
        """
        slots, tokens = self.slots, math.prod(leading)
        if (slots.dtype, slots.device) != (like.dtype, like.device):
            raise ValueError(
                f"the stream is {like.dtype} on {like.device}, the bank is {slots.dtype} on {slots.device}: make one "
                f"with residual.bank(…, dtype={like.dtype}, device={str(like.device)!r})"
            )
        if slots.shape[0] < num_slots or slots.shape[2] != like.shape[-1]:
            raise ValueError(
                f"the stream needs {num_slots} slots of D = {like.shape[-1]}, the bank has {slots.shape[0]} of D = "
                f"{slots.shape[2]}: it was made by another BlockAttnRes"
            )
        if tokens > self.max_tokens:
            raise ValueError(
                f"the stream has {tokens} tokens, the bank is for at most {self.max_tokens}: make a larger one, or "
                f"give the tokens in chunks of that size"
            )
        self._streams += 1
        return _InBank(self, slots[:, :tokens].view(slots.shape[0], *leading, slots.shape[2]), self._streams)

    def check_turn(self, number: int) -> None:
        """Refuse every stream but the one that was opened last."""
        if number != self._streams:
            raise RuntimeError("another stream has been opened on this stream's bank, which serves one at a time")

    def buffer(self, which: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """One of two, as rows of any dtype that is not wider than the bank's."""
        if dtype.itemsize > self.slots.dtype.itemsize:
            raise ValueError(
                f"a bank of {self.slots.dtype} has no room to read {dtype}: read without out_dtype, or make the stream "
                f"and its bank {dtype}"
            )
        return self._inputs[which].view(dtype)[: math.prod(shape)].view(shape)


class _InBank:
    """What the bank's stream of this number sees of it, as long as it is the latest."""

    def __init__(self, bank: Bank, slots: Tensor, number: int) -> None:
        self._bank, self._slots, self._number = bank, slots, number

    @property
    def slots(self) -> Tensor:
        """`[slots, ..., D]`"""
        self._bank.check_turn(self._number)
        return self._slots

    def input(self, position: int, dtype: torch.dtype) -> Tensor:
        """Not the memory that the sublayer before it has read, which may be its update."""
        return self._bank.buffer(position % 2, self.slots.shape[1:], dtype)

    def running_sum(self, place: int) -> Tensor:
        """The slot that the open block will have: completing it costs nothing."""
        return self.slots[place]

    def with_slot(self, place: int) -> "_InBank":
        return self


class _OfItsOwn:
    """Memory of one stream: slots allocated once, fresh tensors for all that it returns, which is never overwritten.

    A stream's state may be held and read again after the stream has gone on (recorded hidden states are), so that two
    streams may come to write a block into one slot. `filled` slots are never written again: the second one moves.
    """

    def __init__(self, slots: Tensor, filled: int) -> None:
        self.slots, self._filled = slots, filled

    def input(self, position: int, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(self.slots[0], dtype=dtype)

    def running_sum(self, place: int) -> Tensor:
        return torch.empty_like(self.slots[0])

    def with_slot(self, place: int) -> "_OfItsOwn":
        """Memory whose slot `place` may be written, with the same sources before it."""
        if self._filled > place:
            moved = torch.empty_like(self.slots)
            moved[:place].copy_(self.slots[:place])
            return _OfItsOwn(moved, place + 1)
        self._filled = place + 1
        return self


class InferenceStream(Stream):
    """The stream of a network with Block AttnRes that is not trained; made by `BlockAttnRes.stream`.

    It takes the dtype of the embedding: updates of another dtype are added in the stream's.
    """

    def __init__(
        self, residual: "BlockAttnRes", sources: tuple[Tensor, ...], partial: Tensor | None, bank: Bank | None
    ) -> None:
        super().__init__(residual)
        checks.source_list(sources)
        first, blocks = sources[0], -(-residual.stop // self._size)
        if bank is None:
            slots = torch.empty((blocks + 1, *first.shape), dtype=first.dtype, device=first.device)
            self._memory: _InBank | _OfItsOwn = _OfItsOwn(slots, len(sources))
        else:
            self._memory = bank.open(first.shape[:-1], blocks + 1, first)
        for slot, source in zip(self._memory.slots.unbind(0), sources, strict=False):
            slot.copy_(source)
        self._given, self._count = sources, len(sources)
        self._partial = None if partial is None else partial.to(first.dtype).contiguous()

    def read(self, norm: Norm | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        """The next sublayer's input `[..., D]`; after the last sublayer, the network's output state.

        `norm` (an `nn.RMSNorm` or `(weight, eps)`), the cast to `out_dtype` and the add of what was written last are
        fused into the aggregation. What is returned is a fresh tensor, or lies in the bank that the stream was given.
        """
        aggregation = self._residual.aggregation(self.position)
        dtype = self._memory.slots.dtype
        norm_weight, norm_eps = norm_arguments(norm, self._residual.dim, dtype)
        out = self._memory.input(self.position, out_dtype or dtype)
        total = None if self._update is None else self._target()
        _, self._partial = attn_res_step(
            self._memory.slots[: self._count],
            aggregation.query,
            aggregation.key_weight,
            partial=self._partial,
            update=self._update,
            total=total,
            out=out,
            eps=aggregation.eps,
            scale=aggregation.scale,
            norm_weight=norm_weight,
            norm_eps=norm_eps,
        )
        self._added()
        return out

    def weights(self) -> Tensor:
        """The softmax weights `[N, ...]` with which the next `read` weighs the sources, the partial sum last."""
        sources = self._completed()
        readable = sources if self._partial is None else (*sources, self._partial)
        _, weights = self._residual.aggregation(self.position)(readable, return_weights=True)
        return weights

    def write(self, update: Tensor) -> None:
        """Add a sublayer's output `[..., D]`; the block's last one makes the block a source.

        The next read adds it: until then it must not change.
        """
        self._settle()
        self._accept(update, self._memory.slots[0])
        self._update = update

    def state(self) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """`(sources, partial)`: the completed sources, and the open block's sum if a block is open.

        The sources that the stream was opened with are those that were given; the others are slots of the bank.
        """
        given, completed = self._given, self._completed()
        return (*given, *completed[len(given) :]), self._partial

    @property
    def _completes_a_block(self) -> bool:
        """Whether the update that is to be added is a block's last."""
        return self.position % self._size == 0

    def _completed(self) -> tuple[Tensor, ...]:
        self._settle()
        return self._memory.slots[: self._count].unbind(0)

    def _target(self) -> Tensor:
        """Where the sum of partial and update goes: into the block's slot where that completes it."""
        if not self._completes_a_block:
            return self._memory.running_sum(self._count)
        self._memory = self._memory.with_slot(self._count)
        return self._memory.slots[self._count]

    def _settle(self) -> None:
        """Add what was written last, where no read has done so."""
        if self._update is None:
            return
        total = self._target()
        if self._partial is None:
            total.copy_(self._update)
        else:
            torch.add(self._partial, self._update, out=total)
        self._partial = total
        self._added()

    def _added(self) -> None:
        if self._update is not None and self._completes_a_block:
            self._count, self._partial = self._count + 1, None
        self._update = None
